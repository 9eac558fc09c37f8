"""Tokenizers: tokenizer.json and the files beside it, GGUF's keys, and texts given to published vocabularies.

An input is a JSON object: `files` with `config` and `rows`, as a folder has them, or `raw`, the characters of a
tokenizer.json that is none; or `metadata`, GGUF's keys; or `vocabulary`, the name of a published one. `texts` are
encoded and decoded in every way there is, and compared with the library that defines tokenizer.json.
"""

import copy
import json
import warnings
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from localinfer.errors import ContextLengthError, LocalinferError, RequestError, TokenizerError
from localinfer.models.checkpoint.tokenizer_json import read_tokenizer
from localinfer.models.text.encoders import BYTE_CHARACTERS, PRE_TOKENIZERS, SPACE_MARK, TokenizerWarning
from localinfer.models.text.normalizer import CharacterMap
from localinfer.models.text.tokenizer import StopMatcher, StreamDecoder, Tokenizer
from localinfer.models.text.vocabulary import CONTROL_TEXTS, TokenType
from localinfer.quant.checkpoint.folder import CheckpointFolder
from tests.proof.fuzz.json_mutation import VALUES, any_text, change, changed_text, read, simpler, written
from tests.proof.fuzz.target import Limits, Target, refused
from tests.support.checkpoint_files import VOCAB, added_token, tokenizer_document

