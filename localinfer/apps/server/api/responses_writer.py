"""A reply as a response: items and parts that open, grow and close, as events numbered from 0."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from localinfer.apps.server.api.responses_items import Item, ResponsesRequest, encrypted_reasoning, kept_items
from localinfer.apps.server.api.responses_memory import Turn
from localinfer.apps.server.api.serving import BlockWriter, Delta, Event, PromptProgress, timings, usage
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.replies.tool_fields import CustomInput, ToolName, tool_names
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.known_fields import SEARCH_TOOLS

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats, StreamEvent


class ResponseWriter(BlockWriter):
    """Reasoning, a message, calls of functions and of custom tools, each an item.

    keep: is given the whole response, once, when it has ended. It is called with what failed as well. flush: waits
    until what was kept outlives the process; called in a thread.
    """

    def __init__(
        self,
        reply: Reply,
        body: ResponsesRequest,
        turn: Turn,
        keep: Callable[[dict[str, Any]], None],
        flush: Callable[[], None],
    ) -> None:
        super().__init__(reply)
        self._flush = flush
        self._body, self._turn, self._keep = body, turn, keep
        self._tools = tool_names(body.tools)
        self._token = reply.id.partition("_")[2]
        self._custom: CustomInput | None = None
        self._number = 0
        self._status = "in_progress"
        self._error: ApiError | None = None
        self._progress = PromptProgress(reply) if body.return_progress and body.stream else None

    def begin(self) -> Iterator[Event]:
        begun = self.response()
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        yield from self._progress_events(is_read=True)
        yield from super().add(index, token)

    def silence(self) -> "Iterable[Event | None]":
        return list(self._progress_events(is_read=False)) or (None,)

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        is_cancelled = self.reply.is_cancelled and bool(self._body.background)
        self._status = "cancelled" if is_cancelled else "incomplete" if reason == "length" else "completed"
        yield from self.close_block()

    def finish(self) -> Iterator[Event]:
        # There is no event for a response that was cancelled.
        kind = "completed" if self._status == "completed" else "incomplete"
        whole = self.whole()
        more = {"timings": whole["timings"]} if self._body.timings_per_token and "timings" in whole else {}
        yield self._event(f"response.{kind}", response=whole, **more)

    async def settle(self) -> None:
        if self._turn.is_kept:
            await asyncio.to_thread(self._flush)

    def failures(self, error: ApiError) -> Iterator[Event]:
        # Some clients read the one, some the other.
        yield self._event("error", message=error.message, param=error.param, code=error.code, **error.body())
        self._status, self._error = "failed", error
        failed = self.response()
        self._keep(failed)
        yield self._event("response.failed", response=failed)

    def whole(self) -> dict[str, Any]:
        whole = self.response()
        self._keep(whole)
        return whole

    def response(self) -> dict[str, Any]:
        """The response as it is now: its items so far, or all that it will ever hold."""
        reply, body, status = self.reply, self._body, self._status
        has_ended = status != "in_progress"
        stats = reply.stats[0]
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if status == "completed" else None,
            "conversation": None if self._turn.conversation is None else {"id": self._turn.conversation},
            "error": None if self._error is None else _error(self._error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": reply.model_id,
            "output": self.blocks[:-1] if self.is_open else self.blocks[:],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id or None,
            "prompt": None,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": self._turn.is_kept,
            "temperature": body.temperature,
            "text": {"format": _format(body), "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.get("type") not in SEARCH_TOOLS],
            "top_logprobs": 0,
            "top_p": body.top_p,
            "truncation": "auto" if body.truncation == "auto" else "disabled",
            "usage": _usage(reply) if has_ended and stats is not None else None,
            "metadata": body.metadata or {},
            **({} if stats is None else {"timings": timings(stats)}),
        }

    def given_items(self) -> list[Item]:
        """Input of the model."""
        return [*self._turn.before, *kept_items(self._turn.new, self._token)]

    def block_opened(self, delta: Delta) -> Iterator[Event]:
        index = len(self.blocks)
        tool = self._tool(delta)
        self._custom = CustomInput() if tool.is_custom else None
        name = "ctc" if tool.is_custom else {"text": "msg", "reasoning": "rs", "call": "fc"}[delta.kind]
        item: Item = {"id": f"{name}_{self._token}_{index}", "status": "in_progress"}
        match delta.kind:
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": []}
            case "call":
                kind, member = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
                item |= {"type": kind, "call_id": delta.call_id, "name": tool.name, member: ""}
                if tool.namespace is not None:
                    item["namespace"] = tool.namespace
        self.blocks.append(item)
        yield self._event("response.output_item.added", output_index=index, item=dict(item))
        if delta.kind == "text":
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=_text_part(""))

    def block_grown(self, delta: Delta) -> Event | None:
        at = self._place()
        match delta.kind:
            case "text":
                more = self._timings_so_far()
                return self._event(
                    "response.output_text.delta", **at, content_index=0, delta=delta.text, logprobs=[], **more
                )
            case "reasoning":
                return self._event("response.reasoning_text.delta", **at, content_index=0, delta=delta.text)
            case _ if self._custom is not None:
                text = self._custom.push(delta.text)
                return self._event("response.custom_tool_call_input.delta", **at, delta=text) if text else None
            case _:
                return self._event("response.function_call_arguments.delta", **at, delta=delta.text)

    def block_closed(self, kind: str, text: str) -> Iterator[Event]:
        item, at = self.blocks[-1], self._place()
        item["status"] = "completed" if self._status in ("in_progress", "completed") else "incomplete"
        match kind:
            case "text":
                part = _text_part(text)
                item["content"] = [part]
                yield self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=[])
                yield self._event("response.content_part.done", **at, content_index=0, part=part)
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                if self._body.wants_encrypted_reasoning:
                    item["encrypted_content"] = encrypted_reasoning(text)
                yield self._event("response.reasoning_text.done", **at, content_index=0, text=text)
            case _ if self._custom is not None:
                if rest := self._custom.rest():
                    yield self._event("response.custom_tool_call_input.delta", **at, delta=rest)
                item["input"] = self._custom.text
                yield self._event("response.custom_tool_call_input.done", **at, input=item["input"])
            case _:
                item["arguments"] = text
                yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=text)
        yield self._event("response.output_item.done", output_index=at["output_index"], item=dict(item))

    def _progress_events(self, *, is_read: bool) -> Iterator[Event]:
        """Progress in reading the prompt, as llama-server tells it. is_read: the first token is there."""
        if self._progress is not None:
            for report in self._progress.reports(is_read=is_read):
                yield self._event("response.in_progress", response=self.response(), prompt_progress=report)

    def _timings_so_far(self) -> dict[str, Any]:
        stats = self.reply.stats_so_far(0) if self._body.timings_per_token else None
        return {} if stats is None else {"timings": timings(stats)}

    def _tool(self, delta: Delta) -> ToolName:
        """Names, to the client, of the tool that a delta calls; nothing for text."""
        name = delta.name or ""
        return self._tools.get(name) or ToolName(name)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}

    def _event(self, kind: str, **members: Any) -> Event:
        """An event with the next number."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}


def _usage(reply: Reply) -> dict[str, Any]:
    costs = usage(reply)
    cached = costs["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": costs["prompt_tokens"],
        # What was computed is in the prefix cache from then on.
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": costs["prompt_tokens"] - cached},
        "output_tokens": costs["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": costs["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": costs["total_tokens"],
    }


def _error(error: ApiError) -> dict[str, Any]:
    """An error as a response holds it, by the few codes that clients of OpenAI know, or ours."""
    return {"code": error.code or "server_error", "message": error.message}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    found = None if body.text is None else body.text.format
    if found is None:
        return {"type": "text"}
    named = {"name": found.name or "reply", "schema": found.schema, "strict": True}
    return {"type": found.type, **(named if found.type == "json_schema" else {})}
