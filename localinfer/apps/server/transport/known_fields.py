"""Members of requests that are known and not read: those that change nothing here, and those that cannot be had.

Tables only, by reason; `http.leave_unread` applies them, at every depth: a record inside a request has its own table.
A member in no table and in no record is left unread with a notice: newer clients send such. One that is known to change
a reply and cannot be had is refused by its name: a client that asks for something must not be answered as if it had
not. One that is null, or whose value says what happens anyway, asks for nothing.
"""

from typing import Any, NamedTuple

_ACCOUNT = "accounts, billing and statistics of a service"
_STORED = "chats are not kept; responses are"
_CACHE = "the prefix cache needs no hints: prompts that were computed before are found by themselves"
_QUEUE = "vectors are computed between the steps of texts, in the order of requests"
_MODERATION = "nothing is moderated here"
_NEEDS_MORE = "it only matters beside a member that is refused"
_VERBOSITY = "how much a model writes is decided by the model"
_PLACE = "there is one place where it runs: this machine"
_NAMES = "the server names requests itself"
_NO_SHORTENING = "what is too long is refused, never shortened"

OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which most members ask for nothing."""


class Refusal(NamedTuple):
    """Why a member is refused and what to do instead; values that ask for nothing pass.

    error_code: by which clients know the error, as `error.details.error_code`.
    """

    way_out: str
    neutral: tuple[Any, ...] = OFF
    error_code: str | None = None


class KnownFields(NamedTuple):
    """Of one route: members that are ignored, with the reason, and members that are refused, with the way out.

    takes_unknown: whether any other is left unread; not where each member is a demand of its own.
    """

    ignored: dict[str, str]
    refused: dict[str, Refusal]
    takes_unknown: bool = True


_NEUTRAL = {
    "": OFF,
    "0": (*OFF, 0),
    "-1": (*OFF, 0, -1),
    "1": (*OFF, 1),
    "2": (None, 2),
    "true": (None, True),
    "flag": (None, True, False),
    "null": (None,),
}


def _ignore(table: str) -> dict[str, str]:
    """Name -> reason, from lines of `names: reason`."""
    rows = [line.strip().partition(": ") for line in table.strip().splitlines()]
    return {name: reason for names, _, reason in rows for name in names.split()}


def _refuse(table: str) -> dict[str, Refusal]:
    """Name -> refusal, from lines of `names: way out`; `name=value` names what passes, by _NEUTRAL."""
    rows = [(*name.partition("=")[::2], way_out) for name, way_out in _ignore(table).items()]
    return {name: Refusal(way_out, _NEUTRAL[value]) for name, value, way_out in rows}


_OPENAI = _ignore(f"""
    user service_tier safety_identifier: {_ACCOUNT}
    prompt_cache_key prompt_cache_options prompt_cache_retention: {_CACHE}
    moderation: {_MODERATION}
""")
_LOCAL_SERVERS = _ignore(f"""
    cache_prompt: {_CACHE}
    id_slot: {_PLACE}
    request_id: {_NAMES}
    keep_alive ttl: --idle-unload says how long models stay loaded
    guided_decoding_backend: there is one, and what it cannot enforce is refused
""")
"""Members that vLLM, llama.cpp, LM Studio and ollama know and that change no reply."""
_ROUTERS = _ignore(f"""
    client_metadata session_id chat_id: {_ACCOUNT}
    provider route: {_PLACE}
