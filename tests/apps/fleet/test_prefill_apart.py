"""Prompts that another deployment computes: replicas in this process, and a handle of Serve that is none."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from localinfer.apps.fleet.options import PrefillOptions, ReplicaOptions, with_threads
from localinfer.apps.fleet.replica import HEADERS, AnswerPart, EngineReplica, PrefillDeployment, RelayedRequest
from localinfer.apps.server.kv_transfer import PrefillCancelled
from localinfer.apps.server.transport.settings import KVTransferOptions, PrefillAddress, ServerSettings
from localinfer.errors import RequestError

STORY = "Once upon a time a small dog found a red ball in the garden, and the cat saw it too. "
BODY = {"prompt": STORY * 8, "max_tokens": 12, "temperature": 0.9, "seed": 7, "logprobs": 3}
APART = PrefillOptions(replicas=1, threshold=32)
Answer = AsyncIterator[list[AnswerPart]]


class Handle:
    """As much of a deployment's handle as is used. answer: what its replicas yield; cancelled: answers that were."""

    def __init__(self, answer: Callable[[RelayedRequest], Answer]) -> None:
        self._answer = answer
        self.num_asked = self.num_cancelled = 0

    def options(self, *, stream: bool) -> "Handle":
        assert stream
        return self

    @property
    def prefill(self) -> "Handle":
        return self

    def remote(self, request: RelayedRequest) -> "Response":
        self.num_asked += 1
        return Response(self, self._answer(request))


class Response:
    def __init__(self, handle: Handle, answer: Answer) -> None:
        self._handle, self._answer = handle, answer

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[AnswerPart]:
        return await anext(self._answer)

    def cancel(self) -> None:
        self._handle.num_cancelled += 1


def options(folder: Path, **load: Any) -> ReplicaOptions:
    kept = {"kv_memory": 64 << 20, "speculation": None, "disk_cache": True, "disk_cache_folder": str(folder)}
    return with_threads(ReplicaOptions(None, None, ServerSettings(serves_page=False), {**kept, **load}), 1)


class Replica(EngineReplica):
    """One that nobody awaits when it is collected."""

    def __del__(self) -> None:
        pass

    async def close(self) -> None:
        await super().__del__()


async def replica(serves: ReplicaOptions, handle: Handle | None = None, num_prefill: int = 0) -> Replica:
    """Made as Serve makes it."""
    made = Replica.__new__(Replica)
    await Replica.__init__(made, serves, handle, num_prefill)
    return made


async def asked(engine: EngineReplica, path: str, body: dict[str, Any] | None = None) -> bytes:
    method = "GET" if body is None else "POST"
    parts = await engine.whole_answer(RelayedRequest(method, path, b"", HEADERS, json.dumps(body).encode()))
    messages = [part.message for part in parts if part.message is not None]
    content = b"".join(message.get("body", b"") for message in messages)
    assert messages[0]["status"] == 200, content
    return content


async def completion(engine: EngineReplica, **more: Any) -> dict[str, Any]:
    found = json.loads(await asked(engine, "/v1/completions", {**BODY, **more}))
    return {name: found[name] for name in ("choices", "usage")}


