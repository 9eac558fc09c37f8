"""The sampler against a plain oracle that sorts, its noise against known answers and against chance."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan
from localinfer.errors import ModelFileError, RequestError
from localinfer.kernels.cpu.sampling import NOTHING_LEFT, RowSampler, uniforms

LARGE_VOCABULARY = 151_937
EMPTY = np.zeros(0, np.int32)

Filters = tuple[float, int, float, float]

FILTERS: list[Filters] = [
    *((temperature, 0, 1.0, 0.0) for temperature in (0.0, 1.0, 1e-5, 10.0)),
    *((temperature, top_k, 1.0, 0.0) for temperature, top_k in ((0.8, 1), (1.3, 7))),
    *((temperature, 0, 0.9, 0.0) for temperature in (1.0, 1e-38)),
    *((1.0, 0, 1.0, min_p) for min_p in (0.1, 1.0)),
    *((temperature, 0, 0.5, 0.0) for temperature in (5.0, 10.0)),
    *((0.7, 0, 0.3, 0.0), (2.0, 0, 0.999, 0.0), (1.0, 0, 0.0, 0.0), (3.0, 0, 0.02, 0.0)),
    *((10.0, 0, 0.9, 0.3), (0.9, 0, 0.9, 0.05), (0.8, 40, 0.95, 0.05), (1.5, 500, 0.8, 0.001)),
]
"""Temperature, top_k, top_p and min_p."""


def philox(seed: int, position: int, token: int) -> list[int]:
    """Philox4x32-10 in plain integers."""
    mask = 0xFFFFFFFF
    counter = [token & mask, position & mask, position >> 32, 0]
    key = [seed & mask, seed >> 32]
    for _ in range(10):
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 & mask,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def noise(seed: int, position: int, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    out = np.empty(tokens.size)
    uniforms(out, np.uint64(seed), position, tokens, tokens.size)
    return out


def sorted_ids(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Ids that are possible at all, the likeliest first."""
    z = logits.astype(np.float64)
    order = np.lexsort((np.arange(z.size), -z))
    return order[: np.count_nonzero(z > -np.inf)]


