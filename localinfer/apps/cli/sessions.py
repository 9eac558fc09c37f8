"""The `localinfer sessions` command: the saved conversations."""

import io
import json
import shutil
import sys
from contextlib import redirect_stderr
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localinfer.apps.cli.options import flag, option
from localinfer.errors import LocalinferError, RequestError
from localinfer.terminal import ModelOutput, check_text, neutralise_controls

if TYPE_CHECKING:
    from localinfer.storage.conversations import ConversationStore, ConversationSummary

_FORMATS = {".json": "json", ".md": "markdown", ".markdown": "markdown"}


def complete_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names that begin with the typed text, for the completion of a shell, which shows no warnings."""
    with redirect_stderr(io.StringIO()):
        try:
            names = [summary.name for summary in _store().list()]
        except LocalinferError:
            return []
    return [name for name in names if name.casefold().startswith(incomplete.casefold())]


def _store() -> "ConversationStore":
    from localinfer.storage.conversations import open_store

    store = open_store()
    if store is None:
        raise RequestError("this user has no home folder, in which conversations would be saved; set HOME")
    return store


@click.group("sessions", invoke_without_command=True)
@flag("--json as_json", "Print one JSON array.")
@click.pass_context
def sessions_command(context: click.Context, as_json: bool) -> None:
    """List the saved conversations, or show, rename, delete or export one.

    The last changed is first. NAME is a conversation's name or id; 'localinfer chat --session NAME' resumes it.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"--json lists; leave it out before {context.invoked_subcommand!r}.", context)
        return
    store = _store()
    summaries = store.list()
    if as_json:
        click.echo(json.dumps([_fields(summary) for summary in summaries], ensure_ascii=False, indent=1))
    elif summaries:
        _print_table(summaries)
    else:
        click.echo(f"no conversation is saved in {_plain(str(store.folder))}; 'localinfer chat' begins one")


@sessions_command.command("show")
@click.argument("name", metavar="NAME", shell_complete=complete_name)
def show_session_command(name: str) -> None:
    """Print a conversation as Markdown."""
    output = ModelOutput(sys.stdout, is_terminal=sys.stdout.isatty())
    output.write(_store().load(name).to_markdown())


@sessions_command.command("rename")
@click.argument("old", metavar="OLD", shell_complete=complete_name)
@click.argument("new", metavar="NEW")
def rename_session_command(old: str, new: str) -> None:
    """Give a conversation another name, which no other may have."""
    _store().rename(old, check_text(new, "NEW"))
    click.echo(f"renamed {_plain(old)} to {_plain(new)}")


@sessions_command.command("delete")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_name)
def delete_session_command(names: tuple[str, ...]) -> None:
    """Delete conversations, at once and without a question.

    The prompt cache may keep what was computed of them: 'localinfer cache --clear' deletes that.
    """
    store = _store()
    for name in names:
        store.delete(name)
        click.echo(f"deleted {_plain(name)}")


@sessions_command.command("export")
@click.argument("name", metavar="NAME", shell_complete=complete_name)
@option("-o --output", "FILE", "Where to; '-' is standard output.", required=True)
@option(
    "--format format_name",
    None,
    "Default: by the suffix of FILE, else markdown.",
    type=click.Choice(["markdown", "json"]),
)
def export_session_command(name: str, output: str, format_name: str | None) -> None:
    """Write a conversation to a file, as Markdown to read or as JSON with everything that is saved."""
    from localinfer.system.files import OutputFile

    conversation = _store().load(name)
    wanted = format_name or _FORMATS.get(Path(output).suffix.lower(), "markdown")
    text = conversation.to_json() if wanted == "json" else conversation.to_markdown()
    if output == "-":
        ModelOutput(sys.stdout, is_terminal=sys.stdout.isatty()).write(text)
        return
    with OutputFile(output, is_private=True) as file:
        file.write(text.encode("utf-8", "replace"))


def _fields(summary: "ConversationSummary") -> dict[str, str | int]:
    return {
        "id": summary.id,
        "name": summary.name,
        "model": summary.model,
        "messages": summary.num_messages,
        "first_words": summary.first_words,
        "created": summary.created.isoformat(),
        "changed": summary.changed.isoformat(),
        "bytes": summary.num_bytes,
    }


def _print_table(summaries: "list[ConversationSummary]") -> None:
    """One line each, cut at the width of a terminal."""
    from localinfer.apps.terminal.display_width import cut_to_width, most_columns
    from localinfer.storage.conversations import model_label

    def padded(text: str, width: int) -> str:
        return text + " " * (width - most_columns(text))

    rows = [("name", "model", "messages", "last change", "first words")]
    for summary in summaries:
        when = ago(summary.changed, datetime.now(UTC))
        name, model, first_words = map(_plain, (summary.name, model_label(summary.model), summary.first_words))
        rows.append((name, model, f"{summary.num_messages:,}", when, first_words))
    widths = [max(most_columns(row[column]) for row in rows) for column in range(4)]
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name, model, num_messages, when, first_words in rows:
        number = num_messages.rjust(widths[2])
        line = (
            f"{padded(name, widths[0])}  {padded(model, widths[1])}  {number}  {padded(when, widths[3])}  {first_words}"
        )
        click.echo((line if most is None else cut_to_width(line, most, mark="")).rstrip())


def ago(time: datetime, now: datetime) -> str:
    """A time relative to now, in words; from a week on the local date."""
    seconds = (now - time).total_seconds()
    if seconds < 60:
        return "just now"
    for unit, length, limit in (("minute", 60, 3600), ("hour", 3600, 86400), ("day", 86400, 7 * 86400)):
        if seconds < limit:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return time.astimezone().strftime("%Y-%m-%d")


def _plain(text: str) -> str:
    """A text of a file on one line of a terminal."""
    return neutralise_controls(text).replace("\n", " ").replace("\t", " ")
