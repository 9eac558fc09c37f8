"""What constrains replies: JSON Schemas, regular expressions, GBNF, Lark, structural tags and tools.

An input is a JSON object: `kind` ("schema", "regex", "grammar", "tag", "tools" or "rules"), `value`, and `seed`, which
decides what is chosen of the tokens that a constraint allows. "rules" is a grammar as `made_grammars` has it, which is
written in all notations. Whatever is chosen, a text that ends fits its constraint, by another program's judgement.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np

from localinfer.errors import ConstraintError, OverloadedError, RequestError
from localinfer.generation.chat.constraints import ConstraintCompiler, check_enforceable, json_grammar
from localinfer.generation.chat.grammar import reply_grammar
from localinfer.generation.chat.grammar_mask import MatcherMask
from localinfer.generation.chat.messages import Tool, read_tools
from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.chat.value_types import parameter_types
from localinfer.generation.options import Constraint, Grammar, JsonObject, JsonSchema, Regex, StructuralTag
from localinfer.generation.stream import joined_calls
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_format import CallFormat
from localinfer.models.text.reply_learning import learn_call_format
from localinfer.models.text.tokenizer import SpellingFinder, Tokenizer
from tests.proof.fuzz.json_mutation import VALUES, change, changed_text, read, simpler, written
from tests.proof.fuzz.made_grammars import accepts, derived, gbnf, is_sound, lark, random_rules, regular
from tests.proof.fuzz.target import Limits, Target, refused

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", None, 1.5]}, "maxItems": 3},
        "kind": {"$ref": "#/$defs/kind"},
        "rate": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 10, "multipleOf": 0.5},
    },
    "required": ["name", "age", "kind"],
    "$defs": {"kind": {"anyOf": [{"const": "x"}, {"type": "null"}, {"pattern": "^[a-c]+$", "type": "string"}]}},
}
_TREE: dict[str, Any] = {
    "$defs": {
        "node": {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    },
    "allOf": [{"$ref": "#/$defs/node"}],
    "additionalProperties": {"type": ["integer", "null"]},
}
_SCHEMAS: tuple[Any, ...] = (
    PERSON,
    _TREE,
    *({}, True, {"type": "string", "format": "date-time"}, {"type": "array", "prefixItems": [{"type": "boolean"}]}),
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "minItems": 9}, "minItems": 9}},
)
_REGEXES = (
    *(r"[A-Z][a-z]{2,6}(, [a-z]{1,4}){1,3}!", r" (é|😀){1,2} \d{3}", r"(a|b)*abb", r"[^\n]*\n", r"(?i:yes|no)"),
    *("(x{1000}){1000}", "(" * 300 + "a" + ")" * 300, "(a*)*b", "[a-zA-Z0-9]{0,10000}", "a{3,1}", r"\p{L}+", "^a$"),
    *("((a{0,100}b){0,100}c){0,100}", "(?=a)b", r"(a)\1", r"[\w--\d]", "(.*a){20}", "(?s:.)*", "", "a||b", r"\x00"),
)
_GRAMMARS = (
    'root ::= "<" [b-d]{1,9} ">"',
    'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"\n',
    'start: "x" DIGITS (";" DIGITS)~2\nDIGITS: /[0-9]{1,3}/',
    'start: e\ne: e "+" e | "(" e ")" | /[0-9]+/\n%ignore /[ ]+/',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}',
    "root ::= root",
    'root ::= root "a" | "b"',
    'root ::= "a"{1000000}',
    "root ::= " + "(" * 2000 + '"a"' + ")" * 2000,
    "root ::= a a a a\n"
    + "".join(f"{x} ::= {y} {y} {y} {y}\n" for x, y in zip("abcdefg", "bcdefgh", strict=True))
    + 'h ::= "x"',
    "root ::= " + " | ".join(f'"{"a" * index}b"' for index in range(200)),
    "start: a\na: b? c? d?\nb: a\nc: a\nd: a",
    "start: /(.*a){30}/ /.*/ /(a|aa)+$/",
    "start[max_tokens=3]: /.*/\n",
    "start: <[5]> | <think>",
    'root ::= [^"\\\\\\x7F\\x00-\\x1F]* "\\"" [ \\t\\n]{0,20}',
)
_TAGS: tuple[Any, ...] = (
    {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
        {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"},
        {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "</g>"]},
    ], "at_least_one": True, "stop_after_first": False}},
    {"structures": [{"begin": "<x>", "schema": {"type": "integer"}, "end": "</x>"}], "triggers": ["<x"]},
    {"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "a/\\\n\""},
        {"type": "or", "elements": [{"type": "regex", "pattern": "[a/]+"}, {"type": "json_schema", "json_schema": {}}]},
        {"type": "star", "content": {"type": "optional", "content": {"type": "const_string", "value": "b"}}},
        {"type": "tags_with_separator", "separator": ",", "tags": [
            {"begin": "[", "content": {"type": "regex", "pattern": "x"}, "end": "]"}]},
    ]}},
)  # fmt: skip
_PIECES = (
    *(
        "{1000}",
        "{0,9999}",
        "(",
        ")",
        "[",
        "]",
        "*",
        "+",
        "?",
        "|",
        "a",
        ".*",
        "\\",
        "\\d",
        "\\n",
        "^",
        "$",
        "::=",
        ":",
    ),
    *("root", "start", "%json {}", "%ignore", "%regex", "[lazy]", "<[1]>", "~", "&", '"a"', "/a/", "\n", "(?s:", "x-"),
    *(
        "#/$defs/node",
        "#",
        "object",
        "array",
        "integer",
        "string",
        "number",
        "null",
        "boolean",
        "date",
        "uuid",
        "email",
    ),
    *("$ref", "allOf", "anyOf", "oneOf", "properties", "required", "pattern", "minLength", "maxItems", "multipleOf"),
    *("minimum", "exclusiveMaximum", "additionalProperties", "const", "enum", "items", "prefixItems", "format", "😀"),
    *("x-guidance", "whitespace_flexible", "not", "patternProperties", "minProperties", "^a.b$", "[^a]", "\\u0041"),
)
_MOST_TOKENS = 160
_MOST_CHECKED = 60
_WALK_SECONDS = 0.8
_MASK_SECONDS = 1.5


def corpus() -> list[bytes]:
    """Constraints of every kind, honest and hostile."""
    random = Random(1)
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": PERSON}},
        {"type": "function", "function": {"name": "get", "strict": True, "parameters": {"properties": {"q": {}}}}},
    ]
    made = [("schema", value) for value in _SCHEMAS] + [("regex", value) for value in _REGEXES]
    made += [("grammar", value) for value in _GRAMMARS] + [("tag", value) for value in _TAGS]
    made += [("tools", {"tools": tools, "family": name}) for name in sorted(_call_formats())]
    made += [("rules", random_rules(random)) for _ in range(12)]
    # The first are those that tests run.
    made.sort(key=lambda item: len(json.dumps(item[1])) > 1500)
    return [written({"kind": kind, "value": value, "seed": seed}) for seed, (kind, value) in enumerate(made)]


def mutate(random: Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Change the constraint in its own terms, or what is chosen."""
    document = read(data)
    if not isinstance(document, dict) or "kind" not in document:
        return random.choice(corpus)
    document["seed"] = random.randrange(1 << 30)
    other = read(random.choice(corpus))
    kind, value = document["kind"], document.get("value")
    if kind == "rules" and random.random() < 0.6:
        document["value"] = random_rules(random)
    elif isinstance(value, str):
        for _ in range(random.choice((1, 1, 2, 4))):
            own = other["value"] if isinstance(other["value"], str) else json.dumps(other["value"])
            value = changed_text(random, value, (*_PIECES, own[: random.randrange(200)]))
        document["value"] = value
    else:
        holder = {"value": value}
        for _ in range(random.choice((1, 1, 2, 3))):
            change(random, holder, [other["value"], *_SCHEMAS[:2]], values=(*_SCHEMAS[2:], *VALUES), pieces=_PIECES)
        document["value"] = holder.get("value")
    return written(document)


