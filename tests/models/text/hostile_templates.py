"""Chat templates that ask for more than a rendering may cost, by the way in which they do it."""

GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x | length }}"
)
"""Makes a value from a first one, again and again."""

# Lists, tuples and dicts in which each level holds the one before twice.
_SHARING = {
    "list": ("[1]", "[ns.x, ns.x]"),
    "tuple": ("(1,)", "(ns.x, ns.x)"),
    "dict": ("{'a': 1}", "{'a': ns.x, 'b': ns.x}"),
    "list by plus": ("[1]", "[ns.x] + [ns.x]"),
    "list by times": ("[1]", "[ns.x] * 2"),
    "list by dict()": ("[1]", "dict(a=ns.x, b=ns.x)"),
    "list by batch": ("[1]", "[ns.x, ns.x] | batch(2) | list"),
    "list by items": ("{'a': 1}", "{'a': ns.x.items() | list, 'b': ns.x.items() | list}"),
    "list by map": ("[1]", "[ns.x, ns.x] | map('list') | list"),
    "list by split": ("'a'", "[ns.x, 'a b'.split(), ns.x]"),
    "list by fromkeys": ("[1]", "{}.fromkeys('ab', ns.x)"),
}
_USES = {
    "equal": "{{ v == w }}",
    "less": "{{ v < w }}",
    "in": "{{ v in [w, w] }}",
    "is eq": "{{ v is eq w }}",
    "is in": "{{ v is in [w] }}",
    "is lower": "{{ v is lower }}",
    "output": "{{ v }}",
    "concatenation": "{{ 'a' ~ v }}",
    "tojson": "{{ v | tojson }}",
    "tojson with indent": "{{ v | tojson(indent=100) }}",
    "unique": "{{ [v, w] | unique | list | length }}",
    "key": "{{ {v: 1} | length }}",
    "look-up": "{{ {}[v] }}",
    "get": "{{ {}.get(v) }}",
    "index": "{{ [w].index(v) }}",
    "count": "{{ [w].count(v) }}",
    "join": "{{ [v, v] | join(',') }}",
    "string": "{{ v | string | length }}",
    "upper": "{{ v | upper | length }}",
    "replace": "{{ v | replace('1', '22') | length }}",
    "escape": "{{ v | e | length }}",
    "urlencode": "{{ {'a': v} | urlencode | length }}",
    "pprint": "{{ v | pprint | length }}",
    "sort": "{{ [v, w, v, w] | sort | length }}",
    "max": "{{ [v, w, v, w] | max | length }}",
    "groupby": "{{ [{'k': v}, {'k': w}] | groupby('k') | length }}",
    "percent s": "{{ ('%s' % (v,)) | length }}",
    "percent r": "{{ ('%r' % [v]) | length }}",
    "format": "{{ '{}'.format(v) | length }}",
    "format r": "{{ '{!r}'.format(v) | length }}",
    "format filter": "{{ '%s' | format(v) | length }}",
    "map string": "{{ [v] | map('string') | list | length }}",
    "select": "{{ [v, v] | select('eq', w) | list | length }}",
    "changed": "{% for i in [1, 2] %}{{ loop.changed(v) }}{% endfor %}",
    "namespace": "{{ namespace(a=v, b=v) }}",
    "raise": "{{ raise_exception(v) }}",
    "macro": "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(v) }}",
    "undefined": "{{ {}[v].a }}",
}
_TWO = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(%d) %%}{%% set ns.x = %s %%}{%% endfor %%}{%% set v = ns.x %%}"
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(%d) %%}{%% set ns.x = %s %%}{%% endfor %%}{%% set w = ns.x %%}"
)


def _sharing(levels: int, kind: str) -> str:
    first, step = _SHARING[kind]
    return _TWO % (first, levels, step, first, levels, step)


SHARED = {
    f"{kind} of 60 levels, {use}": _sharing(60, kind) + source
    for kind in _SHARING
    for use, source in _USES.items()
    if kind in ("list", "tuple", "dict") or use in ("equal", "output")
}
"""Values that share their parts: small in memory, too large for whatever goes through all of them."""

