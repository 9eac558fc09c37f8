"""Calls of tools of MCP servers in a chat: each is confirmed by the user, unless it is allowed, and its result is kept.

`/mcp` shows the servers.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from localinfer.apps.terminal.command import Command
from localinfer.generation.session.python_tools import REFUSED
from localinfer.system import interruption

if TYPE_CHECKING:
    from localinfer.apps.mcp.client import MCPServers, ToolResult
    from localinfer.apps.terminal.conversation import Conversation
    from localinfer.generation.stream import ToolCall

MOST_ROUNDS = 25
"""Replies in a row that may call tools."""
_CANCELLED = "The user stopped this call."
_MOST_SHOWN = 200
_CHARACTERS_PER_TOKEN = 2
"""Of a result, at most: what it leaves has to hold the rest."""
_CAPABILITIES = {"image": "vision", "audio": "audio"}
"""Of models that read such parts."""
Notice = Callable[[str], None]
Confirm = Callable[[str], str | None]
"""Asks the user a question; None where nobody can answer."""


class MCPCalls:
    """Runs the calls of replies. confirm: asks for those that are not allowed; without, they are refused."""

    def __init__(
        self, servers: "MCPServers", allowed: Iterable[str], notice: Notice, confirm: Confirm | None = None
    ) -> None:
        self._servers = servers
        self._allowed = set(allowed)
        self._notice = notice
        self._confirm = confirm

    def offer(self, conversation: "Conversation") -> None:
        """Tell the model of the tools, and the user of servers that do not run."""
        conversation.tools = self._servers.tools
        for name, state, tools in self._servers.states():
            if state != "runs":
                self._notice(f"MCP server {name} {state}")
            elif not tools:
                self._notice(f"MCP server {name} has no tools")

    def commands(self) -> tuple[Command, ...]:
        """The command."""
        return (Command("/mcp", "show the MCP servers, their tools, and which are called unasked", self._show),)

    def answer(self, conversation: "Conversation") -> bool:
        """Run the open calls; return whether the model may go on: every call has a result, and it was not stopped."""
        from localinfer.generation.chat.messages import tool_rounds

        calls = conversation.open_calls
        if not calls or any(self._servers.tool(call.name) is None for call in calls):
            return False
        if tool_rounds(conversation.turns) > MOST_ROUNDS:
            self._notice(f"the model called tools in {MOST_ROUNDS} replies in a row; type what it should do instead")
            return False
        for call in calls:
            try:
                conversation.add_result(self._result(call, conversation))
            except KeyboardInterrupt:
                interruption.take()
                self._notice(f"stopped the call of {call.name}")
                for _ in conversation.open_calls:
                    conversation.add_result(_CANCELLED)
                return False
        return True

    def _result(self, call: "ToolCall", conversation: "Conversation") -> Any:
        from localinfer.apps.mcp.client import is_allowed

        tool = self._servers.tool(call.name)
        assert tool is not None, "it was looked for"
        asked = f"{tool.server}: {call.name} {call.arguments}"
        if not is_allowed(tool, self._allowed):
            refusal = self._asked(asked, tool.shown_name)
            if refusal is not None:
                return refusal
        else:
            self._notice(_short(asked))
        result = self._servers.call(call.name, call.arguments)
        self._notice(f"  {'failed: ' if result.is_error else ''}{_short(_words(result))}")
        return _for_model(result, conversation)

    def _asked(self, asked: str, name: str) -> str | None:
        """Ask the user; the result in place of the call's where it is refused."""
        if self._confirm is None:
            self._notice(f"refused, as nobody can be asked: {_short(asked)}; --mcp-allow {name} allows it")
            return REFUSED
        self._notice(asked)
        answer = (self._confirm("run it? y: yes, a: always, n or a word to the model: no > ") or "").strip()
        if answer.casefold() in ("a", "always"):
            self._allowed.add(name)
        elif answer.casefold() not in ("y", "yes"):
            said = "" if answer.casefold() in ("", "n", "no") else f" They say: {answer}"
            return REFUSED + said
        return None

    def _show(self, _: str) -> None:
        states = self._servers.states()
        for name, state, tools in states:
            marked = (f"{tool} (allowed)" if {tool, name} & self._allowed else tool for tool in tools)
            self._notice(f"{name} {state}: {', '.join(marked) or 'no tools'}")
        if not states:
            self._notice("the configuration has no servers")


def _words(result: "ToolResult") -> str:
    """A result as it is shown."""
    if isinstance(result.content, str):
        return result.content
    return " ".join(part.get("text", f"[{part['type']}]") for part in result.content)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MOST_SHOWN else f"{words[: _MOST_SHOWN - 3]}..."


def _for_model(result: "ToolResult", conversation: "Conversation") -> Any:
    """The content of a result as far as the model reads it, and as the context has room for."""
    most = conversation.context_length * _CHARACTERS_PER_TOKEN

    def cut(text: str) -> str:
        return text if len(text) <= most else f"{text[:most]}\n[cut here: {len(text):,} characters in all]"

    if isinstance(result.content, str):
        return cut(result.content)
    readable = conversation.llm.capabilities
    return [
        {"type": "text", "text": cut(part["text"])}
        if part["type"] == "text"
        else part
        if _CAPABILITIES[part["type"]] in readable
        else {"type": "text", "text": f"[{part['type']}: this model cannot read it]"}
        for part in result.content
    ]
