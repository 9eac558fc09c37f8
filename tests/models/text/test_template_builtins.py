"""Every filter, test and global of Jinja, and every method of plain values: as in plain Jinja on small inputs."""

import datetime
import json
import random
from typing import Any

import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE, DEFAULT_TESTS
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localinfer.errors import TemplateError
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.template_costs import MAX_WORK, methods_of
from localinfer.models.text.template_sandbox import TemplateSandbox
from tests.models.text.family_templates import FAMILIES, PARAMETER_FAMILIES

VALUES: dict[str, Any] = {
    "text": "Hello <b>& 'you'</b>, see https://example.org/a?b=1 now\nsecond line\n\nlast",
    "number": -42.4242,
    "numbers": [3, 1, 2, 2],
    "words": ["pear", "Apple", "fig", "apple"],
    "people": [{"name": "Bo", "age": 3, "on": True}, {"name": "al", "age": 1, "on": False}, {"name": "Cy", "age": 3}],
    "table": {"b": 1, "A": [2, {"größe": None}], "c": "<x>"},
    "nothing": None,
}

FILTERS = {
    "abs": ["number | abs"],
    "attr": ["table | attr('b')", "table | attr('items') is callable", "text | attr('upper')()"],
    "batch": ["numbers | batch(3) | list", "numbers | batch(3, 'x') | list"],
    "capitalize": ["text | capitalize", "numbers | capitalize"],
    "center": ["'ab' | center", "'ab' | center(7)", "5 | center(4)"],
    "count": ["numbers | count"],
    "d": ["missing | d('x')", "'' | d('x', true)"],
    "default": ["missing | default('x')", "nothing | default('x')"],
    "dictsort": ["table | dictsort", "table | dictsort(true)", "{'a': 2, 'b': 1} | dictsort(false, 'value', true)"],
    "e": ["text | e", "numbers | e"],
    "escape": ["text | escape", "('<' | escape) ~ '<'", "('<' | escape) + '<'"],
    "filesizeformat": ["123456 | filesizeformat", "123456 | filesizeformat(true)"],
    "first": ["words | first", "words | map('upper') | first", "[] | first"],
    "float": ["'1.5' | float", "'x' | float(2.5)"],
    "forceescape": ["'<' | e | forceescape"],
    "format": ["'%s is %d, %5.2f%%' | format('a', 3, 1.5)", "'%(a)s %(b)r' | format(a='x', b='y')"],
    "groupby": [
        "people | groupby('age') | map('list') | list",
        "people | groupby('age') | map(attribute='grouper') | list",
        "(people | groupby('name', case_sensitive=true) | first).list",
    ],
    "indent": ["text | indent", "text | indent(2, true, true)", "text | indent('> ')", "text | indent(width=1)"],
    "int": ["'12' | int", "'x' | int(7)", "'ff' | int(base=16)", "3.9 | int"],
    "items": ["table | items | list", "missing | items | list"],
    "join": ["words | join", "words | join(', ')", "people | join('|', attribute='name')", "'abc' | join('-')"],
    "last": ["words | last", "table | last"],
    "length": ["words | length", "text | length", "table | length"],
    "list": ["'abc' | list", "table | list", "range(3) | list", "words | map('upper') | list"],
    "lower": ["text | lower", "numbers | lower"],
    "map": [
        "words | map('upper') | list",
        "people | map(attribute='name') | join",
        "people | map(attribute='on', default='?') | list",
        "words | map('replace', 'p', 'q') | list",
        "[words] | map('map', 'upper') | map('list') | list",
        "'yes' if [] | map('upper') else 'no'",
    ],
    "max": ["words | max", "people | max(attribute='age')", "[] | max"],
    "min": ["words | min", "words | min(case_sensitive=true)", "numbers | min"],
    "pprint": ["table | pprint", "people | pprint"],
    "random": ["numbers | random", "words | random"],
    "reject": ["numbers | reject('odd') | list", "[0, 1] | reject | list"],
    "rejectattr": ["people | rejectattr('on') | list", "people | rejectattr('age', 'gt', 2) | list"],
    "replace": [
        "text | replace('l', 'L')",
        "text | replace('l', 'L', 1)",
        "5 | replace(5, 6)",
        "'ab' | replace('', '-')",
    ],
    "reverse": ["'abc' | reverse", "numbers | reverse | list", "words | map('upper') | reverse | list"],
    "round": ["number | round", "number | round(2)", "number | round(1, 'floor')", "42 | round(-1, 'ceil')"],
    "safe": ["'<' | safe", "'<' + ('<' | safe)", "('<%s>' | safe) % '<'", "('<' | safe).join(['<', '>'])"],
    "select": ["numbers | select('odd') | list", "[0, 1] | select | list", "numbers | select('in', [1, 3]) | list"],
    "selectattr": ["people | selectattr('on') | list", "people | selectattr('name', 'equalto', 'Bo') | list"],
    "slice": [
        "numbers | slice(3) | list",
        "numbers | slice(3, 'x') | list",
        "range(7) | slice(2) | map('join') | list",
    ],
    "sort": ["words | sort", "words | sort(true, true)", "people | sort(attribute='age,name')", "table | sort"],
    "string": ["numbers | string", "5 | string", "text | string"],
    "striptags": ["text | striptags", "'a<!-- x -->  b' | striptags"],
    "sum": [
        "numbers | sum",
        "people | sum('age')",
        "people | sum(attribute='age', start=10)",
        "[[1], [2]] | sum(start=[])",
        "[1.5, 2] | sum",
        "words | map('length') | sum",
        "[] | sum",
    ],
    "title": ["text | title"],
    "tojson": [
        "table | tojson",
        "table | tojson(indent=2)",
        "text | tojson",
        "words | tojson(separators=(',', ':'))",
        "table | tojson(ensure_ascii=true, sort_keys=true)",
        "words | tojson(indent='\t')",
    ],
    "trim": ["'  a ' | trim", "'xax' | trim('x')", "5 | trim"],
    "truncate": ["text | truncate(9)", "text | truncate(9, true)", "text | truncate(9, true, '!', 0)"],
    "unique": ["numbers | unique | list", "words | unique | list", "people | unique(attribute='age') | list"],
    "upper": ["text | upper", "numbers | upper"],
    "urlencode": ["text | urlencode", "{'a b': 'c&', 'd': 1} | urlencode", "[('a', 'ü')] | urlencode", "5 | urlencode"],
    "urlize": ["text | urlize", "text | urlize(10, true, target='_blank')"],
    "wordcount": ["text | wordcount"],
    "wordwrap": ["text | wordwrap(9)", "text | wordwrap(9, false, '|')"],
    "xmlattr": ["{'a': '<', 'b': none} | xmlattr", "{'a': 1} | xmlattr(false)"],
}
TESTS = {
    "odd": ["3 is odd"],
    "even": ["3 is even"],
    "divisibleby": ["9 is divisibleby 3", "9 is divisibleby(2)"],
    "defined": ["missing is defined", "text is defined"],
    "undefined": ["missing is undefined"],
    "filter": ["'upper' is filter", "'uper' is filter"],
    "test": ["'odd' is test", "'od' is test"],
    "none": ["nothing is none", "missing is none"],
    "boolean": ["true is boolean", "1 is boolean"],
    "false": ["false is false", "0 is false"],
    "true": ["true is true"],
    "integer": ["1 is integer", "true is integer"],
    "float": ["1.5 is float"],
    "lower": ["'a' is lower", "numbers is lower"],
    "upper": ["'A' is upper", "'a' is upper"],
    "string": ["text is string", "numbers is string"],
    "mapping": ["table is mapping", "numbers is mapping"],
    "number": ["1.5 is number", "true is number"],
    "sequence": ["numbers is sequence", "text is sequence", "table is sequence", "(words | map('upper')) is sequence"],
    "iterable": ["numbers is iterable", "1 is iterable", "(words | map('upper')) is iterable"],
    "callable": ["text.upper is callable", "text is callable", "dict is callable", "namespace is callable"],
    "sameas": ["nothing is sameas none", "words is sameas words", "1 is sameas 2"],
    "escaped": ["('<' | e) is escaped", "'<' is escaped"],
    "in": ["1 is in numbers", "'b' is in table", "'x' is in text"],
    "==": ["numbers | select('==', 2) | list"],
    "eq": ["1 is eq 1", "numbers is eq [3, 1, 2, 2]"],
    "equalto": ["1 is equalto(2)"],
    "!=": ["numbers | select('!=', 2) | list"],
    "ne": ["1 is ne 1"],
    ">": ["numbers | select('>', 2) | list"],
    "gt": ["2 is gt 1"],
    "greaterthan": ["2 is greaterthan 1"],
    "ge": ["2 is ge 2"],
    ">=": ["numbers | select('>=', 2) | list"],
    "<": ["numbers | select('<', 2) | list"],
    "lt": ["2 is lt 1"],
    "lessthan": ["'a' is lessthan 'b'"],
    "<=": ["numbers | select('<=', 2) | list"],
    "le": ["2 is le 1"],
}
GLOBALS = {
    "range": ["range(3) | list", "range(1, 9, 3) | list", "range(5) | length", "range(3)[1]", "range(100001)"],
    "dict": ["dict(a=1, b=2)", "dict([('a', 1)], b=2)", "dict({'a': 1})", "dict(words | batch(2))"],
    "lipsum": ["lipsum(n=1, html=false, min=3, max=5)", "lipsum(2)"],
    "cycler": ["cycler('a', 'b').next()", "cycler('a', 'b').current", "cycler(1, 2).items"],
    "joiner": ["joiner()()", "joiner('; ')() ~ 'x'"],
    "namespace": ["namespace(a=1).a", "namespace({'b': 2}).b", "namespace(a=[1], b='x')", "namespace().x is defined"],
}
EXPRESSIONS = [
    "text[::-1][1:3] ~ numbers[-1] ~ numbers[1:] ~ table['b'] ~ table.b ~ nothing",
    "1 < 2 < 3, 1 == 1.0 != 2, 3 in numbers, 9 not in numbers, 'b' in table, not numbers == words",
    "7 // 2, 7 % 3, 7 / 2, 2 ** 10, -7, +7, 1 - 2, 'a' * 3, [1] * 2, [1] + [2], (1,) + (2,), 3 * 'ab'",
    "'%s-%05d-%.2f-%x-%%' % ('a', 42, 1.5, 255), '%(b)s%(b)s' % {'b': 'x'}, '%s' % 'one', '%*d' % (5, 3)",
    "'{} {1}' if false else '{0} {0!r} {a:>5} {b[0]} {c:,.2f}'.format('x', a='y', b=[1], c=1234.5)",
    "'{:{w}}|'.format('x', w=4), '{a}'.format_map({'a': 1}), ('<{}>' | safe).format('<')",
    "{'a': 1, 2: [3], (1, 2): none, true: {}}, [[], [[]]], (), (1,), 'x' if numbers else 'y'",
    "text.split('\\n')[0].strip().upper().startswith('HELLO'), ' '.join(words), ', '.join(words | map('upper'))",
    "table.items() | list, table.keys() | list, table.get('z', 5), table.values() | length, table.copy() == table",
    "words.index('fig'), numbers.count(2), (1, 2).index(2), [1, 2].copy(), {}.fromkeys('ab', 1)",
    "'a'.encode() == 'a'.encode('utf-8'), 'é'.encode('latin-1').decode('latin1'), (5).bit_length(), (1.5).hex()",
    "'a-b'.partition('-'), 'a b'.rsplit(' ', 1), 'x'.center(5, '*'), 'x'.ljust(3), '7'.zfill(3), '\\t'.expandtabs(2)",
    "'abc'.translate({97: 'x'}), 'aXbX'.replace('X', '--', 1), 'abc'.removeprefix('a'), 'a\\nb'.splitlines()",
    "'abcab'.find('b'), 'abcab'.rfind('b'), 'abc'.endswith(('c', 'd')), 'abc'.isalpha(), 'A'.casefold(), 'a b'.title()",
    "range(9).index(3), range(9).count(3), 3 in range(9), range(3) == range(3), (1).to_bytes(2, 'big')",
]
"""Operators, and methods of plain values."""
STATEMENTS = [
    "{% for x in numbers %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}"
    "{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }}{{ loop.revindex }}{{ loop.depth }};"
    "{% endfor %}",
    "{% for k, v in table | dictsort %}{{ k }}={{ v }}{% else %}none{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}{% endif %}"
    "{% endfor %}",
    "{% for x in words | map('upper') if x != 'FIG' %}{{ loop.index }}{{ x }}{% endfor %}",
    "{% set ns = namespace(n=0, l=[]) %}{% for x in numbers %}{% set ns.n = ns.n + x %}{% set ns.l = ns.l + [x] %}"
    "{% endfor %}{{ ns.n }}{{ ns.l }}",
    "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{{ m(1, 2, 3, z=4) }}{% call m(words) %}inside{% endcall %}{{ m.name }}{{ m.arguments }}",
    "{% set x %}a{{ numbers }}{% endset %}{{ x | length }}{% set y | upper %}abc{% endset %}{{ y }}",
    "{% filter upper %}a{{ words }}{% endfilter %}{% with a=1, b=2 %}{{ a }}{{ b }}{% endwith %}",
    "{% block one %}{{ numbers }}{% endblock %}{{ self.one() }}",
    "{% set a, b = 1, [2] %}{{ a }}{{ b }}{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{% for x in numbers %}{{ c.next() }}{% endfor %}{{ c.reset() }}{{ c.current }}",
    "{% set j = joiner(',') %}{% for x in words %}{{ j() }}{{ x }}{% endfor %}",
    "{% set m = words | map('upper') %}{{ m | first }}{{ m | list }}{{ m | list }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}"
    "{% endfor %}",
]
FAILING = [
    "numbers.append(1)",
    "table.update(a=1)",
    "missing.attribute",
    "missing + 1",
    "1 + 'a'",
    "1 // 0",
    "2.0 ** 10000",
    "numbers['a']['b']",
    "text | no_such_test",
    "words | map('no_such') | list",
    "'%d' % 'a'",
    "'{}'.format()",
    "numbers | sort(attribute='a.b')",
    "[1, 'a'] | sort",
    "words | sum",
    "words | batch",
    "''.__class__.__mro__",
    "raise_exception('no')",
    "numbers | tojson | tojson(indent='x', wrong=1)",
    "{} | tojson(separators=3)",
    "[missing] | tojson",
    "(words | map('upper')) | length",
    "{[1]: 2}",
    "'a' | int(base=99) + 'a'",
    "lipsum(min=5, max=3)",
    "dict(1)",
    "namespace(1)",
    "cycler()",
    "range(0, 5, 0)",
    "'a'.encode('no_such')",
    "text()",
    "words | unique(attribute='a') | join(attribute='b.c')",
]