@cache
def _call_formats() -> dict[str, CallFormat]:
    from tests.models.text.family_templates import FAMILIES, PARAMETER_FAMILIES

    made = {}
    for name, family in (FAMILIES | PARAMETER_FAMILIES).items():
        ends = SpellingFinder({text: index for index, text in enumerate(family.ends)})
        made[name] = learn_call_format(ChatTemplate(family.source, family.bos, family.eos), ends)
    return made


@dataclass(frozen=True)
class _Vocabulary:
    compiler: ConstraintCompiler
    spelled: list[bytes]
    ends: frozenset[int]
    size: int


@cache
def _vocabularies() -> tuple[_Vocabulary, _Vocabulary]:
    """One of bytes, and the demo model's."""
    from localinfer.loading.options import model_path
    from localinfer.quant.gguf.reader import read_gguf
    from tests.engine.fakes import ByteTokenizer

    with read_gguf(model_path(None)) as file:
        demo = Tokenizer.from_metadata(file.metadata)
    plain = ByteTokenizer()
    return (
        _Vocabulary(ConstraintCompiler(plain, 264), plain.vocabulary_bytes(), plain.eog_token_ids, 264),
        _Vocabulary(
            ConstraintCompiler(demo, demo.vocab_size), demo.vocabulary_bytes(), demo.eog_token_ids, demo.vocab_size
        ),
    )


