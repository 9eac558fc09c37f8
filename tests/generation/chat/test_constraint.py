"""Constraints: what comes out always fits, with drafts and without; masks against brute force; hostile inputs."""

import gc
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

import localinfer
from localinfer.errors import ConstraintError, OverloadedError, RequestError
from localinfer.generation.chat import constraints
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.grammar_mask import MatcherMask
from localinfer.generation.options import Constraint, Grammar, JsonObject, JsonSchema, Regex
from localinfer.llm import LLM
from tests.engine.fakes import ByteTokenizer, fake_model
from tests.support.limits import seconds

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
    "$defs": {"kind": {"anyOf": [{"const": "x"}, {"type": "null"}]}},
}
CONSTRAINTS: list[tuple[Constraint, str]] = [
    (JsonSchema(PERSON), "schema"),
    (JsonSchema(json.dumps(PERSON)), "schema"),
    (Regex(r"[A-Z][a-z]{2,6}(, [a-z]{1,4}){1,3}!"), r"[A-Z][a-z]{2,6}(, [a-z]{1,4}){1,3}!"),
    (Regex(r" (é|😀){1,2} \d{3}"), r" (é|😀){1,2} \d{3}"),
    (Grammar('root ::= "<" [b-d]{1,9} ">"'), r"<[b-d]{1,9}>"),
    (Grammar('start: "x" DIGITS (";" DIGITS)~2\nDIGITS: /[0-9]{1,3}/'), r"x\d{1,3}(;\d{1,3}){2}"),
]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with localinfer.load(speculation=None, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with localinfer.load(speculation="ngram", threads=1) as llm:
        yield llm


def check(text: str, expected: str) -> None:
    if expected == "schema":
        jsonschema.validate(json.loads(text), PERSON)
    else:
        assert re.fullmatch(expected, text), text


@pytest.mark.parametrize(("constraint", "expected"), CONSTRAINTS)
def test_every_text_fits_and_drafts_do_not_change_it(
    demo: LLM, drafting: LLM, constraint: Constraint, expected: str
) -> None:
    noisy = {"seed": 2, "temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for options in ({"seed": 1}, noisy):
        completion = demo.complete("Once upon a time", constraint=constraint, max_tokens=300, **options)  # type: ignore[arg-type]
        assert completion.finish_reason == "stop"
        check(completion.text, expected)
        again = drafting.complete("Once upon a time", constraint=constraint, max_tokens=300, **options)  # type: ignore[arg-type]
        assert (again.text, again.token_ids) == (completion.text, completion.token_ids)


def test_json_object_parses_whatever_the_noise() -> None:
    llm = LLM(fake_model(context_length=600))  # type: ignore[arg-type]
    ends = 0
    for seed in range(12):
        completion = llm.complete("a", constraint=JsonObject(), seed=seed, temperature=1.0, max_tokens=400)
        if completion.finish_reason == "stop":
            ends += 1
            assert isinstance(json.loads(completion.text), dict)
    assert ends > 3


def test_sentencepiece_text_keeps_the_space_its_constraint_asks_for(shared: Any) -> None:
    with localinfer.load(shared / "models" / "stories260K.gguf", threads=1, speculation="ngram") as llm:
        completion = llm.complete("Once", constraint=Regex(r" [a-z]+ (boy|girl)\."), seed=1, max_tokens=80)
        empty = llm.complete("", constraint=Regex(r" [a-z]{3}"), seed=1, max_tokens=9)
        refused = llm.complete("", constraint=Regex(r"[a-z]{3}"), seed=1, max_tokens=9)
    assert re.fullmatch(r" [a-z]+ (boy|girl)\.", completion.text)
    assert re.fullmatch(r" [a-z]{3}", empty.text) and re.fullmatch(r"[a-z]{3}", refused.text)


def small_mask(pattern: str) -> MatcherMask:
    return ConstraintCompiler(ByteTokenizer(), 264).mask(Regex(pattern), start=2)


def history(text: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([256, 65, *text], np.int32)


def test_masks_are_those_of_brute_force() -> None:
    pattern = r"(ab|a[0-9]{2}|cc*d){1,2}"
    words = [b""]
    for _ in range(5):
        words += [word + bytes([c]) for word in words for c in b"abcd07" if len(word) < 5]
    words = sorted(set(words))
    whole = {word for word in words if re.fullmatch(pattern.encode(), word)}
    # Words of up to 5 letters over this alphabet are enough to see what may follow words of up to 2.
    alphabet = np.frombuffer(b"abcd07", np.uint8)
    mask = small_mask(pattern)
    for prefix in [word for word in words if len(word) <= 2]:
        following = {word[len(prefix)] for word in whole if word.startswith(prefix) and len(word) > len(prefix)}
        if not following and prefix not in whole:
            continue
        allowed = mask(history(prefix))
        assert {int(c) for c in alphabet if allowed[c]} == following, prefix
        assert allowed[257] == (prefix in whole)
        assert not allowed[[256, 258, 259, 260, 263]].any()


def test_a_mask_depends_on_the_history_alone() -> None:
    texts = [b"", b"a", b"ab", b"a0", b"a07", b"abc", b"abccc"]
    fresh = {text: small_mask(r"(ab|a[0-9]{2}|cc*d){1,2}")(history(text)).copy() for text in texts}
    mask = small_mask(r"(ab|a[0-9]{2}|cc*d){1,2}")
    generator = np.random.default_rng(0)
    for index in generator.integers(0, len(texts), 60):
        text = texts[index]
        if index % 3 == 0:
            mask.prepare(history(text), 2 + len(text) // 2)
        assert np.array_equal(mask(history(text)), fresh[text])


def test_forced_tokens_and_allowed_drafts() -> None:
    mask = small_mask(r"once (upon|under) a [a-z]+")
    assert bytes(mask.forced(history(b""), 15)) == b"once u"
    assert bytes(mask.forced(history(b"once un"), 3)) == b"der"
    assert mask.forced(history(b"once upon a t"), 15) == []
    assert mask.count_allowed(history(b"once u"), list(b"pon a!")) == 6 - 1
    assert mask.count_allowed(history(b"once upon a x"), [121, 257, 121]) == 1


def test_prepared_masks_end_where_a_draft_leaves_the_grammar() -> None:
    mask = small_mask("abc")
    mask.prepare(history(b"axc"), 2)
    assert mask(history(b""))[97] and mask(history(b"a"))[98]
    with pytest.raises(ConstraintError, match="left its grammar"):
        mask(history(b"ax"))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"anyOf": [{"type": "object", "propertyNames": {"pattern": "a"}}]}, "propertyNames"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "zip-code"}, "format"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": "(a"}, "pattern"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"$ref": "https://example.com/schema.json"}, "$ref"),
        ({"$ref": "#/$defs/nowhere"}, "$ref"),
        ({"type": "text"}, "type"),
        ({"enum": []}, "enum"),
        ({"type": "array", "items": [{"type": "integer"}]}, "items"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "array", "minItems": 10**9}, "minItems"),
        ({"type": "array", "maxItems": 10**9}, "maxItems"),
        ({"type": "string", "minLength": "many"}, "minLength"),
        ({"allOf": [{"minItems": 9000, "type": "array"}, {"maxItems": 9000}]}, "maxItems"),
    ],
)
def test_an_unenforceable_schema_names_its_keyword(demo: LLM, schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(keyword)) as caught:
        demo.complete("a", constraint=JsonSchema(schema))
    assert caught.value.keyword == keyword


