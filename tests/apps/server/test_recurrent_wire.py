"""Models with recurrent layers behind the server: replies, meters and `localinfer cache` agree, and misses say why."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_frames import post_stream
from local_servers import serving
from test_metrics import read_metrics

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from tests.models.arch_models import skeletons, write_skeleton

TOKENS = ["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127))]
TOKENIZER = [
    ["tokenizer.ggml.model", "STRING", None, "llama"],
    ["tokenizer.ggml.tokens", "ARRAY", "STRING", [*TOKENS, *(f"<x{i}>" for i in range(128 - len(TOKENS)))]],
    ["tokenizer.ggml.scores", "ARRAY", "FLOAT32", [0.0] * 128],
    ["tokenizer.ggml.token_type", "ARRAY", "INT32", [2, 3, 3, *[1] * 125]],
    ["tokenizer.ggml.bos_token_id", "UINT32", None, 1],
    ["tokenizer.ggml.eos_token_id", "UINT32", None, 2],
]
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}


@pytest.fixture(scope="module", params=["mamba2-recurrent", "qwen35-hybrid"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without pages, and one with; each can read and write text."""
    skeleton = deepcopy(skeletons()[request.param])
    kept = [setting for setting in skeleton["kv"] if not setting[0].startswith("tokenizer.")]
    skeleton["kv"] = [*kept, *TOKENIZER]
    found = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    write_skeleton(skeleton, found)
    return found


@pytest.fixture
def client(path: Path) -> Iterator[httpx.Client]:
    source = ModelSource(path.stem, path, 1_700_000_000)
    with serving(ServerSettings(port=0), sources=[source]) as running, running.client() as made:
        yield made


def test_replies_and_meters_say_what_was_cached_and_why_not_more(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "localinfer.server")
    prompt = "".join(chr(97 + index % 23) for index in range(150))
    (model,) = (model["id"] for model in client.get("/v1/models").json()["data"])

    def ask(text: str, *, streamed: bool) -> tuple[int, int, str | None]:
        """Tokens of the prompt, those cached, and why not more."""
        body = {"prompt": text, **OPTIONS}
        if streamed:
            asked = {**body, "stream_options": {"include_usage": True}}
            *_, ended, last = post_stream(client, "/v1/completions", asked)
            usage, timings = last["usage"], ended.get("timings") or last["timings"]
        else:
            reply = client.post("/v1/completions", json=body).json()
            usage, timings = reply["usage"], reply["timings"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["cache_n"] == cached and timings["prompt_n"] == usage["prompt_tokens"] - cached
        return usage["prompt_tokens"], cached, timings.get("cache_miss")

    found = [ask(prompt, streamed=False), ask(prompt, streamed=True)]
    num_tokens = found[0][0]
    assert found == [(num_tokens, 0, "nothing was cached yet"), (num_tokens, num_tokens - 1, None)]
    shared = num_tokens - 50
    missed = f"no snapshot before position {shared} of the model's recurrent states, which are computed again"
    for streamed, cached in ((False, 0), (True, shared)):
        edited = ask(prompt[:100] + ("," if streamed else ".") * 60, streamed=streamed)
        found.append(edited)
        # No word of what others have asked.
        assert edited[1:] == (cached, f"the text differs at token {shared}" if streamed else missed)
    logged = [record.message for record in caplog.records if "prompt tokens" in record.message]
    assert logged[2] == f"{model}: 0 of {found[2][0]} prompt tokens were cached: {missed}"
    meters = read_metrics(client)
    assert meters[f"localinfer_prompt_tokens_total {model}"] == sum(one[0] for one in found)
    assert meters[f"localinfer_cached_prompt_tokens_total {model}"] == sum(one[1] for one in found)
    held, taken = (meters[f"localinfer_state_snapshots{kind} {model}"] for kind in ("", "_taken"))
    assert held == taken - meters[f"localinfer_state_snapshots_evicted {model}"] >= 4
    assert meters[f"localinfer_state_snapshot_hits {model}"] == 2
    assert meters[f"localinfer_grid_snapshot_bytes {model}"] == 0 < meters[f"localinfer_state_snapshot_bytes {model}"]


def test_cache_command_counts_snapshots(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with localinfer.load(path, threads=1, speculation=None, disk_cache=True, disk_cache_folder=tmp_path) as llm:
        llm.complete("a b " * 30, **OPTIONS)
    main(["cache", "--disk-cache-folder", str(tmp_path)])
    _, line = capsys.readouterr().out.splitlines()
    assert f"{path.name} (f16): 4 pages, 1 snapshot of recurrent states, " in line
