"""The families of `../shared/vision`: configurations, pictures, and what llama.cpp answers, without building files."""

import importlib.util
import json
import math
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.models.media.mmproj import MediaConfig, read_media_config
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.text.tokenizer import Tokenizer

SHARED = Path(__file__).parents[4] / "shared" / "vision"
SEED = 1


@cache
def skeletons() -> dict[str, Any]:
    """Every family as the builder reads it; none where the folder is not there."""
    path = SHARED / "skeletons.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


@cache
def builder() -> ModuleType:
    """The module that makes pictures, sounds and vocabularies."""
    spec = importlib.util.spec_from_file_location("vision_builder", SHARED / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def answers() -> Any:
    """llama.cpp's answers by `NAME.CASE.FIELD`, each read when asked for."""
    return np.load(SHARED / f"reference-{SEED}.npz")


@cache
def config(name: str) -> MediaConfig:
    """The configuration of a family's mmproj file beside its text model."""
    family = skeletons()[name]
    metadata = {key: value for key, _, _, value in family["mmproj"]["kv"]}
    shapes = {tensor: tuple(shape) for tensor, shape in family["mmproj"]["tensors"]}
    has_mrope = any("dimension_sections" in key for key, *_ in family["text"]["kv"])
    return read_media_config(metadata, shapes, has_mrope=has_mrope)


@cache
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a family's text model."""
    family = skeletons()[name]
    metadata: dict[str, object] = {key: value for key, _, _, value in family["text"]["kv"]}
    tokens, types, merges = builder().vocabulary(family["specials"])
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    metadata["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    return Tokenizer.from_metadata(metadata)


def cases(name: str, case: str) -> list[tuple[int, ...]]:
    """Sizes of the pictures (or samples of the sounds) that a case has, in order."""
    family = skeletons()[name]
    if case == "pair":
        return [tuple(family["pictures"][0]), tuple(family["pictures"][2])]
    if case == "limited":
        return [(333, 217)]
    if case == "mixed":
        return [(family["sounds"][0],), tuple(family["pictures"][0])]
    return [tuple(map(int, re.findall(r"\d+", case)))]


def prompt(case: str) -> list[str]:
    """Texts of a case's prompt, between which media stand."""
    if case == "pair":
        return ["", "", " in the end"]
    if case == "mixed":
        return ["The cat ", " and ", "\nthe end"]
    return ["The cat ", "\nand the hat"]


def has_token(name: str, text: str) -> bool:
    """Return whether a text is a token of the family's vocabulary."""
    return text in skeletons()[name]["specials"]


def chunks(name: str, case: str, media: list[PreparedMedia]) -> list[list[int] | EncoderInput]:
    """Stretches of token ids and inputs of encoders, as llama.cpp divides a prompt."""
    words = tokenizer(name)
    found: list[list[int] | EncoderInput] = []

    def add(ids: list[int]) -> None:
        if ids and found and isinstance(found[-1], list):
            found[-1] += ids
        elif ids:
            found.append(list(ids))

    add(words.encode("")[:1])
    texts = prompt(case)
    for index, text in enumerate(texts):
        add(words.encode(text, add_special=False, parse_special=True))
        for piece in media[index].pieces if index < len(media) else ():
            if isinstance(piece, str):
                add(words.encode(piece, add_special=False, parse_special=True))
            else:
                found.append(piece)
    return found


def positions(found: list[list[int] | EncoderInput]) -> NDArray[np.int32]:
    """Time, row and column of every row of a prompt."""
    rows: list[tuple[int, int, int]] = []
    start = 0
    for chunk in found:
        if isinstance(chunk, list) or chunk.grid is None:
            count = len(chunk) if isinstance(chunk, list) else chunk.num_rows
            rows += [(start + index,) * 3 for index in range(count)]
            start += count
        else:
            assert math.prod(chunk.grid) == chunk.num_rows
            rows += [
                (start, start + row, start + column) for row in range(chunk.grid[0]) for column in range(chunk.grid[1])
            ]
            start += chunk.num_positions
    return np.array(rows, np.int32)
