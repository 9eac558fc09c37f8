"""The files for service managers and proxies: their form, and that the commands in them are ones that there are."""

import plistlib
import re
import shlex
from pathlib import Path

import pytest

from localinfer.apps.cli.serve import serve_command

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "service"


def check_command(words: list[str]) -> None:
    """Whether the command takes the options, whatever their values."""
    assert Path(words[0]).name == "localinfer" and words[1] == "serve"
    known = {name: option.is_flag for option in serve_command.params for name in option.opts}
    rest = words[2:]
    while rest:
        name = rest.pop(0)
        assert name in known, name
        if not known[name]:
            assert not rest.pop(0).startswith("--"), name


def settings_of(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_units_start_the_server_with_sockets_that_it_takes():
    service, sockets = settings_of("localinfer.service"), settings_of("localinfer.socket")
    check_command(shlex.split(service["ExecStart"][0]))
    assert service["Type"] == ["notify"] and "-HUP $MAINPID" in service["ExecReload"][0]
    assert sockets["SocketMode"] == ["0600"], "others are refused"
    assert sockets["ListenStream"] == ["127.0.0.1:8080", "%t/localinfer/server.sock"]


def test_launch_agent_starts_the_server():
    agent = plistlib.loads((FOLDER / "localinfer.plist").read_bytes())
    check_command(agent["ProgramArguments"])
    assert agent["Umask"] == 0o077


@pytest.mark.parametrize(
    ("name", "unbuffered"), [("Caddyfile", "flush_interval -1"), ("nginx.conf", "proxy_buffering off;")]
)
def test_proxies_pass_streams_on_and_name_the_options_that_they_need(name, unbuffered):
    text = (FOLDER / name).read_text()
    assert unbuffered in text
    (command,) = re.findall(r"#\s+(localinfer serve .*)", text)
    check_command(shlex.split(command))
    host = re.search(r"--allow-host (\S+)", command)
    assert host is not None and text.count(host[1]) >= 3 and "--token-file" in command
