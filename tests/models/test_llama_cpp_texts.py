"""Embeddings, scores and token ids of encoders, in llama.cpp. Needs llama-cpp-python."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import localinfer
from localinfer.models.text.tokenizer import Tokenizer
from tests.models.arch_models import build_text_model, skeletons, text_models, write_skeleton
from tests.models.text.unigram_vocabularies import REPLACED, compiled_map, random_texts, unigram_metadata
from tests.models.text.vocabularies import bert_metadata, gemma4_metadata

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
PEER_FILES = Path(__file__).parent.parent / "bench" / "peer_files.py"


def peer(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEER_FILES), *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("name", [name for name in text_models() if name != "qwen3-reranker"])
def test_llama_cpp_pools_texts_to_the_same_vectors(name: str, tmp_path: Path) -> None:
    model = build_text_model(tmp_path, name)
    skeleton = dict(skeletons()[name])
    vocabulary = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
    skeleton["kv"] = [
        [key, kind, element, "no_vocab" if key == "tokenizer.ggml.model" else value]
        for key, kind, element, value in skeleton["kv"]
        if key not in vocabulary
    ]
    bare, answer = tmp_path / "bare.gguf", tmp_path / "answer.npy"
    write_skeleton(skeleton, bare)
    token_ids = [*model.token_ids.tolist(), 3, 1, 4]
    found = peer("embedding", bare, " ".join(map(str, token_ids)), answer)
    if found.returncode:
        if "unknown model architecture" in found.stderr or "Failed to load model" in found.stderr:
            pytest.skip(f"this llama.cpp does not load {name}")
        pytest.fail(found.stderr[-2000:])
    theirs = np.load(answer).astype(np.float64)
    with localinfer.load(model.path, kv_type="f32", threads=1) as llm:
        if "scores" in model.answers:
            (ours,) = llm._embedder._pooler.pool([np.array(token_ids, np.int32)], llm._model.pooling)  # noqa: SLF001
            np.testing.assert_allclose(ours, theirs[: len(ours)], atol=1e-3)
        else:
            assert 1 - llm.embed(token_ids) @ theirs / np.linalg.norm(theirs) <= 1e-4


def write_vocabulary(metadata: dict[str, object], path: Path) -> None:
    """A file of nothing but a vocabulary."""
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    for key, value in metadata.items():
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            kind = gguf.GGUFValueType.UINT8
        elif isinstance(value, np.ndarray):
            kind = gguf.GGUFValueType.FLOAT32 if value.dtype.kind == "f" else gguf.GGUFValueType.INT32
        else:
            kind = gguf.GGUFValueType.STRING
        if isinstance(value, np.ndarray | list):
            writer.add_key_value(key, list(value), gguf.GGUFValueType.ARRAY, sub_type=kind)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


VOCABULARIES = {
    "unigram": lambda: unigram_metadata(precompiled_charsmap=compiled_map(REPLACED)),
    "unigram with ties": lambda: unigram_metadata(levels=3, seed=4, precompiled_charsmap=compiled_map(REPLACED)),
    "unigram without merged spaces": lambda: unigram_metadata(
        remove_extra_whitespaces=False, precompiled_charsmap=compiled_map(REPLACED)
    ),
    "wordpiece": bert_metadata,
    "gemma4": gemma4_metadata,
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpp_gives_texts_the_same_ids(name: str, tmp_path: Path) -> None:
    metadata = VOCABULARIES[name]()
    # Of marks that llama.cpp takes for accents, and BERT does not, there are none this far.
    texts = random_texts(400, seed=7, highest=0x24F)
    write_vocabulary(metadata, tmp_path / "vocabulary.gguf")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    found = peer("tokens", tmp_path / "vocabulary.gguf", tmp_path / "texts.json")
    assert not found.returncode, found.stderr[-2000:]
    tokenizer = Tokenizer.from_metadata(metadata)
    for text, theirs in zip(texts, json.loads(found.stdout), strict=True):
        if name == "gemma4" and "▁" in text:
            continue  # stays itself here, and becomes a space there
        ours = tokenizer.encode(text, add_special=False)
        assert ours == theirs, (ascii(text), [tokenizer.token_text(i) for i in ours], theirs)
