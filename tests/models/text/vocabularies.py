"""Small vocabularies made by program, and the real ones beside the checkout, as plain metadata."""

from functools import cache
from pathlib import Path

import numpy as np

from localinfer.models.text.byte_level import BYTE_CHARACTERS
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from localinfer.quant.gguf.reader import read_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
REAL = ("llama-spm", "llama-bpe", "gpt-2", "qwen2", "phi-3")


@cache
def real_metadata(shared: Path, name: str) -> dict[str, object]:
    with read_gguf(shared / "vocab" / f"ggml-vocab-{name}.gguf") as file:
        return {key: file.metadata[key] for key in file.metadata}


@cache
def real_tokenizer(shared: Path, name: str) -> Tokenizer:
    return Tokenizer.from_metadata(real_metadata(shared, name))


def keyed(**values: object) -> dict[str, object]:
    return {PREFIX + key: value for key, value in values.items()}


def spm_metadata(words: dict[str, float] | None = None, **changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary: three specials, 256 bytes, then the words with their scores."""
    words = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -4.0, "ab": -5.0, "▁ab": -6.0} if words is None else words
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    metadata = keyed(
        model="llama",
        tokens=tokens,
        scores=np.array([0.0] * 259 + list(words.values()), np.float32),
        token_type=np.array(types, np.int32),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    return metadata | keyed(**changes)


def bpe_metadata(merges: tuple[str, ...] = ("a b", "ab c", "Ġ ab"), **changes: object) -> dict[str, object]:
    """A byte-level vocabulary: the 256 bytes, the merged words, then ChatML's control tokens."""
    words = [*BYTE_CHARACTERS, *(merge.replace(" ", "") for merge in merges)]
    tokens = [*words, "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    metadata = keyed(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_type=np.array([NORMAL] * len(words) + [CONTROL] * 3, np.int32),
        merges=list(merges),
        eos_token_id=len(words) + 2,
    )
    return metadata | keyed(**changes)


def with_token(metadata: dict[str, object], token: str, token_type: int) -> dict[str, object]:
    """The same vocabulary with one more token at its end."""
    tokens, types = metadata[PREFIX + "tokens"], metadata[PREFIX + "token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, np.ndarray)
    changed = metadata | keyed(tokens=[*tokens, token], token_type=np.append(types, np.int32(token_type)))
    if PREFIX + "scores" in metadata:
        scores = metadata[PREFIX + "scores"]
        assert isinstance(scores, np.ndarray)
        changed |= keyed(scores=np.append(scores, np.float32(0)))
    return changed


def wordpiece_metadata(**changes: object) -> dict[str, object]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁world", "▁un", "aff", "able", "▁!", "▁中", "▁cafe", "s"]
    types = [CONTROL, UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 4)]
    metadata = keyed(
        model="bert",
        tokens=tokens,
        token_type=np.array(types, np.int32),
        unknown_token_id=1,
        bos_token_id=2,
        seperator_token_id=3,
    )
    return metadata | keyed(**changes)
