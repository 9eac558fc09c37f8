"""`localinfer launch`: an agent gets a server, its settings and its exit code, and its files come back."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localinfer.apps.agents.agents import AGENTS, ServerFacts, plan_of
from localinfer.apps.cli import launch, main
from localinfer.system.folders import user_folder

FACTS = ServerFacts("http://127.0.0.1:5", "a/b:Q4", 65536, 16384, 49152, "secret", "/state")
CARD = {"id": "a-model", "aliases": ["small"], "owned_by": "localinfer", "context_length": 65536}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a program for every agent that writes down how it was started, and one that is a server."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "PI_CODING_AGENT_DIR", launch.KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    programs = tmp_path / "bin"
    programs.mkdir()
    for agent in AGENTS.values():
        _script(programs / agent.program, f'printf "%s\\n" "$@" > {tmp_path}/words; env > {tmp_path}/env; exit 7')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    ready = json.dumps({"port": 5, "models": ["a-model"]})
    server = f"printf '%s ' \"$@\" > {tmp_path}/served; echo '{ready}'; cat > /dev/null; echo > {tmp_path}/ended"
    monkeypatch.setattr(sys, "executable", str(_script(tmp_path / "server", server)))
    return tmp_path


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _running(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    monkeypatch.setattr(launch, "_cards", lambda url: [CARD] if int(url.rpartition(":")[2]) in ports else None)


def test_every_agent_learns_address_model_context_and_key() -> None:
    for agent in AGENTS.values():
        plan = plan_of(agent, FACTS, {"HOME": "/home/me"})
        said = json.dumps([plan.environment, plan.arguments, [data.decode() for data in plan.made_files.values()]])
        said += json.dumps([[str(keys), value] for one in plan.files for keys, value in one.values])
        for fact in (FACTS.url, FACTS.model, str(FACTS.context), FACTS.key):
            assert fact in said, (agent.name, fact)
        for name in ServerFacts.__dataclass_fields__:
            assert f"{{{name}}}" not in said, (agent.name, name)
        # Numbers stay numbers where the notation has them.
        assert f'"{FACTS.context}"' not in json.dumps([value for one in plan.files for _, value in one.values])
        assert all(str(path).startswith("/state/") for path in plan.made_files)
        assert all(str(one.path).startswith("/home/me/") for one in plan.files)


def test_a_running_server_is_used_or_one_is_started_and_ends_with_the_agent(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _running(monkeypatch, 8080)
    assert main(["launch", "claude", "-m", "small", "--", "-p", "Hi --there"]) == 7
    assert (home / "words").read_text().endswith("-p\nHi --there\n")
    environment = (home / "env").read_text()
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8080\n" in environment
    assert not (home / "served").exists()
    # It has not this context, so that one is started.
    _running(monkeypatch, 8080, 5)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the user")
    assert main(["launch", "claude", "-m", "small", "-c", "100000", "--serve-options", "--kv-type q8_0"]) == 7
    served = (home / "served").read_text()
    assert "-m small -c 100000 --kv-type q8_0" in served and "--until-stdin-ends" in served
    assert (home / "ended").exists()
    environment = (home / "env").read_text()
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:5\n" in environment and "ANTHROPIC_API_KEY" not in environment
    assert "starting a server" in capfd.readouterr().err


def test_files_are_written_once_and_restored(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _running(monkeypatch, 8080)
    settings = home / ".config" / "zed" / "settings.json"
    settings.parent.mkdir(parents=True)
    former = b'// mine\n{\n  "theme": "One", // dark\n  "agent": {"default_model": {"provider": "x"}},\n}\n'
    settings.write_bytes(former)
    before = {path for path in home.rglob("*")}
    assert main(["launch", "zed", "--print"]) == 0
    assert {path for path in home.rglob("*")} == before and "available_models" in capfd.readouterr().out
    for _ in range(2):
        assert main(["launch", "zed"]) == 7
    said = capfd.readouterr().err
    assert "agent.default_model" in said and '(was {"provider": "x"})' in said and "--restore" in said
    assert "theme" in settings.read_text() and "// dark" in settings.read_text()
    assert main(["launch", "zed", "--restore"]) == 0
    assert settings.read_bytes() == former
    assert main(["launch", "codex"]) == 7
    made = user_folder("state")
    assert made is not None and (made / "launch" / "codex-models.json").exists()
    assert main(["launch", "codex", "--restore"]) == 0
    assert not (made / "launch" / "codex-models.json").exists() and not (home / ".codex").exists()


def test_what_is_missing_is_said_in_a_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _running(monkeypatch)
    (home / "bin" / "cline").unlink()
    assert main(["launch", "cline"]) == 2
    assert "type `npm install -g cline`" in capfd.readouterr().err.replace("\n", " ")
    _script(home / "server", """echo '{"error": {"type": "X", "message": "no memory", "way_out": "take less"}}'""")
    assert main(["launch", "claude"]) == 2
    assert "the server: no memory; take less" in capfd.readouterr().err
    _script(home / "server", "exit 1")
    assert main(["launch", "claude"]) == 2
    assert "server.log" in capfd.readouterr().err.replace("\n", "")
    monkeypatch.setitem(CARD, "context_length", 4096)
    _running(monkeypatch, 8080)
    assert main(["launch", "claude"]) == 7
    assert "context of 4,096 tokens" in capfd.readouterr().err.replace("\n", " ")
    assert main(["launch"]) == 0
    listed = capfd.readouterr().out
    assert all(name in listed for name in AGENTS)


def test_signals_are_the_agents(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _running(monkeypatch, 8080)
    popen = subprocess.Popen
    _script(
        home / "bin" / "aider", "trap 'exit 9' TERM; kill -INT $PPID; kill -TERM $PPID; while :; do sleep 0.02; done"
    )
    assert main(["launch", "aider"]) == 9
    _script(home / "bin" / "aider", "kill -KILL $$")
    before: Any = signal.getsignal(signal.SIGINT)
    assert main(["launch", "aider"]) == 137
    assert signal.getsignal(signal.SIGINT) is before and subprocess.Popen is popen
