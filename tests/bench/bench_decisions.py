"""Costs of decisions beside those of reading as many tokens: many questions about a long state, and one more.

    python -m tests.bench.bench_decisions MODEL [--state-tokens 4000] [--questions 20] [--rounds 5] [--threads N]

Prints medians of runs in turns, and two ratios: all questions about a state that is not cached, to a prompt of as many
tokens; and one more question about the state, to a prompt of its tokens behind the cached state.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import localinfer

_SENTENCE = "On day {} the customer wrote that parcel number {} had not arrived, and asked for {} coins. "


def state_of(llm: localinfer.LLM, num_tokens: int) -> str:
    """A state of about so many tokens."""
    text = ""
    number = 0
    while len(llm.tokenizer.encode(text)) < num_tokens:
        number += 1
        text += _SENTENCE.format(number, 7 * number % 1000, 13 * number % 100)
    return text


def questions_of(count: int, first: int = 0) -> dict[str, localinfer.YesNo | localinfer.Choice]:
    """Questions of two kinds in turns."""
    made: dict[str, localinfer.YesNo | localinfer.Choice] = {}
    for number in range(first, first + count):
        instructions = f"Think of day {number}: what holds for its parcel?"
        options = {"it arrived": None, "it was lost": "nobody knows where it is", "it is late": None}
        made[str(number)] = (
            localinfer.Choice(instructions=instructions, options=options)
            if number % 2
            else localinfer.YesNo(instructions=f"Did the parcel of day {number} arrive?")
        )
    return made


def seconds_of(work: Callable[[], object]) -> float:
    """Time that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--state-tokens", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    length = asked.state_tokens + 100 * asked.questions + 1024
    with localinfer.load(asked.model, threads=asked.threads, context_length=length, speculation=None) as llm:
        state, questions = state_of(llm, asked.state_tokens), questions_of(asked.questions)
        found = llm.decide(state, questions)
        text = llm.tokenizer.encode(state + state_of(llm, found.prompt_tokens))[: found.prompt_tokens]
        times: dict[str, list[float]] = {name: [] for name in ("all", "as many", "one more", "its tokens")}
        for number in range(asked.rounds):
            llm.clear_cache()
            times["all"].append(seconds_of(lambda: llm.decide(state, questions)))
            more = questions_of(1, 1000 + 2 * number)
            alone = llm.decide(state, questions_of(1, 1001 + 2 * number))
            own = alone.prompt_tokens - alone.state_tokens
            times["one more"].append(seconds_of(lambda more=more: llm.decide(state, more)))
            llm.clear_cache()
            times["as many"].append(seconds_of(lambda: llm.complete(text, max_tokens=1)))
            cached = text[: found.state_tokens]
            llm.complete(cached, max_tokens=1)
            other = [*cached, *text[found.state_tokens + number : found.state_tokens + number + own]]
            times["its tokens"].append(seconds_of(lambda other=other: llm.complete(other, max_tokens=1)))
    print(
        f"state {found.state_tokens} tokens, {asked.questions} questions of {found.prompt_tokens - found.state_tokens}"
    )
    for name, measured in times.items():
        print(f"{name:>12}: {1e3 * median(measured):9.1f} ms")
    for name, other in (("all", "as many"), ("one more", "its tokens")):
        ratios = [one / another for one, another in zip(times[name], times[other], strict=True)]
        print(f"{name} / {other}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