def run(data: bytes, folder: Path) -> str:
    """Compile the constraint, and choose tokens it allows until a text ends. Raises what is a finding."""
    document = read(data)
    if not isinstance(document, dict):
        return "no input"
    kind, value, seed = document.get("kind"), document.get("value"), document.get("seed")
    random = Random(seed if isinstance(seed, int) else 0)
    try:
        if kind == "tools":
            return _call_tools(value, random)
        if kind == "rules":
            return _follow_rules(value, random)
        return f"{kind}: {_follow(*_constraint(kind, value), random)}"
    except (ConstraintError, RequestError, OverloadedError) as error:
        inside = [word for word in ("panic", "backtrace", "<unknown>", "NoExtensionBias") if word in str(error)]
        assert not inside or any(word in json.dumps(value) for word in inside), f"unclear: {error}"
        return refused(error)
    finally:
        for vocabulary in _vocabularies():
            # What takes longer than it may goes on by itself; the case takes as long as that does.
            for thread in list(vocabulary.compiler._late):
                thread.join()


def _constraint(kind: object, value: Any) -> tuple[Constraint, Callable[[str], bool | None]]:
    match kind:
        case "schema" if value == {"type": "object"}:
            return JsonObject(), lambda text: isinstance(json.loads(text), dict)
        case "schema":
            return JsonSchema(value), _schema_judge(value)
        case "regex":
            return Regex(value), _regex_judge(value)
        case "grammar":
            return Grammar(value), lambda text: None
        case "tag":
            return StructuralTag(value), lambda text: None
    raise RequestError(f"there is no constraint of the kind {kind!r:.40}; give another")


def _follow(constraint: Constraint, judge: Callable[[str], bool | None], random: Random) -> str:
    check_enforceable(constraint)
    outcomes = set()
    for vocabulary in _vocabularies():
        mask = vocabulary.compiler.mask(constraint, start=0)
        for _ in range(2):
            text = _walk(mask, vocabulary, random)
            verdict = None if text is None else judge(text)
            assert verdict is not False, f"{text!r:.400} does not fit the constraint"
            outcomes.add("endless" if text is None else "unjudged" if verdict is None else "fits")
    return ", ".join(sorted(outcomes))


