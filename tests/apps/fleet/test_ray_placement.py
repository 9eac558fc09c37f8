"""The replica of a prompt, the comparison of prefixes, and the cost of a choice."""

import json

import pytest

from localinfer.apps.fleet.placement import Placement, PrefixTable, PromptFacts, prompt_facts

SYSTEM = "You are kind, and you say so in many words. " * 8


def facts(*texts: str, salt: str = "", **more: object) -> PromptFacts:
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return prompt_facts(json.dumps({"messages": messages, **more}).encode(), salt)


def chat(*texts: str, salt: str = "", **more: object) -> tuple[int, ...]:
    return facts(*texts, salt=salt, **more).prefixes


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def placement(*names: str, places: int = 16) -> Placement:
    made = Placement(places)
    made.set_replicas(names)
    return made


def test_prompts_share_as_many_numbers_as_their_texts_begin_alike():
    first, second = chat("One. " * 60), chat("Two. " * 60)
    assert 4 <= shared(first, second) < len(first) - 2
    longer = chat("One. " * 60, "Yes. " * 40, "Go on.")
    assert shared(first, longer) >= len(first) - 1
    assert shared(first, chat("One. " * 60, cache_salt="mine")) == 0
    assert shared(first, chat("One. " * 60, temperature=0.5)) == len(first)


def test_the_same_prompt_of_another_client_shares_no_number_where_clients_are_kept_apart():
    assert shared(chat("One. " * 60, salt="name a"), chat("One. " * 60, salt="name b")) == 0
    assert not set(chat("One. " * 60, salt="name a")) & set(chat("One. " * 60, salt="name b"))
    assert chat("One. " * 60, salt="name a") == chat("One. " * 60, salt="name a")


def test_members_in_another_order_are_the_same_prompt():
    one = prompt_facts(b'{"messages":[{"role":"user","content":"%b"}],"model":"m"}' % (b"a" * 200))
    assert one == prompt_facts(b'{"model":"m","messages":[{"content":"%b","role":"user"}]}' % (b"a" * 200))
    assert one.prefixes


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"a": 1}', b"\xff{", b"[" * 5000])
def test_what_has_no_prompt_has_no_prefixes(body):
    assert prompt_facts(body) == PromptFacts()


@pytest.mark.parametrize(
    ("members", "num_texts", "priority"),
    [
        ({"prompt": "a", "n": 3}, 3, None),
        ({"prompt": ["a", "b"], "n": 2, "priority": -4}, 4, -4),
        ({"prompt": [1, 2, 3]}, 1, None),
        ({"prompt": [[1, 2], [3]], "best_of": 5, "n": 2}, 10, None),
        ({"prompt": "a", "n_cmpl": 2, "options": {"priority": 7}}, 2, 7),
        ({"prompt": "a", "n": -1, "priority": "x"}, 1, None),
    ],
)
def test_texts_and_priority_of_a_request(members, num_texts, priority):
    found = prompt_facts(json.dumps(members).encode())
    assert (found.num_texts, found.priority) == (num_texts, priority)


def test_conversation_goes_on_where_it_began_and_others_are_spread():
    made = placement("a", "b")
    first, other = tuple(range(40)), tuple(range(100, 140))
    made.table.note("a", first)
    assert made.choose(other) == "b"
    made.table.note("b", other)
    assert made.choose((*first, 50, 51)) == "a"
    assert made.choose((*other, 50, 51)) == "b"


def test_match_that_is_short_does_not_wait_behind_a_long_queue():
    made = placement("a", "b")
    made.begin("a", tuple(range(40)), 4, 0)
    assert made.choose(tuple(range(40))) == "a"
    made.change("a", 2, 0)
    assert made.choose(tuple(range(40))) == "b"


def test_a_full_replica_is_given_more_urgent_texts_only_up_to_the_most():
    made = Placement(2, most=3)
    made.set_replicas(["a"])
    made.begin("a", (), 2, 5)
    assert made.choose((), 5) is made.choose((), 6) is None
    assert made.choose((), 4) == "a"
    made.begin("a", (), 1, 4)
    assert made.choose((), 4) is None
    made.change("a", -1, 5)
    # Its engine has taken a place from one of the less urgent.
    assert made.choose((), 5) is None
    assert made.choose((), 4) == "a"
    assert made.choose((), 5, waits=False) == "a"


def test_suspects_and_lost_replicas_are_left_out_while_there_are_others():
    made = placement("a", "b")
    made.begin("a", tuple(range(40)), 0, 0)
    made.suspect("a", True)
    assert made.choose(tuple(range(40))) == "b"
    assert made.choose(tuple(range(40)), without="b", waits=False) == "a"
    made.suspect("a", False)
    assert made.choose(tuple(range(40))) == "a"
    assert made.choose(tuple(range(40)), without="a") == "b"
    assert placement().choose((1, 2)) is None


def test_replica_that_is_gone_is_forgotten():
    made = placement("a", "b")
    made.table.note("a", (1, 2, 3))
    made.set_replicas(["b"])
    assert made.table.matches((1, 2, 3)) == {}
    assert made.table.size("a") == 0


def test_ends_of_prompts_are_forgotten_before_their_beginnings():
    table = PrefixTable(most=4)
    table.note("a", (1, 2, 3))
    table.note("a", (1, 2, 9))
    table.note("a", (1, 2, 8))
    assert table.matches((1, 2, 8)) == {"a": 3}
    assert table.matches((1, 2, 3)) == {"a": 2}
    assert table.size("a") == len(table) == 4


def test_a_beginning_names_few_replicas_and_one_bound_holds_for_all_of_them():
    table = PrefixTable(most=100)
    for number in range(50):
        table.note(f"r{number}", (1, 2, *range(1000 * number, 1000 * number + 10)))
    assert len(table) == 100
    assert sum(table.size(f"r{number}") for number in range(50)) <= 4 * 100
    matches = table.matches((1, 2, 49_000))
    assert matches.pop("r49") == 3
    assert set(matches.values()) == {2} and len(matches) <= 3


@pytest.mark.parametrize("replicas", [10, 100, 1_000])
@pytest.mark.parametrize("blocks", [181, 2_699])
def test_a_choice_costs_as_much_as_its_prompt_is_long_however_many_replicas_there_are(replicas, blocks):
    names = [f"r{number}" for number in range(replicas)]
    made = placement(*names)
    begins = tuple(range(blocks - 20))
    for number, name in enumerate(names):
        made.table.note(name, (*begins, *range(10**6 + 100 * number, 10**6 + 100 * number + 20)))
    made.table.num_looked_up = made.num_compared = 0
    prompt = (*begins, *range(10**6 + 700, 10**6 + 720))
    assert made.choose(prompt) == "r7"
    assert made.table.num_looked_up <= 2 * blocks
    assert made.num_compared <= 16
    assert made.choose((-1, -2)) in names
    assert made.table.num_looked_up <= 2 * blocks + 1
