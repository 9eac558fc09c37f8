"""Members of requests that are known and not read: those that change nothing here, and those that cannot be had.

A member that stands in no table and no record is refused by its name, on every route and at every depth: a client that
asks for something must not be answered as if it had not. One that is null, or says what happens anyway, asks nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from localinfer.server.transport.errors import ApiError

_ACCOUNT = "accounts, billing and statistics of a service"
_STORED = "nothing is stored here"
_CACHE = "the cache needs no hints: what was read before is found by itself"
_QUEUE = "there is one queue, and requests have equal rights in it"
_MODERATION = "nothing is moderated here"
_NEEDS_MORE = "it only matters beside a member that is refused"
_WORDS = "how wordy a model is, is its own affair"
_PLACE = "there is one place where it runs: this machine"

OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which most members ask for nothing."""


class Refusal(NamedTuple):
    """Why a member is refused and what to do instead; values that ask for nothing pass."""

    way_out: str
    neutral: tuple[Any, ...] = OFF


class KnownFields(NamedTuple):
    """Of one route: members that are ignored, with the reason, and members that are refused, with the way out."""

    ignored: Mapping[str, str]
    refused: Mapping[str, Refusal]


_OPENAI = {
    "user": _ACCOUNT,
    "store": _STORED,
    "service_tier": _ACCOUNT,
    "safety_identifier": _ACCOUNT,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "moderation": _MODERATION,
}
_LOCAL_SERVERS = {
    "cache_prompt": _CACHE,
    "id_slot": _PLACE,
    "priority": _QUEUE,
    "request_id": "the server names requests itself",
    "keep_alive": "--idle-unload says how long models stay loaded",
    "ttl": "--idle-unload says how long models stay loaded",
    "guided_decoding_backend": "there is one, and what it cannot enforce is refused",
}
"""Members that vLLM, llama.cpp, LM Studio and ollama know and that change no reply."""

_SERVER_SIDE = "load the model with the option you want instead"
_BY_CLIENT = "do that in the client"
_NOT_HERE = "leave it out"
_SAMPLING = {
    "min_tokens": Refusal("use ignore_eos with max_tokens, or a regex that asks for a length", (*OFF, 0)),
    "n_predict": Refusal("send max_tokens"),
    "num_predict": Refusal("send max_tokens"),
    "num_ctx": Refusal("start the server with --context-length"),
    "n_probs": Refusal("send logprobs", (*OFF, 0)),
    "n_keep": Refusal("send context_shift", (*OFF, 0)),
    "n_discard": Refusal("send context_shift", (*OFF, 0)),
    "min_keep": Refusal(_NOT_HERE, (*OFF, 0)),
    "n_indent": Refusal(_NOT_HERE, (*OFF, 0)),
    "t_max_predict_ms": Refusal("end the request when it took too long", (*OFF, 0)),
    "dry_penalty_last_n": Refusal("send dry_last_n"),
    "samplers": Refusal("the order of samplers is fixed; leave it out"),
    "sampler_seq": Refusal("the order of samplers is fixed; leave it out"),
    "typical": Refusal("send typical_p"),
    "tfs_z": Refusal("send min_p or typical_p", (*OFF, 1)),
    "top_a": Refusal("send min_p", (*OFF, 0)),
    "penalize_nl": Refusal("send logit_bias"),
    "length_penalty": Refusal(_NOT_HERE, (*OFF, 1)),
    "use_beam_search": Refusal("use `localinfer run --beams`"),
    "early_stopping": Refusal(_NOT_HERE),
    "stop_token_ids": Refusal("send stop with their text"),
    "include_stop_str_in_output": Refusal("add the text in the client"),
    "skip_special_tokens": Refusal("special tokens are never part of the text; leave it out", (None, True)),
    "spaces_between_special_tokens": Refusal(_NOT_HERE, (None, True)),
    "bad_words": Refusal("send logit_bias"),
    "bad_words_ids": Refusal("send logit_bias"),
    "allowed_token_ids": Refusal("send logit_bias, or a regex"),
    "logits_processors": Refusal("send logit_bias, or a regex"),
    "logits_processor_pattern": Refusal(_NOT_HERE),
    "truncate_prompt_tokens": Refusal("prompts are never cut; shorten it in the client"),
    "add_special_tokens": Refusal(
        "completions begin with the model's first token, chats as the template says", (None, True)
    ),
    "prompt_logprobs": Refusal("send echo and logprobs to /v1/completions"),
    "return_tokens_as_token_ids": Refusal("ask /tokenize for ids"),
    "return_token_ids": Refusal("ask /tokenize for ids"),
    "return_tokens": Refusal("ask /tokenize for ids"),
    "logprob_token_ids": Refusal(_NOT_HERE),
    "post_sampling_probs": Refusal("send logprobs"),
    "timings_per_token": Refusal("the last chunk of a stream has the timings"),
    "response_fields": Refusal(_BY_CLIENT),
    "guided_whitespace_pattern": Refusal("JSON comes on one line; lay it out in the client"),
    "structural_tag": Refusal("send a grammar"),
    "grammar_lazy": Refusal("a grammar holds from the first token on; leave it out"),
    "grammar_triggers": Refusal("a grammar holds from the first token on; leave it out"),
    "preserved_tokens": Refusal(_NOT_HERE),
    "lora": Refusal(_SERVER_SIDE),
    "lora_adapters": Refusal(_SERVER_SIDE),
    "draft_model": Refusal("start the server with --draft"),
    "options": Refusal("give its members beside messages, under their names here"),
    "format": Refusal("send response_format"),
    "image_data": Refusal("this server reads text only"),
    "images": Refusal("this server reads text only"),
    "mm_processor_kwargs": Refusal("this server reads text only"),
    "multi_modal_uuids": Refusal("this server reads text only"),
    "cache_salt": Refusal("prompts of all clients share one cache; run a server of your own to keep yours apart"),
    "kv_transfer_params": Refusal(_NOT_HERE),
    "vllm_xargs": Refusal(_NOT_HERE),
    "extra_body": Refusal("give its members beside the others: clients do that before they send"),
}
_CHAT_SHAPE = {
    "echo": Refusal("ask /v1/completions"),
    "best_of": Refusal("ask /v1/completions", (*OFF, 1)),
    "suffix": Refusal("ask /v1/completions"),
    "prompt": Refusal("send messages, or ask /v1/completions"),
    "functions": Refusal("functions were replaced by tools; give tools"),
    "web_search_options": Refusal("nothing is searched here; give a tool", (None,)),
    "chat_template": Refusal("the model's own template is used; ask /v1/completions with a prompt you made"),
    "documents": Refusal("write them into a message"),
    "add_generation_prompt": Refusal("replies begin where the template says; leave it out", (None, True)),
    "continue_final_message": Refusal("ask /v1/completions with the text of /apply-template and what goes before"),
    "parse_tool_calls": Refusal("calls are always told as calls; leave it out", (None, True)),
    "chat_format": Refusal("the format is read off the model's template; leave it out"),
    "reasoning_in_content": Refusal("send reasoning_format"),
    "include_reasoning": Refusal('send "reasoning_format": "none" to leave it out', (None, True)),
    "plugins": Refusal(_BY_CLIENT),
    "transforms": Refusal("prompts are never cut; shorten it in the client"),
    "models": Refusal("send the name of one model"),
}
_ROUTERS = {
    "client_metadata": _ACCOUNT,
    "provider": _PLACE,
    "route": _PLACE,
    "session_id": _ACCOUNT,
    "chat_id": _ACCOUNT,
}

