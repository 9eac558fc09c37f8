"""Scales folded through models: the logits stay, whatever the architecture; what cannot be scaled is named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.models.calibration.scale_groups import fold_scales
from localinfer.quant.gguf.reader import read_gguf
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import build_model, one_of_each, read_config, run_logits
from tests.models.calibration.folded_models import folded_weights, groups_of, write_folded
from tests.models.numpy_device import NumpyDevice


@pytest.mark.parametrize("name", one_of_each())
def test_folding_any_scales_leaves_the_logits(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    config = read_config(model.path)
    original, folded, num_groups = folded_weights(model.path, seed=3)
    assert num_groups >= config.num_layers
    wanted, found = (run_logits(model, NumpyDevice(), weights=weights) for weights in (original, folded))
    # A delta net norms what may be nearly 0 in the first rows, so the rounding of folded weights shows there.
    tolerance = 2e-4 if config.recurrent else 1e-5
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize(
    "name", ["llama-gqa", "qwen2-gqa", "qwen2moe-moe", "gemma3-gqa", "phi3-dense", "deepseek2-moe"]
)
def test_folding_any_scales_leaves_the_logits_of_compiled_programs(name: str, folder: Path, tmp_path: Path) -> None:
    model = build_model(folder, name)
    folded = replace(model, path=tmp_path / "folded.gguf")
    write_folded(model.path, folded.path, seed=4)
    wanted = run_logits(model, CpuDevice(1))
    found = run_logits(folded, CpuDevice(1))
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_groups_of_grouped_heads_share_a_scale_among_the_heads_of_a_value_head(folder: Path) -> None:
    with read_gguf(build_model(folder, "llama-gqa").path) as file:
        groups, unscalable = groups_of(file)
        value_rows = file.tensor("blk.0.attn_v.weight").shape[0]
        output_columns = file.tensor("blk.0.attn_output.weight").shape[1]
    assert not unscalable
    by_name = {group.name: group for group in groups}
    norm, values = by_name["blk.0.attn_norm.weight"], by_name["blk.0.attn_v.weight"]
    assert norm.readers == ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight")
    assert values.readers == ("blk.0.attn_output.weight",)
    assert values.num_channels == value_rows < output_columns
    assert values.columns is not None and len(values.columns) == output_columns
    assert np.bincount(values.columns).tolist() == [output_columns // value_rows] * value_rows


def test_groups_of_experts_scale_the_router_and_every_expert_alike(folder: Path) -> None:
    with read_gguf(build_model(folder, "qwen2moe-moe").path) as file:
        by_name = {group.name: group for group in groups_of(file)[0]}
        experts, size, _ = file.tensor("blk.0.ffn_up_exps.weight").shape
    assert set(by_name["blk.0.ffn_norm.weight"].readers) == {
        f"blk.0.ffn_{part}.weight"
        for part in ("gate_inp", "gate_exps", "up_exps", "gate_shexp", "up_shexp", "gate_inp_shexp")
    }
    assert by_name["blk.0.ffn_up_exps.weight"].num_channels == experts * size


@pytest.mark.parametrize(
    ("name", "reader", "reason"),
    [
        ("gpt2-dense", "blk.0.ffn_down.weight", "gelu_tanh lies between blk.0.ffn_up.weight"),
        ("gpt-oss-moe", "blk.0.ffn_down_exps.weight", "blk.0.ffn_up_exps.weight is clamped"),
        ("olmo2-gqa", "blk.0.attn_q.weight", "residual stream"),
        ("gemma2-gqa", "token_embd.weight", "used in a second place"),
        ("deepseek2-moe", "blk.0.attn_k_b.weight", "each head's matrix reads a part"),
    ],
)
def test_what_cannot_be_scaled_is_named_with_its_reason(name: str, reader: str, reason: str, folder: Path) -> None:
    with read_gguf(build_model(folder, name).path) as file:
        groups, unscalable = groups_of(file)
    reasons = [one.reason for one in unscalable if reader in one.readers]
    assert len(reasons) == 1 and reason in reasons[0]
    assert not any(reader in group.readers for group in groups)


@pytest.mark.parametrize("values", [np.zeros(3), np.full(3, np.nan), np.ones(2), -np.ones(3)])
def test_fold_scales_refuses_what_is_no_scale(values: np.ndarray, folder: Path) -> None:
    with read_gguf(build_model(folder, "llama-gqa").path) as file:
        group = groups_of(file)[0][0]
        shapes = {name: record.shape for name, record in file.tensors.items()}
    with pytest.raises(ShapeError, match=r"blk\.0\.attn_norm\.weight; wanted"):
        fold_scales([(replace(group, num_channels=3), values.astype(np.float32))], shapes)
