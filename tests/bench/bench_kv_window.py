"""Measure what a bounded cache does to a model's predictions of text longer than its window.

`python -m tests.bench.bench_kv_window MODEL TEXT [--window 256] [--length 921] [--texts 2]`, from the repository's
root. Each text is a passage of 80 tokens that comes back after every 200 others. Mean loss in nats, past the window: of
tokens of the passage when it comes back (but its first eight), and of the others; for the whole cache, for `kv_window`,
and for the same memory spent on recent pages only, with and without the first page.
"""

import argparse
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

import localinfer
from localinfer import LLM
from localinfer.apps.evaluate.texts import evaluation_text

PASSAGE_TOKENS, BETWEEN_TOKENS, GIVEN_TOKENS = 80, 200, 8
POLICIES = {
    "kv_window": {},
    "first page and recent": {"recent_share": 1.0},
    "recent only": {"recent_share": 1.0, "sink_pages": 0},
}


def texts_of(
    ids: list[int], first: int | None, length: int, count: int
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Token ids of each text, and which of its predictions are of a passage that comes back."""
    result, place = [], 0
    for _ in range(count):
        passage = ids[place : place + PASSAGE_TOKENS]
        place += PASSAGE_TOKENS
        text = ([] if first is None else [first]) + passage
        is_known = [False] * len(text)
        while len(text) + BETWEEN_TOKENS + PASSAGE_TOKENS <= length:
            text += ids[place : place + BETWEEN_TOKENS] + passage
            is_known += [False] * (BETWEEN_TOKENS + GIVEN_TOKENS) + [True] * (PASSAGE_TOKENS - GIVEN_TOKENS)
            place += BETWEEN_TOKENS
        result.append((np.array(text, np.int32), np.array(is_known[1:])))
    return result


def losses(llm: LLM, text: NDArray[np.int32]) -> NDArray[np.float64]:
    """Negative log-likelihood of every token but the first."""
    logits = llm.logits(text)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), text[1:]]


def main() -> None:
    """Print one line per way to choose pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--length", type=int, default=921)
    parser.add_argument("--texts", type=int, default=2)
    options = parser.parse_args()

    def report(name: str, llm: LLM) -> None:
        found = [(losses(llm, text), is_known) for text, is_known in texts]
        back = np.concatenate([loss[is_known] for loss, is_known in found])
        others = np.concatenate([loss[options.window :][~is_known[options.window :]] for loss, is_known in found])
        print(f"{name:24} passage {back.mean():.3f}, others {others.mean():.3f}", flush=True)

    with localinfer.load(options.model, speculation=None) as llm:
        ids = llm.tokenizer.encode(evaluation_text(options.text)[: 40 * options.length * options.texts])
        first = llm.tokenizer.bos_token_id if llm.tokenizer.adds_bos else None
        texts = texts_of(ids, first, options.length, options.texts)
        report("everything", llm)
    with localinfer.load(options.model, speculation=None, kv_window=options.window) as llm:
        with llm._engine.exclusive_cache() as cache:
            window = cache._window
        assert window is not None, "asked for"
        for name, changes in POLICIES.items():
            with llm._engine.exclusive_cache() as cache:
                cache._window = replace(window, **changes)  # type: ignore[arg-type]
            report(name, llm)


if __name__ == "__main__":
    main()
