"""Loading and asking from an event loop: in a thread that ends with the task, and nothing of it on the loop."""

import asyncio
import inspect
import subprocess
import sys
import threading
from typing import Any

import pytest

import localinfer
from localinfer.errors import LocalinferError, ModelFileError, RequestError
from localinfer.llm import LLM
from localinfer.loading import load as loading
from tests.api.test_async_stream import ENDLESS, endless_llm, gated, reached, run, threads
from tests.engine.fakes import FakeTemplate, fake_model, text_model
from tests.support.limits import seconds, wait_until


class FakeLoad:
    """Stands in for `load`: reports three stages, each when it may, and obeys its event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Any] = {}
        self.began, self.may_end = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.model = fake_model()
        self.is_deaf = False
        monkeypatch.setattr(loading, "load", self)

    def __call__(self, model: Any = None, **options: Any) -> LLM:
        self.given, self.thread = {"model": model, **options}, threading.current_thread()
        for stage in range(3):
            if "progress" in options:
                options["progress"]("reading", stage, 3)
        self.began.set()
        while not self.may_end.wait(0.005):
            if options["cancel"].is_set() and not self.is_deaf:
                raise LocalinferError("cancelled")
        return LLM(self.model)  # type: ignore[arg-type]


@pytest.fixture
def fake_load(monkeypatch: pytest.MonkeyPatch) -> FakeLoad:
    return FakeLoad(monkeypatch)


def test_a_model_is_loaded_in_a_thread_and_its_progress_told_on_the_loop(fake_load: FakeLoad) -> None:
    told: list[tuple[Any, ...]] = []
    fake_load.may_end.set()

    def progress(*stage: Any) -> None:
        told.append((*stage, threading.current_thread(), asyncio.get_running_loop()))

    async def main() -> None:
        own = threading.Event()
        llm = await localinfer.aload("path", threads=2, progress=progress, cancel=own)
        assert llm.context_length == 64
        loop, thread = asyncio.get_running_loop(), threading.current_thread()
        assert told == [("reading", stage, 3, thread, loop) for stage in range(3)]
        given = {name: fake_load.given[name] for name in ("model", "threads", "cancel")}
        assert given == {"model": "path", "threads": 2, "cancel": own}
        assert fake_load.thread is not thread

    run(main)


def test_cancelling_the_task_stops_the_load(fake_load: FakeLoad) -> None:
    async def main() -> None:
        task = asyncio.create_task(localinfer.aload())
        await reached(fake_load.began)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake_load.given["cancel"].is_set()

    run(main)


def test_a_model_that_comes_after_the_task_was_cancelled_is_closed(fake_load: FakeLoad) -> None:
    fake_load.is_deaf = True

    async def main() -> None:
        task = asyncio.create_task(localinfer.aload())
        await reached(fake_load.began)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fake_load.may_end.set()
        await asyncio.to_thread(wait_until, lambda: fake_load.model.times_closed == 1)

    run(main)
    assert fake_load.model.times_closed == 1


@pytest.mark.parametrize("is_deaf", [False, True])
def test_what_progress_raises_ends_the_load(fake_load: FakeLoad, is_deaf: bool) -> None:
    fake_load.is_deaf = is_deaf

    def progress(stage: str, done: int, total: int) -> None:
        if is_deaf:
            fake_load.may_end.set()
        raise KeyError(done)

    async def main() -> None:
        with pytest.raises(KeyError, match="0"):
            await localinfer.aload(progress=progress)

    run(main)
    assert fake_load.model.times_closed == int(is_deaf)


def test_the_demo_model_is_loaded_and_errors_are_those_of_load() -> None:
    stages: set[str] = set()

    async def main() -> None:
        with await localinfer.aload(threads=1, progress=lambda stage, done, total: stages.add(stage)) as llm:
            found = await llm.acomplete("Once upon a time", max_tokens=5, temperature=0)
            assert found.text == llm.complete("Once upon a time", max_tokens=5, temperature=0).text
        for options, error in (({"model": "/nowhere.gguf"}, ModelFileError), ({"threads": 0}, RequestError)):
            with pytest.raises(error):
                await localinfer.aload(**options)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="progress"):
            await localinfer.aload(progress=3)  # type: ignore[arg-type]

    run(main)
    assert stages


def test_nothing_heavy_is_imported_before_the_thread_does() -> None:
    code = "import sys, localinfer; localinfer.aload; print(sorted({'numba', 'numpy', 'jinja2'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_completions_and_chats_are_those_of_the_plain_methods() -> None:
    model = text_model("fine", prompt_length=5)
    model.chat_template = FakeTemplate()
    llm = LLM(model)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        found = await asyncio.gather(
            llm.acomplete([1, 2, 3, 4, 5], temperature=0), llm.achat(messages, temperature=0, stop=["e"])
        )
        assert [(one.text, one.finish_reason) for one in found] == [("fine", "stop"), ("fin", "stop")]
        with pytest.raises(RequestError, match="no option temprature"):
            await llm.acomplete("a", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(RequestError, match="message"):
            await llm.achat([])

    run(main)


def test_cancelling_the_task_cancels_its_generation() -> None:
    gate, llm = gated(7)

    async def main() -> None:
        task = asyncio.create_task(llm.acomplete("abcd", **ENDLESS))
        await reached(gate.reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert threads()
        gate.may_pass.set()

    run(main)
    assert not llm._engine.scheduler.running


def test_a_task_that_is_cancelled_while_its_prompt_is_encoded_generates_nothing() -> None:
    llm = endless_llm()
    encoding, may_encode = threading.Event(), threading.Event()
    encode = llm.tokenizer.encode

    def slow(*arguments: Any, **options: Any) -> list[int]:
        encoding.set()
        assert may_encode.wait(seconds(10))
        return encode(*arguments, **options)

    llm.tokenizer.encode = slow  # type: ignore[method-assign]

    async def main() -> None:
        task = asyncio.create_task(llm.acomplete("abcd", **ENDLESS))
        await reached(encoding)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_encode.set()

    run(main)
    assert llm._engine.program.batch_sizes == []  # type: ignore[attr-defined]


def test_what_the_caller_changes_meanwhile_changes_nothing() -> None:
    llm = LLM(text_model("hello", prompt_length=3))  # type: ignore[arg-type]
    prompt, stop = [256, 97, 98], ["lo"]

    async def main() -> None:
        task = asyncio.create_task(llm.acomplete(prompt, stop=stop, temperature=0))
        await asyncio.sleep(0)
        prompt.append(1)
        stop[0] = "e"
        assert (await task).text == "hel"

    run(main)


def test_the_signatures_are_the_same() -> None:
    for name in ("complete", "chat"):
        assert inspect.signature(getattr(LLM, name)) == inspect.signature(getattr(LLM, f"a{name}"))
