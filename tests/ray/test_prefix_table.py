"""Which replica a prompt is sent to, and how beginnings of prompts are compared."""

import json

from localinfer.ray.prefix_table import PrefixTable
from localinfer.ray.prompt_prefix import prompt_prefixes
from localinfer.ray.replica_metrics import merged_metrics

SYSTEM = "You are kind, and you say so in many words. " * 8
IDLE = {"a": 0, "b": 0}


def chat(*texts: str, **more: object) -> tuple[int, ...]:
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return prompt_prefixes(json.dumps({"messages": messages, **more}).encode())


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def test_prompts_share_as_many_numbers_as_their_texts_begin_alike():
    first, second = chat("One. " * 60), chat("Two. " * 60)
    assert 4 <= shared(first, second) < len(first) - 2
    longer = chat("One. " * 60, "Yes. " * 40, "Go on.")
    assert shared(first, longer) >= len(first) - 1
    assert shared(first, chat("One. " * 60, cache_salt="mine")) == 0
    assert shared(first, chat("One. " * 60, temperature=0.5)) == len(first)


def test_members_in_another_order_are_the_same_prompt():
    one = prompt_prefixes(b'{"messages":[{"role":"user","content":"%b"}],"model":"m"}' % (b"a" * 200))
    assert one == prompt_prefixes(b'{"model":"m","messages":[{"content":"%b","role":"user"}]}' % (b"a" * 200))
    assert one


def test_what_has_no_prompt_has_no_prefixes():
    assert (
        prompt_prefixes(b"")
        == prompt_prefixes(b"[1]")
        == prompt_prefixes(b'{"a": 1}')
        == prompt_prefixes(b"\xff{")
        == ()
    )


def test_conversation_goes_on_where_it_began_and_others_are_spread():
    table = PrefixTable()
    first, other = tuple(range(40)), tuple(range(100, 140))
    table.note("a", first)
    assert table.ranked(other, IDLE)[0] == "b"
    table.note("b", other)
    assert table.ranked((*first, 50, 51), IDLE)[0] == "a"
    assert table.ranked((*other, 50, 51), IDLE)[0] == "b"


def test_match_that_is_short_does_not_wait_behind_a_long_queue():
    table = PrefixTable()
    table.note("a", tuple(range(40)))
    assert table.ranked(tuple(range(40)), {"a": 4, "b": 0})[0] == "a"
    assert table.ranked(tuple(range(40)), {"a": 6, "b": 0})[0] == "b"


def test_replica_that_is_gone_is_forgotten():
    table = PrefixTable()
    table.note("a", (1, 2, 3))
    table.keep_only(["b"])
    assert table.matched("a", (1, 2, 3)) == 0


def test_ends_of_prompts_are_forgotten_before_their_beginnings():
    table = PrefixTable(most=4)
    table.note("a", (1, 2, 3))
    table.note("a", (1, 2, 9))
    table.note("a", (1, 2, 8))
    assert table.matched("a", (1, 2, 8)) == 3
    assert table.matched("a", (1, 2, 3)) == 2


def test_metrics_of_several_replicas_are_one_text_with_each_family_once():
    text = '# HELP a Of a.\n# TYPE a counter\na{x="1"} 2.0\na_created 5.0\n# HELP b Of b.\n# TYPE b gauge\nb 3.0\n'
    merged = merged_metrics({"r1": text, "r2": text}).splitlines()
    assert merged.count("# TYPE a counter") == 1
    assert 'a{replica="r1",x="1"} 2.0' in merged
    assert 'b{replica="r2"} 3.0' in merged
    assert merged.index('a{replica="r2",x="1"} 2.0') < merged.index("# HELP b Of b.")
