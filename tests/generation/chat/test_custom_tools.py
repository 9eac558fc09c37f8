"""Custom tools: what a Lark grammar or a regular expression says of a text holds for it in every format of calls."""

import json
import re
from functools import partial

import pytest

from localinfer.errors import ConstraintError
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.custom_tools import APPLY_PATCH, APPLY_PATCH_ONCE, custom_arguments
from localinfer.generation.chat.messages import Tool, read_tools, written_calls
from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.chat.value_types import parameter_types
from localinfer.generation.stream import joined_calls
from localinfer.models.text.reply_format import HERMES, CallFormat
from tests.engine.fakes import ByteTokenizer
from tests.generation.chat.allowed_replies import allows_reply
from tests.generation.chat.test_parameter_calls import call_format
from tests.models.text.family_templates import PARAMETER_FAMILIES

CODEX = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""As an agent sends it."""
PATCH = (
    '*** Begin Patch\n*** Add File: a/b "c".py\n+x = "\\n"\t1\n+\n*** Update File: z\n@@ def f():\n a\n-b\n+ü\n'
    "*** End of File\n*** Delete File: q\n*** End Patch"
)
WRONG_PATCHES = (PATCH.replace("+\n", "x\n"), PATCH[:-3], PATCH.replace("Begin", "begin"), PATCH + "\n\n", "")
SUMS = r"""
?start: sum  // a comment
?sum.2: product | sum "+" product -> add
product: atom ("*" atom)*
atom: NUMBER | NAME | "(" sum ")" | "\"" /[^"]*/ "\"" | "let"i _END
_END.1: ";" | "\n"
NAME: LETTER ("a".."f" | "_" | /\d/)~0..3
%import common (NUMBER, LETTER)
%import common.WS_INLINE -> BLANK
%ignore BLANK
"""
CASES = [
    (CODEX, (PATCH, PATCH + "\n"), WRONG_PATCHES),
    (APPLY_PATCH, (PATCH, PATCH + "\n"), (*WRONG_PATCHES, PATCH.replace("-b\n+ü\n", " b\n"))),
    (SUMS, ('1 + (xab*2.5)+"a\n\\"', "LET ;", "let\n*7", "x1"), ("1 +", "(1", "xg", "1\n", '"a', "xabcd")),
    (r'start: a b*%s a: "x"i~2..3 %s b: /[a-c\n]+/ ";" %s %%ignore " "' % (("\n",) * 3), (" xX a\n ; c; ",), ("x",)),
    ("start: [A] B{2} | A\nA: /é+/\nB: /[^ab]/s", ("é", "é\n\\", '"\x01'), ("ab", "", "aé")),
]
EXPRESSIONS = {
    r"[a-c]+\n?": ("a", "cab\n", "\n", "ad"),
    r"^(?:ab|[^b\s\"])*\\$": ("ab\\", "\\", 'a"\\', "a", "c/\\", "b\\"),
    r"(?i)select\s(?-i:x)": ("SeLect\tx", "select\nx", "select X", "selectx"),
    r"a.b|(?s:c.)d{2}": ('a"b', "a\nb", "c\ndd", "c\\dd", "cd"),
    r"[\x00-\x1f\u00e9\]-]{1,2}\p{Lu}?\W": ("\x00\t!", "éÉ-", "--.", "a!", "\n\n"),
    r"(?P<n>\w+)=\d*": ("a_1=", "=2", "é=34", "a=x"),
}


def custom(syntax: str, definition: str) -> tuple[Tool, ...]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return read_tools([{"type": "custom", "name": "f", "format": form}])


@pytest.fixture(scope="module")
def formats() -> dict[str, CallFormat]:
    return {"hermes": HERMES, **{name: call_format(name) for name in PARAMETER_FAMILIES}}


@pytest.fixture(scope="module")
def allows() -> "partial[bool]":
    compiler = ConstraintCompiler(ByteTokenizer(), 260)

    def check(form: CallFormat, tools: tuple[Tool, ...], text: str) -> bool:
        arguments = json.loads(custom_arguments(text))
        call = {"id": "abcdefghi", "function": {"name": "f", "arguments": arguments}}
        written = written_calls([call], form)
        allowed = allows_reply(compiler, (form, None), tools, written, state="none", must_call=True)
        if allowed:
            parser = ReplyParser(None, form, types={"f": parameter_types(tools[0])}, new_id=lambda: "abcdefghi")
            made = [parser.push(letter) for letter in written] + [parser.flush()]
            (read,) = joined_calls(delta for one in made for delta in one.tool_calls)
            assert json.loads(read.arguments) == arguments
        return allowed

    return check


@pytest.mark.parametrize("number", range(len(CASES)))
def test_lark_grammar_holds_in_every_format_of_calls(allows, formats, number):
    grammar, right, wrong = CASES[number]
    tools = custom("lark", grammar)
    for name, form in formats.items():
        for text in right:
            assert allows(form, tools, text), (name, text)
        for text in wrong:
            assert not allows(form, tools, text), (name, text)


def test_regular_expression_means_what_python_means_by_it(allows, formats):
    for pattern, texts in EXPRESSIONS.items():
        tools = custom("regex", pattern)
        for text in texts:
            wanted = re.fullmatch(pattern.replace(r"\p{Lu}", "[A-ZÉ]"), text) is not None
            for name in ("hermes", "qwen-coder"):
                assert allows(formats[name], tools, text) == wanted, (pattern, name, text)


def test_patch_of_one_file_has_one_and_moves_none(allows):
    tools = custom("lark", APPLY_PATCH_ONCE)
    begin, end = "*** Begin Patch\n", "*** End Patch"
    update = "*** Update File: a\n@@\n-b\n+c\n"
    assert allows(HERMES, tools, begin + update + end)
    assert allows(HERMES, tools, f"{begin}*** Delete File: a b{chr(10)}{end}")
    for inner in ("", update * 2, update.replace("@@", "*** Move to: c\n@@"), update.replace(" a", "  a")):
        assert not allows(HERMES, tools, begin + inner + end), inner


def test_terminals_that_use_others_twice_take_no_longer_for_it():
    """Each of sixty doublings would otherwise double the work."""
    doubled = "".join(f"A{index}: A{index + 1} A{index + 1}\n" for index in range(60)) + "A60: /[^a]*/\n"
    tools = custom("lark", f'start: s | e\ne: e "x"\ns: A0\n{doubled}')
    assert tools[0].form is not None and len(tools[0].form.definition) < 2_000


@pytest.mark.parametrize(
    ("syntax", "definition", "found"),
    [
        ("lark", 'start: a\na: "x" /b(?=c)/', r"rule 'a', line 2, has '/b\(\?=c\)/'.*looks ahead"),
        ("lark", "start: /a*?/", "rule 'start', line 1.*lazy quantifier"),
        ("lark", "start: b\n\nb{x}: x", "line 3.*template"),
        ("lark", "start: missing", "rule 'start', line 1, uses 'missing', which no rule defines"),
        ("lark", 'first: "a"', "no rule 'start'"),
        ("lark", "%declare X\nstart: X", "line 1, has '%declare'"),
        ("lark", "%import .other.X\nstart: X", "imports from '.'"),
        ("lark", "%import common.XML\nstart: XML", "imports common.XML"),
        ("lark", 'start: "a"\nstart: "b"', "line 2, defines a name that was defined before"),
        ("lark", "start: <[0]>", "line 1, has '<"),
        ("lark", 'start: %json {"type": "object"}', "rule 'start', line 1, has '%json'"),
        ("lark", "start: @other", "line 1, has '@other'"),
        ("lark", 'start: A\nA: "x" a\na: "y"', "is a terminal that uses the rule 'a'"),
        ("lark", 'start: A\nA: "x" A?', "'A' contains itself"),
        ("lark", "start: (a", "nothing closes"),
        ("lark", 'start: "a"~1..100000', "repeats a part"),
        ("lark", "start: " + "(" * 200 + '"a"' + ")" * 200, "nested more than"),
        ("lark", 'start: "\\d"', r"has \\d in a text"),
        ("lark", "start: /a/l", "flag 'l'"),
        ("lark", "start: /[[:alpha:]]/", "within a class"),
        ("lark", "start: /a\\b/", r"has \\b, which is not supported"),
        ("lark", "start: " + "x " * (1 << 16), "characters; wanted at most"),
        ("lark", "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(900)) + "a900: /x/", "too deeply"),
        ("lark", "start: a0\n" + "".join(f"a{i}: /x/\n" for i in range(2001)), "wanted at most 2000"),
        ("regex", "a(?!b)", "looks ahead"),
        ("regex", "a{1,99999}", "repeats a part"),
        ("regex", "(a", "nothing closes"),
        ("other", "a", "name lark or regex"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_rule_and_line(syntax, definition, found):
    with pytest.raises(ConstraintError, match=found) as caught:
        custom(syntax, definition)
    assert "\n" not in str(caught.value)
    assert caught.value.field.startswith("tools[0].format")
