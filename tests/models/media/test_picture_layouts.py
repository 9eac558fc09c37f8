"""Pictures of every family of GGUF files, compared with llama.cpp: bytes, rows, texts and positions."""

import zlib

import numpy as np
import pytest

from localinfer.errors import LocalinferError
from localinfer.models.media.picture_layouts import InputSize, lay_out, outline
from localinfer.models.media.records import EncoderInput
from tests.models.media import fixtures

FAMILIES = [name for name, family in fixtures.skeletons().items() if family.get("pictures")]
CASES = [
    (name, case)
    for name in FAMILIES
    for case in [
        *(f"{width}x{height}" for width, height in fixtures.skeletons()[name]["pictures"]),
        "pair",
        *(["limited"] if fixtures.skeletons()[name].get("limits") else []),
    ]
]
pytestmark = pytest.mark.usefixtures("shared")


@pytest.mark.parametrize(("name", "case"), CASES)
def test_pictures_are_laid_out_as_llama_cpp_does(name: str, case: str) -> None:
    answers, config = fixtures.answers(), fixtures.config(name)
    low, high = fixtures.skeletons()[name]["limits"] if case == "limited" else (None, None)
    media = [
        lay_out(
            fixtures.builder().picture(*size, fixtures.SEED),
            config,
            min_tokens=low,
            max_tokens=high,
            has_token=lambda text: fixtures.has_token(name, text),
        )
        for size in fixtures.cases(name, case)
    ]
    chunks = fixtures.chunks(name, case, media)
    inputs = [chunk for chunk in chunks if isinstance(chunk, EncoderInput)]
    key = f"{name}.{case}."
    assert [one.values.shape[1::-1] for one in inputs] == [tuple(size) for size in answers[key + "slices"].tolist()]
    assert [zlib.crc32(one.values.tobytes()) for one in inputs] == answers[key + "crc"].tolist()
    assert [int(isinstance(chunk, EncoderInput)) for chunk in chunks] == answers[key + "kinds"].tolist()
    counts = [chunk.num_rows if isinstance(chunk, EncoderInput) else len(chunk) for chunk in chunks]
    assert counts == answers[key + "counts"].tolist()
    taken = [chunk.num_positions if isinstance(chunk, EncoderInput) else len(chunk) for chunk in chunks]
    assert taken == answers[key + "n_pos"].tolist()
    tokens = [token for chunk in chunks if isinstance(chunk, list) for token in chunk]
    assert tokens == answers[key + "tokens"].tolist()
    assert np.array_equal(fixtures.positions(chunks), answers[key + "positions"])


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_alone_give_rows_positions_and_texts(name: str) -> None:
    answers, config = fixtures.answers(), fixtures.config(name)
    words = fixtures.tokenizer(name)
    around = sum(len(words.encode(text, add_special=False)) for text in fixtures.prompt("")) + len(words.encode(""))
    found = []
    for width, height in answers[f"{name}.sizes"].tolist():
        try:
            pieces = outline(width, height, config, has_token=lambda text: fixtures.has_token(name, text))
        except LocalinferError:
            found.append([-1] * 4)
            continue
        inputs = [piece for piece in pieces if isinstance(piece, InputSize)]
        texts = [
            words.encode(piece, add_special=False, parse_special=True) for piece in pieces if isinstance(piece, str)
        ]
        rows = sum(one.num_rows for one in inputs)
        found.append([len(inputs), rows, sum(one.num_positions for one in inputs), around + sum(map(len, texts))])
    assert found == answers[f"{name}.size_counts"].tolist()