""")
_SAMPLING = _refuse("""
    n_predict num_predict: send max_tokens
    num_ctx: start the server with --context-length
    dry_penalty_last_n: send dry_last_n
    samplers sampler_seq: the order of samplers is fixed; leave it out
    typical: send typical_p
    tfs_z=1: send min_p or typical_p
    top_a=0: send min_p
    penalize_nl: send logit_bias
    bad_words_ids: send bad_words
    logits_processors: send logit_bias, or a regex
    n_keep=0 n_discard=0: send context_shift
    t_max_predict_ms=-1: end the request when it took too long
    use_beam_search: use `localinfer run --beams`
    early_stopping length_penalty=1 logits_processor_pattern: leave it out
    min_keep=0 n_indent=0 spaces_between_special_tokens=true: leave it out
    logprob_token_ids preserved_tokens kv_transfer_params vllm_xargs: leave it out
    truncate_prompt_tokens: prompts are never cut; shorten it in the client
    skip_special_tokens=true: special tokens are never part of the text; leave it out
    add_special_tokens=flag: a chat begins as its template says; ask /v1/completions
    prompt_logprobs: send echo and logprobs to /v1/completions
    n_probs=0 post_sampling_probs: send logprobs
    return_tokens_as_token_ids return_tokens: send return_token_ids to chats or completions, or ask /tokenize
    return_token_ids: ask /v1/chat/completions, /v1/completions or /tokenize
    t_max_prompt_ms=0: end the request when it took too long
    timings_per_token: the last chunk of a stream has the timings
    response_fields: do that in the client
    format: send response_format
    guided_whitespace_pattern: JSON comes on one line; lay it out in the client
    grammar_lazy grammar_triggers: a grammar holds from the first token on; leave it out
    lora lora_adapters: load the model with the option you want instead
    draft_model: start the server with --draft
    image_data images mm_processor_kwargs multi_modal_uuids: this server reads text only
    options: give its members beside messages, under their names here
    extra_body: give its members beside the others: clients do that before they send
""")
_CHAT_SHAPE = _refuse("""
    echo suffix best_of=1: ask /v1/completions
    prompt: send messages, or ask /v1/completions
    functions: functions were replaced by tools; give tools
    web_search_options=null: nothing is searched here; give a tool
    chat_template: the model's own template is used; ask /v1/completions with a prompt you made
    documents: write them into a message
    parse_special: a chat's control tokens are those of its template; ask /v1/completions
    parse_tool_calls=true: calls are always returned as calls; leave it out
    chat_format: the format is read off the model's template; leave it out
    reasoning_in_content thinking_forced_open: send reasoning_format
    separate_reasoning=true stream_reasoning=true: reasoning is told apart, as it comes; send reasoning_format
    include_reasoning=true: send "reasoning_format": "none" to leave it out
    plugins: do that in the client
    transforms: prompts are never cut; shorten it in the client
    models: send the name of one model
""")
_CHAT_MORE = _ignore(f"""
    metadata store: {_STORED}
    verbosity: {_VERBOSITY}
    audio function_call: {_NEEDS_MORE}
""")
_PROMPT_ONLY = "it does not change the prompt"
_CHAT_NO_PROMPT = (
    "stream stream_options n max_completion_tokens max_tokens prediction logprobs top_logprobs parallel_tool_calls"
    " modalities reasoning_format return_progress timings_per_token n_probs n_predict id_slot verbose usage"
    " return_token_ids"
)

_LLAMA_SERVER = ("n_predict", "n_probs", "timings_per_token", "id_slot")
"""Members of llama-server that both of OpenAI's routes for text read."""


def _without(table: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row for name, row in table.items() if name not in names}


