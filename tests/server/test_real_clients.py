"""Clients that people use, unmodified, over both sockets."""

import json
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from local_servers import STORY, ServedModel

# Other people's packages warn of each other; what they send and read is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore")

ASK = {"model": "demo", "messages": STORY, "max_tokens": 8, "temperature": 0}
GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def import_or_skip(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


@pytest.fixture(params=["tcp", "unix"])
def transport(request: pytest.FixtureRequest, served: ServedModel) -> Iterator[httpx.Client]:
    """The HTTP client that other clients are given, once over each socket."""
    if request.param == "unix" and served.socket_path is None:
        pytest.skip("this system has no Unix sockets for Python")
    with served.client(unix=request.param == "unix") as client:
        yield client


@pytest.fixture
def openai_client(transport: httpx.Client) -> Iterator[Any]:
    openai = import_or_skip("openai")
    base_url = f"{transport.base_url}".rstrip("/") + "/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", http_client=transport, max_retries=0) as client:
        yield client


def test_openai_chat(openai_client):
    reply = openai_client.chat.completions.create(**ASK)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 8
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0


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


@pytest.mark.parametrize("is_unix", [False, True], ids=["tcp", "unix"])
def test_anthropic(served, is_unix):
    if is_unix and served.socket_path is None:
        pytest.skip("this system has no Unix sockets for Python")
    anthropic = import_or_skip("anthropic")
    options: dict[str, Any] = {"base_url": served.url}
    if is_unix:
        # This client brings an HTTP library of its own.
        library = import_or_skip("httpx2")
        transport = library.HTTPTransport(uds=str(served.socket_path))
        options = {"base_url": "http://localhost", "http_client": library.Client(transport=transport)}
    with anthropic.Anthropic(api_key="none", max_retries=0, **options) as client:
        reply = client.messages.create(model="demo", messages=STORY, max_tokens=8, extra_body=GREEDY)
        assert reply.stop_reason == "max_tokens"
        with client.messages.stream(model="demo", messages=STORY, max_tokens=8, extra_body=GREEDY) as stream:
            assert "".join(stream.text_stream) == reply.content[0].text
            assert stream.get_final_message().usage.output_tokens == 8
        assert client.messages.count_tokens(model="demo", messages=STORY).input_tokens == 14
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model="demo", messages=[], max_tokens=8)


def test_langchain(served):
    chat_class = import_or_skip("langchain_openai").ChatOpenAI
    chat = chat_class(base_url=f"{served.url}/v1", api_key="none", model="demo", max_tokens=8, temperature=0)
    whole = chat.invoke("Tell me a story.")
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream("Tell me a story.")) == whole.content


def test_llama_index(served):
    like_class = import_or_skip("llama_index.llms.openai_like").OpenAILike
    llm = like_class(
        api_base=f"{served.url}/v1",
        api_key="none",
        model="demo",
        is_chat_model=True,
        context_window=1024,
        max_tokens=8,
        temperature=0,
    )
    messages = import_or_skip("llama_index.core.llms").ChatMessage
    asked = [messages(role="user", content="Tell me a story.")]
    whole = llm.chat(asked).message.content
    assert whole
    assert list(llm.stream_chat(asked))[-1].message.content == whole


def test_litellm(served):
    litellm = import_or_skip("litellm")
    options = {"model": "openai/demo", "api_base": f"{served.url}/v1", "api_key": "none", "messages": STORY}
    whole = litellm.completion(**options, max_tokens=8, temperature=0)
    assert whole.usage.completion_tokens == 8
    chunks = litellm.completion(**options, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
