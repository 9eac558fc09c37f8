"""Tokenizers of encoders' folders: the ids of the library that defines tokenizer.json, and typed refusals."""

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from localinfer.errors import TokenizerError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.checkpoint.tokenizer_json import TokenizerJson
from localinfer.models.text.encoders import LONG_TEXT
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from tests.models.checkpoint.published_encoders import encoder_weights, read_cases
from tests.models.text.unigram_vocabularies import REPLACED, compiled_map, random_texts, unigram_metadata
from tests.models.text.vocabularies import bert_metadata
from tests.support.checkpoint_files import added_token, write_folder

Document = dict[str, Any]


def template(first: str, last: str, ids: tuple[int, int]) -> Document:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    sides = [{"SpecialToken": {"id": token, "type_id": 0}} for token in (first, last)]
    special = {
        token: {"id": token, "ids": [index], "tokens": [token]} for token, index in zip((first, last), ids, strict=True)
    }
    return {
        "type": "TemplateProcessing",
        "single": [sides[0], text, sides[1]],
        "pair": [
            *(sides[0], text, sides[1], {"Sequence": {"id": "B", "type_id": 1}}),
            {"SpecialToken": {"id": last, "type_id": 1}},
        ],
        "special_tokens": special,
    }


def word_piece_document(**normalizer: object) -> Document:
    tokens: list[str] = bert_metadata()[f"{PREFIX}tokens"]  # type: ignore[assignment]
    texts = [text[1:] if text[0] == "▁" else text if text[0] == "[" and text[1:] else f"##{text}" for text in tokens]
    return {
        "added_tokens": [added_token(index, texts[index]) for index in range(5)],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
            **normalizer,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template("[CLS]", "[SEP]", (2, 3)),
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {text: index for index, text in enumerate(texts)},
        },
    }


def unigram_document(*, splits: bool = True) -> Document:
    metadata = unigram_metadata()
    pairs = zip(metadata[f"{PREFIX}tokens"], metadata[f"{PREFIX}scores"].tolist(), strict=True)  # type: ignore
    charsmap = base64.b64encode(compiled_map(REPLACED).tobytes()).decode()
    steps: list[Document] = [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}]
    precompiled: Document = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    merged = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    return {
        "added_tokens": [added_token(index, text) for index, text in enumerate(("<s>", "<pad>", "</s>", "<unk>"))],
        "normalizer": precompiled if splits else {"type": "Sequence", "normalizers": [precompiled, strip, merged]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}] * splits + steps},
        "post_processor": template("<s>", "</s>", (0, 2)),
        "model": {"type": "Unigram", "unk_id": 3, "vocab": [list(pair) for pair in pairs], "byte_fallback": False},
    }


def plain_texts(count: int, seed: int) -> list[str]:
    """Random texts without the mark of spaces, and without rare spaces that published normalizations replace."""
    return [re.sub("[▁\u2000-\u200a]", "", text) for text in random_texts(count, seed, highest=0x4000)]


def write_tokenizer(folder: Path, document: Document, **settings: object) -> Path:
    case = read_cases()["bert"]
    vocab = document["model"]["vocab"]
    shapes = {**case["shapes"], "embeddings.word_embeddings.weight": (len(vocab), 64)}
    config = {**case["config"], "vocab_size": len(vocab)}
    documents = {"tokenizer": document, "tokenizer_config": settings}
    return write_folder(folder, encoder_weights(shapes), config, **documents)


def read_tokenizer(folder: Path) -> Tokenizer:
    with open_checkpoint(folder) as file:
        assert file.tokenizer_error is None, file.tokenizer_error
        return Tokenizer.from_metadata(file.metadata)


def pair_of(library: tokenizers.Tokenizer, first: str, second: str) -> tuple[list[int], list[int]]:
    """The library's ids and token types of a pair."""
    found = library.encode(first, second)
    return found.ids, found.type_ids


