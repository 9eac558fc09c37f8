"""Arguments of a wrong kind, to all that is public: they work, or are refused by a typed error that names them."""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer import DecisionOptions
from localinfer.engine.admission import EngineLimits
from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.errors import LocalinferError
from localinfer.generation.options import ChatOptions, GenerationOptions, Grammar, JsonSchema, Regex, ReplyOptions
from localinfer.llm import LLM
from tests.models.talking_models import build_talking_model
from tests.support.limits import seconds

WRONG: dict[str, Any] = {
    "None": None,
    "5": 5,
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "True": True,
    "empty text": "",
    "x": "x",
    "half a character": "\ud800",
    "nul": "\0",
    "bytes": b"x",
    "empty list": [],
    "list of None": [None],
    "list of half a character": ["\ud800"],
    "nested": [[1]],
    "empty mapping": {},
    "mapping": {"a": 1},
    "mapping of None": {None: None},
    "object": object(),
    "callable": lambda: None,
    "class": int,
    "set": {1},
    "generator": (value for value in ()),
    "huge": 2**70,
    "-huge": -(2**70),
    "beyond floats": 10**400,
    "complex": 1j,
    "float array": np.array([1.5]),
    "object array": np.array([None, "x"], object),
    "matrix": np.zeros((2, 2), np.int32),
    "no dimension": np.array(5),
    "empty array": np.zeros(0, np.float64),
    "bool array": np.array([True]),
    "numpy integer": np.int64(3),
    "numpy float": np.float32(0.5),
    "huge ids": np.array([2**63], np.uint64),
    "list of huge": [2**70],
    "list beyond floats": [10**400],
}
IDS = [1, 2, 3]
MESSAGES = [{"role": "user", "content": "Hello"}]
ABOUT: dict[str, Any] = {"state": "Tom ran.", "questions": {"ran": localinfer.YesNo(instructions="Did he?")}}
SHORT: dict[str, Any] = {"max_tokens": 2, "seed": 1}


def drained(stream: Any) -> Any:
    return stream.result()


