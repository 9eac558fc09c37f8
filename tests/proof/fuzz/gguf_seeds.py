"""Sound GGUF files to start from: every architecture, tensor type and kind of tokenizer, templates, split files."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import gguf
import numpy as np

from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.writer import encode_value
from tests.models.arch_models import random_weight, skeletons
from tests.models.text.unigram_vocabularies import unigram_metadata
from tests.models.text.vocabularies import bert_metadata, bpe_metadata, gemma4_metadata, spm_metadata
from tests.proof.fuzz.file_set import Stretch, pack
from tests.proof.fuzz.gguf_document import Document, Entry, Tensor, entry_from, stored_bytes
from tests.proof.fuzz.target import Inputs
from tests.support.typed_models import WEIGHT_TYPES, TypedModel, make_model

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_WHOLE = 1024
_PATTERN = 251
"""Values of a long tensor that are its own, before they are repeated: a prime, so that rows differ."""
SPLITS = ((0, 2), (100, 3), (-1, 2))
"""Documents that are split, and into how many files."""
_SPLIT = "part-{:05}-of-{:05}.gguf"


def corpus() -> Inputs:
    """All of them, as sets of files."""
    names = list(skeletons())[::8]
    documents = [*typed_documents(), *vocabulary_documents(), *(partial(architecture_document, name) for name in names)]
    whole = [lambda make=make: pack({"model.gguf": make().write()}) for make in documents]
    parts = [lambda number=number, count=count: split(documents[number](), count) for number, count in SPLITS]
    return Inputs([*whole, *parts])


def plain() -> bytes:
    """A model whose kernels nearly all others need too."""
    return pack({"model.gguf": _from_skeleton(skeletons()["llama-gqa"]).write()})


@cache
def architecture_document(name: str) -> Document:
    """The model of `arch_models` of this name; its tokenizer is of no known kind."""
    return _from_skeleton(skeletons()[name])


def typed_documents() -> list[Callable[[], Document]]:
    """Each tensor type as all matrices of a dense model, and of a mixture."""
    kinds = [(type, num_experts) for type in WEIGHT_TYPES for num_experts in (0, 2)]
    models = [partial(make_model, type, num_experts=num_experts) for type, num_experts in kinds]
    models += [
        partial(make_model, TensorType.Q8_0, is_tied=False, embedding=type)
        for type in (TensorType.Q4_K, TensorType.F16)
    ]
    return [lambda make=make: _from_typed(make()) for make in models]


def vocabulary_documents() -> list[Callable[[], Document]]:
    """Models with each kind of tokenizer, and templates where they write text; of each architecture at least one."""
    template = "tokenizer.chat_template"
    writers: list[Mapping[str, Any]] = [
        {**spm_metadata(), template: INST},
        {**bpe_metadata(), template: CHATML},
        {**bpe_metadata(pre="qwen2"), template: CHATML},
        {**gemma4_metadata(), template: INST},
        {**bpe_metadata(pre="llama-bpe"), template: CHATML},
    ]
    readers: list[Mapping[str, Any]] = [bert_metadata(), unigram_metadata(), bpe_metadata(), spm_metadata()]

    def make(number: int, name: str) -> Document:
        kinds = readers if "encoder" in name or "reranker" in name else writers
        return with_vocabulary(architecture_document(name), kinds[number % len(kinds)])

    return [partial(make, number, name) for number, name in enumerate(skeletons())]


def with_vocabulary(document: Document, metadata: Mapping[str, Any]) -> Document:
    """The same model with these tokens, its matrices with a row for each."""
    tokens = metadata["tokenizer.ggml.tokens"]
    sizes = document.value("tokenizer.ggml.tokens")
    assert sizes is not None and not isinstance(sizes.value, bytes)
    before, size = len(sizes.value.items), len(tokens)
    kept = [entry for entry in document.entries if not entry.key.startswith(b"tokenizer.ggml.")]
    kept += [entry for entry in document.entries if entry.key.endswith(b"token_type_count")]
    entries = [
        entry_from(entry.key.decode(), encode_value(size).data) if entry.key.endswith(b".vocab_size") else entry
        for entry in kept
    ]
    entries += [entry_from(key, encode_value(value).data) for key, value in metadata.items()]
    tensors = [
        tensor.refitted(sizes=(*tensor.sizes[:-1], size)) if _has_a_row_per_token(tensor, before) else tensor
        for tensor in document.tensors
    ]
    return replace(document, entries=tuple(entries), tensors=tuple(tensors))


def _has_a_row_per_token(tensor: Tensor, count: int) -> bool:
    is_named = tensor.name in (b"output.weight", b"output.bias")
    is_named |= tensor.name.endswith((b"token_embd.weight", b"embed_tokens.weight", b"head.weight"))
    return is_named and tensor.sizes[-1] == count


def split(document: Document, count: int) -> bytes:
    """The same model in several files."""
    files = {}
    for number in range(count):
        values = {"split.no": number, "split.count": count, "split.tensors.count": len(document.tensors)}
        entries = (document.entries if number == 0 else ()) + _entries(values.items())
        part = replace(document, entries=entries, tensors=document.tensors[number::count])
        files[_SPLIT.format(number + 1, count)] = part.write()
    return pack(files)


def _from_skeleton(skeleton: dict[str, Any]) -> Document:
    entries = [entry_from("general.architecture", encode_value(skeleton["arch"]).data)]
    for key, type_name, element_type, value in skeleton["kv"]:
        entries.append(_typed_entry(key, type_name, element_type, value))
    tensors = []
    for name, shape in skeleton["tensors"]:
        size = int(np.prod(shape))
        drawn = shape if size <= _WHOLE else [_PATTERN, 1]
        values = random_weight(name, drawn, skeleton.get("init")).astype("<f4").reshape(-1)
        if size > _WHOLE and "norm" not in name and not name.endswith("bias"):
            # Drawn as if rows had one column.
            values = (values / np.sqrt(shape[-1])).astype("<f4")
        tensors.append(Tensor(name.encode(), tuple(reversed(shape)), 0, None, Stretch(4 * size, values.tobytes())))
    return Document(3, tuple(entries), tuple(tensors))


def _typed_entry(key: str, type_name: str, element_type: str | None, value: Any) -> Entry:
    kinds = gguf.GGUFValueType
    dtypes = {kinds.UINT32: "<u4", kinds.INT32: "<i4", kinds.FLOAT32: "<f4", kinds.BOOL: "?", kinds.UINT64: "<u8"}
    dtypes |= {kinds.INT8: "<i1", kinds.UINT8: "<u1", kinds.INT16: "<i2", kinds.UINT16: "<u2"}
    dtypes |= {kinds.INT64: "<i8", kinds.FLOAT64: "<f8"}
    kind = kinds[type_name]
    if kind is kinds.STRING:
        return entry_from(key, encode_value(value).data)
    if kind is not kinds.ARRAY:
        return Entry(key.encode(), int(kind), np.array(value).astype(dtypes[kind]).tobytes())
    assert element_type is not None
    element = kinds[element_type]
    encoded = list(value) if element is kinds.STRING else np.array(value).astype(dtypes[element])
    return entry_from(key, encode_value(encoded).data)


def _from_typed(model: TypedModel) -> Document:
    tensors = []
    for name, weight in model.weights.items():
        tensor = Tensor(name.encode(), tuple(reversed(weight.shape)), int(weight.type), None, None)
        num_bytes = stored_bytes(tensor)
        assert num_bytes == weight.blocks.nbytes
        row = num_bytes // int(np.prod(weight.shape[:-1]))
        kept = weight.blocks[: max(1, -(-_WHOLE // row)) * row]
        tensors.append(replace(tensor, data=Stretch(num_bytes, kept.tobytes())))
    entries = tuple(entry_from(key, value.data) for key, value in model.metadata.items())
    return Document(3, entries, tuple(tensors))


def _entries(values: Iterable[tuple[str, Any]]) -> tuple[Entry, ...]:
    return tuple(entry_from(key, encode_value(value).data) for key, value in values)