def joined(tokenizer: Tokenizer, first: str, second: str) -> tuple[list[int], list[int]]:
    """The same as a reranker is given them."""
    ids = [*tokenizer.encode(first), *tokenizer.ids_between]
    rest = [*tokenizer.encode(second, add_special=False), *tokenizer.ids_after]
    return ids + rest, [0] * len(ids) + [tokenizer.second_type] * len(rest)


WORD_PIECES = {
    "uncased": word_piece_document(),
    "cased": word_piece_document(lowercase=False),
    "accents": word_piece_document(strip_accents=False),
}
WORD_PIECES["older"] = {
    **WORD_PIECES["uncased"],
    "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
}


@pytest.mark.parametrize("name", WORD_PIECES)
def test_word_pieces_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    document = WORD_PIECES[name]
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, document, cls_token="[CLS]", sep_token="[SEP]"))
    texts = ["The cats, café naïve!", "", "un-re ing", "中国 hello", *plain_texts(300, 1)]
    for text in texts:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    assert tokenizer.ids_between == [] and tokenizer.second_type == 1
    assert tokenizer.decode(tokenizer.encode("the cats")) == "the cats"


def test_mpnet_reads_pieces_of_words_between_the_ends_of_roberta(tmp_path: Path) -> None:
    document = word_piece_document()
    vocab = document["model"]["vocab"]
    names = {"[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[MASK]": "<mask>"}
    document["model"]["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    for token in document["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    ends = {"sep": ["</s>", vocab["[SEP]"]], "cls": ["<s>", vocab["[CLS]"]]}
    document["post_processor"] = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False, **ends}
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, document, bos_token="<s>", eos_token="</s>"))
    for text in ["The cats, café naïve!", "", "un-re ing", "ΟΔΟΣ οδος", *plain_texts(40, 1)]:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    assert joined(tokenizer, "the cats", "hello") == pair_of(library, "the cats", "hello")


def _replaced(old: str) -> Document:
    return {"type": "Replace", "pattern": {"String": old}, "content": '"'}


SQUEEZED = {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]"}, "content": " "}
ALBERT = [_replaced("``"), _replaced("''"), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]
RIGHT = {"type": "Strip", "strip_left": False, "strip_right": True}
BOTH = {"type": "Strip", "strip_left": True, "strip_right": True}
STEPS: dict[str, tuple[list[Document], bool]] = {
    "ALBERT": ([*ALBERT, {"type": "Precompiled"}], True),
    "ALBERT of older writers": ([*ALBERT, {"type": "Precompiled"}, {**SQUEEZED, "pattern": {"Regex": " {2,}"}}], False),
    "ALBERT with accents": ([*ALBERT[:2], {"type": "Lowercase"}], True),
    "DeBERTa": (
        [{"type": "Lowercase"}, BOTH, {"type": "Precompiled"}, {**SQUEEZED, "pattern": {"Regex": " {2,}"}}],
        False,
    ),
    "DeBERTa of newer writers": ([SQUEEZED, {"type": "NFC"}, RIGHT], False),
    "DeBERTa without capitals": ([{"type": "Lowercase"}, SQUEEZED, {"type": "NFC"}, RIGHT], False),
}
ROUGH_TEXTS = [
    "``the'' CAT",
    " \n a\t\tb  c\u3000\u3000d\x85 ",
    "Émile ÉTÉ e\u0301",
    "ΟΔΟΣ",
    "\n",
    "  ",
    "①ﬁ\u00a8x",
    "a\u00a0 b",
]


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_normalizers_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    steps, splits = STEPS[name]
    document = unigram_document()
    precompiled = document["normalizer"]
    chosen = [precompiled if step["type"] == "Precompiled" else step for step in steps]
    document["normalizer"] = {"type": "Sequence", "normalizers": chosen}
    before = [{"type": "WhitespaceSplit"}] * splits
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before, metaspace]}
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, document, bos_token="<s>", eos_token="</s>"))
    # The peer takes a base and its marks as one, and leaves them where the whole is no key.
    plain = [text for text in plain_texts(120, 6) if not re.search("[\u0300-\u06ff]", text)]
    for text in [*ROUGH_TEXTS, *SPACED_TEXTS, *plain]:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    long = "  ".join([*ROUGH_TEXTS, *plain])
    long = long * (1 + 3 * LONG_TEXT // len(long))
    assert tokenizer.encode(long) == library.encode(long).ids


@pytest.mark.parametrize("splits", [True, False])
def test_unigrams_are_those_of_the_library(splits: bool, tmp_path: Path) -> None:
    document = unigram_document(splits=splits)
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, document, **settings))
    texts = ["The cats, caf\u00e9", "", "  a  b ", "ﬁ ① hello", *plain_texts(300, 2)]
    for text in texts:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    assert joined(tokenizer, "the cat", "a dog") == pair_of(library, "the cat", "a dog")


