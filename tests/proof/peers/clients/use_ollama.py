"""Ollama's client for Python: chats, streams, structured output, tools, prompts, embeddings and the lists of models."""

import json
import os

from ollama import Client

client = Client(host=os.environ["URL"])
(model,) = (one.model for one in client.list().models[:1])
ASK = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}]}
BRIEF = {"num_predict": 20, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}}, "required": ["name"]}

whole = client.chat(**ASK, options=BRIEF)
assert whole.message.content and whole.eval_count <= 20
assert "".join(part.message.content for part in client.chat(**ASK, options=BRIEF, stream=True)) == whole.message.content
form = client.chat(**ASK, format=SCHEMA, options={"num_predict": 60})
assert json.loads(form.message.content)["name"] in ("Tom", "Lily")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


assert client.chat(**ASK, tools=[add], options=BRIEF).message
assert client.generate(model=model, prompt="Once upon", options=BRIEF).response
assert "".join(part.response for part in client.generate(model=model, prompt="Once", options=BRIEF, stream=True))
assert len(client.embed(model=model, input=["A cat.", "A dog."]).embeddings) == 2
assert client.show(model).details
assert client.ps().models