CALLS: dict[str, Callable[..., Any]] = {
    "complete": lambda llm, **given: llm.complete(**{"prompt": IDS, **SHORT, **given}),
    "stream": lambda llm, **given: drained(llm.stream(**{"prompt": IDS, **SHORT, **given})),
    "chat": lambda llm, **given: llm.chat(**{"messages": MESSAGES, **SHORT, **given}),
    "stream_chat": lambda llm, **given: drained(llm.stream_chat(**{"messages": MESSAGES, **SHORT, **given})),
    "complete_many": lambda llm, **given: llm.complete_many(**{"prompt": IDS, "n": 2, **SHORT, **given}),
    "chat_many": lambda llm, **given: llm.chat_many(**{"messages": MESSAGES, "n": 2, **SHORT, **given}),
    "beam_search": lambda llm, **given: llm.beam_search(**{"prompt": IDS, "num_beams": 2, "max_tokens": 2, **given}),
    "render_chat": lambda llm, **given: llm.render_chat(**{"messages": MESSAGES, **given}),
    "count_chat_tokens": lambda llm, **given: llm.count_chat_tokens(**{"messages": MESSAGES, **given}),
    "encode_chat": lambda llm, **given: llm.encode_chat(**{"messages": MESSAGES, **given}),
    "acomplete": lambda llm, **given: asyncio.run(llm.acomplete(**{"prompt": IDS, **SHORT, **given})),
    "achat": lambda llm, **given: asyncio.run(llm.achat(**{"messages": MESSAGES, **SHORT, **given})),
    "set_threads": lambda llm, **given: llm.set_threads(**{"threads": None, **given}),
    "set_defaults": lambda llm, **given: (llm.set_defaults(**given), llm.set_defaults()),
    "set_priority": lambda llm, **given: llm.set_priority(**{"priority": "normal", **given}),
    "session": lambda llm, **given: llm.session(**given).ask("Hello", **SHORT),
    "score": lambda llm, **given: llm.score(**{"token_ids": IDS, **given}),
    "embed": lambda llm, **given: llm.embed(**{"prompt": IDS, **given}),
    "embed_many": lambda llm, **given: llm.embed_many(**{"prompts": [IDS, "a"], **given}),
    "embedding_ids": lambda llm, **given: llm.embedding_ids(**{"prompts": [IDS, "a"], **given}),
    "decide": lambda llm, **given: llm.decide(**{**ABOUT, **({"state": None} if "messages" in given else {}), **given}),
    "adecide": lambda llm, **given: asyncio.run(llm.adecide(**{**ABOUT, **given})),
    "embedding_inputs": lambda llm, **given: llm.embedding_inputs(**{"prompts": [IDS, "a"], **given}),
    "logits": lambda llm, **given: llm.logits(**{"token_ids": IDS, **given}),
    "forget": lambda llm, **given: llm.forget(**{"token_ids": IDS, **given}),
    "prefill": lambda llm, **given: llm.prefill(**{"prompt": IDS, **given}),
    "stream_prefill": lambda llm, **given: drained(llm.stream_prefill(**{"token_ids": IDS, **given})),
    "store_prompt": lambda llm, **given: llm.store_prompt(**{"token_ids": IDS, **given}),
    "cached_tokens": lambda llm, **given: llm.cached_tokens(**{"token_ids": IDS, **given}),
    "stored_tokens": lambda llm, **given: llm.stored_tokens(**{"token_ids": IDS, **given}),
    "fetch_prompt": lambda llm, **given: llm.fetch_prompt(**{"token_ids": IDS, **given}),
}
OPTIONS = {
    "complete": {"prompt", "parse_special", *GenerationOptions.__annotations__},
    "stream": {"prompt", "parse_special"},
    "chat": {"messages", *ReplyOptions.__annotations__, "max_tokens", "stop", "constraint", "prediction"},
    "stream_chat": {"messages"},
    "acomplete": {"prompt", "parse_special", "max_tokens"},
    "achat": {"messages", "tools"},
    "set_threads": {"threads"},
    "set_priority": {"priority"},
    "set_defaults": {*GenerationOptions.__annotations__, "thinking", "thinking_budget", "template_variables"},
    "complete_many": {"prompt", "n", "best_of", "parse_special", "seed", "logprobs", "stop", "prediction"},
    "chat_many": {"messages", "n", "best_of", "tools"},
    "beam_search": {"prompt", "num_beams", "max_tokens", "length_penalty", "ignore_eos", "parse_special"},
    "render_chat": {"messages", "add_generation_prompt", "cache_salt", *ReplyOptions.__annotations__},
    "count_chat_tokens": {"cache_salt", "messages", *ReplyOptions.__annotations__},
    "encode_chat": {"cache_salt", "messages", *ReplyOptions.__annotations__},
    "session": {"system", "tools", "messages", "on_tool_call", "on_tool_result", "max_tool_rounds"},
    "score": {"token_ids", "top"},
    "embed": {"prompt", "pooling", "normalize", "dimensions", "truncate"},
    "embed_many": {"prompts", "pooling", "normalize", "dimensions", "truncate"},
    "embedding_ids": {"prompts", "truncate"},
    "decide": {"state", "questions", *DecisionOptions.__annotations__} - {"on_encoded"},
    "adecide": {"state", "questions"},
    "embedding_inputs": {"prompts", "truncate"},
    "logits": {"token_ids", "first"},
    "forget": {"token_ids", "cache_salt"},
    "prefill": {"prompt", "parse_special", "cache_salt"},
    "stream_prefill": {"token_ids", "system_tokens", "branch_tokens", "salt", "owner"},
    "store_prompt": {"token_ids", "cached_tokens", "salt"},
    "cached_tokens": {"token_ids", "salt"},
    "stored_tokens": {"token_ids", "salt"},
    "fetch_prompt": {"token_ids", "salt"},
}
ALSO_NAMED = {
    # What an error may call an argument where it speaks of what is in it.
    "prompts": ("prompts", "prompt", "token id", "text", "context"),
    "prompt": ("prompt", "token id", "text", "context"),
    "token_ids": ("token id", "prompt", "context", "conversation"),
    "messages": ("message", "template", "content"),
    "tools": ("tool",),
    "system": ("system", "message", "text"),
    "chat_template": ("chat_template", "chat template"),
    "overrides": ("overrides", "cannot be set", "is set to"),
    "tool_choice": ("tool_choice",),
    "max_tokens": ("max_tokens",),
    "constraint": ("constraint", "schema"),
    "template_variables": ("template_variables", "template"),
    "thinking_budget": ("thinking",),
    "model": ("model", "does not exist", "cannot be opened", "holds no"),
    "draft": ("draft", "does not exist", "cannot be opened", "holds no"),
    "state": ("state", "JSON", "text", "context"),
    "questions": ("question",),
    "path": ("path", "conversation", "session", "x"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """One that keeps prompts on disk, without which nothing can be handed over."""
    folder = tmp_path_factory.mktemp("prompts")
    with localinfer.load(threads=1, context_length=256, disk_cache=True, disk_cache_folder=folder) as made:
        yield made


def check(call: Callable[[Any], Any], name: str, kinds: Iterable[str] = WRONG) -> None:
    """Call with each kind within bounded time; it works, or raises an error of the tree that names the argument."""
    happened: dict[str, BaseException | None] = {}

    def run(kind: str) -> None:
        try:
            call(WRONG[kind])
            happened[kind] = None
        except BaseException as error:
            happened[kind] = error

    left = deque(kinds)

    def run_all() -> None:
        while left:
            run(left[0])
            left.popleft()

    thread = threading.Thread(target=run_all, daemon=True)
    thread.start()
    while thread.is_alive():
        num_left = len(left)
        thread.join(seconds(15))
        assert len(left) < num_left or not thread.is_alive(), f"{name} of {left[0]} hangs"
    words = ALSO_NAMED.get(name, (name,))
    for kind, error in happened.items():
        if error is not None:
            assert isinstance(error, LocalinferError), f"{name} of {kind}: {type(error).__name__}: {error}"
            assert any(word in str(error) for word in words), f"{name} of {kind} is not named: {error}"


@pytest.mark.parametrize("method", CALLS)
def test_methods_refuse_what_they_cannot_use_by_its_name(llm: LLM, method: str) -> None:
    for name in sorted(OPTIONS[method]):
        check(lambda value, name=name: CALLS[method](llm, **{name: value}), name)  # type: ignore[misc]


def test_every_parameter_of_the_methods_is_tried() -> None:
    tried = {name for names in OPTIONS.values() for name in names}
    methods = {name for name, _ in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert methods - set(CALLS) == {
        *(
            "clear_cache",
            "close",
            "encode_prompt",
            "handover_fingerprint",
            "load_session",
            "move_volatile_heads",
            "prepare_constraints",
            "rerank",
            "save_session",
        )
    }
    for method in CALLS:
        for name, parameter in inspect.signature(getattr(LLM, method)).parameters.items():
            if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
                assert name in OPTIONS[method], f"{method}({name})"
    assert set(ChatOptions.__annotations__) <= tried


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads in a moment where an argument may have what it was given."""
    return build_talking_model(tmp_path_factory.mktemp("tiny"), "llama-gqa")


@pytest.mark.parametrize("name", inspect.signature(localinfer.load).parameters)
def test_load_refuses_what_it_cannot_use_by_its_name(name: str, tiny: Path) -> None:
    def load(value: Any) -> None:
        localinfer.load(**{"model": tiny, "threads": 1, "context_length": 64, name: value}).close()

    default = inspect.signature(localinfer.load).parameters[name].default
    given = {kind: value for kind, value in WRONG.items() if value is not None and value is not default}
    check(load, name, [kind for kind, value in given.items() if name != "progress" or not callable(value)])


def test_load_tokenizer_refuses_what_it_cannot_use() -> None:
    check(localinfer.load_tokenizer, "model", [kind for kind, value in WRONG.items() if value is not None])


def test_sessions_refuse_what_they_cannot_use(llm: LLM, tmp_path: Path) -> None:
    llm.complete(IDS, **SHORT)
    check(lambda value: llm.save_session(tmp_path / "session", value), "token_ids")
    check(llm.load_session, "path")
    check(llm.save_session, "path", [kind for kind, value in WRONG.items() if not isinstance(value, str)])


@pytest.mark.parametrize("made", [SamplingParams, EngineLimits])
def test_parameters_refuse_what_they_cannot_use_by_its_name(made: Any) -> None:
    for name in made.__dataclass_fields__:
        check(lambda value, name=name: made(**{name: value}), name)  # type: ignore[misc]


@pytest.mark.parametrize("made", [JsonSchema, Regex, Grammar])
def test_constraints_refuse_what_they_cannot_use(llm: LLM, made: Any) -> None:
    words = {JsonSchema: "schema", Regex: "regular expression", Grammar: "grammar"}[made]
    kinds = [kind for kind in WRONG if kind != "empty text"]
    check(lambda value: llm.complete(IDS, constraint=made(value), **SHORT), words, kinds)
