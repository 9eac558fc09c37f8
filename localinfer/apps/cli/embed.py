"""The `localinfer embed` and `localinfer rerank` commands: texts to vectors, and documents by relevance to a query."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import (
    COUNT,
    devices_option,
    flag,
    model_argument,
    option,
    options_group,
    threads_option,
)
from localinfer.apps.evaluate.texts import read_text
from localinfer.errors import ContextLengthError, RequestError
from localinfer.terminal import Progress, check_text, neutralise_controls, with_time_left

if TYPE_CHECKING:
    from localinfer.llm import LLM

TEXTS_AT_ONCE = 64
"""Texts between two looks at the progress line; batches are much smaller than that only for very short texts."""

_input_options = options_group(
    option("-f --file files", "FILE", "Read a text from each line of FILE; may be repeated.", multiple=True),
    flag("--truncate", "Cut texts that are longer than the context, which are refused otherwise."),
    flag("--no-normalize", "Print values as the model computes them."),
    option("-c --context-length", "N", "Maximum tokens of a text. Default: as trained.", type=COUNT),
    devices_option,
    threads_option,
)


@click.command("embed")
@model_argument("model")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@option(
    "--pooling",
    None,
    "Hidden states that a vector is made of; none: a vector of every token. Default: the model's own, or the mean.",
    type=click.Choice(["mean", "first", "cls", "last", "none"]),
)
@option("--dimensions", "N", "Keep the first N numbers, of models trained to be cut (Matryoshka).", type=COUNT)
@_input_options
@option("-o --output", "FILE", "Write FILE: a NumPy array, float32[texts, size], if its name ends in .npy.")
def embed_command(
    model: str,
    texts: tuple[str, ...],
    pooling: str | None,
    dimensions: int | None,
    files: tuple[str, ...],
    truncate: bool,
    no_normalize: bool,
    context_length: int | None,
    device: str,
    threads: int | None,
    output: str | None,
) -> None:
    """Turn texts into vectors (embeddings).

    Without TEXT and --file, each line of standard input is a text. Prints a line of JSON for each text, in order, with
    a vector of length 1 unless --no-normalize is given.
    """
    from localinfer.system.files import check_output

    wanted = read_texts(texts, files, "TEXT")
    is_array = output is not None and output.lower().endswith(".npy")
    if output is not None:
        check_output(output, inputs=(model, *files))
    if is_array and pooling == "none":
        raise RequestError("--pooling none gives as many vectors as a text has tokens, which are no array; write JSON")
    with (
        model_for_texts(model, device, context_length, threads) as (llm, progress),
        _written(output, is_array=is_array) as write,
    ):
        report = with_time_left(progress)
        ids = [_named(index, len(wanted), llm, text, truncate=truncate) for index, text in enumerate(wanted)]
        for start in range(0, len(ids), TEXTS_AT_ONCE):
            report("embedding texts", start, len(ids))
            part = ids[start : start + TEXTS_AT_ONCE]
            found = llm.embed_many(part, pooling=pooling, normalize=not no_normalize, dimensions=dimensions)
            for index, (tokens, vector) in enumerate(zip(part, found, strict=True), start):
                write(index, len(tokens), vector)


@click.command("rerank")
@model_argument("model")
@click.argument("query", metavar="QUERY")
@click.argument("documents", metavar="[DOCUMENT]...", nargs=-1)
@option("--top-n", "N", "Print the N best only.", type=COUNT)
@_input_options
@flag("--json as_json", "Print one JSON object.")
def rerank_command(
    model: str,
    query: str,
    documents: tuple[str, ...],
    top_n: int | None,
    files: tuple[str, ...],
    truncate: bool,
    no_normalize: bool,
    context_length: int | None,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Sort documents by their relevance to QUERY, as a reranker scores them.

    Without DOCUMENT and --file, each line of standard input is a document. Prints a line for each: its score, from 0 to
    1 unless --no-normalize is given, its index among those given, from 0, and its text.
    """
    check_text(query, "QUERY")
    wanted = read_texts(documents, files, "DOCUMENT")
    with model_for_texts(model, device, context_length, threads) as (llm, progress):
        report = with_time_left(progress)
        ranked = []
        for start in range(0, len(wanted), TEXTS_AT_ONCE):
            report("scoring documents", start, len(wanted))
            part = wanted[start : start + TEXTS_AT_ONCE]
            scored = llm.rerank(query, part, normalize=not no_normalize, truncate=truncate)
            ranked += [(start + one.index, one.score, one.num_tokens) for one in scored]
    ranked.sort(key=lambda one: (-one[1], one[0]))
    best = ranked[:top_n]
    if as_json:
        names = ("index", "score", "num_tokens")
        results = [dict(zip(names, one, strict=True)) | {"document": wanted[one[0]]} for one in best]
        click.echo(json.dumps({"model": model, "query": query, "results": results}, ensure_ascii=False))
        return
    for index, score, _ in best:
        text = neutralise_controls(wanted[index]) if sys.stdout.isatty() else wanted[index]
        click.echo(f"{score:.6f}\t{index}\t{text}")


