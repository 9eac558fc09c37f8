"""The `localinfer launch` command: a coding agent with a model of this machine."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import COUNT, flag, option
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.apps.agents.agents import Agent, Plan, ServerFacts

KEY_VARIABLE = "LOCALINFER_API_KEY"
_LOOK_SECONDS = 2.0
_END_SECONDS = 12.0
_LARGEST_REPLY = 32_768


@click.command("launch")
@click.argument("agent", required=False, metavar="[AGENT]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@option("-m --model", "MODEL", "Model, as `localinfer serve` takes it. Default: what a running server has.")
@option("-c --context-length", "N", "Context of a server that is started.", type=COUNT)
@option(
    "--port", "N", "Port of a running server that is looked for first.", type=click.IntRange(1, 65535), default=8080
)
@option("--serve-options", "TEXT", "Further options of `localinfer serve` for a server that is started, as one text.")
@flag("--print print_only", "Show the settings, and change and start nothing.")
@flag("--restore", "Take out of the agent's files what was written, and start nothing.")
def launch_command(
    agent: str | None,
    words: tuple[str, ...],
    model: str | None,
    context_length: int | None,
    port: int,
    serve_options: str | None,
    print_only: bool,
    restore: bool,
) -> None:
    """Start a coding agent with a model of this machine, with settings that it needs.

    AGENT is claude, codex, opencode, aider, cline, goose, pi, continue, copilot or zed; without it they are listed. A
    running server that has the model is used, or one is started, which ends with the agent. What stands behind `--`
    goes to the agent, and its exit code is that of this command:

    localinfer launch claude -m MODEL -- --continue

    Settings are given to the agent's process, and written to its files only where it takes them in no other way; then
    --restore gives the files their former bytes. A server with tokens gets the one of the variable LOCALINFER_API_KEY.
    """
    from localinfer.apps.agents.agents import find_agent, plan_of
    from localinfer.apps.agents.settings_files import SettingsFiles

    if agent is None:
        _list_agents()
        return
    found = find_agent(agent)
    folder = _state_folder()
    files = SettingsFiles(folder / f"{found.name}.json")
    if restore:
        _restore(found, files)
        return
    program = shutil.which(found.program)
    if program is None and not print_only:
        raise RequestError(
            f"{found.title} is not installed: there is no {found.program} in PATH; type `{found.install}`"
        )
    try:
        options = shlex.split(serve_options or "")
    except ValueError as error:
        raise RequestError(f"--serve-options: {serve_options} ends within quotes ({error}); close them") from None
    with _server(model, context_length, port, options, print_only=print_only) as (url, card):
        facts = _facts(url, card, str(folder), context_length)
        _check_context(found, facts)
        plan = plan_of(found, facts, os.environ)
        if print_only:
            _print(found, plan)
            return
        _write(found, plan, files)
        assert program is not None, "an agent that is installed"
        code = _run([program, *plan.arguments, *words], plan)
    click.get_current_context().exit(code)


def _list_agents() -> None:
    from localinfer.apps.agents.agents import AGENTS

    for one in AGENTS.values():
        there = "installed" if shutil.which(one.program) else "not here"
        tried = f"tried with {one.tried}" if one.tried else "not tried"
        click.echo(f"{one.name:<10}{one.title:<14}{tried:<22}{there:<11}{one.install}")


def _state_folder() -> Path:
    from localinfer.system.folders import user_folder

    folder = user_folder("state")
    if folder is None:
        raise RequestError("this user has no home folder, in which it is noted what was changed; set HOME")
    return folder / "launch"


def _restore(agent: "Agent", files: Any) -> None:
    lines = files.restore()
    for name in agent.made_files:
        with suppress(FileNotFoundError):
            (_state_folder() / name).unlink()
    for line in lines or [f"no file of {agent.title} was changed; its settings were given to its process alone"]:
        click.echo(line)


def _facts(url: str, card: Mapping[str, Any], folder: str, wanted_context: int | None) -> "ServerFacts":
    from localinfer.apps.agents.agents import ServerFacts

    context = card.get("context_length") or wanted_context
    if not isinstance(context, int):
        raise RequestError(
            f"the server at {url} does not know the context of {card['id']} yet; send it a request, or give -c"
        )
    output = max(256, min(context // 4, _LARGEST_REPLY))
    key = os.environ.get(KEY_VARIABLE) or "none"
    return ServerFacts(url, str(card["id"]), context, output, max(context // 2, context - output), key, folder)


def _check_context(agent: "Agent", facts: "ServerFacts") -> None:
    if facts.context < agent.least_context:
        click.echo(
            f"warning: {facts.model} has a context of {facts.context:,} tokens here, and {agent.title} wants "
            f"{agent.least_context:,} at least: give -c {agent.least_context}, or a model with a longer one",
            err=True,
        )


def _print(agent: "Agent", plan: "Plan") -> None:
    """Show the settings as lines of a shell, and the files after them."""
    for name in plan.unset:
        click.echo(f"unset {name}")
    for name, value in plan.environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(shlex.join([agent.program, *plan.arguments]))
    for path, data in plan.made_files.items():
        click.echo(f"\n# {path}\n{data.decode().rstrip()}")
    for one in plan.files:
        click.echo(f"\n# {one.path}")
        for keys, value in one.values:
            click.echo(f"# {'.'.join(keys)} =\n{json.dumps(value, indent=1, ensure_ascii=False)}")
    if agent.note:
        click.echo(f"\n# {agent.note}")


def _write(agent: "Agent", plan: "Plan", files: Any) -> None:
    """Write the files, and say on standard error what was changed."""
    from localinfer.system.files import OutputFile

    for path, data in plan.made_files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with OutputFile(path, is_private=True) as file:
            file.write(data)
    lines = files.write(plan.files) if plan.files or files.is_written else []
    for line in lines:
        click.echo(line, err=True)
    if lines:
        click.echo(f"`localinfer launch {agent.name} --restore` takes this out again", err=True)
    if agent.note:
        click.echo(f"note: {agent.title}: {agent.note}", err=True)


def _run(words: Sequence[str], plan: "Plan") -> int:
    """Run the agent in this terminal; return its exit code, as a shell tells it."""
    environment = {name: value for name, value in os.environ.items() if name not in plan.unset}
    # Ctrl-C is the agent's; a request to end this command ends the agent.
    handlers: dict[int, Any] = {}
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: Any = None) -> None:
        if process is None:
            early.append(number)
            return
        with suppress(OSError):
            process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, *_HANGUP)}
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(words, env={**environment, **plan.environment})
        for number in early:
            # It came while the agent was started, which may have been the agent's own.
            forward(number)
        code = process.wait()
    except OSError as error:
        raise RequestError(f"{words[0]} cannot be started ({error.strerror}); install it anew") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


_HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()


@contextmanager
def _server(
    model: str | None, context_length: int | None, port: int, options: Sequence[str], *, print_only: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A server that has the model: its address, and what it says of the model.

    A running one is used where it has the model, and if no context is asked for that it has not.
    """
    url = f"http://127.0.0.1:{port}"
    cards = None if options else _cards(url)
    if cards is not None and (card := _matching(cards, model, context_length)) is not None:
        click.echo(f"using {card['id']} of the server at {url}", err=True)
        yield url, card
        return
    if print_only:
        name = "any" if model is None else _name(model)
        yield url, {"id": name, "context_length": context_length or _measured_context(model)}
        return
    with _started(model, context_length, options) as (url, name):
        cards = _cards(url) or []
        yield url, next((card for card in cards if card["id"] == name), {"id": name})


