"""Tokens by HTTP: bytes that are no whole text, the names of several servers, and what lm-eval asks a tokenizer for."""

import pytest
from local_servers import STORY

TEXT = "Größe 😀 日"


def test_pieces_keep_every_byte(tcp):
    pieces = tcp.post("/tokenize", json={"content": TEXT, "with_pieces": True}).json()["tokens"]
    found = [piece["piece"] for piece in pieces]
    assert any(isinstance(piece, list) for piece in found)
    spelled = b"".join(bytes(piece) if isinstance(piece, list) else piece.encode() for piece in found)
    assert spelled.decode().lstrip() == TEXT
    strings = tcp.post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True}).json()
    assert len(strings["token_strs"]) == strings["count"]
    assert "".join(strings["token_strs"]).endswith("Once upon")


def test_names_of_vllm_mean_what_they_mean_there(tcp, llm):
    ids = tcp.post("/tokenize", json={"prompt": "Once upon"}).json()
    assert ids == {"tokens": llm.tokenizer.encode("Once upon"), "count": ids["count"], "max_model_len": 1024}
    for names in ({"content": "Once upon"}, {"prompt": "Once upon", "add_special_tokens": False}):
        assert tcp.post("/tokenize", json=names).json()["tokens"] == llm.tokenizer.encode("Once upon", False)
    back = tcp.post("/detokenize", json={"tokens": llm.tokenizer.encode("Once upon", False)}).json()
    assert back == {"content": "Once upon", "prompt": "Once upon"}


def test_tokenizer_tells_what_a_client_writes_prompts_by(tcp, llm):
    told = tcp.get("/tokenizer_info").json()
    assert told["chat_template"] == llm.info.chat_template
    assert told["model_max_length"] == 1024
    for name, token_id in (("bos_token", llm.tokenizer.bos_token_id), ("eos_token", llm.tokenizer.eos_token_id)):
        spelled = told[name]
        asked = {"prompt": spelled, "add_special_tokens": False}
        assert tcp.post("/tokenize", json=asked).json()["tokens"] == [token_id]
    prompt = tcp.post("/apply-template", json={"messages": STORY}).json()["prompt"]
    ids = tcp.post("/tokenize", json={"prompt": prompt}).json()
    counted = tcp.post("/v1/chat/completions/input_tokens", json={"messages": STORY}).json()
    assert ids["count"] == counted["input_tokens"]


FAR = 10**9 - 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [1, FAR]}, "tokens"),
        ("/v1/completions", {"prompt": [1, FAR]}, "prompt"),
        ("/v1/completions", {"prompt": ["Once", [FAR]]}, "prompt"),
        ("/completion", {"prompt": [1, FAR]}, "prompt"),
        ("/completion", {"prompt": ["Once", FAR]}, "prompt"),
        ("/v1/embeddings", {"input": [[1], [FAR]]}, "input"),
        ("/embedding", {"input": [1, FAR]}, "input"),
        ("/v1/completions", {"prompt": "Once", "logit_bias": {str(FAR): 1}}, "logit_bias"),
        ("/completion", {"prompt": "Once", "logit_bias": [[FAR, 1]]}, "logit_bias"),
    ],
)
def test_a_token_id_that_the_model_lacks_is_refused_by_the_member_that_has_it(tcp, llm, path, body, param):
    answer = tcp.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert str(FAR) in error["message"] and str(llm.tokenizer.vocab_size - 1) in error["message"]
