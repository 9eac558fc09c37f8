"""Completion in shells: the scripts run in the shells themselves, where they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localinfer.apps.cli import completion, main
from localinfer.apps.cli.completion import VARIABLE
from tests.support.limits import seconds


@pytest.fixture
def shell(tmp_path: Path, capsys):
    """Run commands in a shell that has the script; `localinfer` is this interpreter's."""

    def run(name: str, commands: str) -> list[str]:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is not installed")
        assert main(["completion", name]) == 0
        (tmp_path / "script").write_text(capsys.readouterr().out)
        wrapper = tmp_path / "localinfer"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m localinfer "$@"\n')
        wrapper.chmod(0o755)
        done = subprocess.run(
            [path, "-c", commands.replace("SCRIPT", str(tmp_path / "script"))],
            env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=seconds(50),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_bash_completes_commands_options_and_values(shell):
    lines = shell(
        "bash",
        """
        compopt() { default=yes; }
        source SCRIPT
        ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); default=no
                _localinfer_completion localinfer; echo "${COMPREPLY[*]} $default"; }
        complete -p localinfer
        ask localinfer cha
        ask localinfer run -p "'one: two'" --device ''
        ask localinfer show ./mod
        """,
    )
    assert lines[0] == "complete -o nosort -F _localinfer_completion localinfer"
    assert lines[1:] == ["chat no", "auto cpu cuda no", " yes"]


def test_fish_completes_commands(shell):
    lines = shell("fish", 'source SCRIPT; complete -C "localinfer cha"')
    assert [line.split("\t")[0] for line in lines] == ["chat"]


def test_zsh_takes_the_script(shell):
    lines = shell("zsh", "autoload -U compinit; compinit -u -D; source SCRIPT; echo $_comps[localinfer]")
    assert lines == ["_localinfer_completion"]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys):
    """The completions of one kind of shell for words, the last one unfinished."""
    monkeypatch.setattr(completion, "known_models", lambda: ["org/repo:Q4_K_M", "org/repo:Q8_0", "other:latest"])

    def answer(shell: str, *words: str) -> list[str]:
        monkeypatch.setenv(VARIABLE, f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setattr(sys, "argv", ["localinfer"])
        assert main() == 0
        return capsys.readouterr().out.splitlines()

    return answer


def test_names_of_models_are_completed_across_colons(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ask("bash", "localinfer", "chat", "-m", "org/r") == ["plain,org/repo:Q4_K_M", "plain,org/repo:Q8_0"]
    assert ask("bash", "localinfer", "chat", "-m", "org/repo", ":") == ["plain,Q4_K_M", "plain,Q8_0"]
    assert ask("bash", "localinfer", "chat", "-m", "org/repo", ":", "Q8") == ["plain,Q8_0"]
    assert ask("bash", "localinfer", "show", "other", ":", "l") == ["plain,latest"]
    assert ask("bash", "localinfer", "chat", "-m", "a", ":", "b", "--rope-base") == ["plain,--rope-base"]


def test_files_are_offered_beside_names_and_alone(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own.gguf", "own.txt", ".other"):
        (tmp_path / name).touch()
    (tmp_path / "over").mkdir()
    assert ask("bash", "localinfer", "chat", "-m", "o")[-2:] == ["plain,over/", "plain,own.gguf"]
    assert ask("bash", "localinfer", "chat", "-m", "x") == ["file,x"]
    assert ask("bash", "localinfer", "chat", "--file", "") == ["file,"]


def test_a_shell_that_is_not_known_changes_nothing(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "tcsh_complete")
    monkeypatch.setattr(sys, "argv", ["localinfer", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("localinfer ")


def test_without_a_shell_it_says_how_to_switch_it_on(capsys):
    assert main(["completion"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["bash", "zsh", "fish"]
    assert all("localinfer completion" in line for line in lines)
