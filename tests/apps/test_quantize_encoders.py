"""Quantized encoders: which tensors become blocks, what embeddings lose, and what is refused."""

from pathlib import Path

import pytest

from localinfer.apps.cli import main
from localinfer.apps.quantize_encoders import embedding_loss, is_encoders, quantize_encoders
from localinfer.errors import RequestError
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from tests.support.seeing_model import write_mmproj


def test_products_become_blocks_and_the_rest_stays(tmp_path: Path) -> None:
    source = write_mmproj(tmp_path / "mmproj-a.gguf", 64)
    written = quantize_encoders(source, tmp_path / "b.gguf", threads=2)
    with read_gguf(written.path) as file:
        types = {name: tensor.type for name, tensor in file.tensors.items()}
    assert {types[f"v.blk.1.{name}.weight"] for name in ("attn_q", "attn_out", "ffn_up")} == {TensorType.Q8_0}
    kept = ("v.patch_embd.weight", "v.position_embd.weight", "mm.2.weight", "v.blk.1.attn_q.bias", "v.pre_ln.weight")
    assert {types[name] for name in kept} == {TensorType.F32}
    assert is_encoders(written.path)
    assert 0 < embedding_loss(source, written.path, threads=1) < 1e-3
    assert embedding_loss(source, source, threads=1) == 0
    assert (tmp_path / "b.gguf").read_bytes() == quantize_encoders(
        source, tmp_path / "c.gguf", threads=1
    ).path.read_bytes()


def test_halves_keep_rows_in_halves(tmp_path: Path) -> None:
    source = write_mmproj(tmp_path / "mmproj-a.gguf", 64)
    written = quantize_encoders(source, tmp_path / "b.gguf", type="f16")
    assert embedding_loss(source, written.path) < 1e-5
    again = quantize_encoders(written.path, tmp_path / "c.gguf")
    assert embedding_loss(source, again.path) < 1e-3


def test_what_loses_too_much_or_is_another_model_is_refused(tmp_path: Path) -> None:
    source = write_mmproj(tmp_path / "mmproj-a.gguf", 64)
    with pytest.raises(RequestError, match="lose too much; take one of Q8_0, F16, BF16"):
        quantize_encoders(source, tmp_path / "b.gguf", type="Q4_K_M")
    other = write_mmproj(tmp_path / "mmproj-b.gguf", 96)
    with pytest.raises(RequestError, match="files of one model"):
        embedding_loss(source, other)


def test_the_command_tells_encoders_by_themselves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = str(write_mmproj(tmp_path / "mmproj-a.gguf", 64)), str(tmp_path / "b.gguf")
    assert main(["quantize", source, target]) == 0
    assert "embeddings differ by" in capfd.readouterr().out
    assert main(["quantize", source, target, "--method", "gptq"]) == 2
    assert "--method is for language models" in capfd.readouterr().err
    assert main(["quantize", source, target, "--imatrix", "x"]) == 2
    assert "--imatrix is for language models" in capfd.readouterr().err