_PIECES = (
    *(
        "▁",
        "▁▁",
        "Ġ",
        "Ċ",
        "<0x0A>",
        "<0x41>",
        "<0xFF>",
        "<unk>",
        "<s>",
        "</s>",
        "<|endoftext|>",
        "<|im_end|>",
        "[SEP]",
    ),
    *("\r\n", "\t", " ", "   ", "\n\n", "'s", "'LL", "123", "1234567", "a", "ab", "abc", "é", "e\u0301", "中国", "😀"),
    *(
        "\u00a0",
        "\u3000",
        "\u200b",
        "\ufeff",
        "##",
        "ﬁ",
        "٣",
        "½",
        "İ",
        "ß",
        "[SEP]",
        "ǅ",
        "\x00",
        "\x1c",
        "\x85",
        "\u2028",
    ),
)
_STEPS: tuple[Any, ...] = (
    {"type": "NFC"},
    {"type": "Lowercase"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Digits", "individual_digits": True},
    {"type": "WhitespaceSplit"},
    {"type": "BertPreTokenizer"},
    {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
)
_PUBLISHED = ("gpt-2", "phi-3", "llama-spm")
_LONG = 20_000


def corpus() -> list[bytes]:
    """Each kind of tokenizer.json, each kind of GGUF's keys, and each published vocabulary that is there."""
    from tests.models.checkpoint.test_encoder_vocabularies import unigram_document, word_piece_document
    from tests.models.text.unigram_vocabularies import unigram_metadata
    from tests.models.text.vocabularies import bert_metadata, bpe_metadata, spm_metadata

    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    documents = (tokenizer_document(), byte_level_document(), word_piece_document(), unigram_document())
    texts = ["hello ab abc\n", " a  b\n\n c ", "".join(_PIECES), "ab" * 40]
    inputs: list[dict[str, Any]] = []
    for document in documents:
        rows = max(VOCAB, len(document["model"]["vocab"]) + 4)
        files = {"tokenizer.json": document, "tokenizer_config.json": settings}
        inputs.append({"files": files, "config": {"eos_token_id": 2}, "rows": rows, "texts": texts})
    rules = [
        {**copy.deepcopy(documents[1]), "pre_tokenizer": _splitting(name)} for name in ("llama3", "qwen2", "gpt-4o")
    ]
    inputs += [{"files": {"tokenizer.json": one}, "config": {}, "rows": 260, "texts": texts} for one in rules]
    for metadata in (spm_metadata(), bpe_metadata(), bert_metadata(), unigram_metadata()):
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
        inputs.append({"metadata": plain, "texts": texts})
    inputs += [{"vocabulary": name, "texts": texts} for name in _PUBLISHED]
    return [written(one) for one in inputs]


def byte_level_document() -> dict[str, Any]:
    """A tokenizer.json of byte-level BPE."""
    vocab = {character: index for index, character in enumerate(BYTE_CHARACTERS)} | {"ab": 256, "abc": 257}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "added_tokens": [added_token(258, "<|endoftext|>", True), added_token(259, "<tool>", False)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "model": {**model, "vocab": vocab, "merges": ["a b", "ab c"]},
    }


def _splitting(name: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in PRE_TOKENIZERS[name].steps
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": steps}


def mutate(random: Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Change texts, documents or metadata; now and then the characters of a file."""
    document = read(data)
    if not isinstance(document, dict):
        return random.choice(corpus)
    if "raw" in document:
        document["raw"] = changed_text(random, str(document["raw"]), ("{", "}", "[", '"', "\\u", "null", "1e999"))
        return written(document)
    other = read(random.choice(corpus))
    others = [value for key, value in other.items() if key != "texts"] if isinstance(other, dict) else []
    if random.random() < 0.5 or "vocabulary" in document:
        texts = document.get("texts")
        kept = [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
        document["texts"] = [*kept[-4:], _text(random, kept)]
    if random.random() < 0.02 and isinstance(document.get("files"), dict):
        made = json.dumps(document["files"].get("tokenizer.json"))
        return written({**document, "raw": changed_text(random, made)})
    if "vocabulary" not in document:
        part = next((document[key] for key in ("files", "metadata") if key in document), document)
        for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
            change(random, part, others, values=(*_STEPS, *VALUES), pieces=(*_PIECES, *sorted(CONTROL_TEXTS)[:20]))
        if random.random() < 0.05:
            document["rows"] = random.choice((0, 1, VOCAB, 260, 300, 5000))
    return written(document)


def _text(random: Random, texts: list[str]) -> str:
    kind = random.random()
    if kind < 0.4 and texts:
        return changed_text(random, random.choice(texts), _PIECES)
    if kind < 0.9:
        return "".join(
            random.choice((random.choice(_PIECES), any_text(random))) for _ in range(random.randrange(1, 30))
        )
    piece = random.choice((*_PIECES, any_text(random)))
    return piece * random.choice((3, 100, _LONG // len(piece)))


def run(data: bytes, folder: Path) -> str:
    """Read the tokenizer and give it the texts. Returns the outcome; raises what is a finding."""
    document = read(data)
    if not isinstance(document, dict):
        return "no input"
    texts = [text for text in document.get("texts", ()) or () if isinstance(text, str)][:8]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TokenizerWarning)
        if isinstance(document.get("vocabulary"), str):
            tokenizer, library = _published(document["vocabulary"])
            if tokenizer is None:
                return "no such vocabulary"
        else:
            try:
                tokenizer = Tokenizer.from_metadata(_metadata(document, folder))
            except LocalinferError as error:
                return refused(error)
            _use_whole_vocabulary(tokenizer)
            library = _library(document)
        outcomes = {_check_text(tokenizer, text, library) for text in texts}
    return f"{tokenizer.kind}: {', '.join(sorted(outcomes))}"


def _metadata(document: dict[str, Any], folder: Path) -> dict[str, object]:
    if "metadata" in document:
        metadata = document["metadata"]
        return dict(metadata) if isinstance(metadata, dict) else {}
    files = document.get("files")
    for name, value in (files if isinstance(files, dict) else {}).items():
        if name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json"):
            (folder / name).write_text(json.dumps(value), encoding="utf-8")
    if "raw" in document:
        (folder / "tokenizer.json").write_bytes(str(document["raw"]).encode("utf-8", "surrogatepass"))
    config, rows = document.get("config"), document.get("rows")
    opened = CheckpointFolder(folder, config if isinstance(config, dict) else {}, [], {})
    try:
        return read_tokenizer(opened, min(rows, 1 << 16) if type(rows) is int and rows > 0 else VOCAB)
    finally:
        for path in folder.glob("*.json"):
            path.unlink()


def _library(document: dict[str, Any]) -> Any:
    """The tokenizer of the library that defines tokenizer.json; None where it is not one, or does more than ours."""
    files = document.get("files")
    found = files.get("tokenizer.json") if isinstance(files, dict) and "raw" not in document else None
    if not isinstance(found, dict) or not _is_comparable(found, document.get("rows")):
        return None
    return _load_library(json.dumps({"version": "1.0", "decoder": None, **found}))


def _is_comparable(document: dict[str, Any], rows: object) -> bool:
    """Whether our tokenizer promises the library's ids for all texts: it has no row for tokens outside the embedding,
    and finds added tokens by llama.cpp's rules, which know no flags but one."""
    model = document.get("model")
    if isinstance(model, dict) and model.get("byte_fallback") and model != tokenizer_document()["model"]:
        # Scores say of merges what SentencePiece's converters write, and not any others.
        return False
    added = [token for token in document.get("added_tokens") or () if isinstance(token, dict)]
    if isinstance(model, dict) and model.get("type") == "Unigram":
        texts = [pair[0] for pair in model.get("vocab") or ()]
        if (
            model.get("unk_id") is None
            or model["unk_id"] >= len(texts)
            or texts[model["unk_id"]] not in [token.get("content") for token in added]
        ):
            # There the unknown token can be spelled, and here it is special.
            return False
    for token in added:
        if token.get("single_word") or token.get("lstrip") or token.get("rstrip") or token.get("normalized"):
            return False
        if not token.get("special") or not isinstance(rows, int) or token["id"] >= rows:
            return False
    return True


def _load_library(text: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    # The library's own faults are panics, which are no Exceptions.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        return None


@cache
def _published(name: str) -> tuple[Tokenizer | None, Any]:
    import pytest

    from tests.models.checkpoint.test_checkpoint_tokenizer import document_of
    from tests.models.text.vocabularies import REAL, real_tokenizer, vocabulary_file

    if name not in REAL:
        return None, None
    from tempfile import TemporaryDirectory

    from localinfer.quant.gguf.reader import read_gguf

    try:
        with TemporaryDirectory() as folder, read_gguf(vocabulary_file(name, Path(folder))) as file:
            document = document_of(file.metadata)
    except pytest.skip.Exception:
        return None, None
    # Phi-3 strips white space behind its markers, which this form of its tokenizer does not say.
    library = None if name == "phi-3" else _load_library(json.dumps({"version": "1.0", **document}))
    return real_tokenizer(name), library


def _use_whole_vocabulary(tokenizer: Tokenizer) -> None:
    spelled = tokenizer.vocabulary_bytes()
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(token_id) == spelled[token_id], f"two spellings of token {token_id}"
        tokenizer.is_special(token_id)
    assert len(tokenizer.fingerprint) == 64
    assert tokenizer.difference_from(tokenizer) is None
    assert tokenizer.ids_after is not None and tokenizer.ids_between is not None
    tokenizer.ids_containing("a")


def _check_text(tokenizer: Tokenizer, text: str, library: Any) -> str:
    try:
        plain = tokenizer.encode(text, add_special=False)
    except RequestError as error:
        assert any("\ud800" <= letter <= "\udfff" for letter in text), f"a text was refused: {error}"
        return "half"
    except TokenizerError as error:
        # Where the damaged place of a compiled normalization is, only a text that leads there shows.
        assert "precompiled_charsmap has" in str(error), f"a vocabulary is refused late: {error}"
        return "damaged"
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    for ids in (plain, parsed):
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids), "an id is out of range"
    closed = set(tokenizer.special_ids.values()) - {tokenizer.unknown_token_id}
    spelled = sorted(closed.intersection(plain))
    assert not spelled, f"plain text became the control tokens {spelled}"
    assert tokenizer.encode(text) == tokenizer.encode(text, max_tokens=1 << 30), "a limit changed the ids"
    _check_limits(tokenizer, text)
    cut = len(text) // 2
    parts = [(text[:cut], False), (text[cut:], False)]
    assert tokenizer.encode_segments(parts) == plain, "two segments are not their text"
    for ids in (plain, parsed):
        _check_decoding(tokenizer, ids)
    if _gives_texts_back(tokenizer) and not _takes_space_off(tokenizer, text):
        found = tokenizer.decode(plain)
        assert found == text, f"{text!r:.200} came back as {found!r:.200}"
    if library is None:
        return "used"
    wanted = _library_ids(library, text)
    if wanted is None or not _agrees_on(tokenizer, text, library):
        return "used"
    if tokenizer.kind == "spm" and tokenizer.unknown_token_id in parsed:
        # No vocabulary with bytes has it, and the library puts it behind bytes that follow it.
        return "used"
    assert parsed == wanted, f"the library gives {text!r:.200} the ids {wanted!r:.200}, not {parsed!r:.200}"
    return "compared"


def _check_limits(tokenizer: Tokenizer, text: str) -> None:
    """A limit refuses no text that keeps to it, and of those beyond only long ones, which callers need not look at."""
    whole = tokenizer.encode(text)
    assert tokenizer.encode(text, max_tokens=len(whole)) == whole, "a text that fits was refused"
    for limit in (0, 1, len(whole) // 2, len(whole) - 1):
        if not 0 <= limit < len(whole):
            continue
        try:
            found = tokenizer.encode(text, max_tokens=limit)
        except ContextLengthError as error:
            assert error.context_length == limit
        else:
            assert found == whole, "a limit changed the ids"


def _check_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip_special in (True, False):
        whole = tokenizer.decode(ids, skip_special=skip_special)
        whole.encode()
        decoder = StreamDecoder(tokenizer, skip_special=skip_special)
        parts = [*map(decoder.push, ids), decoder.flush()]
        assert "".join(parts) == whole, "the stream decoder and decode differ"
    stop = whole[len(whole) // 2 :][:3]
    if stop:
        matcher = StopMatcher([stop])
        shown = "".join(matcher.push(part)[0] for part in parts) + matcher.flush()
        assert shown == whole[: whole.index(stop)], "a stop text was passed on, or the text before it was not"


def _gives_texts_back(tokenizer: Tokenizer) -> bool:
    """Whether the kind and the vocabulary promise that decoding gives every text back: all bytes have tokens, and the
    mark of spaces, which would else be three bytes as it would be in a text."""
    vocabulary = tokenizer._vocabulary
    if vocabulary.strips_after_special or tokenizer.kind not in ("spm", "bpe"):
        return False
    types = vocabulary.types
    if tokenizer.kind == "bpe" and not tokenizer._encoder._rule.is_raw:  # type: ignore[attr-defined]
        is_plain = all(types[vocabulary.ids.get(letter, 0)] == TokenType.NORMAL for letter in BYTE_CHARACTERS)
        if not is_plain or not all(letter in vocabulary.ids for letter in BYTE_CHARACTERS):
            return False
    elif min(tokenizer._encoder._byte_ids, default=-1) < 0 or SPACE_MARK not in vocabulary.ids:
        return False
    # What is cut out of texts is spelled as it stands, except where a space would be read into it.
    cut_out = [vocabulary.tokens[index] for index in np.flatnonzero(types == TokenType.USER_DEFINED).tolist()]
    return not any(SPACE_MARK in token or token.startswith(" ") for token in cut_out)


def _library_ids(library: Any, text: str) -> list[int] | None:
    try:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        return None
    return ids


def _takes_space_off(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text's own first space is taken for the one that is put before a text without."""
    return text.startswith(" ") and tokenizer._vocabulary.flags.get("add_space_prefix_if_none", False)


def _agrees_on(tokenizer: Tokenizer, text: str, library: Any) -> bool:
    """Whether both read a text by the same rules: literal marks of spaces are bytes here, so that they come back; the
    longest of special tokens that overlap is taken first, not the leftmost; what ends a text is special, where the
    library knows added tokens only; and compiled normalizations change what their keys match, as in SentencePiece,
    where the library replaces the whole of a written character, marks behind the key included, by what its first key
    becomes."""
    if tokenizer.kind != "bpe" and SPACE_MARK in text:
        return False
    if tokenizer.kind == "unigram" and _has_mapped_marks(tokenizer, text):
        return False
    found = list(tokenizer.special_spellings.find(text))
    if not {spelling.token_id for spelling in found} <= {-1, *library.get_added_tokens_decoder()}:
        return False
    ends = [0, *(spelling.end for spelling in found)]
    return all(spelling.start >= max(ends[: index + 1]) for index, spelling in enumerate(found))


def _has_mapped_marks(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a compiled normalization changes a written character that is several of Unicode's."""
    charsmap = tokenizer._vocabulary.charsmap
    if charsmap is None:
        return False
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    characters = CharacterMap(charsmap)
    written = (part for part, _ in Split(Regex(r"\X"), "isolated").pre_tokenize_str(text))
    return any(characters.apply(part) != part for part in written if len(part) > 1)


def _prepare() -> None:
    for name in _PUBLISHED:
        _published(name)


TARGET = Target("tokenizer", corpus, mutate, run, Limits(memory_constant=256 << 20), _prepare, simpler)
