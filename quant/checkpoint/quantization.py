"""Whether and how a checkpoint's matrices are quantized."""

from collections.abc import Callable, Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.auto_round import auto_round_reader
from localinfer.quant.checkpoint.awq import AwqReader
from localinfer.quant.checkpoint.bitnet import BitNetReader
from localinfer.quant.checkpoint.bitsandbytes import BitsAndBytesReader
from localinfer.quant.checkpoint.compressed_tensors import CompressedTensorsReader
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.fp8 import Fp8Reader
from localinfer.quant.checkpoint.gptq import GptqReader
from localinfer.quant.checkpoint.hqq import HqqReader
from localinfer.quant.checkpoint.module_reader import ModuleReader
from localinfer.quant.checkpoint.mxfp4 import Mxfp4Reader

_READERS: dict[str, Callable[[CheckpointFolder, Mapping[str, Any]], ModuleReader]] = {
    "gptq": GptqReader,
    "awq": AwqReader,
    "compressed-tensors": CompressedTensorsReader,
    "auto-round": auto_round_reader,
    "fp8": Fp8Reader,
    "fbgemm_fp8": Fp8Reader,
    "modelopt": Fp8Reader,
    "mxfp4": Mxfp4Reader,
    "bitnet": BitNetReader,
    "bitsandbytes": BitsAndBytesReader,
    "hqq": HqqReader,
}
_FILES = ("quantize_config.json", "quant_config.json")


def quantization_settings(folder: CheckpointFolder) -> dict[str, Any] | None:
    """Return how a checkpoint says it is quantized, None where it says nothing.

    Raises: CorruptFileError if what it says is no object.
    """
    nested = folder.config.get("text_config")
    places = (
        (folder.config, "quantization_config"),
        (folder.config, "compression_config"),
        (nested, "quantization_config"),
    )
    stated = (config.get(key) for config, key in places if isinstance(config, dict))
    settings: Any = next((found for found in stated if found is not None), None)
    if settings is None:
        settings = next((found for name in _FILES if (found := folder.json(name)) is not None), None)
        if settings is not None:
            # Before config.json had a place for them, AutoGPTQ and AutoAWQ each wrote their settings into a file.
            is_awq = "w_bit" in settings or "zero_point" in settings
            settings = {"quant_method": "awq" if is_awq else "gptq", **settings}
    if settings is None:
        written = folder.json("hf_quant_config.json") or {}
        inner = written.get("quantization")
        settings = {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else None
    if settings is not None and not isinstance(settings, dict):
        raise CorruptFileError(f"config.json: quantization_config is {settings!r:.60}; wanted an object")
    return settings


def open_quantization(folder: CheckpointFolder) -> ModuleReader | None:
    """Return the reader of a checkpoint's quantized modules, None where it has only plain weights.

    Raises: UnsupportedFormatError for a method or packing that is not read, CorruptFileError for settings without
        meaning.
    """
    settings = quantization_settings(folder)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method is None and "quant_algo" in settings:
        method = "modelopt"
    if not isinstance(method, str) or method not in _READERS:
        raise UnsupportedFormatError(
            f"config.json: the weights are quantized by {method!r:.40}; this version reads {', '.join(_READERS)} and "
            "plain weights. Choose such a copy of the model, or a GGUF file of it."
        )
    return _READERS[method](folder, settings)