def make_plain() -> ImmutableSandboxedEnvironment:
    """Jinja with what transformers adds to it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise JinjaError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


PLAIN = make_plain()


def check_equal(source: str, messages: Any = (), tools: Any = None, **values: Any) -> None:
    random.seed(7)
    expected = PLAIN.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True, **values)
    random.seed(7)
    assert ChatTemplate(source).render(messages, tools=tools, **values) == expected


def test_every_builtin_of_jinja_is_in_these_tables() -> None:
    assert FILTERS.keys() == DEFAULT_FILTERS.keys()
    assert TESTS.keys() == DEFAULT_TESTS.keys()
    assert GLOBALS.keys() == DEFAULT_NAMESPACE.keys()
    sandbox = TemplateSandbox()
    assert sandbox.filters.keys() == DEFAULT_FILTERS.keys()
    assert sandbox.tests.keys() == DEFAULT_TESTS.keys()


@pytest.mark.parametrize("name", [*FILTERS, *TESTS, *GLOBALS])
def test_a_builtin_gives_what_it_gives_in_plain_jinja(name: str) -> None:
    for expression in (FILTERS | TESTS | GLOBALS)[name]:
        source = "{{ " + expression + " }}"
        try:
            PLAIN.from_string(source).render(**VALUES)
        # A range of more entries than Jinja's sandbox allows.
        except OverflowError:
            with pytest.raises(TemplateError, match="stopped at line 1"):
                ChatTemplate(source).render([], **VALUES)
        else:
            check_equal(source, **VALUES)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_operators_and_methods_give_what_they_give_in_plain_jinja(expression: str) -> None:
    check_equal("{{ (" + expression + ") }}", **VALUES)


@pytest.mark.parametrize("source", STATEMENTS)
def test_statements_give_what_they_give_in_plain_jinja(source: str) -> None:
    check_equal(source, **VALUES)


PRINTED_OBJECTS = (
    "messages | map('upper')",
    "(messages | map('upper')) | title",
    "['a'.upper, {1: cycler(1)}, ('a' | e).upper]",
    "'a'.upper ~ namespace(x=joiner())",
    "'%s' % raise_exception ~ '%s' | format(range) ~ ('%s' | e) % cycler",
    "'{0.upper} {1!r} {1}'.format('a', [lipsum])",
    "'a'.upper | e ~ 'a'.upper | string | upper ~ ['a'.upper] | pprint ~ ['a'.upper] | join",
)


@pytest.mark.parametrize("expression", PRINTED_OBJECTS)
def test_a_printed_object_has_the_same_text_in_every_rendering(expression: str) -> None:
    template = ChatTemplate(f"{{{{ {expression} }}}}")
    found = template.render([])
    assert found and "0x" not in found.lower()
    assert "object" in found.lower() or "function" in found
    assert template.render([]) == found


def test_what_messages_say_of_addresses_stays() -> None:
    text = "<list object at 0x7f96289e4460> at 0x0"
    template = ChatTemplate("{{ messages[0].content }}{{ [messages[0].content, 'a'.upper] }}")
    found = template.render([{"role": "user", "content": text}])
    assert found == f"{text}['{text}', <built-in method upper of str object>]"


@pytest.mark.parametrize("kind", [str, list, tuple, dict, int, float, range])
def test_methods_that_may_be_called_are_listed_for_every_plain_type(kind: type) -> None:
    """A method that Python adds is refused until it is looked at; those that change a value always are."""
    changing = "append clear extend insert pop popitem remove reverse setdefault sort update".split()
    public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    known = methods_of(kind() if kind is not range else range(1)) | methods_of(kind)
    assert public - set(changing) - known == set()


@pytest.mark.parametrize("expression", FAILING)
def test_whatever_goes_wrong_is_an_error_that_names_the_line(expression: str) -> None:
    source = "{% set a = 1 %}\n\n{% if a %}\n{{ " + expression + " }}\n{% endif %}\n"
    with pytest.raises(Exception):  # noqa: B017
        PLAIN.from_string(source).render(messages=[], **VALUES)
    try:
        template = ChatTemplate(source)
        is_fallback = template.is_fallback
    except UserWarning as error:
        assert "at line 4" in str(error)
        return
    assert not is_fallback
    with pytest.raises(TemplateError, match="the chat template stopped at line 4: "):
        template.render([], **VALUES)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "<b>'größe'</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <b>\n"}
ANSWER = {"role": "assistant", "content": "Hello.", "reasoning_content": "hm"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"t": 1}', "tool_call_id": "abcdefghi", "name": "weather"}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "tools": [SYSTEM, USER, CALLING, RESULT, ANSWER, USER],
    "long": [SYSTEM, *[USER, ANSWER] * 100, USER],
}


@pytest.mark.parametrize("family", {**FAMILIES, **PARAMETER_FAMILIES})
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_usual_templates_give_what_they_give_in_plain_jinja_at_little_cost(family: str, conversation: str) -> None:
    source, messages = {**FAMILIES, **PARAMETER_FAMILIES}[family].source, CONVERSATIONS[conversation]
    sandbox = TemplateSandbox()
    ours = sandbox.from_string(source)
    for tools in (None, TOOLS):
        for prompt in (True, False):
            values = {"messages": messages, "tools": tools, "add_generation_prompt": prompt, "bos_token": "<s>"}
            try:
                expected = PLAIN.from_string(source).render(**values, eos_token="</s>")
            except Exception as error:
                with pytest.raises(type(error)):
                    ours.render(**values, eos_token="</s>")
                continue
            sandbox.budget.start()
            assert ours.render(**values, eos_token="</s>") == expected
            assert sandbox.budget.work < MAX_WORK / 50
