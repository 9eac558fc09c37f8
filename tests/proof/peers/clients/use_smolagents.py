"""smolagents: its model by OpenAI's API, whole and streamed, with a tool, and an agent with one."""

import os

from smolagents import ChatMessage, MessageRole, OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel("demo", api_base=f"{os.environ['URL']}/v1", api_key="none", max_tokens=40, temperature=0)


@tool
def pet(name: str) -> str:
    """Gives a pet.

    Args:
        name: of the pet.
    """
    return f"{name} is a cat."


asked = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "Tell me a story."}])]
whole = model.generate(asked)
assert whole.content and whole.token_usage.output_tokens <= 40
told = "".join(delta.content or "" for delta in model.generate_stream(asked))
assert told == whole.content
called = model.generate(asked, tools_to_call_from=[pet])
assert called.tool_calls[0].function.name == "pet"
# A model of this size hardly ends by itself; its calls are run, and its turns are steps.
agent = ToolCallingAgent(
    tools=[pet],
    model=OpenAIServerModel("demo", api_base=f"{os.environ['URL']}/v1", api_key="none", max_tokens=60, temperature=0),
    max_steps=1,
    verbosity_level=0,
)
try:
    agent.run("Give me a pet.")
except Exception as error:
    # It is told that the context is too short for the agent's own instructions, in words.
    assert "context" in str(error), error
