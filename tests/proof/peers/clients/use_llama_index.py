"""LlamaIndex: chats, completions, streams, structured output and embeddings through its OpenAI-like classes."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Pet(BaseModel):
    """A pet."""

    name: Literal["Tom", "Lily"]


URL = f"{os.environ['URL']}/v1"
options = {"api_base": URL, "api_key": "none", "model": "demo", "context_window": 1024, "temperature": 0}
llm = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True, max_tokens=60)
asked = [ChatMessage(role="user", content="Tell me a story.")]
whole = llm.chat(asked).message.content
assert whole and list(llm.stream_chat(asked))[-1].message.content == whole
assert OpenAILike(**options, max_tokens=8).complete("Once upon").text
tells = PromptTemplate("Tell me of a {kind}.")
assert isinstance(llm.structured_predict(Pet, tells, kind="pet"), Pet)
embedder = OpenAILikeEmbedding(api_base=URL, api_key="none", model_name="demo")
assert len(embedder.get_text_embedding("A cat.")) == 256
