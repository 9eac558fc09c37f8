"""Every member that a client may send, at every depth, is read, refused by its name, or left unread for a reason.

The names are those of the installed clients, of newer ones, and what other local servers take beside them.
"""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from local_servers import STORY

from localinfer.apps.server.routes import BODIES
from localinfer.apps.server.transport import known_fields
from localinfer.apps.server.transport.known_fields import HEADER, KnownFields

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": STORY, "max_tokens": 4, "temperature": 0},
    f"{CHAT}/input_tokens": {"messages": STORY},
    COMPLETIONS: {"prompt": "a", "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "a", "max_output_tokens": 4, "temperature": 0},
    MESSAGES: {"messages": STORY, "max_tokens": 4, "temperature": 0},
    COUNT: {"messages": STORY},
    EMBEDDINGS: {"input": "a"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": STORY},
}
CLIENTS = {
    CHAT: ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
    COMPLETIONS: ("openai.types.completion_create_params", "CompletionCreateParamsBase"),
    RESPONSES: ("openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    EMBEDDINGS: ("openai.types.embedding_create_params", "EmbeddingCreateParams"),
    MESSAGES: ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
    COUNT: ("anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
}
VLLM_SAMPLING = (
    "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos"
    " min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs"
    " allowed_token_ids bad_words add_special_tokens priority request_id return_tokens_as_token_ids return_token_ids"
    " cache_salt kv_transfer_params vllm_xargs logits_processors guided_json guided_regex guided_choice guided_grammar"
    " guided_decoding_backend guided_whitespace_pattern structural_tag structured_outputs"
)
LLAMA_CPP = (
    "dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_discard typical_p repeat_penalty"
    " repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n"
    " dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta grammar json_schema seed"
    " ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers"
    " timings_per_token return_progress post_sampling_probs response_fields lora top_n_sigma grammar_lazy"
    " grammar_triggers preserved_tokens"
)
CHAT_EXTRAS = (
    "echo best_of add_generation_prompt continue_final_message documents chat_template chat_template_kwargs"
    " mm_processor_kwargs include_reasoning reasoning_format parse_tool_calls enable_thinking keep_alive options"
)
OTHERS = {
    # What newer clients send than those installed, then what local servers take.
    CHAT: f"{VLLM_SAMPLING} {LLAMA_CPP} {CHAT_EXTRAS}",
    COMPLETIONS: f"{VLLM_SAMPLING} {LLAMA_CPP}".replace("return_progress ", ""),
    RESPONSES: f"access_programs background_options image client_metadata {VLLM_SAMPLING}",
    MESSAGES: "context_management mcp_servers compaction fallbacks thread billing_policy",
    COUNT: "max_tokens stream stop_sequences temperature top_p top_k",
    EMBEDDINGS: "truncate_prompt_tokens add_special_tokens priority normalize embd_normalize input_type request_id",
}


def names_of(path: str) -> set[str]:
    """What the client declares, read off its source: to import all of it takes longer than all tests here."""
    module, name = CLIENTS[path]
    package, *parts = module.split(".")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse(Path(found.origin).parent.joinpath(*parts).with_suffix(".py").read_text(encoding="utf-8"))
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    assert [ast.unparse(base) for base in classes[name].bases] == ["TypedDict"]
    members = [one.target.id for one in classes[name].body if isinstance(one, ast.AnnAssign)]
    assert len(members) > 3
    return {*members, *OTHERS[path].split()}


def known_of(path: str) -> KnownFields:
    return getattr(BODIES[path], "known_fields", known_fields.NONE)


def said(client, path: str, more: dict[str, Any]) -> object:
    """What differs between replies only if a member changed them."""
    response = client.post(path, json={**ASKED[path], **more})
    assert response.status_code == 200, response.text
    found = response.json()
    if path == RESPONSES:
        return [part["text"] for item in found["output"] for part in item["content"]]
    return found.get("choices") or found.get("content") or found.get("data") or found


@pytest.mark.parametrize("path", CLIENTS)
def test_every_member_that_clients_know_is_read_or_refused_by_name_or_ignored_for_a_reason(tcp, path):
    read, known = set(BODIES[path].__struct_fields__), known_of(path)
    assert not read & (known.ignored.keys() | known.refused.keys())
    assert not known.ignored.keys() & known.refused.keys()
    for name in sorted(names_of(path) - read - known.ignored.keys()):
        assert name in known.refused, name


@pytest.mark.parametrize("path", ASKED)
def test_ignored_members_change_nothing_whatever_they_hold(tcp, path):
    known = known_of(path)
    assert all(known.ignored.values())
    values = ("x", True, {"a": "b"}, [1, {"deep": None}])
    plain = said(tcp, path, {})
    for turn in range(len(values)):
        more = {name: values[(index + turn) % len(values)] for index, name in enumerate(known.ignored)}
        assert said(tcp, path, more) == plain


@pytest.mark.parametrize("path", ASKED)
def test_what_cannot_be_had_is_refused_by_name_with_a_way_out_and_may_be_switched_off(tcp, path):
    refused = known_of(path).refused
    assert refused
    # A name that is refused elsewhere for the same reason is asked for there; here it is one of every eight.
    others = [known_of(former).refused for former in list(ASKED)[: list(ASKED).index(path)]]
    shared = [name for name in refused if any(other.get(name) is refused[name] for other in others)]
    for name, refusal in ((name, refused[name]) for name in refused if name not in shared or name in shared[::8]):
        response = tcp.post(path, json={**ASKED[path], name: [{"any": "thing"}]})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        assert refusal.way_out in error["message"]
    plain = said(tcp, path, {})
    for turn in range(max((len(refusal.neutral) for refusal in refused.values()), default=0)):
        off = {name: refusal.neutral[turn % len(refusal.neutral)] for name, refusal in refused.items()}
        assert said(tcp, path, off) == plain


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("value", [1, "x", False, [], {"a": 1}, 0], ids=repr)
def test_member_that_no_api_has_is_named_in_the_answer_and_changes_nothing(tcp, path, value):
    response = tcp.post(path, json={**ASKED[path], "something_new": value})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER].startswith("something_new was not read")


@pytest.mark.parametrize("path", ASKED)
def test_member_without_a_value_asks_for_nothing(tcp, path):
    assert said(tcp, path, {"something_new": None}) == said(tcp, path, {})


FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
OWN_TOOL = {"name": "look", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
NEW = {"something_new": 1}
CUSTOM = {"type": "custom", "name": "patch", "description": "Free text."}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


def parts(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{**part, **NEW}]}]


NESTED = [
    (CHAT, {"messages": [{**USER, **NEW}]}, "messages[0]"),
    (CHAT, {"messages": parts({"type": "text", "text": "a"})}, "messages[0].content[0]"),
    (CHAT, {"messages": parts({"type": "refusal", "refusal": "a"})}, "messages[0].content[0]"),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, **NEW}]}]},
        "messages[1].tool_calls[0]",
    ),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], **NEW}}]}]},
        "messages[1].tool_calls[0].function",
    ),
    (CHAT, {"tools": [{**TOOL, **NEW}]}, "tools[0]"),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, **NEW}}]}, "tools[0].function"),
    (CHAT, {"tools": [{**FUNCTION, **NEW}]}, "tools[0]"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}, **NEW}}, "tool_choice"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look", **NEW}}},
        "tool_choice.function",
    ),
    (CHAT, {"response_format": {"type": "json_object", **NEW}}, "response_format"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, **NEW}}},
        "response_format.json_schema",
    ),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, **NEW}}, "stream_options"),
    (CHAT, {"prediction": {"type": "content", "content": "a", **NEW}}, "prediction"),
    (
        CHAT,
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a", **NEW}]}},
        "prediction.content[0]",
    ),
    (CHAT, {"thinking": {"type": "disabled", **NEW}}, "thinking"),
    (f"{CHAT}/input_tokens", {"messages": [{**USER, **NEW}]}, "messages[0]"),
    ("/apply-template", {"tools": [{**TOOL, **NEW}]}, "tools[0]"),
    (COMPLETIONS, {"stream": True, "stream_options": NEW}, "stream_options"),
    (COMPLETIONS, {"prediction": {"content": "a", **NEW}}, "prediction"),
    (RESPONSES, {"input": [{**USER, **NEW}]}, "input[0]"),
    (RESPONSES, {"input": parts({"type": "input_text", "text": "a"})}, "input[0].content[0]"),
    (RESPONSES, {"text": {"format": {"type": "text"}, **NEW}}, "text"),
    (RESPONSES, {"text": {"format": {"type": "text", **NEW}}}, "text.format"),
    (RESPONSES, {"reasoning": {"effort": "low", **NEW}}, "reasoning"),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION, **NEW}]}, "tools[0]"),
    (RESPONSES, {"tools": [{**CUSTOM, "format": {"type": "text", **NEW}}]}, "tools[0].format"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION], **NEW}]}, "tools[0]"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [{**FUNCTION, **NEW}]}]}, "tools[0].tools[0]"),
    (MESSAGES, {"messages": [{**USER, **NEW}]}, "messages[0]"),
    (MESSAGES, {"messages": parts({"type": "text", "text": "a"})}, "messages[0].content[0]"),
    (MESSAGES, {"messages": parts(RESULT)}, "messages[0].content[0]"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [{**USE, **NEW}]}]}, "messages[1].content[0]"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "a", **NEW}]}]}]},
        "messages[0].content[0].content[0]",
    ),
    (MESSAGES, {"system": [{"type": "text", "text": "a", **NEW}]}, "system[0]"),
    (MESSAGES, {"tools": [{**OWN_TOOL, **NEW}]}, "tools[0]"),
    (MESSAGES, {"tools": [OWN_TOOL], "tool_choice": {"type": "auto", **NEW}}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "enabled", **NEW}}, "thinking"),
    (MESSAGES, {"output_config": {"effort": "low", **NEW}}, "output_config"),
    (MESSAGES, {"output_config": {"format": {"type": "json_object", **NEW}}}, "output_config.format"),
    (COUNT, {"tools": [{**OWN_TOOL, **NEW}]}, "tools[0]"),
]