def kept_by_sorting(
    logits: NDArray[np.float32], filters: Filters, order: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Ids that the filters leave of all, which are sorted here unless their order is known, in float64."""
    temperature, top_k, top_p, min_p = filters
    z = logits.astype(np.float64)
    order = sorted_ids(logits) if order is None else order
    if temperature == 0.0:
        return order[:1]
    if top_k:
        order = order[:top_k]
    weights = np.exp((z[order] - z[order[0]]) / temperature)
    size = order.size
    if top_p < 1.0:
        size = 1 + int(np.searchsorted(np.cumsum(weights), top_p * weights.sum()))
    size = min(size, int(np.count_nonzero(weights >= min_p)))
    return order[: max(1, size)]


def choice_by_sorting(
    logits: NDArray[np.float32], order: NDArray[np.int64], filters: Filters, seed: int, position: int
) -> int:
    ids = np.sort(kept_by_sorting(logits, filters, order))
    if ids.size == 1:
        return int(ids[0])
    z = (logits[ids].astype(np.float64) - logits.max()) / filters[0]
    return int(ids[np.argmax(z - np.log(-np.log(noise(seed, position, ids.astype(np.int32)))))])


def rows_of(size: int, generator: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    peaked = generator.normal(0, 3, size)
    peaked[generator.integers(0, size, 12)] += 9
    ties = generator.integers(-3, 4, size).astype(np.float64)
    holes = generator.normal(0, 2, size)
    holes[generator.random(size) < 0.7] = -np.inf
    holes[size // 2] = 1.0
    zeros = np.where(np.arange(size) % 3 == 0, -0.0, 0.0)
    rows = {
        "peaked": peaked,
        "flat": generator.normal(0, 0.01, size),
        "ties": ties,
        "holes": holes,
        "zeros": zeros,
        "equal": np.full(size, -2.5),
        "extreme": generator.normal(0, 1, size) * 1e37,
        "tiny": generator.normal(0, 1, size) * 1e-40,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("size", [1, 2, 31, 33, 63, 64, 65, 1000, 4099])
def test_choice_equals_the_sorting_oracle(size: int):
    generator = np.random.default_rng(size)
    sampler = RowSampler(size)
    for name, row in rows_of(size, generator).items():
        order = sorted_ids(row)
        for filters in FILTERS:
            for seed in (0, 2**64 - 1):
                position = int(generator.integers(0, 100_000))
                chosen = sampler.choose(row, *filters, np.uint64(seed), position)
                assert chosen == choice_by_sorting(row, order, filters, seed, position), (name, filters)


def test_choice_equals_the_sorting_oracle_on_a_large_vocabulary():
    sampler = RowSampler(LARGE_VOCABULARY)
    for name, row in rows_of(LARGE_VOCABULARY, np.random.default_rng(7)).items():
        order = sorted_ids(row)
        for filters in FILTERS:
            chosen = sampler.choose(row, *filters, np.uint64(11), 5)
            assert chosen == choice_by_sorting(row, order, filters, 11, 5), (name, filters)


@pytest.mark.parametrize(
    "filters", [(1.0, 9, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.2), (1.0, 30, 0.7, 0.05), (1.0, 0, 1.0, 0.0)]
)
def test_exactly_the_kept_tokens_are_ever_chosen(filters: Filters):
    generator = np.random.default_rng(3)
    row = np.round(generator.normal(0, 1, 40), 1).astype(np.float32)
    sampler = RowSampler(row.size)
    chosen = {sampler.choose(row, *filters, np.uint64(1), position) for position in range(6_000)}
    assert chosen == set(kept_by_sorting(row, filters).tolist())


def test_draws_follow_the_softmax():
    row = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03])).astype(np.float32)
    sampler = RowSampler(row.size)
    draws = 10_000
    counts = np.bincount(
        [sampler.choose(row, 1.0, 0, 1.0, 0.0, np.uint64(9), position) for position in range(draws)], minlength=row.size
    )
    expected = np.exp(row.astype(np.float64)) * draws
    assert np.sum((counts - expected) ** 2 / expected) < 18.5  # chi-square, 4 degrees of freedom, 99.9 %


def test_temperature_sharpens_the_draws():
    row = np.array([1.0, 0.0], np.float32)
    sampler = RowSampler(row.size)
    for temperature in (0.5, 2.0):
        first = [sampler.choose(row, temperature, 0, 1.0, 0.0, np.uint64(4), p) for p in range(10_000)].count(0)
        assert abs(first / 10_000 - 1 / (1 + math.exp(-1 / temperature))) < 0.015


def test_noise_is_philox():
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for seed, position, token in ((0, 0, 0), (2**64 - 1, 2**31 - 1, 262_143), (7, 1, 64 + 32), (0x1234567890, 77, 5)):
        words = philox(seed, position, token // 64 * 32 + token % 32)
        low, high = words[2:] if token % 64 >= 32 else words[:2]
        expected = (((high << 32 | low) >> 12) + 0.5) * 2.0**-52
        assert noise(seed, position, np.array([token], np.int32))[0] == expected


def test_noise_of_neighbouring_places_is_unrelated():
    tokens = np.arange(20_000, dtype=np.int32)
    base = noise(5, 100, tokens)
    assert base.min() > 0.0 and base.max() < 1.0
    assert abs(base.mean() - 0.5) < 0.01 and abs(base.var() - 1 / 12) < 0.002
    counts = np.bincount((base * 256).astype(int), minlength=256)
    assert np.sum((counts - tokens.size / 256) ** 2 / (tokens.size / 256)) < 345  # chi-square, 255 degrees, 99.99 %
    for other in (noise(6, 100, tokens), noise(5, 101, tokens), noise(5 + 2**32, 100, tokens), np.roll(base, 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03


def test_noise_of_a_token_does_not_depend_on_the_other_candidates():
    row = np.random.default_rng(2).normal(0, 2, 500).astype(np.float32)
    sampler = RowSampler(row.size)
    winner = sampler.choose(row, 1.0, 0, 1.0, 0.0, np.uint64(3), 8)
    fewer = np.where(np.arange(row.size) % 2 == winner % 2, row, -np.inf).astype(np.float32)
    assert sampler.choose(fewer, 1.0, 0, 1.0, 0.0, np.uint64(3), 8) == winner


def test_same_seed_and_position_give_the_same_token_again():
    generator = np.random.default_rng(8)
    rows = generator.normal(0, 1, (50, 3000)).astype(np.float32)
    first = [RowSampler(3000).choose(row, 1.0, 50, 0.9, 0.0, np.uint64(1), p) for p, row in enumerate(rows)]
    sampler = RowSampler(3000)
    again = [sampler.choose(rows[p], 1.0, 50, 0.9, 0.0, np.uint64(1), p) for p in reversed(range(50))]
    assert first == again[::-1]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 100, 199])
def test_logits_that_are_not_finite_are_a_typed_error(value: float, place: int):
    row = np.zeros(200, np.float32)
    row[place] = value
    sampler = Sampler(200)
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelFileError, match="not finite for position 12"):
            sampler.choose(row, plan_of(200, temperature=temperature), 12, np.zeros(12, np.int32))
    assert sampler.choose(np.zeros(200, np.float32), plan_of(200, temperature=0.0), 12, np.zeros(12, np.int32)) == 0


def test_row_of_minus_infinity_leaves_nothing():
    row = np.full(70, -np.inf, np.float32)
    assert RowSampler(70).choose(row, 1.0, 0, 1.0, 0.0, np.uint64(0), 0) == NOTHING_LEFT
    plan = plan_of(2, logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(RequestError, match="no token is left"):
        Sampler(2).choose(np.zeros(2, np.float32), plan, 0, EMPTY)


def plan_of(vocab_size: int, **params: object) -> SamplingPlan:
    return SamplingPlan(SamplingParams(**params), vocab_size)  # type: ignore[arg-type]


def test_logit_bias_is_added_and_minus_infinity_forbids():
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    sampler = Sampler(3)
    assert sampler.choose(logits, plan_of(3, temperature=0, logit_bias={0: 2.5}), 0, EMPTY) == 0
    assert sampler.choose(logits, plan_of(3, temperature=0, logit_bias={2: -math.inf}), 0, EMPTY) == 1
    assert logits.tolist() == [1.0, 2.0, 3.0]


def penalised_by_hand(logits: NDArray[np.float32], params: SamplingParams, window: list[int]) -> NDArray[np.float32]:
    out = logits.copy()
    for token_id, bias in params.logit_bias.items():
        out[token_id] = np.float32(np.float64(out[token_id]) + bias)
    for token_id in set(window):
        value = np.float64(out[token_id])
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = window.count(token_id)
        out[token_id] = np.float32(value - count * params.frequency_penalty - params.presence_penalty)
    return out


@pytest.mark.parametrize("last_n", [0, 1, 3, 64, -1])
def test_penalties_equal_those_done_by_hand(last_n: int, monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(4)
    sampler = Sampler(30)
    seen: list[NDArray[np.float32]] = []

    def look(rows: RowSampler, row: NDArray[np.float32], *_: object) -> int:
        seen.append(row.copy())
        return 0

    monkeypatch.setattr(RowSampler, "choose", look)
    for trial in range(60):
        params = SamplingParams(
            repetition_penalty=float(generator.choice([1.0, 1.3, 0.7])),
            frequency_penalty=float(generator.choice([0.0, 0.4, -0.2])),
            presence_penalty=float(generator.choice([0.0, 0.6])),
            repetition_last_n=last_n,
            logit_bias={3: 1.5} if trial % 2 else {},
        )
        history = generator.integers(0, 30, 100).astype(np.int32)
        position = int(generator.integers(0, 100))
        logits = generator.normal(0, 3, 30).astype(np.float32)
        sampler.choose(logits, SamplingPlan(params, 30), position, history)
        start = 0 if last_n < 0 else max(0, position - last_n)
        expected = penalised_by_hand(logits, params, history[start:position].tolist())
        assert seen[-1].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", math.nan),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("repetition_last_n", -2),
        ("frequency_penalty", math.inf),
        ("presence_penalty", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"a": 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 1e30}),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object):
    with pytest.raises(RequestError, match=name.partition("[")[0]):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_numpy_numbers_and_whole_numbers_are_accepted():
    params = SamplingParams(temperature=np.float32(1), top_k=np.int64(5), top_p=1, seed=np.uint64(2**64 - 1))
    assert SamplingPlan(params, 10).seed == 2**64 - 1


def test_bias_of_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="token 10, but the vocabulary ends at 9"):
        plan_of(10, logit_bias={10: 1.0})


def test_seed_is_drawn_when_there_is_none():
    seeds = {plan_of(10).seed for _ in range(20)}
    assert len(seeds) > 15
    assert plan_of(10, seed=5).seed == 5
