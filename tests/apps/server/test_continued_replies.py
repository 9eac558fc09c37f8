"""A reply that was cut and is continued: only its rest comes back, and is what the whole reply would have been."""

import pytest
from event_frames import post_stream, text_of
from local_servers import STORY

PATH = "/v1/chat/completions"
GREEDY = {"messages": STORY, "temperature": 0}
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}


def answer(client, **more):
    response = client.post(PATH, json={**GREEDY, **more})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_the_rest_is_that_of_the_whole_reply(tcp):
    whole = answer(tcp, max_tokens=40)["message"]["content"]
    cut = answer(tcp, max_tokens=15)
    assert cut["finish_reason"] == "length"
    messages = [*STORY, cut["message"]]
    rest = answer(tcp, messages=messages, max_tokens=25, **CONTINUES)
    assert rest["message"]["role"] == "assistant"
    assert cut["message"]["content"] + rest["message"]["content"] == whole
    streamed = post_stream(tcp, PATH, {**GREEDY, "messages": messages, "max_tokens": 25, **CONTINUES})
    assert text_of(streamed) == rest["message"]["content"]
    assert answer(tcp, messages=messages, max_tokens=25, continue_final_message=True) == rest


def test_what_was_written_is_in_the_cache(tcp):
    cut = answer(tcp, max_tokens=20)
    body = {**GREEDY, "messages": [*STORY, cut["message"]], "max_tokens": 5, **CONTINUES}
    usage = tcp.post(PATH, json=body).json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 3


def test_templates_and_counts_are_those_of_the_continued_reply(tcp):
    body = {"messages": [*STORY, {"role": "assistant", "content": "Once upon a ti"}], **CONTINUES}
    assert tcp.post("/apply-template", json=body).json()["prompt"].endswith("Once upon a ti")
    counted = tcp.post(f"{PATH}/input_tokens", json=body).json()["input_tokens"]
    asked = tcp.post(PATH, json={**body, "max_tokens": 1}).json()
    assert asked["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"add_generation_prompt": False, "messages": [{"role": "assistant", "content": "x"}]},
            "add_generation_prompt",
        ),
        ({"continue_final_message": True}, "messages"),
        (
            {
                "continue_final_message": True,
                "messages": [*STORY, {"role": "assistant", "content": "x"}],
                "response_format": {"type": "json_object"},
            },
            "constraint",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(tcp, more, param):
    response = tcp.post(PATH, json={**GREEDY, "max_tokens": 2, **more})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_last_reply_is_continued_unless_a_new_one_is_asked_for(tcp):
    messages = [*STORY, {"role": "assistant", "content": "Once upon a ti"}]
    prompts = [
        tcp.post("/apply-template", json={"messages": messages, **more}).json()["prompt"]
        for more in ({}, CONTINUES, {"add_generation_prompt": True}, {"continue_final_message": False})
    ]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    continued = answer(tcp, messages=messages, max_tokens=8)
    assert continued == answer(tcp, messages=messages, max_tokens=8, **CONTINUES)
    assert continued != answer(tcp, messages=messages, max_tokens=8, add_generation_prompt=True)
    assert answer(tcp, messages=messages, max_tokens=8, add_generation_prompt=False) == continued
    for name in ("prefix", "partial"):
        assert answer(tcp, messages=[*STORY, {**messages[-1], name: True}], max_tokens=8) == continued
    own = {"messages": messages, "max_tokens": 8, "temperature": 0}
    assert tcp.post("/v1/messages", json=own).json()["content"][0]["text"] == continued["message"]["content"]
    counted = tcp.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"]
    usage = tcp.post(PATH, json={**GREEDY, "messages": messages, "max_tokens": 1}).json()["usage"]
    assert counted == usage["prompt_tokens"]


def test_new_reply_is_held_to_a_form(tcp):
    messages = [*STORY, {"role": "assistant", "content": "Once"}]
    reply = answer(tcp, messages=messages, max_tokens=40, regex="[ab]c")
    assert reply["message"]["content"] in ("ac", "bc")


def test_the_description_of_the_routes_says_what_it_does(tcp):
    chat = tcp.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    assert "cut short" in str(chat["continue_final_message"])
    assert "continue_final_message" in str(chat["add_generation_prompt"])
