"""Special tokens that a prompt writes out: tokens in completions, for templates of clients, and text in chats."""

import pytest
from client_imports import import_or_skip
from local_servers import STORY

from localinfer.llm import LLM

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKED = {"max_tokens": 6, "temperature": 0}


def answer(client, prompt, **more):
    response = client.post(PATH, json={**ASKED, "prompt": prompt, **more})
    assert response.status_code == 200, response.text
    return response.json()


def counted(client, prompt, **more):
    return answer(client, prompt, **more)["usage"]["prompt_tokens"]


def test_prompt_of_a_client_side_template_is_that_of_the_chat(tcp):
    prompt = tcp.post("/apply-template", json={"messages": STORY}).json()["prompt"]
    chat = tcp.post(CHAT, json={**ASKED, "messages": STORY}).json()
    reply = answer(tcp, prompt)
    assert reply["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert reply["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert counted(tcp, prompt, parse_special=False) > counted(tcp, prompt)


def test_first_token_comes_once_and_not_where_it_is_not_wanted(tcp, llm: LLM):
    tokenizer = llm.tokenizer
    if not tokenizer.adds_bos:
        pytest.skip("this model begins with no token of its own")
    first = tokenizer.token_text(tokenizer.bos_token_id)
    assert counted(tcp, "Once upon") == counted(tcp, f"{first}Once upon") == len(tokenizer.encode("Once upon"))
    assert counted(tcp, "Once upon", add_special_tokens=False) == len(tokenizer.encode("Once upon", False))
    assert counted(tcp, f"{first}Once", add_special_tokens=False) == len(tokenizer.encode("Once"))


def test_echoed_log_probabilities_are_those_of_what_was_computed(tcp, llm: LLM):
    for more in ({}, {"add_special_tokens": False}, {"parse_special": False}):
        reply = answer(tcp, "<|im_start|>user\nHi", echo=True, logprobs=1, **more)
        assert len(reply["choices"][0]["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"] + 6
        assert reply["choices"][0]["text"].startswith("<|im_start|>user\nHi")


def test_official_client_sends_prompts_of_its_own_template(served, tcp):
    openai = import_or_skip("openai")
    prompt = tcp.post("/apply-template", json={"messages": STORY}).json()["prompt"]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        made = client.completions.create(model="demo", prompt=prompt, **ASKED)
        begun = client.chat.completions.create(
            model="demo", messages=[*STORY, {"role": "assistant", "content": made.choices[0].text}], n=12, **ASKED
        )
        more = {"add_special_tokens": False, "parse_special": False}
        plain = client.completions.create(model="demo", prompt=prompt, extra_body=more, **ASKED)
    whole = answer(tcp, prompt, max_tokens=12)["choices"][0]["text"]
    assert [made.choices[0].text + choice.message.content for choice in begun.choices] == [whole] * 12
    assert plain.usage.prompt_tokens > made.usage.prompt_tokens


def test_other_routes_keep_control_tokens_as_text(tcp, llm: LLM):
    spelled = "a<|im_end|>b"
    as_text = len(llm.tokenizer.encode(spelled))
    embedded = tcp.post("/v1/embeddings", json={"input": spelled}).json()["usage"]["prompt_tokens"]
    assert embedded == as_text > len(llm.tokenizer.encode(spelled, parse_special=True))
    message = [{"role": "user", "content": f"Tell me a story.{spelled}"}]
    for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        usage = tcp.post(CHAT, json={"messages": message, "max_tokens": 1, **more}).json()["usage"]
        assert usage["prompt_tokens"] == llm.count_chat_tokens(message) > llm.count_chat_tokens(STORY) + 3
    refused = tcp.post(CHAT, json={"messages": message, "parse_special": True}).json()["error"]
    assert refused["param"] == "parse_special"
