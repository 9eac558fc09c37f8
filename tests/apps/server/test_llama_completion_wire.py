"""llama-server's own completions: their shape, fields and errors; `/infill`."""

import json
from typing import Any

import pytest
from event_frames import named_events, post_stream
from local_servers import MODEL, serving

from localinfer.apps.server.llama_server.completion import ShownProbabilities
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.engine.sampling.params import SamplingParams
from localinfer.models.text.vocabulary import FillInTokens, find_fill_in_tokens
from tests.proof.peers.suite_models import add_fill_in_tokens

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 6, "temperature": 0}


def asked(client, path: str = "/completion", **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client, **body: Any) -> list[Any]:
    with client.stream("POST", "/completion", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.read().decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completion"])
def test_the_text_is_that_of_openais_route_in_another_shape(tcp, llm, path):
    made = asked(tcp, path, **GREEDY, return_tokens=True)
    assert made["content"] == llm.complete(PROMPT, max_tokens=6, temperature=0).text
    assert made["tokens"] == llm.complete(PROMPT, max_tokens=6, temperature=0).token_ids
    assert (made["stop"], made["stop_type"], made["stopping_word"], made["truncated"]) == (True, "limit", "", False)
    assert made["tokens_predicted"] == 6
    assert made["tokens_evaluated"] == len(llm.tokenizer.encode(PROMPT))
    assert made["prompt"] == f"<|begin_of_text|>{PROMPT}"
    assert made["generation_settings"]["n_predict"] == 6
    assert all(isinstance(value, int | float) for value in made["timings"].values())


def test_a_stream_has_the_tokens_as_they_come_and_all_else_at_the_end(tcp):
    whole = asked(tcp, **GREEDY, return_tokens=True, seed=7)
    *parts, last = streamed(tcp, **GREEDY, seed=7, timings_per_token=True)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    # The text may be further than what was sent of it.
    assert all(part["timings"]["predicted_n"] >= part["tokens_predicted"] for part in parts)
    assert last["stop"]
    assert last["generation_settings"] == {**whole["generation_settings"], "stream": True, "timings_per_token": True}


def test_why_a_text_ended(tcp):
    word = asked(tcp, **{**GREEDY, "n_predict": -1, "stop": [" a"]})
    assert (word["stop_type"], word["stopping_word"]) == ("word", " a")
    assert " a" not in word["content"]
    form = asked(tcp, **GREEDY, grammar='root ::= "ab"{2,2}')
    assert (form["content"], form["stop_type"]) == ("abab", "eos")
    full = asked(tcp, prompt=[5] * 1020, n_predict=-1, ignore_eos=True)
    assert (full["stop_type"], full["truncated"], full["tokens_predicted"]) == ("limit", True, 4)
    assert full["generation_settings"]["logit_bias"]
    # With a new line from the first token on, no token may be waited for.
    late = asked(tcp, prompt=PROMPT, n_predict=200, grammar='root ::= ("\\n" "a"){400,400}', t_max_predict_ms=1)
    assert late["stop_type"] == "limit"
    assert late["has_new_line"]
    assert late["tokens_predicted"] < 200


def test_prompts_are_texts_ids_both_and_objects_one_or_several(tcp, llm):
    ids = llm.tokenizer.encode(PROMPT)
    several = asked(tcp, **{**GREEDY, "prompt": [ids, PROMPT, {"prompt_string": PROMPT}]})
    assert [one["index"] for one in several] == [0, 1, 2]
    assert len({one["content"] for one in several}) == 1
    mixed = asked(tcp, **{**GREEDY, "prompt": [0, "Once upon", *llm.tokenizer.encode(" a time", add_special=False)]})
    assert mixed["content"] == several[0]["content"]
    twice = asked(tcp, prompt=PROMPT, n_predict=8, seed=3, n=2)
    assert [one["generation_settings"]["seed"] for one in twice] == [3, 4]
    for wrong in ([], [[]], [1, -1], {}, {"prompt_string": "x", "multimodal_data": ["AAAA"]}, [{"content": "x"}]):
        response = tcp.post("/completion", json={"prompt": wrong})
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), wrong


def test_response_fields_choose_members_of_the_last_object(tcp):
    made = asked(tcp, **GREEDY, response_fields=["content", "generation_settings/n_predict", "timings/none", "none/x"])
    assert set(made) == {"content", "generation_settings/n_predict"}
    assert made["generation_settings/n_predict"] == 6


def test_probabilities_are_the_models(tcp, llm):
    made = asked(tcp, **GREEDY, n_probs=3)["completion_probabilities"]
    wanted = llm.complete(PROMPT, max_tokens=6, temperature=0, logprobs=3).logprobs
    assert [entry["logprob"] for entry in made] == pytest.approx([one.logprob for one in wanted])
    assert [[other["id"] for other in entry["top_logprobs"]] for entry in made] == [
        [token_id for token_id, _ in one.top] for one in wanted
    ]
    parts = streamed(tcp, **GREEDY, n_probs=3)[:-1]
    assert [part["completion_probabilities"] for part in parts] == [[entry] for entry in made]


