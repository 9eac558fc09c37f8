"""Anthropic's client for Python: messages, streams, tools, counting, and its runner of tools."""

import os
from typing import Literal

from anthropic import Anthropic, beta_tool

ASK = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 20}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Tom", "Lily"]}},
    "required": ["name"],
}
TOOL = {"name": "pet", "description": "Gives a pet.", "input_schema": SCHEMA}
CACHED = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]

with Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0) as client:
    whole = client.messages.create(**ASK, system=CACHED)
    assert whole.content[0].text and whole.usage.output_tokens <= 20
    with client.messages.stream(**ASK, system="Be kind.") as stream:
        told = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == told
    chosen = {"type": "tool", "name": "pet"}
    called = client.messages.create(**{**ASK, "max_tokens": 60}, tools=[TOOL], tool_choice=chosen)
    (call,) = (block for block in called.content if block.type == "tool_use")
    assert call.input["name"] in ("Tom", "Lily") and called.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "A cat."}
    turns = [*ASK["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**ASK, "messages": turns}, tools=[TOOL]).usage.input_tokens
    assert client.messages.count_tokens(model="demo", messages=ASK["messages"], tools=[TOOL]).input_tokens > 14
    assert client.models.list().data[0].id
    # It asks for a thread with its first turn.
    answers = []

    @beta_tool
    def pet(name: Literal["Tom", "Lily"]) -> str:
        """Gives a pet."""
        answers.append(name)
        return "A cat."

    forced = {**ASK, "max_tokens": 60, "tool_choice": chosen, "max_iterations": 2}
    turns = list(client.beta.messages.tool_runner(**forced, tools=[pet]))
    assert answers and {*answers} <= {"Tom", "Lily"} and len(turns) == 2
