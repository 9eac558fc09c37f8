"""Bounds of the code's structure, which `python -m tests.project.figures` prints: they fall, and do not rise."""

from pathlib import Path
from shutil import copy

from localinfer.models import demo
from tests.bench import trace_token
from tests.project import figures

MOST_FILES, MOST_LINES = 556, 148_023
MOST_SPINE_FILES, MOST_SPINE_LINES = 55, 15_268
MOST_TOKEN_FILES, MOST_TOKEN_CALLS = 12, 38
"""On one thread; it takes two calls more to choose a number of threads, and two to wake others."""
MOST_SLIVERS, MOST_DOUBLED, MOST_EXPLAINED_ABOVE = 0, 0, 0
MOST_ROWS = 6
MOST_QUESTION_WORDS = 0


def test_the_spine_is_an_afternoon() -> None:
    files = figures.spine()
    assert len(files) > 20
    assert len(files) <= MOST_SPINE_FILES
    assert figures.num_lines(files) <= MOST_SPINE_LINES


def test_a_decoded_token_goes_a_short_way(tmp_path: Path) -> None:
    # A file that no test has loaded: its load makes every check, which spell the tokens.
    model = copy(Path(demo.__file__).parent / "demo-f16.gguf", tmp_path)
    tokens, _ = trace_token.trace(str(model), 32, num_threads=1)
    num_files, num_calls = trace_token.medians(tokens)
    assert 10 < num_files <= MOST_TOKEN_FILES, trace_token.listed(tokens)
    assert 30 < num_calls <= MOST_TOKEN_CALLS, trace_token.listed(tokens)


def test_files_are_few_and_full() -> None:
    files = list(figures.sources().values())
    assert len(files) <= MOST_FILES
    assert figures.num_lines(files) <= MOST_LINES
    assert len(figures.slivers()) <= MOST_SLIVERS, figures.slivers()


def test_a_name_stands_for_one_thing_and_a_fields_meaning_under_it() -> None:
    assert len(figures.doubled_names()) <= MOST_DOUBLED, figures.doubled_names()
    assert len(figures.explained_above()) <= MOST_EXPLAINED_ABOVE, figures.explained_above()


def test_the_import_contract_is_short() -> None:
    rows, _ = figures.contract_rows()
    assert rows <= MOST_ROWS


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    assert len(figures.question_words()) <= MOST_QUESTION_WORDS