def _walk(mask: MatcherMask, vocabulary: _Vocabulary, random: Random) -> str | None:
    """A text of random tokens that the mask allows, None if it does not come to its end."""
    ids: list[int] = []
    wants_end = random.random() < 0.7
    began = time.thread_time()
    for _ in range(_MOST_TOKENS):
        history = np.array(ids, np.int32)
        asked = time.thread_time()
        if asked - began > _WALK_SECONDS:
            break
        allowed = np.flatnonzero(mask(history)).tolist()
        seconds = time.thread_time() - asked
        assert seconds < _MASK_SECONDS, f"one mask took {seconds:.1f} s"
        assert allowed, f"behind {_text(ids, vocabulary)!r:.300} nothing may come, not even the end"
        ends = vocabulary.ends.intersection(allowed)
        if ends and (len(allowed) == len(ends) or random.random() < (0.5 if wants_end else 0.05)):
            return _text(ids, vocabulary)
        others = [token_id for token_id in allowed if token_id not in ends]
        assert max(others) < len(vocabulary.spelled), "an id beyond the vocabulary is allowed"
        if random.random() < 0.15:
            drafted = mask.forced(history, 8)
            count = mask.count_allowed(history, drafted)
            assert count == len(drafted), "what is forced is not allowed"
            if drafted and random.random() < 0.5:
                ids += drafted
                continue
        # Short tokens, and those that end something, come to an end sooner.
        closing = [one for one in others if vocabulary.spelled[one][:1] in (b'"', b"}", b"]", b")", b">", b",")]
        ids.append(random.choice(closing if closing and random.random() < 0.5 else others))
    return None


def _text(ids: list[int], vocabulary: _Vocabulary) -> str:
    return b"".join(vocabulary.spelled[token_id] for token_id in ids).decode("utf-8", "backslashreplace")


def _follow_rules(rules: Any, random: Random) -> str:
    if not is_sound(rules):
        return "no rules"
    notations: list[Constraint] = [Grammar(gbnf(rules)), Grammar(lark(rules))]
    pattern = regular(rules)
    if pattern is not None:
        notations.append(Regex(pattern))
    outcomes = set()
    for constraint in notations:
        name = type(constraint).__name__

        def judge(text: str, constraint: Constraint = constraint) -> bool | None:
            return accepts(rules, text) if len(text) <= _MOST_CHECKED else None

        try:
            outcomes.add(f"{name} {_follow(constraint, judge, random)}")
        except ConstraintError as error:
            outcomes.add(f"{name} {refused(error).partition(chr(10))[0]}")
            continue
        if isinstance(constraint, Regex):
            _check_own_texts(constraint, rules, random)
    return "rules: " + "; ".join(sorted(outcomes))


def _check_own_texts(constraint: Regex, rules: Any, random: Random) -> None:
    """Every text of an expression is allowed to its end."""
    vocabulary = _vocabularies()[0]
    for _ in range(3):
        text = derived(random, rules, rules[0])
        if text is None:
            continue
        mask = vocabulary.compiler.mask(constraint, start=0)
        ids = list(text.encode())
        count = mask.count_allowed(np.empty(0, np.int32), ids)
        assert count == len(ids), f"{text!r} is stopped before {text.encode()[count:]!r}"
        end = mask(np.array(ids, np.int32))
        assert end[list(vocabulary.ends)].any(), f"{text!r} may not end"


def _schema_judge(schema: Any) -> Callable[[str], bool | None]:
    parsed = json.loads(schema) if isinstance(schema, str) and _is_json(schema) else schema
    validator_class = jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"multipleOf": _check_multiple, "pattern": _check_pattern}
    )

    def judge(text: str) -> bool | None:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        try:
            validator_class.check_schema(parsed)
            validator_class(parsed).validate(value)
        except jsonschema.ValidationError:
            return False
        # Schemas that jsonschema does not take, references that lead nowhere, expressions that Python does not have.
        except Exception:
            return None
        return True

    return judge


def _is_json(text: str) -> bool:
    return read(text.encode("utf-8", "surrogatepass")) is not None


