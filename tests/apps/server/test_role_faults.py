"""What fails between a prefill and a decode server: the reply has the bytes of one process all the same."""

import errno
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from local_servers import ServedModel, serving
from role_servers import COMPLETION, STORY, decoding, handovers, loaded, loader, prefilling, sent
from server_process import serve

from localinfer.apps.server import kv_transfer
from localinfer.apps.server.transport.settings import KVTransferOptions, ServerSettings
from localinfer.storage import page_store
from tests.support.inside import engine_of
from tests.support.limits import seconds, wait_until


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server of role both, which computes all itself."""
    with serving(ServerSettings(port=0), load=loader(tmp_path_factory.mktemp("alone"))) as running:
        yield running


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith("localinfer.server.kv_transfer")]


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"http://127.0.0.1:{found.getsockname()[1]}"


BODY = {"prompt": "A " + STORY * 3, **COMPLETION}


def test_without_a_prefill_server_prompts_are_computed_here(
    tmp_path: Path, alone: ServedModel, warned: Callable[[], list[str]]
) -> None:
    wanted = sent(alone, "/v1/completions", {**BODY, "cache_salt": "first"})
    with decoding(tmp_path, closed_port()) as decode:
        assert sent(decode, "/v1/completions", {**BODY, "cache_salt": "x"}) == wanted
        assert sent(decode, "/v1/completions", {**BODY, "cache_salt": "y"}) == wanted
        assert handovers(decode) == {"failed": 1, "computed_here": 2}
    assert len(warned()) == 1
    assert "cannot be reached" in warned()[0]


def test_another_prefill_server_takes_over(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    with prefilling(tmp_path) as running, decoding(tmp_path, closed_port(), running.url) as decode:
        sent(decode, "/v1/completions", BODY)
        assert handovers(decode) == {"failed": 1, "handed_over": 1}
    assert len(warned()) == 1


def test_a_server_of_another_model_is_named_as_such(
    tmp_path: Path, alone: ServedModel, warned: Callable[[], list[str]]
) -> None:
    wanted = sent(alone, "/v1/completions", {**BODY, "cache_salt": "second"})
    other = ServerSettings(port=0, handover=KVTransferOptions(role="prefill"))
    with (
        serving(other, load=loader(tmp_path, kv_type="q8_0")) as running,
        decoding(tmp_path, running.url) as decode,
    ):
        # Its kernels may have to be compiled, which takes longer than a decode server waits.
        loaded(running)
        assert sent(decode, "/v1/completions", BODY) == wanted
    assert len(warned()) == 1
    assert "differ in key-value layout" in warned()[0]


def test_a_folder_that_is_not_shared_is_named(
    tmp_path: Path, alone: ServedModel, warned: Callable[[], list[str]]
) -> None:
    wanted = sent(alone, "/v1/completions", {**BODY, "cache_salt": "third"})
    with prefilling(tmp_path / "there") as running, decoding(tmp_path / "here", running.url) as decode:
        assert sent(decode, "/v1/completions", BODY) == wanted
    assert len(warned()) == 1
    assert str(tmp_path / "here") in warned()[0]
    assert "--disk-cache-folder" in warned()[0]


def test_a_full_disk_leaves_the_rest_to_the_decode_server(
    tmp_path: Path, alone: ServedModel, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = sent(alone, "/v1/completions", {**BODY, "cache_salt": "fourth"})
    written = []

    def write_page(path: Path, *arguments: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        page_store.write_page(path, *arguments)

    monkeypatch.setattr("localinfer.storage.page_store.write_page", write_page)
    with prefilling(tmp_path) as running, decoding(tmp_path, running.url) as decode:
        assert sent(decode, "/v1/completions", BODY) == wanted
    assert len(written) == 2
    assert len(warned()) == 1
    assert "could be written" in warned()[0]
    assert os.strerror(errno.ENOSPC) in warned()[0]


@pytest.mark.parametrize("damage", ["altered", "gone"])
def test_damaged_and_deleted_pages_are_computed_here(
    damage: str, tmp_path: Path, alone: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After both servers have agreed that they are there, the last moment to lose them."""
    wanted = sent(alone, "/v1/completions", {**BODY, "cache_salt": damage})
    with prefilling(tmp_path) as running, decoding(tmp_path, running.url) as decode:
        llm, damaged = loaded(decode), []
        fetch = llm.fetch_prompt

        def damage_and_fetch(*arguments: Any) -> int:
            for path in sorted(tmp_path.rglob("*.page"))[1::2]:
                damaged.append(path)
                if damage == "gone":
                    path.unlink()
                else:
                    content = bytearray(path.read_bytes())
                    content[-1] ^= 1
                    path.write_bytes(content)
            return fetch(*arguments)

        monkeypatch.setattr(llm, "fetch_prompt", damage_and_fetch)
        found = json.loads(sent(decode, "/v1/completions", BODY))
        assert damaged
        assert found["choices"] == json.loads(wanted)["choices"]


