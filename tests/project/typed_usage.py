"""Every public call as a program with types makes it: mypy and pyright, both strict, find nothing to say.

Not run. Checked against an installed copy: `mypy --strict` and `pyright` with `typeCheckingMode` strict.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_type

import numpy as np
from numpy.typing import NDArray

import localinfer
from localinfer import errors


def show(stage: str, done: int, total: int) -> None:
    """A `ProgressCallback`."""
    print(stage, done / total if total else 0.0)


def check(path: Path) -> localinfer.Availability:
    """Ask before loading."""
    found = localinfer.availability(path, context_length=4096, kv_type="q8_0", memory_limit=4 << 30)
    if isinstance(found.error, errors.OutOfMemoryError):
        print(found.reason, found.memory_bytes)
    print(found.supported, found.context_length, found.is_compiled, found.compile_seconds)
    return found


def load(path: Path, cancel: threading.Event) -> localinfer.LLM | None:
    """Load with everything that an app gives."""
    progress: localinfer.ProgressCallback = show
    rope = localinfer.RopeOptions(base=1e6)
    limits = localinfer.EngineLimits()
    overrides: dict[str, bool | int | float | str] = {"llama.rope.freq_base": 1e6}
    try:
        return localinfer.load(
            path,
            device="cpu",
            threads=2,
            rope=rope,
            overrides=overrides,
            limits=limits,
            memory_limit=4 << 30,
            progress=progress,
            cancel=cancel,
        )
    except errors.LoadCancelledError as error:
        print(error)
        return None


def describe(llm: localinfer.LLM) -> str:
    """Facts of a model."""
    info: localinfer.ModelInfo = llm.info
    sizes = (info.parameters, info.file_bytes, info.memory_bytes, info.context_length, info.vocab_size)
    flags = (info.supports_tools, info.supports_thinking, llm.has_chat_template)
    kinds: tuple[str, ...] = (info.quantization, info.device, info.kv_type, *llm.capabilities)
    snapshots: localinfer.SnapshotStats | None = llm.snapshot_stats
    return f"{info.name} {info.architecture} {info.path.name} {sizes} {flags} {kinds} {info.chat_template} {snapshots}"


def complete(llm: localinfer.LLM, prompt: localinfer.Prompt) -> str:
    """Texts, at once and as they come."""
    constraint: localinfer.Constraint = localinfer.Regex("[a-z]+")
    done: localinfer.Completion = llm.complete(
        prompt, max_tokens=20, temperature=0.5, constraint=constraint, stop=["."]
    )
    stats: localinfer.Stats = done.stats
    print(done.text, done.finish_reason, stats.completion_tokens, stats.decode_tokens_per_second)
    text = ""
    with llm.stream(prompt, logprobs=2) as stream:
        for event in stream:
            one: localinfer.StreamEvent = event
            logprobs: localinfer.TokenLogprobs | None = one.logprobs
            print(logprobs)
            text += one.text
    several: list[localinfer.Completion] = llm.complete_many(prompt, n=2, best_of=3)
    beams: list[localinfer.BeamCompletion] = llm.beam_search(prompt, num_beams=2, max_tokens=8)
    best: localinfer.Beam = beams[0].beam
    return text + several[0].text + beams[0].text + best.finish_reason


def chat(llm: localinfer.LLM) -> str:
    """Conversations, with a schema and with tools."""
    messages: Sequence[dict[str, object]] = [{"role": "user", "content": "hello"}]
    choice: localinfer.ToolChoice = "auto"
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    options: localinfer.ChatOptions = {"max_tokens": 50, "temperature": 0.0}
    reply: localinfer.ReplyOptions = {"tools": [tool], "tool_choice": choice}
    done = llm.chat(messages, constraint=localinfer.JsonSchema({"type": "object"}), thinking=False)
    calls: Sequence[localinfer.ToolCall] = llm.chat(messages, **reply).tool_calls
    stream: localinfer.TextStream = llm.stream_chat(messages, **options)
    for event in stream:
        deltas: Sequence[localinfer.ToolCallDelta] = event.tool_calls
        print(event.text, event.reasoning, deltas)
    stream.close()
    several = llm.chat_many(messages, n=2, constraint=localinfer.JsonObject())
    tokens = llm.count_chat_tokens(messages) + len(llm.render_chat(messages))
    return done.text + "".join(call.name for call in calls) + several[0].text + str(tokens)


@dataclass
class Order:
    """An answer."""

    fruit: str


async def ask(llm: localinfer.LLM) -> None:
    """Typed answers: of any form of type, not of classes alone."""
    with llm.session("Be kind.", max_tokens=20) as session:
        assert_type(session.ask("Hi"), localinfer.Completion)
        assert_type(session.ask("How many?", type=int | None), int | None)
        assert_type(session.ask("Which?", type=Literal["yes", "no"]), Literal["yes", "no"])
        assert_type(session.ask("All?", type=list[str]), list[str])
        assert_type(await session.aask("What?", type=Order), Order)
        assert_type(await session.aask("What?", type=Order | None), Order | None)


def measure(llm: localinfer.LLM, documents: Sequence[str]) -> NDArray[np.float32]:
    """Scores, vectors, rankings and logits."""
    tokenizer: localinfer.Tokenizer = llm.tokenizer
    token_ids: list[int] = tokenizer.encode("some text")
    scores: list[localinfer.TokenLogprobs | None] = llm.score(token_ids, top=2)
    ranking: list[localinfer.RankedDocument] = llm.rerank("query", documents, top_n=1)
    vectors = llm.embed_many(list(documents), pooling="mean")
    print(scores, ranking[0].score, len(vectors), llm.embedding_ids(["one"]), tokenizer.decode(token_ids))
    vector: NDArray[np.float32] = llm.embed("text", dimensions=8)
    return np.concatenate([llm.logits(token_ids).reshape(-1), vector])


def keep(llm: localinfer.LLM, path: Path) -> list[int]:
    """Conversations on disk, and the end."""
    llm.save_session(path)
    restored = llm.load_session(path)
    llm.clear_cache()
    llm.close()
    return restored


def main(path: Path) -> None:
    """All of it."""
    options: localinfer.GenerationOptions = {"max_tokens": 5}
    if check(path).supported and (llm := load(path, threading.Event())) is not None:
        with llm:
            print(describe(llm), complete(llm, [1, 2, 3]), chat(llm), measure(llm, ["a", "b"]))
            print(llm.complete("text", parse_special=True, **options), llm.context_length, llm.vocab_size)
            keep(llm, path.with_suffix(".session"))
    print(localinfer.load_tokenizer(path).vocab_size)
