"""The reader of a checkpoint's quantization method.

AutoRound's own format (arXiv 2309.05516): the packing of another tool, named by `packing_format`.

`auto_round:auto_gptq` is GPTQ's version 1, `auto_round` and `auto_round:gptqmodel` are its version 2,
`auto_round:auto_awq` is AWQ's GEMM packing, `auto_round:fp8_static` FP8 per tensor or row, and
`auto_round:llm_compressor` has compressed-tensors' tensors in FP8, MXFP4 and NVFP4. `extra_config` has settings of
single modules, by name or by a regular expression found in it; modules of 16 bits are stored as plain weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.bitnet import BitNetReader
from localinfer.quant.checkpoint.bitsandbytes import BitsAndBytesReader
from localinfer.quant.checkpoint.compressed_tensors import CompressedTensorsReader
from localinfer.quant.checkpoint.float_formats import Fp8Reader, Mxfp4Reader
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.gptq_awq import AwqReader, GptqReader
from localinfer.quant.checkpoint.hqq import HqqReader
from localinfer.quant.checkpoint.module_reader import AGAIN, ModuleReader

_GPTQ_FORMATS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
_GPTQ_FORMATS |= {"auto_round:gptq": "gptq", "auto_round:exllamav2": "gptq", "auto_gptq": "gptq"}
_AWQ_FORMATS = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
_NO_SCHEMES = {"group_0": {"format": "naive-quantized", "weights": {"num_bits": 8, "type": "float"}}}
_IN_EXPRESSIONS_ONLY = set("*+?^$()[]{}|\\")


def auto_round_reader(folder: CheckpointFolder, settings: Mapping[str, Any]) -> ModuleReader:
    """Return the reader of the packing that the settings name.

    Raises: UnsupportedFormatError for a packing or data type that is not read, CorruptFileError for settings without
        meaning.
    """
    packing = settings.get("packing_format", settings.get("backend", "auto_round:auto_gptq"))
    if packing in ("auto_round:fp8_static", "auto_round:fp8"):
        return Fp8Reader(folder, {})
    if packing == "auto_round:llm_compressor":
        return CompressedTensorsReader(folder, {"config_groups": settings.get("config_groups") or _NO_SCHEMES})
    data_type = settings.get("data_type", "int")
    if data_type not in ("int", "int_sym", "int_asym"):
        raise _unsupported("data_type", data_type, "int")
    if isinstance(packing, str) and packing in _AWQ_FORMATS:
        return AwqReader(folder, {**settings, "version": "gemm"})
    if not isinstance(packing, str) or packing not in _GPTQ_FORMATS:
        raise _unsupported(
            "packing_format",
            packing,
            f"{', '.join(_GPTQ_FORMATS)}, {_AWQ_FORMATS[0]}, auto_round:fp8_static and llm_compressor",
        )
    dynamic = _as_patterns(settings.get("extra_config"))
    return GptqReader(folder, {**settings, "checkpoint_format": _GPTQ_FORMATS[packing], "dynamic": dynamic})


def _as_patterns(extra: object) -> dict[str, Any]:
    """The settings of single modules under patterns as GPTQ's `dynamic` has them, whole names first."""
    if not extra:
        return {}
    if not isinstance(extra, dict):
        raise CorruptFileError(
            f"quantization_config: extra_config is {extra!r:.60}; wanted settings by module. {AGAIN}"
        )
    names = {name: changes for name, changes in extra.items() if not _IN_EXPRESSIONS_ONLY & set(name)}
    patterns = {name.replace(".", r"\.") + "$": changes for name, changes in names.items()}
    return patterns | {f".*(?:{name})": changes for name, changes in extra.items() if name not in names}


def _unsupported(key: str, found: object, wanted: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"quantization_config: {key} is {found!r:.60}; of AutoRound's formats this version reads {wanted}. Export the "
        "model again as one of them, or choose another copy."
    )


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
    """Return the settings of a checkpoint's quantization, None where it states none.

    Raises: CorruptFileError if they are no object.
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
            # Before config.json had a key for them, AutoGPTQ and AutoAWQ each wrote their settings into a file.
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
