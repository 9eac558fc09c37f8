"""Members and values of requests that other servers know: left unread, refused, or read as what they mean.

Tables by reason; `http.leave_unread` applies them at every depth. Clients are newer than servers: they send members
that a server does not know yet, and notices name those.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

HEADER = "x-localinfer-notices"
"""The header of every answer to a request of which there are notices."""
_MOST = 16
_MOST_CHARACTERS = 200
_SHORTEST_WORD = 5
_ALIKE = 0.9
_notices: ContextVar[list[str] | None] = ContextVar("notices", default=None)

Unread = Callable[[type, Collection[str], str, str, Any], None]
"""Called with the record, the names of its members, a member's name, its path and its value; may raise."""


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Gather the calls of `notice` while the context lasts, in threads that work for it too."""
    found: list[str] = []
    before = _notices.set(found)
    try:
        yield found
    finally:
        _notices.reset(before)


def notice(text: str) -> None:
    """Have a request's answer say something, in one line; once, and not more than some such lines."""
    found = _notices.get()
    if found is None or len(found) >= _MOST:
        return
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:_MOST_CHARACTERS])
    if shown not in found:
        found.append(shown)


def is_full() -> bool:
    """Return whether no further notice is taken, so that none needs to be made."""
    found = _notices.get()
    return found is not None and len(found) >= _MOST


def header(notices: Collection[str]) -> dict[str, str]:
    """The header that says them, in ASCII; none where there are none."""
    text = "; ".join(notices).encode("ascii", "backslashreplace").decode("ascii")
    return {HEADER: text} if notices else {}


def meant_name(name: str, known: Collection[str]) -> str | None:
    """The member that a misspelled one resembles, None for one that resembles none."""
    if not _SHORTEST_WORD <= len(name) <= _MOST_CHARACTERS:
        return None
    return next(iter(get_close_matches(name, known, 1, _ALIKE)), None)


def read_value(value: Any, record: type, unread: Unread) -> Any:
    """A request without what its record does not read, at every depth: members it has not, which `unread` gets,
    and nulls of members that have another value by default.

    value: as JSON is decoded. Raises: what `unread` raises.
    """
    return _read(value, inspect.type_info(record), "", unread)


def _read(value: Any, kind: inspect.Type, path: str, unread: Unread) -> Any:
    if isinstance(value, dict):
        match _of(kind, inspect.StructType, inspect.DictType):
            case inspect.StructType() as struct:
                return _read_members(value, struct, path, unread)
            case inspect.DictType(value_type=inner):
                return {name: _read(one, inner, _join(path, name), unread) for name, one in value.items()}
    if isinstance(value, list):
        match _of(kind, inspect.ListType):
            case inspect.ListType(item_type=inner) if not isinstance(inner, inspect.AnyType):
                return [_read(one, inner, f"{path}[{index}]", unread) for index, one in enumerate(value)]
    return value


def _read_members(value: Mapping[str, Any], struct: inspect.StructType, path: str, unread: Unread) -> dict[str, Any]:
    members = _members_of(struct.cls)
    made = {}
    for name, one in value.items():
        member = members.get(name)
        if member is None:
            if one is not None:
                unread(struct.cls, members, name, _join(path, name), one)
        elif one is not None or member.required:
            made[name] = _read(one, member.type, _join(path, name), unread)
    return made


@lru_cache(maxsize=256)
def _members_of(record: type) -> Mapping[str, inspect.Field]:
    found = inspect.type_info(record)
    assert isinstance(found, inspect.StructType), "records are structs"
    return {field.encode_name: field for field in found.fields}


def _of(kind: inspect.Type, *wanted: type[inspect.Type]) -> inspect.Type | None:
    """The first of some kinds that a type is, or is among others."""
    if isinstance(kind, inspect.UnionType):
        return next((found for one in kind.types if (found := _of(one, *wanted)) is not None), None)
    if isinstance(kind, inspect.Metadata):
        return _of(kind.type, *wanted)
    return kind if isinstance(kind, wanted) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_NO_LIMIT = ((-1, None),)
