"""Tokenizers of CLIP, whose words end in `</w>`, against the library that writes their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer as Library, decoders, models, normalizers, pre_tokenizers, processors

import localinfer
from localinfer.errors import TokenizerError
from localinfer.models.checkpoint.tokenizer_json import TokenizerJson
from localinfer.models.text.encoders import BYTE_CHARACTERS, CLIP_PATTERN
from localinfer.models.text.tokenizer import Tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = "a photo of the cat and the dog on a red mat , in 1999 : caf\u00e9 it's there !!".split()
TEXTS = [
    "",
    " ",
    "a photo of a cat",
    "A  Photo\tof\n\nthe CAT",
    "it's the dog's; they're 1999 cats!!! (and 3.14)",
    "Cafe\u0301 \u03a3\u0391\u03a3",
    "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}stanbul \N{LATIN CAPITAL LETTER SHARP S}",
    "\u65e5\u672c\u8a9e \N{DOG FACE}\N{CAT FACE} \N{NO-BREAK SPACE}x\u200by",
    "<|endoftext|> and <|startoftext|>",
    "word " * 3000,
]


def merges_of(words: list[str]) -> list[tuple[str, str]]:
    """Merges that make every word, each from its left to its right, the end of a word with its mark."""
    found: dict[tuple[str, str], None] = {}
    for word in words:
        encoded = [BYTE_CHARACTERS[byte] for byte in word.encode()]
        symbols = [*encoded[:-1], encoded[-1] + "</w>"]
        while len(symbols) > 1:
            found[symbols[0], symbols[1]] = None
            symbols[:2] = ["".join(symbols[:2])]
    return list(found)


def library(controls: str = "") -> Library:
    """A tokenizer as transformers makes CLIP's."""
    merges = merges_of(WORDS)
    ends = (f"{one}</w>" for one in BYTE_CHARACTERS)
    texts = [*BYTE_CHARACTERS, *ends, *("".join(pair) for pair in merges), START, END]
    vocabulary = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="</w>", unk_token=END)
    made = Library(model)
    steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    made.normalizer = normalizers.Sequence(steps)
    split = pre_tokenizers.Split(Regex(controls + CLIP_PATTERN), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    around = [(text, vocabulary[text]) for text in (END, START)]
    made.post_processor = processors.RobertaProcessing(*around, trim_offsets=False, add_prefix_space=False)
    return made


def ours(document: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a document, with the ends that its post-processor names."""
    size = len(document["model"]["vocab"])
    read = TokenizerJson(document, size)
    around = read.added_around()
    assert around == ([START], [END])
    roles = {"tokenizer.ggml.bos_token_id": read.ids[START], "tokenizer.ggml.eos_token_id": read.ids[END]}
    added = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    return Tokenizer.from_metadata({**read.metadata, **roles, **added})


@pytest.mark.parametrize("controls", ["", r"<\|startoftext\|>|<\|endoftext\|>|"])
def test_ids_are_the_librarys(controls: str) -> None:
    wanted = library(controls)
    tokenizer = ours(json.loads(wanted.to_str()))
    assert tokenizer.kind == "word_end"
    for text in TEXTS:
        assert tokenizer.encode(text) == wanted.encode(text).ids, text
    whole = "a photo of the cat"
    ids = tokenizer.encode(whole, add_special=False)
    assert len(ids) == 5 and tokenizer.decode(ids) == f"{whole} "


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        steps = document["normalizer"]["normalizers"]
        steps[:] = [step for step in steps if step["type"] != name]

    return change


def with_other_words(document: dict[str, Any]) -> None:
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"


def with_another_mark(document: dict[str, Any]) -> None:
    document["model"]["end_of_word_suffix"] = "<end>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("Lowercase"), "small letters"),
        (without("Replace"), "small letters"),
        (with_other_words, "CLIP's rules"),
        (with_another_mark, "end_of_word_suffix"),
    ],
)
def test_others_are_refused_by_what_they_do(change: Callable[[dict[str, Any]], None], words: str) -> None:
    document = json.loads(library().to_str())
    change(document)
    with pytest.raises(TokenizerError, match=words):
        TokenizerJson(document, len(document["model"]["vocab"]))


def test_texts_of_a_folder_become_the_librarys_vectors(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers and torch are not installed")
    torch = pytest.importorskip("torch")
    document = json.loads(library().to_str())
    vocabulary = document["model"]["vocab"]
    merges = [tuple(pair) for pair in document["model"]["merges"]]
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": vocabulary[START], "eos_token_id": vocabulary[END], "pad_token_id": vocabulary[END]}
    text = {**sizes, **ends, "vocab_size": len(vocabulary), "max_position_embeddings": 32}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    torch.manual_seed(1)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(tmp_path)
    with localinfer.load(tmp_path, kv_type="f32") as llm:
        for said in ("a photo of a cat", "The DOG's on a mat!"):
            ids = tokenizer(said, return_tensors="pt")
            with torch.no_grad():
                found = model.get_text_features(**ids)
            wanted = (found if hasattr(found, "norm") else found.pooler_output)[0]
            wanted = (wanted / wanted.norm()).numpy()
            assert np.abs(llm.embed(said) - wanted).max() < 1e-5, said
