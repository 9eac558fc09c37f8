"""AutoRound's own format (arXiv 2309.05516): the packing of another tool, named by `packing_format`.

`auto_round:auto_gptq` is GPTQ's version 1, `auto_round` and `auto_round:gptqmodel` are its version 2,
`auto_round:auto_awq` is AWQ's GEMM packing, `auto_round:fp8_static` FP8 per tensor or row, and
`auto_round:llm_compressor` has compressed-tensors' tensors in FP8, MXFP4 and NVFP4. `extra_config` has settings of
single modules, by name or by a regular expression found in it; modules of 16 bits are stored as plain weights.
"""

from collections.abc import Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.awq import AwqReader
from localinfer.quant.checkpoint.compressed_tensors import CompressedTensorsReader
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.fp8 import Fp8Reader
from localinfer.quant.checkpoint.gptq import GptqReader
from localinfer.quant.checkpoint.module_reader import ModuleReader

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
            f"quantization_config: extra_config is {extra!r:.60}; wanted settings by module. Download the checkpoint "
            "again, or another one"
        )
    names = {name: changes for name, changes in extra.items() if not _IN_EXPRESSIONS_ONLY & set(name)}
    patterns = {name.replace(".", r"\.") + "$": changes for name, changes in names.items()}
    return patterns | {f".*(?:{name})": changes for name, changes in extra.items() if name not in names}


def _unsupported(key: str, found: object, wanted: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"quantization_config: {key} is {found!r:.60}; of AutoRound's formats this version reads {wanted}. Export the "
        "model again as one of them, or choose another copy."
    )
