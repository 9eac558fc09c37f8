"""Whether and how a checkpoint's matrices are quantized."""

from collections.abc import Callable, Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.awq import AwqReader
from localinfer.quant.checkpoint.compressed_tensors import CompressedTensorsReader
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.gptq import GptqReader

QuantizedReader = GptqReader | AwqReader | CompressedTensorsReader
"""Reads quantized modules; `leaves` are the tensors that make up a module's weight, the first always there."""

_READERS: dict[str, Callable[[CheckpointFolder, Mapping[str, Any]], QuantizedReader]] = {
    "gptq": GptqReader,
    "awq": AwqReader,
    "compressed-tensors": CompressedTensorsReader,
}


def quantization_settings(folder: CheckpointFolder) -> dict[str, Any] | None:
    """Return how a checkpoint says it is quantized, None where it says nothing.

    Raises: CorruptFileError if what it says is no object.
    """
    settings: Any = folder.config.get("quantization_config")
    if settings is None:
        settings = folder.json("quantize_config.json") or folder.json("quant_config.json")
        if settings is not None:
            # Before config.json had a place for them, AutoGPTQ and AutoAWQ each wrote their settings into a file.
            is_awq = "w_bit" in settings or "zero_point" in settings
            settings = {"quant_method": "awq" if is_awq else "gptq", **settings}
    if settings is not None and not isinstance(settings, dict):
        raise CorruptFileError(f"config.json: quantization_config is {settings!r:.60}; wanted an object")
    return settings


def open_quantization(folder: CheckpointFolder) -> QuantizedReader | None:
    """Return the reader of a checkpoint's quantized modules, None where it has only plain weights.

    Raises: UnsupportedFormatError for a method or packing that is not read, CorruptFileError for settings without
        meaning.
    """
    settings = quantization_settings(folder)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise UnsupportedFormatError(
            f"config.json: the weights are quantized by {method!r:.40}; this version reads {', '.join(_READERS)} and "
            "plain weights. Choose such a copy of the model, or a GGUF file of it."
        )
    return _READERS[method](folder, settings)