def test_names_of_properties_and_constants_are_not_keywords(demo: LLM) -> None:
    schema = {"type": "object", "properties": {"not": {"const": {"if": 1}}}, "required": ["not"]}
    text = demo.complete("a", constraint=JsonSchema({**schema, "additionalProperties": False}), max_tokens=60).text
    assert json.loads(text) == {"not": {"if": 1}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_large_honest_schema_compiles(demo: LLM) -> None:
    fields = {
        f"field{index}": {"type": "string", "pattern": rf"^[a-z]{{1,{20 + index}}}(-\d{{2,4}})?$"}
        for index in range(80)
    }
    fields |= {f"choice{index}": {"enum": [f"value {n} of {index}" for n in range(50)]} for index in range(40)}
    fields |= {f"when{index}": {"type": "string", "format": "date-time"} for index in range(10)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    completion = demo.complete("a", constraint=JsonSchema(schema), max_tokens=40, seed=1)
    assert completion.text.startswith('{"field0": "')


def looping() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema(deep(65)),
        JsonSchema(json.dumps(deep(400))),
        JsonSchema(looping()),
        JsonSchema("[" * 100_000),
        JsonSchema('{"type":'),
        JsonSchema("3"),
        JsonSchema(False),
        JsonSchema({"a": {1, 2}}),  # type: ignore[dict-item]
        JsonSchema({"minimum": float("nan")}),
        JsonSchema({"anyOf": [{"const": str(number)} for number in range(50_000)]}),
        JsonSchema({"enum": ["x" * 300_000]}),
        Regex("("),
        Regex("a" * 10**6),
        Regex("\ud800"),
        Regex("(" * 5000 + "a" + ")" * 5000),
        Regex("(?=a)b"),
        Grammar(""),
        Grammar("hello"),
        Grammar("start: missing"),
        Grammar('root ::= "a" missing'),
        Grammar("root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
        Grammar("start: " + "(" * 3000 + '"a"' + ")" * 3000),
        "json",
    ],
    ids=lambda constraint: repr(constraint)[:30],
)
def test_hostile_constraints_are_refused_in_time(demo: LLM, constraint: Constraint) -> None:
    with pytest.raises(ConstraintError):
        demo.complete("a", constraint=constraint, max_tokens=3)


@pytest.mark.parametrize(
    "constraint",
    [
        Regex(r"((a+)+)+b"),
        Regex(r"(.*a.{30}){5}"),
        Regex(r"((a{1000}){1000}){10}"),
        Regex(r"[^\s\S]"),
        Grammar('start: start start | "a"'),
        Grammar('root ::= "a"{1000000000}'),
        JsonSchema({"$ref": "#"}),
        JsonSchema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        JsonSchema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    ],
    ids=lambda constraint: repr(constraint)[:30],
)
def test_catastrophic_constraints_end_by_error_or_length(demo: LLM, constraint: Constraint) -> None:
    try:
        completion = demo.complete("a", constraint=constraint, max_tokens=20, seed=1)
        assert len(completion.token_ids) <= 20
    except RequestError as error:
        assert str(error)
    assert demo.complete("Once", max_tokens=2, seed=1).token_ids, "the model is usable afterwards"


def test_compiling_past_the_time_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localinfer.generation.chat.constraints.MAX_COMPILE_SECONDS", 0.01)
    refused = threading.Event()
    monkeypatch.setattr(
        "localinfer.generation.chat.constraints.grammar_of", lambda constraint, notices: refused.wait(seconds(10))
    )
    with pytest.raises(ConstraintError, match="takes longer than"):
        ConstraintCompiler(ByteTokenizer(), 260).mask(Regex("a"), start=1)
    refused.set()


@pytest.mark.parametrize("count", [2_001, 5_000, 8_000])
@pytest.mark.parametrize(
    "schema_of",
    [
        lambda names: {"properties": dict.fromkeys(names, {})},
        lambda names: {"type": "object", "properties": dict.fromkeys(names, {}), "required": names},
        lambda names: {"properties": {"a": {"properties": dict.fromkeys(names, {})}}},
        lambda names: {"allOf": [{"properties": {name: {}}} for name in names]},
        lambda names: {"$defs": {"a": {"properties": dict.fromkeys(names, {})}}, "$ref": "#/$defs/a"},
        lambda names: {"patternProperties": dict.fromkeys(names[:500], {})},
    ],
    ids=["optional", "required", "nested", "in parts", "in a definition", "patterns"],
)
def test_schema_of_too_many_properties_is_refused_before_anything_compiles_it(demo: LLM, schema_of, count) -> None:
    names = [f"p{number}" for number in range(count)]
    before = set(threading.enumerate())
    with pytest.raises(ConstraintError, match="wanted at most") as found:
        demo.complete("a", constraint=JsonSchema(schema_of(names)), max_tokens=1)
    assert found.value.keyword in ("properties", "patternProperties")
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "localinfer-constraint"]


