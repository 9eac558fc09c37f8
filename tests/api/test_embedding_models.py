"""Encoders and rerankers through the API: texts, batches, lengths, and what they refuse."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.errors import ContextLengthError, LocalinferError, RequestError
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.llm import LLM
from localinfer.models.decoder.block_config import Pooling
from tests.api.encoder_models import CONTEXT, vocabulary_entries, write_encoder
from tests.api.test_wrong_kinds import WRONG, check
from tests.models.arch_models import build_text_model, skeletons, write_skeleton
from tests.models.text.vocabularies import bert_metadata
from tests.support.inside import engine_of, model_of

WORDS = "the cat hello world un re dog café naïve unable turning cats".split()


def texts_of(count: int, words: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, int(generator.integers(1, words)))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Iterator[LLM]:
    with localinfer.load(write_encoder(folder, "bert-encoder"), threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[LLM]:
    with localinfer.load(write_encoder(folder, "bert-reranker"), threads=1) as llm:
        yield llm


def test_vectors_of_a_batch_are_those_of_each_text_alone(bert: LLM, folder: Path) -> None:
    texts = [*texts_of(70, 30, 1), " ".join(texts_of(1, 800, 2)), *texts_of(9, 40, 3)]
    together = bert.embed_many(texts)
    assert [vector.shape for vector in together] == [(64,)] * len(texts)
    with localinfer.load(folder / "bert-encoder.gguf", threads=2) as other:
        again = other.embed_many(texts[::-1])[::-1]
    for text, one, two in zip(texts, together, again, strict=True):
        np.testing.assert_array_equal(bert.embed(text).view(np.uint32), one.view(np.uint32))
        np.testing.assert_array_equal(two.view(np.uint32), one.view(np.uint32))
        assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert bert.embed_many([]) == []


def test_texts_are_read_between_the_tokens_around_them(bert: LLM) -> None:
    tokenizer = bert.tokenizer
    ids = tokenizer.encode("the cats")
    assert [tokenizer.token_text(i) for i in ids] == ["[CLS]", "▁the", "▁cat", "s", "[SEP]"]
    np.testing.assert_array_equal(bert.embed("the cats"), bert.embed(ids))
    (counted,) = bert.embedding_ids(["the cats"])
    assert counted.tolist() == ids


def test_vectors_can_be_cut_pooled_otherwise_and_left_as_they_are(bert: LLM) -> None:
    text = "hello world the café"
    whole, plain = bert.embed(text), bert.embed(text, normalize=False)
    np.testing.assert_allclose(plain / np.linalg.norm(plain), whole, atol=1e-6)
    short = bert.embed(text, dimensions=8)
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    tokens = bert.embed(text, pooling="none", normalize=False)
    assert tokens.shape == (len(bert.tokenizer.encode(text)), 64)
    np.testing.assert_array_equal(tokens[0], bert.embed(text, pooling="cls", normalize=False))
    np.testing.assert_array_equal(tokens[-1], bert.embed(text, pooling="last", normalize=False))
    mean = bert.embed(text, pooling="mean", normalize=False)
    np.testing.assert_allclose(mean, tokens.mean(axis=0), atol=1e-5)
    with pytest.raises(RequestError, match="dimensions is 65; .* from 1 to 64"):
        bert.embed(text, dimensions=65)
    with pytest.raises(RequestError, match="pooling is 'max'; give none, mean"):
        bert.embed(text, pooling="max")


def test_texts_beyond_the_context_are_refused_or_cut_on_request(bert: LLM) -> None:
    text = "the cat " * CONTEXT
    with pytest.raises(ContextLengthError, match="or allow truncate|context"):
        bert.embed(text)
    (ids,) = bert.embedding_ids([text], truncate=True)
    assert len(ids) == CONTEXT
    assert [bert.tokenizer.token_text(int(i)) for i in ids[[0, 1, -1]]] == ["[CLS]", "▁the", "[SEP]"]
    np.testing.assert_array_equal(bert.embed(text, truncate=True), bert.embed(ids))
    np.testing.assert_array_equal(bert.embed([5] * 3000, truncate=True), bert.embed([5] * CONTEXT))
    with pytest.raises(ContextLengthError, match="has 3000 tokens, but the context holds 2048"):
        bert.embed([5] * 3000)


def test_encoders_generate_nothing(bert: LLM, folder: Path) -> None:
    calls: list[Any] = [
        lambda: bert.complete("the"),
        lambda: bert.chat([{"role": "user", "content": "the"}]),
        lambda: bert.logits([1, 2]),
        lambda: bert.score([1, 2]),
        lambda: bert.beam_search([1, 2], num_beams=2),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=r"encoder \(bert\): it embeds or ranks texts and generates none"):
            call()
    assert bert.capabilities == ("embeddings",)
    path = folder / "bert-encoder.gguf"
    with pytest.raises(RequestError, match="kv_window"):
        localinfer.load(path, kv_window=64)
    with pytest.raises(RequestError, match="leave out speculation"):
        localinfer.load(path, speculation="ngram")
    with localinfer.load(path, device="auto", speculation="auto", disk_cache=True, threads=1) as llm:
        assert llm.embed("the").shape == (64,)


def test_decoders_embed_batches_as_single_texts() -> None:
    texts = ["A cat sat.", "The dog ran. " * 170, "x", *["Once upon a time. " * count for count in range(1, 40, 5)]]
    with localinfer.load(threads=2) as llm:
        assert llm.capabilities == ("completion", "chat", "embeddings")
        assert max(map(len, llm.embedding_ids(texts))) > 512
        for pooling in (None, "last", "first"):
            together = llm.embed_many(texts, pooling=pooling)
            for text, vector in zip(texts, together, strict=True):
                alone = llm.embed(text, pooling=pooling)
                np.testing.assert_array_equal(alone.view(np.uint32), vector.view(np.uint32))
        tokens = llm.embed(texts[1], pooling="none", normalize=False)
        mean = tokens.mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(llm.embed(texts[1]), mean / np.linalg.norm(mean), atol=1e-6)
        with pytest.raises(RequestError, match="no reranker"):
            llm.rerank("a", ["b"])


@pytest.mark.parametrize("name", ["qwen35-mtp", "nemotron_h_moe-mtp"])
def test_recurrent_models_embed_beside_their_draft_layers(name: str, folder: Path) -> None:
    """Their states have more in them once those layers are loaded: the text's graph was refused by an assertion."""
    path = folder / f"{name}.gguf"
    write_skeleton(skeletons()[name], path)
    token_ids = np.arange(40)
    with localinfer.load(path, threads=1) as drafting, localinfer.load(path, threads=1, speculation=None) as plain:
        for pooling in ("mean", "last", "none"):
            np.testing.assert_array_equal(
                drafting.embed(token_ids, pooling=pooling), plain.embed(token_ids, pooling=pooling)
            )


