"""Matchers through llguidance's C interface: they are those of its Python classes, without the stall."""

import ctypes
import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.errors import ClosedError, ConstraintError, RequestError
from localinfer.generation.chat import vocabulary_trie
from localinfer.generation.chat.constraints import ConstraintCompiler, grammar_of
from localinfer.generation.chat.grammar_mask import GrammarMatcher
from localinfer.generation.chat.vocabulary_trie import (
    ClassTrie,
    ForeignTrie,
    MatcherInit,
    MatcherLibrary,
    build_trie,
    matcher_library,
)
from localinfer.generation.options import Constraint, Grammar, JsonObject, JsonSchema, Regex
from localinfer.llm import LLM
from tests.engine.fakes import ByteTokenizer, fake_model
from tests.models.text.vocabularies import real_tokenizer
from tests.support.limits import seconds

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "size": {"type": "integer"},
        "of": {"enum": ["é", None]},
    },
    "required": ["name", "size", "of"],
    "additionalProperties": False,
}
CONSTRAINTS: list[Constraint] = [
    JsonObject(),
    JsonSchema(SCHEMA),
    Regex(r"once (upon|under) a [a-z]{3,12}, (😀|é)+ \d{3}\."),
    Grammar('root ::= "<" [b-d]{1,9} ">"'),
    Grammar('start: "x" DIGITS (";" DIGITS)~2\nDIGITS: /[0-9]{1,3}/'),
]
COSTLY = "start: A\nA: /(.*a.{200})/ & /(.*b.{200})/ & ~/.*c.{100}/"


class TwoEnds(ByteTokenizer):
    """A vocabulary with two tokens that end a text."""

    eog_token_ids = frozenset({257, 259})

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


@pytest.fixture(scope="module")
def library() -> MatcherLibrary:
    found = matcher_library()
    assert found is not None, "this llguidance has the interface"
    return found


@pytest.fixture(scope="module")
def tries(library: MatcherLibrary) -> tuple[ForeignTrie, ClassTrie]:
    tokenizer = real_tokenizer("gpt-2")
    return ForeignTrie(tokenizer, library), ClassTrie(tokenizer)


def unpacked(mask: NDArray[np.uint8], vocab_size: int) -> NDArray[np.uint8]:
    return np.unpackbits(mask, count=vocab_size, bitorder="little")


def walk_both(foreign: GrammarMatcher, known: GrammarMatcher, vocab_size: int, steps: int) -> int:
    """Follow the same random text with both, comparing every answer; return how many tokens it had."""
    chance = np.random.default_rng(5)
    length = 0
    for _ in range(steps):
        mask = foreign.mask().copy()
        assert np.array_equal(unpacked(mask, vocab_size), unpacked(known.mask(), vocab_size))
        assert foreign.forced() == known.forced()
        allowed = np.flatnonzero(unpacked(mask, vocab_size))
        draft = [int(token_id) for token_id in chance.choice(allowed, 4)]
        assert foreign.count_allowed(draft) == known.count_allowed(draft)
        # A token that may not come is not followed.
        tokens = [draft[0], int(chance.integers(vocab_size))]
        length += (count := foreign.consume(tokens))
        assert known.consume(tokens) == count
        if length > 2 and chance.random() < 0.2:
            foreign.rollback(2)
            known.rollback(2)
            length -= 2
        assert foreign.error() is None and known.error() is None
        if chance.random() < 0.2:
            foreign, known = foreign.copy(), known.copy()
    return length


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: type(constraint).__name__)
def test_every_answer_is_that_of_the_classes(tries: tuple[ForeignTrie, ClassTrie], constraint: Constraint) -> None:
    foreign, known = tries
    grammar = grammar_of(constraint)
    vocab_size = real_tokenizer("gpt-2").vocab_size
    assert walk_both(foreign.matcher(grammar), known.matcher(grammar), vocab_size, 40) > 3


@pytest.mark.parametrize("grammar", ['start: "a" <[258]> /b+/', "start: <[257]> | /[ab]*/"])
def test_control_tokens_and_ends(library: MatcherLibrary, grammar: str) -> None:
    tokenizer: Any = TwoEnds()
    foreign, known = ForeignTrie(tokenizer, library).matcher(grammar), ClassTrie(tokenizer).matcher(grammar)
    assert walk_both(foreign, known, 260, 12) > 0


WRONG = ["start: nothing", "", "{", '{"grammars": 1}', "start: /(a/", 'start: "a\0" /\0+/', COSTLY]