def test_form_is_compiled_once_for_each_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = constraints._compile
    monkeypatch.setattr(constraints, "_compile", lambda *given: compiled.append(given[1]) or compile_one(*given))
    look = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"const": "a form that says much"}}}}
    options: dict[str, Any] = {"tools": [{"type": "function", "function": look}], "max_tokens": 1}
    with localinfer.load(speculation=None, threads=1) as llm:
        for salt in (None, None, "one", "one", "two"):
            llm.chat([{"role": "user", "content": "Hi"}], cache_salt=salt, **options)
            llm.complete("Hi", max_tokens=1, constraint=Regex("[a-z]{7}"), cache_salt=salt)
    assert compiled and all(compiled.count(grammar) == 3 for grammar in compiled)


def test_compilations_that_cannot_be_stopped_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("localinfer.generation.chat.constraints.MAX_COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(
        "localinfer.generation.chat.constraints.grammar_of", lambda constraint, notices: go_on.wait(seconds(10))
    )
    compiler = ConstraintCompiler(ByteTokenizer(), 260)
    before = threading.active_count()
    try:
        for _ in range(20):
            with pytest.raises((ConstraintError, OverloadedError)):
                compiler.mask(Regex("a"), start=1)
        with pytest.raises(OverloadedError, match="still being compiled"):
            compiler.mask(Regex("a"), start=1)
        assert threading.active_count() <= before + 2
    finally:
        go_on.set()
    for thread in threading.enumerate():
        if thread.name == "localinfer-constraint":
            thread.join(seconds(10))
    monkeypatch.undo()
    assert compiler.mask(Regex("a"), start=1) is not None


