"""Lines of system messages that vary: found by comparison, and moved by one rule, so that texts repeat."""

from typing import Any

from localinfer.generation.chat_model import BILLING_HEADER, NOTE, SystemPromptDrift

RULES = "\n".join(f"Rule {number}: keep to what rule {number} of the whole list says." for number in range(20))


def head(*, date: str = "Monday", listing: str = "a.txt", billing: str | None = None) -> str:
    lines = [f"Today is {date}.", RULES, f"Files: {listing}", "Be brief."]
    return "\n".join(lines if billing is None else [f"{BILLING_HEADER} {billing}", *lines])


def chat(system: str | None, *texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def arranged(heads: SystemPromptDrift, messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    made = heads.arrange(messages, heads.observe(messages))
    return [(message["role"], message["content"]) for message in made]


def test_lines_vary_where_earlier_requests_share_the_rest():
    heads = SystemPromptDrift()
    assert heads.observe(chat(head(), "Hi")) == heads.observe(chat(head(), "Something else")) == ()
    (line,) = heads.observe(chat(head(date="Tuesday"), "Hi"))
    assert line == (0, 1, "Today is Tuesday.")
    found = heads.observe(chat(head(date="Tuesday", listing="a.txt b.txt"), "Hi"))
    assert [text for _, _, text in found] == ["Today is Tuesday.", "Files: a.txt b.txt"]
    # What varied once is known for ever, also where it now is as it was.
    assert [number for _, number, _ in heads.observe(chat(head(), "Hi"))] == [1, 22]


def test_other_programs_and_chats_without_a_system_message_have_nothing_that_varies():
    heads = SystemPromptDrift()
    heads.observe(chat(head(), "Hi"))
    assert heads.observe(chat("Today is Friday.\nYou write titles.", "Hi")) == ()
    assert heads.observe(chat(None, "Today is Friday.")) == ()
    # Half of it is alike: that is another program.
    assert heads.observe(chat(head()[: len(head()) // 2] + "\n" + "Answer in verse. " * 60, "Hi")) == ()


def test_nothing_is_remembered_of_what_is_only_counted():
    heads = SystemPromptDrift()
    heads.observe(chat(head(), "Hi"))
    assert len(heads.observe(chat(head(date="Tuesday"), "Hi"), learns=False)) == 1
    assert heads.observe(chat(head(), "Hi")) == ()


def test_messages_stay_as_they_are_unless_moving_was_asked_for():
    heads = SystemPromptDrift()
    for date in ("Monday", "Tuesday"):
        messages = chat(head(date=date, billing=date), "Hi")
        assert heads.arrange(messages, heads.observe(messages)) is messages


def test_known_lines_are_moved_from_the_first_request_on():
    heads = SystemPromptDrift(moves=True)
    messages = chat(head(billing="cch=1"), "Hi")
    assert arranged(heads, messages) == [
        ("system", head()),
        ("user", f"Hi\n\n{NOTE}\n{BILLING_HEADER} cch=1"),
    ]
    assert messages == chat(head(billing="cch=1"), "Hi")


def test_a_conversation_goes_on_with_the_same_text_whatever_its_head_says_now():
    heads = SystemPromptDrift(moves=True)
    texts: list[str] = []
    prompts = []
    for turn in range(4):
        texts.append(f"Question {turn}")
        # The line changes before the third turn, and stays in the fourth.
        prompts.append(arranged(heads, chat(head(billing="old" if turn < 2 else "new"), *texts)))
        texts.append(f"Answer {turn}")
    for former, later in zip(prompts, prompts[1:], strict=False):
        assert later[: len(former)] == former
    notes = [content.partition(NOTE)[2].strip() for role, content in prompts[-1] if role == "user"]
    assert notes == [f"{BILLING_HEADER} old", "", f"{BILLING_HEADER} new", ""]


def test_a_repeated_request_is_told_what_is_so_now():
    heads = SystemPromptDrift(moves=True)
    arranged(heads, chat(head(billing="one"), "Hi"))
    assert arranged(heads, chat(head(billing="two"), "Hi"))[-1] == ("user", f"Hi\n\n{NOTE}\n{BILLING_HEADER} two")
    texts = ("Hi", "Yes?", "Go on")
    arranged(heads, chat(head(billing="three"), *texts))
    again = arranged(heads, chat(head(billing="two"), *texts))
    assert [NOTE in content for _, content in again] == [False, True, False, False]


def test_two_conversations_share_all_but_what_differs():
    heads = SystemPromptDrift(moves=True)
    first = arranged(heads, chat(head(billing="one"), "Hi"))
    other = arranged(heads, chat(head(billing="two"), "Bye"))
    assert first[0] == other[0]


def test_lines_go_behind_results_of_tools_and_a_head_of_such_lines_alone_is_left_out():
    heads = SystemPromptDrift(moves=True)
    messages = [*chat(f"{BILLING_HEADER} x", "Hi", ""), {"role": "tool", "content": "42", "tool_call_id": "a"}]
    roles = [role for role, _ in arranged(heads, messages)]
    assert roles == ["user", "assistant", "tool"]
    assert arranged(heads, messages)[-1][1] == f"42\n\n{NOTE}\n{BILLING_HEADER} x"
    # With nobody to tell it to, the head stays.
    only = chat(f"{BILLING_HEADER} x")
    assert heads.arrange(only, heads.observe(only)) is only
