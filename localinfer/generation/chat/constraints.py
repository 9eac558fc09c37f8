"""The compiler of constraints (JSON, a JSON Schema, a regular expression, a grammar) to masks of tokens.

llguidance makes masks over a vocabulary: it walks a trie of the vocabulary's bytes with a lexer of derivatives and an
Earley parser, tens of microseconds a token (github.com/guidance-ai/llguidance). It is imported at the first constraint,
and a model's trie is built once, while other threads run.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.errors import ConstraintError, OverloadedError
from localinfer.generation.chat.grammar_mask import GrammarMatcher, MatcherMask, NumberTokens
from localinfer.generation.chat.grammar_writer import structural_tag_grammar
from localinfer.generation.chat.json_schema import (
    MAX_CHARACTERS,
    enforced_schema,
    keyword_in,
    printable,
    relaxed_schema,
)
from localinfer.generation.options import Constraint, Grammar, JsonObject, JsonSchema, Regex, StructuralTag
from localinfer.system.extras import require
from localinfer.system.free_memory import heap_bytes

if TYPE_CHECKING:
    from localinfer.generation.chat.vocabulary_trie import VocabularyTrie
    from localinfer.models.text.tokenizer import Tokenizer

MAX_COMPILE_SECONDS = 2.0
_MOST_KEPT_BYTES, _LARGEST_KEPT_BYTES = 32 << 20, 16 << 20
"""Of compiled constraints for the next that asks for the same: most take less than one megabyte, hostile ones forty."""
_MOST_USED_BYTES, _LARGE_BYTES = 64 << 20, 4 << 20
"""Of large ones that texts are held to now."""
_LEAST_BYTES = 1 << 16
_MOST_BYTES_PER_SECOND, _USUAL_BYTES_PER_SECOND, _FREE_SECONDS = 1 << 30, 500 << 20, 1e-3
"""Memory of a compilation by its processor time: at most; and where the heap cannot be measured, as large ones take
it after the time that small ones take."""
_MOST_AT_ONCE = 2
_MOST_LATE = 2
"""Compilations that took too long and cannot be stopped: while so many still run, no other begins."""
_FIELDS = {"regular expression": "regex", "grammar": "grammar", "structural tag": "structural_tag"}
"""Name of a constraint in messages, and in the `field` of an error."""
_PART = "what constrains a text (a schema, a regular expression, a grammar, tools)"
Result = TypeVar("Result")
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it, in llguidance's terms: small models would write white space without end."""