CHAT = KnownFields(
    _without(_OPENAI | _LOCAL_SERVERS | _ROUTERS | _CHAT_MORE, _LLAMA_SERVER),
    _without(_SAMPLING, (*_LLAMA_SERVER, "return_token_ids")) | _CHAT_SHAPE,
)
TEMPLATES = KnownFields(
    CHAT.ignored | dict.fromkeys(_CHAT_NO_PROMPT.split(), _PROMPT_ONLY),
    CHAT.refused,
)
COMPLETIONS = KnownFields(
    _without(_LOCAL_SERVERS | _OPENAI, ("prompt_cache_key", *_LLAMA_SERVER)),
    _without(_SAMPLING, ("add_special_tokens", "return_token_ids", *_LLAMA_SERVER))
    | _refuse("""
        messages: send prompt, or ask /v1/chat/completions
        tools: ask /v1/chat/completions
        input_prefix input_extra: write it into prompt
        input_suffix: send suffix
    """),
)
RESPONSES = KnownFields(
    _OPENAI
    | _LOCAL_SERVERS
    | _ROUTERS
    | _ignore(f"""
        access_programs: {_ACCOUNT}
        background_options image: {_NEEDS_MORE}
        stream_options: events are not padded, which is all that it asks about
        max_tool_calls: it bounds tools that a server runs itself, and this one runs none
        context_management: {_NO_SHORTENING}
        verbosity personality: {_VERBOSITY}
    """),
    _without(_SAMPLING, ("timings_per_token",))
    | _refuse("""
        messages: send input, or ask /v1/chat/completions
        max_tokens max_completion_tokens: send max_output_tokens
        n=1: ask /v1/chat/completions
        mcp_servers: call them in the client, and give their tools as functions
    """),
)
# Clients begin a thread with every conversation, send all messages with it, and do so again where it cannot go on.
_THREAD = Refusal(
    "conversations are not kept here; send all messages",
    (*OFF, {"type": "create"}, {"type": "create", "previous": None}),
    "thread_unsupported_request",
)
MESSAGES = KnownFields(
    _ignore(f"""
        metadata service_tier billing_policy fallback_credit_token user_profile_id workspace_id: {_ACCOUNT}
        diagnostics: {_ACCOUNT}
        cache_control: {_CACHE}
        container: {_NEEDS_MORE}
        inference_geo speed fallbacks: {_PLACE}
        betas: the routes' newest form is read without asking for it
        context_management compaction: {_NO_SHORTENING}
    """),
    _refuse("""
        mcp_servers: call them in the client, and give their tools
        stop: send stop_sequences
        response_format: send output_config.format
        max_completion_tokens: send max_tokens
        seed: ask /v1/chat/completions
    """)
    | {"thread": _THREAD},
)
COUNTS = KnownFields(
    MESSAGES.ignored
    | dict.fromkeys("max_tokens stream stop_sequences temperature top_p top_k priority".split(), _PROMPT_ONLY),
    MESSAGES.refused,
)
EMBEDDINGS = KnownFields(
    _ignore(f"""
        user: {_ACCOUNT}
        priority: {_QUEUE}
        request_id: {_NAMES}
    """),
    _refuse("""
        truncate_prompt_tokens: send truncate, which cuts texts to the context
        add_special_tokens=true: texts get the tokens that the model was trained with
        normalize=true embd_normalize=2: vectors have the length 1; leave it out
        input_type task prompt_name: write the model's instruction before the text
        content messages: send input
    """),
)
RERANK = KnownFields(
    _ignore(f"""
        user: {_ACCOUNT}
        priority: {_QUEUE}
        request_id: {_NAMES}
    """),
    _refuse("""
        truncate_prompt_tokens max_tokens_per_doc max_chunks_per_doc: send truncate, which cuts to the context
        rank_fields: send documents as texts
        input: send query and documents
    """),
)
TEXTS = KnownFields(
    {},
    _refuse("""
        messages: ask /apply-template, or /v1/chat/completions/input_tokens
        text: send content
    """),
)
NONE = KnownFields({}, {})
FORMS = KnownFields({}, {}, takes_unknown=False)
"""Of records whose members are kinds of forms: a reply would be held to none."""

MESSAGE_MEMBERS = KnownFields(
    {},
    _refuse("""
        images image image_url videos video video_url input_audio audios files file: this server reads text only
        citations documents: write them into the content
    """),
)
"""Of a message of a chat."""
MESSAGE_PARTS = _ignore(f"""
    cache_control prompt_cache_breakpoint: {_CACHE}
    annotations citations logprobs: notes on a former reply, which its text does not need
    signature: reasoning is not signed here
    data: reasoning that was encrypted stays unreadable
    is_error: the text of a tool's result says it
    incomplete partial_json: what this server says of a call that was cut off
    caller: tools are called by the model only
    id: parts are ordered as they stand
""")
"""Of the parts of messages, whatever their type: members that are ignored, with the reason."""
TOOLS = _ignore(f"""
    cache_control: {_CACHE}
    eager_input_streaming: arguments are streamed as they come anyway
    input_examples output_schema: the model is shown the schema of the arguments only
    defer_loading: the model is shown all tools from the start
    allowed_callers: tools are called by the model only
""")
"""Of the definitions of tools, in whatever API."""
SEARCH_TOOLS = ("web_search", "web_search_preview")
"""Kinds of tools that clients list unasked, ignored where the API has them: what the model is not shown it does not
call, and the answer lists the tools that it had. Every other kind that a server would run is refused."""