CHAT = KnownFields(
    ignored={
        **_OPENAI,
        **_LOCAL_SERVERS,
        **_ROUTERS,
        "metadata": _STORED,
        "verbosity": _WORDS,
        "audio": _NEEDS_MORE,
        "function_call": _NEEDS_MORE,
    },
    refused={**_SAMPLING, **_CHAT_SHAPE},
)
COMPLETIONS = KnownFields(
    ignored={**_LOCAL_SERVERS, **{name: why for name, why in _OPENAI.items() if name != "prompt_cache_key"}},
    refused={
        **_SAMPLING,
        "messages": Refusal("send prompt, or ask /v1/chat/completions"),
        "tools": Refusal("ask /v1/chat/completions"),
        "input_prefix": Refusal("write it into prompt"),
        "input_suffix": Refusal("send suffix"),
        "input_extra": Refusal("write it into prompt"),
    },
)
RESPONSES = KnownFields(
    ignored={
        **_OPENAI,
        **_LOCAL_SERVERS,
        **_ROUTERS,
        "access_programs": _ACCOUNT,
        "background_options": _NEEDS_MORE,
        "image": _NEEDS_MORE,
        "stream_options": "events are not padded, which is all that it asks about",
        "max_tool_calls": "it bounds tools that a server runs itself, and this one runs none",
        "context_management": "what is too long is refused, never shortened",
        "verbosity": _WORDS,
    },
    refused={
        **_SAMPLING,
        "messages": Refusal("send input, or ask /v1/chat/completions"),
        "max_tokens": Refusal("send max_output_tokens"),
        "max_completion_tokens": Refusal("send max_output_tokens"),
        "n": Refusal("ask /v1/chat/completions", (*OFF, 1)),
        "mcp_servers": Refusal("call them in the client, and give their tools as functions"),
    },
)
MESSAGES = KnownFields(
    ignored={
        "metadata": _ACCOUNT,
        "service_tier": _ACCOUNT,
        "billing_policy": _ACCOUNT,
        "fallback_credit_token": _ACCOUNT,
        "user_profile_id": _ACCOUNT,
        "workspace_id": _ACCOUNT,
        "cache_control": _CACHE,
        "container": _NEEDS_MORE,
        "diagnostics": _ACCOUNT,
        "inference_geo": _PLACE,
        "speed": _PLACE,
        "betas": "the routes' newest form is read without asking for it",
        "fallbacks": _PLACE,
        "context_management": "what is too long is refused, never shortened",
        "compaction": "what is too long is refused, never shortened",
    },
    refused={
        "mcp_servers": Refusal("call them in the client, and give their tools"),
        "thread": Refusal("conversations are not kept here; send all messages"),
        "stop": Refusal("send stop_sequences"),
        "response_format": Refusal("send output_config.format"),
        "max_completion_tokens": Refusal("send max_tokens"),
        "seed": Refusal("ask /v1/chat/completions"),
    },
)
EMBEDDINGS = KnownFields(
    ignored={"user": _ACCOUNT, "priority": _QUEUE, "request_id": "the server names requests itself"},
    refused={
        "truncate_prompt_tokens": Refusal("texts are never cut; shorten them in the client"),
        "truncate": Refusal("texts are never cut; shorten them in the client"),
        "add_special_tokens": Refusal("texts get the tokens that the model was trained with", (None, True)),
        "normalize": Refusal("vectors have the length 1; leave it out", (None, True)),
        "embd_normalize": Refusal("vectors have the length 1; leave it out", (None, 2)),
        "input_type": Refusal("write the model's instruction before the text"),
        "task": Refusal("write the model's instruction before the text"),
        "prompt_name": Refusal("write the model's instruction before the text"),
        "content": Refusal("send input"),
        "messages": Refusal("send input"),
    },
)
TEXTS = KnownFields(
    ignored={},
    refused={
        "messages": Refusal("ask /apply-template, or /v1/chat/completions/input_tokens"),
        "text": Refusal("send content"),
        "add_special_tokens": Refusal("send add_special"),
        "return_token_strs": Refusal("send with_pieces"),
    },
)
_PROMPT_ONLY = "it does not change the prompt"
TEMPLATES = KnownFields(
    ignored={
        **CHAT.ignored,
        **dict.fromkeys(
            "stream stream_options n max_completion_tokens max_tokens prediction logprobs top_logprobs"
            " parallel_tool_calls modalities reasoning_format return_progress".split(),
            _PROMPT_ONLY,
        ),
    },
    refused={name: why for name, why in CHAT.refused.items() if name != "add_generation_prompt"},
)
COUNTS = KnownFields(
    ignored={
        **MESSAGES.ignored,
        **dict.fromkeys("max_tokens stream stop_sequences temperature top_p top_k".split(), _PROMPT_ONLY),
    },
    refused=MESSAGES.refused,
)
NONE = KnownFields({}, {})

