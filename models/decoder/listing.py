"""A model's ops as lists and lines: what `localinfer show --ops` prints."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from localinfer.kernels.ops import Buffer, EmbeddingTable, LinearWeight, RopeTable
from localinfer.models.decoder.architectures import check_architecture
from localinfer.models.decoder.block_config import Pooling, classified_rows, read_pooling
from localinfer.models.decoder.checked_weights import ShapeWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.decoder.text_head import write_text_model
from localinfer.quant.checkpoint.model_file import ModelFile

_STATE = re.compile(r"\bstate=\d+\b")
_LAYER = re.compile(r"\bblk\.(\d+)\.|\blayer=(\d+)\b")


def list_program(file: ModelFile) -> dict[str, Any]:
    """A model's graph for JSON: its buffers, and its ops in order, each with its fields.

    Fields with default values are left out. Only names, types and shapes of tensors are read.
    Raises: ModelFileError or a subclass for a model that cannot be run.
    """
    shapes = {name: record.shape for name, record in file.tensors.items()}
    check_architecture(str(file.metadata.get("general.architecture")))
    weights = ShapeWeights(shapes)
    config = ModelConfig.from_metadata(file.metadata, shapes)
    if config.is_encoder:
        classified = classified_rows(file.metadata, is_encoder=True)
        pooling = Pooling.RANK if config.num_decision_layers else read_pooling(file.metadata)
        graph = write_text_model(config, weights, pooling, classified)
    else:
        graph = write_decoder(config, weights)
    types = {name: record.type.name for name, record in file.tensors.items()}
    return {
        "buffers": [{"name": one.name, "width": one.width, "rows": one.rows.value} for one in graph.buffers],
        "ops": [{"op": type(op).__name__, **_fields(op, weights, types)} for op in graph.ops],
        "output": graph.output.name,
    }


def _fields(record: Any, weights: ShapeWeights, types: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a record that differ from their defaults."""
    found = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray) or field.default is MISSING or value != field.default:
            found[field.name] = _plain(value, weights, types)
    return found


def _plain(value: Any, weights: ShapeWeights, types: Mapping[str, str]) -> Any:
    if isinstance(value, Buffer):
        return value.name
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, LinearWeight | EmbeddingTable):
        width = value.num_columns if isinstance(value, LinearWeight) else value.width
        stack = [value.num_experts] if isinstance(value, LinearWeight) and value.num_experts > 1 else []
        return f"{value.name} {types[value.name]} {_shape((*stack, value.num_rows, width))}"
    if isinstance(value, RopeTable):
        return f"{value.inverse_frequencies.size} pairs, {value.pairing.value}"
    if isinstance(value, np.ndarray):
        part = weights.part_of(value)
        return f"{_shape(value.shape)} numbers" if part is None else f"{part.tensor} {types[part.tensor]} {value.size}"
    if isinstance(value, list | tuple):
        return [_plain(one, weights, types) for one in value]
    return _fields(value, weights, types) if is_dataclass(value) else value


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def program_lines(program: Mapping[str, Any]) -> Iterator[str]:
    """The result of `list_program` as lines; equal layers are shown once."""
    yield "buffers"
    width = max(len(buffer["name"]) for buffer in program["buffers"])
    for buffer in program["buffers"]:
        yield f"  {buffer['name']:<{width}}  {buffer['width']:>7}"
    parts: list[tuple[int | None, list[str]]] = [(None, [])]
    for op in program["ops"]:
        lines = list(_op_lines(op))
        layer = _layer_of(lines, parts[-1][0])
        if layer != parts[-1][0]:
            parts.append((layer, []))
        parts[-1][1].extend(lines)
    layers_of: dict[str, list[int]] = {}
    for layer, lines in parts:
        if layer is not None:
            layers_of.setdefault(_without_layer(lines, layer), []).append(layer)
    for layer, lines in parts:
        text = _without_layer(lines, layer)
        if layer is None:
            yield from ("", "before the layers" if lines is parts[0][1] else "after the layers", *lines)
        elif layer == layers_of[text][0]:
            yield from ("", _layers(layers_of[text]), *text.split("\n"))
    yield f"  -> {program['output']}"


def _op_lines(op: Mapping[str, Any]) -> Iterator[str]:
    named = dict(op)
    name, projections = named.pop("op"), named.pop("projections", [])
    yield f"  {name:<16} {_named(named)}"
    for projection in projections:
        yield f"  {'':<16}   {_named(projection)}"


def _named(values: Mapping[str, Any]) -> str:
    texts = (f"({_named(value)})" if isinstance(value, Mapping) else _number(value) for value in values.values())
    return ", ".join(f"{name}={text}" for name, text in zip(values, texts, strict=True))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _layer_of(lines: list[str], last: int | None) -> int | None:
    """The layer whose tensors an op uses; if none, that of the op before. A cache may be another layer's."""
    numbers = [int(number) for line in lines for number, _ in _LAYER.findall(line) if number]
    if numbers:
        return numbers[0]
    return None if any(".weight" in line for line in lines) else last


def _without_layer(lines: list[str], layer: int | None) -> str:
    """The lines of one layer, N; another one's cache is shown by its distance."""

    def replaced(found: re.Match[str]) -> str:
        if found[1]:
            return "blk.N."
        distance = int(found[2]) - (layer or 0)
        return f"layer=N{distance:+d}" if distance else "layer=N"

    return _STATE.sub("state=N", _LAYER.sub(replaced, "\n".join(lines)))


def _layers(numbers: list[int]) -> str:
    """Text such as "layers 0-4, 6-10"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer {texts[0]}" if len(numbers) == 1 else f"layers {', '.join(texts)}"
