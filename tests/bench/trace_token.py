"""The path of one decoded token, as Python calls: `python -m tests.bench.trace_token [MODEL] [--list]`.

Runs `localinfer run`, greedy and without drafts, on the demo model or another one, and counts for every token in the
middle of the reply the calls of Python functions and the distinct files of localinfer that hold them, from one flush of
the printed text to the next. Prints the medians; with --list the calls of a median token in order, indented by depth.
Generated functions, such as a NamedTuple's constructor, count as calls and lie in no file. Run it before and after a
change to the loop: each call costs some 0.1 us, and each file is one more to read.
"""

import argparse
import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import localinfer
from localinfer.apps import cli

ROOTS = tuple(dict.fromkeys(str(Path(folder).resolve().parent) for folder in localinfer.__path__))
Call = tuple[int, str, str]


class CallTrace:
    """Standard output that cuts a trace of Python calls at every flush of text: depth, file and function of each."""

    def __init__(self) -> None:
        self.tokens: list[list[Call]] = []
        self.builtin_calls: list[int] = []
        self._calls: list[Call] = []
        self._num_builtin = 0
        self._depth = 0

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Take note of a call; for `sys.setprofile`."""
        if event == "call":
            self._calls.append((self._depth, frame.f_code.co_filename, frame.f_code.co_qualname))
        self._num_builtin += event == "c_call"
        self._depth += {"call": 1, "return": -1}.get(event, 0)

    def write(self, text: str) -> int:
        """Drop a piece of text."""
        return len(text)

    def flush(self) -> None:
        """Begin the next token."""
        sys.setprofile(None)
        self.tokens.append([call for call in self._calls if call[1] != __file__])
        self.builtin_calls.append(self._num_builtin)
        self._calls, self._depth, self._num_builtin = [], 0, 0
        sys.setprofile(self.profile)

    def isatty(self) -> bool:
        """No: text is written as it is."""
        return False


def project_file(path: str) -> str | None:
    """A source file of localinfer, shortened; None for any other."""
    return next((path[len(root) + 1 :] for root in ROOTS if path.startswith(root + "/")), None)


def trace(model: str | None, num_tokens: int, num_threads: int | None = None) -> tuple[list[list[Call]], list[int]]:
    """The calls of every token between the first and the last eighth of a reply, and how many of functions in C.

    num_threads: None for the usual number, which changes, with some calls more, while other programs are busy.
    """
    words = ["run", "-p", "Once upon a time", "-n", str(num_tokens), "--ignore-eos", "--temperature", "0"]
    words += ["--speculation", "off", *(["-m", model] if model else [])]
    words += [] if num_threads is None else ["--threads", str(num_threads)]
    collected, stdout = CallTrace(), sys.stdout
    sys.stdout = collected  # type: ignore[assignment]
    try:
        code = cli.main(words)
    finally:
        sys.setprofile(None)
        sys.stdout = stdout
    assert code == 0, "the command failed, and said why"
    middle = slice(num_tokens // 8, -num_tokens // 8)
    return collected.tokens[middle], collected.builtin_calls[middle]


def medians(tokens: list[list[Call]]) -> tuple[int, int]:
    """Files of localinfer and Python calls of a token."""
    files = [{name for _, path, _ in token if (name := project_file(path))} for token in tokens]
    return int(statistics.median_low(map(len, files))), int(statistics.median_low(map(len, tokens)))


def listed(tokens: list[list[Call]]) -> str:
    """The calls of a median token in order, indented by depth."""
    calls = medians(tokens)[1]
    typical = next(token for token in tokens if len(token) == calls)
    top = min(depth for depth, _, _ in typical)
    return "\n".join(f"{'  ' * (depth - top)}{name}  ({project_file(path) or path})" for depth, path, name in typical)


def main() -> None:
    """Print the medians, and the calls of one token if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    tokens, builtin_calls = trace(options.model, options.tokens)
    files, calls = medians(tokens)
    print(
        f"{files} files, {calls} Python calls and {statistics.median_low(builtin_calls)} of functions in C per decoded "
        "token"
    )
    if options.list:
        print(listed(tokens))


if __name__ == "__main__":
    main()