def test_a_slow_prefill_server_is_not_waited_for(
    tmp_path: Path, alone: ServedModel, warned: Callable[[], list[str]]
) -> None:
    wanted = sent(alone, "/v1/completions", {**BODY, "cache_salt": "fifth"})
    with (
        prefilling(tmp_path) as running,
        decoding(tmp_path, running.url, handover={"deadline_seconds": 0.6}) as decode,
    ):
        prefill = loaded(running)
        with engine_of(prefill).exclusive_cache():
            assert sent(decode, "/v1/completions", BODY) == wanted
        # What it was still to do for a server that left is given up.
        assert wait_until(lambda: not prefill.engine_stats.running + prefill.engine_stats.waiting)
    assert warned() == [f"the prefill server {running.url}: it is slower than the deadline; prompts are computed here"]


def test_a_client_that_leaves_stops_the_prefill(tmp_path: Path) -> None:
    with prefilling(tmp_path) as running, decoding(tmp_path, running.url) as decode:
        prefill = loaded(running)
        with engine_of(prefill).exclusive_cache():
            left = threading.Event()

            def ask() -> None:
                with decode.client() as client, client.stream("POST", "/v1/completions", json={**BODY, "stream": True}):
                    left.set()

            asking = threading.Thread(target=ask)
            asking.start()
            assert wait_until(lambda: prefill.engine_stats.waiting)
            assert left.wait(seconds(10))
            asking.join(seconds(10))
            assert wait_until(lambda: not decode.server.service.replies())
            assert wait_until(lambda: not running.server.service.replies())


STUCK = """
import sys, time
import {module} as module
from localinfer.apps.cli import main
work, done = module.{name}, []
def work_and_stick(*arguments):
    if len(done) >= {count}:
        time.sleep(600)
    done.append(work(*arguments))
    return done[-1]
module.{name} = work_and_stick
sys.exit(main())
"""
"""A command that gets so far with something, and no further."""


@pytest.mark.parametrize(
    ("module", "name", "count", "num_pages"),
    [("localinfer.engine.runner", "forward", 1, 0), ("localinfer.storage.page_store", "write_page", 2, 2)],
    ids=["computing", "writing"],
)
def test_a_prefill_server_killed_midway_costs_nothing_but_time(
    module: str,
    name: str,
    count: int,
    num_pages: int,
    tmp_path: Path,
    alone: ServedModel,
    warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One chunk of the prompt is computed there, or two of its pages are written, when the process is killed."""
    body = {**BODY, "prompt": "A " + STORY * 36}
    wanted = sent(alone, "/v1/completions", {**body, "cache_salt": name})
    total = json.loads(wanted)["usage"]["prompt_tokens"]
    least = total if num_pages else 1
    lines: list[dict[str, Any]] = []
    read = kv_transfer._line

    def noted(response: Any) -> bytes:
        line = read(response)
        lines.append(json.loads(line))
        return line

    monkeypatch.setattr(kv_transfer, "_line", noted)
    script = STUCK.format(module=module, name=name, count=count)
    with ExitStack() as stack:
        process, url = stack.enter_context(serve(tmp_path, "--role", "prefill", script=script))
        decode = stack.enter_context(decoding(tmp_path, url))
        answers: list[bytes] = []
        asking = threading.Thread(target=lambda: answers.append(sent(decode, "/v1/completions", body)))
        asking.start()
        assert wait_until(lambda: any(line.get("computed_tokens", 0) >= least for line in lines)), lines
        assert wait_until(lambda: len(list(tmp_path.rglob("*.page"))) >= num_pages)
        process.kill()
        asking.join(seconds(30))
        assert process.wait(seconds(10)) == -signal.SIGKILL
        assert answers == [wanted]
        assert handovers(decode) == {"failed": 1, "computed_here": 1}
    assert (lines[-1]["computed_tokens"] == total) == (num_pages > 0) and "stored_tokens" not in lines[-1]
    assert len(warned()) == 1 and "went away" in warned()[0]
