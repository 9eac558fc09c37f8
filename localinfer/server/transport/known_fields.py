"""Members of requests that are known and not read: those that change nothing here, and those that cannot be had.

Tables only, by reason; `http.check_members` applies them. A member in no table and in no record is refused by its name,
on every route and at every depth: a client that asks for something must not be answered as if it had not. One that is
null, or whose value says what happens anyway, asks for nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_ACCOUNT = "accounts, billing and statistics of a service"
_STORED = "nothing is stored here"
_CACHE = "the prefix cache needs no hints: prompts that were computed before are found by themselves"
_QUEUE = "there is one queue, and requests have equal rights in it"
_MODERATION = "nothing is moderated here"
_NEEDS_MORE = "it only matters beside a member that is refused"
_VERBOSITY = "how much a model writes is decided by the model"
_PLACE = "there is one place where it runs: this machine"
_NAMES = "the server names requests itself"
_UNLOAD = "--idle-unload says how long models stay loaded"
_NO_SHORTENING = "what is too long is refused, never shortened"

OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which most members ask for nothing."""


class Refusal(NamedTuple):
    """Why a member is refused and what to do instead; values that ask for nothing pass."""

    way_out: str
    neutral: tuple[Any, ...] = OFF


class KnownFields(NamedTuple):
    """Of one route: members that are ignored, with the reason, and members that are refused, with the way out."""

    ignored: dict[str, str]
    refused: dict[str, Refusal]


def _ignore(names_of: Mapping[str, str]) -> dict[str, str]:
    """Reason -> names, turned into name -> reason."""
    return {name: reason for reason, names in names_of.items() for name in names.split()}


def _refuse(names_of: Mapping[str, str], neutral: tuple[Any, ...] = OFF) -> dict[str, Refusal]:
    """Way out -> names, turned into name -> refusal."""
    return {name: Refusal(way_out, neutral) for way_out, names in names_of.items() for name in names.split()}


_OPENAI = _ignore(
    {
        _ACCOUNT: "user service_tier safety_identifier",
        _STORED: "store",
        _CACHE: "prompt_cache_key prompt_cache_options prompt_cache_retention",
        _MODERATION: "moderation",
    }
)
_LOCAL_SERVERS = _ignore(
    {
        _CACHE: "cache_prompt",
        _PLACE: "id_slot",
        _QUEUE: "priority",
        _NAMES: "request_id",
        _UNLOAD: "keep_alive ttl",
        "there is one, and what it cannot enforce is refused": "guided_decoding_backend",
    }
)
"""Members that vLLM, llama.cpp, LM Studio and ollama know and that change no reply."""
_ROUTERS = _ignore({_ACCOUNT: "client_metadata session_id chat_id", _PLACE: "provider route"})

