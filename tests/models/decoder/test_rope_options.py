"""Rotations that a caller asks for: the frequencies of their papers, the bits of a file that says the same."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.errors import CorruptFileError, RequestError
from localinfer.kernels.ops import Pairing
from localinfer.loading.options import model_changes, model_path
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.positions import rope_table
from localinfer.models.decoder.rope_options import RopeOptions, rope_metadata
from localinfer.models.load.loader import load_model
from localinfer.quant.gguf.reader import read_gguf
from tests.models.arch_models import build_model
from tests.models.checkpoint.family_folders import write_family
from tests.models.small_models import HEAD_SIZE, VOCAB, write_small_llama

TRAINED = 128
TOKEN_IDS = np.random.default_rng(2).integers(0, VOCAB, 90).astype(np.int32)


def linear(base: float, factor: float, size: int = HEAD_SIZE) -> tuple[NDArray[np.float64], float]:
    """Position interpolation, pair by pair: frequencies and magnitude."""
    return np.array([base ** (-2 * pair / size) / factor for pair in range(size // 2)]), 1.0


def yarn(
    base: float,
    factor: float,
    original: int = TRAINED,
    fast: float = 32.0,
    slow: float = 1.0,
    kept: float = 1.0,
    attention: float = 1.0,
    size: int = HEAD_SIZE,
) -> tuple[NDArray[np.float64], float]:
    """YaRN, pair by pair, from section 3 of the paper, its ramp over the index of the pair as published code has it."""
    first = max(0, math.floor(size * math.log(original / (fast * 2 * math.pi)) / (2 * math.log(base))))
    last = min(size - 1, math.ceil(size * math.log(original / (slow * 2 * math.pi)) / (2 * math.log(base))))
    found = []
    for pair in range(size // 2):
        plain = base ** (-2 * pair / size)
        ramp = min(1.0, max(0.0, (pair - first) / max(0.001, last - first)))
        share = (1 - ramp) * kept
        found.append(plain / factor * (1 - share) + plain * share)
    return np.array(found), attention * (1 + 0.1 * math.log(factor))


CASES: dict[str, tuple[dict[str, Any], tuple[NDArray[np.float64], float]]] = {
    "linear": ({"scaling": "linear", "scale": 4.0}, linear(1e4, 4.0)),
    "scale": ({"scale": 2.5}, linear(1e4, 2.5)),
    "frequency-scale": ({"frequency_scale": 0.25}, linear(1e4, 4.0)),
    "base": ({"base": 5e5}, linear(5e5, 1.0)),
    "base-linear": ({"base": 5e5, "scale": 2.0}, linear(5e5, 2.0)),
    "none": ({"scaling": "none"}, linear(1e4, 1.0)),
    "yarn": ({"scaling": "yarn", "scale": 4.0}, yarn(1e4, 4.0)),
    "yarn-original": ({"scaling": "yarn", "scale": 4.0, "yarn_original_context": 64}, yarn(1e4, 4.0, original=64)),
    "yarn-betas": (
        {"scaling": "yarn", "scale": 4.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
        yarn(1e4, 4.0, fast=8.0, slow=2.0),
    ),
    "yarn-factors": (
        {"scaling": "yarn", "frequency_scale": 0.125, "yarn_extrapolation_factor": 0.5, "yarn_attention_factor": 0.7},
        yarn(1e4, 8.0, kept=0.5, attention=0.7),
    ),
}


def small_metadata(path: Path, **extra: Any) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    with read_gguf(write_small_llama(path, extra=extra)) as file:
        return dict(file.metadata), {name: info.shape for name, info in file.tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_the_papers(name: str, tmp_path: Path) -> None:
    options, (frequencies, magnitude) = CASES[name]
    metadata, shapes = small_metadata(tmp_path / "model.gguf")
    changed = {**metadata, **rope_metadata(RopeOptions(**options), metadata, "llama", None)}
    table = rope_table(ModelConfig.from_metadata(changed, shapes).rope, Pairing.ADJACENT)
    np.testing.assert_allclose(table.inverse_frequencies, frequencies, rtol=1e-13)
    assert table.magnitude == pytest.approx(magnitude, rel=1e-13)


def test_scale_follows_from_the_context_asked_for(tmp_path: Path) -> None:
    metadata, shapes = small_metadata(tmp_path / "model.gguf")
    for options, factor in (({"scaling": "yarn"}, 4.0), ({"scaling": "yarn", "yarn_original_context": 64}, 8.0)):
        changed = {**metadata, **rope_metadata(RopeOptions(**options), metadata, "llama", 4 * TRAINED)}
        assert ModelConfig.from_metadata(changed, shapes).rope.factor == factor
    with pytest.raises(RequestError, match="give a scale, or a context_length above the 128 tokens"):
        rope_metadata(RopeOptions(scaling="linear"), metadata, "llama", TRAINED)


def test_what_is_not_asked_for_stays_as_the_file_says(tmp_path: Path) -> None:
    extra = {"rope.scaling.type": "yarn", "rope.scaling.factor": 3.0, "rope.scaling.original_context_length": 32}
    metadata, shapes = small_metadata(tmp_path / "model.gguf", **extra)
    for options in ({"yarn_beta_fast": 16.0}, {"scaling": "yarn", "yarn_beta_fast": 16.0}):
        changed = {**metadata, **rope_metadata(RopeOptions(**options), metadata, "llama", None)}
        rope = ModelConfig.from_metadata(changed, shapes).rope
        assert (rope.scaling, rope.factor, rope.original_context_length, rope.beta_fast) == ("yarn", 3.0, 32, 16.0)
    rope = ModelConfig.from_metadata(
        {**metadata, **rope_metadata(RopeOptions(scale=6.0), metadata, "llama", None)}, shapes
    ).rope
    assert (rope.scaling, rope.factor) == ("yarn", 6.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RopeOptions(scaling="dynamic"), "give one of none, linear, yarn"),
        (lambda: RopeOptions(scaling=3), "scaling is 3"),  # type: ignore[arg-type]
        (lambda: RopeOptions(scale=0.0), "scale is 0.0"),
        (lambda: RopeOptions(scale=math.nan), "scale is nan"),
        (lambda: RopeOptions(scale=True), "scale is True"),
        (lambda: RopeOptions(scale="2"), "scale is '2'"),  # type: ignore[arg-type]
        (lambda: RopeOptions(base=10**400), "base is a number of about"),
        (lambda: RopeOptions(base=1.0), "base is 1.0"),
        (lambda: RopeOptions(yarn_original_context=0), "yarn_original_context is 0"),
        (lambda: RopeOptions(yarn_beta_fast=0.0), "yarn_beta_fast is 0.0"),
        (lambda: RopeOptions(scale=2.0, frequency_scale=0.5), "give one of them"),
        (lambda: RopeOptions(scaling="none", scale=2.0), "leave one of them out"),
    ],
)
def test_options_without_meaning_are_refused(make: Callable[[], RopeOptions], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"yarn_beta_fast": 8.0}, "none", "yarn_beta_fast applies to YaRN only"),
        ({"scale": 2.0, "yarn_original_context": 64}, "none", "yarn_original_context applies to YaRN only"),
        ({"scale": 2.0}, "longrope", "scales every pair"),
    ],
)
def test_options_that_do_not_go_with_the_file_are_refused(options: dict[str, Any], kind: str, words: str) -> None:
    metadata = {"llama.context_length": 128, "llama.rope.scaling.type": kind}
    with pytest.raises(RequestError, match=words):
        rope_metadata(RopeOptions(**options), metadata, "llama", None)


EXTRA = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.freq_base": 5000.0,
}
ASKED = RopeOptions(scaling="yarn", scale=4.0, yarn_original_context=64, yarn_beta_fast=8.0, base=5000.0)


def test_options_and_overrides_give_the_bits_of_a_file_that_says_the_same(tmp_path: Path) -> None:
    plain, said = write_small_llama(tmp_path / "a.gguf"), write_small_llama(tmp_path / "b.gguf", extra=EXTRA)

    def logits(path: Path, **options: Any) -> NDArray[np.float32]:
        with localinfer.load(path, threads=1, speculation=None, **options) as llm:
            return llm.logits(TOKEN_IDS)

    wanted = logits(said)
    np.testing.assert_array_equal(logits(plain, rope=ASKED), wanted)
    np.testing.assert_array_equal(
        logits(plain, overrides={f"llama.{key}": value for key, value in EXTRA.items()}), wanted
    )
    assert not np.array_equal(logits(plain), wanted)
    np.testing.assert_array_equal(logits(said, rope=RopeOptions(scaling="none", base=1e4)), logits(plain))


def test_same_prefix_gives_the_same_bits_beyond_the_context_trained_for(tmp_path: Path) -> None:
    path = write_small_llama(tmp_path / "model.gguf")
    ids = np.random.default_rng(3).integers(0, VOCAB, 2 * TRAINED).astype(np.int32)
    for rope in (ASKED, RopeOptions(scale=2.0), None):
        with localinfer.load(path, threads=1, context_length=300, rope=rope, speculation=None) as llm:
            whole = llm.logits(ids)
        with localinfer.load(path, threads=2, context_length=400, rope=rope, speculation=None) as llm:
            for length in (1, 33, TRAINED, TRAINED + 1, 2 * TRAINED):
                np.testing.assert_array_equal(llm.logits(ids[:length]), whole[:length])


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "trained for" in record.getMessage()]
    caplog.clear()
    return found


def test_longer_context_is_allowed_by_name_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with localinfer.load(speculation=None, threads=1) as llm:
        assert llm.context_length == 1024
    with localinfer.load(speculation=None, threads=1, context_length=1024):
        assert warned(caplog) == []
    with localinfer.load(speculation=None, threads=1, context_length=1100) as llm:
        (message,) = warned(caplog)
        assert "context_length is 1100, but the model was trained for 1024" in message and "rope" in message
        done = llm.complete([5] * 1020, max_tokens=20, ignore_eos=True)
        assert len(done.token_ids) == 20
    rope = RopeOptions(scaling="yarn")
    with localinfer.load(speculation=None, threads=1, context_length=1100, rope=rope):
        assert len(warned(caplog)) == 1


def test_longer_context_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    gpt2 = build_model(tmp_path, "gpt2-dense").path
    with pytest.raises(RequestError, match="a learned vector for each position; give that or less"):
        load_model(gpt2, context_length=257, threads=1)
    with pytest.raises(RequestError, match="do not rotate positions; leave the rope options out"):
        load_model(gpt2, threads=1, changes=model_changes(rope=RopeOptions(base=1e5)))
    with pytest.raises(RequestError, match="and the maximum is"):
        load_model(model_path(None), context_length=1 << 40, threads=1)


def test_dynamic_scaling_of_a_folder_ends_at_the_context_trained_for(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "granite")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"linear"', '"dynamic"'))
    load_model(folder, context_length=128, threads=1).close()
    with pytest.raises(RequestError, match="dynamic scaling of positions"):
        load_model(folder, context_length=129, threads=1)
    changes = model_changes(rope=RopeOptions(scaling="linear"))
    load_model(folder, context_length=256, threads=1, changes=changes).close()


def test_hunyuan_stretches_its_base_by_its_formula(tmp_path: Path) -> None:
    metadata, shapes = small_metadata(tmp_path / "model.gguf")
    changed = {key.replace("llama.", "hunyuan-dense."): value for key, value in metadata.items()}
    changed |= {"general.architecture": "hunyuan-dense", "hunyuan-dense.rope.scaling.alpha": 50.0}
    found = find_architecture(ModelConfig.from_metadata(changed, shapes)).rope_base
    assert found == pytest.approx(1e4 * 50.0 ** (HEAD_SIZE / (HEAD_SIZE - 2)), rel=1e-12)
    with pytest.raises(CorruptFileError, match=r"rope\.scaling\.alpha is 0\.5"):
        ModelConfig.from_metadata({**changed, "hunyuan-dense.rope.scaling.alpha": 0.5}, shapes)


def test_default_context_is_the_one_trained_for_whatever_the_rotation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_small_llama(tmp_path / "model.gguf")
    with caplog.at_level(logging.WARNING):
        model = load_model(path, threads=1, changes=model_changes(rope=RopeOptions(scale=4.0)))
    assert model.config.context_length == TRAINED and warned(caplog) == []
    model.close()
