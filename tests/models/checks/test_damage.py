"""Damage of weights is found by a load's samples, and all of it by reading every byte."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.ops import Pairing
from localinfer.models.checks import Finding, shortened
from localinfer.models.checks.tensor_samples import (
    ByteRun,
    is_damage,
    is_one_word,
    judge_copies,
    judge_halves,
    run_around,
)
from localinfer.models.checks.tensor_scan import RunFinder, _other_order, check_tensors
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.quant.formats.types import TensorRecord, TensorType
from tests.models.arch_models import skeletons
from tests.models.checks.broken_models import findings_of
from tests.models.checks.editable_model import EditableModel, base_model
from tests.models.checks.planted_faults import HEALTHY, plant

AT_LOAD = {
    "hole of zeros": "weights hole",
    "hole of zeros, F16": "weights hole",
    "hole in the table": "weights hole",
    "constant bytes": "weights hole",
    "zero tail": "weights zero",
    "random bytes": "weights outlier",
    "shifted bytes": "weights outlier",
    "large tensor": "weights scale",
    "float16 overflow": "weights not finite",
    "other byte order": "weights not finite",
    "another type of equal size": "weights scale",
    "halves that differ": "weights halves",
    "all experts but one zero": "weights zero",
    "one expert zero": "weights zero",
    "router zero": "weights zero",
    "shared experts zero": "weights zero",
    "layer twice": "weights copied",
    "tensor of another layer": "weights copied",
}
BY_READING_ALL = {
    **AT_LOAD,
    "zero tail": "weights hole",
    "random bytes": "weights not finite",
    "shifted bytes": "weights not finite",
    "repeated blocks": "weights hole",
    "NaN in a block": "weights not finite",
    "bit flips in scales": "weights outlier",
    "large scales of a row": "weights outlier",
    "experts alike": "weights copied",
    "half of the heads": "weights copied",
    "half of the heads zero": "weights zero",
    "heads permuted twice": "head order",
    "heads not permuted": "head order",
    "keys permuted": "head order",
}
WAYS_OUT = ("download the model again", "get another conversion", "get a current conversion")


def scanned(path: Path) -> list[Finding]:
    """What reading every weight finds."""
    file = open_model_file(path)
    try:
        return list(check_tensors(file, None, read_config(file)))
    finally:
        file.close()


def said(findings: list[Finding]) -> set[str]:
    """The checks that found something; each line has a way out, or refers to one."""
    for one in findings:
        assert one.message.isprintable() and not one.message.endswith(".")
        assert any(way in one.message for way in WAYS_OUT) or "see the lines above" in one.message
    return {one.check for one in findings}


@pytest.mark.parametrize("name", list(BY_READING_ALL))
def test_damage_is_seen_when_every_byte_is_read_and_much_of_it_in_the_samples_of_a_load(
    name: str, tmp_path: Path
) -> None:
    path = plant(name, tmp_path)
    assert BY_READING_ALL[name] in said(scanned(path))
    if name in AT_LOAD:
        assert AT_LOAD[name] in said(findings_of(path))


FIXTURES = [name for name in HEALTHY if name in skeletons()]
SAME_TYPES = ("demo-Q3_K_S", "demo-Q3_K_L", "demo-Q4_K_S", "demo-Q5_K_S", "demo-Q6_K", "demo-MXFP4_MOE")
"""Whose types of tensors others have too."""
OTHERS = [name for name in HEALTHY if name not in skeletons() and name not in SAME_TYPES]


@pytest.mark.parametrize("names", [OTHERS, FIXTURES[::12]], ids=["types of files", "architectures"])
def test_whole_models_have_no_damage(names: list[str]) -> None:
    """Of the architectures some; `planted_faults --healthy` has them all."""
    for name in names:
        path = base_model(name)
        assert [*findings_of(path), *scanned(path)] == [], name


def unused_tokens(model: EditableModel) -> None:
    """Rows of zeros, of tokens that no text has, at the end of the table and in it."""

    def change(weights: NDArray[np.float32]) -> NDArray[np.float32]:
        weights[700:1000] = weights[-500:] = 0
        return weights

    model.change("token_embd.weight", change)


def equal_tokens(model: EditableModel) -> None:
    """Rows of tokens that were never trained, all as they began."""

    def change(weights: NDArray[np.float32]) -> NDArray[np.float32]:
        weights[700:1000] = weights[700]
        return weights

    model.change("token_embd.weight", change)


def merged_with_itself(model: EditableModel) -> None:
    for layer in (1, 3, 5):
        for name in model.layer(layer):
            model.weights[f"blk.{layer}.{name}"] = model.weights[f"blk.{layer - 1}.{name}"]


def pruned_neurons(model: EditableModel) -> None:
    def change(weights: NDArray[np.float32]) -> NDArray[np.float32]:
        weights[::16] = 0
        return weights

    model.change("blk.2.ffn_up.weight", change)


@pytest.mark.parametrize("base", ["demo-f16", "demo-Q8_0"])
@pytest.mark.parametrize("change", [unused_tokens, equal_tokens, merged_with_itself, pruned_neurons])
def test_what_models_have_on_purpose_is_no_damage(
    base: str, change: Callable[[EditableModel], None], tmp_path: Path
) -> None:
    model = EditableModel.read(base_model(base))
    change(model)
    path = model.write(tmp_path / "whole.gguf")
    assert [*findings_of(path), *scanned(path)] == []


def noise(size: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def in_pieces(data: NDArray[np.uint8], size: int = 4998) -> RunFinder:
    finder = RunFinder()
    for start in range(0, len(data), size):
        finder.add(data[start : start + size])
    return finder


def reader(data: NDArray[np.uint8]) -> Callable[[int, int], NDArray[np.uint8]]:
    return lambda start, end: data[start:end]


@pytest.mark.parametrize("word", [bytes(8), b"\x2c" * 8, b"\xde\xad\xbe\xef" * 2])
def test_runs_of_a_word_are_found_across_pieces(word: bytes) -> None:
    data = noise(60_000)
    assert in_pieces(data).runs() == []
    data[10_000:24_000] = np.frombuffer(word * 1750, np.uint8)
    (run,) = in_pieces(data).runs()
    assert (run.start, run.end) == (10_000, 24_000)
    around = run_around(reader(data), len(data), 17_003)
    assert abs(around.start - 10_000) <= 1 and abs(around.end - 24_000) <= 1
    data[24_000:] = np.resize(np.frombuffer(word, np.uint8), 36_000)
    (run,) = in_pieces(data).runs()
    assert (run.start, run.end) == (10_000, 60_000)
    assert run_around(reader(data), len(data), 59_000).end == 60_000


@pytest.mark.parametrize("distance", [4096, 18 * 300, 20_006])
def test_stretches_that_lie_there_twice_are_found(distance: int) -> None:
    data = noise(120_000)
    assert list(in_pieces(data).repeats(reader(data))) == []
    start = 50_006
    data[start + distance : start + distance + 4000] = data[start : start + 4000]
    (run,) = in_pieces(data).repeats(reader(data))
    assert run.distance == distance
    assert abs(run.start - start - distance) <= 1 and abs(run.end - start - distance - 4000) <= 1


@pytest.mark.parametrize(
    ("run", "all_rows", "wanted"),
    [
        (ByteRun(1000, 5000), True, True),
        (ByteRun(1000, 5000), False, True),
        (ByteRun(1024, 5120), False, False),
        (ByteRun(1024, 5120), True, False),
        (ByteRun(1022, 5123), True, False),
        (ByteRun(512 * 100, 512 * 200), True, True),
        (ByteRun(512 * 100, 512 * 200), False, False),
        (ByteRun(512 * 100, 512 * 200, distance=512), True, False),
        (ByteRun(1100, 1400), True, False),
    ],
)
def test_a_run_that_ends_within_a_row_is_damage(run: ByteRun, all_rows: bool, wanted: bool) -> None:
    info = TensorRecord("blk.0.ffn_up.weight", TensorType.F16, (768, 256))
    assert is_damage(run, info, all_rows=all_rows) == wanted
    for shape in ((768 * 256,), (768 * 16, 16)):
        assert not is_damage(run, TensorRecord("a", TensorType.F16, shape), all_rows=all_rows)


def test_types_of_tokens_and_decays_may_be_zero_or_alike(tmp_path: Path) -> None:
    encoder = EditableModel.read(base_model("bert-encoder"))
    encoder.change("token_types.weight", lambda w: w * np.array([[1], [0]], np.float32))
    recurrent = EditableModel.read(base_model("mamba-recurrent"))
    recurrent.change_all("ssm_a", lambda a: np.where(np.arange(a.size).reshape(a.shape) < a.size - 5, a[:1], a))
    for model in (encoder, recurrent):
        path = model.write(tmp_path / "whole.gguf")
        assert [*findings_of(path), *scanned(path)] == []


def test_one_word_is_told_from_two() -> None:
    assert is_one_word(np.tile(np.array([1, 2], np.uint8), 9)) and not is_one_word(noise(18))


def test_halves_and_copies_are_compared_with_other_layers() -> None:
    alike = [(f"blk.{layer}.attn_qkv.weight", 7.0) for layer in range(6)]
    assert list(judge_halves(alike)) == []
    (finding,) = judge_halves([*alike, ("blk.6.attn_qkv.weight", 0.1)])
    assert "the first half of blk.6.attn_qkv.weight is 10 times larger" in finding.message
    assert list(judge_halves(alike[:2])) == []
    names = [f"blk.{layer}.{kind}.weight" for layer in range(4) for kind in ("ffn_up", "ffn_down")]
    assert list(judge_copies((name, name.encode()) for name in names)) == []
    assert list(judge_copies((name, name[6:].encode()) for name in names)) == [], "every layer is the same one"


@pytest.mark.parametrize("pairing", list(Pairing))
def test_heads_in_another_order_are_told_by_the_sizes_of_their_rows(pairing: Pairing) -> None:
    generator = np.random.default_rng(3)
    slopes = generator.normal(1, 0.3, (60, 1)) * np.linspace(-1, 1, 32)
    pairs = slopes[:, :, None] + generator.normal(0, 0.3, (60, 32, 2))
    pairs -= pairs.mean(axis=(1, 2), keepdims=True)
    in_pairs, in_halves = pairs.reshape(60, 64), pairs.swapaxes(1, 2).reshape(60, 64)
    twice = in_pairs.reshape(60, 2, 32).swapaxes(1, 2).reshape(60, 64)
    shuffled = generator.permuted(in_pairs, axis=1)
    good, other = (in_pairs, in_halves) if pairing is Pairing.ADJACENT else (in_halves, in_pairs)
    assert _other_order(good, pairing) is None and _other_order(shuffled, pairing) is None
    assert _other_order(other, pairing) is not None
    if pairing is Pairing.ADJACENT:
        assert _other_order(twice, pairing) == "were permuted twice"


def test_many_findings_of_a_kind_are_counted() -> None:
    findings = [Finding("a", f"blk.{index}.x is bad; download the model again") for index in range(9)]
    found = shortened([*findings, Finding("b", "c")])
    assert found[:3] == findings[:3] and found[4] == Finding("b", "c")
    assert found[3].message == "6 more tensors are so too, the last blk.8.x; see the lines above"
    assert shortened(findings[:4]) == findings[:4]