def test_documents_come_by_falling_relevance(reranker: LLM) -> None:
    documents = [*texts_of(20, 12, 5), "the cat", "the cat"]
    ranked = reranker.rerank("the cat", documents)
    assert sorted(one.index for one in ranked) == list(range(len(documents)))
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    places = [one.index for one in ranked if one.index >= 20]
    assert places == [20, 21]
    assert reranker.rerank("the cat", documents, top_n=3) == ranked[:3]
    assert reranker.rerank("the cat", []) == []
    plain = {one.index: one.score for one in reranker.rerank("the cat", documents, normalize=False)}
    for one in ranked:
        assert one.score == pytest.approx(1 / (1 + math.exp(-plain[one.index])))
        assert 0 < one.score < 1
    pair = [reranker.tokenizer.token_text(i) for i in reranker.tokenizer.encode("the cat")]
    assert ranked[0].num_tokens >= len(pair) + 2
    assert reranker.capabilities == ("rerank",)
    with pytest.raises(RequestError, match="gives scores and no vectors"):
        reranker.embed("the cat")
    with pytest.raises(ContextLengthError, match="context holds 2048"):
        reranker.rerank("the cat", ["dog " * 3000])
    (cut,) = reranker.rerank("the cat", ["dog " * 3000], truncate=True)
    assert cut.num_tokens == CONTEXT


