"""A tokenizer.json that lies: it ends in a TokenizerError, or makes a tokenizer that works, whatever it holds."""

import copy
import json
import random
from typing import Any

import pytest

from localinfer.errors import TokenizerError, UnsupportedFormatError
from localinfer.models.checkpoint.tokenizer_json import TokenizerJson
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.text.encoders import BYTE_CHARACTERS, TokenizerWarning
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.text.vocabularies import bpe_metadata, keyed, spm_metadata
from tests.support.checkpoint_files import VOCAB, added_token, tokenizer_document

TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, TEXT]}


def byte_level_document() -> dict[str, Any]:
    vocab = {character: index for index, character in enumerate(BYTE_CHARACTERS)} | {"ab": 256, "abc": 257}
    return {
        "added_tokens": [added_token(258, "<|endoftext|>", True), added_token(259, "<tool>", False)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|endoftext|>"}}, {"Sequence": {"id": "A"}}],
        },
        "model": {"type": "BPE", "unk_token": None, "vocab": vocab, "merges": ["a b", ["ab", "c"]]},
    }


def nested(depth: int, parts: str) -> Any:
    value: Any = {"type": "NFC"}
    for _ in range(depth):
        value = {"type": "Sequence", parts: [value]}
    return value


def deep_list(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 258, 2**31, 2**63, 10**30, 1.5, float("inf"), (1 << 22) - 1, 1 << 22),
    *("", "\ud800", "a\udfff b", "\udc80", "a b", "\x00", "x" * 5000, "▁", "<0x41>", "<unk>", "\ud800 b"),
    *(
        [],
        {},
        [[]],
        ["a", "b"],
        ["\ud800", "b"],
        {"a": 1},
        [1] * 100,
        {"type": []},
        {"type": {}},
        {"type": "ByteLevel"},
    ),
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
)


