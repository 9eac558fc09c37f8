"""Tokenizers of folders: the ids of the library that defines tokenizer.json, and typed refusals of what it can more."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from localinfer.errors import CorruptFileError, TokenizerError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.checkpoint.tokenizer_json import TokenizerJson
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.encoders import PRE_TOKENIZERS
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from localinfer.quant.gguf.reader import Metadata, read_gguf
from tests.models.text.vocabularies import REAL, sample_texts, vocabulary_file
from tests.support.checkpoint_files import (
    LLAMA_CONFIG,
    VOCAB,
    added_token,
    llama_weights,
    tokenizer_document,
    write_folder,
)

PLAIN_MODEL = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def document_of(metadata: Metadata) -> dict[str, Any]:
    """The tokenizer.json of a GGUF vocabulary, as the converters of SentencePiece and byte-level BPE write theirs."""
    texts = [text.decode("utf-8", "surrogateescape") for text in metadata.raw_strings(f"{PREFIX}tokens")]
    types = metadata.integers(f"{PREFIX}token_type").tolist()
    special = enumerate(zip(texts, types, strict=True))
    added = [added_token(i, text, type != 4) for i, (text, type) in special if type in (2, 3, 4)]
    if metadata.string(f"{PREFIX}model") == "llama":
        vocab = {text: index for index, text in enumerate(texts)}
        scores = metadata.numbers(f"{PREFIX}scores")
        merges = [
            (-float(scores[index]), text[:cut], text[cut:])
            for text, index in vocab.items()
            if types[index] == 1
            for cut in range(1, len(text))
            if text[:cut] in vocab and text[cut:] in vocab
        ]
        merges.sort(key=lambda merge: (merge[0], vocab[merge[1]], vocab[merge[2]]))
        model = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True, "ignore_merges": False}
        document = tokenizer_document()
        pairs: list[Any] = [[left, right] for _, left, right in merges]
        return {
            "added_tokens": added,
            "normalizer": document["normalizer"],
            "model": {"type": "BPE", **PLAIN_MODEL, **model, "vocab": vocab, "merges": pairs},
        }
    rule = PRE_TOKENIZERS[metadata.string(f"{PREFIX}pre")]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False} for step in rule.steps
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    model = {"byte_fallback": False, "unk_token": None, "fuse_unk": False, "ignore_merges": rule.ignores_merges}
    vocab = {text: index for index, (text, type) in enumerate(zip(texts, types, strict=True)) if type not in (3, 4)}
    merges = metadata.strings(f"{PREFIX}merges")
    return {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", **PLAIN_MODEL, **model, "vocab": vocab, "merges": merges},
    }


def any_texts() -> list[str]:
    """The texts of every vocabulary's own test, and random characters of many scripts."""
    choose = random.Random(1)
    ranges = [(32, 127), (0xA0, 0x2000), (0x4E00, 0x5000), (0x1F600, 0x1F640), (10, 11), (32, 33)]
    return sample_texts() + [
        "".join(chr(choose.randrange(*choose.choice(ranges))) for _ in range(40)) for _ in range(100)
    ]


@pytest.mark.parametrize("name", REAL)
def test_ids_equal_those_of_the_library_and_of_the_gguf_vocabulary(name: str, tmp_path: Path) -> None:
    with read_gguf(vocabulary_file(name, tmp_path)) as file:
        document = document_of(file.metadata)
        from_gguf = Tokenizer.from_metadata(file.metadata)
        count = file.metadata.stored(f"{PREFIX}tokens").count
        roles = {key: file.metadata[key] for key in file.metadata if key.endswith("_token_id")}
    assert count is not None
    library = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **document}))
    ours = Tokenizer.from_metadata({**TokenizerJson(document, count).metadata, **roles})
    for text in any_texts():
        found = ours.encode(text, add_special=False, parse_special=True)
        assert found == library.encode(text, add_special_tokens=False).ids, text
        assert found == from_gguf.encode(text, add_special=False, parse_special=True), text


def tokenizer_of(document: dict[str, Any], **settings: Any) -> Tokenizer:
    metadata = TokenizerJson(document, VOCAB).metadata
    return Tokenizer.from_metadata({**metadata, f"{PREFIX}eos_token_id": 2, **settings})