@pytest.mark.parametrize("name", ["query", "documents", "top_n", "normalize", "truncate"])
def test_rerank_refuses_what_it_cannot_use_by_its_name(reranker: LLM, name: str) -> None:
    def rerank(value: Any) -> None:
        reranker.rerank(**{"query": "the", "documents": ["a"], name: value})

    is_text = name in ("query", "documents")
    halves = [kind for kind in WRONG if is_text and "half" in kind]
    check(rerank, name, [kind for kind in WRONG if kind not in halves])
    check(rerank, "text", halves)


def test_pairs_are_joined_as_the_vocabulary_says(folder: Path) -> None:
    with localinfer.load(write_encoder(folder, "bert-reranker", unigram=True), threads=1) as llm:
        ids, num_first = llm._embedder._pair("hello", "the cat", truncate=False)
        assert num_first == len(ids), "RoBERTa's have one type"
        found = [llm.tokenizer.token_text(i) for i in ids]
        assert found == ["<s>", "▁hello", "</s>", "</s>", "▁the", "▁cat", "</s>"]
    with localinfer.load(folder / "bert-reranker.gguf", threads=1) as llm:
        ids, num_first = llm._embedder._pair("hello", "the cat", truncate=False)
        found = [llm.tokenizer.token_text(i) for i in ids]
        assert found == ["[CLS]", "▁hello", "[SEP]", "▁the", "▁cat", "[SEP]"]
        assert num_first == 3


def test_the_second_text_of_a_pair_is_of_the_second_type(folder: Path) -> None:
    """Cross-encoders of BERT's kind ranked wrongly: both of their texts had the type of the first."""
    documents = texts_of(30, 12, 5)
    with localinfer.load(write_encoder(folder, "bert-reranker"), threads=1) as llm:
        pairs = [llm._embedder._pair("the cat", text, truncate=False) for text in documents]
        pooler = TextPooler(engine_of(llm), model_of(llm))
        typed = [PooledText(np.array(ids, np.int32), num_first=first) for ids, first in pairs]
        wanted = [float(scores[0]) for scores in pooler.pool(typed, Pooling.RANK)]
        plain = [PooledText(one.token_ids) for one in typed]
        untyped = [float(scores[0]) for scores in pooler.pool(plain, Pooling.RANK)]
        found = {one.index: one.score for one in llm.rerank("the cat", documents, normalize=False)}
        assert [found[index] for index in range(len(documents))] == wanted != untyped
        # One by one they are the same: types go with their text, whatever shares the batch.
        for one, score in zip(typed, wanted, strict=True):
            assert float(pooler.pool([one], Pooling.RANK)[0][0]) == score


def test_files_that_declare_one_type_have_one(folder: Path) -> None:
    path = write_encoder(folder, "bert-reranker")
    with localinfer.load(path, threads=1, overrides={"tokenizer.ggml.token_type_count": 1}) as llm:
        ids, num_first = llm._embedder._pair("hello", "the cat", truncate=False)
        assert num_first == len(ids)


TEMPLATE = "[CLS]the {query} [SEP] {document} turn[SEP]"


def write_decoder_reranker(folder: Path, template: str | None) -> Path:
    skeleton = dict(skeletons()["qwen3-reranker"])
    entries = vocabulary_entries(bert_metadata(), 128)
    more = [] if template is None else [["tokenizer.chat_template.rerank", "STRING", None, template]]
    kept = [entry for entry in skeleton["kv"] if not entry[0].startswith("tokenizer.")]
    skeleton["kv"] = [*kept, *entries, *more]
    path = folder / f"qwen3-{template is None}.gguf"
    write_skeleton(skeleton, path)
    return path


