"""Tools of MCP servers in a chat: a stand-in for the servers behind the chat, and a small server behind the client."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from localinfer.apps.cli.chat import started_servers
from localinfer.apps.terminal.commands import Chat
from localinfer.apps.terminal.conversation import Conversation
from localinfer.errors import RequestError
from localinfer.generation.stream import StreamEvent, ToolCallDelta
from tests.apps.cli.conftest import FakeLLM

client = pytest.importorskip("localinfer.apps.mcp.client", reason="mcp is not installed")

SERVER = """\
import json, sys
print("this is no message", flush=True)
sys.stderr.write("warming up")
sys.stderr.flush()
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params", {})
    answer = None
    if method == "initialize":
        info = {"name": "small", "version": "1"}
        answer = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        answer = {"tools": [{"name": name, "inputSchema": schema} for name in ("add up", "die")]}
    elif method == "tools/call" and params["name"] == "die":
        sys.exit(3)
    elif method == "tools/call":
        print("{", flush=True)
        parts = [{"type": "text", "text": str(params["arguments"])}]
        if params["arguments"].get("a") == 1:
            parts.append({"type": "image", "data": "AAAA", "mimeType": "image/png"})
        answer = {"content": parts, "isError": params["arguments"].get("a") == 2}
    if "id" in asked:
        error = {"code": -32601, "message": "it is not known"}
        result = {"error": error} if answer is None else {"result": answer}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **result}), flush=True)
"""


def test_servers_run_and_fail_and_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", SERVER)
    command = {"command": sys.executable, "args": ["-c", "${SCRIPT}"]}
    config = {
        "good": command,
        "gone": {"command": sys.executable, "args": ["-c", "raise SystemExit('no licence')"]},
        "none": {"command": str(tmp_path / "nothing")},
        "off": {"command": "x", "disabled": True},
    }
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": config}))
    with started_servers(str(file), ()) as servers:
        assert servers is not None
        servers.wait()
        states = {name: (state, tools) for name, state, tools in servers.states()}
        assert states["good"] == ("runs", ["add_up", "die"]) and states["gone"][1] == []
        assert "failed" in states["gone"][0] and "no licence" in states["gone"][0] and "failed" in states["none"][0]
        assert [tool["function"]["name"] for tool in servers.tools] == ["add_up", "die"]
        assert servers.call("add_up", '{"a": 3}') == client.ToolResult("{'a': 3}", is_error=False)
        assert servers.call("add_up", '{"a": 2}').is_error
        picture = {"type": "image", "data": "AAAA"}
        assert servers.call("add_up", '{"a": 1}').content == [{"type": "text", "text": "{'a': 1}"}, picture]
        assert "no JSON object" in servers.call("add_up", "[1").content
        died = servers.call("die", "")
        assert died.is_error and "ended in a call of die (it wrote: warming up)" in died.content
        assert servers.call("add_up", "{}").content == "{}", "it is started again"
    servers.close()


def test_wrong_configurations_say_what_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    for text, words in (
        ("{", "not JSON"),
        ("[]", "no member mcpServers"),
        ('{"mcpServers": {"a": {}}}', "'a' has neither a command nor a url"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "a list of texts"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}', "an object of texts"),
        ('{"mcpServers": {"a": {"command": "x", "timeout": -1}}}', "give seconds"),
        ('{"mcpServers": {"a": {"url": "http://${NOT_THERE_AT_ALL}/"}}}', "the environment has not"),
    ):
        file.write_text(text)
        with pytest.raises(RequestError, match=words):
            client.read_config(str(file))
    with pytest.raises(RequestError, match="cannot be read"):
        client.read_config(str(tmp_path / "no.json"))
    with pytest.raises(RequestError, match="add --mcp"), started_servers(None, ("x",)):
        pass


class Servers:
    """Two tools, of which one gives a picture and one never ends."""

    def __init__(self, llm: FakeLLM) -> None:
        self.called: list[tuple[str, str]] = []
        self._llm = llm

    tools = ({"type": "function", "function": {"name": "look"}},)

    def tool(self, name: str) -> Any:
        return client.ServerTool("eyes", name, name, {}) if name in ("look", "wait") else None

    def states(self) -> list[Any]:
        return [("eyes", "runs", ["look", "wait"]), ("ears", "failed: no", [])]

    def call(self, name: str, arguments: str) -> Any:
        self.called.append((name, arguments))
        if name == "wait":
            raise KeyboardInterrupt
        parts = [{"type": "text", "text": "a ball"}, {"type": "image", "data": "AAAA"}]
        return client.ToolResult(parts, is_error=False)


class CallingLLM(FakeLLM):
    """Calls a tool wherever the last message is the user's, and says what it read of the results."""

    name = "look"
    capabilities: tuple[str, ...] = ()

    def stream_chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        self.pieces = ["I saw it."]
        if messages[-1]["role"] == "user":
            deltas = ToolCallDelta(0, "", "c1", self.name), ToolCallDelta(0, '{"at": 1}')
            self.pieces = [StreamEvent("", 1, "tool_calls", tool_calls=deltas)]  # type: ignore[list-item]
        return super().stream_chat(messages, **options)

    def count_chat_tokens(self, messages: list[dict[str, str]], **options: Any) -> int:
        return len(messages)


@pytest.mark.parametrize(
    ("allowed", "answers", "called", "result"),
    [
        (["eyes"], [], 2, "a ball\n[image: this model cannot read it]"),
        (["eyes/look"], [], 2, "a ball\n[image: this model cannot read it]"),
        (["ears"], ["y", "n"], 1, "The user refused this call."),
        ([], ["always"], 2, "a ball\n[image: this model cannot read it]"),
        ([], ["", "ask Tom"], 0, "The user refused this call. They say: ask Tom"),
        ([], None, 0, "The user refused this call."),
    ],
)
def test_calls_are_confirmed_unless_they_are_allowed(allowed: Any, answers: Any, called: int, result: str) -> None:
    llm, output, notices = CallingLLM(), io.StringIO(), io.StringIO()
    servers, asked = Servers(llm), iter(answers or ())
    conversation = Conversation(llm, system=None, max_tokens=None, seed=None)  # type: ignore[arg-type]
    confirm = None if answers is None else lambda _: next(asked)
    chat = Chat(conversation, output, notices, servers=servers, allowed_calls=allowed, confirm=confirm)  # type: ignore[arg-type]
    chat.offer_tools()
    assert conversation.tools == servers.tools and "MCP server ears failed: no" in notices.getvalue()
    for _ in range(2):
        chat.handle("Look!")
    assert len(servers.called) == called and output.getvalue().count("I saw it.") == 2
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant", "tool", "assistant"] * 2
    content = conversation.turns[-2]["content"]
    assert (content if isinstance(content, str) else "\n".join(part["text"] for part in content)) == result
    assert ('eyes: look {"at": 1}' in notices.getvalue()) and next(asked, None) is None
    assert ("--mcp-allow look" in notices.getvalue()) == (answers is None)
    chat.handle("/mcp")
    assert "eyes runs: look" in notices.getvalue()
    # A model that sees reads the picture; one that is stopped waits for the user, and knows it.
    if called == 2:
        llm.capabilities = ("vision",)
        chat.handle("Look!")
        assert conversation.turns[-2]["content"][1] == {"type": "image", "data": "AAAA"}
    if "eyes" in allowed:
        llm.name = "wait"
        chat.handle("Wait!")
        assert conversation.turns[-1]["content"] == "The user stopped this call." and not conversation.open_calls