def test_compiled_forms_are_kept_by_bytes_and_hostile_ones_not_at_all() -> None:
    compiler = ConstraintCompiler(ByteTokenizer(), 260)
    compiler.mask(Regex("(a{1000}){1000}x"), start=1)
    assert not compiler._compiled
    many = [f"{first}{second}" for first in "abcdefghij" for second in "klmnop"]
    for text in many:
        compiler.mask(Regex(text), start=1)
    assert len(compiler._compiled) == len(many)


def test_forms_that_take_more_than_is_kept_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 8 << 20, "b": 12 << 20, "c": 13 << 20, "d": 11 << 20, "e": 17 << 20}
    monkeypatch.setattr(
        constraints, "_measured", lambda trie, grammar, what: constraints._Compiled(FakeMatcher(), sizes[grammar])
    )
    compiler = ConstraintCompiler(ByteTokenizer(), 260)
    for grammar in ("a", "b", "a", "c", "d", "e"):
        compiler.grammar_mask(grammar, start=1, what="grammar")
    assert [grammar for _, grammar in compiler._compiled] == ["a", "c", "d"]


def test_large_forms_of_running_texts_are_bounded_and_counted_out_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        constraints, "_measured", lambda *_: constraints._Compiled(FakeMatcher(), constraints._MOST_USED_BYTES // 2)
    )
    compiler = ConstraintCompiler(ByteTokenizer(), 260)
    held = [compiler.grammar_mask(str(index), start=1, what="grammar") for index in range(2)]
    with pytest.raises(OverloadedError, match="try again when they have ended"):
        compiler.grammar_mask("one more", start=1, what="grammar")
    held.pop()
    gc.collect()
    held.append(compiler.grammar_mask("one more", start=1, what="grammar"))
    held.clear()
    gc.collect()
    assert compiler._used_bytes == 0


class FakeMatcher:
    """A matcher that is only copied."""

    def copy(self) -> "FakeMatcher":
        return FakeMatcher()


def test_options_that_contradict_a_constraint_are_refused(demo: LLM) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        demo.complete("a", constraint=Regex("a"), ignore_eos=True)
    model = fake_model()
    model.tokenizer = None
    with pytest.raises(RequestError, match="no tokenizer"):
        LLM(model).complete([1], constraint=Regex("a"))  # type: ignore[arg-type]
