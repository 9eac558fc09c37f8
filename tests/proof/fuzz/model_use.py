"""What a user does with a model on disk: shows it, loads it, asks it for all that it can give, and quantizes it."""

import json
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.apps.show.describe import describe_file, render_json, render_text
from localinfer.errors import LocalinferError
from tests.proof.fuzz.target import refused

KV_BYTES = 16 << 20
KV_TYPES = ("f16", "f16", "f16", "f32", "q8_0", "q4_0")
TEXTS = ("ab hello <s> é", "", " \n\n  the cat", "<|im_start|>\0\U0001f600 中国")
QUANTIZED_EVERY = 8


def use_model(path: Path, data: bytes) -> str:
    """Use the model at a path in every way; returns what came of it. data: decides what is a matter of taste."""
    taste = zlib.crc32(data)
    done = [_outcome(_show, path)]
    kv_type = KV_TYPES[taste % len(KV_TYPES)]
    try:
        with localinfer.load(path, threads=1, device="cpu", kv_memory=KV_BYTES, kv_type=kv_type) as llm:
            done += ["loaded", *(_outcome(part, llm) for part in (_complete, _constrain, _text, _chat, _vectors))]
    except LocalinferError as error:
        # Whether it can be shown is no outcome of its own.
        return refused(error)
    if taste // len(KV_TYPES) % QUANTIZED_EVERY == 0:
        done.append(_outcome(_quantize, path))
    return " ".join(filter(None, done))


def _outcome(part: Callable[[Any], str], argument: Any) -> str:
    """What a part says, or how it was refused."""
    try:
        return part(argument)
    except LocalinferError as error:
        return f"{part.__name__.strip('_')} {refused(error).partition(chr(10))[0]}"


def _show(path: Path) -> str:
    """What `localinfer show` prints is fit for a terminal, and JSON is JSON."""
    description = describe_file(str(path), ops=True)
    json.loads(render_json(description, tensors=True))
    wrong = {letter for letter in render_text(description, tensors=True) if unicodedata.category(letter) == "Cc"}
    assert wrong <= {"\n"}, f"control characters are shown: {wrong}"
    return ""


def _complete(llm: localinfer.LLM) -> str:
    if "completion" not in llm.capabilities:
        return ""
    size = llm.vocab_size
    ids = [index % size for index in (0, 1, size - 1, 2, 5)]
    assert llm.logits(ids).shape == (len(ids), size)
    llm.complete(ids[:2], max_tokens=3, temperature=0)
    llm.complete(ids, max_tokens=3, temperature=1.0, seed=1)
    llm.score(ids)
    return "completes"


def _constrain(llm: localinfer.LLM) -> str:
    if "completion" not in llm.capabilities:
        return ""
    llm.complete([0], max_tokens=3, temperature=0, constraint=localinfer.Regex("[ab]+ ?"))
    return "constrains"


def _text(llm: localinfer.LLM) -> str:
    tokenizer = llm.tokenizer
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text, parse_special=True))
    tokenizer.decode(range(min(llm.vocab_size, len(tokenizer.vocabulary_bytes()))), skip_special=False)
    if "completion" in llm.capabilities:
        llm.complete(TEXTS[0], max_tokens=3, temperature=0, stop="b")
    return "text"


def _chat(llm: localinfer.LLM) -> str:
    if not llm.has_chat_template:
        return ""
    llm.chat([{"role": "user", "content": "hello"}], max_tokens=3, temperature=0)
    return "chat"


def _vectors(llm: localinfer.LLM) -> str:
    if llm.capabilities == ("rerank",):
        llm.rerank("hello", ["the cat", ""])
        return "ranks"
    assert llm.embed(np.arange(5) % llm.vocab_size).ndim == 1
    return "embeds"


def _quantize(path: Path) -> str:
    quantize(path, path.parent / "quantized.gguf", type="Q4_0", method="rtn", threads=1, device="cpu")
    return "quantized"
