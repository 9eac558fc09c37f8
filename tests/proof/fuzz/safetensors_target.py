"""Folders of safetensors: headers, shards, config.json, and the tensors of quantized checkpoints; loaded, and used."""

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from localinfer.quant.checkpoint.folder import DTYPE_BYTES
from tests.proof.fuzz.file_set import Files, NoFileSetError, Stretch, cut, pack, total_bytes, unpack, whole, write_files
from tests.proof.fuzz.model_use import use_model
from tests.proof.fuzz.mutation import INTEGERS, mutate_bytes, mutate_text, mutate_value, near, number_bytes, to_json
from tests.proof.fuzz.safetensors_files import (
    CONFIG,
    Tensor,
    corpus,
    header_of,
    is_tensors,
    read_json,
    read_tensors,
    write_tensors,
)
from tests.proof.fuzz.target import Limits, Target

_QUANTIZATION = "quantization_config"
_METHODS = (
    *("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "modelopt", "hqq", "mxfp4", "auto-round", "quark"),
    *("torchao", "eetq", "fbgemm_fp8", "vptq", ""),
)
_OTHER_NAMES = ("g_idx", "weight_g_idx", "qzeros", "scales", "weight_scale", "weight_scale_inv", "bias", "weight_shape")
_OTHER_NAMES += ("weight_zero_point", "input_scale", "weight.absmax", "qweight", "weight_packed", "weight")


def mutate(generator: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to three changes to what a folder holds."""
    try:
        files = unpack(data)
    except NoFileSetError:
        return mutate_bytes(generator, data, others)
    if not files:
        return generator.choice(others)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        choice = generator.random()
        if choice < 0.35:
            files = _other_json(generator, files)
        elif choice < 0.75:
            files = _other_tensors(generator, files)
        elif choice < 0.85:
            files = _other_size_everywhere(generator, files)
        elif choice < 0.95:
            files = _other_bytes(generator, files)
        else:
            files = _other_names(generator, files)
    return pack(files)


@cache
def _known_keys() -> list[str]:
    """Names that config.json has in some family or quantization."""
    found: set[str] = set()
    for data in corpus():
        config = read_json(unpack(data)[CONFIG])
        found.update(config)
        for held in config.values():
            if isinstance(held, dict):
                found.update(held)
    return sorted(found)


def _other_json(generator: random.Random, files: Files) -> Files:
    """A value of config.json, the index, or the tokenizer; often of how weights are quantized."""
    names = [name for name in files if not is_tensors(name)]
    if not names:
        return files
    name = CONFIG if CONFIG in files and generator.random() < 0.7 else generator.choice(names)
    value = read_json(files[name])
    if value is None:
        return files
    settings = value.get(_QUANTIZATION) if isinstance(value, dict) else None
    if isinstance(settings, dict) and generator.random() < 0.6:
        changed = mutate_value(generator, settings, _known_keys())
        if isinstance(changed, dict) and generator.random() < 0.1:
            changed["quant_method"] = generator.choice(_METHODS)
        value = {**value, _QUANTIZATION: changed}
    elif isinstance(value, dict) and generator.random() < 0.1:
        method = {"quant_method": generator.choice(_METHODS), "bits": generator.choice((2, 3, 4, 8))}
        value = {**value, _QUANTIZATION: method}
    else:
        value = mutate_value(generator, value, _known_keys() if name == CONFIG else ())
    return files | {name: whole(to_json(value))}


def _other_tensors(generator: random.Random, files: Files) -> Files:
    """One tensor of another type, shape, name or content; or a header that says something else than the bytes."""
    names = [name for name in files if is_tensors(name)]
    if not names:
        return files
    name = generator.choice(names)
    tensors = read_tensors(files[name])
    if not tensors:
        return files
    if generator.random() < 0.25:
        header = mutate_value(generator, header_of(tensors))
        return files | {name: write_tensors(tensors, to_json(header))}
    index = generator.randrange(len(tensors))
    tensors[index : index + 1] = _changed_tensor(generator, tensors[index], tensors)
    return files | {name: write_tensors(tensors)}


def _changed_tensor(generator: random.Random, tensor: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    choice = generator.randrange(9)
    other = generator.choice(tensors)
    if choice == 0:
        dtype = generator.choice([*DTYPE_BYTES, "F4", "C64", ""])
        changed = replace(tensor, dtype=dtype)
        return [replace(changed, data=changed.fitted)]
    if choice == 1:
        shape = list(tensor.shape) or [1]
        where = generator.randrange(len(shape))
        shape[where] = max(0, generator.choice((near(generator, shape[where]), shape[where] + 1, 1, 0, 3)))
        changed = replace(tensor, shape=tuple(shape))
        return [replace(changed, data=changed.fitted)]
    if choice == 2:
        shape = (*tensor.shape[::-1],) if generator.random() < 0.5 else (1, *tensor.shape)
        return [replace(tensor, shape=shape)]
    if choice == 3:
        return []
    if choice == 4:
        stem = tensor.name.rpartition(".")[0]
        names = (f"{stem}.{generator.choice(_OTHER_NAMES)}", mutate_text(generator, tensor.name), other.name)
        return [replace(tensor, name=generator.choice(names))]
    if choice == 5:
        stem = tensor.name.rpartition(".")[0]
        return [tensor, replace(other, name=f"{stem}.{generator.choice(_OTHER_NAMES)}")]
    return [replace(tensor, data=Stretch(tensor.data.num_bytes, _other_content(generator, tensor)))]


def _other_content(generator: random.Random, tensor: Tensor) -> bytes:
    """Special numbers of its type, random bytes, or zeros."""
    raw = bytearray(tensor.data.pattern) or bytearray(8)
    width = DTYPE_BYTES.get(tensor.dtype, 1)
    choice = generator.randrange(4)
    if choice == 0:
        return bytes(len(raw))
    if choice == 1:
        return generator.randbytes(len(raw))
    patterns = {2: (0x7C00, 0x7F80, 0x7FC0, 0xFFFF, 0x8000), 4: (0x7F800000, 0x7FC00000, 0xFF800000, 0x7F7FFFFF)}
    for _ in range(generator.choice((1, 4, 100))):
        where = generator.randrange(len(raw)) // width * width
        number = generator.choice((*patterns.get(width, (255,)), *INTEGERS))
        raw[where : where + width] = number_bytes(number, width)
    return bytes(raw[: len(tensor.data.pattern)])


def _other_size_everywhere(generator: random.Random, files: Files) -> Files:
    """One size, in every shape and setting that has it."""
    held = {name: read_tensors(stretches) for name, stretches in files.items() if is_tensors(name)}
    sizes = sorted({size for tensors in held.values() for tensor in tensors or () for size in tensor.shape if size > 1})
    config = read_json(files[CONFIG]) if CONFIG in files else None
    if not sizes or not isinstance(config, dict):
        return files
    old = generator.choice(sizes)
    new = generator.choice((old + 1, max(1, old - 1), old + 32, max(1, old - 32), old // 2, 1, 3, 33, 64, 96, old * 2))
    changed: Files = {CONFIG: whole(to_json(_replaced(config, old, new)))}
    for name, tensors in held.items():
        if tensors is not None:
            resized = [replace(t, shape=tuple(new if size == old else size for size in t.shape)) for t in tensors]
            changed[name] = write_tensors([replace(tensor, data=tensor.fitted) for tensor in resized])
    return files | changed


def _replaced(value: Any, old: int, new: int) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(held, old, new) for key, held in value.items()}
    if isinstance(value, list):
        return [_replaced(held, old, new) for held in value]
    return new if type(value) is int and value == old else value


def _other_bytes(generator: random.Random, files: Files) -> Files:
    """Another length of the header, other bytes in a header or JSON text, or an early end."""
    name = generator.choice(list(files))
    stretches = files[name]
    head = stretches[0].content if stretches else b""
    choice = generator.random()
    if choice < 0.25 and is_tensors(name):
        length = near(generator, int.from_bytes(head[:8], "little"))
        return files | {name: [*whole(number_bytes(length, 8) + head[8:]), *stretches[1:]]}
    if choice < 0.4:
        total = sum(stretch.num_bytes for stretch in stretches)
        return files | {
            name: cut(stretches, generator.choice((generator.randrange(total + 1), max(0, total - 1), 7, 0)))
        }
    if choice < 0.5:
        depth = generator.choice((100, 5000, 200_000))
        nested = (b"[" if choice < 0.45 else b'{"a":') * depth
        return files | {name: whole(number_bytes(len(nested), 8) + nested if is_tensors(name) else nested)}
    return files | {name: [*whole(mutate_bytes(generator, head, [head])), *stretches[1:]]}


def _other_names(generator: random.Random, files: Files) -> Files:
    """A file that is missing, in the place of another, or has another name."""
    names = list(files)
    name, other = generator.choice(names), generator.choice(names)
    choice = generator.randrange(3)
    if choice == 0:
        return {kept: content for kept, content in files.items() if kept != name}
    if choice == 1:
        return files | {name: files[other]}
    extra = ("adapter_config.json", "model.safetensors.index.json", "tokenizer.json", "generation_config.json")
    extra += ("tokenizer_config.json", "model.safetensors", "modules.json", "quantize_config.json", "config.json")
    return files | {generator.choice(extra): files[name]}


def run(data: bytes, folder: Path) -> str:
    """Load the folder, and use the model."""
    try:
        files = unpack(data)
    except NoFileSetError:
        return "no files"
    write_files(files, folder)
    return use_model(folder, data)


def simplify(data: bytes) -> Iterator[bytes]:
    """Inputs with fewer files, tensors, settings and numbers."""
    try:
        files = unpack(data)
    except NoFileSetError:
        return
    for name in files:
        yield pack({other: content for other, content in files.items() if other != name})
    for name, stretches in files.items():
        if not is_tensors(name):
            value = read_json(stretches)
            for key in value if isinstance(value, dict) else ():
                yield pack(files | {name: whole(json.dumps({k: v for k, v in value.items() if k != key}).encode())})
            continue
        tensors = read_tensors(stretches) or []
        if write_tensors(tensors) != stretches:
            continue
        step = len(tensors) // 2
        while step:
            for start in range(0, len(tensors), step):
                yield pack(files | {name: write_tensors(tensors[:start] + tensors[start + step :])})
            step //= 2
        for index, tensor in enumerate(tensors):
            if len(tensor.data.pattern) > 8:
                short = Stretch(tensor.data.num_bytes, tensor.data.pattern[: len(tensor.data.pattern) // 16 * 8 or 8])
                smaller = [*tensors[:index], replace(tensor, data=short), *tensors[index + 1 :]]
                yield pack(files | {name: write_tensors(smaller)})


def prepare() -> None:
    """Import and compile what nearly every model needs; the corpus, which comes first, brings the rest."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(corpus()[0], Path(folder))
        assert "loaded" in outcome, outcome


TARGET = Target(
    "safetensors", corpus, mutate, run, Limits(), prepare=prepare, simplify=simplify, file_bytes=total_bytes
)