_AS_KEYS = ("get", "key", "look-up", "unique", "undefined")
REPEATED = {
    f"a million, {use}, a thousand times": "".join(
        (_sharing(18, "tuple" if use in _AS_KEYS else "list"), "{% for i in range(1000) %}", source, "{% endfor %}")
    )
    for use, source in _USES.items()
    if use not in ("urlencode", "raise")
}
"""What costs milliseconds, many times."""

TEXT = {
    "times": "{{ 'x' * 10**9 }}",
    "times list": "{{ ([1] * 10**9) | length }}",
    "times from the left": "{{ 10**9 * 'x' }}",
    "times of a long text in lists": "{% set x = 'x' * 10**6 %}{{ [x] * 10**6 }}",
    "doubling by plus": GROW % ("'x'", "ns.x + ns.x"),
    "doubling by tilde": GROW % ("'x'", "ns.x ~ ns.x"),
    "doubling lists": GROW % ("[1]", "ns.x + ns.x"),
    "doubling tuples": GROW % ("(1,)", "ns.x * 2"),
    "growing by macros": "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}" + GROW % ("'aa'", "m(ns.x)"),
    "growing by blocks": "{% set x = 'x' * 10**6 %}{% set y %}"
    "{% for i in range(90000) %}{{ x }}{% endfor %}{% endset %}{{ y }}",
    "growing by replace": GROW % ("'aa'", "ns.x.replace('a', ns.x)"),
    "growing by the replace filter": GROW % ("'aa'", "ns.x | replace('a', ns.x)"),
    "growing by join": GROW % ("'aa'", "ns.x.join(ns.x | list)"),
    "growing by the join filter": GROW % ("'aa'", "[ns.x, ns.x] | join(ns.x)"),
    "growing by format": GROW % ("'aa'", "'%s%s%s%s' % (ns.x, ns.x, ns.x, ns.x)"),
    "growing by translate": GROW % ("'aa'", "ns.x.translate({97: ns.x})"),
    "growing by escapes": GROW % ("'&' * 9", "(ns.x ~ ns.x) | forceescape"),
    "growing by safe text": GROW % ("'&' * 9", "('%s%s' | safe) % (ns.x, ns.x ~ '')"),
    "growing by repeated replace": GROW % ("'aa'", "ns.x.replace('', 'aa')"),
    "keeping slices": "{% set x = 'x' * 10**6 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(90000) %}{% set ns.l = ns.l + [x[i:]] %}{% endfor %}",
    "keeping lists": "{% set ns = namespace(l=[]) %}"
    "{% for i in range(90000) %}{% set ns.l = ns.l + [range(90000) | list] %}{% endfor %}",
    "join filter": "{{ range(90000) | join('x' * 10**6) }}",
    "join method": "{{ ('x' * 10**6).join('y' * 90000) }}",
    "join of one text": "{% set x = 'x' * 4000 %}{{ ''.join([x] * 900000) }}",
    "join of lists": "{% set x = ['x' * 4000] * 900 %}{{ [x] * 900 | join }}",
    "named format": "{{ ('%(a)s' * 3000) % {'a': 'x' * 4000000} }}",
    "named format with a width": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "one format many times": "{{ ('%s' * 3000) % (('x' * 1000000,) * 3000) }}",
    "numbered format": "{{ ('{0}' * 3000).format('x' * 4000000) }}",
    "mapped format": "{{ ('{a}' * 3000).format_map({'a': 'x' * 4000000}) }}",
    "format of escapes": "{{ ('{0!r}' * 3000).format('\\n' * 4000000) }}",
    "format filter many times": "{{ ('%s' * 3000) | format(*(('x' * 1000000,) * 3000)) }}",
    "wide method": "{{ 'x'.center(500000000) }}",
    "wide center": "{{ 'x' | center(500000000) }}",
    "wide zeros": "{{ '1'.zfill(500000000) }}",
    "wide tabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "wide percent format": "{{ '%1000000000d' % 1 }}",
    "wide precision": "{{ '%.1000000000f' % 1.5 }}",
    "wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "wide format method": "{{ '{:>1000000000}'.format('x') }}",
    "computed width": "{{ '{:>{}}'.format('x', 1000000000) }}",
    "wide indent": "{{ 'x\\ny' | indent(1000000000) }}",
    "wide indent of many lines": "{{ ('\\n' * 100000) | indent(100000, blank=true) }}",
    "indent by a text": "{{ ('\\n' * 100000) | indent('x' * 100000, blank=true) }}",
    "wide wrap": "{{ ('x ' * 10000) | wordwrap(1, wrapstring='x' * 1000000) }}",
    "wide batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "wide slice": "{{ [1] | slice(1000000000) | list }}",
    "wide json": "{{ [1] | tojson(indent=1000000000) }}",
    "json with wide separators": "{{ range(90000) | list | tojson(separators=('x' * 100000, '')) }}",
    "wide time": "{{ strftime_now('%1000000000d') }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "long lorem ipsum": "{{ lipsum(n=1, min=10**9, max=10**9 + 1) }}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "letters": "{{ ('\\u3042' * 4000000) | list | length }}",
    "words": "{{ ('a ' * 2000000).split() | length }}",
    "pieces": "{{ ('a,' * 2000000).split(',') | length }}",
    "lines": "{{ ('a\\n' * 2000000).splitlines() | length }}",
    "long output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "sum of lists": "{{ ([[1] * 1000] * 99999) | sum(start=[]) | length }}",
    "long range": "{{ range(10**9) | list }}",
    "many ranges": GROW.replace("99", "9999") % ("[]", "ns.x + [range(99999) | list]"),
    "many keys": GROW.replace("99", "9999") % ("{}", "{}.fromkeys(range(99999), ns.x)"),
    "dictionary arguments": "{% set d = {}.fromkeys('ab' * 1000000, 1) %}{% set l = [d] * 100000 %}{{ l ~ l ~ l }}",
    "cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{% for j in c.items %}{% endfor %}"
    "{% endfor %}",
}
"""Texts and lists that grow past all bounds."""

