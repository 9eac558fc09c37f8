"""`localinfer quantize`, `compare` and `perplexity` on the demo model, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.apps.evaluate import measure
from localinfer.apps.quantize import quantize as quantize_model
from localinfer.errors import TemplateError
from localinfer.models import demo
from localinfer.models.calibration import scales as scale_calibration
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, encode_value
from localinfer.quant.methods.imatrix import read_imatrix
from tests.support.limits import wait_until
from tests.support.warm_python import WarmPython

MODEL = Path(demo.__file__).parent / "demo-f16.gguf"


def write_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Importance for every matrix of the demo model's layers."""
    generator = np.random.default_rng(1)
    with read_gguf(MODEL) as model:
        shapes = {name: info.shape for name, info in model.tensors.items() if len(info.shape) == 2 and "blk" in name}
    squares = {name: generator.random((1, shape[1]), np.float32) for name, shape in shapes.items()}
    specs, data = [], []
    for name, values in squares.items():
        specs += [TensorRecord(f"{name}.in_sum2", TensorType.F32, values.shape)]
        specs += [TensorRecord(f"{name}.counts", TensorType.F32, (1, 1))]
        data += [values * 2, np.full((1, 1), 2, np.float32)]
    with GGUFWriter(path, {"general.type": encode_value("imatrix")}, specs) as writer:
        for values in data:
            writer.write(values)
    return squares


def test_quantize_reports_layers_size_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "small.gguf"
    assert main(["quantize", str(MODEL), str(target), "--method", "rtn", "--threads", "2", "--chunks", "1"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split() == ["layer", "error", "types"]
    assert lines[1].split()[0] == "token_embd.weight"
    assert [line.split()[0] for line in lines[2:8]] == list("012345")
    assert f"{target.stat().st_size:,} bytes, 5.05 bits per weight" in lines[-2]
    assert lines[-1].startswith("against the source: KL divergence 0.0")
    assert output.err == ""
    with read_gguf(target) as model:
        assert model.metadata["general.file_type"] == 15
        assert model.tensor("blk.0.attn_q.weight").type is TensorType.Q4_K


def test_quantize_minds_importance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, imatrix = tmp_path / "small.gguf", tmp_path / "imatrix.gguf"
    squares = write_imatrix(imatrix)
    words = ["quantize", str(MODEL), str(target), "--type", "Q4_1", "--chunks", "0", "--method", "imatrix"]
    assert main([*words, "--imatrix", str(imatrix)]) == 0
    assert "no importance: the imatrix has none for token_embd.weight" in capsys.readouterr().out
    name = "blk.2.ffn_down.weight"
    with read_gguf(MODEL) as source, read_gguf(target) as model:
        info = source.tensor(name)
        values = dequantize(source.tensor_bytes(name), info.type, info.shape)
        wanted = quantize(values, TensorType.Q4_1, squares[name])
        np.testing.assert_array_equal(model.tensor_bytes(name), wanted.reshape(-1))


def test_fallbacks_are_told_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: Path) -> None:
    words = ["quantize", str(shared / "models" / "stories260K.gguf"), str(tmp_path / "s.gguf"), "--chunks", "0"]
    assert main([*words, "--type", "q4_0", "--method", "rtn"]) == 0
    output = capsys.readouterr().out
    assert "fallback: token_embd.weight became Q8_0, not Q6_K: rows of 64 are not a multiple of 256" in output
    assert "fallback: ffn_down.weight of 5 layers became F16, not Q4_0: rows of 172 are not a multiple of 32" in output
    assert "(the preset alone: 4.83)" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--type", "q4"], "there is no type 'q4'; wanted one of F16, "),
        (["--method", "gptq", "--imatrix", "x"], "leave --imatrix out"),
        (["--method", "rtn", "--calibration", "x"], "leave --calibration and --save-imatrix out"),
        (["--calibration", "missing.txt"], "missing.txt cannot be read"),
        (["--method", "rtn", "--imatrix", "x"], "leave --imatrix out"),
        (["--imatrix", "missing.dat"], "missing.dat cannot be opened"),
        (["--text", "missing.txt"], "missing.txt cannot be read"),
        (["--threads", "100000"], "threads is 100000"),
    ],
)
def test_quantize_refuses_what_makes_no_sense(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(MODEL), str(tmp_path / "out.gguf"), *words]) == EXIT_BAD_INPUT
    output = capsys.readouterr()
    assert message in output.err
    assert (output.err.count("\n"), output.out) == (1, "")
    assert list(tmp_path.iterdir()) == []


