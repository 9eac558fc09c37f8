"""Time the second turn of a long chat with the cache warm and cold, and find a prefix among many tokens.

`python -m tests.bench.bench_prefix MODEL [--context 3000] [--new 40]`, from the repository's root.
"""

import statistics
import time

import numpy as np

import localinfer
from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.generation.stream import Completion
from tests.bench.conversation_options import conversation_parser
from tests.engine.fakes import FakeLayout

REPLY_TOKENS = 16
MATCHED_TOKENS = 100_000
SALTS = 1_000


def measure_second_turn(model: str, context: int, new: int, repetitions: int) -> None:
    """Print time to first token of a chat's second turn, computed from nothing and on top of the first turn."""
    chooser = np.random.default_rng(0)
    with localinfer.load(model) as llm:
        ids = chooser.integers(10, llm.vocab_size, context + new + 4).tolist()
        llm.complete(ids[:64], max_tokens=4, ignore_eos=True)
        cold_seconds, warm_seconds, texts = [], [], set()
        for _ in range(repetitions):
            llm.clear_cache()
            first = _answer(llm, ids[: context - REPLY_TOKENS])
            prompt = ids[: context - REPLY_TOKENS] + first.token_ids + ids[context : context + new]
            warm = _answer(llm, prompt)
            llm.clear_cache()
            cold = _answer(llm, prompt)
            texts |= {tuple(warm.token_ids), tuple(cold.token_ids)}
            warm_seconds.append(warm.stats.time_to_first_token_seconds)
            cold_seconds.append(cold.stats.time_to_first_token_seconds)
    computed = warm.stats.prompt_tokens - warm.stats.cached_tokens
    share = statistics.median(warm_seconds) / statistics.median(cold_seconds)
    print(f"prompt {warm.stats.prompt_tokens} tokens, of which new {new}; computed warm {computed}, cold all")
    print(f"first token: cold {statistics.median(cold_seconds):.3f} s, warm {statistics.median(warm_seconds):.3f} s")
    print(f"warm / cold {100 * share:.2f} %; texts {'equal' if len(texts) == 1 else 'DIFFERENT'}")


def _answer(llm: localinfer.LLM, prompt: list[int]) -> Completion:
    return llm.complete(prompt, max_tokens=REPLY_TOKENS, temperature=0, ignore_eos=True)


def measure_match() -> None:
    """Print how long it takes to find a long prefix, alone and among texts that part from it everywhere."""
    chooser = np.random.default_rng(0)
    cache = PrefixCache(FakeLayout(32, 64), max_bytes=None, context_length=2 * MATCHED_TOKENS)
    ids = chooser.integers(0, 32_000, MATCHED_TOKENS).astype(np.int32)
    for length in (0, *range(3_000, MATCHED_TOKENS, 3_000)):
        text = np.concatenate((ids[:length], chooser.integers(0, 32_000, 500).astype(np.int32))) if length else ids
        sequence = cache.admit(text, CacheHints()).sequence
        sequence.reserve(text.size)
        sequence.commit(text.size)
        cache.retire(sequence, text, CacheHints())
        if length in (0, 99_000):
            seconds = []
            for _ in range(200):
                began = time.perf_counter()
                found = cache.tree.match(ids).length
                seconds.append(time.perf_counter() - began)
            assert found == MATCHED_TOKENS
            name = f"among {length // 3_000} branches" if length else "alone"
            print(f"match of {found:,} cached tokens {name}: {statistics.median(seconds) * 1e6:.0f} us")


def measure_salts() -> None:
    """Print what one prompt of 3,000 tokens costs the cache, from its admission to its end, with and without salts."""
    chooser = np.random.default_rng(0)
    cache = PrefixCache(FakeLayout(32, 64), max_bytes=None, context_length=4_000)
    ids = chooser.integers(0, 32_000, 3_000).astype(np.int32)

    def turn(text: np.ndarray[tuple[int], np.dtype[np.int32]], salt: bytes) -> float:
        began = time.perf_counter()
        hints = CacheHints(salt=salt)
        sequence = cache.admit(text, hints).sequence
        sequence.reserve(text.size)
        sequence.commit(text.size)
        cache.publish(sequence, text, hints)
        cache.retire(sequence, text, hints)
        return time.perf_counter() - began

    salts = [salt_of(str(number)) for number in range(SALTS)]
    for name, others in (("no other salt", []), (f"{SALTS:,} other salts", salts)):
        for salt in others:
            turn(ids[:64], salt)
        for kind, salt in (("without a salt", NO_SALT), ("with one", salt_of("own"))):
            seconds = [turn(ids, salt) for _ in range(300)]
            print(f"a prompt of {ids.size:,} cached tokens {kind}, {name}: {statistics.median(seconds) * 1e6:.0f} us")
    began = time.perf_counter()
    for number in range(SALTS):
        salt_of(str(number))
    print(f"a salt of a name: {(time.perf_counter() - began) / SALTS * 1e6:.1f} us")


if __name__ == "__main__":
    options = conversation_parser(__doc__, "tokens of the first turn, its reply included", 1).parse_args()
    measure_match()
    measure_salts()
    measure_second_turn(options.model, options.context, options.new, options.repetitions)
