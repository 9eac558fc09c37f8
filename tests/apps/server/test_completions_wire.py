"""What leaves `/v1/completions`."""

from event_frames import post_stream
from local_servers import serving
from scripted_models import filling_loader, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings

PATH = "/v1/completions"
PROMPT = "Once upon a time"
GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def test_prompt_is_continued_as_it_is(http):
    reply = http.post(PATH, json=GREEDY).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(",")
    assert reply["usage"]["completion_tokens"] == 8


def test_streamed_text_is_the_whole_text(http):
    chunks = post_stream(http, PATH, {**GREEDY, "stream_options": {"include_usage": True}})
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        == http.post(PATH, json=GREEDY).json()["choices"][0]["text"]
    )
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_prompts_of_every_kind_mean_the_same(tcp):
    ids = tcp.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    text = tcp.post(PATH, json=GREEDY).json()["choices"][0]["text"]
    for prompt in ([PROMPT], ids, [ids]):
        assert tcp.post(PATH, json={**GREEDY, "prompt": prompt}).json()["choices"][0]["text"] == text
    both = tcp.post(PATH, json={**GREEDY, "prompt": [PROMPT, ids], "n": 1}).json()
    assert [choice["text"] for choice in both["choices"]] == [text, text]
    assert [choice["index"] for choice in both["choices"]] == [0, 1]


def test_prompts_that_mix_or_miss_are_refused(tcp):
    for prompt in ([], ["a", 1], [[]], [1, [1]]):
        assert tcp.post(PATH, json={"prompt": prompt}).status_code == 400


def test_echo_repeats_the_prompt(http):
    plain = http.post(PATH, json=GREEDY).json()["choices"][0]["text"]
    assert http.post(PATH, json={**GREEDY, "echo": True}).json()["choices"][0]["text"] == PROMPT + plain
    chunks = post_stream(http, PATH, {**GREEDY, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + plain


def test_no_tokens_may_be_asked_for(tcp):
    reply = tcp.post(PATH, json={**GREEDY, "max_tokens": 0, "echo": True}).json()
    assert reply["choices"][0] == {"index": 0, "text": PROMPT, "logprobs": None, "finish_reason": "length"}
    assert reply["usage"]["completion_tokens"] == 0


def test_choices_of_several_prompts_are_numbered_in_order(tcp):
    body = {"prompt": ["One day", "The cat"], "n": 2, "max_tokens": 4, "seed": 3, "temperature": 1}
    reply = tcp.post(PATH, json={**body, "echo": True}).json()
    starts = [choice["text"][:7] for choice in reply["choices"]]
    assert starts == ["One day", "One day", "The cat", "The cat"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]


def test_suffix_needs_a_model_that_fills_in(tcp):
    response = tcp.post(PATH, json={**GREEDY, "suffix": "the end"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "suffix"


def test_suffix_stands_behind_the_hole_that_is_filled():
    asked: list[list[int]] = []

    with (
        serving(ServerSettings(port=0), sources=scripted_sources("code"), load=filling_loader(asked)) as served,
        served.client() as http,
    ):
        for prompt in ("def f(", [*b"def f("]):
            reply = http.post(PATH, json={"prompt": prompt, "suffix": "): pass", "temperature": 0}).json()
            assert reply["choices"][0]["text"] == "x"
            assert reply["choices"][0]["finish_reason"] == "stop"
        echoed = http.post(PATH, json={"prompt": "def f(", "suffix": "): pass", "echo": True, "temperature": 0}).json()
        assert echoed["choices"][0]["text"] == "def f(x"
    assert asked == [[256, 260, *b"def f(", 261, *b"): pass", 262]] * 3


def test_too_long_prompt_is_refused_even_beside_a_good_one(tcp):
    response = tcp.post(PATH, json={**GREEDY, "prompt": [PROMPT, [5] * 2000]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
