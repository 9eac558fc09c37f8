"""A reply that was cut short is continued where it ends, as if it had never been cut."""

from collections.abc import Iterator
from typing import Any

import pytest

import localinfer
from localinfer.errors import MessageError, RequestError
from localinfer.generation.chat.reply import AssistantPrefill
from localinfer.llm import LLM
from localinfer.models.text.reply_format import ReasoningFormat
from localinfer.models.text.tokenizer import SpellingFinder

ASK = {"role": "user", "content": "Tell me a story about a dog."}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SPELLINGS = SpellingFinder({"<|end|>": 7})
THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
CHANNELS = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localinfer.load(threads=1, context_length=256, disk_cache=False) as made:
        yield made


def assistant(text: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("cut", [1, 2, 17, 39])
def test_a_reply_cut_anywhere_continues_as_if_it_had_not_been_and_computes_nothing_twice(llm, cut):
    llm.clear_cache()
    whole = llm.chat([ASK], max_tokens=40, **GREEDY)
    llm.clear_cache()
    begun = llm.chat([ASK], max_tokens=cut, **GREEDY)
    rest = llm.chat([ASK, assistant(begun.text)], continue_final_message=True, max_tokens=40 - cut, **GREEDY)
    assert begun.token_ids + rest.token_ids == whole.token_ids
    assert begun.text + rest.text == whole.text
    assert rest.stats.prompt_tokens == begun.stats.prompt_tokens + cut
    assert rest.stats.cached_tokens == rest.stats.prompt_tokens - 1, "all but the token whose logits are needed"


def test_what_follows_a_continued_reply_finds_all_of_it_cached(llm):
    begun = llm.chat([ASK], max_tokens=10, **GREEDY)
    rest = llm.chat([ASK, assistant(begun.text)], continue_final_message=True, max_tokens=10, **GREEDY)
    after = llm.chat([ASK, assistant(begun.text + rest.text), ASK], max_tokens=1, **GREEDY)
    assert after.stats.cached_tokens >= rest.stats.prompt_tokens + rest.stats.completion_tokens - 1


def test_a_reply_that_was_never_generated_is_continued_too(llm):
    messages = [ASK, assistant("There was a <|im_end|> cat")]
    text = llm.render_chat(messages, continue_final_message=True)
    assert text.endswith("assistant\nThere was a <|im_end|> cat")
    counted = llm.count_chat_tokens(messages, continue_final_message=True)
    assert llm.chat(messages, continue_final_message=True, max_tokens=1).stats.prompt_tokens == counted
    assert counted > len(llm.tokenizer.encode(text, parse_special=True)), "a spelled control token is text"


@pytest.mark.parametrize(
    ("messages", "found"),
    [([ASK], "only one"), ([ASK, ASK], "'user'"), ([ASK, {"role": "assistant", "tool_calls": []}, ASK], "'user'")],
)
def test_only_a_last_message_of_the_assistant_is_continued(llm, messages, found):
    with pytest.raises(MessageError, match=found):
        llm.chat(messages, continue_final_message=True)


def test_a_constraint_holds_for_whole_replies_only(llm):
    with pytest.raises(RequestError, match="whole replies"):
        llm.chat([ASK, assistant("x")], continue_final_message=True, constraint=localinfer.Regex("[0-9]"))


@pytest.mark.parametrize(
    ("form", "prompt", "content", "reasoning", "expected"),
    [
        (None, "ask:", "Yes", "", "Yes"),
        (THINK, "ask:", "Yes", "", "Yes"),
        (THINK, "ask:", "Yes", "Hm.", "<think>\nHm.\n</think>\n\nYes"),
        (THINK, "ask:<think>\n", "Yes", "Hm.", "Hm.\n</think>\n\nYes"),
        (THINK, "ask:<think>\n", "Yes", "", "\n</think>\n\nYes"),
        (THINK, "ask:", "", "Hm", "<think>\nHm"),
        (THINK, "ask:<think>\n\n</think>\n\n", "Yes", "Hm.", "Yes"),
        (CHANNELS, "ask:", "Yes", "", "<|channel|>final<|message|>Yes"),
        (
            CHANNELS,
            "ask:",
            "Yes",
            "Hm.",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        ),
        (CHANNELS, "ask:", "", "Hm", "<|channel|>analysis<|message|>Hm"),
    ],
)
def test_reasoning_stands_before_the_answer_as_the_template_writes_it(form, prompt, content, reasoning, expected):
    segments = AssistantPrefill(content, reasoning).segments(prompt, form, SPELLINGS)
    assert "".join(part for part, _ in segments) == expected


THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}{% if message.reasoning_content %}"
    "{{ '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{% endif %}{{ message.content ~ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_reasoning_that_was_cut_goes_on_as_reasoning_and_an_answer_behind_it_as_an_answer(tmp_path):
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING)
    with localinfer.load(threads=1, context_length=256, disk_cache=False, chat_template=path) as llm:
        thinking = [ASK, assistant("", reasoning="Let me")]
        assert llm.render_chat(thinking, continue_final_message=True).endswith("assistant\n<think>\nLet me")
        cut = llm.chat(thinking, continue_final_message=True, max_tokens=8, **GREEDY)
        assert cut.reasoning and not cut.text
        closed = llm.chat(thinking, continue_final_message=True, thinking_budget=2, max_tokens=20, **GREEDY)
        assert closed.reasoning and closed.text
        answering = [ASK, assistant("Once", reasoning="Let me see.")]
        text = llm.render_chat(answering, continue_final_message=True)
        assert text.endswith("<think>\nLet me see.\n</think>\n\nOnce")
        rest = llm.chat(answering, continue_final_message=True, max_tokens=8, **GREEDY)
        assert rest.text and not rest.reasoning


def test_special_tokens_are_text_in_what_was_written_and_tokens_in_what_the_template_writes():
    segments = AssistantPrefill("a<|end|>b", "x").segments("ask:", CHANNELS, SPELLINGS)
    assert [part for part, is_open in segments if not is_open] == ["<|end|>"]
    assert (CHANNELS.closing, True) in segments