def _pair(middle: int, type_id: int) -> Document:
    """A template of pairs with so many ends between the texts."""
    document = template("[CLS]", "[SEP]", (2, 3))
    start, text, end = document["single"]
    second = {"Sequence": {"id": "B", "type_id": type_id}}
    last = {"SpecialToken": {"id": "[SEP]", "type_id": type_id}}
    return {**document, "pair": [start, text, *[end] * middle, second, last]}


ENDS = {"sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
PAIRS: dict[str, Document] = {
    "BERT": _pair(1, 1),
    "one type": _pair(1, 0),
    "two ends": _pair(2, 0),
    "two ends and types": _pair(2, 1),
    "BERT's own step": {"type": "BertProcessing", **ENDS},
    "RoBERTa's own step": {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False, **ENDS},
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_and_their_types_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    document = {**WORD_PIECES["uncased"], "post_processor": PAIRS[name]}
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, document, cls_token="[CLS]", sep_token="[SEP]"))
    assert joined(tokenizer, "the cats", "hello") == pair_of(library, "the cats", "hello")


def test_models_that_are_given_no_types_have_one(tmp_path: Path) -> None:
    document, inputs = WORD_PIECES["uncased"], ["input_ids", "attention_mask"]
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, document, model_input_names=inputs))
    assert tokenizer.ids_between == [] and tokenizer.second_type == 0


