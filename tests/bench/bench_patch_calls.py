"""Patches that a small model writes as calls of `apply_patch`, judged by a parser that shares nothing with the grammar.

    python -m tests.bench.bench_patch_calls MODEL [--calls 100] [--max-tokens 400] [--grammar FILE] [--temperature 0.8]

Prints how many calls were malformed, how many were cut off by the number of tokens (and say so), and what the others
do. Ends with code 1 if a call is malformed. FILE: a Lark grammar, as an agent sends it, in place of our own.
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path

import localinfer

_TASKS = (
    "Add a file hello.py that prints a greeting.",
    "In src/main.py rename the function run to start.",
    "Delete the file notes/old.txt.",
    "Change the port in config.json from 80 to 8080.",
    "Write a function in math.py that adds two numbers, with a test in test_math.py.",
    "Fix the typo in README.md: 'teh' should be 'the'.",
    "Move lib/a.py to lib/b.py and change its first line.",
    "Make the loop in count.c stop at 10.",
    "Add a license header to every file in app/.",
    "Replace the quotes \" in names.txt by '.",
)
_SOURCE = 'def run(name):\n    print(f"Hello, {name}!")\n\n\nrun("teh world")\n'


class WrongPatchError(Exception):
    """A patch that is none."""


def read_patch(text: str) -> list[tuple[str, str, int]]:
    """The changes of a patch: kind, path and number of lines that change. Raises: WrongPatchError with the line."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if lines[:1] != ["*** Begin Patch"] or lines[-1:] != ["*** End Patch"] or len(lines) < 3:
        raise WrongPatchError("begin or end")
    changes: list[tuple[str, str, int]] = []
    at, end = 1, len(lines) - 1
    while at < end:
        kind, colon, path = lines[at].removeprefix("*** ").partition(": ")
        if not lines[at].startswith("*** ") or not colon or not path or path != path.strip():
            raise WrongPatchError(f"line {at}: no file begins here: {lines[at]!r}")
        at += 1
        first = at
        if kind == "Delete File":
            changes.append((kind, path, 0))
            continue
        if kind == "Update File" and at < end and lines[at].startswith("*** Move to: "):
            at += 1
        count, is_open = 0, False
        while at < end and not (lines[at].startswith("*** ") and lines[at] != "*** End of File"):
            line = lines[at]
            sign = line[:1]
            if kind == "Add File" and sign == "+":
                count += 1
            elif kind == "Update File" and (line == "@@" or line.startswith("@@ ")):
                if is_open:
                    raise WrongPatchError(f"line {at}: a part without lines before it")
                is_open = True
            elif kind == "Update File" and line == "*** End of File":
                if is_open or at == first:
                    raise WrongPatchError(f"line {at}: the end of a file behind nothing")
            elif kind == "Update File" and sign in ("+", "-", " ") and sign:
                count += sign != " "
                is_open = False
            else:
                raise WrongPatchError(f"line {at}: {line!r} in {kind!r}")
            at += 1
        if not count or is_open:
            raise WrongPatchError(f"{kind} of {path!r} changes nothing")
        changes.append((kind, path, count))
    return changes


def main() -> int:
    """Have the calls written, judge them, and print what they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--grammar", type=Path)
    parser.add_argument("--temperature", type=float, default=0.8)
    asked = parser.parse_args()
    tool: dict[str, object] = {"type": "apply_patch"}
    if asked.grammar is not None:
        form = {"type": "grammar", "syntax": "lark", "definition": asked.grammar.read_text(encoding="utf-8")}
        tool = {"type": "custom", "name": "apply_patch", "description": "Change files.", "format": form}
    found: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    num_lines = 0
    began = time.perf_counter()
    with localinfer.load(asked.model, context_length=4096) as llm:
        for seed in range(asked.calls):
            messages = [{"role": "user", "content": f"{_TASKS[seed % len(_TASKS)]}\n\nsrc/main.py:\n{_SOURCE}"}]
            reply = llm.chat(
                messages,
                tools=[tool],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                seed=seed,
            )
            if reply.finish_reason != "tool_calls":
                found[f"cut off, and said so ({reply.finish_reason})"] += 1
                continue
            (call,) = reply.tool_calls
            try:
                changes = read_patch(json.loads(call.arguments)["input"])
            except (WrongPatchError, ValueError, KeyError) as error:
                found["malformed"] += 1
                print(f"seed {seed}: {error}\n{call.arguments}", file=sys.stderr)
                continue
            found["whole"] += 1
            num_lines += sum(count for *_, count in changes)
            kinds.update(kind for kind, *_ in changes)
    print(f"{asked.calls} calls in {time.perf_counter() - began:.0f} s: {dict(found)}")
    print(f"changes: {dict(kinds)}, {num_lines} lines")
    return int(found["malformed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
