"""Long texts: the same ids as for short ones, whatever the text and wherever it is cut, and refused in time."""

import random
import re
from functools import cache
from pathlib import Path

import pytest

import localinfer
from localinfer.errors import ContextLengthError, RequestError
from localinfer.models.text import long_text, tokenizer
from localinfer.models.text.encoders import PRE_TOKENIZERS, build_splitter
from localinfer.models.text.long_text import LongTextSplitter
from localinfer.models.text.tokenizer import SpellingFinder, Tokenizer
from localinfer.quant.gguf.reader import read_gguf
from tests.models.text.vocabularies import (
    REAL,
    bpe_metadata,
    keyed,
    real_tokenizer,
    sample_texts,
    spm_metadata,
    wordpiece_metadata,
)
from tests.support.samples import by_turns

PARTS = (
    *(
        "a",
        "b",
        "ab",
        "Z",
        "é",
        "e\u0301",
        "中",
        "ǅ",
        "ʰ",
        "1",
        "234",
        "٣",
        "½",
        " ",
        "  ",
        " " * 9,
        "\t",
        "\n",
        "\n\n",
    ),
    *(
        "\r",
        "\u00a0",
        "\u2028",
        "\x1c",
        "\x85",
        "▁",
        "<unk>",
        "</s>",
        "<0x0A>",
        "!",
        "'",
        "'s",
        "'S",
        "'LL",
        "'re",
        "'ſ",
    ),
    *(
        "'V",
        ".",
        "/",
        "<|",
        "=====",
        "😀",
        "\u200d",
        "\U000e0001",
        "\u0378",
        "ABC",
        "Abc",
        "က",
        "가",
        "、",
        " the",
        "ing",
    ),
    *("<sentinel:12>", "IMGIMGAAZ", "<|im_start|>", "<|end|>", "\x00", "\ufffd"),
)
MERGES = ("a a", "aa a", "a b", "ab a", "Ġ a", "Ċ Ċ", "Ġ Ġ")
RAW = {"▁": -1.0, "a": -2.0, "b": -3.0, "ab": -2.0, "▁a": -4.0, "\n": -5.0, "\n\n": -6.0, "▁▁": -2.0}
CROSSING = {"▁": -1.0, "a": -2.0, "ab": -2.0, "▁a": -4.0, "ba": -2.0, "a▁": -6.0, "aa": -2.0, "中a": -1.0}
SMALL = {
    "spm": spm_metadata(),
    "spm whose tokens cross words": spm_metadata(CROSSING),
    "spm without a space before": spm_metadata(add_space_prefix=False),
    "bpe": bpe_metadata(MERGES),
    "bpe of whole words": bpe_metadata(MERGES, pre="llama-bpe"),
    "bpe with another rule": bpe_metadata(MERGES, pre="tekken"),
    "bpe without merges": {
        key: value for key, value in bpe_metadata(MERGES, pre="kimi-k2").items() if not key.endswith("merges")
    },
    "raw bpe": spm_metadata(RAW) | keyed(model="gemma4", merges=["a b", "▁ a", "▁ ▁", "\n \n"], bos_token_id=1),
    "wordpiece": wordpiece_metadata(),
}


def text_of(draw: random.Random, most: int = 300) -> str:
    parts = draw.sample(PARTS, draw.randint(1, 12))
    return "".join(draw.choice(parts) for _ in range(draw.randint(0, most)))


