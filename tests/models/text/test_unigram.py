"""Unigram vocabularies against the tokenizers package, compiled normalizations, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer as PeerTokenizer
from tokenizers.models import Unigram
from tokenizers.normalizers import Precompiled, Replace, Sequence, Strip
from tokenizers.pre_tokenizers import Metaspace

from localinfer.errors import TokenizerError
from localinfer.models.text.encoders import LONG_TEXT
from localinfer.models.text.normalizer import CharacterMap
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.text.unigram_vocabularies import REPLACED, compiled_map, random_texts, unigram_metadata
from tests.models.text.vocabularies import keyed


def peer(metadata: dict[str, object]) -> PeerTokenizer:
    tokens, scores = metadata[PREFIX + "tokens"], metadata[PREFIX + "scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, np.ndarray)
    pieces = list(zip(tokens, scores.tolist(), strict=True))
    made = PeerTokenizer(Unigram(pieces, unk_id=3, byte_fallback="<0x00>" in tokens))
    made.normalizer = Sequence([Strip(), Replace(Regex(" +"), " ")])
    made.pre_tokenizer = Metaspace(replacement="▁", prepend_scheme="always", split=False)
    return made


def plain(text: str) -> str:
    """A text without what a normalization without a map leaves, and the peer's does not."""
    return "".join(character for character in text if character == " " or not character.isspace())


@pytest.mark.parametrize("levels", [0, 5, 1])
@pytest.mark.parametrize("with_bytes", [False, True])
def test_unigram_ids_are_those_of_the_tokenizers_package(levels: int, with_bytes: bool) -> None:
    metadata = unigram_metadata(seed=levels, levels=levels, with_bytes=with_bytes)
    tokenizer, other = Tokenizer.from_metadata(metadata), peer(metadata)
    for text in map(plain, random_texts(300, seed=levels)):
        # Before a literal mark the peer adds none.
        if text := text.lstrip(" ▁"):
            assert tokenizer.encode(text, add_special=False) == other.encode(text).ids, text


def test_texts_get_the_tokens_around_them_and_come_back() -> None:
    tokenizer = Tokenizer.from_metadata(unigram_metadata())
    ids = tokenizer.encode("  hello   world ")
    assert [tokenizer.token_text(i) for i in ids] == ["<s>", "▁hello", "▁world", "</s>"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.encode("") == tokenizer.encode("   ") == [0, 2]
    assert tokenizer.ids_between == [2]
    assert tokenizer.kind == "unigram"


def test_steps_before_the_map_are_read_told_apart_and_checked() -> None:
    steps = ['replace\t``\t"', "nfkd", "strip_accents", "lowercase"]
    plain = Tokenizer.from_metadata(unigram_metadata())
    other = Tokenizer.from_metadata(unigram_metadata() | {PREFIX + "normalizer.steps": steps})
    assert other.encode("HÉLLO") == plain.encode("hello") != plain.encode("HÉLLO")
    assert plain.fingerprint != other.fingerprint
    assert plain.difference_from(other) == "the steps of their normalizations differ"
    for wrong in (["upper"], ["replace\ta"], ["replace\t\tb"], ["lowercase", ""]):
        with pytest.raises(TokenizerError, match="normalizer.steps is a list with"):
            Tokenizer.from_metadata(unigram_metadata() | {PREFIX + "normalizer.steps": wrong})


def test_unknown_characters_in_a_row_are_one_token_or_their_bytes() -> None:
    tokenizer = Tokenizer.from_metadata(unigram_metadata())
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hello жж", add_special=False)] == [
        "▁hello",
        "▁",
        "<unk>",
    ]
    tokenizer = Tokenizer.from_metadata(unigram_metadata(with_bytes=True))
    assert tokenizer.decode(tokenizer.encode("hello жж")) == "hello жж"


@pytest.mark.parametrize(
    ("adds", "merges", "text", "marked"),
    [
        (True, True, " a  b ", "▁a▁b"),
        (False, True, " a  b ", "▁a▁b"),
        (True, False, "a  b ", "▁a▁▁b▁"),
        (True, False, " a", "▁▁a"),
        (False, False, " a b", "▁a▁b"),
        (True, False, "  ", "▁▁"),
    ],
)
def test_spaces_are_added_and_merged_as_the_file_says(adds: bool, merges: bool, text: str, marked: str) -> None:
    metadata = unigram_metadata(add_space_prefix=adds, remove_extra_whitespaces=merges)
    tokenizer = Tokenizer.from_metadata(metadata)
    found = "".join(tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=False))
    assert found == marked


