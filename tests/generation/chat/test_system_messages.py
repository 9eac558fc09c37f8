"""System messages in the midst of a chat, and several at its start: every template answers, and no text is lost."""

from typing import Any

import pytest

from localinfer.generation.chat.messages import has_late_system, placed_system

Turns = list[tuple[str, str]]


def messages(turns: Turns) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


def placed(turns: Turns, *, takes_one: bool) -> Turns:
    return [(message["role"], message["content"]) for message in placed_system(messages(turns), takes_one=takes_one)]


CHAT: Turns = [
    ("system", "Be brief."),
    ("developer", "Be kind."),
    ("user", "Hi"),
    ("system", "Skills: none."),
    ("assistant", "Look."),
    ("tool", "42"),
    ("system", "Agents: none."),
    ("assistant", "Done."),
    ("user", "Go"),
]


def test_system_messages_stand_where_a_template_takes_them():
    assert placed(CHAT, takes_one=True) == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "Hi\n\nSkills: none."),
        ("assistant", "Look."),
        ("tool", "42"),
        ("user", "Agents: none."),
        ("assistant", "Done."),
        ("user", "Go"),
    ]
    assert placed(CHAT, takes_one=False)[:2] == [
        ("user", "Be brief.\n\nBe kind.\n\nHi\n\nSkills: none."),
        ("assistant", "Look."),
    ]


def test_roles_alternate_where_system_messages_stood_between():
    turns: Turns = [("user", "Hi"), ("assistant", "Yes?"), ("system", "It is late."), ("user", "Go")]
    assert placed(turns, takes_one=True) == [("user", "Hi"), ("assistant", "Yes?"), ("user", "It is late.\n\nGo")]


@pytest.mark.parametrize("takes_one", [True, False])
def test_a_chat_that_goes_on_begins_with_what_it_was(takes_one: bool):
    for count in range(5, len(CHAT) + 1):
        whole = placed(CHAT, takes_one=takes_one)
        assert (
            whole[: len(placed(CHAT[:count], takes_one=takes_one)) - 1]
            == placed(CHAT[:count], takes_one=takes_one)[:-1]
        )


def test_late_ones_are_those_behind_another_message():
    assert has_late_system(messages(CHAT[:2])) and has_late_system(messages(CHAT[2:4]))
    assert not has_late_system(messages(CHAT[:1])) and not has_late_system(messages(CHAT[4:6]))
