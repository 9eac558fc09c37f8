"""Settings that a file may have in another form or beside others than the models that are compared have."""

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import localinfer
from localinfer.errors import UnsupportedFormatError
from localinfer.kernels import ops
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import encode_value
from tests.models.arch_models import build_model, read_config, skeletons, write_skeleton
from tests.models.decoder.test_further_architectures import SKELETONS
from tests.support.oracle import NumpyWeights
from tests.support.typed_models import TypedModel, read_model


def config_of(name: str, **changes: object) -> ModelConfig:
    """The configuration of a skeleton with other values; `__` in a key is a dot."""
    skeleton: dict[str, Any] = SKELETONS.get(name) or skeletons()[name]
    arch = skeleton["arch"]
    metadata = {key: value for key, _, _, value in skeleton["kv"]} | {"general.architecture": arch}
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return ModelConfig.from_metadata(metadata, {tensor: tuple(shape) for tensor, shape in skeleton["tensors"]})


@pytest.mark.parametrize(
    ("name", "windows"),
    [("cohere2moe-moe", (0, 12, 0, 12, 0)), ("smallthinker-moe", (0, 4096, 0, 4096, 0)), ("gemma2-gqa", (32, 0))],
)
def test_period_of_windows_counts_from_the_layer_that_sees_all(name: str, windows: tuple[int, ...]) -> None:
    architecture = find_architecture(config_of(name, attention__sliding_window_pattern=2))
    assert architecture.windows == windows


def test_layer_norms_take_their_own_epsilon_where_a_file_has_both(folder: Path, tmp_path: Path) -> None:
    model = build_model(folder, "cohere2-dense")
    with read_gguf(model.path) as file:
        typed = read_model(file)
    own = float(read_config(model.path).layer_norm_epsilon)
    other = {"cohere2.attention.layer_norm_rms_epsilon": encode_value(0.25)}
    path = TypedModel(typed.metadata | other, typed.weights).write(tmp_path / "both.gguf")
    norms = [op for op in write_decoder(read_config(path), NumpyWeights(path)).ops if isinstance(op, ops.LayerNorm)]
    assert norms
    assert {norm.epsilon for norm in norms} == {own}


def test_sizes_that_no_kernel_computes_are_refused_as_a_files(tmp_path: Path) -> None:
    """Heads of delta nets are multiples of 16."""
    skeleton = deepcopy(skeletons()["qwen35-hybrid"])
    sizes = {"qwen35.ssm.state_size": 24, "qwen35.ssm.inner_size": 96}
    shapes = {
        "attn_qkv": [192, 64],
        "attn_gate": [96, 64],
        "ssm_conv1d": [192, 4],
        "ssm_norm": [24],
        "ssm_out": [64, 96],
    }
    skeleton["kv"] = [[key, kind, sub, sizes.get(key, value)] for key, kind, sub, value in skeleton["kv"]]
    skeleton["tensors"] = [[name, shapes.get(name.split(".")[-2], shape)] for name, shape in skeleton["tensors"]]
    write_skeleton(skeleton, tmp_path / "odd.gguf")
    with pytest.raises(UnsupportedFormatError, match="no kernel of this version computes: heads of 24"):
        localinfer.load(tmp_path / "odd.gguf", device="cpu", threads=1, speculation=None)


@pytest.mark.parametrize(
    ("name", "tensor", "is_refused"),
    [
        ("llama-gqa", "blk.1.attn_q_norm.weight", True),
        ("mamba2-recurrent", "blk.0.attn_norm.bias", True),
        ("llama-gqa", "blk.1.attn_rot_embd.weight", False),
        ("gemma4-e2b", "blk.8.attn_k.bias", False),
    ],
)
def test_blocks_with_tensors_that_nothing_reads_are_refused(
    name: str, tensor: str, is_refused: bool, folder: Path, tmp_path: Path
) -> None:
    with read_gguf(build_model(folder, name).path) as file:
        typed = read_model(file)
    extra = {tensor: typed.weights["output_norm.weight"]}
    path = TypedModel(typed.metadata, typed.weights | extra).write(tmp_path / "more.gguf")
    expected = pytest.raises(UnsupportedFormatError, match=f"has {tensor}, which") if is_refused else nullcontext()
    with expected, localinfer.load(path, device="cpu", threads=1, speculation=None):
        pass
