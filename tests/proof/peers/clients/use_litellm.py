"""LiteLLM: chats, streams, tools, completions, embeddings, and the same through the APIs that it knows servers by."""

import json
import os

import litellm

URL = os.environ["URL"]
OPENAI = {"api_base": f"{URL}/v1", "api_key": "none"}
ASK = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}}

for provider in ("openai", "hosted_vllm", "lm_studio"):
    options = {"model": f"{provider}/demo", **OPENAI, **ASK, "max_tokens": 20}
    whole = litellm.completion(**options)
    assert whole.usage.completion_tokens == 20, provider
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
options = {"model": "openai/demo", **OPENAI, **ASK, "max_tokens": 60}
(call,) = litellm.completion(**options, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[:1]
assert json.loads(call.function.arguments)["name"] in ("Tom", "Lily")
claude = litellm.completion(model="anthropic/demo", api_base=URL, api_key="none", **ASK, max_tokens=20)
assert claude.choices[0].message.content
text = litellm.text_completion(model="text-completion-openai/demo", prompt="Once upon", max_tokens=5, **OPENAI)
assert text.choices[0].text
assert len(litellm.embedding(model="openai/demo", input=["A cat."], **OPENAI).data[0]["embedding"]) == 256
assert litellm.responses(model="openai/demo", input="Hi", max_output_tokens=5, **OPENAI).output
