"""`localinfer embed` and `localinfer rerank`: what they read, print, write and refuse."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.models import demo
from tests.api.encoder_models import write_encoder

DEMO = str(Path(demo.__file__).parent / "demo-f16.gguf")
TEXTS = ["the cat", "hello world", "", "café re-un"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_encoder(tmp_path_factory.mktemp("models"), "bert-encoder", context=64))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_encoder(tmp_path_factory.mktemp("models"), "bert-reranker", context=64))


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_each_text_is_a_line_of_json_with_the_librarys_vector(bert, capsys):
    lines = output_of(capsys, "embed", bert, *TEXTS, "--threads", "1").splitlines()
    with localinfer.load(bert, threads=1) as llm:
        vectors, ids = llm.embed_many(TEXTS), llm.embedding_ids(TEXTS)
    for index, line in enumerate(lines):
        record = json.loads(line)
        assert list(record) == ["index", "num_tokens", "embedding"]
        assert (record["index"], record["num_tokens"]) == (index, len(ids[index]))
        np.testing.assert_array_equal(np.array(record["embedding"], np.float32), vectors[index])
    assert len(lines) == len(TEXTS)


def test_lines_of_standard_input_and_of_files_are_texts(bert, capsys, tmp_path, monkeypatch):
    wanted = output_of(capsys, "embed", bert, *TEXTS)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS) + "\n"))
    assert output_of(capsys, "embed", bert) == wanted
    (tmp_path / "a.txt").write_bytes("\ufeffhello world\r\n\r\n".encode())
    (tmp_path / "b.txt").write_text("café re-un", encoding="utf-8")
    files = ["-f", str(tmp_path / "a.txt"), "--file", str(tmp_path / "b.txt")]
    assert output_of(capsys, "embed", bert, TEXTS[0], *files) == wanted


def test_options_are_those_of_the_library(bert, capsys):
    with localinfer.load(bert, threads=1) as llm:
        short = llm.embed("the cat", pooling="first", normalize=False, dimensions=5)
        tokens = llm.embed("the cat", pooling="none")
        cut = llm.embed("the " * 100, truncate=True)
    words = ["--pooling", "cls", "--no-normalize", "--dimensions", "5"]
    for options, text, vector in (
        (words, "the cat", short),
        (["--pooling", "none"], "the cat", tokens),
        (["--truncate"], "the " * 100, cut),
    ):
        found = json.loads(output_of(capsys, "embed", bert, text, *options))["embedding"]
        np.testing.assert_array_equal(np.array(found, np.float32), vector)
    first = json.loads(output_of(capsys, "embed", bert, "the " * 100, "--truncate", "--context-length", "8"))
    assert first["num_tokens"] == 8


def test_an_array_of_numpy_is_written(bert, capsys, tmp_path):
    lines = output_of(capsys, "embed", bert, *TEXTS)
    array, file = tmp_path / "vectors.npy", tmp_path / "vectors.jsonl"
    assert output_of(capsys, "embed", bert, *TEXTS, "-o", str(array)) == ""
    assert output_of(capsys, "embed", bert, *TEXTS, "--output", str(file)) == ""
    assert file.read_text() == lines
    found = np.load(array)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([json.loads(line)["embedding"] for line in lines.splitlines()], "f4"))


def test_what_cannot_be_embedded_is_named_before_anything_is_printed(bert, ranker, capsys, tmp_path, monkeypatch):
    assert "text 2 of 2: a text has" in error_of(capsys, "embed", bert, "the cat", "the " * 100)
    assert "a text has" in error_of(capsys, "embed", bert, "the " * 100)
    assert "is a reranker" in error_of(capsys, "embed", ranker, "the cat")
    assert "no-such-file cannot be read" in error_of(capsys, "embed", bert, "-f", "no-such-file")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "is not UTF-8" in error_of(capsys, "embed", bert, "-f", str(tmp_path / "latin"))
    array = tmp_path / "x.npy"
    assert "--pooling none" in error_of(capsys, "embed", bert, "a", "--pooling", "none", "-o", str(array))
    assert not array.exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "no TEXT" in error_of(capsys, "embed", bert)
    assert "dimensions" in error_of(capsys, "embed", bert, "a", "--dimensions", "65")


def test_documents_are_printed_by_falling_relevance(ranker, capsys, monkeypatch):
    with localinfer.load(ranker, threads=1) as llm:
        wanted = llm.rerank("the cat", TEXTS)
        plain = llm.rerank("the cat", TEXTS, normalize=False)
    lines = output_of(capsys, "rerank", ranker, "the cat", *TEXTS)
    assert lines.splitlines() == [f"{one.score:.6f}\t{one.index}\t{TEXTS[one.index]}" for one in wanted]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert output_of(capsys, "rerank", ranker, "the cat") == lines
    found = json.loads(output_of(capsys, "rerank", ranker, "the cat", *TEXTS, "--json", "--top-n", "2"))
    assert (found["query"], found["model"]) == ("the cat", ranker)
    assert found["results"] == [
        {"index": one.index, "score": one.score, "num_tokens": one.num_tokens, "document": TEXTS[one.index]}
        for one in wanted[:2]
    ]
    first = output_of(capsys, "rerank", ranker, "the cat", *TEXTS, "--no-normalize").split("\t")[0]
    assert first == f"{plain[0].score:.6f}"


def test_many_documents_are_one_ranking(ranker, capsys):
    documents = [f"the cat {'un re ' * (index % 7)}" for index in range(150)]
    with localinfer.load(ranker, threads=1) as llm:
        wanted = [one.index for one in llm.rerank("hello", documents)]
    found = output_of(capsys, "rerank", ranker, "hello", *documents).splitlines()
    assert [int(line.split("\t")[1]) for line in found] == wanted


def test_models_that_do_not_rank_say_so(bert, ranker, capsys):
    assert "no reranker" in error_of(capsys, "rerank", bert, "the cat", "a")
    assert "a text has" in error_of(capsys, "rerank", ranker, "the cat", "the " * 100)
