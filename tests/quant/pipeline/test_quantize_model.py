"""A whole model, quantized to a file: every tensor's bytes, the report, and refusals."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, encode_value
from localinfer.quant.methods.imatrix import Importance
from localinfer.quant.methods.presets import PRESETS
from localinfer.quant.pipeline import quantize as module
from localinfer.quant.pipeline.quantize import quantize_model

MATRICES = {
    "token_embd.weight": (64, 256),
    "blk.0.attn_v.weight": (32, 256),
    "blk.0.ffn_up_exps.weight": (3, 48, 256),
    "blk.0.ffn_down_exps.weight": (3, 256, 96),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with_two = ThreadPool(2)
    yield with_two
    with_two.close()


def values() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in MATRICES.items()}


def importance() -> Importance:
    generator = np.random.default_rng(4)
    squares = {
        name: generator.random((shape[0] if len(shape) == 3 else 1, shape[-1]), np.float32)
        for name, shape in MATRICES.items()
        if name != "token_embd.weight"
    }
    return Importance("i.gguf", squares, "text", 5)


def write_source(path: Path, weights: dict[str, np.ndarray], type: TensorType = TensorType.F32) -> None:
    specs = [TensorRecord("blk.0.attn_norm.weight", TensorType.F32, (256,))]
    specs += [TensorRecord(name, type, array.shape) for name, array in weights.items()]
    metadata = {
        "general.architecture": encode_value("llama"),
        "llama.block_count": encode_value(1),
        "llama.expert_count": encode_value(3),
        "split.count": encode_value(0),
        "general.file_type": encode_value(0),
    }
    with GGUFWriter(path, metadata, specs) as writer:
        writer.write(np.ones(256, np.float32))
        for array in weights.values():
            writer.write(quantize(array, type))


@pytest.mark.parametrize("has_importance", [False, True])
def test_every_tensor_is_what_the_oracle_gives(
    has_importance: bool, tmp_path: Path, pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEIGHTS_PER_CHUNK", 5000)
    weights, given = values(), importance() if has_importance else None
    write_source(tmp_path / "source.gguf", weights)
    calls: list[tuple[str, int, int]] = []
    with read_gguf(tmp_path / "source.gguf") as source:
        result = quantize_model(
            source, tmp_path / "out.gguf", PRESETS["Q4_K_S"], pool, importance=given,
            progress=lambda *call: calls.append(call),
        )  # fmt: skip
    total = sum(array.size for array in weights.values()) + 256
    assert calls[-1][1:] == (total, total)
    assert [call[1] for call in calls] == sorted({call[1] for call in calls})
    wanted_types = {"token_embd.weight": "Q6_K", "blk.0.attn_v.weight": "Q5_K"}
    with read_gguf(tmp_path / "out.gguf") as written:
        assert written.num_bytes == result.num_bytes
        assert "split.count" not in written.metadata
        assert (written.metadata["general.file_type"], written.metadata["general.quantization_version"]) == (14, 2)
        for name, array in weights.items():
            type = TensorType[wanted_types.get(name, "Q5_0" if "down" in name else "Q4_K")]
            assert written.tensor(name).type is type
            squares = None if given is None else given.mean_squares.get(name)
            spread = None if squares is None else squares.reshape(*squares.shape[:1], 1, -1)
            if spread is not None and array.ndim == 2:
                spread = spread[0]
            np.testing.assert_array_equal(written.tensor_bytes(name), quantize(array, type, spread).reshape(-1))
    reports = {report.name: report for report in result.tensors}
    assert reports["blk.0.attn_norm.weight"].relative_error is None
    assert reports["blk.0.ffn_down_exps.weight"].choice.is_fallback
    assert reports["blk.0.attn_v.weight"].has_importance is has_importance
    assert not reports["token_embd.weight"].has_importance
    for name in weights:
        error = reports[name].relative_error
        assert error is not None
        assert 0.005 < error < 0.1
    assert result.bits_per_weight == pytest.approx(8 * sum(r.num_bytes for r in result.tensors) / total)


def test_blocks_are_decoded_and_said_to_be_rounded_twice(tmp_path: Path, pool: ThreadPool) -> None:
    write_source(tmp_path / "source.gguf", values(), TensorType.Q8_0)
    with read_gguf(tmp_path / "source.gguf") as source:
        result = quantize_model(source, tmp_path / "out.gguf", PRESETS["Q4_0"], pool)
        kept = quantize_model(source, tmp_path / "same.gguf", PRESETS["Q8_0"], pool)
    assert [report.was_quantized_before for report in result.tensors] == [False, True, True, True, True]
    assert [report.relative_error for report in kept.tensors] == [None] * 5
    with read_gguf(tmp_path / "source.gguf") as source, read_gguf(tmp_path / "same.gguf") as copy:
        for name in source.tensors:
            np.testing.assert_array_equal(source.tensor_bytes(name), copy.tensor_bytes(name))


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path, pool: ThreadPool) -> None:
    weights = values()
    weights["blk.0.attn_v.weight"][3, 4] = np.nan
    path = tmp_path / "source.gguf"
    specs = [TensorRecord(name, TensorType.F32, array.shape) for name, array in weights.items()]
    facts = {"general.architecture": encode_value("llama"), "llama.block_count": encode_value(1)}
    with GGUFWriter(path, facts, specs) as writer:
        for array in weights.values():
            writer.write(array)
    other = Importance("i.gguf", {"blk.0.attn_v.weight": np.ones((1, 255), np.float32)}, "", 0)
    with read_gguf(path) as source:
        with pytest.raises(RequestError, match=r"blk\.0\.attn_v\.weight: got NaN"):
            quantize_model(source, tmp_path / "out.gguf", PRESETS["Q4_0"], pool)
        with pytest.raises(CorruptFileError, match="this very model"):
            quantize_model(source, tmp_path / "out.gguf", PRESETS["Q4_0"], pool, importance=other)
        with pytest.raises(RequestError, match="is the model to quantize"):
            quantize_model(source, path, PRESETS["Q4_0"], pool)
        with pytest.raises(RequestError, match="there is no folder"):
            quantize_model(source, tmp_path / "missing" / "out.gguf", PRESETS["Q4_0"], pool)
    assert list(tmp_path.iterdir()) == [path]
