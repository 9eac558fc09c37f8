"""Messages of every shape, by every method of `LLM` that takes them: read alike, or refused with their place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from localinfer.errors import MessageError, RequestError
from localinfer.generation.chat.messages import read_messages
from localinfer.llm import LLM
from localinfer.models.text.chat_template import ChatTemplate
from tests.engine.fakes import FakeTemplate, fake_model
from tests.models.text.family_templates import FAMILIES, MISTRAL
from tests.support.message_shapes import CALL, CALLS, READ, REFUSED, RESULT, SILENT, USER

METHODS: dict[str, Callable[[LLM, Any], object]] = {
    "chat": lambda llm, messages: llm.chat(messages, max_tokens=1, temperature=0),
    "stream_chat": lambda llm, messages: list(llm.stream_chat(messages, max_tokens=1, temperature=0)),
    "chat_many": lambda llm, messages: llm.chat_many(messages, n=1, max_tokens=1, temperature=0),
    "render_chat": lambda llm, messages: llm.render_chat(messages),
    "count_chat_tokens": lambda llm, messages: llm.count_chat_tokens(messages),
}


def make_llm(template: object = None) -> LLM:
    model = fake_model(context_length=4096)
    model.chat_template = template or FakeTemplate()
    return LLM(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", READ)
def test_messages_are_read_into_one_shape(shape: str) -> None:
    sent, expected = READ[shape]
    before = repr(sent)
    assert read_messages(sent) == expected
    assert read_messages(read_messages(sent)) == expected
    assert repr(sent) == before


@pytest.mark.parametrize("shape", REFUSED)
def test_what_is_no_message_is_refused_with_its_place(shape: str) -> None:
    sent, place = REFUSED[shape]
    with pytest.raises(MessageError) as caught:
        read_messages(sent)
    assert caught.value.path == place
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("messages", [None, [], (), "Hi", b"Hi", {"role": "user", "content": "Hi"}, 5])
def test_what_is_no_list_of_messages_is_refused(messages: object) -> None:
    with pytest.raises(RequestError, match="give a list of at least one"):
        read_messages(messages)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_reads_every_shape(method: str) -> None:
    llm = make_llm()
    for sent, _ in READ.values():
        METHODS[method](llm, sent)
    for sent, place in REFUSED.values():
        with pytest.raises(MessageError) as caught:
            METHODS[method](llm, sent)
        assert caught.value.path == place


def test_members_that_only_a_template_knows_reach_it() -> None:
    template = ChatTemplate("{{ messages[0].role }} {{ messages[0].extra.a }} {{ messages[0].none is defined }}")
    message = {"role": "observation", "content": "x", "extra": {"a": [1]}, "none": None}
    assert template.render(read_messages([message])) == "observation [1] False"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_without_content_prints_as_one_with_empty_content(family: str) -> None:
    llm = make_llm(ChatTemplate(FAMILIES[family].source, FAMILIES[family].bos, FAMILIES[family].eos))
    call = {**CALL, "id": "abcdefghi"}
    result = {**RESULT, "tool_call_id": "abcdefghi"}
    texts = {
        llm.render_chat([USER, {"role": "assistant", "tool_calls": [call], **content}, result])
        for content in ({}, {"content": None}, {"content": ""}, {"content": []})
    }
    assert len(texts) == 1
    assert "None" not in texts.pop()


def test_calls_and_results_without_ids_find_each_other() -> None:
    seen: list[Sequence[Mapping[str, Any]]] = []

    class Watching(ChatTemplate):
        def render(self, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> str:
            seen.append(messages)
            return super().render(messages, *args, **kwargs)

    llm = make_llm(Watching(MISTRAL, "<s>", "</s>"))
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in ("f", "g")]}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    llm.render_chat([USER, calls, *results, USER, calls, *results])
    ids = [call["id"] for message in seen[-1] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 4
    answered = [(message["tool_call_id"], message["name"]) for message in seen[-1] if message["role"] == "tool"]
    assert answered == list(zip(ids, "fgfg", strict=True))


def test_a_conversation_with_silent_members_goes_on_with_what_was_computed() -> None:
    llm = make_llm()
    llm.chat(SILENT, max_tokens=3, temperature=0)
    again = llm.chat(SILENT, max_tokens=3, temperature=0)
    assert again.stats.cached_tokens > 0
    assert CALLS["content"] == ""
