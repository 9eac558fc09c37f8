"""The `localinfer completion` command, and what shells ask for when Tab is pressed."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import BashComplete, CompletionItem, ShellComplete, get_completion_class, split_arg_string

from localinfer.apps.cli.models import known_models

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    # A generic class to checkers of types only, before click 8.5.
    _TextType = click.ParamType

VARIABLE = "_LOCALINFER_COMPLETE"
"""The scripts set it to `SHELL_complete`, with the words so far in COMP_WORDS and COMP_CWORD."""

_SHELLS = ("bash", "zsh", "fish")
_START = {
    "bash": "echo 'eval \"$(localinfer completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(localinfer completion zsh)\"' >> ~/.zshrc",
    "fish": "localinfer completion fish > ~/.config/fish/completions/localinfer.fish",
}
_MODELS = ("MODEL", "PATH", "BASE", "CANDIDATE", "SOURCE")
_FILES = ("FILE", "FOLDER", "TARGET")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
@click.pass_context
def completion_command(context: click.Context, shell: str | None) -> None:
    """Print a script that completes commands, options, files and names of models in SHELL.

    Without SHELL: how to switch it on, for each.
    """
    if shell is None:
        for name in _SHELLS:
            click.echo(f"{name + ':':<6}{_START[name]}")
        return
    click.echo(_completer(shell, context.find_root().command).source(), nl=False)


def complete(group: click.Command) -> bool:
    """Answer a shell that asks for completions, on stdout; False if none does."""
    shell, _, instruction = os.environ.get(VARIABLE, "").partition("_")
    if shell not in _SHELLS or instruction != "complete":
        return False
    _complete_values(group)
    click.echo(_completer(shell, group).complete())
    sys.stdout.flush()
    return True


class _Bash(BashComplete):
    """Bash splits words at colons, which names of models have: they are put together again."""

    def source(self) -> str:
        # The check of bash's version in between would start a bash.
        return ShellComplete.source(self)

    def get_completion_args(self) -> tuple[list[str], str]:
        words, current = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        joined: list[str] = []
        # An empty word at the end is not among them.
        for word in [*words[:current], *(words[current : current + 1] or [""])]:
            if joined[1:] and (word == ":" or joined[-1].endswith(":")):
                joined[-1] += word
            else:
                joined.append(word)
        return joined[1:-1], joined[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list["CompletionItem[Any]"]:
        found = super().get_completions(args, incomplete)
        # Bash replaces what stands behind the last colon only.
        kept = len(incomplete.rpartition(":")[0]) + 1 if ":" in incomplete else 0
        for item in found:
            if item.type == "plain":
                item.value = item.value[kept:]
        return found


class _ModelName(_TextType):
    """Completes names of models and, unless one begins like that, files."""

    name = "model"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list["CompletionItem[Any]"]:
        names = [CompletionItem(name) for name in known_models() if name.lower().startswith(incomplete.lower())]
        if not names:
            return [CompletionItem(incomplete, type="file")]
        return [*names, *(CompletionItem(path) for path in _model_files(incomplete))]


def _model_files(incomplete: str) -> Iterator[str]:
    """GGUF files and folders that begin like a word: bash offers files of its own only where there is nothing else."""
    folder, begin = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(begin) and not (entry.name.startswith(".") and not begin):
            if entry.is_dir():
                yield os.path.join(folder, entry.name) + os.sep
            elif entry.name.lower().endswith(".gguf"):
                yield os.path.join(folder, entry.name)


def _completer(shell: str, group: click.Command) -> ShellComplete:
    found = _Bash if shell == "bash" else get_completion_class(shell)
    assert found is not None, "click knows these shells"
    return found(group, {}, "localinfer", VARIABLE)


def _complete_values(command: click.Command) -> None:
    """Tell the parameters of a command, and of those below, to complete models and files, by what help calls them."""
    for parameter in command.params:
        called = (parameter.metavar or "").strip("[].")
        if parameter.type is not click.STRING:
            continue
        if called in _MODELS or (command.name == "rm" and called == "NAME"):
            parameter.type = _ModelName()
        elif called in _FILES:
            parameter.type = click.Path()
    for one in getattr(command, "commands", {}).values():
        _complete_values(one)