@pytest.mark.parametrize("grammar", WRONG)
def test_errors_are_those_of_the_classes(tries: tuple[ForeignTrie, ClassTrie], grammar: str) -> None:
    foreign, known = (trie.matcher(grammar) for trie in tries)
    for matcher in (foreign, known):
        if matcher.error() is None:
            matcher.mask()
    assert known.error() is not None
    assert (foreign.error() or "").replace("\\0", "\0") == known.error()
    assert foreign.copy().error() == foreign.error()
    assert foreign.consume([5]) == 0 and foreign.count_allowed([5]) == 0


def test_other_threads_run_while_a_trie_is_built(library: MatcherLibrary) -> None:
    count, during = [0], []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            count[0] += 1

    def build(*arguments: Any) -> Any:
        before = count[0]
        pointer = library.new_tokenizer_v2(*arguments)
        during.append(count[0] - before)
        return pointer

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ForeignTrie(real_tokenizer("gpt-2"), replace(library, new_tokenizer_v2=build))
    finally:
        is_over.set()
        thread.join(seconds(10))
    # The build takes hundreds of milliseconds; the thread might once come in before or after the call.
    assert during[0] > 1000


def test_a_trie_is_built_once_by_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(
        vocabulary_trie, "build_trie", lambda tokenizer: built.append(build_trie(tokenizer)) or built[-1]
    )
    compiler = ConstraintCompiler(TwoEnds(), 260)  # type: ignore[arg-type]
    threads = [threading.Thread(target=compiler.prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    mask = compiler.mask(Regex("ab"), start=0)
    for thread in threads:
        thread.join(seconds(10))
    assert mask(np.empty(0, np.int32))[97] and len(built) == 1


def test_an_unknown_interface_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_function(path: str) -> ctypes.CDLL:
        raise AttributeError("undefined symbol: llg_new_tokenizer_v2")

    matcher_library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_function)
    try:
        trie = build_trie(TwoEnds())  # type: ignore[arg-type]
        assert isinstance(trie, ClassTrie) and trie.matcher("start: /a/").consume([97]) == 1
    finally:
        matcher_library.cache_clear()
    assert "undefined symbol" in caplog.text


def test_another_layout_is_recognized(library: MatcherLibrary) -> None:
    from localinfer.generation.chat.vocabulary_trie import has_known_layout

    def other_layout(init: Any, tokenizer: int) -> None:
        library.constraint_init_set_defaults(init, tokenizer)
        at = MatcherInit.limits.offset
        ctypes.memmove(ctypes.addressof(init._obj) + at + 8, ctypes.addressof(init._obj) + at, 48)

    assert has_known_layout(library)
    assert not has_known_layout(replace(library, constraint_init_set_defaults=other_layout))


def test_an_interruption_while_a_text_is_encoded_reaches_the_caller(library: MatcherLibrary) -> None:
    class Interrupted(TwoEnds):
        def encode_segments(self, *_: Any, **__: Any) -> list[int]:
            raise KeyboardInterrupt

    matcher = ForeignTrie(Interrupted(), library).matcher('start: "once upon"')  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        matcher.forced()
    assert matcher.consume(list(b"once")) == 4


def test_memory_goes_when_the_last_matcher_does(library: MatcherLibrary) -> None:
    freed: list[str] = []
    watched = replace(
        library,
        free_tokenizer=lambda pointer: freed.append("trie") or library.free_tokenizer(pointer),
        free_matcher=lambda pointer: freed.append("matcher") or library.free_matcher(pointer),
    )
    gc.disable()
    try:
        trie = ForeignTrie(TwoEnds(), watched)  # type: ignore[arg-type]
        matcher = trie.matcher("start: /a+/")
        other = matcher.copy()
        gone = weakref.ref(trie)
        del trie, matcher
        assert freed == ["matcher"] and gone() is not None and other.consume([97]) == 1
        del other
        assert freed == ["matcher", "matcher", "trie"] and gone() is None
    finally:
        gc.enable()


def test_a_vocabulary_without_an_end_is_refused() -> None:
    class Endless(TwoEnds):
        eog_token_ids: frozenset[int] = frozenset()

    with pytest.raises(ConstraintError, match="no token that ends a text"):
        build_trie(Endless())  # type: ignore[arg-type]


def test_a_model_is_prepared_before_its_first_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    with localinfer.load(threads=1) as llm:
        llm.prepare_constraints()
        monkeypatch.setattr(vocabulary_trie, "build_trie", None)
        llm.prepare_constraints()
        assert llm.complete("a", constraint=Regex("[0-9]{3}"), max_tokens=9).text.isdigit()
    with pytest.raises(ClosedError):
        llm.prepare_constraints()


def test_a_model_without_a_tokenizer_has_no_constraints() -> None:
    model: Any = fake_model()
    model.tokenizer = model.chat_template = None
    with pytest.raises(RequestError, match="no tokenizer"):
        LLM(model).prepare_constraints()