_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""The end of a grammar that a user wrote, whose last options count. llguidance's lexer is greedy: behind `/a+/` it
forces `a` without end where only an `a` could follow, and never comes back."""


class _Compiled(NamedTuple):
    """A compiled constraint, and about how much memory it takes."""

    matcher: GrammarMatcher
    num_bytes: int


class ConstraintCompiler:
    """Compiles constraints for one model, a few at a time, and keeps the latest; threads may share it.

    vocab_size: of the logits, which may be more than the tokenizer's; ids beyond it are never allowed.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # Reentrant: a matcher may be collected, and counted out, while it is held.
        self._lock = threading.RLock()
        self._building = threading.Lock()
        self._trie: VocabularyTrie | None = None
        self._numbers: NumberTokens | None = None
        self._compiled: OrderedDict[tuple[bytes, str], _Compiled] = OrderedDict()
        self._used_bytes = 0
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._late: list[threading.Thread] = []

    def prepare(self) -> "VocabularyTrie":
        """Build what all constraints of the model need, once: the first of them waits for it otherwise.

        Other threads run meanwhile. Raises: ConstraintError if no token ends a text; MissingPackageError.
        """
        require("constraints", _PART)
        from localinfer.generation.chat.vocabulary_trie import build_trie

        with self._building:
            if self._trie is None:
                self._trie = build_trie(self._tokenizer)
            return self._trie

    def mask(
        self, constraint: Constraint, *, start: int, salt: bytes = NO_SALT, notices: list[str] | None = None
    ) -> MatcherMask:
        """The mask of one generation whose prompt has `start` tokens. salt: whose former ones need not be compiled.

        notices: gets what is left out of a schema that is not strict.

        Raises: ConstraintError if the constraint is wrong, cannot be enforced, or costs too much; OverloadedError while
        former ones that cost too much are still at it.
        """
        what = _name(constraint)
        grammar = self._in_time(lambda: grammar_of(constraint, notices), what)
        return self.grammar_mask(grammar, start=start, what=what, salt=salt, bounds_numbers=is_json(constraint))

    def relaxed(self, schema: object) -> tuple[dict[str, Any], list[str]]:
        """A schema without what cannot be enforced, and what that is. Raises: ConstraintError; OverloadedError."""
        return self._in_time(lambda: relaxed_schema(schema, check_schema), "schema")

    def grammar_mask(
        self, grammar: str, *, start: int, what: str, salt: bytes = NO_SALT, bounds_numbers: bool = False
    ) -> MatcherMask:
        """As `mask`, for a grammar in llguidance's own form; what: how errors call it. bounds_numbers: see
        `grammar_mask`."""
        compiled = self._matcher(grammar, what, salt)
        matcher = self._in_use(compiled)
        ends = sorted(self._tokenizer.eog_token_ids)
        numbers = self._number_tokens() if bounds_numbers else None
        return MatcherMask(matcher, start=start, vocab_size=self._vocab_size, end_ids=ends, numbers=numbers)

    def _number_tokens(self) -> NumberTokens:
        if self._numbers is None:
            texts = self._tokenizer.vocabulary_bytes()
            for token_id in filter(self._tokenizer.is_special, range(len(texts))):
                texts[token_id] = b""
            self._numbers = NumberTokens(texts)
        return self._numbers

    def _in_use(self, compiled: _Compiled) -> GrammarMatcher:
        """A matcher for one text, counted as long as it lives. Raises: OverloadedError."""
        if compiled.num_bytes < _LARGE_BYTES:
            return compiled.matcher.copy()
        with self._lock:
            if self._used_bytes and self._used_bytes + compiled.num_bytes > _MOST_USED_BYTES:
                raise OverloadedError(
                    f"texts are held to constraints of {self._used_bytes >> 20} MiB, and this one takes "
                    f"{compiled.num_bytes >> 20}; try again when they have ended, or give a smaller one",
                    MAX_COMPILE_SECONDS,
                )
            self._used_bytes += compiled.num_bytes
        matcher = compiled.matcher.copy()
        weakref.finalize(matcher, self._forget, compiled.num_bytes).atexit = False
        return matcher

    def _forget(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes

    def _matcher(self, grammar: str, what: str, salt: bytes) -> _Compiled:
        key = (salt, grammar)
        with self._lock:
            if (found := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return found
        trie = self.prepare()
        compiled = self._in_time(lambda: _measured(trie, grammar, what), what)
        if compiled.num_bytes <= _LARGEST_KEPT_BYTES:
            with self._lock:
                self._compiled[key] = compiled
                while sum(one.num_bytes for one in self._compiled.values()) > _MOST_KEPT_BYTES:
                    self._compiled.popitem(last=False)
        return compiled

    def _in_time(self, work: Callable[[], Result], what: str) -> Result:
        """Work in a thread that may be left behind for the seconds that the compiler's own limits allow it.

        Not a daemon: the interpreter must not end while compiled code of that thread still has to come back to it.
        """
        with self._lock:
            self._late = [thread for thread in self._late if thread.is_alive()]
            num_late = len(self._late)
        if num_late >= _MOST_LATE:
            raise OverloadedError(
                f"{num_late} constraints that are too large are still being compiled; try again when they have ended",
                MAX_COMPILE_SECONDS,
            )
        if not self._places.acquire(timeout=_MOST_AT_ONCE * MAX_COMPILE_SECONDS):
            raise OverloadedError("other constraints are being compiled; try again later", MAX_COMPILE_SECONDS)
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                self._places.release()

        thread = threading.Thread(target=run, name="localinfer-constraint")
        thread.start()
        thread.join(MAX_COMPILE_SECONDS)
        if errors:
            raise errors[0]
        if not results:
            with self._lock:
                self._late.append(thread)
            raise ConstraintError(
                f"the {what} takes longer than {MAX_COMPILE_SECONDS:g} s to compile; give a simpler or smaller one",
                field=_FIELDS.get(what),
            )
        return results[0]


def _measured(trie: "VocabularyTrie", grammar: str, what: str) -> _Compiled:
    """As `_compile`, with the memory that it took: what the heap has grown by, within what the time for it allows."""
    heap, began = heap_bytes(), time.thread_time()
    matcher = _compile(trie, grammar, what)
    seconds = time.thread_time() - began
    grown = heap_bytes() - heap if heap else max(0.0, seconds - _FREE_SECONDS) * _USUAL_BYTES_PER_SECOND
    return _Compiled(matcher, max(_LEAST_BYTES, len(grammar), int(min(grown, seconds * _MOST_BYTES_PER_SECOND))))


def _compile(trie: "VocabularyTrie", grammar: str, what: str) -> GrammarMatcher:
    matcher = trie.matcher(grammar)
    if matcher.error() is None:
        # A regular expression is only opened up by its first mask.
        matcher.mask()
    if (error := matcher.error()) is not None:
        raise _refusal(what, error)
    return matcher


def grammar_of(constraint: Constraint, notices: list[str] | None = None) -> str:
    """A constraint in llguidance's form, JSON. notices: of `ConstraintCompiler.mask`. Raises: ConstraintError as it."""
    require("constraints", _PART)
    from llguidance import LLMatcher

    match constraint:
        case JsonObject():
            return json_grammar({"type": "object"})
        case JsonSchema(schema, strict=True):
            return json_grammar(enforced_schema(schema))
        case JsonSchema(schema):
            made, left_out = relaxed_schema(schema, check_schema)
            if notices is not None:
                notices += left_out
            return json_grammar(made)
        case Regex(pattern):
            _check_text("regular expression", pattern)
            return LLMatcher.grammar_from_regex(pattern)
        case Grammar(text):
            _check_text("grammar", text)
            return LLMatcher.grammar_from_lark(f"{_as_lark(text)}{_UNFORCED}")
        case StructuralTag(form):
            lark = structural_tag_grammar(form, ONE_LINE)
            _check_encodable("structural tag", lark)
            return LLMatcher.grammar_from_lark(f"{lark}{_UNFORCED}")
    raise ConstraintError(
        f"constraint is {constraint!r:.60}; give a JsonObject, JsonSchema, Regex, Grammar or "
        "StructuralTag of localinfer"
    )


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of the JSON texts that a checked schema accepts."""
    require("constraints", _PART)
    from llguidance import LLMatcher

    options: Any = ONE_LINE
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise _refusal("schema", str(error)) from None


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ConstraintError for a checked schema that does not compile."""
    from llguidance import LLMatcher

    if message := LLMatcher.validate_grammar(json_grammar(dict(schema))):
        raise _refusal("schema", message)


def check_enforceable(constraint: Constraint) -> None:
    """Raise ConstraintError for what cannot be enforced with any vocabulary; faster than a model's first constraint."""
    grammar = grammar_of(constraint)
    from llguidance import LLMatcher

    if message := LLMatcher.validate_grammar(grammar):
        raise _refusal(_name(constraint), message)


def _as_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    # The converter reports some mistakes by bare exceptions, and very deep nesting by running out of stack.
    except Exception as error:
        raise _refusal("grammar", str(error) or type(error).__name__) from None


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise ConstraintError(f"the {what} is {text!r:.60}; give it as text", field=_FIELDS[what])
    if len(text) > MAX_CHARACTERS:
        raise ConstraintError(
            f"the {what} has {len(text)} characters; wanted at most {MAX_CHARACTERS}", field=_FIELDS[what]
        )
    _check_encodable(what, text)


def _check_encodable(what: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConstraintError(
            f"the {what} has half a character in it; give whole Unicode characters", field=_FIELDS[what]
        ) from None


def is_json(constraint: Constraint | None) -> bool:
    """True if a constraint is about JSON, or there is none."""
    return constraint is None or isinstance(constraint, JsonObject | JsonSchema)


def _name(constraint: Constraint) -> str:
    names = {Regex: "regular expression", Grammar: "grammar", StructuralTag: "structural tag"}
    return names.get(type(constraint), "schema")


def _shown(message: str) -> str:
    """The compiler's message on one line, of several where it points into the text.

    Its own faults, which it reports as a panic with a trace, can only be avoided by another constraint.
    """
    if message.lstrip().startswith("panic"):
        return "its compiler fails at it"
    line = " ".join(message.replace("<non-verbose/>", "").split("<state>")[0].split())[:300]
    return printable({"NoExtensionBias": "nothing that it allows could follow"}.get(line, line))


def _refusal(what: str, message: str) -> ConstraintError:
    keyword = keyword_in(message) if what == "schema" else None
    about = f" ({keyword!r})" if keyword is not None else ""
    return ConstraintError(
        f"the {what} cannot be enforced{about}: {_shown(message)}; change that part",
        keyword=keyword,
        field=_FIELDS.get(what),
    )
