"""Modules that the compressed-tensors library has packed, against its own unpacking, where the library is installed."""

from pathlib import Path
from typing import Any

import pytest

from localinfer.quant.checkpoint.folder import open_folder
from localinfer.quant.checkpoint.quantization import open_quantization
from localinfer.quant.formats.dequantize import dequantize
from tests.support.checkpoint_files import Stored, write_folder
from tests.support.quantized_checkpoints import in_module

pytest.importorskip("compressed_tensors", reason="the compressed-tensors library is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

MODULE = "model.layers.0.self_attn.q_proj"
INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"int{bits}": ("pack-quantized", {**INT, "num_bits": bits, "strategy": "group", "group_size": 64})
        for bits in range(2, 9)
    },
    "int8 per row": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "int4 per row": ("int-quantized", {**INT, "num_bits": 4, "strategy": "channel"}),
    "fp8 per tensor": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "tensor"}),
    "fp8 per row": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "channel"}),
    "mxfp4": ("mxfp4-pack-quantized", {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
}
NAMES = {"torch.int32": "I32", "torch.int64": "I64", "torch.int8": "I8", "torch.uint8": "U8", "torch.float32": "F32"}
NAMES |= {"torch.bfloat16": "BF16", "torch.float8_e4m3fn": "F8_E4M3"}


def stored(tensor: Any) -> Stored:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return NAMES[str(tensor.dtype)], raw.view(f"V{tensor.element_size()}").reshape(tuple(tensor.shape))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.filterwarnings("ignore::Warning")
def test_weight_is_what_the_library_unpacks(name: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format, settings = SCHEMES[name]
    own = {"scale_dtype": {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(name)}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings, **own))
    torch.manual_seed(3)
    weight = torch.randn(96, 256) / 16
    size = settings.get("group_size") or (weight.numel() if settings["strategy"] == "tensor" else 256)
    largest = weight.reshape(-1, size).abs().amax(1)
    limits = {"int": (1 << (settings["num_bits"] - 1)) - 1, "float": 448.0 if settings["num_bits"] == 8 else 6.0}
    scale = (largest / limits[settings["type"]]).reshape(-1 if size > 256 else 96, 1 if size >= 256 else 256 // size)
    state = {"weight": weight, "weight_scale": scale.flatten() if settings["strategy"] == "tensor" else scale}
    if name == "mxfp4":
        state["weight_scale"] = 2.0 ** torch.floor(torch.log2(scale * 1.5))
    if name == "nvfp4":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
        state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(dict(state), scheme)
    wanted = compressor.decompress(dict(packed), scheme)["weight"].double().numpy()
    weights = {key: value for key, value in settings.items() if key != "scale_dtype"}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"g": {"weights": weights}}}
    tensors = {key: stored(value) for key, value in packed.items()}
    write_folder(tmp_path, in_module(MODULE, tensors), {"quantization_config": config})
    reader = open_quantization(open_folder(tmp_path))
    assert reader is not None
    matrix = reader.matrix(MODULE)
    type = matrix.gguf_type()
    found = dequantize(matrix.gguf_bytes(type), type, matrix.shape)
    # The library's own numbers may be rounded to bfloat16.
    assert ((found - wanted) ** 2).sum() <= 1e-4 * (wanted**2).sum()
    assert ((matrix.dequantize() - wanted) ** 2).sum() <= 1e-5 * (wanted**2).sum()
