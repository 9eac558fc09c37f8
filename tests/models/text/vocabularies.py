"""Small vocabularies made by program, and real ones (tests/data/README.md), as plain metadata."""

import lzma
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from localinfer.models.text.encoders import BYTE_CHARACTERS
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from localinfer.quant.gguf.reader import read_gguf
from tests.conftest import SHARED

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
DATA = Path(__file__).parents[2] / "data" / "vocabularies"
REAL = ("llama-spm", "llama-bpe", "gpt-2", "qwen2", "phi-3")


def vocabulary_file(name: str, folder: Path) -> Path:
    """A published vocabulary as a file; skips where neither the tests nor the optional folder have it."""
    packed, beside = DATA / f"{name}.gguf.xz", SHARED / "vocab" / f"ggml-vocab-{name}.gguf"
    if packed.is_file():
        path = folder / f"{name}.gguf"
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        return path
    if not beside.is_file():
        pytest.skip(f"the vocabulary {name} may not be shipped, and ../shared is not beside this checkout")
    return beside


@cache
def real_metadata(name: str) -> dict[str, object]:
    """The metadata of a published vocabulary."""
    with TemporaryDirectory() as folder, read_gguf(vocabulary_file(name, Path(folder))) as file:
        return {key: file.metadata[key] for key in file.metadata}


@cache
def real_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a published vocabulary."""
    return Tokenizer.from_metadata(real_metadata(name))


def sample_texts() -> list[str]:
    """The texts whose ids are known in every vocabulary."""
    return (DATA / "texts.txt").read_bytes().decode().split("\n__ggml_vocab_test__\n")


def sample_ids(name: str) -> list[list[int]]:
    """The right ids of the sample texts, without special tokens."""
    own, beside = DATA / f"{name}.ids.txt", SHARED / "vocab" / f"ggml-vocab-{name}.gguf.out"
    lines = (own if own.is_file() else beside).read_bytes().decode().split("\n")
    return [[int(word) for word in line.split()] for line in lines]


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


def bert_metadata(**changes: object) -> dict[str, object]:
    """A BERT vocabulary of letters, words and what follows in words."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = "the cat hello world un re dog café cafe naïve 中 国 ! ? . , - = [ ] ( ) # $ % + _ ' ٣ ß ж €".split()
    pieces = "s ing able ness turn ld llo cats é".split()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += list(dict.fromkeys([*("▁" + word for word in [*words, *letters]), *pieces, *letters]))
    types = [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 5)]
    metadata = keyed(
        model="bert", tokens=tokens, token_type=np.array(types, np.int32), unknown_token_id=1, bos_token_id=2,
        seperator_token_id=3, padding_token_id=0, mask_token_id=4,
    )  # fmt: skip
    return metadata | keyed(**changes)


def gemma4_metadata() -> dict[str, object]:
    """A vocabulary of merges over marked spaces, with bytes for what no token covers."""
    letters = list("abcdefghijklmnopqrstuvwxyzABCé=.,'!中国▁\n")
    merges = (
        "t h,th e,▁ the,▁ a,c a,ca t,▁ cat,▁▁ ▁,▁ ▁,\n \n,= =,== ==,i n,in g,h e,l l,he ll,hell o,▁ hello,中 国,o r,d e"
    ).split(",")
    words = dict.fromkeys([*letters, *(merge.replace(" ", "") for merge in merges)])
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(words)
    return keyed(
        model="gemma4", tokens=tokens, token_type=np.array(types, np.int32), merges=merges,
        scores=np.zeros(len(tokens), np.float32), bos_token_id=2, eos_token_id=1, unknown_token_id=3,
        add_space_prefix=False,
    )  # fmt: skip