def ids_both_ways(
    encoder: Tokenizer, text: str, stretch: int, patch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    with patch.context() as changed:
        changed.setattr(tokenizer, "LONG_TEXT", len(text) + 1)
        short = encoder.encode(text, parse_special=True)
        changed.setattr(tokenizer, "LONG_TEXT", 0)
        changed.setattr(tokenizer, "LONG_STRETCH", 1)
        changed.setattr(long_text, "STRETCH", stretch)
        return short, encoder.encode(text, parse_special=True)


@cache
def small_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(SMALL[name])


@pytest.mark.parametrize("name", SMALL)
def test_long_way_gives_the_ids_of_the_short_one(name: str, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(name)
    for _ in range(20):
        short, long = ids_both_ways(small_tokenizer(name), text_of(draw), draw.choice((3, 50, 1 << 16)), monkeypatch)
        assert long == short


@pytest.mark.parametrize("name", [*REAL, "demo"])
def test_long_way_gives_the_ids_of_the_short_one_for_real_vocabularies(name: str, monkeypatch: pytest.MonkeyPatch):
    encoder = real_tokenizer(name) if name in REAL else demo_tokenizer()
    words = re.findall(r"\s+|\S+", "".join(sample_texts()))
    draw = random.Random(name)
    for _ in range(8):
        text = text_of(draw) + "".join(draw.choices(words, k=100))
        short, long = ids_both_ways(encoder, text, draw.choice((7, 1 << 16)), monkeypatch)
        assert long == short


@pytest.mark.parametrize("name", [*(name for name in SMALL if name != "wordpiece"), *REAL, "demo"])
def test_word_of_any_length_has_the_same_ids_merged_in_windows(name: str, monkeypatch: pytest.MonkeyPatch):
    encoder = small_tokenizer(name) if name in SMALL else real_tokenizer(name) if name in REAL else demo_tokenizer()
    draw = random.Random(name)
    for _ in range(15):
        alphabet = draw.choice(("ab", "a", "abc", "the", "é中a", "😀b", " a", "0", "=-"))
        word = "".join(draw.choice(alphabet) for _ in range(draw.randint(600, 1500)))
        monkeypatch.setattr(long_text, "_WINDOW", draw.choice((260, 300, 555)))
        monkeypatch.setattr(long_text, "_MARGIN", draw.choice((1, 2, 9, 64)))
        short, long = ids_both_ways(encoder, f"x {word} {word} y", draw.choice((64, 1 << 16)), monkeypatch)
        assert long == short


def test_word_of_tokens_as_long_as_a_window_has_the_same_ids(monkeypatch: pytest.MonkeyPatch):
    """What a run has left over stands at its end, so a window by itself ends in other tokens than the word."""
    merges = ["a a", "aa aa", "aaaa aaaa", "aaaaaaaa aaaaaaaa", "aaaaaaaaaaaaaaaa aaaaaaaaaaaaaaaa", "a b"]
    encoder = Tokenizer.from_metadata(bpe_metadata(merges))
    monkeypatch.setattr(long_text, "_WINDOW", 33)
    monkeypatch.setattr(long_text, "_MARGIN", 1)
    for size in range(30, 300, 7):
        short, long = ids_both_ways(encoder, "a" * size + "b", 1 << 16, monkeypatch)
        assert long == short


def test_spellings_are_found_wherever_pieces_of_a_text_end(monkeypatch: pytest.MonkeyPatch):
    finder = SpellingFinder({"<|a|>": 1, "<|ab|>": 2, "[x]": 3, "<": 4, "aa": 5})
    draw = random.Random(5)
    for _ in range(200):
        text = "".join(draw.choice(("<|a|>", "<|ab|>", "[x]", "[", "<", "a", "b", "|")) for _ in range(30))
        whole = list(finder.find(text))
        with monkeypatch.context() as changed:
            changed.setattr(tokenizer, "_SEARCHED", draw.randint(1, 9))
            assert list(finder.find(text)) == whole
        assert whole == [
            (start, start + len(one), found)
            for start in range(len(text))
            for one, found in sorted(finder._ids.items(), key=lambda item: -len(item[0]))
            if text.startswith(one, start)
        ]


def test_half_a_character_is_named_by_its_place_in_a_long_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "_CHECKED", 10)
    with pytest.raises(RequestError, match=r"U\+D800, at index 25;"):
        small_tokenizer("bpe").encode("a" * 25 + "\ud800" + "a" * 25)


def demo_tokenizer() -> Tokenizer:
    demo = Path(localinfer.models.__path__[0]) / "demo" / "demo-f16.gguf"
    with read_gguf(demo) as file:
        return Tokenizer.from_metadata(file.metadata)


def test_words_do_not_depend_on_how_a_text_is_cut_for_any_rule(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(1)
    for rule in dict.fromkeys(PRE_TOKENIZERS.values()):
        for stretch in (1, 7, 40, 1000):
            monkeypatch.setattr(long_text, "STRETCH", stretch)
            text = text_of(draw, 150)
            found = [
                part[start:end]
                for part, ends in LongTextSplitter(rule).stretches(text)
                for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)
            ]
            assert found == (build_splitter(rule)(text) if text else [])


@pytest.mark.parametrize("name", [name for name in SMALL if name != "wordpiece"])
def test_texts_of_one_kind_go_there_and_back(name: str):
    encoder, turn = small_tokenizer(name), list(SMALL).index(name)
    for unit in by_turns(("a", " ", "<", "7", "中", "😀", "\n", "a ", "a1", "</s>", "e\u0301", "▁"), turn, 3):
        text = unit * (17_000 // len(unit) + 1)
        ids = encoder.encode(text, add_special=False)
        assert encoder.decode(ids, skip_special=False) == text, unit


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch):
    for name in ("spm", "bpe"):
        with monkeypatch.context() as changed:
            for merging in ("encode_marked", "encode_split"):
                changed.setattr(f"localinfer.models.text.long_text.{merging}", lambda *_, **__: pytest.fail("encoded"))
            with pytest.raises(ContextLengthError, match="more than 100 tokens, but the context holds 100") as caught:
                small_tokenizer(name).encode("a" * 20_000, max_tokens=100)
        assert caught.value.context_length == 100


def test_encoding_stops_at_the_stretch_that_is_too_much(monkeypatch: pytest.MonkeyPatch):
    encoder = small_tokenizer("bpe")
    seen: list[int] = []
    whole = long_text.SymbolTable.encode

    def counted(table, codes, symbols, ends):  # type: ignore[no-untyped-def]
        seen.append(symbols.size)
        return whole(table, codes, symbols, ends)

    monkeypatch.setattr(long_text.SymbolTable, "encode", counted)
    with pytest.raises(ContextLengthError):
        encoder.encode("x " * 1_000_000, max_tokens=1_100_000)
    assert sum(seen) < 1_500_000


@pytest.mark.parametrize("name", SMALL)
def test_text_that_just_fits_is_not_refused(name: str):
    encoder = small_tokenizer(name)
    text = "ab 中a\n" * 4000
    ids = encoder.encode(text)
    assert encoder.encode(text, max_tokens=len(ids)) == ids
    with pytest.raises(ContextLengthError):
        encoder.encode(text, max_tokens=len(ids) - 1)


def test_short_text_is_told_in_full_whatever_fits():
    assert len(small_tokenizer("bpe").encode("xyz", max_tokens=1)) == 3


def test_half_a_character_is_refused_in_a_long_text():
    with pytest.raises(RequestError, match="half a character, U.D800, at index 20000"):
        small_tokenizer("bpe").encode("a" * 20_000 + "\ud800")


def test_run_that_regular_expressions_give_up_on_is_refused(monkeypatch: pytest.MonkeyPatch):
    class PanicException(BaseException):
        pass

    def give_up(rule: object) -> object:
        def split(text: str) -> list[str]:
            raise PanicException("retry-limit-in-match over")

        return split

    monkeypatch.setattr(long_text, "build_splitter", give_up)
    with pytest.raises(RequestError, match="give it in shorter pieces"):
        list(LongTextSplitter(PRE_TOKENIZERS["tekken"]).stretches("a" * 100))
