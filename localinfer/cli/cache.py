"""The `localinfer cache` command."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import click

from localinfer.cli.options import flag, option
from localinfer.errors import RequestError


class KeptModel(NamedTuple):
    """What one model, with its settings and version, keeps on disk; last_used in seconds since 1970."""

    name: str
    kv_type: str
    num_pages: int
    num_bytes: int
    last_used: float


@click.command("cache")
@option("--disk-cache-folder", "FOLDER", "Where it is kept. Default: your cache folder.")
@flag("--clear", "Delete all of it.")
def cache_command(disk_cache_folder: str | None, clear: bool) -> None:
    """Say what is kept on disk of conversations, or delete it.

    It can be deleted at any time: what is missing is computed again.
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
    for kept in sorted(kept_models(folder), key=lambda kept: -kept.last_used):
        used = datetime.fromtimestamp(kept.last_used).strftime("%Y-%m-%d %H:%M")
        name = neutralise_controls(kept.name)
        click.echo(f"  {name} ({kept.kv_type}): {kept.num_pages:,} pages, {kept.num_bytes:,} bytes, last used {used}")


def kept_models(folder: Path) -> Iterator[KeptModel]:
    """What lies in a cache folder, by model, as the descriptions in it say."""
    from localinfer.persistence.budget import DESCRIPTION, stored_files
    from localinfer.persistence.fingerprint import read_description

    files = list(stored_files(folder))
    for description in folder.glob(f"*/{DESCRIPTION}"):
        try:
            fields = read_description(description)
            name, kv_type = fields["model"], (fields["parts"].get("key-value layout", "").split() or ["unknown"])[0]
        except (OSError, ValueError):
            name, kv_type = "a model whose description is damaged", "unknown"
        pages = [file for file in files if Path(file.path).is_relative_to(description.parent)]
        pages = [file for file in pages if file.path.endswith((".page", ".window"))]
        if pages:
            last_used = max(file.used_ns for file in pages) / 1e9
            num_pages = sum(file.path.endswith(".page") for file in pages)
            yield KeptModel(name, kv_type, num_pages, sum(file.num_bytes for file in pages), last_used)
