"""A program that keeps a prompt cache on disk and saves sessions, and says in lines of JSON what it has finished.

`python -m tests.proof.soak.caller FOLDER SEED`. Each line has `event`, and for the end of an operation what came of it.
"""

import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import localinfer
from tests.proof.soak.cold_answers import Answer, draw_prompt

CACHE_BYTES = 3 << 20
"""Some thirty pages of the demo model: less than all prompts have."""
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "logprobs": 1}
NUM_SEEDS = 2
SESSIONS = ("first", "second")


def load(folder: Path) -> localinfer.LLM:
    """The demo model with the prompt cache of a folder."""
    return localinfer.load(
        threads=1, may_measure=False, disk_cache=CACHE_BYTES, disk_cache_folder=folder, speculation="ngram"
    )


def say(event: str, **fields: object) -> None:
    """One line of JSON."""
    print(json.dumps({"event": event, **fields}), flush=True)


def work(folder: Path, random: Random) -> None:
    """Load the model three times, and ask, save and load."""
    for _ in range(3):
        with load(folder / "cache") as llm:
            say("loaded")
            for _ in range(random.randrange(1, 6)):
                _act(llm, folder, random)
            say("closing")
        say("closed")


def _act(llm: localinfer.LLM, folder: Path, random: Random) -> None:
    prompt, seed = draw_prompt(random), random.randrange(NUM_SEEDS)
    choice = random.random()
    say("asking", prompt=prompt, seed=seed)
    completion = llm.complete(prompt, seed=seed, **OPTIONS)
    cached = completion.stats.cached_tokens
    say("asked", prompt=prompt, seed=seed, answer=Answer.of(completion), cached=cached)
    name = random.choice(SESSIONS)
    if choice < 0.3:
        ids = [*llm.tokenizer.encode(prompt), *completion.token_ids[:-1]]
        say("saving", name=name, ids=ids)
        llm.save_session(folder / name, ids)
        say("saved", name=name)
    elif choice < 0.45 and (folder / name).exists():
        say("restored", name=name, ids=llm.load_session(folder / name))
    elif choice < 0.55:
        # The cache is written half a second after the last token.
        time.sleep(0.6)


if __name__ == "__main__":
    work(Path(sys.argv[1]), Random(int(sys.argv[2])))