def test_compiled_normalization_is_the_peers() -> None:
    blob = compiled_map(REPLACED)
    ours, theirs = CharacterMap(blob), Precompiled(blob.tobytes())
    for key, value in REPLACED.items():
        assert ours.apply(f"x{key}y") == f"x{value}y"
    for text in random_texts(300, seed=3):
        # The peer takes a base and its marks as one, and leaves them where the whole is no key.
        if not any(mark in text for mark in ("a\u0301", "\u0302", "\u200b")):
            assert ours.apply(text) == theirs.normalize_str(text), ascii(text)
    assert ours.apply("e\u0301e") == "ée"
    assert ours.apply("e") == "e"
    # SentencePiece replaces the key alone; the peer drops what it takes for one character with it.
    assert ours.apply("\u00a0\u032d\u00a0") == " \u032d "
    assert theirs.normalize_str("\u00a0\u032d\u00a0") == "  "


def test_long_texts_have_the_ids_of_short_ones_in_parts() -> None:
    metadata = unigram_metadata(levels=5, precompiled_charsmap=compiled_map(REPLACED))
    tokenizer = Tokenizer.from_metadata(metadata)
    text = " ".join(random_texts(1200, seed=9))
    assert len(text) > 2 * LONG_TEXT
    encoder = tokenizer._encoder  # noqa: SLF001 - both ways through one encoder
    assert tokenizer.encode(text, add_special=False) == encoder.encode(text, is_run_start=True)
    without_spaces = text.replace(" ", "")
    assert tokenizer.encode(without_spaces, add_special=False) == encoder.encode(without_spaces, is_run_start=True)


def change(**values: object) -> Callable[[], dict[str, object]]:
    return lambda: unigram_metadata() | keyed(**values)


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in unigram_metadata().items() if name != PREFIX + key}


def no_unknown() -> dict[str, object]:
    metadata = without("unknown_token_id")
    tokens = metadata[PREFIX + "tokens"]
    assert isinstance(tokens, list)
    return metadata | keyed(tokens=["<s>", "<pad>", "</s>", "<none>", *tokens[4:]])


SHORT = compiled_map({"a": "b"})
HOSTILE = {
    "no scores": (lambda: without("scores"), "scores is missing"),
    "few scores": (change(scores=np.zeros(3, np.float32)), "scores is an array of 3 values"),
    "no number": (change(scores=np.full(len(unigram_metadata()[PREFIX + "tokens"]), np.nan)), "not a number"),  # type: ignore[arg-type]
    "no unknown token": (no_unknown, "unknown_token_id is missing"),
    "map of text": (change(precompiled_charsmap="abc"), "precompiled_charsmap is 'abc'"),
    "map of large numbers": (change(precompiled_charsmap=np.array([1, 256])), "precompiled_charsmap is an array"),
    "map of nothing": (change(precompiled_charsmap=np.zeros(3, np.uint8)), "3 bytes that announce a trie of -1"),
    "map of zeros": (change(precompiled_charsmap=np.zeros(40, np.uint8)), "40 bytes that announce a trie of 0"),
    "map beyond its end": (change(precompiled_charsmap=np.full(64, 255, np.uint8)), "64 bytes that announce"),
    "map cut short": (change(precompiled_charsmap=SHORT[:-1]), "replacements without an end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_unigram_vocabularies_are_refused(name: str) -> None:
    make, found = HOSTILE[name]
    with pytest.raises(TokenizerError, match=found):
        Tokenizer.from_metadata(make())


def test_maps_that_lead_nowhere_are_refused_or_harmless() -> None:
    generator = np.random.default_rng(0)
    whole = compiled_map(REPLACED)
    for _ in range(300):
        blob = whole.copy()
        blob[generator.integers(4, blob.size - 1, 40)] = generator.integers(0, 256, 40)
        try:
            found = CharacterMap(blob).apply("e\u0301 Ａ①½ and more")
        except TokenizerError as error:
            assert "precompiled_charsmap" in str(error)
        else:
            assert isinstance(found, str)
