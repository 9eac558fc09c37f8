"""Steps behind the model that files beside config.json describe: pooling of texts, matrices after that, and decisions.

Sentence Transformers lists its steps in `modules.json`, each in a folder of its own. Source: the library's own files
(sentence-transformers, `models/Pooling.py` and `models/Dense.py`). transformers 5.24 keeps a model's way to decide in
`decision.json` and a template. Source: its `decision` package and its model `jev`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import CheckpointFolder, check_num_values, read_header
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.mapped_file import MappedFile

_POOLINGS = {"mean": 1, "mean_tokens": 1, "cls": 2, "cls_token": 2, "lasttoken": 3}
"""GGUF's numbers, by what follows `pooling_mode_`."""
_TYPES = {"F16": TensorType.F16, "BF16": TensorType.BF16, "F32": TensorType.F32}
_LIST = "modules.json"
_MAX_MODULES = 64
_DENSE_NAMES = ("dense_2", "dense_3")
JEV = "jev"
"""`model_type` of a text model with a linear head."""
_DECISION, _TEMPLATE = "decision.json", "decision_template.jinja"
_OTHER_FORMS = ("judge_config.json", "decision_config.json")
"""Of heads that lie beside the weights, in files of their own."""
_ADAPTER = "adapter_config.json"
_OF_HEAD = ("offsets", "softcap", "num_verbalizers")
_WAY_OUT = "Download the folder again or choose another model."


@dataclass(frozen=True)
class TextModules:
    """The steps behind a model."""

    pooling_type: int | None = None
    """GGUF's number; None where the folder does not say."""
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """float32 of the matrices after pooling, by GGUF's names."""
    paths: tuple[Path, ...] = ()
    """The files that they come from."""


def read_text_modules(folder: CheckpointFolder) -> TextModules:
    """Read the steps of a folder; none where it has no list of them.

    Raises: CorruptFileError for a list or a file that makes no sense; UnsupportedFormatError for other steps.
    """
    text = folder.text(_LIST)
    if text is None:
        return TextModules()
    pooling_type: int | None = None
    tensors: dict[str, NDArray[np.float32]] = {}
    paths: list[Path] = []
    for entry in _entries(text):
        kind, where = _kind(entry), _relative(entry)
        if kind == "Pooling":
            pooling_type = _pooling(_settings(folder, where), where)
        elif kind == "Dense":
            if len(paths) == len(_DENSE_NAMES):
                raise UnsupportedFormatError(
                    f"{_LIST} has more than {len(_DENSE_NAMES)} Dense steps; this version computes so many. Choose "
                    "another model."
                )
            found, file = _dense(folder, where, _DENSE_NAMES[len(paths)])
            tensors |= found
            paths.append(file)
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedFormatError(
                f"{_LIST} has the step {kind!r:.40}; this version computes Transformer, Pooling, Dense and Normalize. "
                "Use a GGUF file of the model or choose another model."
            )
    return TextModules(pooling_type, tensors, tuple(paths))


def _entries(text: str) -> list[Mapping[str, Any]]:
    check_num_values(text, _LIST)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{_LIST} is not sound JSON ({str(error)[:200]}). {_WAY_OUT}") from None
    is_list = isinstance(found, list) and len(found) <= _MAX_MODULES
    if not is_list or not all(isinstance(entry, dict) for entry in found):
        raise CorruptFileError(
            f"{_LIST} holds {found!r:.60}; wanted a list of up to {_MAX_MODULES} objects. {_WAY_OUT}"
        )
    return list(found)


def _kind(entry: Mapping[str, Any]) -> str:
    kind = entry.get("type")
    if not isinstance(kind, str):
        raise CorruptFileError(f"{_LIST}: the type of a step is {kind!r:.40}; wanted a name. {_WAY_OUT}")
    return kind.rpartition(".")[2]


def _relative(entry: Mapping[str, Any]) -> str:
    """The folder of a step, which lies in that of the model."""
    found = entry.get("path", "")
    if not isinstance(found, str) or not re.fullmatch(r"[\w-]*", found, re.ASCII):
        raise CorruptFileError(f"{_LIST}: the path of a step is {found!r:.60}; wanted a folder inside. {_WAY_OUT}")
    return found