def places(value: Any, draw: random.Random, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something could be changed, at most a few of every list and map."""
    if not isinstance(value, dict | list):
        return [path]
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    chosen = draw.sample(keys, min(len(keys), 10))
    return [*([path] if path else []), *(place for key in chosen for place in places(value[key], draw, (*path, key)))]


def change(document: dict[str, Any], draw: random.Random) -> None:
    *path, last = draw.choice(places(document, draw))
    holder: Any = document
    for key in path:
        holder = holder[key]
    match draw.randrange(4):
        case 0 | 1:
            holder[last] = copy.deepcopy(draw.choice(VALUES))
        case 2:
            del holder[last]
        case _ if isinstance(holder, dict):
            holder[draw.choice(("\ud800", "a", "<unk>", "", "type", "\x00", "▁▁", "<0x41>"))] = holder[last]
        case _:
            holder.insert(last, copy.deepcopy(draw.choice(VALUES)))


def use(document: dict[str, Any], num_rows: int) -> None:
    """Read a document as a folder's is read, and do everything that a tokenizer is for."""
    read = TokenizerJson(json.loads(json.dumps(document)), num_rows)
    read.added_around()
    assert read.strips_after_special in (True, False)
    metadata = dict(read.metadata)
    ends = [index for text, index in read.ids.items() if text in ("</s>", "<|endoftext|>")]
    if ends:
        metadata[f"{PREFIX}eos_token_id"] = ends[0]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert len(tokenizer.fingerprint) == 64
    for text in ("hello ab abc\n", "▁<0x41> <unk></s><tool>", "é中😀 12", "ab" * 9000):
        for parses in (False, True):
            ids = tokenizer.encode(text, parse_special=parses)
            assert all(0 <= token_id < num_rows for token_id in ids)
            tokenizer.decode(ids, skip_special=False).encode()
    for token_id in range(num_rows):
        tokenizer.token_bytes(token_id)


@pytest.mark.filterwarnings("ignore::localinfer.models.text.encoders.TokenizerWarning")
@pytest.mark.parametrize("make", [tokenizer_document, byte_level_document])
def test_any_change_is_refused_by_name_or_does_no_harm(make: Any):
    draw = random.Random(1)
    refused = 0
    for _ in range(150):
        document = make()
        for _ in range(draw.choice((1, 1, 2, 3))):
            change(document, draw)
        try:
            use(document, draw.choice((VOCAB, 260, 300)))
        except TokenizerError as error:
            refused += 1
            assert len(str(error)) < 1000
            str(error).encode()
    assert 0 < refused < 150


@pytest.mark.parametrize("make", [tokenizer_document, byte_level_document])
def test_unchanged_documents_work(make: Any):
    use(make(), 260)


@pytest.mark.parametrize(
    ("key", "parts"),
    [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("post_processor", "processors")],
)
@pytest.mark.parametrize("depth", [17, 10_000])
def test_deeply_nested_steps_are_refused(key: str, parts: str, depth: int):
    with pytest.raises(TokenizerError, match=f"{parts} are nested more than 16 deep"):
        TokenizerJson(tokenizer_document() | {key: nested(depth, parts)}, VOCAB)


@pytest.mark.parametrize(
    ("post_processor", "message"),
    [
        ({"single": [TEXT]}, "its post-processor is None, .* wanted one that adds special tokens"),
        ({"type": "TemplateProcessing", "single": [TEXT, TEXT]}, "gives a text 2 times"),
        ({"type": "TemplateProcessing", "single": []}, "gives a text 0 times"),
        ({"type": "TemplateProcessing", "single": [TEXT, {"Sequence": {"id": "B"}}]}, "has .*'B'.*; wanted the text"),
        ({"type": "Sequence", "processors": [TEMPLATE, TEMPLATE]}, "2 of its post-processors add tokens"),
    ],
)
def test_a_post_processor_that_changes_texts_is_refused_by_name(post_processor: Any, message: str):
    document = tokenizer_document() | {"post_processor": post_processor}
    with pytest.raises(TokenizerError, match=message):
        TokenizerJson(document, VOCAB).added_around()


def with_merges(texts: list[str], merges: list[list[str]]) -> dict[str, Any]:
    document = tokenizer_document()
    vocab = document["model"]["vocab"]
    vocab.update((text, len(vocab) + index) for index, text in enumerate(texts))
    document["model"]["merges"] += merges
    return document


@pytest.mark.parametrize(
    ("document", "difference"),
    [
        (
            with_merges(["ab", "bc", "abc"], [["▁", "ab"], ["a", "b"], ["b", "c"], ["ab", "c"]]),
            "'a' and 'bc' are not merged",
        ),
        (
            with_merges(["ab", "bc", "abc"], [["▁", "ab"], ["a", "b"], ["ab", "c"], ["b", "c"], ["a", "bc"]]),
            "the merges that make 'abc' do not follow one another",
        ),
    ],
)
def test_merges_that_scores_cannot_tell_are_named(document: dict[str, Any], difference: str):
    with pytest.warns(TokenizerWarning, match=difference):
        TokenizerJson(document, 130)


def test_a_token_that_no_merge_makes_is_not_made():
    document = with_merges(["de", "ed"], [["e", "d"]])
    metadata = TokenizerJson(document, 130).metadata | {f"{PREFIX}eos_token_id": 2}
    tokenizer = Tokenizer.from_metadata(metadata)
    for text in ("dede", "dede" * 9000):
        found = tokenizer.encode(text, add_special=False)
        letters = [tokenizer.token_text(token_id) for token_id in found]
        assert letters == ["▁", "d", *["ed"] * (len(text) // 2 - 1), "e"]


@pytest.mark.parametrize("key", ["model", "added_tokens", "normalizer"])
def test_deeply_nested_values_are_shown_in_short(key: str):
    with pytest.raises(TokenizerError) as caught:
        TokenizerJson(tokenizer_document() | {key: [deep_list(100_000)]}, VOCAB)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("half", ["\ud800", "a\udfff", "\udc80"])
def test_half_characters_are_refused_wherever_they_stand(half: str):
    document = tokenizer_document()
    document["model"]["vocab"][half] = 119
    with pytest.raises(TokenizerError, match="model.vocab has half a character"):
        TokenizerJson(document, VOCAB)
    with pytest.raises(TokenizerError, match="added_tokens has half a character"):
        TokenizerJson(tokenizer_document() | {"added_tokens": [added_token(119, half)]}, VOCAB)
    for merge in (f"{half} a", [half, "a"]):
        document = tokenizer_document()
        document["model"]["merges"].append(merge)
        with pytest.raises(TokenizerError, match="model.merges has half a character"):
            TokenizerJson(document, VOCAB)


@pytest.mark.parametrize("made", [spm_metadata, bpe_metadata])
def test_half_characters_are_refused_in_metadata(made: Any):
    tokens = [*made()[f"{PREFIX}tokens"]]
    tokens[-1] = "\ud800"
    with pytest.raises(TokenizerError, match="tokens is a list of strings with half a character, U.D800"):
        Tokenizer.from_metadata(made() | keyed(tokens=tokens))


@pytest.mark.parametrize(
    ("where", "key"), [("model", "byte_fallback"), ("model", "ignore_merges"), ("added_tokens", "rstrip")]
)
@pytest.mark.parametrize("value", ["no", 0, [False], {}])
def test_flags_that_are_no_flags_are_refused(where: str, key: str, value: Any):
    # What is only read for the other kind of vocabulary may be anything.
    document = byte_level_document() if key == "ignore_merges" else tokenizer_document()
    holder = document[where] if where == "model" else document[where][0]
    holder[key] = value
    with pytest.raises(TokenizerError, match=f"{key} is .*; wanted true or false"):
        TokenizerJson(document, 260)


def test_vocabulary_beyond_what_can_be_drawn_from_is_refused():
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 1,
        "llama.context_length": 64,
    }
    with pytest.raises(UnsupportedFormatError, match="1048576 rows, .* fewer than 1048576"):
        ModelConfig.from_metadata(metadata, {"token_embd.weight": (1 << 20, 32)})
