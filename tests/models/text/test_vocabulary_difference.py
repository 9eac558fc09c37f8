"""Two vocabularies are proven to give the same ids, or the reason is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.models import demo
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.gguf.reader import read_gguf

PREFIX = "tokenizer.ggml."


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    with read_gguf(Path(demo.__file__).parent / "demo-f16.gguf") as file:
        return {key: value for key, value in file.metadata.items() if key.startswith(PREFIX)}


def changed(metadata: dict[str, Any], **values: Any) -> Tokenizer:
    return Tokenizer.from_metadata({**metadata, **{PREFIX + name: value for name, value in values.items()}})


def tokens(metadata: dict[str, Any]) -> list[str]:
    return list(metadata[PREFIX + "tokens"])


def test_a_vocabulary_equals_itself_and_one_with_unused_tokens_after_it(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.difference_from(Tokenizer.from_metadata(metadata)) is None
    padded = changed(
        metadata,
        tokens=[*tokens(metadata), "[PAD1]", "[PAD2]"],
        token_type=np.append(metadata[PREFIX + "token_type"], [3, 3]).astype(np.int32),
    )
    assert tokenizer.difference_from(padded) is None
    assert padded.difference_from(tokenizer) is None


def test_another_order_of_tokens_is_named_by_a_token(metadata: dict[str, Any]) -> None:
    swapped = tokens(metadata)
    swapped[900], swapped[901] = swapped[901], swapped[900]
    difference = Tokenizer.from_metadata(metadata).difference_from(changed(metadata, tokens=swapped))
    assert difference is not None
    assert "id 900" in difference
    assert "id 901" in difference


def test_another_way_of_splitting_is_named(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    other = tokenizer.difference_from(changed(metadata, pre="llama-bpe"))
    assert other == "one is bpe (gpt-2) and the other bpe (llama-bpe)"
    merges = list(metadata[PREFIX + "merges"])
    assert tokenizer.difference_from(changed(metadata, merges=merges[::-1])) == "their merges differ"
