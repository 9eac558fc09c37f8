"""The rare samplers against plain oracles that sort lists, one token after the other."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.sampling.filters import (
    Mirostat,
    dynamic_temperature,
    entropy,
    exclude_top,
    keep_candidates,
    likely,
    nucleus,
    scaled,
    surprise_bits,
    top_k,
    typical,
)
from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan
from tests.engine.sampling.test_sampling import kept_by_sorting, noise

EMPTY = np.zeros(0, np.int32)
OPEN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

Row = NDArray[np.float64]


def probabilities(logits: list[float], temperature: float = 1.0) -> list[float]:
    best = max(logits)
    weights = [math.exp((z - best) / temperature) for z in logits]
    return [weight / math.fsum(weights) for weight in weights]


def rows(size: int) -> dict[str, Row]:
    generator = np.random.default_rng(size)
    peaked = generator.normal(0, 1, size)
    peaked[size // 2] += 6
    return {
        "normal": generator.normal(0, 2, size),
        "peaked": peaked,
        "ties": generator.integers(-2, 3, size).astype(np.float64),
        "equal": np.full(size, 3.5),
    }


def every_row() -> list[Row]:
    return [row for size in (1, 2, 3, 17, 200) for row in rows(size).values()]


def typical_by_sorting(logits: list[float], p: float) -> set[int]:
    ps = probabilities(logits)
    expected = math.fsum(-q * math.log(q) for q in ps)
    order = sorted(range(len(ps)), key=lambda i: (round(abs(-math.log(ps[i]) - expected), 12), i))
    kept: set[int] = set()
    for index in order:
        kept.add(index)
        if math.fsum(ps[i] for i in kept) >= p:
            break
    return kept


@pytest.mark.parametrize("p", [0.0, 0.2, 0.51, 0.9, 0.999])
def test_typical_keeps_what_sorting_keeps(p: float) -> None:
    for row in every_row():
        assert set(np.flatnonzero(typical(scaled(row, 1.0), p))) == typical_by_sorting(row.tolist(), p)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 0.95, 0.9999])
def test_nucleus_and_top_k_keep_what_sorting_keeps(p: float) -> None:
    for row in every_row():
        narrow = row.astype(np.float32)
        wide = narrow.astype(np.float64)
        expected = set(kept_by_sorting(narrow, (0.7, 0, p, 0.0)).tolist())
        assert set(np.flatnonzero(nucleus(scaled(wide, 0.7), p))) == expected
        for k in {1, min(5, row.size), row.size}:
            assert set(np.flatnonzero(top_k(wide, k))) == set(kept_by_sorting(narrow, (1.0, k, 1.0, 0.0)).tolist())


def test_long_rows_keep_what_sorting_keeps() -> None:
    for row in rows(30_000).values():
        narrow = row.astype(np.float32)
        x = scaled(narrow, 1.0)
        weights = np.exp(x)
        for p in (0.05, 0.5, 0.97):
            expected = np.sort(kept_by_sorting(narrow, (1.0, 0, p, 0.0)))
            assert np.array_equal(np.flatnonzero(nucleus(x, p)), expected)
            shift = np.abs(np.log(weights.sum()) - x - entropy(x))
            order = np.argsort(shift, kind="stable")
            size = 1 + int(np.searchsorted(np.cumsum(weights[order]), p * weights.sum()))
            assert np.array_equal(np.flatnonzero(typical(x, p)), np.sort(order[:size]))


@pytest.mark.parametrize("threshold", [0.0, 0.003, 0.1, 0.5, 1.0])
def test_xtc_drops_all_choices_but_the_least_likely(threshold: float) -> None:
    for row in every_row():
        ps = probabilities(row.tolist())
        choices = [index for index, p in enumerate(ps) if p >= threshold * (1 - 1e-12)]
        spared = max(choices, key=lambda i: (-row[i], i), default=None)
        expected = [i for i in range(row.size) if i not in choices or i == spared]
        assert np.flatnonzero(exclude_top(scaled(row, 1.0), threshold)).tolist() == expected


def test_likely_keeps_a_share_of_the_best() -> None:
    assert likely(np.log(np.array([0.1, 0.5, 0.051, 0.04])), 0.1).tolist() == [True, True, True, False]


def test_top_n_sigma_keeps_logits_near_the_best() -> None:
    for row in every_row():
        for n in (0.3, 1.1, 2.3):
            params = SamplingParams(**OPEN, top_n_sigma=n)  # type: ignore[arg-type]
            mean = math.fsum(row) / row.size
            sigma = math.sqrt(math.fsum((z - mean) ** 2 for z in row) / row.size)
            expected = [i for i, z in enumerate(row) if z >= row.max() - n * sigma - 1e-12]
            assert keep_candidates(row, params, 1.0, 1.0).tolist() == expected


def test_forbidden_tokens_are_never_kept_nor_counted() -> None:
    row = np.array([1.0, -np.inf, 0.5, -np.inf])
    params = SamplingParams(**OPEN, top_n_sigma=5.0)  # type: ignore[arg-type]
    assert keep_candidates(row, params, 1.0, 1.0).tolist() == [0, 2]
    assert keep_candidates(row, SamplingParams(**OPEN), 1.0, 1.0).tolist() == [0, 2]  # type: ignore[arg-type]


def test_steps_follow_each_other_in_the_documented_order() -> None:
    row = np.log(np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04]))
    # Top-k leaves five, of 0.96; top-p then needs 0.816 and keeps four; XTC drops all but the last of at least 0.15.
    params = SamplingParams(temperature=1.0, top_k=5, top_p=0.85, min_p=0.0, xtc_probability=1.0, xtc_threshold=0.15)
    assert keep_candidates(row, params, 1.0, 0.5).tolist() == [2, 3]
    assert keep_candidates(row, params, 1.0, 1.0).tolist() == [0, 1, 2, 3]


def test_entropy_is_that_of_the_softmax() -> None:
    for row in every_row():
        ps = probabilities(row.tolist())
        assert math.isclose(entropy(scaled(row, 1.0)), math.fsum(-p * math.log(p) for p in ps), abs_tol=1e-12)


def test_dynamic_temperature_goes_from_certain_to_undecided() -> None:
    assert dynamic_temperature(np.array([2.0]), 1.0, 0.4, 1.0) == 0.6
    assert dynamic_temperature(np.zeros(8), 1.0, 0.4, 3.0) == 1.4
    assert 0.0 <= dynamic_temperature(np.array([900.0, 0.0]), 0.5, 2.0, 1.0) < 1e-9
    for row in every_row():
        if row.size > 1:
            share = entropy(scaled(row, 1.0)) / math.log(row.size)
            assert math.isclose(dynamic_temperature(row, 1.0, 0.5, 2.0), 0.5 + share**2)


def test_mirostat_lets_pass_what_its_limit_allows_and_adapts() -> None:
    mirostat = Mirostat(tau=2.0, eta=0.5)
    bits = surprise_bits(np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125])))
    assert bits.tolist() == pytest.approx([1, 2, 3, 4, 5, 5])
    bits = np.round(bits)
    assert mirostat.keep(bits, 7).tolist() == [True, True, True, True, False, False]
    mirostat.advance(4.0, 7)
    assert mirostat.limit(8) == 4.0 - 0.5 * (4.0 - 2.0)
    mirostat.advance(1.0, 7)
    assert mirostat.limit(8) == 4.0 + 0.5
    assert mirostat.limit(7) == 4.0
    strict = Mirostat(tau=0.0, eta=0.1)
    assert strict.keep(bits, 0).tolist() == [True] + [False] * 5


def test_mirostat_steers_towards_its_target() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (1500, 400)).astype(np.float32)
    sampler = Sampler(400)
    for tau in (4.0, 5.0):
        plan = SamplingPlan(SamplingParams(temperature=1.0, seed=3, mirostat=2, mirostat_tau=tau), 400)
        bits = []
        for position, row in enumerate(logits):
            token = sampler.choose(row, plan, position, EMPTY)
            ps = np.exp(row.astype(np.float64) - row.max())
            bits.append(-math.log2(ps[token] / ps.sum()))
        assert abs(np.mean(bits[100:]) - tau) < 0.1


def choose(row: NDArray[np.float32], position: int, **options: float) -> int:
    plan = SamplingPlan(SamplingParams(**(OPEN | options)), row.size)  # type: ignore[arg-type]
    return Sampler(row.size).choose(row, plan, position, EMPTY)


RARE = [
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"typical_p": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
]


@pytest.mark.parametrize("options", RARE)
def test_draw_is_the_largest_noisy_logit_of_what_is_kept(options: dict[str, float]) -> None:
    generator = np.random.default_rng(5)
    for position in range(30):
        row = generator.normal(0, 2, 300).astype(np.float32)
        params = SamplingParams(**(OPEN | options))  # type: ignore[arg-type]
        ids = keep_candidates(row.astype(np.float64), params, params.temperature, 0.0)
        x = row[ids].astype(np.float64) / params.temperature
        expected = ids[np.argmax(x - np.log(-np.log(noise(9, position, ids.astype(np.int32)))))]
        assert choose(row, position, **options, seed=9) == expected


def test_options_that_leave_everything_open_give_the_plain_choice() -> None:
    generator = np.random.default_rng(6)
    for position in range(20):
        row = generator.normal(0, 2, 100).astype(np.float32)
        plain = choose(row, position, seed=1)
        assert choose(row, position, seed=1, top_n_sigma=100.0) == plain
        assert choose(row, position, seed=1, xtc_probability=1.0, xtc_threshold=1.0) == plain
        assert choose(row, position, seed=1, mirostat=2, mirostat_tau=100.0) == plain


def test_xtc_decides_by_seed_and_position() -> None:
    row = np.log(np.array([0.6, 0.4])).astype(np.float32)
    options = {"xtc_threshold": 0.2, "xtc_probability": 0.3}
    picks = [choose(row, position, seed=2, **options) for position in range(2000)]
    assert abs(picks.count(0) / 2000 - 0.7 * 0.6) < 0.04
    assert picks == [choose(row, position, seed=2, **options) for position in range(2000)]
    assert picks != [choose(row, position, seed=3, **options) for position in range(2000)]


def test_greedy_ignores_filters() -> None:
    row = np.array([0.0, 3.0, 2.9], np.float32)
    for options in (*RARE, {"mirostat": 2}, {"dynatemp_range": 1.0}):
        assert choose(row, 0, **(options | {"temperature": 0.0})) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rare_steps_refuse_rows_that_are_not_finite(value: float) -> None:
    row = np.zeros(10, np.float32)
    row[4] = value
    with pytest.raises(Exception, match="not finite for position 3"):
        choose(row, 3, typical_p=0.5)
    with pytest.raises(Exception, match="no token is left"):
        choose(np.full(10, -np.inf, np.float32), 3, typical_p=0.5)


def test_extreme_rows_and_temperatures_give_a_token() -> None:
    row = (np.random.default_rng(1).normal(0, 1, 50) * 1e37).astype(np.float32)
    for temperature in (1e-300, 1.0, 10.0):
        for options in (*RARE[:3], {"mirostat": 2}, {"dynatemp_range": 1.0}):
            assert 0 <= choose(row, 1, **(options | {"temperature": temperature})) < 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 1.5),
        ("top_n_sigma", -1.0),
        ("top_n_sigma", math.inf),
        ("xtc_probability", 2),
        ("xtc_threshold", math.nan),
        ("dynatemp_range", -0.5),
        ("dynatemp_exponent", "1"),
        ("mirostat", 1),
        ("mirostat", 3),
        ("mirostat_tau", -1.0),
        ("mirostat_eta", 1.5),
        ("dry_multiplier", -1.0),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_last_n", -2),
        ("dry_breaker_ids", 5),
        ("dry_breaker_ids", "12"),
        ("dry_breaker_ids", [-1]),
        ("logprobs", -1),
        ("logprobs", 101),
        ("logprobs", True),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(Exception, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
