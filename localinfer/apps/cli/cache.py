"""The `localinfer cache` command."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click

from localinfer.apps.cli.options import flag, option
from localinfer.errors import RequestError


@click.command("cache")
@option("--disk-cache-folder", "FOLDER", "Location of the prompt cache. Default: your cache folder.")
@flag("--clear", "Delete everything in it, and say what else is kept.")
@flag("--typed-lines", "With --clear: also delete the lines typed in chats, which the arrow keys recall.")
@flag("--responses", "With --clear: also delete the responses and conversations kept by servers.")
def cache_command(disk_cache_folder: str | None, clear: bool, typed_lines: bool, responses: bool) -> None:
    """Show the prompt cache on disk, or delete it.

    It can be deleted at any time: missing entries are computed again. Saved conversations are no part of it:
    'localinfer sessions' lists and deletes them.
    """
    from localinfer.storage.budget import clear as clear_folder, stored_files
    from localinfer.storage.prompt_cache import conversations_folder
    from localinfer.terminal import neutralise_controls

    for name, is_given in (("--typed-lines", typed_lines), ("--responses", responses)):
        if is_given and not clear:
            raise RequestError(f"{name} says what --clear deletes as well; give both")
    folder = conversations_folder(disk_cache_folder)
    if folder is None:
        raise RequestError("this user has no cache folder; name one with --disk-cache-folder")
    if clear:
        click.echo(f"deleted {clear_folder(folder):,} bytes from {neutralise_controls(str(folder))}")
        lines = _clear_typed_lines() if typed_lines else _typed_lines()
        for line in (lines, _saved_conversations(), _responses(disk_cache_folder, clear=responses)):
            if line is not None:
                click.echo(line)
        return
    files = list(stored_files(folder))
    total = sum(file.num_bytes for file in files)
    click.echo(f"{neutralise_controls(str(folder))}: {total:,} bytes")
    embeddings = [file.num_bytes for file in files if file.path.endswith(".embedding")]
    if embeddings:
        click.echo(f"  embeddings of pictures and sounds: {sum(embeddings):,} bytes")
    for last_used, line in sorted(_models(folder), reverse=True):
        click.echo(f"{line}, last used {datetime.fromtimestamp(last_used).strftime('%Y-%m-%d %H:%M')}")


def _clear_typed_lines() -> str | None:
    """Empty the file of typed lines; a line that says so. Raises: RequestError if the system refuses."""
    path = _typed_lines_file()
    if path is None:
        return None
    num_bytes = path.stat().st_size
    try:
        # A chat that runs appends to it: a new file would be made with the user's default mode.
        os.truncate(path, 0)
    except OSError as error:
        raise RequestError(f"{path} cannot be emptied: {error.strerror or error}; delete it yourself") from error
    return f"deleted {num_bytes:,} bytes of typed lines from {path}"


def _typed_lines() -> str | None:
    """A line that says that typed lines are kept, if there are any."""
    path = _typed_lines_file()
    if path is None:
        return None
    return f"kept {path.stat().st_size:,} bytes of lines typed in chats, in {path}; --clear --typed-lines deletes them"


def _typed_lines_file() -> Path | None:
    from localinfer.system.folders import user_folder

    state = user_folder("state")
    path = None if state is None else state / "chat-history"
    return path if path is not None and path.is_file() and path.stat().st_size else None


def _saved_conversations() -> str | None:
    """A line that says how many conversations are kept, if there are any."""
    from localinfer.storage.conversations import open_store

    store = open_store()
    count = 0 if store is None else len(store.list())
    if store is None or not count:
        return None
    plural = "" if count == 1 else "s"
    return f"kept {count:,} saved conversation{plural} in {store.folder}; 'localinfer sessions' lists and deletes them"


def _responses(parent: str | None, *, clear: bool) -> str | None:
    """A line that says that servers keep responses, or that they were deleted; None if there are none."""
    from localinfer.storage.response_store import clear_responses, responses_folder, stored_responses

    folder = responses_folder(parent)
    num_bytes = 0 if folder is None else sum(file.num_bytes for file in stored_responses(folder))
    if folder is None or not num_bytes:
        return None
    if clear:
        return f"deleted {clear_responses(folder):,} bytes of responses and conversations of servers from {folder}"
    return (
        f"kept {num_bytes:,} bytes of responses and conversations of servers, in {folder}; --clear --responses deletes "
        "them"
    )


def _models(folder: Path) -> Iterator[tuple[float, str]]:
    """Yield the last use of the entries of each model, settings and version, and a line that describes them."""
    from localinfer.storage.budget import DESCRIPTION, stored_files
    from localinfer.storage.fingerprint import read_description
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