MESSAGE_PARTS = {
    "cache_control": _CACHE,
    "prompt_cache_breakpoint": _CACHE,
    "annotations": "notes on a former reply, which its text does not need",
    "citations": "notes on a former reply, which its text does not need",
    "logprobs": "notes on a former reply, which its text does not need",
    "signature": "reasoning is not signed here",
    "data": "reasoning that was made unreadable stays that",
    "is_error": "the text of a tool's result says it",
    "caller": "tools are called by the model only",
    "id": "parts are told apart by their order",
}
"""Of the parts of messages, whatever their type: members that are ignored, with the reason."""
TOOLS = {
    "cache_control": _CACHE,
    "eager_input_streaming": "arguments are streamed as they come anyway",
    "input_examples": "the model is told the schema only",
    "output_schema": "the model is told the schema of the arguments only",
    "defer_loading": "all tools are told from the start",
    "allowed_callers": "tools are called by the model only",
}
"""Of the definitions of tools, in whatever API."""
SEARCH_TOOLS = ("web_search", "web_search_preview")
"""Kinds of tools that clients list unasked, ignored where the API has them: what is not told to the model is not
called, and the answer lists the tools that it had. Every other kind that a server would run is refused."""


def check_members(body: bytes, record: type, known: KnownFields) -> None:
    """Refuse a member of a JSON object that `record` has not and that is not known to do nothing. Raises: ApiError."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # What is no object is refused, with the reason, by who reads the record.
        return
    read = {field.encode_name for field in msgspec.structs.fields(record)}
    for name, value in members.items():
        if name in read or name in known.ignored:
            continue
        refusal = known.refused.get(name)
        if bytes(value) == b"null" or (refusal is not None and _is_neutral(msgspec.json.decode(value), refusal)):
            continue
        raise refused_member(name, refusal)


def _is_neutral(value: object, refusal: Refusal) -> bool:
    # True is no number here.
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in refusal.neutral)


def refused_member(name: str, refusal: Refusal | None = None) -> ApiError:
    """The error for a member that is not read; name: its path."""
    if refusal is None:
        told = f"{name:.200} is no member that this route knows; leave it out"
    else:
        told = f"{name:.200} is given, but cannot be had here; {refusal.way_out}"
    return ApiError(400, told, code="unsupported_parameter", param=name[:200])


def check_object(value: Mapping[str, Any], read: str, path: str, ignored: Mapping[str, str]) -> None:
    """Refuse a member of an object inside a request. read: the names that are read, with spaces between.

    Raises: ApiError.
    """
    for name, member in value.items():
        if member is not None and name not in ignored and name not in read.split():
            raise refused_member(f"{path}.{name}")
