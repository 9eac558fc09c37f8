"""OpenAI's agents: by chat completions and by responses, whole and streamed, with a tool that is run."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

names: list[str] = []


@function_tool
def pet(name: Literal["Tom", "Lily"]) -> str:
    """Gives a pet."""
    names.append(name)
    return "A cat."


async def use(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
    quiet = RunConfig(tracing_disabled=True)
    # Long enough for the model to end its story by itself: a reply that is cut off is an error to this client.
    settings = ModelSettings(temperature=0, max_tokens=700)
    teller = Agent(name="teller", instructions="Be kind.", model=model, model_settings=settings)
    whole = (await Runner.run(teller, "Tell me a story.", run_config=quiet)).final_output
    assert whole
    streamed = Runner.run_streamed(teller, "Tell me a story.", run_config=quiet)
    events = [event async for event in streamed.stream_events()]
    assert events and streamed.final_output == whole
    names.clear()
    calling = ModelSettings(temperature=0, max_tokens=600, tool_choice="required", parallel_tool_calls=False)
    giver = Agent(name="giver", model=model, tools=[pet], model_settings=calling)
    assert (await Runner.run(giver, "Give me a pet.", run_config=quiet, max_turns=4)).final_output
    assert names and {*names} <= {"Tom", "Lily"}


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none", max_retries=0)
    await use(OpenAIChatCompletionsModel("demo", client))
    await use(OpenAIResponsesModel("demo", client))
    await client.close()


asyncio.run(main())