def _cards(url: str) -> list[dict[str, Any]] | None:
    """Models of a running server of ours; None where there is none."""
    request = urllib.request.Request(f"{url}/v1/models")
    if key := os.environ.get(KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=_LOOK_SECONDS
        ) as answer:
            found = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            click.echo(f"note: the server at {url} wants a token; give it in {KEY_VARIABLE}", err=True)
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ours = [card for card in found if isinstance(card, dict) and card.get("owned_by") == "localinfer"]
    return ours or None


def _matching(cards: Sequence[dict[str, Any]], model: str | None, context_length: int | None) -> dict[str, Any] | None:
    if model is not None and not any(model in (card["id"], *card.get("aliases", ())) for card in cards):
        model = _name(model)
    for card in cards:
        is_named = model is None or model in (card["id"], *card.get("aliases", ()))
        if is_named and (context_length is None or (card.get("context_length") or 0) >= context_length):
            return card
    return None


def _name(model: str) -> str:
    """The name that a server gives the model of -m. Raises: RequestError."""
    from localinfer.apps.cli.serve import ModelsOptions, find_sources

    sources, _ = find_sources(model, ModelsOptions(), {})
    return sources[0].id


def _measured_context(model: str | None) -> int:
    """The context that a model's file names. Raises: ModelFileError and below, RequestError."""
    from localinfer.apps.cli.serve import ModelsOptions, find_sources
    from localinfer.apps.server.router.model_folder import measure_need

    sources, _ = find_sources(model, ModelsOptions(), {})
    return measure_need(sources[0].path, "f16").context_length


@contextmanager
def _started(model: str | None, context_length: int | None, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A server of its own on a free port: its address, and the name of its first model. It ends with the block."""
    log = _state_folder() / "server.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [
        sys.executable,
        "-m",
        "localinfer",
        "serve",
        "--ready-json",
        "--until-stdin-ends",
        "--port",
        "0",
        "--no-page",
    ]
    words += [] if model is None else ["-m", model]
    words += [] if context_length is None else ["-c", str(context_length)]
    click.echo(f"starting a server{'' if model is None else f' with {model}'}; its messages go to {log}", err=True)
    with log.open("wb") as messages:
        process = subprocess.Popen(
            [*words, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            # Ctrl-C is for the agent.
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        try:
            ready = json.loads(line)
        except ValueError:
            raise RequestError(f"the server ended before it was ready; {log} has its messages") from None
        if "error" in ready:
            error = ready["error"]
            raise RequestError(
                f"the server: {error['message']}" + (f"; {error['way_out']}" if error.get("way_out") else "")
            )
        yield f"http://127.0.0.1:{ready['port']}", ready["models"][0]
    finally:
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
