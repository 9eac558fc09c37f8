"""The prompts of one session: what its messages become, with its tools and options, and with the ids of its replies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from localinfer.engine.cache.block_hashes import salt_of
from localinfer.errors import ContextLengthError, RequestError
from localinfer.generation.chat.messages import Turn
from localinfer.generation.compaction import PromptMeter, compact_at, read_turns_of
from localinfer.generation.options import GenerationOptions, ReplyOptions, ToolChoice

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.generation.chat_model import ChatModel, SessionHistory
    from localinfer.generation.session.python_tools import ToolBox
    from localinfer.generation.stream import StreamEvent, TextStream

_PROMPT_OPTIONS = ("tool_choice", "parallel_tool_calls", "thinking", "thinking_budget", "template_variables")


class SessionOptions(GenerationOptions, total=False):
    """Keyword options of a session, and of each of its replies: those of `chat` but for what the session itself has.

    tool_choice holds for the first reply to a message; those after results of tools are free to answer.
    compact: True, or a share of the context such as 0.8: where the messages take more than that, the model sums the
        older ones up before it answers, and goes on from its summary; see `Session.compact`.
    """

    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    thinking: bool | None
    thinking_budget: int | None
    template_variables: Mapping[str, Any]
    compact: bool | float | None


def checked_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, whose names are those of SessionOptions. Raises: RequestError."""
    known = SessionOptions.__annotations__
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise RequestError(f"a session has no option {', '.join(unknown)}; the options are {', '.join(known)}")
    compact_at(options.get("compact"))
    return dict(options)


class SessionPrompts:
    """Encodes a session's messages, and has replies to them made. options: SessionOptions of every reply.

    history: the ids of former replies, if another session had some.
    """

    def __init__(
        self,
        model: ChatModel,
        tools: ToolBox,
        options: Mapping[str, Any],
        history: SessionHistory | None = None,
    ) -> None:
        from localinfer.generation.chat_model import SessionHistory

        self.model = model
        self.options = checked_names(options)
        self.tools = tools
        self._history = SessionHistory(model.history) if history is None else history
        self._prefix: tuple[Sequence[Turn], NDArray[np.int32], int] | None = None

    def copy(self) -> SessionPrompts:
        """The same for a session that goes its own way from here."""
        made = SessionPrompts(self.model, self.tools, self.options, self._history.copy())
        made._prefix = self._prefix
        return made

    def stream(
        self,
        turns: Sequence[Turn],
        options: Mapping[str, Any],
        through: Callable[[Generator[StreamEvent]], Generator[StreamEvent]] | None = None,
    ) -> TextStream:
        """The stream of the next reply. Raises: as `LLM.stream_chat`; ContextLengthError says what a session can do."""
        sent = {**options, "tools": self.tools.descriptions or None}
        sent.pop("compact", None)
        if turns and turns[-1]["role"] == "tool" and sent.get("tool_choice") != "none":
            # A model that has to call tools would never answer.
            sent.pop("tool_choice", None)
        try:
            return self.model.stream(read_turns_of(turns), sent, history=self._history, through=through)
        except ContextLengthError as error:
            raise self._overflow(error.num_tokens) from None

    def count(self, turns: Sequence[Turn]) -> int:
        """Number of tokens of the prompt of messages. Raises: TemplateError."""
        return int(self._encode(turns)[0].size)

    def prefix(self, turns: Sequence[Turn]) -> tuple[NDArray[np.int32], int]:
        """The ids with which the next prompt begins, whatever is asked, and how many of them are the system's."""
        from localinfer.engine.cache.block_hashes import common_length

        if self._prefix is not None and self._prefix[0] is turns:
            return self._prefix[1:]
        if turns and turns[-1]["role"] in ("user", "tool"):
            token_ids, system_tokens = self._encode(turns)
        else:
            # A template may write earlier messages in another way when a message follows.
            (token_ids, system_tokens), (other, _) = (
                self._encode([*turns, {"role": "user", "content": text}]) for text in "xy"
            )
            token_ids = token_ids[: common_length(token_ids, other)]
        self._prefix = turns, token_ids, system_tokens
        return token_ids, system_tokens

    def compute_prefix(self, turns: Sequence[Turn]) -> int:
        """Have the prefix in the cache; return how many tokens were computed. Raises: as `ChatModel.compute`."""
        token_ids, system_tokens = self.prefix(turns)
        if token_ids.size >= self.model.context_length:
            raise self._overflow(token_ids.size)
        is_pinned = bool(self.options.get("pin_cache"))
        return self.model.compute(token_ids, system_tokens=system_tokens, is_pinned=is_pinned, salt=self._salt)

    def meter(self, options: Mapping[str, Any]) -> PromptMeter:
        """Measures prompts of replies with these options."""

        def encode(turns: Sequence[Turn], is_direct: bool) -> NDArray[np.int32]:
            return self._encode(turns, {**options, "thinking": False} if is_direct else options)[0]

        return PromptMeter(encode, self.model.context_length)

    def _encode(self, turns: Sequence[Turn], options: Mapping[str, Any] | None = None) -> tuple[NDArray[np.int32], int]:
        asked = self.options if options is None else options
        kept = {name: asked[name] for name in _PROMPT_OPTIONS if name in asked}
        given = cast(ReplyOptions, {**kept, "tools": self.tools.descriptions or None})
        chat = self.model.encode(read_turns_of(turns), given, history=self._history, salt=self._salt)
        return chat.token_ids, chat.system_tokens

    @property
    def _salt(self) -> bytes:
        return salt_of(self.options.get("cache_salt"))

    def _overflow(self, num_tokens: int | None) -> ContextLengthError:
        taken = "more tokens" if num_tokens is None else f"{num_tokens} tokens"
        length = self.model.context_length
        return ContextLengthError(
            f"the session's messages take {taken}, and the context holds {length}; sum them up with compact=True, "
            "drop the oldest exchanges with drop(), shorten a message with edit(), or load the model with a larger "
            "context_length",
            num_tokens=num_tokens,
            context_length=length,
        )