TIME = {
    "power": GROW % ("9", "ns.x ** ns.x"),
    "power of powers": "{{ 10 ** (10 ** 10) }}",
    "power in a list": "{{ [2 ** (10 ** 9)] | length }}",
    "squares": GROW % ("9", "ns.x * ns.x"),
    "a long number": "{{ ('f' * 4000000) | int(base=16) % 7 }}",
    "a number from bytes": "{{ (0).from_bytes(('x' * 4000000).encode(), 'big') // 3 }}",
    "a number from bits": "{{ (1.5).fromhex('0x' ~ '1' * 4000000) }}",
    "rounding": "{{ 5 | round(-1000000000) }}",
    "rounding up": "{{ 5 | round(1000000000, 'ceil') }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested maps": "{% for a in range(99999) %}{% set b = range(99999) | map('string') | list %}{% endfor %}",
    "nested tests": "{% for a in range(99999) %}{{ range(99999) | select('none') | first }}{% endfor %}",
    "nested attributes": "{% for a in range(99999) %}{{ range(99999) | map(attribute='a.b.c') | first }}{% endfor %}",
    "long attribute": "{{ ([{}] * 99999) | map(attribute='a.' * 1000000) | list }}",
    "loops over a list": "{% set r = range(9999) | list %}"
    "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "loops over a text": "{% for a in 'x' * 4000000 %}{% for b in 'x' * 4000000 %}{% endfor %}{% endfor %}",
    "loops in a loop that calls itself": "{% set r = range(9999) | list %}{% for a in r %}"
    "{% for b in [r] recursive %}{% if b is iterable %}{{ loop(b) }}{% endif %}{% endfor %}{% endfor %}",
    "search from the right": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}",
    "split from the right": "{{ ('a' * 4000000).rsplit('b' ~ 'a' * 2000000) }}",
    "part from the right": "{{ ('a' * 4000000).rpartition('b' ~ 'a' * 2000000) }}",
    "search many times": "{% set x = 'a' * 4000000 %}{% for i in range(99999) %}{{ x.find('b' * 3) }}{% endfor %}",
    "in many times": "{% set x = 'a' * 4000000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "in a list many times": "{% set x = range(99999) | list %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "equal texts many times": "{% set x = 'a' * 4000000 %}{% set y = 'a' * 4000000 %}"
    "{% for i in range(99999) %}{{ x == y }}{% endfor %}",
    "equal values with one hash": "{{ range(0, 2305843009213693951 * 90000, 2305843009213693951) | unique | list }}",
    "keys with one hash": "{{ {}.fromkeys(range(0, 2305843009213693951 * 90000, 2305843009213693951)) }}",
    "dict with one hash": "{% set r = range(0, 2305843009213693951 * 90000, 2305843009213693951) %}"
    "{{ dict(r | batch(2)) }}",
    "strip of many letters": "{{ ('a' * 4000000).strip(('b' * 2000000) ~ 'a') }}",
    "punycode": "{{ ('\\xe9' * 1000000).encode('punycode') }}",
    "idna": "{{ ('\\xe9' * 1000000).encode('idna') }}",
    "tags": "{{ ('<' * 4000000) | striptags }}",
    "comments": "{{ ('<!--' * 1000000) | striptags }}",
    "links": "{{ ('http://a.' * 400000) | urlize }}",
    "titles": "{{ ('a ' * 2000000) | title }}",
    "macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "caller that calls itself": "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}"
    "{% endcall %}{% endmacro %}{{ g() }}",
    "loop that calls itself": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "loop that calls itself twice": "{% for a in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1]) }}{{ loop([1]) }}"
    "{% endif %}{% endfor %}",
    "block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "namespaces in namespaces": "{% set ns = namespace(n=namespace(a=1)) %}{% for i in range(60) %}"
    "{% set ns.n = namespace(a=ns.n, b=ns.n) %}{% endfor %}{{ ns }}",
    "nesting without end": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}"
    "{% endfor %}{{ ns.l == ns.l }}",
    "iterators of iterators": "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l | map('string') %}{% endfor %}{{ ns.l | list }}",
}
"""Steps without end, and single ones that take long."""

