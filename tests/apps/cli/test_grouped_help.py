"""Help of commands with many options: short by --help, whole and in groups by --help-all."""

import re

import pytest

from localinfer.apps.cli import localinfer_command, main
from localinfer.apps.cli.help import GroupedCommand, first_sentence

GROUPED = sorted(name for name, one in localinfer_command.commands.items() if isinstance(one, GroupedCommand))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", GROUPED)
def test_the_short_help_names_the_groups_and_the_long_one_every_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = shown(capsys, command, "--help"), shown(capsys, command, "--help-all")
    options = {parameter.opts[0] for parameter in localinfer_command.commands[command].params}
    listed = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, re.MULTILINE))
    assert {name for name in options if name.startswith("--")} <= listed | {"--help"}
    assert len(re.findall(r"^  (?:-\w, )?--", short, re.MULTILINE)) < min(45, len(listed))
    for title in re.findall(r"^([A-Z][^:\n]+):$", whole, re.MULTILINE):
        assert title == "Options" or title in short
    assert f"`localinfer {command} --help-all`" in short and "--help-all`" not in whole


@pytest.mark.parametrize("command", ["run", "chat", "serve", "mcp"])
def test_commands_that_load_are_grouped(command: str) -> None:
    assert command in GROUPED


def test_the_list_of_commands_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    listed = shown(capsys, "--help").partition("Commands:")[2]
    assert "..." not in listed
    words = " ".join(listed.split())
    for command in localinfer_command.commands.values():
        assert first_sentence(command.help or "") in words