def _check_multiple(validator: Any, factor: Any, value: Any, schema: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and Fraction(str(value)) % Fraction(str(factor)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {factor}")


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
    if isinstance(value, str) and _search(f"(?:{pattern})", value, is_whole=False) is False:
        yield jsonschema.ValidationError(f"{value!r} does not match")


def _regex_judge(pattern: Any) -> Callable[[str], bool | None]:
    return lambda text: _search(pattern, text, is_whole=True)


def _search(pattern: str, text: str, *, is_whole: bool) -> bool | None:
    """Whether an expression matches, by Python's rules; None where these are others, or it takes too long."""
    if _OWN_RULES.search(pattern) or len(pattern) > 2000:
        return None
    if not text.isascii() and (_CLASSES.search(pattern) or "(?i" in pattern):
        return None
    if _NESTED_REPEATS.search(pattern) or pattern.count("*") + pattern.count("+") + pattern.count(",}") > 6:
        return None
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
    return bool(compiled.fullmatch(text) if is_whole else compiled.search(text))


_OWN_RULES = re.compile(r"&&|--|~~|\[\[|\\[pPbBAzZGhHRXkKQExuU0-9]|\(\?[^:is)]|\[\^?\]|\$|\^|\(\?[is]+\)|\[[^\]]*\[")
"""What Rust's regex crate reads in another way, or more strictly, or llguidance does."""
_CLASSES = re.compile(r"\\[wWdDsS]")
_NESTED_REPEATS = re.compile(r"[*+}]\)*[*+{]|\([^()]*[*+}][^()]*\)\)*[*+{]")


def _call_tools(value: Any, random: Random) -> str:
    if not isinstance(value, dict):
        return "no tools"
    tools = read_tools(value.get("tools"))
    family = value.get("family")
    calls = _call_formats().get(family if isinstance(family, str) else "", _call_formats()["hermes"])
    if not tools:
        return "no tools"
    vocabulary = _vocabularies()[0]
    tools = tuple(_enforceable(tool, vocabulary.compiler) for tool in tools)
    grammar = reply_grammar(
        reasoning=None,
        state="none",
        calls=calls,
        tools=tools,
        must_call=True,
        is_parallel=random.random() < 0.5,
        answer=None,
        specials=SpellingFinder({}),
    )
    assert grammar is not None, "there are calls"
    mask = vocabulary.compiler.grammar_mask(grammar, start=0, what="schema")
    text = _walk(mask, vocabulary, random)
    if text is None:
        return "tools: endless"
    return f"tools: {_check_calls(text, calls, tools)}"


def _enforceable(tool: Tool, compiler: ConstraintCompiler) -> Tool:
    """A tool as chats take it: without a schema that does not compile."""
    try:
        compiler.grammar_mask(json_grammar(dict(tool.parameters or {})), start=0, what="schema")
    except ConstraintError:
        return replace(tool, parameters=None)
    return tool


def _check_calls(text: str, calls: CallFormat, tools: tuple[Tool, ...]) -> str:
    by_name = {tool.name: tool for tool in tools}
    types = {tool.name: parameter_types(tool) for tool in tools}
    parsed = []
    for pieces in ([text], list(text)):
        parser = ReplyParser(None, calls, starts_reasoning=False, types=types, new_id=lambda: "id")
        deltas = [*map(parser.push, pieces), parser.flush()]
        made = joined_calls(delta for result in deltas for delta in result.tool_calls)
        parsed.append(("".join(delta.content for delta in deltas), [(call.name, call.arguments) for call in made]))
    assert parsed[0] == parsed[1], "a reply is read in two ways"
    content, found = parsed[0]
    assert found and not content.strip(), f"a reply that has to call says {content!r:.300}"
    for name, arguments in found:
        schema = by_name[name].parameters
        judge = _schema_judge(schema if schema is not None else {"type": "object"})
        assert judge(arguments) is not False, f"the arguments {arguments!r:.300} of {name} do not fit"
    return "fits"


def _prepare() -> None:
    _call_formats()
    for vocabulary in _vocabularies():
        vocabulary.compiler.prepare()


TARGET = Target("grammar", corpus, mutate, run, Limits(memory_constant=512 << 20), _prepare, simpler)
