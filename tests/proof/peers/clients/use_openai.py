"""OpenAI's client for Python: chats, streams, tools, structured output, responses, completions and embeddings."""

import json
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Pet(BaseModel):
    name: Literal["Tom", "Lily"]
    is_cat: bool


URL = os.environ["URL"]
STORY = [{"role": "user", "content": "Tell me a story."}]
ASK = {"model": "demo", "messages": STORY, "max_tokens": 20, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "pet", "parameters": Pet.model_json_schema()}}

with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
    whole = client.chat.completions.create(**ASK).choices[0].message.content
    stream = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == 20
    form = client.chat.completions.parse(**{**ASK, "max_tokens": 60}, response_format=Pet)
    assert isinstance(form.choices[0].message.parsed, Pet)
    named = {"type": "function", "function": {"name": "pet"}}
    called = client.chat.completions.create(**{**ASK, "max_tokens": 60}, tools=[TOOL], tool_choice=named)
    (call,) = called.choices[0].message.tool_calls
    assert Pet(**json.loads(call.function.arguments))
    messages = [*ASK["messages"], called.choices[0].message]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "A cat."})
    assert client.chat.completions.create(**{**ASK, "messages": messages}, tools=[TOOL]).choices
    with client.responses.stream(model="demo", input="Tell me a story.", max_output_tokens=20) as events:
        told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told
    assert client.responses.create(model="demo", input="Hi", max_output_tokens=5).output_text
    assert client.completions.create(model="demo", prompt="Once upon", max_tokens=4).choices[0].text
    vectors = client.embeddings.create(model="demo", input=["A cat.", "A dog."]).data
    assert [len(one.embedding) for one in vectors] == [256, 256]
    assert client.models.list().data[0].id
