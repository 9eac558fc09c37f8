"""A client of servers of the Model Context Protocol: their tools, and calls of these, for a chat.

The protocol is that of the package `mcp`. All servers live on one event loop in a thread of its own; callers wait for
it in theirs, where Ctrl-C ends a call. A server is started for each chat and ends with it; one that died is started
again by the next call of a tool of its.
"""

import asyncio
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import mcp
import mcp_types
from mcp.client.streamable_http import streamable_http_client

from localinfer.arguments import shown
from localinfer.errors import LocalinferError, RequestError
from localinfer.generation.chat.messages import read_tools
from localinfer.types import Closing

START_SECONDS = 30.0
"""Time of a server to start and to list its tools."""
CALL_SECONDS = 120.0
"""Time of a call, where the configuration says nothing."""
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_MOST_TOOLS = 512
_MOST_LOG_BYTES = 400
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_EXAMPLE = '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "SERVER"]}, "far": {"url": "http://..."}}}'

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerConfig:
    """Way to one server: a command that is started, or an address."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = CALL_SECONDS
    """Of each call."""


def read_config(path: str) -> list[ServerConfig]:
    """Read a file `{"mcpServers": {NAME: {command, args, env, cwd} or {url, headers}}}`.

    `${NAME}` in its texts is a variable of the environment. Servers with `"disabled": true` are left out, and members
    that are not known are not read. Raises: RequestError.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text("utf-8-sig"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}); write it like {_EXAMPLE}") from None
    servers = found.get("mcpServers", found.get("servers")) if isinstance(found, dict) else None
    if not isinstance(servers, dict):
        raise RequestError(f"{path} has no member mcpServers; write it like {_EXAMPLE}")
    return [
        _server_config(f"{path}: server {name!r}", name, entry)
        for name, entry in servers.items()
        if not (isinstance(entry, dict) and entry.get("disabled"))
    ]


def _server_config(where: str, name: str, entry: Any) -> ServerConfig:
    if not isinstance(entry, dict) or not isinstance(entry.get("command", entry.get("url")), str):
        raise RequestError(f"{where} has neither a command nor a url; write it like {_EXAMPLE}")

    def texts(member: str, kind: type) -> Any:
        value = entry.get(member)
        if value is None:
            return kind()
        items = value.values() if kind is dict and isinstance(value, dict) else value if kind is list else None
        if items is None or isinstance(items, str) or not all(isinstance(item, str) for item in items):
            wanted = "an object of texts" if kind is dict else "a list of texts"
            raise RequestError(f"{where}: {member} is {shown(value)}; give {wanted}")
        if kind is dict:
            return {name: _expanded(text, where) for name, text in value.items()}
        return [_expanded(text, where) for text in value]

    timeout = entry.get("timeout", CALL_SECONDS)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise RequestError(f"{where}: timeout is {shown(timeout)}; give seconds")
    cwd = entry.get("cwd")
    return ServerConfig(
        name,
        _expanded(str(entry.get("command", "")), where),
        tuple(texts("args", list)),
        texts("env", dict),
        None if cwd is None else _expanded(str(cwd), where),
        "" if "command" in entry else _expanded(entry["url"], where),
        texts("headers", dict),
        float(timeout),
    )


def _expanded(text: str, where: str) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise RequestError(f"{where} uses ${{{found[1]}}}, which the environment has not; set it, or write it out")
        return os.environ[found[1]]

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True)
class ServerTool:
    """A tool of a server."""

    server: str
    name: str
    """Of the tool on its server."""
    shown_name: str
    """Of the tool for the model: the same, with the server's before it where two servers have it."""
    description: Mapping[str, Any]
    """In OpenAI's shape, for the model."""


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: what the model reads."""

    content: str | list[dict[str, Any]]
    """Text, or parts with pictures and sounds."""
    is_error: bool


class _Server:
    """One server on the loop of all: its connection, held by a task that lasts as long."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.tools: list[Any] = []
        self.state = "not started"
        self._client: Any = None
        self._holding: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._log: Any = None

    async def start(self) -> None:
        """Connect, unless it is; note in `state` what came of it."""
        if self._client is not None:
            return
        await self.stop()
        self._closing = asyncio.Event()
        self._holding = asyncio.create_task(self._hold(opened := asyncio.get_running_loop().create_future()))
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(opened)
        except TimeoutError:
            self.state = f"did not answer within {START_SECONDS:.0f} seconds{self._last_words()}"
            await self.stop()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. Raises: RequestError where it has no answer."""
        await self.start()
        client = self._client
        if client is None:
            raise RequestError(f"the server {self.config.name} {self.state}")
        try:
            made = await client.call_tool(name, dict(arguments), read_timeout_seconds=self.config.timeout_seconds)
        except mcp.MCPError as error:
            if self._holding is None or self._holding.done() or "closed" in str(error).lower():
                self.state = f"ended in a call of {name}{self._last_words()}"
                await self.stop()
                raise RequestError(f"the server {self.config.name} {self.state}") from None
            return ToolResult(f"Error: {error}", is_error=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError(f"the server {self.config.name} gave no result of {name}: {error}") from None
        return _result_of(made)

    async def stop(self) -> None:
        """End the connection, and the process of a command."""
        self._closing.set()
        holding, self._holding = self._holding, None
        if holding is not None:
            if self._client is None:
                # It waits for an answer that does not come.
                holding.cancel()
            done, _ = await asyncio.wait({holding}, timeout=_END_SECONDS)
            if not done:
                holding.cancel()
                await asyncio.wait({holding}, timeout=_END_SECONDS)
        self._client = None

    async def _hold(self, opened: "asyncio.Future[None]") -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as self._log:
            try:
                async with AsyncExitStack() as stack:
                    client = await stack.enter_async_context(
                        mcp.Client(
                            await self._transport(stack),
                            client_info=mcp_types.Implementation(name="localinfer", version="1"),
                        )
                    )
                    self.tools = await _listed(client)
                    self._client, self.state = client, "runs"
                    opened.set_result(None)
                    await self._closing.wait()
            except Exception as error:
                self.state = f"failed: {_reason(error)}{self._last_words()}"
            finally:
                self._client = None
                if not opened.done():
                    opened.set_result(None)

    async def _transport(self, stack: AsyncExitStack) -> Any:
        """The way to the server, of which the stack closes what it holds."""
        config = self.config
        if config.url:
            # An answer may take as long as the call, and its stream stays open in between.
            limits = httpx2.Timeout(START_SECONDS, read=max(START_SECONDS, config.timeout_seconds))
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=dict(config.headers), timeout=limits, follow_redirects=True)
            )
            return streamable_http_client(config.url, http_client=http)
        started = mcp.StdioServerParameters(
            command=config.command,
            args=list(config.args),
            env=dict(config.env),
            cwd=config.cwd,
            encoding_error_handler="replace",
        )
        return mcp.stdio_client(started, errlog=self._log)

    def _last_words(self) -> str:
        """The end of what a server wrote on its standard error."""
        if self._log is None:
            return ""
        with suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _MOST_LOG_BYTES))
            if words := " ".join(self._log.read().split()):
                return f" (it wrote: {words})"
        return ""


async def _listed(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    while len(found) < _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return found


def _reason(error: BaseException) -> str:
    """The words of an error, of a group its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _result_of(made: Any) -> ToolResult:
    parts: list[dict[str, Any]] = []
    for one in made.content:
        if one.type == "text":
            parts.append({"type": "text", "text": one.text})
        elif one.type in ("image", "audio"):
            parts.append({"type": one.type, "data": one.data})
        elif one.type == "resource" and getattr(one.resource, "text", None) is not None:
            parts.append({"type": "text", "text": one.resource.text})
        else:
            parts.append({"type": "text", "text": f"[{one.type} {getattr(one, 'uri', '')}]"})
    if not parts and made.structured_content is not None:
        parts.append({"type": "text", "text": json.dumps(made.structured_content, ensure_ascii=False)})
    content: str | list[dict[str, Any]] = parts
    if all(part["type"] == "text" for part in parts):
        content = "\n".join(part["text"] for part in parts)
    return ToolResult(content, is_error=bool(made.is_error))


