"""What a mask costs by form, token by token along texts that fit, and what the first constrained request waits for.

    python -m tests.bench.bench_masks [--vocabulary FILE.gguf]

The vocabulary is one of ../shared/vocab, that of Llama 3 with 128,256 entries unless another is named. A mask is all
that a sampler asks for: following the last token, computing which tokens may come, and one byte for each of them. Each
position of a text counts by the median of its repetitions, as others may use the machine; mean, median and slowest are
over positions. The first mask of a form, with compiling it, is counted by itself.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from localinfer import load_tokenizer
from localinfer.generation.chat.constraints import ConstraintCompiler, grammar_of
from localinfer.generation.chat.grammar import reply_grammar
from localinfer.generation.chat.messages import read_tools
from localinfer.generation.options import Grammar, JsonObject, JsonSchema, Regex, StructuralTag
from localinfer.models.text.reply_format import HERMES

SHARED = Path(__file__).resolve().parents[3] / "shared"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "kind": {"enum": ["student", "teacher", "guest"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age", "email", "kind", "tags", "address"],
}
VALUE = {
    "name": "Anna-Maria Lindström of the old mill",
    "age": 41,
    "email": "anna.lindstroem@example.org",
    "kind": "teacher",
    "tags": ["mathematics", "sailing on lakes", "tea"],
    "address": {"street": "Long Lane 12, behind the church", "zip": "53111"},
}
TOOLS = [
    {"type": "function", "function": {"name": f"{verb}_{noun}", "description": "x", "parameters": PERSON}}
    for verb in ("read", "write", "find", "move")
    for noun in ("file", "person", "note", "mail", "event")
]
PROSE = (
    "I looked through what is known about her, and will now write it down, as you asked me to. It takes a moment, "
    "since some of the older notes are on paper only, and the street has got a new name since then."
)
CALL = f'<tool_call>\n{{"name": "write_person", "arguments": {json.dumps(VALUE, ensure_ascii=False)}}}\n</tool_call>'
GBNF = r"""
root ::= (line "\n")+
line ::= name "=" value (";" name "=" value)*
name ::= [a-z]+
value ::= [0-9]+ | "\"" [^"\n]* "\""
"""


def forms() -> dict[str, tuple[Any, str]]:
    """By name: a constraint, None for a chat with tools, and a text that fits."""
    written = json.dumps(VALUE, ensure_ascii=False)
    tag = {"begin": "<person>", "schema": PERSON, "end": "</person>"}
    return {
        "any JSON object": (JsonObject(), written),
        "a JSON Schema": (JsonSchema(PERSON), written),
        "a regular expression": (
            Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z [a-z]+@[a-z.]+ \"[^\"\n]*\""),
            '2026-11-22T20:15:00Z anna@example.org "A long way home, and back by the sea"',
        ),
        "a regular expression of sentences": (Regex(r"[A-Z][^.!?]{2,200}[.!?]( [A-Z][^.!?]{2,200}[.!?])*"), PROSE),
        "a grammar (GBNF)": (Grammar(GBNF), 'width=120;title="A long way home"\nheight=75;note="by the sea"\n' * 3),
        "a structural tag": (
            StructuralTag({"structures": [tag], "triggers": ["<person>"]}),
            f"{PROSE} <person>{written}</person>",
        ),
        "20 tools, text and a call": (None, f"{PROSE}\n{CALL}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", default=str(SHARED / "vocab" / "ggml-vocab-llama-bpe.gguf"))
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.vocabulary)
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    start = time.perf_counter()
    compiler.prepare()
    print(
        f"{tokenizer.vocab_size:,} tokens; the vocabulary's trie: {(time.perf_counter() - start) * 1e3:.0f} ms, at load"
    )
    print("| form | tokens | compiled with its first mask, ms | mean, us | median | 95 % | slowest |")
    print("|---|---|---|---|---|---|---|")
    means = []
    for name, (constraint, text) in forms().items():
        start = time.perf_counter()
        if constraint is None:
            grammar = reply_grammar(
                reasoning=None,
                state="none",
                calls=HERMES,
                tools=read_tools(TOOLS),
                must_call=False,
                is_parallel=True,
                answer=None,
                specials=tokenizer.special_spellings,
            )
            assert grammar is not None
        else:
            grammar = grammar_of(constraint)
        mask = compiler.grammar_mask(grammar, start=0, what="schema")
        mask(np.empty(0, np.int32))
        first = time.perf_counter() - start
        ids = np.array(tokenizer.encode(text, add_special=False), np.int32)
        seconds: list[list[float]] = [[] for _ in range(ids.size + 1)]
        for _ in range(arguments.repetitions):
            mask = compiler.grammar_mask(grammar, start=0, what="schema")
            for size in range(ids.size + 1):
                start = time.perf_counter()
                allowed = mask(ids[:size])
                seconds[size].append(time.perf_counter() - start)
                assert size == ids.size or allowed[ids[size]], (name, size)
        positions = list(map(statistics.median, seconds))
        means.append(statistics.mean(positions))
        figures = [
            means[-1],
            statistics.median(positions),
            statistics.quantiles(positions, n=20)[-1],
            max(positions),
        ]
        cells = " | ".join(f"{figure * 1e6:.1f}" for figure in figures)
        print(f"| {name} | {ids.size} | {first * 1e3:.1f} | {cells} |")
    print(f"median of the forms' means: {statistics.median(means) * 1e6:.1f} us")


if __name__ == "__main__":
    main()
