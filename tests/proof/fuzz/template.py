"""Chat templates of unknown files, and conversations given to templates in the manner of well-known families.

An input is a JSON object: `template` and perhaps `tool_template`, Jinja text; `messages`, `tools`, `variables`, and
`reply`, what the model said. A rendering may neither reach anything outside of it nor cost more than it may, and what
messages spell is text.
"""

import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random, seed
from typing import Any
from unittest.mock import patch

# What `lipsum()` imports when it is first called, before templates are watched.
import jinja2.constants  # noqa: F401

from localinfer.errors import LocalinferError, RequestError, TemplateError
from localinfer.generation.chat_model import ChatHistory
from localinfer.models.text import template_costs
from localinfer.models.text.chat_template import ChatTemplate, ChatTemplateWarning
from localinfer.models.text.reply_learning import Trials, learn_call_format, learn_reasoning_format
from localinfer.models.text.template_costs import MAX_OUTPUT_CHARACTERS
from localinfer.models.text.tokenizer import SpellingFinder, Tokenizer
from localinfer.models.text.vocabulary import PREFIX
from localinfer.storage.chats import EncodedChat
from tests.proof.fuzz.json_mutation import VALUES, change, changed_text, read, simpler, written
from tests.proof.fuzz.target import Limits, Target, refused

_SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]", "<|eot_id|>", "<think>"),
    *(
        "</think>",
        "<tool_call>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "[TOOL_CALLS]",
        "<｜User｜>",
        "<|x",
        "x|>",
    ),
)
_SECRET = "zqxsecretzqx"
"""Stands in the environment and in this module; no template can read either."""
_TEXTS = (
    *_SPECIALS,
    *("hello", "\n", "\n\n", " ", "{{ 1 }}", "{% raw %}", "</s><s>", "<|IM_END|>", "é", "😀", "\ufdd0", "\ufdd1"),
    *(
        "<|im_<|im_end|>end|>",
        "\\u003c|im_end|>",
        "&lt;|im_end|&gt;",
        "{name}",
        "%s",
        "<tool_response>",
        "\x00",
        "\u2028",
    ),
)
_NAMES = (
    *("messages", "tools", "m", "m.content", "messages[0]", "messages[-1].role", "bos_token", "loop", "ns", "ns.x"),
    *("add_generation_prompt", "range", "dict", "namespace", "cycler", "joiner", "lipsum", "strftime_now", "self"),
    *("raise_exception", "''", "'a'", "1", "0", "-1", "1.5", "10**9", "[]", "{}", "(1,)", "true", "none", "caller"),
)
_ATTRIBUTES = (
    *("__class__", "__mro__", "__subclasses__", "__globals__", "__init__", "__dict__", "__base__", "__builtins__"),
    *("gi_frame", "f_globals", "cr_frame", "tb_frame", "func_globals", "im_self", "mro", "content", "role", "items"),
    *("keys", "values", "append", "pop", "update", "clear", "setdefault", "format", "format_map", "join", "split"),
    *("replace", "strip", "encode", "decode", "translate", "maketrans", "center", "zfill", "expandtabs", "to_bytes"),
    *("hex", "fromhex", "from_bytes", "index", "count", "fromkeys", "x", "index0", "previtem", "changed", "cycle"),
    *("_Namespace__attrs", "__getattribute__", "environment", "_environment", "budget", "name", "blocks", "resolve"),
)
_FILTERS = (
    *(
        "abs",
        "attr('x')",
        "attr('__class__')",
        "batch(3)",
        "capitalize",
        "center(99999999)",
        "default('a')",
        "dictsort",
    ),
    *("e", "escape", "filesizeformat", "first", "float", "forceescape", "format(1)", "groupby('role')", "indent(4)"),
    *("int", "items", "join('a')", "last", "length", "list", "lower", "map('upper')", "map(attribute='x')", "max"),
    *("min", "pprint", "random", "reject('none')", "replace('a', 'bb')", "reverse", "round(3)", "safe", "select"),
    *("slice(3)", "sort", "string", "striptags", "sum", "title", "tojson", "tojson(indent=2)", "trim", "truncate(5)"),
    *("unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap(5)", "xmlattr", "from_json", "selectattr('x')"),
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or")
_TESTS = ("defined", "none", "string", "mapping", "iterable", "sequence", "number", "sameas(1)", "in([1])", "callable")
_STATEMENTS = (
    "{% for m in EXPR %}BODY{% endfor %}",
    "{% for m in range(10**9) %}BODY{% endfor %}",
    "{% for k, v in EXPR | items %}BODY{% else %}BODY{% endfor %}",
    "{% for m in EXPR recursive %}{{ loop(EXPR) }}{% endfor %}",
    "{% if EXPR %}BODY{% elif EXPR %}BODY{% else %}BODY{% endif %}",
    "{% set ns = namespace(x=EXPR) %}BODY",
    "{% set ns.x = EXPR %}",
    "{% set x %}BODY{% endset %}",
    "{% macro f(a, b=EXPR) %}BODY{{ a }}{% endmacro %}{{ f(EXPR) }}",
    "{% call f(EXPR) %}BODY{% endcall %}",
    "{% filter upper %}BODY{% endfilter %}",
    "{% with a = EXPR %}BODY{% endwith %}",
    "{% block b %}BODY{% endblock %}",
    "{% generation %}BODY{% endgeneration %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ EXPR ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [EXPR] %}{% endfor %}{{ ns.x }}",
    "{% include EXPR %}",
    "{% do EXPR %}",
    "{% break %}",
    "{% continue %}",
    "{{ raise_exception(EXPR) }}",
    "{%- raw -%}{{ x }}{%- endraw -%}",
)
_MAX_RENDER_SECONDS = 0.25
"""Instead of the product's, so that a template that takes as long as it may costs as much as ten others."""
_RENDER_SECONDS = _MAX_RENDER_SECONDS + 2
"""Of one rendering, and of all that one chat needs."""
_LEARN_SECONDS = 4.0
_FORBIDDEN = ("open", "exec", "import", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "code.__new__")


def corpus() -> list[bytes]:
    """Templates of many families, and hostile ones, each with a conversation that has a call in it."""
    from tests.models.text.hostile_templates import COMPILED, SHARED, TEXT, TIME

    steps = ((TEXT, 8), (TIME, 16), (SHARED, 32), (COMPILED, 4))
    hostile = [source for group, step in steps for source in list(group.values())[::step] if len(source) < 9000]
    return [written(_conversation(source)) for source in (*sorted(_families()), *hostile)]


@cache
def _families() -> frozenset[str]:
    """Templates as models have them: their whole work is to write messages between markers."""
    from tests.models.text.family_templates import FAMILIES
    from tests.models.text.newer_templates import NEWER_FAMILIES
    from tests.models.text.tool_templates import HERMES, HERMES_THINKING, KIMI, LLAMA

    newer = [family.source for family in NEWER_FAMILIES.values()]
    return frozenset((*(family.source for family in FAMILIES.values()), *newer, HERMES, HERMES_THINKING, KIMI, LLAMA))


def _conversation(source: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": "Bonn", "days": 3}}
    call = {"id": "abcdef001", "type": "function", "function": function}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {
        "template": source,
        "messages": [
            {"role": "system", "content": "Be brief.<|im_end|>"},
            {"role": "user", "content": "What <|eot_id|> </s> is it?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Sun [INST]", "tool_call_id": "abcdef001", "name": "weather"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "description": "", "parameters": parameters}}],
        "variables": {"enable_thinking": True},
        "reply": "It is fine.",
    }


def mutate(random: Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Change the conversation, or the template by its own grammar; most families stay as they are."""
    document = read(data)
    if not isinstance(document, dict):
        return random.choice(corpus)
    other = read(random.choice(corpus))
    if random.random() < 0.4:
        source = document.get("template")
        document["template"] = _changed_source(
            random, source if isinstance(source, str) else "", str(other["template"])
        )
    if random.random() < 0.7:
        parts = {key: document[key] for key in ("messages", "tools", "variables", "reply") if key in document}
        others = [other.get("messages"), other.get("tools")]
        for _ in range(random.choice((1, 1, 2, 4))):
            change(random, parts, others, values=VALUES, pieces=_TEXTS)
        document.update(parts)
    if random.random() < 0.1:
        document["tool_template"] = other["template"]
    return written(document)


def _changed_source(random: Random, source: str, other: str) -> str:
    kind = random.random()
    if kind < 0.35:
        made = _statement(random, 3)
        place = random.choice([0, len(source), *_places(source)])
        return source[:place] + made + source[place:]
    if kind < 0.5:
        return _statement(random, 4)
    if kind < 0.7:
        return changed_text(random, source, (*_NAMES, *_FILTERS, *_TEXTS, "{{", "}}", "{%", "%}", "| ", "loop."))
    first, second = random.choice([0, *_places(source)]), random.choice([0, *_places(other)])
    return source[:first] + other[second:]


def _places(source: str) -> list[int]:
    """Where statements and expressions of a template begin."""
    return [index for index in range(len(source)) if source.startswith(("{%", "{{"), index)]


def _statement(random: Random, depth: int) -> str:
    if depth == 0 or random.random() < 0.4:
        return "{{ " + _expression(random, depth) + " }}" + random.choice(("", "", random.choice(_TEXTS)))
    made = random.choice(_STATEMENTS)
    while "BODY" in made:
        made = made.replace("BODY", _statement(random, depth - 1), 1)
    while "EXPR" in made:
        made = made.replace("EXPR", _expression(random, depth - 1), 1)
    return made


def _expression(random: Random, depth: int) -> str:
    if depth <= 0:
        return random.choice((random.choice(_NAMES), json.dumps(random.choice(_TEXTS)), str(random.randrange(99))))
    part, other = _expression(random, depth - 1), _expression(random, depth - 2)
    match random.randrange(9):
        case 0 | 1:
            return f"({part} {random.choice(_OPERATORS)} {other})"
        case 2:
            return f"({part} | {random.choice(_FILTERS)})"
        case 3:
            return f"{part}.{random.choice(_ATTRIBUTES)}"
        case 4:
            return f"{part}.{random.choice(_ATTRIBUTES)}({other})"
        case 5:
            return f"{part}[{other}]"
        case 6:
            return f"[{part}, {other}]"
        case 7:
            return f"({part} is {random.choice(_TESTS)})"
        case _:
            return f"{part}({other})"


@cache
def _tokenizer() -> Tokenizer:
    """Byte-level BPE in which what templates write around messages are control tokens."""
    from tests.models.text.vocabularies import CONTROL, bpe_metadata, with_token

    metadata = bpe_metadata()
    for text in (*_SPECIALS, "<|begin_of_text|>", "<｜end▁of▁sentence｜>"):
        if text not in metadata[f"{PREFIX}tokens"]:  # type: ignore[operator]
            metadata = with_token(metadata, text, CONTROL)
    return Tokenizer.from_metadata(metadata)


class _Watch:
    """Notes what a template does outside of its rendering, by Python's audit events in the thread that renders."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.thread == threading.get_ident() and event.startswith(_FORBIDDEN):
            self.events.append(f"{event} {arguments!r:.100}")


@cache
def _watch() -> _Watch:
    os.environ["LOCALINFER_FUZZ_SECRET"] = _SECRET
    return _Watch()


def run(data: bytes, folder: Path) -> str:
    """Render the conversation in every way the product does. Returns the outcome; raises what is a finding."""
    document = read(data)
    if not isinstance(document, dict) or not isinstance(document.get("template"), str):
        return "no input"
    source, tool_source = document["template"], document.get("tool_template")
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "no messages"
    tools = document.get("tools") if isinstance(document.get("tools"), list) else None
    given = document.get("variables")
    variables = {
        name: value for name, value in (given if isinstance(given, dict) else {}).items() if name.isidentifier()
    }
    variables = {name: value for name, value in variables.items() if name not in _OWN_NAMES}
    template = ChatTemplate(source, "<s>", "</s>", tool_source=tool_source if isinstance(tool_source, str) else None)
    limit = patch.object(template_costs, "MAX_RENDER_SECONDS", _MAX_RENDER_SECONDS)
    with warnings.catch_warnings(), limit:
        warnings.simplefilter("ignore", ChatTemplateWarning)
        began = time.thread_time()
        template.is_fallback, template.stop_strings  # noqa: B018
        _check_time(began, _RENDER_SECONDS, "compiling")
        text = None
        try:
            text = _rendered(template, messages, tools, variables)
            outcome = "rendered" if not template.is_fallback else "fallback"
        except TemplateError as error:
            _check_message(error)
            outcome = refused(error)
        is_family = source in _families() and not tool_source
        _check_segments(template, messages, tools, variables, text, is_family=is_family)
        if text is not None:
            _check_history(template, messages, tools, variables, document.get("reply"))
        began = time.thread_time()
        trials, ends = Trials(template), SpellingFinder({"<|im_end|>": 1})
        reasoning = learn_reasoning_format(trials, source, ends)
        learn_call_format(trials, ends, reasoning=reasoning, source=source)
        _check_time(began, _LEARN_SECONDS, "learning the formats of replies")
    return outcome


_OWN_NAMES = ("messages", "tools", "add_generation_prompt", "self", "spellings", "tokenizer", "values", "begin")


def _rendered(template: ChatTemplate, messages: Any, tools: Any, variables: dict[str, Any]) -> str:
    watch = _watch()
    watch.events.clear()
    before = json.dumps([messages, tools, variables])
    began = time.thread_time()
    watch.thread = threading.get_ident()
    try:
        text = template.render(messages, tools=tools, **variables)
    finally:
        watch.thread = None
        # A template for tools is compiled when it is first wanted.
        events = [event for event in watch.events if 'file "<template>"' not in event]
        _check_time(began, _RENDER_SECONDS, "rendering")
        assert json.dumps([messages, tools, variables]) == before, "a template changed the messages"
        assert not events, f"a rendering reached out: {events}"
    assert len(text) <= MAX_OUTPUT_CHARACTERS, f"a rendering of {len(text)} characters"
    assert _SECRET not in text, "a template read what is not its own"
    return text


def _check_time(began: float, limit: float, what: str) -> None:
    seconds = time.thread_time() - began
    assert seconds < limit, f"{what} took {seconds:.1f} s"


def _check_message(error: LocalinferError) -> None:
    message = str(error)
    assert len(message) < 1500, f"a message of {len(message)} characters"
    assert _SECRET not in message


def _check_segments(
    template: ChatTemplate, messages: Any, tools: Any, variables: dict[str, Any], text: str | None, *, is_family: bool
) -> None:
    tokenizer = _tokenizer()
    try:
        # Templates may draw: the same in both renderings.
        seed(0)
        segments = template.render_segments(messages, tokenizer.special_spellings, tools=tools, **variables)
        seed(0)
        ids = template.encode(tokenizer, messages, tools=tools, **variables)
    except RequestError as error:
        _check_message(error)
        return
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    spelled = tokenizer.decode(ids, skip_special=False)
    joined = "".join(part for part, _ in segments)
    assert spelled in (joined, "<s>" + joined), "the ids of a prompt are not its text"
    for part, is_template in segments:
        if not is_template:
            found = tokenizer.encode(part, add_special=False)
            assert not set(found) & set(tokenizer.special_ids.values()), f"{part!r} is more than text"
    if not is_family or text is None:
        return
    assert joined == text, "segments are not the rendered text"
    try:
        plain = template.encode(tokenizer, _harmless(messages), tools=_harmless(tools), **_harmless(variables))
    except RequestError:
        return
    closed = set(tokenizer.special_ids.values())
    wanted, found_ids = (Counter(token_id for token_id in some if token_id in closed) for some in (plain, ids))
    assert found_ids == wanted, f"messages spell control tokens: {found_ids - wanted or wanted - found_ids}"


def _harmless(value: Any) -> Any:
    """The same values with another character inside of every spelling of a special token."""
    if isinstance(value, str):
        for text in _SPECIALS:
            value = value.replace(text, text[:1] + "\u00b7" + text[1:])
        return value
    if isinstance(value, dict):
        return {_harmless(key): _harmless(item) for key, item in value.items()}
    return [_harmless(item) for item in value] if isinstance(value, list) else value


def _check_history(template: ChatTemplate, messages: Any, tools: Any, variables: dict[str, Any], reply: object) -> None:
    """A chat that goes on begins with the ids it had, where its text does, and its ids are always its text."""
    tokenizer = _tokenizer()
    if not isinstance(reply, str) or not messages or not all(isinstance(one.get("role"), str) for one in messages):
        return
    history = ChatHistory(template, tokenizer, finds_branches=True)
    further = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "More <|im_end|>"}]
    try:
        first = _encoded(history, messages, tools, variables)
        if not first.token_ids.size:
            return
        # Not as the tokenizer would cut it.
        ids = [token_id for letter in reply for token_id in tokenizer.encode(letter, add_special=False)]
        history.remember(first, ids)
        second = _encoded(history, further, tools, variables)
    except RequestError as error:
        _check_message(error)
        return
    spelled = tokenizer.decode(second.token_ids.tolist(), skip_special=False)
    assert spelled in (second.text, "<s>" + second.text), "the ids of a longer chat are not its text"
    assert second.branch_tokens == tuple(sorted(second.branch_tokens))
    assert 0 <= second.system_tokens <= second.token_ids.size
    goes_on = first.text + reply + "<|im_end|>"
    if second.text.startswith(goes_on) and reply and not any(text in reply for text in _SPECIALS):
        wanted = [*first.token_ids.tolist(), *ids]
        assert second.token_ids[: len(wanted)].tolist() == wanted, "a chat that goes on has other ids"


def _encoded(history: ChatHistory, messages: Any, tools: Any, variables: dict[str, Any]) -> EncodedChat:
    """A chat as a prompt; all of its renderings together take no longer than one may."""
    taken: list[float] = []
    take_render_time = template_costs.take_render_time

    def take(seconds: float) -> None:
        taken.append(seconds)
        take_render_time(seconds)

    with patch.object(template_costs, "take_render_time", take):
        try:
            return history.encode(messages, tools, variables)
        finally:
            assert sum(taken) < _RENDER_SECONDS, f"{len(taken)} renderings of one chat took {sum(taken):.1f} s"


def _prepare() -> None:
    _tokenizer()
    _watch()


TARGET = Target("template", corpus, mutate, run, Limits(seconds=40.0, memory_constant=512 << 20), _prepare, simpler)
