"""Anthropic's client, LangChain, LlamaIndex and LiteLLM, unmodified, over both sockets, each imported here alone."""

import asyncio
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import httpx
import pytest
from client_imports import import_or_skip
from local_servers import STORY

from localinfer.llm import LLM

# Other people's packages warn of each other; what they send and read is what is tested.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_leftovers")]

GREEDY = {"temperature": 0}
ASK = "Tell me a story."


def url_of(http: httpx.Client) -> str:
    return f"{http.base_url}".rstrip("/")


@pytest.fixture
def own_loop() -> Iterator[None]:
    """Some clients make an event loop of their own in whatever thread asks, and leave it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture
def anthropic_client(served: Any, http: httpx.Client) -> Iterator[Any]:
    anthropic = import_or_skip("anthropic")
    options: dict[str, Any] = {"base_url": url_of(http)}
    if not url_of(http).startswith("http://127"):
        # This client brings an HTTP library of its own, which is another one from 2.x on.
        library = import_module(anthropic.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
        transport = library.HTTPTransport(uds=str(served.socket_path), verify=False)
        options["http_client"] = library.Client(transport=transport)
    with anthropic.Anthropic(api_key="none", max_retries=0, **options) as client:
        yield client


def test_anthropic(anthropic_client):
    anthropic = import_or_skip("anthropic")
    messages = anthropic_client.messages
    reply = messages.create(model="demo", messages=STORY, max_tokens=8, extra_body=GREEDY)
    assert reply.stop_reason == "max_tokens"
    with messages.stream(model="demo", messages=STORY, max_tokens=8, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == reply.content[0].text
        assert stream.get_final_message().usage.output_tokens == 8
    assert messages.count_tokens(model="demo", messages=STORY).input_tokens == 14
    with pytest.raises(anthropic.BadRequestError):
        messages.create(model="demo", messages=[], max_tokens=8)


def test_anthropic_reads_thinking_and_tools(scripted):
    anthropic = import_or_skip("anthropic")
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "count")]
    asked: dict[str, Any] = {"model": "calls", "messages": STORY, "max_tokens": 999, "tools": tools}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 500}
    asked["extra_body"] = GREEDY
    with anthropic.Anthropic(api_key="none", max_retries=0, base_url=url_of(scripted)) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    for message in (whole, final):
        thinking, text, look, count = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
        assert text.text == "I look."
        assert [(call.name, call.input) for call in (look, count)] == [("look", {"at": "b"}), ("count", {"to": 3})]
        assert message.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_raises_what_fails_in_a_stream(scripted):
    anthropic = import_or_skip("anthropic")
    with anthropic.Anthropic(api_key="none", max_retries=0, base_url=url_of(scripted)) as client:
        stream = client.messages.create(model="failing", messages=STORY, max_tokens=9, stream=True)
        with pytest.raises(anthropic.APIError, match="the server failed"):
            list(stream)


def test_langchain(http):
    chat_class = import_or_skip("langchain_openai").ChatOpenAI
    options = {"base_url": f"{url_of(http)}/v1", "api_key": "none", "model": "demo", "http_client": http}
    chat = chat_class(**options, max_tokens=8, temperature=0)
    whole = chat.invoke(ASK)
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content
    schema = {"title": "Pet", "type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}}, "required": ["name"]}
    schema["additionalProperties"] = False
    roomy = chat_class(**options, max_tokens=60, temperature=0)
    assert roomy.with_structured_output(schema, method="json_schema").invoke(ASK)["name"] in ("Tom", "Lily")
    (call,) = roomy.bind_tools([schema], tool_choice="Pet", parallel_tool_calls=False).invoke(ASK).tool_calls
    assert call["args"]["name"] in ("Tom", "Lily")


def test_langchain_embeddings(http):
    embedder = import_or_skip("langchain_openai").OpenAIEmbeddings(
        base_url=f"{url_of(http)}/v1", api_key="none", model="demo", http_client=http, check_embedding_ctx_length=False
    )
    (first, second) = embedder.embed_documents(["A cat sat.", "The dog ran."])
    assert len(first) == 256
    assert embedder.embed_query("The dog ran.") == second != first


def test_llama_index(http, own_loop):
    like_class = import_or_skip("llama_index.llms.openai_like").OpenAILike
    llm = like_class(
        api_base=f"{url_of(http)}/v1",
        api_key="none",
        model="demo",
        is_chat_model=True,
        context_window=1024,
        max_tokens=8,
        temperature=0,
        http_client=http,
    )
    asked = [import_or_skip("llama_index.core.llms").ChatMessage(role="user", content=ASK)]
    whole = llm.chat(asked).message.content
    assert whole
    assert list(llm.stream_chat(asked))[-1].message.content == whole


def test_langchain_ollama(served):
    library = import_or_skip("langchain_ollama")
    chat = library.ChatOllama(base_url=served.url, model="demo", temperature=0, num_predict=8, num_ctx=512)
    whole = chat.invoke(ASK)
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content
    completions = library.OllamaLLM(base_url=served.url, model="demo", temperature=0, num_predict=8)
    assert completions.invoke(ASK) == whole.content
    assert len(library.OllamaEmbeddings(base_url=served.url, model="demo").embed_query("A cat.")) == 256


def test_llama_index_ollama(served):
    library = import_or_skip("llama_index.llms.ollama")
    message = import_or_skip("llama_index.core.llms").ChatMessage(role="user", content=ASK)
    llm = library.Ollama(base_url=served.url, model="demo", temperature=0, additional_kwargs={"num_predict": 8})
    whole = llm.chat([message]).message.content
    assert whole
    assert list(llm.stream_chat([message]))[-1].message.content == whole
    assert llm.complete(ASK).text == whole


def test_litellm(http, own_loop):
    litellm, openai = import_or_skip("litellm"), import_or_skip("openai")
    # It takes no HTTP client, but a client of OpenAI that has one.
    client = openai.OpenAI(base_url=f"{url_of(http)}/v1", api_key="none", http_client=http)
    options = {"model": "openai/demo", "client": client, "messages": STORY, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**options)
    assert whole.usage.completion_tokens == 8
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_litellm_by_address(served, own_loop):
    litellm = import_or_skip("litellm")
    options = {"model": "openai/demo", "api_base": f"{served.url}/v1", "api_key": "none", "messages": STORY}
    assert litellm.completion(**options, max_tokens=8, temperature=0).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("provider", "path"), [("jina_ai", "/v1/rerank"), ("cohere", "/v1/rerank"), ("cohere", ""), ("hosted_vllm", "")]
)
def test_clients_of_other_services_rank(provider: str, path: str, encoders: httpx.Client, ranker: LLM) -> None:
    litellm = import_or_skip("litellm")
    texts = ["the cat", "hello world", "a dog and the cat"]
    # Cohere's second API has no documents that are objects.
    documents = [{"text": texts[0]}, *texts[1:]] if path else texts
    options = {"query": "the cat", "documents": documents, "top_n": 2, "return_documents": True}
    base = f"{str(encoders.base_url).rstrip('/')}{path}"
    found = litellm.rerank(model=f"{provider}/ranker", api_base=base, api_key="none", **options)
    wanted = ranker.rerank("the cat", texts, top_n=2)
    assert [(one["index"], one["relevance_score"]) for one in found.results] == [(w.index, w.score) for w in wanted]
    if provider != "cohere" or path:
        assert [one["document"]["text"] for one in found.results] == [texts[one.index] for one in wanted]