async def handovers(engine: EngineReplica) -> dict[str, int]:
    text = (await asked(engine, "/metrics")).decode()
    found = re.findall(r'localinfer_handovers_total\{outcome="(\w+)"\} (\d+)', text)
    return {outcome: int(number) for outcome, number in found}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of one process that computes all itself."""
    folder = tmp_path_factory.mktemp("alone")

    async def alone() -> dict[str, Any]:
        engine = await replica(options(folder))
        try:
            return await completion(engine)
        finally:
            await engine.close()

    return asyncio.run(alone())


def run_pair(
    folder: Path, ask: Callable[[EngineReplica, EngineReplica, Handle], Coroutine[Any, Any, None]], num_prefill: int = 1
) -> None:
    """A replica that computes prompts, and one that asks it by a handle."""

    async def run() -> None:
        asking = APART.asking(options(folder))
        prefill = await replica(APART.asked(asking))
        handle = Handle(prefill.prefill)
        engine = await replica(asking, handle, num_prefill)
        try:
            await ask(engine, prefill, handle)
        finally:
            await engine.close()
            await prefill.close()

    asyncio.run(run())


def test_a_prompt_that_another_replica_computed_is_answered_with_the_bytes_of_one(tmp_path, wanted):
    async def ask(engine: EngineReplica, prefill: EngineReplica, handle: Handle) -> None:
        assert await completion(engine) == wanted
        assert await handovers(engine) == {"handed_over": 1}
        computed = f'localinfer_prompt_tokens_total{{model="demo-f16"}} {wanted["usage"]["prompt_tokens"]}'
        assert computed in (await asked(prefill, "/metrics")).decode()
        assert handle.num_cancelled == 0
        # A short one is computed where it is.
        await completion(engine, prompt="Hi")
        assert handle.num_asked == 1

    run_pair(tmp_path, ask)


async def ends(request: RelayedRequest) -> Answer:
    yield []


async def breaks(request: RelayedRequest) -> Answer:
    yield []
    yield [AnswerPart((), {"type": "http.response.start", "status": 200, "headers": []})]
    yield [AnswerPart((), {"type": "http.response.body", "body": b'{"computed_tok', "more_body": True})]
    raise OSError("the actor died")


async def is_silent(request: RelayedRequest) -> Answer:
    await asyncio.sleep(3600)
    yield []


async def refuses(request: RelayedRequest) -> Answer:
    yield [AnswerPart((), {"type": "http.response.start", "status": 409, "headers": []})]
    body = json.dumps({"error": {"message": "they differ in weights"}}).encode()
    yield [AnswerPart((), {"type": "http.response.body", "body": body})]


async def says_nonsense(request: RelayedRequest) -> Answer:
    yield [AnswerPart((), {"type": "http.response.start", "status": 200, "headers": []})]
    yield [AnswerPart((), {"type": "http.response.body", "body": b"[]\n", "more_body": True})]


def cannot_be_called(request: RelayedRequest) -> Answer:
    raise RuntimeError("the deployment is gone")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ends, "went away before it was done"),
        (breaks, "cannot be reached, or went away: OSError"),
        (is_silent, "does not answer"),
        (refuses, "they differ in weights"),
        (says_nonsense, "none of a prefill server"),
        (cannot_be_called, "cannot be reached, or went away: RuntimeError"),
    ],
)
def test_whatever_fails_there_the_prompt_is_computed_here(answer, reason, tmp_path, wanted, monkeypatch, caplog):
    monkeypatch.setattr("localinfer.apps.fleet.replica.CONNECT_SECONDS", 0.3)
    caplog.set_level("WARNING")

    async def run() -> None:
        engine = await replica(APART.asking(options(tmp_path)), Handle(answer), 1)
        try:
            assert await completion(engine) == wanted
            assert await handovers(engine) == {"failed": 1, "computed_here": 1}
        finally:
            await engine.close()

    asyncio.run(run())
    assert reason in caplog.text


def test_where_one_replica_fails_the_next_is_asked_at_once(tmp_path, wanted):
    async def ask(engine: EngineReplica, prefill: EngineReplica, handle: Handle) -> None:
        handle._answer = lambda request: breaks(request) if handle.num_asked == 1 else prefill.prefill(request)
        assert await completion(engine) == wanted
        assert await handovers(engine) == {"failed": 1, "handed_over": 1}

    run_pair(tmp_path, ask, num_prefill=2)


def test_a_text_that_nobody_waits_for_stops_the_prefill():
    async def run() -> None:
        handle = Handle(is_silent)
        deployment = PrefillDeployment(handle, asyncio.get_running_loop())
        with pytest.raises(PrefillCancelled):
            await asyncio.to_thread(deployment.ask, b"{}", deadline=1e9, is_cancelled=lambda: True)
        assert handle.num_cancelled == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": -1}, "prefill_replicas is -1"),
        ({"replicas": 1.5}, "prefill_replicas is 1.5"),
        ({"replicas": 1, "cpus": -1}, "prefill_cpus is -1"),
        ({"replicas": 1, "threshold": 0}, "prefill_threshold is 0"),
        ({"replicas": 1, "deadline": 0}, "prefill_deadline is 0"),
        ({"threshold": 64}, "prefill_threshold is of use with prefill_replicas only"),
    ],
)
def test_options_that_make_no_sense_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        PrefillOptions(**given)


@pytest.mark.parametrize(
    ("load", "words"),
    [({"disk_cache": False}, "leave out disk_cache=False"), ({"kv_window": 512}, "kv_window keeps no whole prompt")],
)
def test_models_that_keep_no_prompts_hand_none_over(load: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        APART.asking(options(tmp_path, **load))


def test_who_computes_prompts_is_said_once(tmp_path: Path) -> None:
    served = KVTransferOptions(role="decode", servers=(PrefillAddress("http://127.0.0.1:1"),))
    both = ReplicaOptions(None, None, ServerSettings(handover=served), {})
    with pytest.raises(RequestError, match="leave one of them out"):
        APART.asking(both)
    assert PrefillOptions().asking(both) is both


def test_replicas_that_compute_prompts_have_the_options_of_those_that_ask(tmp_path: Path) -> None:
    settings = ServerSettings(token="sk-x", max_generations=7, allowed_hosts=("a",))
    asking = APART.asking(ReplicaOptions("model.gguf", "m", settings, {"disk_cache_folder": str(tmp_path)}))
    prefill = APART.asked(asking)
    assert (asking.settings.token, asking.settings.handover.threshold) == ("sk-x", 32)
    assert (prefill.model, prefill.name, prefill.load) == (asking.model, asking.name, asking.load)
    assert prefill.load["disk_cache"] is True
    # Nobody but an engine reaches them, and those have checked who asks.
    assert (prefill.settings.access_tokens, prefill.settings.handover.role) == ((), "prefill")
    assert prefill.settings.max_generations == 7