_NAMES = 3000
COMPILED = {
    "folded text": "{{ 'a' * 10**9 }}",
    "folded power": "{{ 10 ** (10 ** 10) }}",
    "folded filter": "{{ 'a' | center(10**9) }}",
    "folded output": "{{ ('a' * 4000000) | replace('a', 'a' * 4000000) }}",
    "folded comparison": "{{ [range(99999) | list] * 9999 == 1 }}",
    "parentheses": "{{ " + "(" * 60_000 + "1" + ")" * 60_000 + " }}",
    "lists": "{{ " + "[" * 60_000 + "1" + "]" * 60_000 + " }}",
    "signs": "{{ " + "- " * 60_000 + "1 }}",
    "sums": "{{ 1" + "+1" * 25_000 + " }}",
    "attributes": "{{ a" + ".a" * 25_000 + " }}",
    "conditions": "{{ 1" + " if 1 else 1" * 10_000 + " }}",
    "branches": "{% if a %}" + "{% elif a %}" * 9_000 + "{% endif %}",
    "branches in branches": "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
    "loops in loops": "{% for a in a %}" * 4_000 + "{% endfor %}" * 4_000,
    "macros in macros": "{% macro a() %}" * 4_000 + "{% endmacro %}" * 4_000,
    "calls in calls": "{% call a() %}" * 4_000 + "{% endcall %}" * 4_000,
    "names and branches": "".join(f"{{%set a{i}=1%}}" for i in range(_NAMES)) + "{%if a%}{%endif%}" * _NAMES,
    "names and includes": "".join(f"{{%set a{i}=1%}}" for i in range(_NAMES)) + "{%include a%}" * _NAMES,
    "names and blocks": "".join(f"{{%set a{i}=1%}}{{%block b{i} scoped%}}{{%endblock%}}" for i in range(_NAMES)),
    "arguments": "{{ f(" + "a," * 8_000 + ") }}",
    "digits": "{{ " + "9" * 100_000 + " }}",
    "megabytes": "x" * (3 << 20),
    "include": "{% include 'a' %}",
    "import": "{% import 'a' as a %}",
    "extends": "{% extends 'a' %}",
}
"""Sources that cost much before anything is rendered, or that reach for other files."""
