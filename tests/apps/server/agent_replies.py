"""Answers of every API read as agents do: events in the one order that their parsers take, and what a reply cost."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from event_frames import DONE, named_events


@dataclass
class Answer:
    """A reply and its costs. calls: name and arguments of each; miss: why no more of the prompt was cached."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    miss: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """As recorded sessions have replies."""
        calls = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in self.calls]
        return {"content": self.text, **({"tool_calls": calls} if calls else {})}


def read_answer(path: str, response: httpx.Response) -> Answer:
    """The answer to a request at a path, whose events stand in order."""
    assert response.status_code == 200, response.text
    if path.endswith("/messages"):
        return _anthropic(named_events(response))
    if path.endswith("/responses"):
        return _responses(named_events(response))
    if response.headers["content-type"].startswith("application/json"):
        whole = response.json()
        return _costs(Answer(whole["choices"][0]["message"]["content"] or ""), whole["usage"], whole["timings"])
    return _chat([frame.removeprefix("data: ") for frame in response.text.split("\n\n")[:-1]])


def _chat(frames: Sequence[str]) -> Answer:
    """A role first, then deltas, the reason to end, usage if asked for, and `[DONE]`."""
    assert frames[-1] == DONE
    answer = Answer(events=[json.loads(frame) for frame in frames[:-1]])
    reasons = []
    for number, chunk in enumerate(answer.events):
        if "timings" in chunk:
            timings = chunk["timings"]
            answer.prompt_tokens = timings["cache_n"] + timings["prompt_n"]
            answer.cached_tokens, answer.completion_tokens = timings["cache_n"], timings["predicted_n"]
            answer.miss = timings.get("cache_miss")
        if not chunk["choices"]:
            assert chunk["usage"]["prompt_tokens"] == answer.prompt_tokens and chunk is answer.events[-1]
            continue
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert ("role" in delta) == (number == 0) and not reasons
        answer.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(answer.calls)
                answer.calls.append([call["function"]["name"], ""])
            answer.calls[call["index"]][1] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert reasons == ["tool_calls" if answer.calls else "stop"]
    return answer


def _anthropic(events: list[dict[str, Any]]) -> Answer:
    """A message that starts, blocks that open, grow and close one after the other, its reason to end, its stop."""
    answer, is_open, index = Answer(events=events), False, -1
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                index += 1
                assert not is_open and event["index"] == index
                is_open = True
                block = event["content_block"]
                if block["type"] == "tool_use":
                    assert block["input"] == {} and block["id"]
                    answer.calls.append([block["name"], ""])
            case "content_block_delta":
                assert is_open and event["index"] == index
                answer.text += event["delta"].get("text", "")
                if event["delta"]["type"] == "input_json_delta":
                    answer.calls[-1][1] += event["delta"]["partial_json"]
            case "content_block_stop":
                assert is_open and event["index"] == index
                is_open = False
            case kind:
                assert kind == "ping", kind
    assert not is_open
    ended = events[-2]
    assert ended["delta"]["stop_reason"] == ("tool_use" if answer.calls else "end_turn")
    answer.miss = ended["timings"].get("cache_miss")
    used = ended["usage"]
    answer.cached_tokens, answer.completion_tokens = used["cache_read_input_tokens"], used["output_tokens"]
    answer.prompt_tokens = used["input_tokens"] + answer.cached_tokens
    return answer


def _responses(events: list[dict[str, Any]]) -> Answer:
    """Numbered events: created, in progress, items that open, grow and close one after the other, completed."""
    answer, open_item = Answer(events=events), None
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "output_item.added":
            assert open_item is None
            open_item = event["item"]["id"]
        elif kind == "output_item.done":
            item = event["item"]
            assert item["id"] == open_item and item["status"] == "completed"
            open_item = None
            if item["type"] == "message":
                answer.text += item["content"][0]["text"]
            elif item["type"] == "function_call":
                name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
                answer.calls.append([name, item["arguments"]])
        else:
            assert event["item_id"] == open_item
    final = events[-1]["response"]
    usage = final["usage"]
    answer.prompt_tokens, answer.completion_tokens = usage["input_tokens"], usage["output_tokens"]
    answer.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    answer.miss = final["timings"].get("cache_miss")
    return answer


def _costs(answer: Answer, usage: dict[str, Any], timings: dict[str, Any]) -> Answer:
    answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    answer.miss = timings.get("cache_miss")
    return answer
