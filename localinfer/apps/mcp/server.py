"""A server of the Model Context Protocol on standard input and output: the tools, and the model behind them.

The protocol is that of the package `mcp`. The model is loaded while the client and the server greet each other, so that
no client gives up waiting for it; a call waits. A call that the client cancels, or leaves, stops its generation.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from localinfer.apps.mcp.arguments import (
    ChatArguments,
    CompleteArguments,
    EmbedArguments,
    Generated,
    TokenizeArguments,
    Tokens,
    Vectors,
    content_of,
    schema_of,
)
from localinfer.errors import LocalinferError
from localinfer.generation.options import JsonSchema
from localinfer.generation.stream import Completion, TextStream
from localinfer.kernels.versions import installed_version
from localinfer.llm import LLM
from localinfer.system.event_loop import LoopCalls

if TYPE_CHECKING:
    import anyio

_BYTES_AT_ONCE = 1 << 16


class InputLines:
    """Iterates the lines of a file descriptor. Made and iterated on an event loop.

    The package's own reader waits in a thread that cannot be left behind, so that a command on a terminal could not be
    ended. Python's buffered files are not used, as the lock of one that is being read stops the interpreter's end.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._calls = LoopCalls.of_running_loop()
        threading.Thread(target=self._read, args=(descriptor,), name="localinfer-input", daemon=True).start()

    def __aiter__(self) -> "InputLines":
        return self

    async def __anext__(self) -> str:
        line = await self._lines.get()
        if line is None:
            raise StopAsyncIteration
        return line

    def _read(self, descriptor: int) -> None:
        rest = bytearray()
        while piece := _piece(descriptor):
            rest += piece
            if b"\n" not in piece:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._put(line.decode("utf-8", "replace"))
        if rest:
            self._put(rest.decode("utf-8", "replace"))
        self._put(None)

    def _put(self, line: str | None) -> None:
        self._calls.add(partial(self._lines.put_nowait, line))


def _piece(descriptor: int) -> bytes:
    """Read the next bytes; nothing at the end, and where nothing can be read."""
    try:
        return os.read(descriptor, _BYTES_AT_ONCE)
    except OSError:
        return b""


logger = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]
_PROGRESS_SECONDS = 1.0
_INSTRUCTIONS = "A language model that runs on this machine: nothing that it is given leaves it."


@dataclass(frozen=True)
class _Tool:
    """A tool of the server."""

    arguments: type[msgspec.Struct]
    result: type[msgspec.Struct]
    call: Callable[[Context, Any], Awaitable[msgspec.Struct]]
    say: Callable[[Any], str]
    """The text of a result, for people and models."""