def _settings(folder: CheckpointFolder, where: str) -> dict[str, Any]:
    found = folder.json(f"{where}/config.json")
    if found is None:
        raise CorruptFileError(f"{folder.path.name} has no {where}/config.json, which {_LIST} names. {_WAY_OUT}")
    return found


def _pooling(settings: Mapping[str, Any], where: str) -> int:
    modes = [
        key.removeprefix("pooling_mode_")
        for key, value in settings.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    named = settings.get("pooling_mode")
    modes += [named] if isinstance(named, str) else []
    if len(modes) == 1 and modes[0] in _POOLINGS:
        return _POOLINGS[modes[0]]
    raise UnsupportedFormatError(
        f"{where}/config.json pools by {', '.join(modes)[:80] or 'nothing'}; this version pools by one of the mean, "
        "the first (cls) and the last token. Use another model."
    )


def _dense(folder: CheckpointFolder, where: str, name: str) -> tuple[dict[str, NDArray[np.float32]], Path]:
    """The matrix and bias of a step without an activation."""
    activation = _settings(folder, where).get("activation_function", "Tanh")
    if not isinstance(activation, str) or activation.rpartition(".")[2] != "Identity":
        raise UnsupportedFormatError(
            f"{where}/config.json: activation_function is {activation!r:.60}; this version computes matrices after "
            "pooling without one (Identity). Use another model."
        )
    path = folder.path / where / "model.safetensors"
    if not path.exists():
        raise UnsupportedFormatError(
            f"{where} has no model.safetensors; wanted the matrix in that form. Save the model again with a current "
            "version of its library"
        )
    tensors: dict[str, NDArray[np.float32]] = {}
    with MappedFile(path) as file:
        for stored in read_header(file).values():
            leaf = stored.name.removeprefix("linear.")
            if (
                leaf not in ("weight", "bias")
                or stored.dtype not in _TYPES
                or len(stored.shape) != 1 + (leaf != "bias")
            ):
                raise CorruptFileError(
                    f"{path} has {stored.name!r:.60}, {stored.dtype} of shape {stored.shape}; wanted linear.weight, a "
                    f"matrix, and linear.bias in F16, BF16 or F32. {_WAY_OUT}"
                )
            data = np.array(file.view(stored.start, stored.end))
            values = dequantize(data, _TYPES[stored.dtype], stored.shape)
            tensors[f"{name}.{leaf}"] = np.ascontiguousarray(values, np.float32).reshape(stored.shape)
    if f"{name}.weight" not in tensors:
        raise CorruptFileError(f"{path} has no linear.weight. {_WAY_OUT}")
    return tensors, path


def is_jev(config: dict[str, Any]) -> bool:
    """Return whether config.json is that of a text model with such a head."""
    return config.get("model_type") == JEV


def name_head(folder: CheckpointFolder) -> None:
    """Name the matrix of such a head as the model does; transformers saves it as `weight`."""
    stored = folder.tensors.pop("weight", None) if is_jev(folder.config) else None
    if stored is not None:
        folder.tensors["proj.weight"] = replace(stored, name="proj.weight")


def decision_metadata(folder: CheckpointFolder, architecture: str) -> dict[str, object]:
    """Metadata of how a folder decides, empty where no file says so; `generation.decision_folders` judges it.

    Names and keys are ours. Raises: CorruptFileError for a damaged file.
    """
    template, other = folder.text(_TEMPLATE), [name for name in _OTHER_FORMS if (folder.path / name).exists()]
    settings = folder.json(_DECISION)
    if template is None and settings is None and not other and not is_jev(folder.config):
        return {}
    text = folder.config.get("text_config")
    found = {
        "settings": settings or {},
        "other_files": [*other, *([_ADAPTER] if (folder.path / _ADAPTER).exists() else [])],
        "is_causal": not isinstance(text, dict) or text.get("is_causal") is not False,
        "head": {name: folder.config[name] for name in _OF_HEAD if name in folder.config},
    }
    prefix = f"{architecture}.decision"
    metadata: dict[str, object] = {
        f"{prefix}.type": "transformers-jev" if is_jev(folder.config) else "transformers",
        f"{prefix}.settings": json.dumps(found, sort_keys=True),
    }
    return metadata if template is None else metadata | {"tokenizer.chat_template.systemone": template}
