"""Folders of safetensors to be changed: their files as tensors and JSON values, and sound ones to start from."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.quant.checkpoint.folder import DTYPE_BYTES
from tests.models.checkpoint.published_models import read_cases, weights
from tests.models.checkpoint.test_quantized_folders import VARIANTS as PACKED_VARIANTS
from tests.models.checkpoint.test_scaled_folders import VARIANTS as SCALED_VARIANTS
from tests.proof.fuzz.file_set import Files, Stretch, pack, whole
from tests.proof.fuzz.target import Inputs
from tests.support import quantized_checkpoints as packing
from tests.support.checkpoint_files import (
    LLAMA_CONFIG,
    MODULES,
    Stored,
    llama_weights,
    safetensors_bytes,
    tokenizer_document,
)

MODEL, CONFIG, INDEX, TOKENIZER = "model.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json"
_WHOLE, _PATTERN = 2048, 1004
"""Bytes of a tensor that are kept as they are, and those of a longer one that are repeated: no power of two."""
_FAMILY_VOCAB = 96
_SHARD = "model-{:05}-of-{:05}.safetensors"
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


@dataclass(frozen=True)
class Tensor:
    """A tensor, with the bytes that the file has for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Stretch

    @property
    def fitted(self) -> Stretch:
        """As many bytes as its type and shape take, if that is no nonsense."""
        size = DTYPE_BYTES.get(self.dtype, 0) * prod(self.shape)
        return Stretch(size, self.data.pattern) if 0 <= size <= 32 << 20 else self.data


def header_of(tensors: list[Tensor]) -> dict[str, Any]:
    """The header of a file that holds these tensors, one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.data.num_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    return header


def write_tensors(tensors: list[Tensor], header: bytes | None = None) -> list[Stretch]:
    """A file of these tensors; header: JSON in place of their own."""
    raw = json.dumps(header_of(tensors)).encode("utf-8", "surrogatepass") if header is None else header
    raw += b" " * (-len(raw) % 8)
    return [*whole(struct.pack("<Q", len(raw)) + raw), *(tensor.data for tensor in tensors)]


def read_tensors(stretches: list[Stretch]) -> list[Tensor] | None:
    """The tensors of a file, if its header can still be read."""
    try:
        header = json.loads(stretches[0].content[8:])
        records = [(name, record) for name, record in header.items() if name != "__metadata__"]
        return [
            Tensor(name, str(record["dtype"]), tuple(int(size) for size in record["shape"]), data)
            for (name, record), data in zip(records, stretches[1:], strict=True)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        return None


def corpus() -> Inputs:
    """Every family that has a published implementation, every kind of quantization, shards, a tokenizer."""
    documents = {TOKENIZER: tokenizer_document(), "tokenizer_config.json": {"chat_template": TEMPLATE}}
    small = documents | {TOKENIZER: _smaller_vocabulary(tokenizer_document(), _FAMILY_VOCAB)}
    makers: list[Callable[[], Files]] = [
        lambda case=case: _folder(weights(_shapes(case)), case["config"], small) for case in read_cases().values()
    ]
    makers += [partial(_quantized, *variant) for variant in _quantizations()]
    makers.append(lambda: _folder(llama_weights(), LLAMA_CONFIG, documents))
    makers.append(lambda: _sharded(llama_weights(), LLAMA_CONFIG))
    return Inputs([lambda make=make: pack(make()) for make in makers])


def _smaller_vocabulary(document: dict[str, Any], size: int) -> dict[str, Any]:
    """The same tokenizer with bytes left out."""
    texts = list(document["model"]["vocab"])
    dropped = [text for text in texts if text.startswith("<0x")][: len(texts) - size]
    kept = [text for text in texts if text not in dropped]
    return document | {"model": document["model"] | {"vocab": {text: index for index, text in enumerate(kept)}}}


def _shapes(case: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in case["shapes"].items()}


def _folder(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], documents: Mapping[str, Any] | None = None
) -> Files:
    files = {CONFIG: whole(json.dumps(config).encode()), MODEL: write_tensors(_tensors(tensors))}
    return files | {name: whole(json.dumps(value).encode()) for name, value in (documents or {}).items()}


def _sharded(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> Files:
    made = _tensors(tensors)
    names = [_SHARD.format(number + 1, 2) for number in range(2)]
    index = {"metadata": {}, "weight_map": {tensor.name: names[i % 2] for i, tensor in enumerate(made)}}
    shards = {name: write_tensors(made[number::2]) for number, name in enumerate(names)}
    return {CONFIG: whole(json.dumps(config).encode()), INDEX: whole(json.dumps(index).encode()), **shards}


def _tensors(tensors: Mapping[str, Stored]) -> list[Tensor]:
    """As our writer of whole files names their types, with short patterns for long ones."""
    made = []
    for name, stored in tensors.items():
        content = safetensors_bytes({name: stored})
        size = int.from_bytes(content[:8], "little")
        record = json.loads(content[8 : 8 + size])[name]
        raw = content[8 + size :]
        data = Stretch(len(raw), raw if len(raw) <= _WHOLE else raw[:_PATTERN])
        made.append(Tensor(name, record["dtype"], tuple(record["shape"]), data))
    return made


def _quantizations() -> list[tuple[dict[str, Any], Any]]:
    """Settings, and what makes the tensors of a module of a shape."""
    generator = np.random.default_rng(5)
    found: list[tuple[dict[str, Any], Any]] = []
    for settings, like, pack_module in PACKED_VARIANTS.values():
        group_size = {"group_size": like["group_size"]} if settings["quant_method"] in ("gptq", "awq") else {}
        found.append(
            (
                {**settings, **group_size},
                lambda shape, like=like, pack_module=pack_module: pack_module(
                    packing.random_codes(generator, shape, **like)
                ),
            )
        )
    for settings, write, _ in SCALED_VARIANTS.values():
        found.append((settings, lambda shape, write=write: write(generator.standard_normal(shape) / 8).tensors))
    return found


def _quantized(settings: dict[str, Any], make: Any) -> Files:
    """The tiny Llama of one layer with its matrices quantized."""
    stored: dict[str, Stored] = {
        name: values for name, values in llama_weights().items() if not name.startswith("model.layers.1.")
    }
    made: dict[str, dict[str, Stored]] = {}
    for module, shape in MODULES.items():
        path = f"model.layers.0.{module}"
        del stored[f"{path}.weight"]
        made[module] = make(shape)
        # Columns in another order are in the same one for all that read the same input.
        for other in ("self_attn.q_proj", "mlp.gate_proj"):
            if other in made and "g_idx" in made[module] and MODULES[other][1] == shape[1]:
                made[module]["g_idx"] = made[other]["g_idx"]
        stored |= packing.in_module(path, made[module])
    return _folder(stored, {**LLAMA_CONFIG, "num_hidden_layers": 1, "quantization_config": settings})


def read_json(stretches: list[Stretch]) -> Any:
    """The value in a JSON file, None if it is none."""
    try:
        return json.loads(b"".join(stretch.content for stretch in stretches))
    except (ValueError, RecursionError):
        return None


def is_tensors(name: str) -> bool:
    """Whether a file is one of tensors, by its name."""
    return Path(name).suffix == ".safetensors"
