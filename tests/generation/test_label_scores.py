"""Log probabilities of labels against sums of rows that are computed anew for every prefix."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.filters import log_total
from localinfer.errors import ContextLengthError, ModelFileError, TokenIdError
from localinfer.generation.label_scores import Label, LabelPrompt, score_labels
from tests.engine.fakes import fake_model, hashed_logits

VOCABULARY = 40
HINTS = CacheHints()
SINGLE: tuple[Label, ...] = ((1,), (5,), (39,))
DEEP: tuple[Label, ...] = ((1, 2, 3), (1, 2, 4), (1, 7), (2,), (3, 3, 3, 3), (3, 3, 3, 4))


def log_probability(token_ids: NDArray[np.int32], label: Label) -> float:
    found = 0.0
    for depth, token_id in enumerate(label):
        row = hashed_logits(np.concatenate((token_ids, np.array(label[:depth], np.int32))), VOCABULARY)
        found += float(row[token_id]) - log_total(row)
    return found


def wanted(prompts: Sequence[LabelPrompt]) -> list[list[float]]:
    return [[log_probability(prompt.token_ids, label) for label in prompt.labels] for prompt in prompts]


def scored(engine: Engine, prompts: Sequence[LabelPrompt], hints: CacheHints = HINTS) -> list[list[float]]:
    return [one.tolist() for one in score_labels(engine, prompts, hints).logprobs]


def random_prompts(count: int, seed: int) -> list[LabelPrompt]:
    """Prompts of 1 to 40 ids, which share none, some or all but one of them."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, VOCABULARY, int(rng.integers(0, 30)))
    prompts = []
    for _ in range(count):
        rest = rng.integers(0, VOCABULARY, int(rng.integers(1, 12)))
        ids = np.concatenate((stem, rest)).astype(np.int32)
        prompts.append(LabelPrompt(ids, DEEP if rng.random() < 0.5 else SINGLE))
    return prompts


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_rows_computed_anew(count: int, seed: int) -> None:
    engine = Engine(fake_model(hashed_logits, vocab_size=VOCABULARY))
    prompts = random_prompts(count, seed)
    assert scored(engine, prompts) == wanted(prompts)
    assert scored(engine, prompts[::-1]) == wanted(prompts[::-1]), "from the cache"
    with engine.exclusive_cache() as cache:
        cache.clear()
        assert engine.pool.num_free_pages == engine.pool.num_pages > 0, "no page is held"
    engine.close()


def test_a_shared_beginning_is_computed_once() -> None:
    engine = Engine(fake_model(hashed_logits, vocab_size=VOCABULARY, context_length=200))
    stem = np.arange(100, dtype=np.int32) % VOCABULARY
    prompts = [LabelPrompt(np.append(stem, np.int32([9, one])), SINGLE) for one in range(6)]
    first = score_labels(engine, prompts, HINTS)
    assert (first.cached_tokens, first.computed_tokens) == (0, 101 + 6)
    again = score_labels(engine, prompts[:1], HINTS)
    assert again.cached_tokens + again.computed_tokens == 102
    assert again.cached_tokens >= 96
    other = score_labels(engine, prompts, CacheHints(salt=salt_of("another")))
    assert other.cached_tokens == 0, "owners share nothing"
    assert [one.tolist() for one in other.logprobs] == wanted(prompts)


def test_prompts_and_labels_must_fit_the_context() -> None:
    engine = Engine(fake_model(hashed_logits, vocab_size=VOCABULARY, context_length=8))
    ids = np.arange(7, dtype=np.int32)
    fitting = [LabelPrompt(ids, ((1, 2), (3,)))]
    assert scored(engine, fitting) == wanted(fitting)
    with pytest.raises(ContextLengthError):
        score_labels(engine, [LabelPrompt(ids, ((1, 2, 3),))], HINTS)
    with pytest.raises(TokenIdError):
        score_labels(engine, [LabelPrompt(ids[:0], SINGLE)], HINTS)
    assert score_labels(engine, [], HINTS).logprobs == []


def test_an_error_leaves_the_engine_usable() -> None:
    model = fake_model(hashed_logits, vocab_size=VOCABULARY)
    engine = Engine(model)
    prompts = random_prompts(5, 9)
    last = max(prompt.token_ids.size for prompt in prompts) - 1
    for position in (0, last, last + 1):
        model.program.fails_at = {position}
        with pytest.raises(MemoryError):
            score_labels(engine, [prompt._replace(labels=DEEP) for prompt in prompts], HINTS)
        model.program.fails_at = set()
        with engine.exclusive_cache() as cache:
            cache.clear()
    assert scored(engine, prompts) == wanted(prompts)
    with engine.exclusive_cache() as cache:
        cache.clear()
        assert engine.pool.num_free_pages == engine.pool.num_pages
    damaged = Engine(fake_model(lambda history, size: np.full(size, np.nan, np.float32), vocab_size=VOCABULARY))
    with pytest.raises(ModelFileError, match="not finite for position 3"):
        score_labels(damaged, [LabelPrompt(np.arange(3, dtype=np.int32), SINGLE)], HINTS)