class ModelServer:
    """The tools over one model.

    load: loads it, in a thread, and gives up once the event is set. Its error is the answer to every call: a
    client shows that, and not the log.
    """

    def __init__(self, load: Callable[[threading.Event], LLM]) -> None:
        self._load = load
        self._stopping = threading.Event()
        self._loading: asyncio.Task[LLM] | None = None
        self._tools = {
            "chat": _Tool(ChatArguments, Generated, self._chat, lambda result: str(result.text)),
            "complete": _Tool(CompleteArguments, Generated, self._complete, lambda result: str(result.text)),
            "tokenize": _Tool(TokenizeArguments, Tokens, self._tokenize, _as_json),
            "embed": _Tool(EmbedArguments, Vectors, self._embed, _as_json),
        }

    async def run(self) -> None:
        """Serve one client by standard input and output, until it closes the former."""
        async with self.serving() as server, stdio_server(_input()) as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server[Any]]:
        """The protocol's side of the server, for as long as the context lasts; then the model is closed."""
        loading = self._loading = asyncio.create_task(asyncio.to_thread(self._load, self._stopping))
        # Whether or not a call asks for it.
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            yield Server(
                "localinfer",
                version=installed_version("localinfer"),
                instructions=_INSTRUCTIONS,
                on_list_tools=self._list_tools,
                on_call_tool=self._call_tool,
            )
        finally:
            self._stopping.set()
            with suppress(Exception):
                (await loading).close()

    async def _list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        read_only = ToolAnnotations(read_only_hint=True, open_world_hint=False)
        return ListToolsResult(
            tools=[
                Tool(
                    name=name,
                    description=tool.arguments.__doc__,
                    input_schema=schema_of(tool.arguments),
                    output_schema=schema_of(tool.result),
                    annotations=read_only,
                )
                for name, tool in self._tools.items()
            ]
        )

    async def _call_tool(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        tool = self._tools.get(params.name)
        if tool is None:
            return _error(f"there is no tool {params.name!r:.80}; there are {', '.join(self._tools)}")
        try:
            arguments = msgspec.convert(params.arguments or {}, tool.arguments)
            result = await tool.call(context, arguments)
        except msgspec.ValidationError as error:
            return _error(f"the arguments of {params.name} are not as its schema says: {error}")
        except LocalinferError as error:
            return _error(str(error))
        except Exception as error:
            # Its text may hold what the client sent, or paths.
            logger.error("a call of %s failed", params.name, exc_info=error)
            return _error(f"{params.name} failed by a fault of localinfer; its log on stderr has the reason")
        content = TextContent(type="text", text=tool.say(result))
        return CallToolResult(content=[content], structured_content=msgspec.to_builtins(result))

    async def _model(self) -> LLM:
        """The model, once it is loaded. Raises: what the load raised."""
        assert self._loading is not None, "calls come while the server runs"
        return await asyncio.shield(self._loading)

    async def _chat(self, context: Context, arguments: ChatArguments) -> Generated:
        llm = await self._model()
        messages: list[dict[str, Any]] = []
        if arguments.system is not None:
            messages.append({"role": "system", "content": arguments.system})
        for index, one in enumerate(arguments.history or ()):
            messages.append({"role": one.role, "content": content_of(one.content, f"history[{index}].content")})
        messages.append({"role": "user", "content": content_of(arguments.message, "message")})
        options = _given(arguments, "max_tokens temperature seed")
        if arguments.json_schema is not None:
            options["constraint"] = JsonSchema(arguments.json_schema)
        return await _generated(context, lambda: llm.stream_chat(messages, **options), arguments.max_tokens)

    async def _complete(self, context: Context, arguments: CompleteArguments) -> Generated:
        llm = await self._model()
        options = _given(arguments, "max_tokens temperature seed stop")
        return await _generated(context, lambda: llm.stream(arguments.prompt, **options), arguments.max_tokens)

    async def _tokenize(self, context: Context, arguments: TokenizeArguments) -> Tokens:
        llm = await self._model()
        token_ids = await asyncio.to_thread(llm.tokenizer.encode, arguments.text, False)
        return Tokens(list(token_ids), len(token_ids))

    async def _embed(self, context: Context, arguments: EmbedArguments) -> Vectors:
        llm = await self._model()
        vectors = await asyncio.to_thread(llm.embed_many, arguments.texts)
        return Vectors([vector.tolist() for vector in vectors])


def _input() -> "anyio.AsyncFile[str]":
    """Standard input; of the type that the package names it needs the lines only."""
    return cast("anyio.AsyncFile[str]", InputLines())


async def _generated(context: Context, open_stream: Callable[[], TextStream], total: int | None) -> Generated:
    """Generate a text, and tell a client that wants to know how far it is, once a second."""
    async with await asyncio.to_thread(open_stream) as stream:
        working = asyncio.ensure_future(stream.aresult())
        try:
            while not (await asyncio.wait({working}, timeout=_PROGRESS_SECONDS))[0]:
                await context.session.report_progress(stream.stats.completion_tokens, total)
        finally:
            working.cancel()
        return _as_generated(working.result())


def _as_generated(completion: Completion) -> Generated:
    stats = completion.stats
    return Generated(
        completion.text,
        completion.finish_reason,
        completion.reasoning,
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.completion_tokens,
    )


def _given(arguments: msgspec.Struct, names: str) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names.split()}
    return {name: value for name, value in values.items() if value is not None}


def _as_json(result: msgspec.Struct) -> str:
    return msgspec.json.encode(result).decode()


def _error(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
