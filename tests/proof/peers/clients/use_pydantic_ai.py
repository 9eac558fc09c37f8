"""pydantic-ai: an agent's answers as text, as a class, with a tool, streamed, and over Anthropic's API."""

import asyncio
import os
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Pet(BaseModel):
    """A pet."""

    name: Literal["Tom", "Lily"]


URL = os.environ["URL"]
LIMIT = {"max_tokens": 80, "temperature": 0.0}
provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
model = OpenAIChatModel("demo", provider=provider)
assert Agent(model, model_settings=LIMIT).run_sync("Tell me a story.").output
assert isinstance(Agent(model, output_type=Pet, model_settings=LIMIT).run_sync("A pet?").output, Pet)
assert isinstance(Agent(model, output_type=NativeOutput(Pet), model_settings=LIMIT).run_sync("A pet?").output, Pet)
assert Agent(OpenAIResponsesModel("demo", provider=provider), model_settings=LIMIT).run_sync("Hi").output
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none"))
claude = AnthropicModel("demo", provider=anthropic)
assert Agent(claude, model_settings={"max_tokens": 80}).run_sync("Hi").output


async def streamed() -> str:
    agent = Agent(model, model_settings=LIMIT)

    @agent.tool_plain
    def weather(place: str) -> str:
        """The weather somewhere."""
        return "sunny"

    async with agent.run_stream("Tell me a story.") as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


assert asyncio.run(streamed())