class MCPServers(Closing):
    """The servers of one chat. They start when it is made; `wait` returns when each has, or has failed."""

    _instead = "make another"

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        # Of lines that are no messages, the package logs tracebacks.
        logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="localinfer-mcp", daemon=True)
        self._thread.start()
        self._servers = {config.name: _Server(config) for config in configs}
        self._starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        self._tools: dict[str, ServerTool] = {}
        self._is_closed = False

    def wait(self) -> None:
        """Wait until every server has started, or has failed, and take their tools."""
        _awaited(self._starting)
        counts: dict[str, int] = {}
        for server in self._servers.values():
            for tool in server.tools:
                counts[tool.name] = counts.get(tool.name, 0) + 1
        for server in self._servers.values():
            for tool in server.tools:
                name = tool.name if counts[tool.name] == 1 else f"{server.config.name}__{tool.name}"
                made = _described(server.config.name, tool, _NOT_IN_NAMES.sub("_", name))
                if made is not None:
                    self._tools.setdefault(made.shown_name, made)

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """The tools of all, for the model."""
        return [tool.description for tool in self._tools.values()]

    def tool(self, name: str) -> ServerTool | None:
        """The tool that the model knows by this name."""
        return self._tools.get(name)

    def states(self) -> list[tuple[str, str, list[str]]]:
        """The name of each server, its state, and the names of its tools."""
        return [
            (name, server.state, [tool.shown_name for tool in self._tools.values() if tool.server == name])
            for name, server in self._servers.items()
        ]

    def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool by its name for the model, with arguments as JSON; KeyboardInterrupt ends the call.

        What fails is a result that says so, for the model to read.
        """
        tool = self._tools[name]
        try:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise ValueError("they are no object")
        except ValueError as error:
            return ToolResult(f"Error: the arguments are no JSON object: {error}", is_error=True)
        try:
            return self._run(self._servers[tool.server].call(tool.name, given))
        except LocalinferError as error:
            return ToolResult(f"Error: {error}", is_error=True)

    def close(self) -> None:
        """End the servers; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._starting.cancel()
        with suppress(Exception):
            self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return _awaited(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _start(self) -> None:
        await asyncio.gather(*(server.start() for server in self._servers.values()))

    async def _stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self._servers.values()))


def _awaited(future: "Future[Result]") -> Result:
    """The result of a future, waited for so that a signal is seen on every system; an interruption cancels it."""
    try:
        while True:
            with suppress(TimeoutError):
                return future.result(_LOOK_SECONDS)
            if future.done():
                return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


def _described(server: str, tool: Any, name: str) -> ServerTool | None:
    """A tool as the model is told of it; None for one that cannot be described."""
    function: dict[str, Any] = {"name": name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description:
        function["description"] = tool.description
    description = {"type": "function", "function": function}
    try:
        read_tools([description])
    except LocalinferError:
        return None
    return ServerTool(server, tool.name, name, description)


def is_allowed(tool: ServerTool, allowed: Collection[str]) -> bool:
    """Return whether a tool may be called unasked. allowed: names of tools, of servers, or SERVER/TOOL."""
    return not {tool.server, tool.name, tool.shown_name, f"{tool.server}/{tool.name}"}.isdisjoint(allowed)