_NEVER_CUT = "prompts are never cut; shorten it in the client"
_SAMPLING = {
    **_refuse(
        {
            "send max_tokens": "n_predict num_predict",
            "start the server with --context-length": "num_ctx",
            "send dry_last_n": "dry_penalty_last_n",
            "the order of samplers is fixed; leave it out": "samplers sampler_seq",
            "send typical_p": "typical",
            "send logit_bias": "penalize_nl bad_words bad_words_ids",
            "use `localinfer run --beams`": "use_beam_search",
            "leave it out": "early_stopping logits_processor_pattern logprob_token_ids preserved_tokens"
            " kv_transfer_params vllm_xargs",
            "send stop with their text": "stop_token_ids",
            "add the text in the client": "include_stop_str_in_output",
            "send logit_bias, or a regex": "allowed_token_ids logits_processors",
            _NEVER_CUT: "truncate_prompt_tokens",
            "send echo and logprobs to /v1/completions": "prompt_logprobs",
            "ask /tokenize for ids": "return_tokens_as_token_ids return_token_ids return_tokens",
            "send logprobs": "post_sampling_probs",
            "the last chunk of a stream has the timings": "timings_per_token",
            "do that in the client": "response_fields",
            "JSON comes on one line; lay it out in the client": "guided_whitespace_pattern",
            "send a grammar": "structural_tag",
            "a grammar holds from the first token on; leave it out": "grammar_lazy grammar_triggers",
            "load the model with the option you want instead": "lora lora_adapters",
            "start the server with --draft": "draft_model",
            "give its members beside messages, under their names here": "options",
            "send response_format": "format",
            "this server reads text only": "image_data images mm_processor_kwargs multi_modal_uuids",
            "prompts of all clients share one cache; run a server of your own to keep yours apart": "cache_salt",
            "give its members beside the others: clients do that before they send": "extra_body",
        }
    ),
    **_refuse(
        {
            "use ignore_eos with max_tokens, or a regex that asks for a length": "min_tokens",
            "send logprobs": "n_probs",
            "send context_shift": "n_keep n_discard",
            "leave it out": "min_keep n_indent",
            "end the request when it took too long": "t_max_predict_ms",
            "send min_p": "top_a",
        },
        (*OFF, 0),
    ),
    **_refuse({"send min_p or typical_p": "tfs_z", "leave it out": "length_penalty"}, (*OFF, 1)),
    **_refuse(
        {
            "special tokens are never part of the text; leave it out": "skip_special_tokens",
            "leave it out": "spaces_between_special_tokens",
            "completions begin with the model's first token, chats as the template says": "add_special_tokens",
        },
        (None, True),
    ),
}
_CHAT_SHAPE = {
    **_refuse(
        {
            "ask /v1/completions": "echo suffix",
            "send messages, or ask /v1/completions": "prompt",
            "functions were replaced by tools; give tools": "functions",
            "the model's own template is used; ask /v1/completions with a prompt you made": "chat_template",
            "write them into a message": "documents",
            "ask /v1/completions with the text of /apply-template and what goes before": "continue_final_message",
            "the format is read off the model's template; leave it out": "chat_format",
            "send reasoning_format": "reasoning_in_content",
            "do that in the client": "plugins",
            _NEVER_CUT: "transforms",
            "send the name of one model": "models",
        }
    ),
    **_refuse({"ask /v1/completions": "best_of"}, (*OFF, 1)),
    **_refuse({"nothing is searched here; give a tool": "web_search_options"}, (None,)),
    **_refuse(
        {
            "replies begin where the template says; leave it out": "add_generation_prompt",
            "calls are always told as calls; leave it out": "parse_tool_calls",
            'send "reasoning_format": "none" to leave it out': "include_reasoning",
        },
        (None, True),
    ),
}

