"""Prefill and decode servers in this process, and what they answer without what differs between any two answers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from local_servers import ServedModel, serving

import localinfer
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import KVTransferOptions, PrefillAddress, ServerSettings
from localinfer.llm import LLM

THRESHOLD = 32
STORY = "Once upon a time a small dog found a red ball in the garden, and the cat saw it too. "


def loader(folder: Path, **options: Any) -> Callable[[ModelSource], LLM]:
    def load(source: ModelSource) -> LLM:
        return localinfer.load(
            source.path,
            **{"threads": 1, "kv_memory": 64 << 20, "disk_cache": True, "speculation": None, **options},
            disk_cache_folder=folder,
        )

    return load


def loaded(running: ServedModel) -> LLM:
    """The model of a server, which is loaded first."""
    with running.client(headers={"authorization": "Bearer sk-d"}) as client:
        assert client.post("/tokenize", json={"content": "x"}).status_code == 200
    llm = running.server.service.registry.models()[0].llm
    assert llm is not None
    return llm


def decode_options(*names: str, **more: Any) -> KVTransferOptions:
    addresses = tuple(PrefillAddress(name) for name in names)
    return KVTransferOptions(role="decode", servers=addresses, **{"threshold": THRESHOLD, **more})


@contextmanager
def prefilling(folder: Path, **settings: Any) -> Iterator[ServedModel]:
    wanted = ServerSettings(port=0, handover=KVTransferOptions(role="prefill"), **settings)
    with serving(wanted, load=loader(folder)) as running:
        yield running


@contextmanager
def decoding(folder: Path, *names: str, **more: Any) -> Iterator[ServedModel]:
    handover = decode_options(*names, **more.pop("handover", {}))
    with serving(ServerSettings(port=0, handover=handover, **more), load=loader(folder)) as running:
        yield running


def sent(running: ServedModel, path: str, body: dict[str, Any], **headers: str) -> bytes:
    """The bytes of an answer, but for what differs between any two: ids, times and what of them is measured."""
    with running.client(headers=headers) as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return normalized(response.content)


def normalized(content: bytes) -> bytes:
    lines = []
    for line in content.splitlines():
        head, data = (b"data: ", line[6:]) if line.startswith(b"data: ") else (b"", line)
        if data.startswith(b"{"):
            value = json.loads(data)
            for name in ("id", "created", "timings"):
                value.pop(name, None)
            data = json.dumps(value).encode()
        lines.append(head + data)
    return b"\n".join(lines)


def handovers(running: ServedModel) -> dict[str, int]:
    with running.client() as client:
        found = client.get("/metrics").text
    prefix = 'localinfer_handovers_total{outcome="'
    lines = [line.removeprefix(prefix).split('"} ') for line in found.splitlines() if line.startswith(prefix)]
    return {name: round(float(number)) for name, number in lines}


COMPLETION = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "logprobs": 3}
