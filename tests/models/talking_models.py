"""Tiny random models of many architectures that read and write text: with the vocabulary of the demo model."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localinfer.loading.options import model_path
from localinfer.quant.gguf.reader import read_gguf
from tests.models.arch_models import skeletons, write_skeleton

_CONTEXT = 4096


def build_talking_model(folder: Path, name: str) -> Path:
    """Write the model of a skeleton with the demo's tokenizer and room for long texts, unless it is there."""
    path = folder / f"{name}-talking.gguf"
    if path.exists():
        return path
    write_skeleton(talking_skeleton(name), path)
    return path


def talking_skeleton(name: str, controls: Sequence[str] = ()) -> dict[str, Any]:
    """A skeleton with the demo's tokenizer, to which control tokens are added, and room for long texts."""
    skeleton = deepcopy(skeletons()[name])
    with read_gguf(model_path(None)) as demo:
        tokenizer = {key: value for key, value in demo.metadata.items() if key.startswith("tokenizer.")}
    for key, further in (("tokens", list(controls)), ("token_type", [gguf.TokenType.CONTROL] * len(controls))):
        tokenizer[f"tokenizer.ggml.{key}"] = [*np.asarray(tokenizer[f"tokenizer.ggml.{key}"]).tolist(), *further]
    size = len(tokenizer["tokenizer.ggml.tokens"])
    settings = [entry for entry in skeleton["kv"] if not entry[0].startswith("tokenizer.")]
    for entry in settings:
        if entry[0].endswith(".vocab_size"):
            entry[3] = size
        elif entry[0].endswith(".context_length"):
            entry[3] = _CONTEXT
    skeleton["kv"] = settings + [_entry(key, value) for key, value in tokenizer.items()]
    old = next(shape[0] for tensor, shape in skeleton["tensors"] if tensor == "token_embd.weight")
    for tensor, shape in skeleton["tensors"]:
        if tensor in ("token_embd.weight", "output.weight") or tensor.endswith(("embed_tokens.weight", "head.weight")):
            assert shape[0] == old, f"{tensor} has a row per token"
            shape[0] = size
    return skeleton


def _entry(key: str, value: Any) -> list[Any]:
    """A setting as skeletons have it: key, type, type of its elements, value."""
    kind = gguf.GGUFValueType
    if isinstance(value, str | bool):
        return [key, (kind.STRING if isinstance(value, str) else kind.BOOL).name, None, value]
    if isinstance(value, int | float):
        return [key, (kind.UINT32 if isinstance(value, int) else kind.FLOAT32).name, None, value]
    values = np.asarray(value).tolist()
    element = kind.STRING if isinstance(values[0], str) else kind.FLOAT32 if "scores" in key else kind.INT32
    return [key, kind.ARRAY.name, element.name, values]