MERGED = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
NORMALIZERS: dict[str, list[Document]] = {
    "nothing": [],
    "merged": [MERGED],
    "stripped": [{"type": "Strip", "strip_left": True, "strip_right": True}],
    "stripped and mapped": [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Precompiled"},
        MERGED,
    ],
    "mapped and stripped right": [
        {"type": "Precompiled"},
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {**MERGED, "content": "▁"},
    ],
}
SPACED_TEXTS = [" a  b\n\n c ", "  ", " ", "\t a", "a b", "  the cat", "the cat ", "\n", " the  cats a b"]


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("splits_white_space", [False, True])
@pytest.mark.parametrize("scheme", ["always", "never"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("has_mark", [True, False])
def test_spaces_of_unigrams_are_marked_as_by_the_library(
    name: str, splits_white_space: bool, scheme: str, split: bool, has_mark: bool, tmp_path: Path
) -> None:
    document = unigram_document()
    precompiled = document["normalizer"]
    steps = [precompiled if step["type"] == "Precompiled" else step for step in NORMALIZERS[name]]
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    before = [{"type": "WhitespaceSplit"}] * splits_white_space
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before, metaspace]}
    vocab = document["model"]["vocab"]
    # Tokens that reach into the next word, which some of these vocabularies never take.
    vocab += [["s▁", -3.0], ["▁the▁cat", -1.0], ["a▁b", -1.0], ["▁▁", -2.0], ["▁▁▁", -1.5]]
    if not has_mark:
        document["model"]["vocab"] = [["unused" if text == "▁" else text, score] for text, score in vocab]
    folder = write_tokenizer(tmp_path, document, bos_token="<s>", eos_token="</s>")
    if splits_white_space and (scheme == "never" or "▁" in (step.get("content") for step in steps)):
        with open_checkpoint(folder) as file:
            assert re.search("no space before|has the step", str(file.tokenizer_error))
        return
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer = read_tokenizer(folder)
    # The peer takes a base and its marks as one, and leaves them where the whole is no key.
    for text in [*SPACED_TEXTS, *(text for text in plain_texts(40, 5) if not re.search("[\u0300-\u06ff]", text))]:
        assert tokenizer.encode(text) == library.encode(text).ids, text


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([MERGED, {"type": "Precompiled", "precompiled_charsmap": "AAAA"}], "behind merged spaces"),
        ([{"type": "Precompiled", "precompiled_charsmap": "AAAA"}] * 2, "behind another"),
        ([{**MERGED, "content": "▁"}, NORMALIZERS["stripped"][0]], "once its spaces are marks"),
        (
            [NORMALIZERS["stripped"][0], unigram_document()["normalizer"], NORMALIZERS["stripped"][0]],
            "strips a text twice",
        ),
        ([{"type": "NFKD"}, SQUEEZED], "merges white space behind other steps"),
        ([{"type": "NFKD"}, BOTH, {"type": "Precompiled", "precompiled_charsmap": "AAAA"}], "strips a text between"),
        ([BOTH, {"type": "Lowercase"}], "has the step"),
    ],
)
def test_orders_of_normalizers_that_are_not_built_are_refused(steps: list[Document], words: str) -> None:
    document = unigram_document()
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    with pytest.raises(TokenizerError, match=words):
        TokenizerJson(document, len(document["model"]["vocab"]))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "continuing_subword_prefix"), "@@", "its pieces begin with '@@'"),
        (("pre_tokenizer",), {"type": "Whitespace"}, "splits words by"),
        (("normalizer",), {"type": "Lowercase"}, "its normalizer is"),
        (("normalizer", "handle_chinese_chars"), False, "handle_chinese_chars false"),
        (("normalizer", "lowercase"), 3, "lowercase is 3"),
        (("post_processor",), None, "post-processor adds None"),
        (("post_processor",), {"type": "BertProcessing", "sep": 3, "cls": []}, "wanted a list|wanted a text and an id"),
    ],
)
def test_word_pieces_that_are_not_built_are_refused(path: tuple[str, ...], value: Any, words: str) -> None:
    document = copy.deepcopy(WORD_PIECES["uncased"])
    record = document
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = value
    with pytest.raises(TokenizerError, match=words):
        TokenizerJson(document, len(document["model"]["vocab"]))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "vocab"), [["a", 1.0], ["a", 2.0]], "has a text twice"),
        (("model", "vocab"), [["a"]], "not a text and a score"),
        (("model", "vocab"), [["a", float("nan")]], "not a text and a score"),
        (("model", "vocab"), [["a", 10**400]], "not a text and a score"),
        (("model", "vocab"), {"a": 1}, "wanted a list"),
        (("model", "unk_id"), 9999, "unk_id is 9999"),
        (("normalizer",), {"type": "Nmt"}, "its normalizer has the step"),
        (
            ("normalizer",),
            {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"},
            "its normalizer has the step",
        ),
        (("normalizer", "precompiled_charsmap"), "!", "not base64"),
        (("pre_tokenizer",), {"type": "WhitespaceSplit"}, "nothing in it turns spaces"),
        (("pre_tokenizer",), {"type": "Punctuation"}, "its pre-tokenizer has the step"),
        (("pre_tokenizer", "pretokenizers", 1, "prepend_scheme"), "first", "prepend_scheme is 'first'"),
        (("pre_tokenizer", "pretokenizers", 1, "prepend_scheme"), "never", "no space before"),
    ],
)
def test_unigrams_that_are_not_built_are_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    document = unigram_document()
    record: Any = document
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = value
    with pytest.raises(TokenizerError, match=words):
        TokenizerJson(document, 200)
