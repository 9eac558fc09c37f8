"""`localinfer mcp` over standard input and output, as the client of the official package starts it."""

import asyncio
import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.errors import ModelFileError
from tests.support.limits import seconds, wait_until
from tests.support.warm_python import WarmPython

COMMAND = [sys.executable, "-m", "localinfer", "mcp", "--no-disk-cache", "--threads", "1"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}},
    "required": ["name"],
    "additionalProperties": False,
}


def with_client(use: Callable[[Any], Awaitable[None]], *options: str) -> None:
    """Have a client of the official package use a server that it starts."""
    mcp = pytest.importorskip("mcp", reason="mcp is not installed")

    async def run() -> None:
        started = mcp.StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *options])
        async with asyncio.timeout(seconds(60)), mcp.Client(mcp.stdio_client(started)) as client:
            await use(client)

    asyncio.run(run())


def test_agent_uses_the_model_as_tools() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Tell me a story."},
    ]
    asked = {"message": "Tell me a story.", "system": "Be brief.", "history": messages[1:3]}
    text = "Once upon a time, größer."
    with localinfer.load(threads=1) as llm:
        chat = llm.chat(messages, temperature=0, max_tokens=20)
        drawn = llm.chat(messages[-1:], seed=7, max_tokens=20)
        completed = llm.complete("Once upon", temperature=0, max_tokens=5, stop=["zzz"])
        token_ids = list(llm.tokenizer.encode(text, False))
        vector = llm.embed(text).tolist()

    async def use(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["chat", "complete", "tokenize", "embed"]
        assert tools["chat"].input_schema["required"] == ["message"]
        assert all(tool.description and tool.output_schema["type"] == "object" for tool in tools.values())

        async def call(name: str, **arguments: Any) -> dict[str, Any]:
            result = await client.call_tool(name, arguments)
            assert not result.is_error, result.content
            if name in ("tokenize", "embed"):
                assert json.loads(result.content[0].text) == result.structured_content
            else:
                assert result.content[0].text == result.structured_content["text"]
            return result.structured_content

        told = await call("chat", **asked, temperature=0, max_tokens=20)
        assert (told["text"], told["finish_reason"]) == (chat.text, chat.finish_reason)
        assert told["prompt_tokens"] == chat.stats.prompt_tokens
        assert (await call("chat", **asked, temperature=0, max_tokens=20))["cached_tokens"] == told["prompt_tokens"] - 1
        assert (await call("chat", message="Tell me a story.", seed=7, max_tokens=20))["text"] == drawn.text
        held = await call("chat", message="Who?", json_schema=SCHEMA)
        assert json.loads(held["text"])["name"] in ("Tom", "Lily")
        continued = await call("complete", prompt="Once upon", temperature=0, max_tokens=5, stop=["zzz"])
        assert continued["text"] == completed.text
        assert await call("tokenize", text=text) == {"token_ids": token_ids, "count": len(token_ids)}
        (embedded,) = (await call("embed", texts=[text]))["vectors"]
        assert embedded == vector

    with_client(use)


def test_what_is_wrong_is_an_answer_that_says_so() -> None:
    async def use(client: Any) -> None:
        async def refused(name: str, **arguments: Any) -> str:
            result = await client.call_tool(name, arguments)
            assert result.is_error
            return str(result.content[0].text)

        assert "there are chat, complete" in await refused("sing")
        assert "messag" in await refused("chat", messag="Hi.")
        assert "max_tokens" in await refused("chat", message="Hi.", max_tokens=0)
        assert "tokens" in await refused("chat", message="x " * 4000)
        assert "not" in await refused("chat", message="Hi.", json_schema={"not": {}})
        # And the server goes on.
        assert not (await client.call_tool("tokenize", {"text": "Hi."})).is_error

    in_process(lambda stopping: localinfer.load(threads=1, kv_memory=32 << 20), use)


def test_pictures_are_arguments_of_a_model_that_sees(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is an optional package")
    from tests.support.seeing_model import picture_file, seeing_demo

    file = base64.b64encode(picture_file()).decode()
    picture = {"type": "image", "data": file, "mimeType": "image/png", "annotations": {"audience": ["assistant"]}}
    parts = [picture, {"type": "text", "text": "What is it?"}]
    history = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A dog."}]
    chat = [{"role": "user", "content": [{**parts[0], "image": picture_file()}, parts[1]]}, history[1]]
    options = {"temperature": 0, "max_tokens": 4}

    async def use(client: Any) -> None:
        called = (await client.call_tool("chat", {"message": parts, **options})).structured_content
        again = await client.call_tool("chat", {"message": "Why?", "history": history, **options})
        assert called["prompt_tokens"] == counted[0] and called["text"] == answered
        assert again.structured_content["prompt_tokens"] == counted[1]
        for wrong, words in (
            ({"type": "image", "data": "?"}, "message[0].data is no base64"),
            ({"type": "image", "data": "AAAA"}, "unknown format"),
            ({"type": "audio", "data": file}, "message[0] is a sound"),
            ({"type": "image"}, "data"),
            ({"type": "resource_link", "uri": "file:///etc/passwd"}, "resource_link"),
        ):
            refused = await client.call_tool("chat", {"message": [wrong]})
            assert refused.is_error and words in refused.content[0].text, refused.content

    path = seeing_demo(tmp_path)
    with localinfer.load(path, threads=1, disk_cache=False) as llm:
        answered = llm.chat(chat[:1], **options).text
        counted = [llm.count_chat_tokens(one) for one in (chat[:1], [*chat, {"role": "user", "content": "Why?"}])]
    in_process(lambda stopping: localinfer.load(path, threads=1, disk_cache=False), use)


def in_process(load: Callable[[threading.Event], Any], use: Callable[[Any], Awaitable[None]]) -> None:
    """Have a client of the official package use a server in this process."""
    mcp = pytest.importorskip("mcp", reason="mcp is not installed")
    from localinfer.apps.mcp.server import ModelServer

    async def run() -> None:
        async with asyncio.timeout(seconds(30)), ModelServer(load).serving() as server, mcp.Client(server) as client:
            await use(client)

    asyncio.run(run())


def test_model_that_cannot_be_loaded_is_the_answer_to_every_call() -> None:
    def load(stopping: threading.Event) -> Any:
        raise ModelFileError("broken.gguf has no tensors")

    async def use(client: Any) -> None:
        for name, arguments in (("chat", {"message": "Hi."}), ("embed", {"texts": ["Hi."]})):
            result = await client.call_tool(name, arguments)
            assert result.is_error
            assert result.content[0].text == "broken.gguf has no tensors"

    in_process(load, use)


class EndlessStream:
    """A generation that does not end, and notes when it was stopped."""

    stats = SimpleNamespace(completion_tokens=7)

    def __init__(self) -> None:
        self.is_closed = asyncio.Event()

    async def __aenter__(self) -> "EndlessStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed.set()

    async def aresult(self) -> None:
        await asyncio.Event().wait()


def test_cancelled_call_stops_its_generation_and_progress_is_told_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[EndlessStream] = []

    def stream(prompt: str, **options: Any) -> EndlessStream:
        streams.append(EndlessStream())
        return streams[-1]

    async def use(client: Any) -> None:
        monkeypatch.setattr("localinfer.apps.mcp.server._PROGRESS_SECONDS", 0.001)
        told: asyncio.Queue[tuple[float, float | None]] = asyncio.Queue()

        async def note(progress: float, total: float | None, message: str | None) -> None:
            told.put_nowait((progress, total))

        asked = {"prompt": "Once", "max_tokens": 9}
        call = asyncio.ensure_future(client.call_tool("complete", asked, progress_callback=note))
        assert await told.get() == (7, 9)
        assert not streams[0].is_closed.is_set()
        call.cancel()
        await streams[0].is_closed.wait()

    in_process(lambda stopping: SimpleNamespace(stream=stream, close=lambda: None), use)


def test_process_ends_with_standard_input_while_it_generates() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    call = {"name": "complete", "arguments": {"prompt": "Once", "max_tokens": 1000, "seed": 1}}
    messages: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        *({"id": 2 + number, "method": "tools/call", "params": call} for number in range(20)),
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)
    with WarmPython(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines.encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "localinfer"
        process.stdin.close()
        # Every line is of the protocol: nothing else is written to standard output.
        for line in process.stdout:
            assert json.loads(line)["jsonrpc"] == "2.0"
        wait_until(lambda: process.poll() is not None, 30)
        assert process.returncode == 0, process.stderr and process.stderr.read()


@pytest.mark.skipif(sys.platform == "win32", reason="another process cannot press Ctrl-C there")
def test_ctrl_c_ends_the_process_while_it_waits_for_input() -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    with WarmPython(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
        # In two pieces, as a pipe may deliver it.
        for piece in (line[:20], line[20:] + "\n"):
            process.stdin.write(piece.encode())
            process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None, 30)
        assert process.returncode == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("localinfer.system.extras._is_there", lambda name: name != "mcp")
    monkeypatch.setattr("localinfer.system.extras._found", set())
    assert main(["mcp"]) == 2
    errors = capsys.readouterr().err
    assert "`localinfer mcp` needs mcp" in errors
    assert "pip install 'localinfer[mcp]'" in errors


def test_help_needs_no_package_of_the_protocol() -> None:
    code = "import sys; from localinfer.apps.cli import main; main(['mcp', '--help']); print('mcp' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("False\n")
