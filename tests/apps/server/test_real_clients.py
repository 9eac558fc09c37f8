"""OpenAI's own client, unmodified, over both sockets."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from client_imports import import_or_skip
from local_servers import STORY

# Other people's packages warn of each other; what they send and read is what is tested.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_leftovers")]

ASK = {"model": "demo", "messages": STORY, "max_tokens": 8, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}}


@pytest.fixture
def openai_client(http: httpx.Client) -> Iterator[Any]:
    openai = import_or_skip("openai")
    base_url = f"{http.base_url}".rstrip("/") + "/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", http_client=http, max_retries=0) as client:
        yield client


def scripted_client(scripted: httpx.Client, **options: Any) -> Any:
    openai = import_or_skip("openai")
    return openai.OpenAI(base_url=f"{scripted.base_url}/v1", api_key="none", http_client=scripted, **options)


def test_openai_chat(openai_client):
    reply = openai_client.chat.completions.create(**ASK)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 8
    again = openai_client.chat.completions.create(**ASK)
    assert again.choices[0].message.content == reply.choices[0].message.content
    assert again.usage.prompt_tokens == reply.usage.prompt_tokens
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


def test_openai_stream(openai_client):
    chunks = list(openai_client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == openai_client.chat.completions.create(**ASK).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


def test_openai_stream_helper_gathers_the_reply(openai_client):
    with openai_client.chat.completions.stream(**{**ASK, "max_tokens": 60}, stop=["."]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def test_openai_several_choices(openai_client):
    reply = openai_client.chat.completions.create(**{**ASK, "temperature": 1}, n=2, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1]


def test_openai_json_schema(openai_client):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    reply = openai_client.chat.completions.create(**{**ASK, "max_tokens": 60}, response_format=form)
    assert set(json.loads(reply.choices[0].message.content)) == {"name", "age"}


def test_openai_parses_a_class(openai_client):
    pydantic = import_or_skip("pydantic")
    pet_class = pydantic.create_model("Pet", name=(Literal["Tom", "Lily"], ...), is_cat=(bool, ...))
    reply = openai_client.chat.completions.parse(**{**ASK, "max_tokens": 60}, response_format=pet_class)
    assert isinstance(reply.choices[0].message.parsed, pet_class)


def test_openai_prediction(openai_client):
    plain = openai_client.chat.completions.create(**ASK)
    guess = {"type": "content", "content": plain.choices[0].message.content}
    reply = openai_client.chat.completions.create(**ASK, prediction=guess)
    assert reply.choices[0].message.content == plain.choices[0].message.content


def test_openai_completions(openai_client):
    reply = openai_client.completions.create(model="demo", prompt="Once upon", max_tokens=4, temperature=0, echo=True)
    assert reply.choices[0].text.startswith("Once upon")


def test_openai_responses(openai_client):
    reply = openai_client.responses.create(model="demo", input="Tell me a story.", max_output_tokens=8, temperature=0)
    assert reply.output_text
    assert reply.usage.output_tokens == 8
    with openai_client.responses.stream(model="demo", input="Tell me a story.", max_output_tokens=300) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else events[-1].response
    assert final.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_openai_tools(openai_client):
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    asked = {**ASK, "max_tokens": 100, **options}
    (call,) = openai_client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"name", "age"}
    with openai_client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert (streamed.function.name, streamed.function.arguments) == ("pet", call.function.arguments)
    results = [*STORY, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    results.append({"role": "tool", "tool_call_id": call.id, "content": "A cat."})
    assert openai_client.chat.completions.create(**{**ASK, "messages": results}, tools=[TOOL]).choices[0]


def test_openai_logprobs(openai_client):
    asked = {**ASK, "logprobs": True, "top_logprobs": 3}
    content = openai_client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(content) == 8
    assert all(token.logprob == token.top_logprobs[0].logprob and len(token.top_logprobs) == 3 for token in content)
    chunks = openai_client.chat.completions.create(**asked, stream=True)
    told = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert told == content
    legacy = openai_client.completions.create(model="demo", prompt="Once upon", max_tokens=2, logprobs=2, echo=True)
    assert legacy.choices[0].logprobs.token_logprobs[0] is None


def test_openai_embeddings_are_the_same_as_base64_and_as_numbers(openai_client):
    texts = ["A cat sat.", "The dog ran."]
    plain = openai_client.embeddings.create(model="demo", input=texts, encoding_format="float").data
    packed = openai_client.embeddings.create(model="demo", input=texts).data
    for one, other in zip(plain, packed, strict=True):
        assert len(one.embedding) == 256
        assert np.float32(one.embedding).tobytes() == np.float32(other.embedding).tobytes()


def test_openai_responses_with_tools_and_a_form(openai_client):
    form = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}}
    asked = {"model": "demo", "input": "Tell me of a pet.", "max_output_tokens": 100}
    assert set(json.loads(openai_client.responses.create(**asked, text=form).output_text)) == {"name", "age"}
    tool = {"type": "function", **TOOL["function"]}
    with openai_client.responses.stream(
        **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        arguments = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        (item,) = stream.get_final_response().output
    assert (item.type, item.name, item.arguments) == ("function_call", "pet", arguments)


def test_openai_gathers_a_response_of_several_items(scripted):
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("look", "count")]
    with scripted_client(scripted).responses.stream(model="calls", input="hi", tools=tools) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [json.loads(item.arguments) for item in final.output[2:]] == [{"at": "b"}, {"to": 3}]
    assert final.output[0].content[0].text == "Hm."
    assert final.output_text == "I look."
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_openai_raises_what_fails_in_a_stream(scripted):
    openai = import_or_skip("openai")
    client = scripted_client(scripted, max_retries=0)
    with pytest.raises(openai.APIError, match="the server failed"):
        list(client.chat.completions.create(**{**ASK, "model": "failing"}, stream=True))
    with pytest.raises(openai.APIError, match="the server failed"):
        list(client.responses.create(model="failing", input="hi", stream=True))


def test_openai_does_not_repeat_what_would_fail_again(scripted):
    openai = import_or_skip("openai")

    def answered() -> float:
        lines = scripted.get("/metrics").text.splitlines()
        name = 'localinfer_requests_total{route="/chat/completions",status="500"}'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    before = answered()
    with pytest.raises(openai.InternalServerError):
        scripted_client(scripted, max_retries=2).chat.completions.create(**{**ASK, "model": "failing"})
    assert answered() == before + 1


def test_openai_reads_several_streamed_calls(scripted):
    names = ("look", "count")
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    client = scripted_client(scripted)
    with client.chat.completions.stream(model="calls", messages=STORY, temperature=0, tools=tools) as stream:
        message = stream.until_done().get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["look", "count"]
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"at": "b"}, {"to": 3}]
    assert message.content == "I look."
    assert message.reasoning_content == "Hm."


def test_openai_models(openai_client):
    (model,) = openai_client.models.list().data
    assert model == openai_client.models.retrieve("demo")


def test_openai_errors(openai_client):
    openai = import_or_skip("openai")
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": "x " * 3000}]})
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(**{**ASK, "temperature": -1})
    assert caught.value.param == "temperature"
