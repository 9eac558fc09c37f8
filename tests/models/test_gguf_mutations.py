"""Model files that contradict themselves, loaded all the way and run: they work, or are refused by a typed error."""

from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.apps.quantize import quantize
from localinfer.errors import ContextLengthError, ModelFileError, RequestError
from localinfer.quant.gguf.writer import encode_value
from tests.models.gguf_mutations import choose, injure_header, mutate, sound_models

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COUNT = 70


def run(path: Path, *, verify: bool = True) -> None:
    """Load the whole model, compute, and read every token."""
    with localinfer.load(path, threads=1, device="cpu", kv_memory=1 << 24, verify=verify) as llm:
        llm.logits([0, 1, 0])
        llm.complete([1, 0], max_tokens=2, temperature=0)


def test_sound_models_of_the_mutations_run(tmp_path: Path) -> None:
    for model in sound_models():
        run(model.write(tmp_path / "sound.gguf"))


@pytest.mark.parametrize("seed", range(2))
def test_mutated_model_runs_or_is_refused(tmp_path: Path, seed: int) -> None:
    """Any other exception fails the test; a crash ends it."""
    generator = np.random.default_rng(seed)
    models, path = sound_models(), tmp_path / "mutated.gguf"
    num_refused = 0
    for _ in range(COUNT):
        mutate(choose(models, generator), generator).write(path)
        if generator.random() < 0.25:
            path.write_bytes(injure_header(path.read_bytes(), generator))
        try:
            # Without verification kernels meet weights that are not finite.
            run(path, verify=bool(seed % 2))
        except (ModelFileError, ContextLengthError):
            # A context as short as one token is a model's right.
            num_refused += 1
    assert COUNT // 4 < num_refused < COUNT


def test_mutated_model_is_shown_and_quantized_or_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(9)
    models, path = sound_models(), tmp_path / "mutated.gguf"
    num_refused = 0
    for _ in range(COUNT):
        mutate(choose(models, generator), generator).write(path)
        status = main(["show", str(path)])
        assert status in (0, EXIT_BAD_INPUT)
        assert status == 0 or capsys.readouterr().err.startswith("error: ")
        try:
            quantize(path, tmp_path / "small.gguf", type="IQ4_NL", method="rtn", threads=1)
        except (ModelFileError, RequestError):
            num_refused += 1
    assert 0 < num_refused < COUNT


@pytest.mark.parametrize("value", ["two", 2.5, np.array([1.5]), [float("nan")], ["4", "4"]])
def test_number_of_heads_that_is_none_is_refused_by_its_key(value: object, tmp_path: Path) -> None:
    model = sound_models()[0]
    model.metadata["llama.attention.head_count_kv"] = encode_value(value)
    path = model.write(tmp_path / "wrong.gguf")
    with pytest.raises(ModelFileError, match="head_count_kv"):
        run(path)
    with pytest.raises(ModelFileError, match="head_count_kv"):
        quantize(path, tmp_path / "small.gguf", type="Q4_0", method="rtn", threads=1)