_NO_TEXT = (("", None),)
_OFF = ((0, 1),)
_MEANT: Mapping[str, tuple[tuple[Any, Any], ...]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _NO_LIMIT),
    **dict.fromkeys(
        ("stop", "grammar", "regex", "json_schema", "guided_json", "guided_regex", "guided_grammar"), _NO_TEXT
    ),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), _OFF),
    "top_k": ((-1, 0),),
}
"""Member -> pairs of a value that clients send and the one that it means here; None: as if it were not there."""
_STOPS = ("stop", "stop_sequences")
_OPTIONS = "options"
"""The member in which Ollama's requests have such members."""
_LENIENT_NAMES = frozenset((*_MEANT, *_STOPS))
_LARGEST = 1 << 53
"""Beyond it not every whole number is a float, so that one could mean another."""
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\d++(?:\.\d++)?+(?:[eE][+-]?\d++)?+', re.DOTALL)


def with_meant_values(members: Mapping[str, msgspec.Raw], record: type) -> dict[str, Any] | None:
    """The members of a request with what they mean; None if they mean what they say.

    record: what they are decoded as; a member that it must have is never taken for nothing.
    """
    made: dict[str, Any] = {}
    for name in members.keys() & _LENIENT_NAMES:
        try:
            value = msgspec.json.decode(members[name])
        except msgspec.DecodeError:
            # A number with too many digits; the record refuses it by its name.
            continue
        if name in _STOPS and isinstance(value, list) and "" in value:
            made[name] = [text for text in value if text != ""]
        for sent, meant in _MEANT.get(name, ()):
            # True is no number here.
            if value == sent and not isinstance(value, bool):
                made[name] = meant
    if (inner := _object(members.get(_OPTIONS))) is not None and (
        meant := with_meant_values(inner, record)
    ) is not None:
        made[_OPTIONS] = meant
    if made:
        required = {field.encode_name for field in msgspec.structs.fields(record) if field.required}
        made = {name: value for name, value in made.items() if value is not None or name not in required}
    return {**members, **made} if made else None


def _object(member: msgspec.Raw | None) -> dict[str, msgspec.Raw] | None:
    """The members of an object; None of anything else."""
    try:
        return None if member is None else msgspec.json.decode(member, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None


def with_whole_numbers(body: bytes | bytearray) -> bytes:
    """JSON in which numbers such as `3.0` are written `3`, in texts excepted."""

    def whole(found: re.Match[bytes]) -> bytes:
        text = found[0]
        if text[:1] == b'"' or not {*b".eE"} & {*text}:
            return text
        number = float(text)
        return b"%d" % number if number.is_integer() and abs(number) <= _LARGEST else text

    return bytes(_STRING_OR_NUMBER.sub(whole, body))


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
    """Reason of a member's refusal with the way out; values that ask for nothing pass.

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
    image_data images mm_processor_kwargs multi_modal_uuids: give pictures and sounds as parts of messages
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
        multimodal_data image_data: ask /completion, or a chat
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
# Clients begin a thread with every conversation, send all messages with it, and do so again where it was refused.
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
        multimodal_data image_data: vectors are made of words
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
DECISIONS = KnownFields(
    _ignore(f"""
        user safety_identifier metadata: {_ACCOUNT}
        prompt_cache_key prompt_cache_options: {_CACHE}
        priority: {_QUEUE}
        request_id: {_NAMES}
    """),
    _refuse("""
        messages: send input to /v1/decisions, or state to /v1/systemone
        documents query: ask /v1/rerank
    """),
)
TEXTS = KnownFields(
    {},
    _refuse("""
        messages: ask /apply-template, or /v1/chat/completions/input_tokens
        text: send content
        multimodal_data image_data: ask /v1/chat/completions/input_tokens, which counts the tokens of pictures
    """),
)
SPEECH = KnownFields(
    _ignore(f"""
        chunking_strategy: a model hears a sound as its own encoder cuts it
        user: {_ACCOUNT}
    """),
    _refuse("""
        include: log probabilities come with /v1/chat/completions, which takes sounds as input_audio
        timestamp_granularities: no model here tells when a word was said
        known_speaker_names known_speaker_references: no model here tells speakers apart
        messages: send prompt, or ask /v1/chat/completions
    """),
)
NONE = KnownFields({}, {})
FORMS = KnownFields({}, {}, takes_unknown=False)
"""Of records whose members are kinds of forms: a reply would be held to none."""

MESSAGE_MEMBERS = KnownFields(
    {},
    _refuse("""
        images image image_url videos video video_url input_audio audios files file: give them as parts of content
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
