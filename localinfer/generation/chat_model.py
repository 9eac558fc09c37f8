"""The part of a loaded model for conversations: from messages and options to a prompt and the stream of its reply."""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_flag
from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import RequestError
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.history import ChatHistory, SessionHistory
from localinfer.generation.chat.messages import check_roles, read_messages
from localinfer.generation.chat.reply import AssistantPrefill, ReplyRequest, TemplateFormats
from localinfer.generation.chat.system_prompt_drift import SystemPromptDrift, varying_spans, words_at
from localinfer.generation.completion import StreamEvent
from localinfer.generation.options import Constraint, ReplyOptions, check_options
from localinfer.generation.stream import TextStream
from localinfer.generation.text_generation import EncodedPrompt, TextGeneration
from localinfer.storage.chats import EncodedChat

if TYPE_CHECKING:
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.prompt_cache import DiskCache

Messages = Sequence[Mapping[str, Any]]


class ChatModel:
    """Renders, encodes and answers conversations with one model; threads may share it.

    template, history: the model's template, and the chats that it answered. formats: how it writes tool calls and
    reasoning. heads: lines of system messages that vary. disk: where set, is waited for before a chat, so that what it
    keeps is known.
    """

    def __init__(
        self, engine: Engine, tokenizer: "Tokenizer", template: "ChatTemplate", constraints: ConstraintCompiler
    ) -> None:
        self.template = template
        self.history = ChatHistory(template, tokenizer, finds_branches=engine.pool.has_states)
        self.formats = TemplateFormats(template, tokenizer, constraints)
        self.heads = SystemPromptDrift()
        self.disk: DiskCache | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._constraints = constraints

    @property
    def context_length(self) -> int:
        """Most tokens that prompt and completion may have together."""
        return self._engine.context_length

    def check_usable(self) -> None:
        """Raise ClosedError after the model was closed, RequestError for one that generates nothing."""
        self._engine.check_usable()
        self._engine.check_generates()

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise ConstraintError for what cannot be enforced."""
        self._constraints.mask(constraint, start=0)

    def stream(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        *,
        history: SessionHistory | None = None,
        through: Callable[[Generator[StreamEvent]], Generator[StreamEvent]] | None = None,
    ) -> TextStream:
        """Answer messages; options: ChatOptions. through: passes on the events. Raises: as `LLM.stream_chat`."""
        values: dict[str, Any] = dict(options)
        request = self.formats.request(
            cast(ReplyOptions, {name: values.pop(name) for name in ReplyOptions.__annotations__ if name in values}),
            salt_of(values.get("cache_salt")),
        )
        self.check_usable()
        checked = check_options(values, self._tokenizer)
        if request.continues and checked.constraint is not None:
            raise RequestError(
                "a constraint was given, which holds for whole replies; leave it or continue_final_message out",
                field="constraint",
            )
        if self.disk is not None:
            self.disk.wait_until_open()
        max_tokens = None if values.get("context_shift") else self.context_length
        read = self._read(messages)
        varying = self.heads.observe(read, salt=checked.salt)
        arranged = self.heads.arrange(read, varying, salt=checked.salt)
        chat, prefill = self._encode(request, arranged, max_tokens, history, checked.salt)
        spans = varying_spans(chat.text, read, varying)
        prompt = EncodedPrompt(
            chat.token_ids,
            chat.system_tokens,
            chat,
            request.format_after(chat.text, prefill),
            partial(words_at, spans, chat.text, chat.token_ids, self._tokenizer) if spans else None,
        )
        generation = TextGeneration(
            self._engine,
            self._tokenizer,
            prompt,
            checked,
            self.template.stop_strings,
            self._constraints,
            self.history if history is None else history,
            through,
        )
        return TextStream(generation)

    def encode(
        self,
        messages: Messages,
        options: ReplyOptions,
        *,
        history: SessionHistory | None = None,
        salt: bytes = NO_SALT,
    ) -> EncodedChat:
        """Return the prompt of a conversation. Raises: TemplateError, RequestError."""
        chat, _ = self._encode(self.formats.request(options, salt), self._arranged(messages, salt), None, history, salt)
        return chat

    def render(
        self, messages: Messages, options: ReplyOptions, *, add_generation_prompt: bool, salt: bytes = NO_SALT
    ) -> str:
        """Return the prompt of a conversation as text. Raises: TemplateError, RequestError."""
        add_generation_prompt = check_flag("add_generation_prompt", add_generation_prompt)
        request = self.formats.request(options, salt)
        asked, prefill = request.split(self._arranged(messages, salt))
        if prefill is not None:
            add_generation_prompt = True
        text = self.template.render(asked, add_generation_prompt, request.template_tools or None, **request.variables)
        if prefill is None:
            return text
        segments = prefill.segments(text, request.format.reasoning, self._tokenizer.special_spellings)
        return text + "".join(part for part, _ in segments)

    def compute(
        self, token_ids: NDArray[np.int32], *, system_tokens: int, is_pinned: bool, salt: bytes = NO_SALT
    ) -> int:
        """Have a text's keys and values in the cache, and return how many tokens had to be computed for it.

        Raises: ContextLengthError, OutOfMemoryError, ClosedError.
        """
        self.check_usable()
        if self.disk is not None:
            self.disk.wait_until_open()
        with self._engine.exclusive_cache() as cache:
            if cache.tree.match(token_ids, salt).usable == token_ids.size:
                return 0
        hints = CacheHints(system_tokens=min(system_tokens, token_ids.size), is_pinned=is_pinned, salt=salt)
        # What is sampled at the end is not computed, so it is not cached.
        generation = self._engine.generate(token_ids, SamplingParams(), max_tokens=1, cache_hints=hints)
        for _ in generation:
            pass
        return int(token_ids.size) - generation.record.cached_tokens

    def _read(self, messages: Messages) -> list[dict[str, Any]]:
        read = read_messages(messages)
        check_roles(read, self.template.source, self.template.tool_source)
        return read

    def _arranged(self, messages: Messages, salt: bytes) -> Messages:
        """Messages as `stream` would have them rendered, of which nothing is remembered."""
        read = self._read(messages)
        varying = self.heads.observe(read, learns=False, salt=salt)
        return self.heads.arrange(read, varying, learns=False, salt=salt)

    def _encode(
        self,
        request: ReplyRequest,
        messages: Messages,
        max_tokens: int | None,
        history: SessionHistory | None,
        salt: bytes,
    ) -> tuple[EncodedChat, AssistantPrefill | None]:
        """The prompt of a chat, its messages as `read_messages` reads them, and the reply that it continues."""
        asked, prefill = request.split(messages)
        begin = None
        if prefill is not None:
            spellings = self._tokenizer.special_spellings
            begin = partial(prefill.segments, form=request.format.reasoning, spellings=spellings)
        encode = self.history.encode if history is None else history.encode
        tools = request.template_tools or None
        return encode(asked, tools, request.variables, begin=begin, max_tokens=max_tokens, salt=salt), prefill
