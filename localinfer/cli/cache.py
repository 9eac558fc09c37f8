"""The `localinfer cache` command."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click

from localinfer.cli.options import flag, option
from localinfer.errors import RequestError


@click.command("cache")
@option("--disk-cache-folder", "FOLDER", "Location. Default: your cache folder.")
@flag("--clear", "Delete everything in it.")
def cache_command(disk_cache_folder: str | None, clear: bool) -> None:
    """Show the prompt cache on disk, or delete it.

    It can be deleted at any time: missing entries are computed again.
    """
    from localinfer.persistence.budget import clear as clear_folder
    from localinfer.persistence.budget import stored_files
    from localinfer.persistence.prompt_cache import conversations_folder
    from localinfer.terminal import neutralise_controls

    folder = conversations_folder(disk_cache_folder)
    if folder is None:
        raise RequestError("this user has no cache folder; name one with --disk-cache-folder")
    if clear:
        click.echo(f"deleted {clear_folder(folder):,} bytes from {neutralise_controls(str(folder))}")
        return
    total = sum(file.num_bytes for file in stored_files(folder))
    click.echo(f"{neutralise_controls(str(folder))}: {total:,} bytes")
    for last_used, line in sorted(_models(folder), reverse=True):
        click.echo(f"{line}, last used {datetime.fromtimestamp(last_used).strftime('%Y-%m-%d %H:%M')}")


def _models(folder: Path) -> Iterator[tuple[float, str]]:
    """When the entries of each model, settings and version were last used, and a line that describes them."""
    from localinfer.persistence.budget import DESCRIPTION, stored_files
    from localinfer.persistence.fingerprint import read_description
    from localinfer.terminal import neutralise_controls

    files = list(stored_files(folder))
    for description in folder.glob(f"*/{DESCRIPTION}"):
        try:
            fields = read_description(description)
            name, kv_type = fields["model"], (fields["parts"].get("key-value layout", "").split() or ["unknown"])[0]
        except (OSError, ValueError):
            name, kv_type = "a model whose description is damaged", "unknown"
        found = [file for file in files if Path(file.path).is_relative_to(description.parent)]
        found = [file for file in found if file.path.endswith((".page", ".window", ".state"))]
        if found:
            num_pages = sum(file.path.endswith(".page") for file in found)
            num_bytes = sum(file.num_bytes for file in found)
            num_snapshots = sum(file.path.endswith(".state") for file in found)
            plural = "" if num_snapshots == 1 else "s"
            states = f", {num_snapshots:,} snapshot{plural} of recurrent states" if num_snapshots else ""
            line = f"  {neutralise_controls(name)} ({kv_type}): {num_pages:,} pages{states}, {num_bytes:,} bytes"
            yield max(file.used_ns for file in found) / 1e9, line