@pytest.mark.parametrize(
    ("scheme", "wanted"), [("always", [110, 1, 110]), ("first", [110, 1, 84]), ("never", [84, 1, 84])]
)
def test_metaspace_puts_its_space_where_its_scheme_says(scheme: str, wanted: list[int]) -> None:
    document = tokenizer_document()
    document["normalizer"] = None
    document["post_processor"] = None
    document["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    library = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **document}))
    tokenizer = tokenizer_of(document)
    assert tokenizer.encode("a<s>a", add_special=False, parse_special=True) == wanted
    # Where there is a space already, none is put.
    for text in ("a<s>a", " a", "  a", "  ", "<s> a", " a<s> a"):
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        assert found == library.encode(text, add_special_tokens=False).ids, text
    long = " a" * 40_000
    assert tokenizer.encode(long, add_special=False) == library.encode(long, add_special_tokens=False).ids


def test_a_mark_that_is_put_before_a_text_twice_is_refused() -> None:
    document = tokenizer_document()
    steps = document["normalizer"]["normalizers"]
    steps.insert(0, steps[0])
    with pytest.raises(TokenizerError, match="before a text twice"):
        tokenizer_of(document)


def test_white_space_goes_with_special_tokens_that_say_so() -> None:
    document = tokenizer_document()
    for token in document["added_tokens"]:
        token["rstrip"] = True
    assert TokenizerJson(document, VOCAB).strips_after_special
    flag = {f"{PREFIX}strips_after_special": True}
    assert tokenizer_of(document, **flag).encode("</s>  a", False, parse_special=True) == [2, 110]


def test_ids_without_a_text_are_unused_and_added_ones_without_a_row_are_dropped() -> None:
    document = tokenizer_document()
    document["added_tokens"].append({"id": VOCAB, "content": "<image>", "special": True})
    metadata = TokenizerJson(document, VOCAB).metadata
    assert metadata[f"{PREFIX}tokens"][-1] == f"[PAD{VOCAB - 1}]"  # type: ignore[index]
    assert metadata[f"{PREFIX}token_type"][-1] == 5  # type: ignore[index]
    with pytest.raises(TokenizerError, match="lie outside the 50 rows"):
        TokenizerJson(document, 50)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "type"), "WordLevel", "its model is 'WordLevel'"),
        (("model", "dropout"), 0.1, "dropout 0.1"),
        (("model", "end_of_word_suffix"), "<end>", "end_of_word_suffix"),
        (("model", "byte_fallback"), False, "neither byte-level nor has it byte_fallback"),
        (("model", "vocab"), {"a": -1}, "not a map of texts to ids"),
        (("model", "vocab"), {"a": 3, "b": 3}, "both have the id 3"),
        (("model", "merges"), [["a"]], r"the merge \['a'\] is not a pair"),
        (("model", "merges"), [["x", "y"]], "is not a token"),
        (("normalizer",), {"type": "Lowercase"}, "a step of its pipeline is .*Lowercase"),
        (("normalizer",), None, "nothing in it turns spaces"),
        (("pre_tokenizer",), {"type": "Whitespace"}, "a step of its pipeline is .*Whitespace"),
        (("pre_tokenizer",), 3, "a step of the pipeline is 3"),
        (("added_tokens",), [{"id": 1}], "lacks content, id or special"),
        (("added_tokens",), 1, "added_tokens is 1; wanted a list"),
        (("model",), None, "model is None; wanted an object"),
    ],
)
def test_tokenizer_that_is_not_built_is_refused_by_what_it_holds(path: tuple[str, ...], value: Any, words: str) -> None:
    document = tokenizer_document()
    record = document
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = value
    with pytest.raises(TokenizerError, match=words):
        TokenizerJson(document, VOCAB)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}, "splits words by"),
        ({"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "MergedWithNext", "invert": False}, "has the step"),
        ({"type": "Punctuation"}, "has the step"),
    ],
)
def test_unknown_way_of_splitting_words_is_refused(step: dict[str, Any], words: str) -> None:
    document = tokenizer_document()
    document["normalizer"] = None
    document["model"]["byte_fallback"] = False
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, byte_level]}
    with pytest.raises(TokenizerError, match=words):
        TokenizerJson(document, VOCAB)


def test_folder_without_tokenizer_json_says_what_it_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_weights())
    (folder / "tokenizer.model").write_bytes(b"not read")
    with open_checkpoint(folder) as model:
        assert f"{PREFIX}tokens" not in model.metadata
        assert "only tokenizer.model" in str(model.tokenizer_error)


def test_post_processor_that_adds_something_else_is_refused(tmp_path: Path) -> None:
    document = tokenizer_document()
    document["post_processor"]["single"] = [{"SpecialToken": {"id": "</s>"}}, {"Sequence": {"id": "A"}}]
    settings = {"bos_token": "<s>"}
    folder = write_folder(tmp_path, llama_weights(), tokenizer=document, tokenizer_config=settings)
    with open_checkpoint(folder) as model:
        assert "adds ['</s>']" in str(model.tokenizer_error)


def test_token_that_only_the_post_processor_names_begins_a_text(tmp_path: Path) -> None:
    config = {**LLAMA_CONFIG, "eos_token_id": 2}
    with open_checkpoint(write_folder(tmp_path, llama_weights(), config, tokenizer=tokenizer_document())) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("ab") == [1, 111]
    assert tokenizer.eog_token_ids == {2}


def test_token_behind_every_text_ends_it_beside_that_of_a_turn(tmp_path: Path) -> None:
    """As embedding models made of chat models have it."""
    document = tokenizer_document()
    document["added_tokens"].append(added_token(119, "<end>"))
    document["post_processor"]["single"] = [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "<end>"}}]
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = write_folder(tmp_path, llama_weights(), tokenizer=document, tokenizer_config=settings)
    with open_checkpoint(folder) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata)
    assert tokenizer.encode("ab") == [111, 119]
    assert tokenizer.eog_token_ids == {2, 119}


def test_damaged_tokenizer_file_is_an_error_not_a_missing_vocabulary(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_weights())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json is not sound JSON"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["jinja", "text", "list", "own file"])
def test_chat_template_is_found_wherever_it_is_kept(kind: str, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag"}]
    settings: dict[str, Any] = {"eos_token": "</s>", "bos_token": "<s>"}
    documents: dict[str, Any] = {"tokenizer_config": settings}
    if kind == "text":
        settings["chat_template"] = "D"
    elif kind == "list":
        settings["chat_template"] = templates
    elif kind == "own file":
        documents["chat_template"] = {"chat_template": "D"}
    folder = write_folder(tmp_path, llama_weights(), tokenizer=tokenizer_document(), **documents)
    if kind == "jinja":
        (folder / "chat_template.jinja").write_text("D")
    with open_checkpoint(folder) as model:
        template = ChatTemplate.from_metadata(model.metadata, Tokenizer.from_metadata(model.metadata))
    assert (template.source, template.bos_token, template.eos_token) == ("D", "<s>", "</s>")
    assert template.tool_source == ("T" if kind == "list" else None)
