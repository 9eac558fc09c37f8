"""Try coding agents as they are, with settings by `localinfer launch`, and print a table with their versions.

`python -m tests.proof.agents [NAME ...] [--folder FOLDER] [--keep] [--table FILE]`, outside of CI: the newest release
of each agent comes from its registry into the folder (`--keep`: as it is there), Node 22 with them where the system's
is older. Then everything runs without a network, in a network namespace where one can be made, else behind proxies that
do not answer. Each agent has a home and a project of its own, and a model whose words are a script (`stand_in.py`).
Requests and answers are in FOLDER/requests.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.proof.agents.stand_in import (
    AGAIN,
    ANSWER,
    DONE,
    FORMER,
    SUMMARY,
    WANTED,
    Asked,
    StandIn,
    serving,
    wait_for,
)
from tests.proof.agents.trials import TRIALS, Trial

BEFORE, AFTER = f"first line\n{FORMER}\n", f"first line\n{WANTED}\n"
LEAST_NODE = 22
LONGEST_SECONDS = 300
_INSIDE = "LOCALINFER_PROOF_INSIDE"
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
COLUMNS = ("streamed call", "edit", "resumed", "compaction", "interruption", "new session cached", "errors")


@dataclass
class Outcome:
    """Results of one agent."""

    name: str
    """As `localinfer launch` has it."""
    version: str
    """Of the release."""
    results: dict[str, str] = field(default_factory=dict)
    """By column: "yes", a figure, or what was seen instead."""

    @property
    def is_passed(self) -> bool:
        """True if every part that the agent has came out."""
        parts = COLUMNS[:5]
        return all(self.results.get(part, "").startswith(("yes", "none")) for part in parts) and (
            self.results.get("errors") == "0"
        )


class Bench:
    """Folders and programs of the trials. folder: all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "project"

    def install(self, names: Sequence[str]) -> None:
        """Bring the newest release of each agent. Raises: CalledProcessError."""
        if not (self.node / "node").exists() and _node_version() < LEAST_NODE:
            self._npm("node", f"node-{sys.platform}-{_machine()}@{LEAST_NODE}")
        for name in names:
            trial = TRIALS[name]
            if trial.is_python:
                place = self.folder / "packages" / name
                subprocess.run([sys.executable, "-m", "venv", place], check=True)
                subprocess.run([place / "bin" / "pip", "install", "-qq", "-U", trial.package], check=True)
            else:
                self._npm(name, f"{trial.package}@latest")

    def _npm(self, name: str, package: str) -> None:
        place = self.folder / "packages" / name
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", place, package],
            check=True,
            env={**os.environ, "PATH": f"{self.node}{os.pathsep}{os.environ['PATH']}"},
        )

    @property
    def node(self) -> Path:
        """The folder of the Node that was brought."""
        return next((self.folder / "packages" / "node").glob("node_modules/node-*/bin"), self.folder / "none")

    def environment(self, name: str) -> dict[str, str]:
        """Variables for an agent: a home of its own, its program in PATH, and no way out."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        package = self.folder / "packages" / name
        programs = package / ("bin" if TRIALS[name].is_python else "node_modules/.bin")
        if TRIALS[name].program:
            programs = (package / "node_modules" / TRIALS[name].program).parent
        found = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "ANTHROPIC", "OPENAI"))}
        found |= dict.fromkeys(_PROXIES, "http://127.0.0.1:9")
        found |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
        paths = os.pathsep.join([str(self.node), str(programs), os.environ["PATH"]])
        return {**found, "HOME": str(home), "PATH": paths, "PWD": str(self.project), "PYTHONPATH": str(Path.cwd())}

    def version(self, name: str) -> str:
        """The version that an agent's program tells."""
        from localinfer.apps.agents.agents import AGENTS

        environment = self.environment(name)
        program = shutil.which(AGENTS[name].program, path=environment["PATH"])
        if program is None:
            return ""
        done = subprocess.run(
            [program, "--version"], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        found = re.search(r"\d+\.\d+\.\d+\S*", done.stdout + done.stderr)
        return found[0].rstrip(".") if found else ""


class TrialRun:
    """The trial of one agent at a server."""

    def __init__(self, bench: Bench, name: str, stand_in: StandIn) -> None:
        self.bench, self.name, self.stand_in = bench, name, stand_in
        self.trial: Trial = TRIALS[name]
        self.outcome = Outcome(name, bench.version(name))

    def run(self) -> Outcome:
        """Try everything, one part after another; what fails is written down, and the next part begins."""
        shutil.rmtree(self.bench.project, ignore_errors=True)
        self.bench.project.mkdir(parents=True)
        (self.bench.project / "notes.txt").write_text(BEFORE)
        for name, text in self.trial.home_files.items():
            file = self.bench.folder / "homes" / self.name / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        began = len(self.stand_in.requests)
        parts = (self._edit, self._resume, self._compact, self._interrupt, self._new_session)
        for part in parts:
            try:
                part()
            except Exception as error:
                self.outcome.results.setdefault(COLUMNS[len(self.outcome.results)], f"no: {error}"[:200])
        for number, one in enumerate(self.stand_in.requests[began:]):
            place = self.bench.folder / "requests" / f"{self.name}-{number:02}.json"
            place.parent.mkdir(exist_ok=True)
            place.write_text(json.dumps(asdict(one), indent=1))
        failed = [one for one in self.stand_in.requests[began:] if one.status >= 400]
        self.outcome.results["errors"] = str(len(failed)) + "".join(
            f"; {one.path} {one.status} {one.answer[:160]}" for one in failed[:3]
        )
        return self.outcome

    def _edit(self) -> None:
        said, asked = self._ask(self.trial.edit)
        fragments = max((_fragments(one) for one in asked), default=0)
        streamed = f"yes ({fragments} pieces)" if fragments > 1 else f"no: {fragments} pieces"
        self.outcome.results["streamed call"] = streamed if self.trial.has_tools else "yes (a block of text)"
        content = (self.bench.project / "notes.txt").read_text()
        self.outcome.results["edit"] = "yes" if content == AFTER and DONE in said else f"no: {content!r} {said[-200:]}"

    def _resume(self) -> None:
        typed = self.trial.typed[0] if self.trial.typed else ""
        said, asked = self._type(self.trial.resume, typed) if typed else self._ask(self.trial.resume)
        former = [one for one in asked if DONE in str(one.body) and AGAIN in str(one.body)]
        if not former or not any(ANSWER in _said(one) for one in former):
            raise AssertionError(f"the session did not go on: {said[-200:]}")
        self.outcome.results["resumed"] = f"yes ({_cached(former[0])} cached)"

    def _compact(self) -> None:
        trial = self.trial
        if not trial.compact:
            self.outcome.results["compaction"] = "none without a terminal"
            return
        with contextlib.ExitStack() as stack:
            server = self.stand_in
            if trial.compact_context:
                small = self.bench.folder / "small"
                small.mkdir(exist_ok=True)
                server = stack.enter_context(serving(small, self.bench.project, trial.compact_context))
            if trial.typed:
                said, asked = self._type(trial.compact, trial.typed[1])
            else:
                said, asked = self._ask(trial.compact, server, trial.compact_input, trial.compact_environment)
                if trial.compact_context:
                    asked += self._ask(trial.resume, server)[1]
            failed = [one for one in asked if one.status >= 400]
        found = [one for one in asked if SUMMARY in _said(one) or '"type":"compaction"' in one.answer]
        if not found:
            raise AssertionError(f"nothing was summed up in {len(asked)} requests: {said[-200:]}")
        if failed:
            raise AssertionError(f"{failed[0].path} {failed[0].status} {failed[0].answer[:160]}")
        self.outcome.results["compaction"] = f"yes ({_cached(found[0])} cached)"

    def _interrupt(self) -> None:
        began = len(self.stand_in.requests)

        def is_writing() -> bool:
            return any(one.answer.count("word") > 20 for one in self.stand_in.requests[began:])

        with self._started(self.trial.interrupted, self.stand_in) as process:
            assert process.stdin is not None
            process.stdin.close()
            if not wait_for(is_writing, 120):
                raise AssertionError("the long reply did not begin")
            for _ in range(3):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                if wait_for(lambda: process.poll() is not None, 10):
                    break
            has_ended = process.poll() is not None
        if not wait_for(lambda: self.stand_in.num_running == 0, 10):
            raise AssertionError("the server still writes")
        cut = [one for one in self.stand_in.requests[began:] if "word" in one.answer]
        if cut[-1].answer.count("word") >= 4000:
            raise AssertionError("the reply came to its end")
        self.outcome.results["interruption"] = "yes" if has_ended else "yes (the agent stays)"

    def _new_session(self) -> None:
        _, asked = self._ask(tuple(AGAIN if "Edit the" in one else one for one in self.trial.edit))
        # The longest is that of the conversation: others ask for titles.
        longest = max(asked, key=lambda one: len(str(one.body)))
        self.outcome.results["new session cached"] = _cached(longest)

    def _ask(
        self,
        arguments: Sequence[str],
        server: StandIn | None = None,
        text: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> tuple[str, list[Asked]]:
        """Run the agent to its end; return what it printed, and the requests that had a body."""
        server = server or self.stand_in
        began = len(server.requests)
        with self._started(arguments, server, environment) as process:
            assert process.stdin is not None
            if text:
                process.stdin.write(text)
                process.stdin.flush()
                wait_for(lambda: any(one.is_ended for one in server.requests[began:] if one.body), 60)
                time.sleep(2)
            process.stdin.close()
            timer = time.monotonic() + LONGEST_SECONDS
            while process.poll() is None and time.monotonic() < timer:
                time.sleep(0.1)
        return self._printed(), [one for one in server.requests[began:] if one.body]

    def _type(self, arguments: Sequence[str], text: str) -> tuple[str, list[Asked]]:
        """Run the agent on a terminal, type lines once it has drawn, and end it when it has its answer."""
        began = len(self.stand_in.requests)
        screen, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        drawn = bytearray()

        def draw() -> None:
            with contextlib.suppress(OSError):
                while piece := os.read(screen, 1 << 16):
                    drawn.extend(piece)

        threading.Thread(target=draw, daemon=True).start()

        def asked() -> list[Asked]:
            return [one for one in self.stand_in.requests[began:] if one.body]

        with self._started(arguments, self.stand_in, terminal=terminal):
            wait_for(lambda: len(drawn) > 2000, 60)
            for line in text.split("\n"):
                time.sleep(4)
                os.write(screen, line.encode())
                time.sleep(1)
                os.write(screen, b"\r")
            wait_for(lambda: bool(asked()) and all(one.is_ended for one in asked()), 60)
            time.sleep(2)
        os.close(terminal)
        return drawn.decode(errors="replace"), asked()

    def _printed(self) -> str:
        return (self.bench.folder / "said.txt").read_text(errors="replace")

    @contextlib.contextmanager
    def _started(
        self,
        arguments: Sequence[str],
        server: StandIn,
        environment: Mapping[str, str] | None = None,
        terminal: int | None = None,
    ) -> Iterator["subprocess.Popen[str]"]:
        words = [sys.executable, "-m", "localinfer", "launch", self.name, "--port", str(server.port), "--"]
        words += [one.replace("{session}", self._session() if "{session}" in one else "") for one in arguments]
        with (self.bench.folder / "said.txt").open("w") as said:
            process = subprocess.Popen(
                words,
                cwd=self.bench.project,
                env={**self.bench.environment(self.name), "TERM": "xterm-256color", **(environment or {})},
                stdin=subprocess.PIPE if terminal is None else terminal,
                stdout=said if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _session(self) -> str:
        """The id of Cline's latest session, which it wants to be named."""
        done = subprocess.run(
            ["cline", "history", "--json", "--limit", "1"],
            env=self.bench.environment(self.name),
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r'"(?:session_?[iI]d|id)":\s*"([^"]+)"', done.stdout)
        return found[1] if found else "none"


def _said(asked: Asked) -> str:
    """The texts of an answer, whole or in pieces."""
    found = re.findall(r'"(?:text|content|delta)":("(?:[^"\\\\]|\\\\.)*")', asked.answer)
    return "".join(json.loads(piece) for piece in found)


def _fragments(asked: Asked) -> int:
    """Pieces in which the arguments of a call came."""
    forms = (
        r'"type":"input_json_delta","partial_json":"(?!")',
        r"event: response\.(?:custom_tool_call_input|function_call_arguments)\.delta",
        r'"tool_calls":\[\{[^\n]*?"arguments":"(?!")',
    )
    return max(len(re.findall(form, asked.answer)) for form in forms)


def _cached(asked: Asked) -> str:
    """The part of a prompt that the cache held."""
    cached, read = (re.findall(rf'"{name}":(\d+)', asked.answer) for name in ("cache_n", "prompt_n"))
    if not cached or not read:
        return "unknown"
    return f"{int(cached[-1]):,} of {int(cached[-1]) + int(read[-1]):,}"


def _node_version() -> int:
    if shutil.which("node") is None:
        return 0
    done = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
    found = re.match(r"v(\d+)", done.stdout)
    return int(found[1]) if found else 0


def _machine() -> str:
    return {"x86_64": "x64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = [("agent", "version", *COLUMNS)]
    rows += [(one.name, one.version, *(one.results.get(name, "") for name in COLUMNS)) for one in outcomes]
    lines = [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    passed = sum(one.is_passed for one in outcomes)
    return "\n".join([*lines, "", f"{passed} of {len(outcomes)} pass, {datetime.now(UTC):%Y-%m-%d}"])


def _without_network(words: Sequence[str]) -> int:
    """Run this again where no network is, and no process outlives it: agents leave some behind."""
    command = [sys.executable, "-m", "tests.proof.agents", *words]
    spaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = [*spaces, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    can = shutil.which("unshare") and shutil.which("ip") and not subprocess.run([*spaces, "true"]).returncode
    print("in a network namespace" if can else "behind proxies that do not answer", flush=True)
    return subprocess.run(inside if can else command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def main() -> int:
    """Install, try, and print the table; 1 if an agent fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRIALS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("build/agents"))
    parser.add_argument("--keep", action="store_true", help="take what the folder has, and install nothing")
    parser.add_argument("--table", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    names = arguments.names or list(TRIALS)
    if unknown := set(names) - set(TRIALS):
        parser.error(f"there is no trial of {', '.join(sorted(unknown))}")
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder)
    if not os.environ.get(_INSIDE):
        if not arguments.keep:
            bench.install(names)
        return _without_network(sys.argv[1:])
    shutil.rmtree(folder / "homes", ignore_errors=True)
    outcomes = []
    with serving(folder, bench.project) as stand_in:
        for name in names:
            outcome = TrialRun(bench, name, stand_in).run()
            outcomes.append(outcome)
            print(name, outcome.version, outcome.results, flush=True)
    table = _table(outcomes)
    print(f"\n{table}")
    if arguments.table is not None:
        arguments.table.write_text(f"{table}\n")
    return int(not all(one.is_passed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