def read_texts(arguments: Sequence[str], files: Sequence[str], what: str) -> list[str]:
    """Arguments, then the lines of files; lines of standard input where there are none of both."""
    found = [check_text(text, what) for text in arguments]
    for file in files:
        found += lines_of(read_text(file, option="--file: ", encoding="utf-8-sig"))
    if not arguments and not files:
        if sys.stdin.isatty():
            raise RequestError(f"there is no {what}; pass some, --file, or lines into standard input")
        found = lines_of(check_text(sys.stdin.read(), "standard input"))
    if not found:
        raise RequestError(f"there is no {what}: no line was read; pass at least one")
    return found


def lines_of(text: str) -> list[str]:
    """Lines as editors count them; an empty one is an empty text, so that results stay in step with a file's lines."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _named(index: int, count: int, llm: "LLM", text: str, *, truncate: bool) -> Any:
    """The token ids of a text; what is wrong with it names it."""
    try:
        return llm.embedding_ids([text], truncate=truncate)[0]
    except (RequestError, ContextLengthError) as error:
        if count == 1:
            raise
        raise RequestError(f"text {index + 1} of {count}: {error}") from None


@contextmanager
def model_for_texts(
    model: str, device: str, context_length: int | None, threads: int | None
) -> "Iterator[tuple[LLM, Progress]]":
    """The model with nothing but what texts need, and the progress line."""
    import localinfer

    with (
        Progress() as progress,
        localinfer.load(
            model,
            device=device,
            context_length=context_length,
            threads=threads,
            speculation=None,
            disk_cache=False,
            progress=progress,
        ) as llm,
    ):
        yield llm, progress


@contextmanager
def _written(output: str | None, *, is_array: bool) -> Iterator[Callable[[int, int, Any], None]]:
    """A function of each text's index, number of tokens and vector; files appear once they are whole."""
    import numpy as np

    from localinfer.system.files import OutputFile

    def line(index: int, num_tokens: int, vector: Any) -> str:
        record = {"index": index, "num_tokens": num_tokens, "embedding": _numbers(vector)}
        return json.dumps(record, separators=(",", ":"))

    if output is None:
        yield lambda *result: click.echo(line(*result))
        return
    if not is_array:
        with OutputFile(output) as file:
            yield lambda *result: file.write(f"{line(*result)}\n".encode())
        return
    rows: list[Any] = []

    def keep(index: int, num_tokens: int, vector: Any) -> None:
        if vector.ndim > 1:
            raise RequestError("this model gives as many vectors as a text has tokens, which are no array; write JSON")
        rows.append(vector)

    yield keep
    content = io.BytesIO()
    np.save(content, np.stack(rows), allow_pickle=False)
    with OutputFile(output) as file:
        file.write(content.getbuffer())


def _numbers(vector: Any) -> Any:
    """Lists of the shortest numbers that are these float32."""
    if vector.ndim == 2:
        return [_numbers(row) for row in vector]
    return [float(str(number)) for number in vector]