CHAT = KnownFields(
    _OPENAI
    | _LOCAL_SERVERS
    | _ROUTERS
    | _ignore({_STORED: "metadata", _VERBOSITY: "verbosity", _NEEDS_MORE: "audio function_call"}),
    _SAMPLING | _CHAT_SHAPE,
)
COMPLETIONS = KnownFields(
    {name: why for name, why in (_LOCAL_SERVERS | _OPENAI).items() if name != "prompt_cache_key"},
    _SAMPLING
    | _refuse(
        {
            "send prompt, or ask /v1/chat/completions": "messages",
            "ask /v1/chat/completions": "tools",
            "write it into prompt": "input_prefix input_extra",
            "send suffix": "input_suffix",
        }
    ),
)
RESPONSES = KnownFields(
    _OPENAI
    | _LOCAL_SERVERS
    | _ROUTERS
    | _ignore(
        {
            _ACCOUNT: "access_programs",
            _NEEDS_MORE: "background_options image",
            "events are not padded, which is all that it asks about": "stream_options",
            "it bounds tools that a server runs itself, and this one runs none": "max_tool_calls",
            _NO_SHORTENING: "context_management",
            _VERBOSITY: "verbosity",
        }
    ),
    _SAMPLING
    | _refuse(
        {
            "send input, or ask /v1/chat/completions": "messages",
            "send max_output_tokens": "max_tokens max_completion_tokens",
            "call them in the client, and give their tools as functions": "mcp_servers",
        }
    )
    | _refuse({"ask /v1/chat/completions": "n"}, (*OFF, 1)),
)
MESSAGES = KnownFields(
    _ignore(
        {
            _ACCOUNT: "metadata service_tier billing_policy fallback_credit_token user_profile_id workspace_id"
            " diagnostics",
            _CACHE: "cache_control",
            _NEEDS_MORE: "container",
            _PLACE: "inference_geo speed fallbacks",
            "the routes' newest form is read without asking for it": "betas",
            _NO_SHORTENING: "context_management compaction",
        }
    ),
    _refuse(
        {
            "call them in the client, and give their tools": "mcp_servers",
            "conversations are not kept here; send all messages": "thread",
            "send stop_sequences": "stop",
            "send output_config.format": "response_format",
            "send max_tokens": "max_completion_tokens",
            "ask /v1/chat/completions": "seed",
        }
    ),
)
EMBEDDINGS = KnownFields(
    _ignore({_ACCOUNT: "user", _QUEUE: "priority", _NAMES: "request_id"}),
    _refuse(
        {
            "texts are never cut; shorten them in the client": "truncate_prompt_tokens truncate",
            "write the model's instruction before the text": "input_type task prompt_name",
            "send input": "content messages",
        }
    )
    | _refuse({"texts get the tokens that the model was trained with": "add_special_tokens"}, (None, True))
    | _refuse({"vectors have the length 1; leave it out": "normalize"}, (None, True))
    | _refuse({"vectors have the length 1; leave it out": "embd_normalize"}, (None, 2)),
)
TEXTS = KnownFields(
    {},
    _refuse(
        {
            "ask /apply-template, or /v1/chat/completions/input_tokens": "messages",
            "send content": "text",
            "send add_special": "add_special_tokens",
            "send with_pieces": "return_token_strs",
        }
    ),
)
_PROMPT_ONLY = "it does not change the prompt"
TEMPLATES = KnownFields(
    CHAT.ignored
    | _ignore(
        {
            _PROMPT_ONLY: "stream stream_options n max_completion_tokens max_tokens prediction logprobs top_logprobs"
            " parallel_tool_calls modalities reasoning_format return_progress"
        }
    ),
    {name: why for name, why in CHAT.refused.items() if name != "add_generation_prompt"},
)
COUNTS = KnownFields(
    MESSAGES.ignored | _ignore({_PROMPT_ONLY: "max_tokens stream stop_sequences temperature top_p top_k"}),
    MESSAGES.refused,
)
NONE = KnownFields({}, {})

MESSAGE_PARTS = _ignore(
    {
        _CACHE: "cache_control prompt_cache_breakpoint",
        "notes on a former reply, which its text does not need": "annotations citations logprobs",
        "reasoning is not signed here": "signature",
        "reasoning that was encrypted stays unreadable": "data",
        "the text of a tool's result says it": "is_error",
        "tools are called by the model only": "caller",
        "parts are told apart by their order": "id",
    }
)
"""Of the parts of messages, whatever their type: members that are ignored, with the reason."""
TOOLS = _ignore(
    {
        _CACHE: "cache_control",
        "arguments are streamed as they come anyway": "eager_input_streaming",
        "the model is shown the schema of the arguments only": "input_examples output_schema",
        "the model is shown all tools from the start": "defer_loading",
        "tools are called by the model only": "allowed_callers",
    }
)
"""Of the definitions of tools, in whatever API."""
SEARCH_TOOLS = ("web_search", "web_search_preview")
"""Kinds of tools that clients list unasked, ignored where the API has them: what the model is not shown it does not
call, and the answer lists the tools that it had. Every other kind that a server would run is refused."""
