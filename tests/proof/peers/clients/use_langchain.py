"""LangChain: OpenAI's and Anthropic's chats, streams, tools, structured output and embeddings."""

import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Pet(BaseModel):
    """A pet."""

    name: Literal["Tom", "Lily"]


URL = os.environ["URL"]
ASK = "Tell me a story."
options = {"base_url": f"{URL}/v1", "api_key": "none", "model": "demo"}
chat = ChatOpenAI(**options, max_tokens=20, temperature=0)
whole = chat.invoke(ASK)
assert whole.usage_metadata["output_tokens"] == 20
assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content
roomy = ChatOpenAI(**options, max_tokens=60, temperature=0)
for method in ("json_schema", "function_calling"):
    assert isinstance(roomy.with_structured_output(Pet, method=method).invoke(ASK), Pet)
(call,) = roomy.bind_tools([Pet], tool_choice="Pet").invoke(ASK).tool_calls
assert call["args"]["name"] in ("Tom", "Lily")
claude = ChatAnthropic(base_url=URL, api_key="none", model="demo", max_tokens=60)
assert claude.invoke(ASK).content
assert isinstance(claude.with_structured_output(Pet).invoke(ASK), Pet)
embedder = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
assert [len(vector) for vector in embedder.embed_documents(["A cat.", "A dog."])] == [256, 256]
