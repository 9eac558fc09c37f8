"""Changes of GGUF files by what they hold: settings, vocabularies, tensors, weights, layout, and single numbers."""

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from localinfer.models.decoder.metadata_keys import ARCHITECTURE_KEYS, READ_KEYS
from localinfer.quant.formats.types import TensorType
from tests.proof.fuzz.file_set import Files, NoFileSetError, Stretch, cut, pack, unpack, whole
from tests.proof.fuzz.gguf_document import (
    ALIGNMENT_KEY,
    ARRAY,
    SIZES,
    STRING,
    Document,
    Elements,
    Entry,
    Tensor,
    read_document,
)
from tests.proof.fuzz.mutation import FLOATS, INTEGERS, TEXTS, mutate_bytes, mutate_text, near, number_bytes

_KEYS = [*READ_KEYS, *ARCHITECTURE_KEYS]
_OTHER_KEYS = (
    *("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.precompiled_charsmap", "tokenizer.chat_template"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_space_prefix"),
    *("general.architecture", "general.alignment", "general.file_type", "split.count", "split.no"),
    *("split.tensors.count", "general.name", "general.quantization_version", "adapter.type", "general.type"),
)
_TEMPLATES = (
    "{{ messages }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% if %}",
    "{{ raise_exception('no') }}",
    "{{ messages[0]['content'] * 10**9 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}",
    "{{ messages | length }}{{ undefined.member }}",
)
_WORDS = (
    *TEXTS,
    "llama",
    "qwen2",
    "bert",
    "mamba",
    "gpt2",
    "t5",
    "spm",
    "yarn",
    "linear",
    "longrope",
    "none",
    "default",
)
_HALVES = (0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x8000, 0x0001, 0xFFFF)
_SINGLES = (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x80000000, 0x00000001, 0xFFFFFFFF)
_DEEPEST = 20_000


def mutate(generator: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """One to three changes to what a file holds, often with one of its bytes after them."""
    try:
        files = unpack(data)
    except NoFileSetError:
        return mutate_bytes(generator, data, corpus)
    if not files:
        return generator.choice(corpus)
    name = generator.choice(list(files))
    choice = generator.random()
    if choice < 0.75:
        document, _ = read_document(files[name])
        for _ in range(generator.choice((1, 1, 1, 2, 3)) if document is not None else 0):
            document = generator.choice(CHANGES)(generator, document)
        if document is not None:
            files[name] = document.write()
    if choice > 0.65:
        files[name] = _change_bytes(generator, files[name], corpus)
    if len(files) > 1 and generator.random() < 0.2:
        files = _change_parts(generator, files)
    return pack(files)


def _change_bytes(generator: random.Random, stretches: list[Stretch], corpus: Sequence[bytes]) -> list[Stretch]:
    """Another number in the header, an end at any of its fields, a few other bytes, or a shorter file."""
    _, fields = read_document(stretches)
    header = stretches[0].content if stretches else b""
    choice = generator.random()
    if choice < 0.6 and fields:
        kind = generator.choice(sorted({field.kind for field in fields}))
        field = generator.choice([field for field in fields if field.kind == kind])
        number = int.from_bytes(header[field.start : field.start + field.width], "little")
        number = near(generator, number) if generator.random() < 0.7 else generator.choice(INTEGERS)
        changed = bytearray(header)
        changed[field.start : field.start + field.width] = number_bytes(number, field.width)
        return [*whole(bytes(changed)), *stretches[1:]]
    if choice < 0.75 and fields:
        field = generator.choice(fields)
        return whole(header[: field.start + generator.randrange(field.width + 1)])
    if choice < 0.85:
        total = sum(stretch.num_bytes for stretch in stretches)
        return cut(stretches, generator.choice((generator.randrange(total + 1), max(0, total - 1), total // 2)))
    return [*whole(mutate_bytes(generator, header, [header])), *stretches[1:]]


def _change_parts(generator: random.Random, files: Files) -> Files:
    """A part that is missing, in the place of another, or named as another."""
    names, contents = list(files), list(files.values())
    choice = generator.randrange(3)
    if choice == 0:
        del files[generator.choice(names)]
        return files
    if choice == 1:
        files[generator.choice(names)] = generator.choice(contents)
        return files
    generator.shuffle(contents)
    return dict(zip(names, contents, strict=True))


def _with_entry(document: Document, index: int, *entries: Entry) -> Document:
    return replace(document, entries=document.entries[:index] + entries + document.entries[index + 1 :])


def _with_tensor(document: Document, index: int, *tensors: Tensor) -> Document:
    return replace(document, tensors=document.tensors[:index] + tensors + document.tensors[index + 1 :])


def _architecture(document: Document) -> str:
    entry = document.value("general.architecture")
    return entry.value.decode("utf-8", "replace") if entry is not None and isinstance(entry.value, bytes) else "llama"


def any_entry(generator: random.Random, key: bytes, size: int = 4) -> Entry:
    """A key with any value."""
    choice = generator.randrange(10)
    if choice < 3:
        kind = generator.choice((4, 5, 10, 11, 4, 5))
        return Entry(key, kind, number_bytes(generator.choice(INTEGERS), SIZES[kind]))
    if choice == 3:
        with np.errstate(over="ignore"):
            return Entry(key, 6, np.float32(generator.choice(FLOATS)).tobytes())
    if choice == 4:
        return Entry(key, generator.choice((0, 1, 7)), bytes([generator.randrange(3)]))
    if choice == 5:
        return Entry(key, STRING, generator.choice(_WORDS).encode("utf-8", "surrogatepass"))
    if choice == 6:
        return Entry(key, 12, struct.pack("<d", generator.choice(FLOATS)))
    if choice == 7:
        kind = generator.choice((4, 5, 6, 7, 11))
        items = [generator.choice(INTEGERS) for _ in range(generator.choice((0, 1, 2, size, size)))]
        return Entry(key, ARRAY, Elements(kind, tuple(number_bytes(item, SIZES[kind]) for item in items)))
    if choice == 8:
        words = tuple(generator.choice(_WORDS).encode("utf-8", "surrogatepass") for _ in range(size))
        return Entry(key, ARRAY, Elements(STRING, words))
    # Arrays in arrays, as raw bytes of a value: element type, count, and so on downwards.
    depth = generator.choice((1, 2, 50, _DEEPEST))
    return Entry(key, 4, struct.pack("<I", 0)) if depth == 1 else _nested(key, depth)


def _nested(key: bytes, depth: int) -> Entry:
    raw = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", 4, 1) + bytes(4)
    return Entry(key, ARRAY, raw)


def _number_near(generator: random.Random, entry: Entry) -> Entry:
    """The same type, another value."""
    assert isinstance(entry.value, bytes)
    if entry.type == 6:
        old = struct.unpack("<f", entry.value)[0]
        with np.errstate(over="ignore"):
            return replace(entry, value=np.float32(generator.choice((*FLOATS, -old, old * 1e6, old / 1e6))).tobytes())
    if entry.type == 12:
        return replace(entry, value=struct.pack("<d", generator.choice(FLOATS)))
    number = near(generator, int.from_bytes(entry.value, "little"))
    return replace(entry, value=number_bytes(number, SIZES[entry.type]))


def _other_setting(generator: random.Random, document: Document) -> Document:
    """Another value of a key that is there, most often of its type."""
    numbers = [index for index, entry in enumerate(document.entries) if entry.type != ARRAY]
    if not numbers:
        return document
    index = generator.choice(numbers)
    entry = document.entries[index]
    if generator.random() < 0.4:
        return _with_entry(document, index, any_entry(generator, entry.key))
    if entry.type == STRING:
        assert isinstance(entry.value, bytes)
        is_template = b"template" in entry.key
        words = _TEMPLATES if is_template else _WORDS
        if generator.random() < 0.4:
            text = generator.choice(words)
        else:
            text = mutate_text(generator, entry.value.decode("utf-8", "replace"), words)
        return _with_entry(document, index, replace(entry, value=text.encode("utf-8", "surrogatepass")))
    return _with_entry(document, index, _number_near(generator, entry))


def _further_setting(generator: random.Random, document: Document) -> Document:
    """A key that is read and was not there, or a second time one that was."""
    choice = generator.random()
    if choice < 0.7:
        key = f"{_architecture(document)}.{generator.choice(_KEYS)}"
    elif choice < 0.95 or not document.entries:
        key = generator.choice(_OTHER_KEYS)
    else:
        entry = generator.choice(document.entries)
        return replace(document, entries=(*document.entries, entry))
    kept = tuple(entry for entry in document.entries if entry.key != key.encode())
    return replace(document, entries=(*kept, any_entry(generator, key.encode(), generator.choice((2, 4, 128)))))


def _missing_setting(generator: random.Random, document: Document) -> Document:
    if not document.entries:
        return document
    index = generator.randrange(len(document.entries))
    if generator.random() < 0.7:
        return _with_entry(document, index)
    entry = document.entries[index]
    return _with_entry(document, index, replace(entry, key=mutate_bytes(generator, entry.key)))


def _other_array(generator: random.Random, document: Document) -> Document:
    """Tokens, merges, scores and types, or the sizes of layers: items gone, more, changed, in another order."""
    arrays = [index for index, entry in enumerate(document.entries) if isinstance(entry.value, Elements)]
    if not arrays:
        return document
    index = generator.choice(arrays)
    entry = document.entries[index]
    assert isinstance(entry.value, Elements)
    items = list(entry.value.items)
    for _ in range(generator.choice((1, 1, 4, 40))):
        where = generator.randrange(len(items)) if items else 0
        choice = generator.randrange(7)
        if choice == 0:
            del items[where : where + generator.choice((1, 1, 8, len(items)))]
        elif choice == 1:
            items[where:where] = items[where : where + generator.choice((1, 20))]
        elif choice == 2 and items:
            other = generator.randrange(len(items))
            items[where], items[other] = items[other], items[where]
        elif choice == 3 and items:
            items[where] = items[generator.randrange(len(items))]
        elif items and entry.value.type == STRING:
            text = items[where].decode("utf-8", "replace")
            changed = mutate_bytes(generator, items[where]) if choice == 4 else b""
            items[where] = changed or mutate_text(generator, text).encode("utf-8", "surrogatepass")
        elif items:
            width = SIZES[entry.value.type]
            special = struct.pack("<f", generator.choice((0.0, -1.0, 1e30, float("nan"), float("inf"))))
            number = number_bytes(near(generator, int.from_bytes(items[where], "little")), width)
            items[where] = special if entry.value.type == 6 else number
    return _with_entry(document, index, replace(entry, value=replace(entry.value, items=tuple(items))))


def _other_tensor(generator: random.Random, document: Document) -> Document:
    """Another type or other sizes, with the data for them or without; gone, renamed, doubled, exchanged, moved."""
    if not document.tensors:
        return document
    index = generator.randrange(len(document.tensors))
    tensor = document.tensors[index]
    other = generator.choice(document.tensors)
    choice = generator.randrange(12)
    if choice < 3:
        kind = int(generator.choice(list(TensorType)))
        data = None if tensor.data is None else Stretch(tensor.data.num_bytes, _pattern(generator, kind))
        return _with_tensor(document, index, replace(tensor, data=data).refitted(type=kind))
    if choice < 6:
        return _with_tensor(document, index, tensor.refitted(sizes=_other_sizes(generator, tensor.sizes)))
    if choice == 6:
        return _with_tensor(document, index, replace(tensor, sizes=_other_sizes(generator, tensor.sizes)))
    if choice == 7:
        return _with_tensor(document, index)
    if choice == 8:
        names = (
            other.name,
            b"output.weight",
            b"rope_freqs.weight",
            b"blk.0.attn_q.bias",
            mutate_bytes(generator, tensor.name),
        )
        name = generator.choice(names)
        return _with_tensor(document, index, replace(tensor, name=name))
    if choice == 9:
        name = generator.choice((other.name, b"output.weight", b"token_embd.weight", b"blk.1.attn_q.bias"))
        return _with_tensor(document, index, tensor, replace(tensor, name=name))
    if choice == 10:
        return _with_tensor(document, index, replace(tensor, name=other.name), *(() if other is tensor else ()))
    offsets = (other.offset or 0, 32, 31, 1, 1 << 20, (1 << 63) - 32, (1 << 64) - 32, 0)
    return _with_tensor(document, index, replace(tensor, offset=generator.choice(offsets)))


def _other_sizes(generator: random.Random, sizes: Sequence[int]) -> tuple[int, ...]:
    changed = list(sizes)
    where = generator.randrange(len(changed)) if changed else 0
    choice = generator.randrange(6)
    if choice == 0 and changed:
        changed[where] = near(generator, changed[where])
    elif choice == 1 and changed:
        changed[where] = max(1, changed[where] + generator.choice((32, -32, 1, -1, 256)))
    elif choice == 2:
        changed.insert(where, generator.choice((0, 1, 2, 3, 1 << 31)))
    elif choice == 3 and len(changed) > 1:
        del changed[where]
    elif choice == 4:
        changed.reverse()
    elif changed:
        changed[where] = generator.choice((1, 2, 16, 32, 33, 64, 96, 128))
    return tuple(changed)


def _pattern(generator: random.Random, kind: int) -> bytes:
    """Random bytes, few enough of them large where they are read as numbers."""
    raw = bytearray(generator.randbytes(generator.choice((34, 210, 1001))))
    if kind == TensorType.F32:
        return np.array([generator.gauss(0, 0.1) for _ in range(_ODD)], "<f4").tobytes()
    if kind in (TensorType.F16, TensorType.BF16):
        halves = np.array([generator.gauss(0, 0.1) for _ in range(_ODD)], "<f2")
        return (
            halves.tobytes()
            if kind == TensorType.F16
            else (halves.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        )
    for index in range(1, len(raw), 2):
        # As the upper byte of a float16 scale: below 1.
        raw[index] &= 0x3B
    return bytes(raw)


_ODD = 127


def _other_weights(generator: random.Random, document: Document) -> Document:
    """Infinite, NaN, extreme, zero or random numbers."""
    if not document.tensors:
        return document
    for _ in range(generator.choice((1, 1, 3))):
        index = generator.randrange(len(document.tensors))
        tensor = document.tensors[index]
        if tensor.data is None or not tensor.data.pattern:
            continue
        raw = bytearray(tensor.data.pattern)
        choice = generator.randrange(4)
        if choice == 0:
            raw = bytearray(len(raw))
        elif choice == 1:
            raw = bytearray(generator.randbytes(len(raw)))
        else:
            width, numbers = (4, _SINGLES) if tensor.type == 0 else (2, _HALVES)
            for _ in range(generator.choice((1, 3, 100))):
                where = generator.randrange(len(raw)) // width * width
                raw[where : where + width] = number_bytes(generator.choice(numbers), width)
        pattern = bytes(raw[: len(tensor.data.pattern)])
        document = _with_tensor(document, index, replace(tensor, data=Stretch(tensor.data.num_bytes, pattern)))
    return document


def _other_size_everywhere(generator: random.Random, document: Document) -> Document:
    """One size of the model, in every tensor and setting that has it: often a model again, with odd remainders."""
    sizes = sorted({size for tensor in document.tensors for size in tensor.sizes if 1 < size < 1 << 16})
    if not sizes:
        return document
    old = generator.choice(sizes)
    new = generator.choice((old + 1, old - 1, old + 32, max(1, old - 32), old // 2, 1, 3, 32, 33, 64, 96, 160, old * 2))
    tensors = [
        tensor.refitted(sizes=tuple(new if size == old else size for size in tensor.sizes))
        for tensor in document.tensors
    ]
    entries = [
        replace(entry, value=number_bytes(new, SIZES[entry.type]))
        if entry.type in (4, 5, 10, 11) and entry.value == number_bytes(old, SIZES[entry.type])
        else entry
        for entry in document.entries
    ]
    return replace(document, tensors=tuple(tensors), entries=tuple(entries))


def _other_alignment(generator: random.Random, document: Document) -> Document:
    value = generator.choice((8, 16, 64, 4096, 0, 1, 7, 33, 1 << 16, 1 << 31))
    kept = tuple(entry for entry in document.entries if entry.key != ALIGNMENT_KEY)
    return replace(document, entries=(Entry(ALIGNMENT_KEY, 4, number_bytes(value, 4)), *kept))


CHANGES: tuple[Callable[[random.Random, Document], Document], ...] = (
    *(_other_setting, _other_setting, _other_setting, _further_setting, _further_setting, _missing_setting),
    *(_other_array, _other_array, _other_tensor, _other_tensor, _other_weights, _other_size_everywhere),
    *(_other_size_everywhere, _other_alignment),
)


def simplify(data: bytes) -> Iterator[bytes]:
    """Inputs with less in them: files, keys, tensors and numbers gone one by one, larger amounts first."""
    try:
        files = unpack(data)
    except NoFileSetError:
        return
    for name in files if len(files) > 1 else ():
        yield pack({other: content for other, content in files.items() if other != name})
    for name, stretches in files.items():
        document, _ = read_document(stretches)
        if document is None:
            continue
        for smaller in _smaller_documents(document):
            yield pack(files | {name: smaller.write()})


def _smaller_documents(document: Document) -> Iterator[Document]:
    for records in ("tensors", "entries"):
        held: tuple[Any, ...] = getattr(document, records)
        step = len(held) // 2
        while step:
            for start in range(0, len(held), step):
                yield replace(document, **{records: held[:start] + held[start + step :]})
            step //= 2
    for index, entry in enumerate(document.entries):
        if isinstance(entry.value, Elements) and len(entry.value.items) > 1:
            half = entry.value.items[: len(entry.value.items) // 2]
            yield _with_entry(document, index, replace(entry, value=replace(entry.value, items=half)))
    for index, tensor in enumerate(document.tensors):
        if tensor.data is not None and len(tensor.data.pattern) > 4:
            kept = tensor.data.pattern[: len(tensor.data.pattern) // 8 * 4 or 4]
            yield _with_tensor(document, index, replace(tensor, data=Stretch(tensor.data.num_bytes, kept)))
