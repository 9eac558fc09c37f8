"""The public API: text and messages in, text out, over an engine of token ids."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, Union, Unpack, cast

from localinfer.arguments import check_flag, check_number, check_path, owned
from localinfer.engine.admission import EngineLimits
from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.errors import RequestError, SessionFileError
from localinfer.generation.options import DefaultOptions
from localinfer.generation.stream import TextStream, call_in_thread, complete_in_thread
from localinfer.types import BeamCompletion, Closing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.admission import AdmissionPolicy
    from localinfer.engine.cache.block_hashes import CacheObserver
    from localinfer.engine.cache.sequence import KVEviction
    from localinfer.engine.cache.stats import SnapshotStats
    from localinfer.engine.engine import EngineStats
    from localinfer.engine.speculation.verify import Speculation
    from localinfer.generation.chat.constraints import ConstraintCompiler
    from localinfer.generation.chat.media_parts import MediaSource
    from localinfer.generation.chat.reply import TemplateFormats
    from localinfer.generation.chat_model import ChatModel
    from localinfer.generation.decision_calibration import DecisionOptions
    from localinfer.generation.embedding import TextEmbedder
    from localinfer.generation.embedding_inputs import EmbeddingInput
    from localinfer.generation.kv_transfer import KVTransfer, Prefilled
    from localinfer.generation.media import MediaModel, MediaReader
    from localinfer.generation.options import ChatOptions, CheckedOptions, GenerationOptions, ReplyOptions
    from localinfer.generation.questions import Content, Decisions, Question
    from localinfer.generation.session.prompts import SessionOptions
    from localinfer.generation.session.python_tools import CallOutcome, RequestedCall, Tool
    from localinfer.generation.session.session import Session
    from localinfer.generation.stream import Completion
    from localinfer.generation.text_generation import EncodedPrompt
    from localinfer.kernels.cpu.program import ThreadPool
    from localinfer.kernels.cpu.worker_threads import Priority
    from localinfer.models.load.loader import Model
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.fingerprint import Fingerprint, ModelIdentity
    from localinfer.storage.prompt_cache import DiskCache, DiskOptions
    from localinfer.types import ModelInfo, RankedDocument, TokenLogprobs

logger = logging.getLogger(__name__)

Prompt = Union[str, Sequence[int], "NDArray[np.integer]"]
_Item = Union[str, Mapping[str, Any], "MediaSource"]
_Embedded = Union[Prompt, _Item, Sequence[_Item], "EmbeddingInput", "EncodedPrompt"]
_Ids = Union[Sequence[int], "NDArray[np.integer]"]
Part = TypeVar("Part")


def _ttft_policy(*parts: Any) -> AdmissionPolicy:
    """Make the policy of `ttft_objective`, which few programs use."""
    from localinfer.generation.ttft import TtftPredictor

    return TtftPredictor(*parts)


class LLM(Closing):
    """A loaded model, ready to answer; made by `localinfer.load`. A context manager: leaving it closes the model.

    May be used from several threads: generations that run at the same time share their steps. After `close`, and in a
    forked child, every method raises ClosedError.
    """

    _instead = "let threads share it, and have another process load the model from its path"

    def __init__(
        self,
        model: Model,
        *,
        kv_memory: int | None = None,
        kv_window: KVEviction | None = None,
        identity: ModelIdentity | None = None,
        disk: DiskOptions | None = None,
        speculation: Speculation | None = None,
        limits: EngineLimits | None = None,
        observer: CacheObserver | None = None,
        media: MediaModel | None = None,
        describe: Callable[[Model, TemplateFormats | None, KVEviction | None], ModelInfo] | None = None,
    ) -> None:
        """Take over a loaded model.

        kv_window: bounds what each text holds; the model must have been loaded for it. identity: of the model and its
        settings, for what is kept on disk. disk: keep conversations there. speculation: what guesses tokens; None
        decodes one by one. limits: how many generations it takes on at once. observer: gets the changes of the prefix
        cache. media: encoders of pictures and sounds. describe: gathers `info`.
        """
        from localinfer.engine.engine import Engine

        self._model = model
        self._media = media
        self._describe = describe
        self._window = kv_window
        self._defaults = DefaultOptions()
        self._engine = Engine(
            model,
            kv_memory=kv_memory,
            window=kv_window,
            speculation=speculation,
            limits=EngineLimits() if limits is None else limits,
            observer=observer,
            make_policy=_ttft_policy,
        )
        self._identity = identity
        self._session_lock = threading.Lock()
        self._parts_lock = threading.RLock()
        self._parts: dict[str, object] = {}
        self._disk: DiskCache | None = None
        if disk is not None and identity is not None:
            from localinfer.storage import prompt_cache

            history = None if self._chat_model is None else self._chat_model.history
            width = 0 if media is None else media.width
            self._disk = prompt_cache.DiskCache(self._engine, identity, disk, history, embedding_width=width)
            if self._chat_model is not None:
                self._chat_model.keep_on(self._disk)

    def _once(self, name: str, make: Callable[[], Part]) -> Part:
        """A part that not every use needs: made, and its modules imported, when it is first asked for."""
        with self._parts_lock:
            if name not in self._parts:
                self._parts[name] = make()
            return cast("Part", self._parts[name])

    @property
    def _constraints(self) -> ConstraintCompiler | None:
        """The compiler of constraints; None without a tokenizer."""
        if self._model.tokenizer is None:
            return None
        from localinfer.generation.chat.constraints import ConstraintCompiler

        return self._once("constraints", partial(ConstraintCompiler, self.tokenizer, self._engine.vocab_size))

    @property
    def _chat_model(self) -> ChatModel | None:
        """The chat interface of the model; None without a tokenizer."""
        template, constraints = self._model.chat_template, self._constraints
        if template is None or constraints is None:
            return None
        from localinfer.generation.chat_model import ChatModel

        reader = self._media_reader
        return self._once("chat", partial(ChatModel, self._engine, self.tokenizer, template, constraints, reader))

    @property
    def _media_reader(self) -> MediaReader | None:
        """The reader of pictures and sounds; None for a model of words."""
        if self._media is None or self._media.gives_vectors or self._model.chat_template is None:
            return None
        from localinfer.generation.media import MediaReader

        template = self._model.chat_template if "chat" in self._model.capabilities else None
        return self._once("media", partial(MediaReader, self._media, self.tokenizer, template))

    @property
    def _embedder(self) -> TextEmbedder:
        from localinfer.generation.embedding import TextEmbedder

        return self._once("embedder", partial(TextEmbedder, self._engine, self._model, self._media, self._media_reader))

    def __repr__(self) -> str:
        model = self._model
        return (
            f"<{type(self).__name__} {model.file.path.name}: {model.config.architecture} on {model.device}, "
            f"{self.context_length} tokens of context>"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises: RequestError if the file has none; prompts of token ids work without."""
        if self._model.tokenizer is None:
            raise RequestError("the model file has no tokenizer; give prompts as token ids, and no stop strings")
        return self._model.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens that prompt and completion may have together."""
        return self._engine.context_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and width of `logits`."""
        return self._engine.vocab_size

    @cached_property
    def info(self) -> ModelInfo:
        """Facts of the model: name, size, quantization, device, memory, features of its chat template.

        Gathered when it is first asked for. Raises: ClosedError.
        """
        assert self._describe is not None, "made by `load`"
        self._engine.check_usable()
        formats = None if self._chat_model is None else self._chat_model.formats
        return replace(self._describe(self._model, formats, self._window), capabilities=self.capabilities)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Tasks of this model: "completion", "chat", "embeddings", "rerank", "vision", "audio"."""
        return self._model.capabilities + (() if self._media is None else self._media.capabilities)

    @property
    def kv_bytes(self) -> int:
        """Bytes of memory that keys, values and recurrent states take now, those of former texts included."""
        return self._engine.pool.allocated_bytes

    @property
    def has_chat_template(self) -> bool:
        """True if the file has the model's chat template; without one, `chat` uses a general form."""
        template = self._model.chat_template
        return template is not None and template.source is not None and not template.is_fallback

    def encode_prompt(
        self,
        parts: Sequence[str | MediaSource],
        *,
        parse_special: bool = False,
        max_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> EncodedPrompt:
        """Encode texts, and pictures and sounds between them, as a prompt for `complete` and `stream`.

        parts: texts, and what `read_media_part` makes of parts of messages. max_tokens: a text of more is not read on.
        cache_salt: of the generation. Raises: MessageError for what is not read, RequestError, ContextLengthError.
        """
        reader = self._media_reader
        if reader is not None:
            return reader.encode_parts(parts, salt_of(cache_salt), parse_special=parse_special, max_tokens=max_tokens)
        from localinfer.generation.chat.messages import check_no_media

        check_no_media([{"content": list(parts)}])
        return self._encode("".join(map(str, parts)), parse_special, max_tokens)

    def complete(
        self, prompt: Prompt | EncodedPrompt, *, parse_special: bool = False, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Continue a prompt, as it is: no chat template.

        prompt: text, which gets the model's beginning-of-text token, or token ids, which are taken as they are, or what
            `encode_prompt` made.
        parse_special: read the names of special tokens in the text as those tokens.
        options: see GenerationOptions. Without max_tokens it ends at an end token or the end of the context.
        Raises: RequestError, ContextLengthError, ClosedError.
        """
        with self.stream(prompt, parse_special=parse_special, **options) as stream:
            return stream.result()

    async def acomplete(
        self, prompt: Prompt | EncodedPrompt, *, parse_special: bool = False, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """As `complete`, in a thread of its own; cancelling the task cancels the generation."""
        given = owned(prompt)
        return await complete_in_thread(lambda one: self.stream(given, parse_special=parse_special, **one), options)

    def stream(
        self, prompt: Prompt | EncodedPrompt, *, parse_special: bool = False, **options: Unpack[GenerationOptions]
    ) -> TextStream:
        """Continue a prompt like `complete`, and yield an event per token as it comes; closing the stream cancels."""
        from localinfer.generation.text_generation import TextGeneration

        given = self._defaults.of_generation(options)
        checked, encoded = self._checked(given), self._encode(prompt, parse_special, self._most_tokens(given))
        return TextStream(
            TextGeneration(
                self._engine,
                self._model.tokenizer,
                encoded,
                checked,
                constraints=None if checked.constraint is None else self._constraints,
            )
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Completion:
        """Answer a conversation: messages with `role` and `content`, put into the model's own chat template.

        options: see GenerationOptions, and ReplyOptions for tools and reasoning. Former calls come back as messages in
        OpenAI's shape: the assistant's `tool_calls`, beside which `content` may be missing or None, and a message of
        role "tool" with the `tool_call_id` of each. Content may be a list of parts of text.
        A reply that comes back among the messages keeps the token ids it was generated with, so that nothing before
        the newest message is computed again.
        Raises: MessageError for what is no message, TemplateError if the template refuses them; else as `complete`.
        """
        with self.stream_chat(messages, **options) as stream:
            return stream.result()

    async def achat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Completion:
        """As `chat`, in a thread of its own; cancelling the task cancels the generation."""
        given = owned(messages)
        return await complete_in_thread(lambda one: self.stream_chat(given, **one), options)

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> TextStream:
        """Answer a conversation like `chat`, and yield an event per token as it comes; closing the stream cancels."""
        return self._chats().stream(messages, self._defaults.of_generation(options, in_chat=True))

    def complete_many(
        self,
        prompt: Prompt,
        *,
        n: int,
        best_of: int | None = None,
        parse_special: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]:
        """Continue a prompt in `n` ways, of which the i-th, from 0, is what `complete` gives with seed + i.

        The prompt is computed once. best_of: make so many, and return those of the largest mean log probability per
        token, best first.
        """
        from localinfer.generation.stream import complete_many

        stream = partial(self.stream, owned(prompt), parse_special=parse_special)
        return complete_many(lambda one: stream(**one), options, n=n, best_of=best_of)

    def chat_many(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        n: int,
        best_of: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answer a conversation in `n` ways; see `complete_many`."""
        from localinfer.generation.stream import complete_many

        given = owned(messages)
        return complete_many(lambda one: self.stream_chat(given, **one), options, n=n, best_of=best_of)

    def beam_search(
        self,
        prompt: Prompt,
        *,
        num_beams: int,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        parse_special: bool = False,
    ) -> list[BeamCompletion]:
        """Return the `num_beams` likeliest completions that a search of this width finds, best first.

        Nothing is drawn: the result depends on the model and the arguments only. See `beam_search.search_beams` for
        max_tokens and length_penalty, and what is raised.
        """
        from localinfer.generation.beam_search import beam_text, search_beams

        encoded = self._encode(prompt, parse_special, self.context_length)
        ignore_eos = check_flag("ignore_eos", ignore_eos)
        tokenizer = self._model.tokenizer
        stops = frozenset() if tokenizer is None or ignore_eos else tokenizer.eog_token_ids
        beams = search_beams(
            self._engine,
            encoded.token_ids,
            num_beams=num_beams,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            stop_token_ids=stops,
            media=encoded.media,
        )
        return [BeamCompletion(beam_text(tokenizer, encoded.token_ids, beam), beam) for beam in beams]

    def session(
        self,
        system: str | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        on_tool_call: Callable[[RequestedCall], Any] | None = None,
        on_tool_result: Callable[[CallOutcome], Any] | None = None,
        max_tool_rounds: int = 8,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Begin a conversation that keeps its messages by itself; see `Session`.

        tools: Python functions, which are called when the model asks for it, or tools in OpenAI's shape, whose calls
            are returned. Of a function, the model gets the signature and the docstring.
        messages: what was said before. options: of every reply, where an ask does not say otherwise.
        on_tool_call: asked before each call of a function: True or None lets it run, False refuses it, anything else
            is its result. on_tool_result: called with each, and the exception that the function raised, if any. Both
            may be coroutine functions, as the tools may.
        max_tool_rounds: how many replies in a row may call tools.
        Raises: RequestError for a model that cannot chat, and for what cannot be a tool, a message or an option.
        """
        from localinfer.generation.chat.messages import first_turns
        from localinfer.generation.session.prompts import SessionPrompts
        from localinfer.generation.session.python_tools import ToolBox
        from localinfer.generation.session.session import Session

        box = ToolBox(tools, on_call=on_tool_call, on_result=on_tool_result)
        name = "" if self._identity is None else self._model.file.path.name
        prompts = SessionPrompts(
            self._chats(), box, cast("SessionOptions", self._defaults.of_generation(options, in_chat=True))
        )
        return Session(prompts, first_turns(system, messages), max_tool_rounds=max_tool_rounds, name=name)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        cache_salt: str | None = None,
        **options: Unpack[ReplyOptions],
    ) -> str:
        """Return the prompt that `chat` would make of a conversation, as text. Raises: TemplateError, RequestError."""
        given, salt = self._defaults.of_reply(options), salt_of(cache_salt)
        return self._chats().render(messages, given, add_generation_prompt=add_generation_prompt, salt=salt)

    def count_chat_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, cache_salt: str | None = None, **options: Unpack[ReplyOptions]
    ) -> int:
        """Return how many tokens `chat` would make of a conversation. Raises: TemplateError, RequestError."""
        return len(self.encode_chat(messages, cache_salt=cache_salt, **options).token_ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, cache_salt: str | None = None, **options: Unpack[ReplyOptions]
    ) -> EncodedPrompt:
        """Return the prompt that `chat` would make of a conversation, as ids. Raises: TemplateError, RequestError."""
        chat = self._chats().encode(messages, self._defaults.of_reply(options), salt=salt_of(cache_salt))
        return replace(self._encode(chat.token_ids, False, None), media=chat.media)

    def move_volatile_heads(self) -> None:
        """Give the model lines of system messages that vary behind the rest; see `SystemPromptDrift`."""
        self._chats().heads.moves = True

    def score(self, token_ids: Sequence[int] | NDArray[np.integer], *, top: int = 0) -> list[TokenLogprobs | None]:
        """Return how likely each token was after those before it, None for the first.

        top: also tell so many likeliest tokens. Raises: RequestError, ContextLengthError, ClosedError.
        """
        from localinfer.generation.pooling import score_tokens

        return score_tokens(self._engine, self._model.program, token_ids, top)

    def embed(
        self,
        prompt: _Embedded,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Return one vector of a text or a picture, float32[size]: its last hidden states, pooled; see `embed_many`.

        prompt: text, which gets the tokens around it; ids, as they are; a part of a message, or a list of parts.
        """
        options: Any = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions, "truncate": truncate}
        return self.embed_many([prompt], **options)[0]

    def embed_many(
        self,
        prompts: Sequence[_Embedded],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> list[NDArray[np.float32]]:
        """Return one vector per prompt, in order, computed in batches; each is what `embed` gives.

        pooling: "mean", "first" (or "cls"), "last", or "none" for a vector of every token, float32[T, size]. None: as
            the model was trained, or else the mean.
        normalize: scale each vector to length 1. dimensions: keep so many of its first numbers, for models trained to
            be cut (Matryoshka). truncate: cut texts that are longer than the context, which are refused otherwise.
        Raises: RequestError, MessageError, ContextLengthError, ClosedError, UnsupportedFormatError (of a pooling).
        """
        self._engine.check_usable()
        return self._embedder.embed(
            prompts, pooling=pooling, normalize=normalize, dimensions=dimensions, truncate=truncate
        )

    def embedding_ids(self, prompts: Sequence[Prompt], *, truncate: bool = False) -> list[NDArray[np.int32]]:
        """Return the token ids, int32[T], that `embed_many` computes of each text. Raises: as it."""
        return [one.token_ids for one in self.embedding_inputs(prompts, truncate=truncate)]

    def embedding_inputs(self, prompts: Sequence[_Embedded], *, truncate: bool = False) -> list[EmbeddingInput]:
        """Return what `embed_many` computes of each prompt, which knows its tokens, before it does. Raises: as it."""
        self._engine.check_usable()
        return self._embedder.inputs(prompts, truncate=truncate)

    def rerank(
        self,
        query: str,
        documents: Sequence[_Item | Sequence[_Item]],
        *,
        top_n: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        on_encoded: Callable[[int], object] | None = None,
    ) -> list[RankedDocument]:
        """Return documents by falling relevance to a query: by a reranker's pairs, or late by vectors (`late_score`).

        documents: texts; for late models, which see pages, also parts. top_n: return so many; None: all. normalize:
        scores up to 1 (the classifier's number as a logistic function of it, the probability of its label "yes", or the
        mean of a late sum); otherwise as they are. truncate: cut documents that do not fit the context, with the query
        of a pair. on_encoded: called before anything is computed with how many tokens there are; may raise.
        Raises: as `embed_many`; RequestError for a model that is no reranker.
        """
        return self._embedder.rerank(
            query, documents, top_n=top_n, normalize=normalize, truncate=truncate, on_encoded=on_encoded
        )

    def decide(
        self, state: Content, questions: Mapping[str, Question], **options: Unpack[DecisionOptions]
    ) -> Decisions:
        """Answer typed questions about a state by probabilities, without generating text; see `generation.decision`."""
        from localinfer.generation.decision import decision_model

        make = partial(decision_model, self._engine, self._model, self._chats, self._media_reader)
        return self._once("decisions", make).decide(state, questions, **options)

    async def adecide(
        self, state: Content, questions: Mapping[str, Question], **options: Unpack[DecisionOptions]
    ) -> Decisions:
        """As `decide`, in a thread of its own."""
        return await call_in_thread(partial(self.decide, state, questions, **options))

    def prepare_constraints(self) -> None:
        """Build what the model's constraints and tools need, which the first of them waits for otherwise.

        Some 0.5 s at 128,000 tokens, once, during which other threads run, also those that generate. Any thread may
        call it. Raises: ConstraintError if no token ends a text; RequestError for a file without a tokenizer.
        """
        self._engine.check_usable()
        self._engine.check_generates()
        if self._constraints is None:
            raise RequestError("the model file has no tokenizer, so its text cannot be constrained")
        self._constraints.prepare()

    def logits(self, token_ids: _Ids | EncodedPrompt, *, first: int = 0) -> NDArray[np.float32]:
        """Return float32[T - first, vocab_size]: row i has the logits of the token after token_ids[:first + i + 1]."""
        from localinfer.generation.text_generation import EncodedPrompt

        prompt = token_ids if isinstance(token_ids, EncodedPrompt) else EncodedPrompt(token_ids)
        return self._engine.logits(prompt.token_ids, prompt.media, first=first)

    @property
    def _pools(self) -> list[ThreadPool]:
        """Threads of the model, and of its encoders of pictures and sounds."""
        return [self._model.pool, *([] if self._media is None else [self._media.pool])]

    @property
    def engine_stats(self) -> EngineStats:
        """Numbers of running and waiting texts, and their share of KV memory. Any thread may ask, at any time."""
        return self._engine.stats

    @property
    def snapshot_stats(self) -> SnapshotStats | None:
        """Figures of the prefix cache's snapshots, None without recurrent layers; any thread may ask in a step."""
        return self._engine.snapshot_stats

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options by name that hold where a generation does not name them; none until they are set."""
        return self._defaults.values

    @property
    def recommended_sampling(self) -> dict[str, float | int]:
        """The sampling options that the model's file recommends."""
        from localinfer.engine.sampling.params import file_sampling

        return file_sampling(self._model.file.metadata, name=self._model.file.path.name)

    @property
    def can_think(self) -> bool:
        """True if the model's template has reasoning, so that a chat may be asked to reason first."""
        return self._chat_model is not None and self._chat_model.formats.reasoning is not None

    def set_defaults(self, **options: Any) -> None:
        """Let options hold for every generation from now on that does not name them, in place of those set before.

        options: of GenerationOptions, such as `llm.recommended_sampling`, which is what the file recommends; and
        `thinking`, `thinking_budget` and `template_variables`, which hold for chats: a chat's own variables are added
        to them, name by name. A generation that gives None for one has the library's own default.
        Raises: RequestError for what is no such option, and for a value that it cannot have.
        """
        self._defaults.set(options, self._model.tokenizer)

    def set_threads(self, threads: int | None) -> None:
        """Compute with so many CPU threads from the next step on, also of texts that are being generated.

        No text changes by it, not by a bit. threads: 1 to the hardware threads, for prompts and decoding alike; None:
        as loaded. Any thread may call it, and waits for nothing. Without effect on what a GPU computes.
        Raises: RequestError, ClosedError.
        """
        from localinfer.models.load.threads import checked_threads

        self._engine.check_usable()
        wanted = check_number("threads", threads, 1, none="for as many as loaded")
        for pool in self._pools:
            pool.ask_threads(None if wanted is None else checked_threads(wanted))

    def set_priority(self, priority: Priority) -> None:
        """Compute with threads of this priority from the next step on: "normal", or "background" beside other work.

        In the background the model's own threads ask the system for little (on Linux a nice value of 10, on macOS the
        quality of service "utility", on Windows the lowest priority; these two are untested) and sleep at once when
        there is nothing to do. The threads of the program itself keep their priority: the one that reads a stream,
        which otherwise takes part in the computing, only waits then. Any thread may call it, and waits for nothing.
        Raises: RequestError, ClosedError.
        """
        from localinfer.models.load.threads import checked_priority

        self._engine.check_usable()
        for pool in self._pools:
            pool.ask_priority(checked_priority(priority))

    def save_session(
        self,
        path: str | os.PathLike[str],
        token_ids: Sequence[int] | NDArray[np.integer] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> int:
        """Write the keys and values of one conversation to a file, to continue later; return its tokens.

        token_ids: the conversation; None takes the one that was answered last. The part not in memory is left
        out. cache_salt: with which the given conversation was generated. The file holds the text, as token ids: only
        its owner can read a new one; an old one keeps its mode.
        Raises: SessionFileError if nothing of it is in memory, the file cannot be written, or the model's has changed.
        """
        from localinfer.storage.sessions import save_session

        file = check_path("path", path)
        wanted = None if token_ids is None else self._engine.check_prompt(token_ids, names_media=True)
        salt = salt_of(cache_salt)
        identity = self._require_identity()
        with self._session_lock:
            return save_session(self._engine, identity, file, wanted, salt)

    def load_session(self, path: str | os.PathLike[str], *, cache_salt: str | None = None) -> list[int]:
        """Read a file that `save_session` wrote, so that a prompt that begins like it computes only what is new.

        Returns the token ids it holds. Nothing of the file is used before all of it is proven.
        cache_salt: of those prompts; a file says nothing of one.
        Raises: SessionFileError if it is missing or damaged; SessionMismatchError, naming what differs, if it was saved
            with another model, setting or version; OutOfMemoryError.
        """
        from localinfer.storage.sessions import load_session

        file, salt = check_path("path", path), salt_of(cache_salt)
        identity = self._require_identity()
        with self._session_lock:
            token_ids = load_session(self._engine, identity, file, salt)
        return [int(token_id) for token_id in token_ids]

    def prefill(self, prompt: Prompt, *, parse_special: bool = False, cache_salt: str | None = None) -> Prefilled:
        """Compute a prompt and write it to the disk cache at once, for another process that shares the folder.

        What that generates then is, bit for bit, what it would have computed alone. prompt, parse_special, cache_salt:
        as of `complete`. Raises: RequestError without a disk cache; else as `complete`.
        """
        encoded = self._encode(prompt, parse_special, self._engine.context_length)
        return self._kv_transfer.prefill(encoded.token_ids, salt_of(cache_salt), encoded.media)

    def stream_prefill(
        self,
        token_ids: _Ids,
        *,
        system_tokens: int = 0,
        branch_tokens: Sequence[int] = (),
        salt: bytes = NO_SALT,
        owner: Hashable = None,
    ) -> TextStream:
        """A stream of one token, after which a prompt is in the cache; to be closed before that to stop.

        system_tokens, branch_tokens: where other texts are likely to continue from, as of `CacheHints`.
        Raises: RequestError, ContextLengthError, ClosedError.
        """
        return self._kv_transfer.stream_prefill(
            token_ids, system_tokens=system_tokens, branch_tokens=branch_tokens, salt=salt, owner=owner
        )

    def store_prompt(self, token_ids: _Ids, cached_tokens: int = 0, salt: bytes = NO_SALT) -> Prefilled:
        """Write what is cached of a prompt at once, in steps between those of the engine; return at its end.

        cached_tokens: of it, known before, for the result. Raises: RequestError, ClosedError.
        """
        return self._kv_transfer.store_prompt(token_ids, cached_tokens, salt)

    def cached_tokens(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """Number of leading ids of a prompt cached in memory, of all but the last, whose logits are computed anyway.

        Waits for the step in progress. Raises: RequestError, ClosedError.
        """
        return self._kv_transfer.cached_tokens(token_ids, salt)

    def stored_tokens(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """The same on disk, by the names of files. Raises: RequestError if nothing is kept there, ClosedError."""
        return self._kv_transfer.stored_tokens(token_ids, salt)

    def fetch_prompt(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """Read what is on disk of a prompt into memory, while others generate; return how many leading ids it then has.

        Raises: RequestError, ClosedError.
        """
        return self._kv_transfer.fetch_prompt(token_ids, salt)

    def handover_fingerprint(self) -> Fingerprint:
        """Fingerprint that both processes must share. The first call may have to read the weights, to hash them.

        Raises: RequestError if nothing is kept on disk, or the model's file has changed.
        """
        return self._kv_transfer.fingerprint()

    @property
    def handover_folder(self) -> str:
        """The folder of the prompt cache, which both processes share. Raises: RequestError without one."""
        return self._kv_transfer.folder

    def clear_cache(self) -> None:
        """Forget the keys and values of every former text in memory; running generations and the disk keep theirs."""
        with self._engine.exclusive_cache() as cache:
            cache.clear()

    def forget(self, token_ids: Sequence[int] | NDArray[np.integer], *, cache_salt: str | None = None) -> int:
        """Forget the keys and values, in memory, of one text, as far as no other text begins like it.

        Returns how many tokens that was. Running generations and the disk keep theirs. cache_salt: of the text.
        """
        wanted, salt = self._engine.check_prompt(token_ids, names_media=True), salt_of(cache_salt)
        with self._engine.exclusive_cache() as cache:
            return cache.forget(wanted, self._engine.text_salt(wanted, salt))

    def close(self) -> None:
        """Write conversations to disk, for some seconds at most; release memory and threads. May be called again.

        A forked child has nothing to release.
        """
        from localinfer.system.free_memory import return_free_memory

        if self._engine.scheduler.is_of_parent:
            return
        if self._disk is not None:
            self._disk.close()
        with self._session_lock:
            self._engine.close()
            if self._media is not None:
                self._media.close()
            for name in {"embedder", "decisions"} & self._parts.keys():
                cast(Closing, self._parts[name]).close()
        return_free_memory()

    @property
    def _kv_transfer(self) -> KVTransfer:
        from localinfer.generation.kv_transfer import KVTransfer

        # Made anew, so that the two do not hold each other in memory.
        return KVTransfer(self._engine, self._model, self._identity, self._disk, self._checked)

    def _require_identity(self) -> ModelIdentity:
        self._engine.check_usable()
        if self._identity is None:
            raise SessionFileError(
                "this model's files cannot be told apart from others'; load it with localinfer.load from where it lies"
            )
        return self._identity

    def _checked(self, options: Mapping[str, Any]) -> CheckedOptions:
        from localinfer.generation.options import check_options

        self._engine.check_usable()
        self._engine.check_generates()
        return check_options(options, self._model.tokenizer)

    def _chats(self) -> ChatModel:
        self._engine.check_usable()
        self._engine.check_generates()
        if self._chat_model is None:
            raise RequestError(
                "the model file has no tokenizer, so it cannot chat; it can complete prompts of token ids"
            )
        return self._chat_model

    def _most_tokens(self, options: Mapping[str, Any]) -> int | None:
        """Most tokens that a prompt may have, None for any number."""
        return None if options.get("context_shift") else self.context_length

    def _encode(self, prompt: Prompt | EncodedPrompt, parse_special: bool, max_tokens: int | None) -> EncodedPrompt:
        """The ids of a prompt; one that was encoded already, with its pictures and sounds, is taken as it is."""
        from localinfer.generation.text_generation import EncodedPrompt

        parse_special = check_flag("parse_special", parse_special)
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if not isinstance(prompt, str):
            return EncodedPrompt(prompt)
        token_ids = self.tokenizer.encode(prompt, parse_special=parse_special, max_tokens=max_tokens)
        # A context that is shifted still begins with the token that begins a text.
        return EncodedPrompt(token_ids, int(token_ids[:1] == [self.tokenizer.bos_token_id]))
