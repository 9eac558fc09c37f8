"""A server's KV cache events: of the model that requests load, unload and load again, until the server's end."""

import signal
import stat
import sys
from pathlib import Path

import httpx
import pytest
from server_process import serve

import localinfer
from localinfer.apps.cli import EXIT_BAD_INPUT, main
from tests.support.limits import seconds, wait_until

pytest.importorskip("zmq", reason="subscribers need pyzmq")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="addresses that are files, and SIGTERM")

from tests.storage.kv_events.subscribers import Subscriber  # noqa: E402

TEXT = "Once upon a time there was a little dog who lived in an old house by the sea. " * 8


def test_routers_know_the_blocks_of_a_server_through_unload_and_end(tmp_path: Path) -> None:
    live, past = (f"ipc://{tmp_path}/{name}" for name in ("live", "past"))
    options = (
        "--no-disk-cache",
        "--kv-events",
        live,
        "--kv-events-replay-endpoint",
        past,
        "--kv-events-topic",
        "kv@a@b",
    )
    with serve(tmp_path, *options) as (process, url):
        assert process.stderr is not None
        assert process.stderr.readline() == f"KV cache events at {live}, replayed at {past}\n"
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("live", "past")] == [0o600, 0o600]
        subscriber = Subscriber(live, "kv@")
        known = subscriber.known

        def has_come(cleared: int, stored: int) -> bool:
            while subscriber.next(0.02) is not None:
                assert subscriber.topic == b"kv@a@b"
            if subscriber.missing is not None or not subscriber.batches:
                subscriber.replay(past, len(subscriber.batches), b"kv@a@b")
            return (known.num_cleared, known.num_stored) == (cleared, stored)

        try:
            with httpx.Client(base_url=url, timeout=seconds(30), trust_env=False, verify=False) as client:
                body = {"prompt": TEXT, "max_tokens": 1, "temperature": 0}
                ids = client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
                wanted = localinfer.block_hashes(ids)
                assert len(wanted) > 3
                assert client.post("/v1/completions", json=body).status_code == 200
                assert wait_until(lambda: has_come(0, len(wanted)))
                assert list(known.blocks) == wanted
                assert client.post("/v1/completions", json=body | {"cache_salt": "team"}).status_code == 200
                assert wait_until(lambda: has_come(0, 2 * len(wanted)))
                # A request's salt stands for the client, nobody in particular here, and its own.
                salted = localinfer.block_hashes(ids, cache_salt='["", "team"]')
                assert list(known.blocks) == wanted + salted
                model = client.get("/v1/models").json()["data"][0]["id"]
                assert client.post("/models/unload", json={"model": model}).status_code == 200
                assert wait_until(lambda: has_come(1, 2 * len(wanted))) and not known.blocks
                assert client.post("/v1/completions", json=body).status_code == 200
                assert wait_until(lambda: has_come(1, 3 * len(wanted)))
                assert list(known.blocks) == wanted
            process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: has_come(2, 3 * len(wanted))) and not known.blocks
        finally:
            subscriber.close()


def test_a_server_of_several_models_has_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    words = ["serve", "--port", "0", "--no-socket", "--no-disk-cache", "--models", str(tmp_path)]
    assert main([*words, "--kv-events", "tcp://127.0.0.1:*"]) == EXIT_BAD_INPUT
    wanted = "KV events tell of one model, and there are 2 to serve; name one with -m, and run a server for each"
    assert capsys.readouterr().err == f"error: {wanted}\n"