def test_probabilities_after_sampling_are_those_that_tokens_are_drawn_with(llm):
    """Many draws of one token come as often as it says."""
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.02}
    shown = ShownProbabilities(llm.tokenizer, 5, SamplingParams(**options), after_sampling=True)
    count = 400
    drawn: dict[int, int] = {}
    for seed in range(count):
        made = llm.complete("The", max_tokens=1, seed=seed, logprobs=5, **options)
        drawn[made.token_ids[0]] = drawn.get(made.token_ids[0], 0) + 1
        told = shown.entry(made.token_ids[0], made.logprobs[0])["top_probs"]
    assert sum(entry["prob"] for entry in told) == pytest.approx(1.0)
    assert drawn.keys() <= {entry["id"] for entry in told}
    for entry in told:
        deviation = 4 * (entry["prob"] * (1 - entry["prob"]) / count) ** 0.5
        assert drawn.get(entry["id"], 0) / count == pytest.approx(entry["prob"], abs=deviation + 1e-9)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"post_sampling_probs": True, "n_probs": 2, "top_k": 0}, "top_k"),
        ({"post_sampling_probs": True, "n_probs": 2, "repeat_penalty": 1.2}, "post_sampling_probs"),
        ({"samplers": ["top_p", "top_k"]}, "samplers"),
        ({"samplers": ["tail_free"]}, "samplers"),
        ({"logit_bias": [["a", True]]}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
        ({"id_slot": 99}, "id_slot"),
        ({"n_keep": 5}, "n_keep"),
        ({"temperatur": 1}, "temperatur"),
        ({"prompt": "a " * 3000}, "prompt"),
    ],
    ids=repr,
)
def test_what_cannot_be_had_is_refused_by_its_name(tcp, more, param):
    response = tcp.post("/completion", json={**GREEDY, "temperature": 0.8, **more})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_samplers_that_are_not_named_are_off(tcp):
    only = asked(tcp, prompt=PROMPT, n_predict=12, seed=5, samplers=["temperature"], temperature=1.3)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert only["content"] == asked(tcp, prompt=PROMPT, n_predict=12, seed=5, temperature=1.3, **off)["content"]
    assert only["content"] == asked(tcp, prompt=PROMPT, n_predict=12, seed=5, temperature=1.3, samplers="t")["content"]


def test_biases_name_tokens_by_id_and_by_text(tcp, llm):
    (comma,) = llm.tokenizer.encode(",", add_special=False)
    plain = asked(tcp, **GREEDY, return_tokens=True)["tokens"]
    assert plain[0] == comma
    for bias in ([[",", False]], [[comma, -100]], {",": -100}, {str(comma): False}):
        assert comma not in asked(tcp, **GREEDY, return_tokens=True, logit_bias=bias)["tokens"]


def test_progress_begins_with_what_is_cached_and_ends_with_all(tcp):
    prompt = "the quick brown fox jumps over the lazy dog " * 9
    reports = [
        one for one in streamed(tcp, prompt=prompt, n_predict=2, return_progress=True) if "prompt_progress" in one
    ]
    first, *_, last = [one["prompt_progress"] for one in reports]
    assert first["processed"] == first["cache"] < first["total"] == last["processed"]
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "stream": True, "return_progress": True}
    chunks = post_stream(tcp, "/v1/chat/completions", {**chat, "timings_per_token": True})
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert told[0]["processed"] == told[0]["cache"]
    assert told[-1]["processed"] == told[-1]["total"]
    assert [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    body = {"input": prompt, "max_output_tokens": 2, "stream": True, "return_progress": True, "timings_per_token": True}
    events = named_events(tcp.post("/v1/responses", json=body))
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert told[-1]["processed"] == told[-1]["total"]
    assert {event["type"] for event in events if "prompt_progress" in event} == {"response.in_progress"}
    assert all("timings" in event for event in events if event["type"] == "response.output_text.delta")
    assert "timings" in events[-1]


def test_the_hole_of_a_text_is_filled_by_the_tokens_of_the_file(llm, tmp_path):
    path = tmp_path / "code.gguf"
    add_fill_in_tokens(MODEL.path, path)
    with serving(ServerSettings(port=0), sources=[ModelSource("code", path, 0)]) as running, running.client() as client:
        body = {"input_prefix": "a", "prompt": "b", "input_suffix": "c", "n_predict": 1, "temperature": 0}

        def prompt_of(**more: Any) -> str:
            return asked(client, "/infill", **body, **more)["prompt"]

        size = llm.tokenizer.vocab_size
        before, hole, end = (llm.tokenizer.token_bytes(size - 3 + place).decode() for place in range(3))
        assert prompt_of() == f"<|begin_of_text|>{before}ab{hole}c{end}"
        extra = prompt_of(input_extra=[{"filename": "x.py", "text": "some text"}])
        assert extra.endswith(f"some text{before}ab{hole}c{end}")
        # A snippet that has no room is left out, and the hole stays.
        assert prompt_of(input_extra=[{"text": "long " * 2000}]).endswith(f"{before}ab{hole}c{end}")
        for wrong in ({}, {"filename": "x"}, {"filename": 1, "text": "x"}, {"text": 1}):
            assert client.post("/infill", json={**body, "input_extra": [wrong]}).status_code == 400
        for member in ("input_prefix", "prompt", "input_suffix"):
            refused = client.post("/infill", json={**body, member: ["x", 10**9]})
            assert refused.json()["error"]["param"] == member


def test_a_model_without_such_tokens_fills_nothing_in(tcp):
    response = tcp.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400
    assert "tokens for filling in" in response.json()["error"]["message"]


def test_tokens_for_filling_in_are_those_of_the_file_or_spelled_so():
    spelled = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 4}
    assert find_fill_in_tokens(spelled, {}) == FillInTokens(1, 2, 3, None, 4)
    assert find_fill_in_tokens(spelled, {"fim_pre": 7, "middle": 8}) == FillInTokens(7, 2, 8, None, 4)
    assert find_fill_in_tokens({"<fim_prefix>": 1}, {"fim_rep": 5}) is None