def test_decoders_rank_by_the_prompt_in_their_file(folder: Path) -> None:
    with localinfer.load(write_decoder_reranker(folder, TEMPLATE), threads=1, kv_type="f32") as llm:
        ids, num_first = llm._embedder._pair("cat", "dog [SEP] re", truncate=False)
        assert num_first == len(ids), "a prompt is one text"
        found = [llm.tokenizer.token_text(i) for i in ids]
        # Only the template may spell control tokens.
        assert found[:3] == ["[CLS]", "▁the", "▁cat"]
        assert found.count("[SEP]") == 2
        assert found[-2:] == ["▁turn", "[SEP]"] or found[-3:-1] == ["▁t", "urn"] or found[-1] == "[SEP]"
        documents = texts_of(12, 30, 8)
        ranked = llm.rerank("cat", documents)
        assert {one.index for one in ranked} == set(range(12))
        single = [llm.rerank("cat", [text])[0].score for text in documents]
        assert [one.score for one in ranked] == [single[one.index] for one in ranked]
        (cut,) = llm.rerank("cat", ["dog " * 400], truncate=True)
        assert cut.num_tokens <= llm.context_length
        assert llm.capabilities == ("completion", "chat", "rerank")
        assert model_of(llm).pooling is Pooling.RANK
    with (
        localinfer.load(write_decoder_reranker(folder, None), threads=1) as llm,
        pytest.raises(RequestError, match=r"tokenizer\.chat_template\.rerank"),
    ):
        llm.rerank("cat", ["dog"])


def test_scores_of_the_fixture_are_the_reference_runtimes(folder: Path) -> None:
    model = build_text_model(folder, "qwen3-reranker")
    with localinfer.load(model.path, threads=1, kv_type="f32") as llm:
        (outputs,) = llm._embedder._pooler.pool([PooledText(model.token_ids)], Pooling.RANK)
        score = llm._embedder._score(outputs, normalize=True)
        assert score == pytest.approx(float(model.answers["scores"][0]), abs=1e-5)


@pytest.mark.parametrize("name", ["gemma-embedding-encoder", "qwen3-reranker"])
def test_dense_matrices_follow_the_pooling(name: str, folder: Path) -> None:
    skeleton = dict(skeletons()[name])
    skeleton["tensors"] = [*skeleton["tensors"], ["dense_2.weight", [96, 64]], ["dense_3.weight", [48, 96]]]
    path = folder / f"{name}-dense.gguf"
    write_skeleton(skeleton, path)
    texts = [[5, 6, 7], np.arange(5, 90).tolist() * 8, [9]]
    with localinfer.load(path, threads=1, kv_type="f32", context_length=1024) as llm:
        values = [model_of(llm).file.tensor_bytes(f"dense_{i}.weight").view(np.float32) for i in (2, 3)]
        for pooling in ("mean", "first", "last"):
            found = llm.embed_many(texts, normalize=False, pooling=pooling)
            for text, vector in zip(texts, found, strict=True):
                np.testing.assert_array_equal(llm.embed(text, normalize=False, pooling=pooling), vector)
                tokens = llm.embed(text, normalize=False, pooling="none")
                pooled = tokens.mean(axis=0) if pooling == "mean" else tokens[0 if pooling == "first" else -1]
                wanted = values[1].reshape(48, 96) @ (values[0].reshape(96, 64) @ pooled)
                np.testing.assert_allclose(vector, wanted, rtol=1e-4, atol=2e-5)


def test_encoders_are_quantized_without_calibration_only(folder: Path, tmp_path: Path) -> None:
    path = folder / "bert-encoder.gguf"
    quantize(path, tmp_path / "small.gguf", type="Q8_0", threads=1)
    with localinfer.load(tmp_path / "small.gguf", threads=1) as small, localinfer.load(path, threads=1) as whole:
        assert small.embed("the cat") @ whole.embed("the cat") > 0.99
    with pytest.raises(LocalinferError, match="is an encoder"):
        quantize(path, tmp_path / "gptq.gguf", type="Q4_0", method="gptq", calibration_tokens=64, threads=1)