def test_quantize_refuses_to_overwrite_its_source_or_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(MODEL.read_bytes())
    assert main(["quantize", str(copy), str(copy)]) == EXIT_BAD_INPUT
    assert "is the model to quantize" in capsys.readouterr().err
    assert main(["quantize", str(copy), str(tmp_path)]) == EXIT_BAD_INPUT
    assert "is a folder" in capsys.readouterr().err
    assert copy.read_bytes() == MODEL.read_bytes()


def test_a_loss_that_cannot_be_measured_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "small.gguf"
    text.write_text("Too short.")
    assert main(["quantize", str(MODEL), str(target), "--type", "q8_0", "--text", str(text)]) == 0
    assert "loss not measured: the text has" in capsys.readouterr().out
    assert target.exists()


def test_compare_and_perplexity_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "small.gguf"
    assert main(["quantize", str(MODEL), str(target), "--type", "q8_0", "--chunks", "0"]) == 0
    capsys.readouterr()
    options = ["--chunks", "2", "--context-length", "128", "--threads", "1", "--json"]
    assert main(["compare", str(MODEL), str(target), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 126
    assert 0 < found["kl_divergence_nats"]["mean"] < 0.01
    assert found["same_top"] > 0.9
    assert main(["perplexity", str(target), *options]) == 0
    assert json.loads(capsys.readouterr().out) == found["candidate"]
    assert main(["perplexity", str(target), *options[:-1]]) == 0
    assert capsys.readouterr().out.startswith(f"perplexity {found['candidate']['perplexity']:.4f} +- ")


def test_compare_asks_models_with_a_template_unless_told_not_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "QUESTIONS", measure.QUESTIONS[:2])
    words = ["compare", str(MODEL), str(MODEL), "--chunks", "1", "--context-length", "192", "--threads", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("right answers: ")
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["right_answers"]) == 2
    assert main([*words, "--no-questions"]) == 0
    assert "right answers" not in capsys.readouterr().out

    def refuse(*arguments: object, **options: object) -> None:
        raise TemplateError("no questions, please")

    monkeypatch.setattr(measure, "ask", refuse)
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("sanity checks not run: no questions, please\n")
    assert main([*words, "--questions"]) == EXIT_BAD_INPUT
    assert "no questions, please" in capsys.readouterr().err


def test_encoders_are_compared_on_answers_about_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeing = pytest.importorskip("tests.support.seeing_model", reason="Pillow is an optional package")
    model, pictures = str(seeing.seeing_demo(tmp_path / "model")), tmp_path / "pictures"
    pictures.mkdir()
    for seed in range(2):
        (pictures / f"{seed}.png").write_bytes(seeing.picture_file(seed))
    (pictures / "notes.txt").write_text("no picture")
    encoders = {
        kind: str(seeing.write_mmproj(tmp_path / f"{kind}.gguf", model_width(model), kind=kind))
        for kind in ("F16", "Q8_0")
    }
    command = ["compare", model, model, "--image", str(pictures), "--threads", "1", "--json"]

    def compared(*options: str) -> dict[str, Any]:
        assert main([*command, *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    same = compared()
    assert 2 <= same["num_tokens"] <= 2 * measure.PICTURE_TOKENS and "right_answers" not in same
    assert same["kl_divergence_nats"]["max"] == 0 and same["same_top"] == 1
    loss = compared("--mmproj", encoders["F16"], "--candidate-mmproj", encoders["Q8_0"])
    assert 0 < loss["kl_divergence_nats"]["mean"] < 0.1
    one = compared("--mmproj", encoders["F16"], "--candidate-mmproj", encoders["Q8_0"], "--chunks", "1")
    assert one["num_tokens"] < loss["num_tokens"]
    assert compared("--mmproj", encoders["Q8_0"])["kl_divergence_nats"]["max"] == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, told in (
        (["--image", str(empty)], "empty has no pictures"),
        (["--mmproj", encoders["F16"]], "compared on pictures; add --image"),
        (["text.txt", "--image", str(pictures)], "two measurements"),
    ):
        assert main(["compare", model, model, *words]) == EXIT_BAD_INPUT
        assert told in capsys.readouterr().err


def model_width(path: str) -> int:
    with read_gguf(path) as file:
        width = file.metadata[f"{file.metadata['general.architecture']}.embedding_length"]
    assert isinstance(width, int)
    return width


def test_calibration_keeps_more_than_rounding_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounded, calibrated = tmp_path / "rounded.gguf", tmp_path / "calibrated.gguf"
    assert main(["quantize", str(MODEL), str(rounded), "--type", "q4_0", "--method", "rtn", "--chunks", "1"]) == 0
    words = ["--type", "q4_0", "--calibration-tokens", "512", "--chunks", "1"]
    assert main(["quantize", str(MODEL), str(calibrated), *words]) == 0
    output = capsys.readouterr().out
    first, second = (float(line.split()[5]) for line in output.splitlines() if line.startswith("against"))
    assert second < 0.8 * first
    assert {path.name for path in tmp_path.iterdir()} == {"rounded.gguf", "calibrated.gguf"}
    assert rounded.stat().st_size == calibrated.stat().st_size


def test_a_killed_calibration_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.gguf", tmp_path / "killed.gguf"
    options = ["--type", "q4_0", "--method", "gptq", "--calibration-tokens", "512", "--chunks", "0", "--threads"]
    assert main(["quantize", str(MODEL), str(whole), *options, "1"]) == 0
    command = [sys.executable, "-m", "localinfer", "quantize", str(MODEL), str(killed), *options, "2"]
    unfinished = tmp_path / "killed.gguf.partial"
    child = WarmPython(command, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: (unfinished / "state.npz").exists() or child.poll() is not None, 60)
        assert child.poll() is None, "it ended before it could be killed"
    finally:
        child.kill()
        child.wait()
    assert not killed.exists()
    first = unfinished / "layer-0000.npz"
    written = first.stat().st_mtime_ns
    layers: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "calibrating":
            layers.append(done)
            assert first.stat().st_mtime_ns == written

    options_of_call = {"type": "q4_0", "method": "gptq", "calibration_tokens": 512, "threads": 2}
    quantize_model(MODEL, killed, **options_of_call, progress=progress)  # type: ignore[arg-type]
    assert layers[0] >= 1
    assert killed.read_bytes() == whole.read_bytes()
    assert not unfinished.exists()


def test_importance_of_a_text_is_used_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, saved, target = tmp_path / "texts", tmp_path / "saved.gguf", tmp_path / "small.gguf"
    text.mkdir()
    (text / "a.txt").write_text("Once upon a time there was a fox who lived in a wood.\n" * 40)
    (text / "b.md").write_text("The bear said that he had seen the moon in the lake.\n" * 40)
    words = ["quantize", str(MODEL), str(target), "--type", "q4_1", "--method", "imatrix", "--chunks", "1"]
    assert main([*words, "--calibration", str(text), "--save-imatrix", str(saved)]) == 0
    assert "against the source" in capsys.readouterr().out
    again = tmp_path / "again.gguf"
    assert main([*words[:2], str(again), *words[3:-1], "0", "--imatrix", str(saved)]) == 0
    # Sums over counts are means again but for their last bit, which few roundings depend on.
    first, second = (np.frombuffer(path.read_bytes(), np.uint8) for path in (target, again))
    assert (first != second).mean() < 1e-3
    found = read_imatrix(saved)
    assert len(found.mean_squares) == 42
    assert found.dataset == str(text)


def test_scales_are_moved_before_weights_are_rounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_calibration, "THOROUGH_LAYER_WEIGHTS", 0)
    source, plain, scaled = shared / "models" / "stories260K.gguf", tmp_path / "gptq.gguf", tmp_path / "awq.gguf"
    words = ["--type", "q4_0", "--calibration-tokens", "256", "--chunks", "1"]
    assert main(["quantize", str(source), str(plain), "--method", "gptq", *words]) == 0
    assert main(["quantize", str(source), str(scaled), "--method", "awq", *words]) == 0
    output = capsys.readouterr().out
    first, second = (float(line.split()[5]) for line in output.splitlines() if line.startswith("against"))
    # 0.0904 and 0.0740 on a Zen 3: NumPy's products, and so what is found, differ in their last bits by processor.
    assert second < 1.3 * first
    with read_gguf(source) as original, read_gguf(plain) as model, read_gguf(scaled) as other:
        assert {name: info.type for name, info in model.tensors.items()} == {
            name: info.type for name, info in other.tensors.items()
        }
        norms = [name for name in original.tensors if name.endswith("_norm.weight")]
        assert any(not np.array_equal(original.tensor_bytes(name), other.tensor_bytes(name)) for name in norms)
    assert {path.name for path in tmp_path.iterdir()} == {"gptq.gguf", "awq.gguf"}