@pytest.mark.parametrize(("path", "more", "place"), NESTED, ids=lambda value: json.dumps(value)[:60])
def test_member_inside_another_that_no_api_has_is_named_by_its_path(tcp, path, more, place):
    response = tcp.post(path, json={**ASKED[path], **more})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER].startswith(f"{place}.something_new was not read")


def test_kind_of_a_form_that_is_not_known_is_refused_by_its_path(tcp):
    response = tcp.post(CHAT, json={**ASKED[CHAT], "structured_outputs": {"regex": "a", **NEW}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs.something_new")


HOSTED = [
    (CHAT, {"type": "namespace", "name": "n", "tools": [FUNCTION]}, "namespace"),
    (CHAT, {"type": "web_search"}, "web_search"),
    *(
        (RESPONSES, {"type": kind, "anything": {"deep": [1]}}, kind)
        for kind in ("mcp", "file_search", "new_kind", "code_interpreter", "computer_use_preview", "image_generation")
    ),
    (RESPONSES, {"type": "shell", "environment": {"type": "container_auto"}}, "shell"),
    (RESPONSES, {"type": "namespace", "name": "n", "tools": [{**CUSTOM, "type": "mcp"}]}, "mcp"),
    (MESSAGES, {"type": "computer_20250124", "name": "computer", "display_width_px": 100}, "computer_20250124"),
]


@pytest.mark.parametrize(("path", "tool", "kind"), HOSTED, ids=lambda value: json.dumps(value)[:40])
def test_tools_that_a_server_would_run_are_left_out_and_named_once(tcp, path, tool, kind):
    for tools in ([tool, tool], [OWN_TOOL if path == MESSAGES else TOOL, tool]):
        response = tcp.post(path, json={**ASKED[path], "tools": tools})
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == f"tools of type {kind!r} are left out: this server runs none"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (RESPONSES, {"type": "namespace", "name": "n", "tools": []}),
        (RESPONSES, {**CUSTOM, "format": {"type": "grammar", "syntax": "gbnf", "definition": "root ::= x"}}),
        (RESPONSES, {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a(?=b)/"}}),
        (CHAT, {"type": "custom", "custom": {**CUSTOM, "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}}),
        (MESSAGES, {"type": "bash_20250124", "name": "bash", "input_schema": {"type": "object"}}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_tools_of_kinds_that_are_not_known_are_refused_by_name(tcp, path, tool, stream):
    for tools in ([tool], [OWN_TOOL if path == MESSAGES else TOOL, tool]):
        response = tcp.post(path, json={**ASKED[path], "tools": tools, "stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert error["param"].startswith(f"tools[{len(tools) - 1}]")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"tool_choice": "required"}),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}),
        (RESPONSES, {"tools": [TOOL], "tool_choice": {"type": "custom", "name": "look"}}),
        (MESSAGES, {"tool_choice": {"type": "any"}}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_choice_that_cannot_be_kept_is_refused(tcp, path, more):
    response = tcp.post(path, json={**ASKED[path], **more})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice"), response.text


def test_choice_of_tools_that_are_left_out_is_the_models_own(tcp):
    search = {"type": "web_search"}
    for path, tools, choice in (
        (RESPONSES, [search], "required"),
        (RESPONSES, [search, TOOL], search),
        (CHAT, [search], "required"),
        (MESSAGES, [{"type": "web_search_20250305", "name": "find"}], {"type": "tool", "name": "find"}),
    ):
        response = tcp.post(path, json={**ASKED[path], "tools": tools, "tool_choice": choice})
        assert response.status_code == 200, response.text
        assert "tool_choice" in response.headers[HEADER]


def test_tools_of_a_namespace_are_called_by_their_own_names(tcp):
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "additionalProperties": False}}
    tools = [{"type": "namespace", "name": "garden", "description": "In the garden.", "tools": [look]}]
    asked = {"input": "Look!", "tools": [*tools, {"type": "web_search"}], "tool_choice": "required", "seed": 1}
    reply = tcp.post(RESPONSES, json={**asked, "max_output_tokens": 60, "parallel_tool_calls": False}).json()
    (call,) = reply["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "garden", "look")
    assert reply["tools"] == tools
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "A cat."}
    history = [{"role": "user", "content": "Look!"}, call, result]
    again = tcp.post(RESPONSES, json={"input": history, "tools": tools, "max_output_tokens": 4})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"guided_choice": ["yes (1)", "no + 2\n"]}, ["yes (1)", "no + 2\n"]),
        ({"structured_outputs": {"choice": ["a|b", "[c]"]}}, ["a|b", "[c]"]),
        ({"guided_regex": "[ab]c"}, ["ac", "bc"]),
        ({"structured_outputs": {"regex": "[ab]c"}}, ["ac", "bc"]),
        ({"guided_grammar": 'root ::= "x" | "y"'}, ["x", "y"]),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, ["x", "y"]),
        ({"guided_json": {"enum": [1, 2]}}, ["1", "2"]),
        ({"guided_json": '{"enum": [1, 2]}'}, ["1", "2"]),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, ["1", "2"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_forms_in_the_words_of_other_servers_hold(tcp, more, expected):
    limit = {"max_tokens": 40, "temperature": 1, "seed": 5}
    chat = tcp.post(CHAT, json={"messages": STORY, **limit, **more})
    assert chat.json()["choices"][0]["message"]["content"] in expected, chat.text
    completion = tcp.post(COMPLETIONS, json={"prompt": "a", **limit, **more})
    assert completion.json()["choices"][0]["text"] in expected, completion.text


@pytest.mark.parametrize("first", ["guided_choice", "guided_regex", "structured_outputs", "guided_json"])
def test_two_forms_at_one_time_are_refused(tcp, first):
    forms = {
        "guided_choice": ["a"],
        "guided_regex": "a",
        "structured_outputs": {"choice": ["a"]},
        "guided_json": {},
        "response_format": {"type": "json_object"},
    }
    for second in forms.keys() - {first}:
        response = tcp.post(CHAT, json={**ASKED[CHAT], first: forms[first], second: forms[second]})
        assert response.status_code == 400, (first, second)
