"""A reply that was begun: its text goes behind the prompt, so that the model continues it in place of a new one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localinfer.errors import MessageError
from localinfer.models.text.reply_format import ReasoningFormat
from localinfer.models.text.splitting import SpellingFinder

if TYPE_CHECKING:
    from localinfer.generation.chat.reply import ReplyFormat

Segments = list[tuple[str, bool]]


@dataclass(frozen=True)
class BegunReply:
    """The last message of a chat, of the role "assistant", as far as it was written.

    Without content, the reasoning goes on; without either, the reply is a new one.
    """

    content: str
    reasoning: str

    @classmethod
    def split(cls, messages: Sequence[Mapping[str, Any]]) -> "tuple[Sequence[Mapping[str, Any]], BegunReply]":
        """Messages as `read_messages` gives them without the last, and the last. Raises: MessageError."""
        last, path = messages[-1], f"messages[{len(messages) - 1}]"
        if last["role"] != "assistant" or last.get("tool_calls") or len(messages) == 1:
            found = "calls tools" if last.get("tool_calls") else f"is of the role {last['role']!r:.40}"
            found = "is the only one" if len(messages) == 1 else found
            raise MessageError(
                f"{path} {found}, and a reply can only be continued where it is the last message, after others, of "
                'the role "assistant", with text; leave continue_final_message out',
                path,
            )
        return messages[:-1], cls(last["content"], last.get("reasoning_content", ""))

    def segments(self, prompt: str, form: ReasoningFormat | None, spellings: SpellingFinder) -> Segments:
        """What follows a rendered prompt, as segments (text, is_template_text).

        form: how the model sets reasoning apart. spellings: of special tokens, which are text in what was written.
        """
        if form is None:
            return _plain(self.content, spellings)
        made: Segments = []
        is_open = form.is_open(prompt)
        if (self.reasoning or is_open) and not form.is_closed(prompt):
            if not is_open:
                made.append((form.begin + _gap(form), True))
            made += _plain(self.reasoning, spellings)
            if self.content:
                made.append((form.closing, True))
        if self.content and form.answer_begin and not form.closing.endswith(form.answer_begin):
            made.append((form.answer_begin, True))
        return made + _plain(self.content, spellings)

    def rest_format(self, format: "ReplyFormat") -> "ReplyFormat":
        """How the rest of the reply is read, where `format` is how a new one after the same text were."""
        if self.content:
            # Answers between marks were begun as such, and end so: the grammar of calls would begin anew.
            calls = None if format.reasoning is not None and format.reasoning.answer_begin else format.calls
            return replace(format, state="none", calls=calls, tools=format.tools if calls is not None else ())
        return replace(format, state="open") if self.reasoning and format.state == "possible" else format


def _gap(form: ReasoningFormat) -> str:
    """What stands between the opening marker and the reasoning: templates write the same as before the closing one."""
    return form.closing[: len(form.closing) - len(form.closing.lstrip())]


def _plain(text: str, spellings: SpellingFinder) -> Segments:
    """A text in which control tokens that it spells out are none."""
    made: Segments = []
    position = 0
    for spelling in spellings.find(text):
        if spelling.end > position:
            start = max(spelling.start, position)
            made += [(text[position:start], True), (text[start : spelling.end], False)]
            position = spelling.end
    return [(part, is_open) for part, is_open in (*made, (text[position:], True)) if part]
