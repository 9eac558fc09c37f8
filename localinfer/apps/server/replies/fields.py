"""Members that several requests share, and the options, constraints and prompts of the engine that they become."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.replies.media_fields import media_file
from localinfer.apps.server.replies.message_fields import joined_text
from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import FORMS
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.arguments import MAX_PRIORITY
from localinfer.engine.sampling.params import MAX_LOGPROBS, MAX_SEED, NUMBER_OPTIONS, NumberOption
from localinfer.errors import TokenIdError
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.options import Constraint, Grammar, JsonObject, JsonSchema, Regex, StructuralTag

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer


MAX_SCHEMA_BYTES = 256 << 10
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
"""Characters that mean something in a regular expression."""

Source = Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES)]
"""Text that defines a form; empty, it asks for nothing."""
Schema = dict[str, Any] | bool
_Choice = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Choices = Annotated[list[_Choice], Meta(min_length=1, max_length=10_000)]
_WRAPPED = frozenset(("name", "description", "strict", "schema"))


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a reply. It is always enforced, but for keywords that cannot be: with `strict` they are refused,
    without it named in notices.

    json_schema, schema, value: a schema in a wrapper with a name, as chat completions have it, or alone, or beside the
    type. pattern, value: of regex. structures, triggers, format: of structural_tag. name, description: for people; the
    model is held to the schema, and not shown it.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar", "structural_tag"]
    json_schema: Schema | None = None
    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None
    pattern: Source | None = None
    regex: Source | None = None
    grammar: Source | None = None
    value: Schema | Source | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def constraint(self, path: str) -> Constraint | None:
        """The constraint that this form is, None for any text. Raises: ApiError."""
        match self.type:
            case "text":
                return None
            case "regex":
                return Regex(self._text(path, pattern=self.pattern, regex=self.regex, value=self.value))
            case "grammar":
                return Grammar(self._text(path, grammar=self.grammar, value=self.value))
            case "structural_tag":
                older = {"structures": self.structures, "triggers": self.triggers}
                return StructuralTag(older if self.format is None else {"format": self.format})
        schema = self._schema(path)
        if self.type == "json_schema" and schema is None:
            raise ApiError(400, f"{path} is of type json_schema and has no schema; add one", param=path)
        wrapped = self.json_schema if isinstance(self.json_schema, dict) else {}
        is_strict = self.strict is True or wrapped.get("strict") is True
        return JsonObject() if schema is None else _json_schema(schema, path, is_strict=is_strict)

    def _schema(self, path: str) -> Schema | str | None:
        found = self.json_schema
        if isinstance(found, dict) and (found.keys() <= _WRAPPED or isinstance(found.get("schema"), dict)):
            check_object(found, " ".join(_WRAPPED), f"{path}.json_schema", {})
            found = found.get("schema")
        return next((one for one in (found, self.schema, self.value) if one is not None), None)

    def _text(self, path: str, **members: object) -> str:
        """The only member that has text. Raises: ApiError."""
        found = [text for text in members.values() if isinstance(text, str) and text]
        if len(found) != 1:
            raise ApiError(400, f"{path} is of type {self.type}; give {' or '.join(members)} as text", param=path)
        return found[0]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a reply as vLLM has it.

    disable_any_whitespace, disable_additional_properties, disable_fallback: JSON is on one line, objects take the
    members that their schema names, and nothing but the form is tried, whatever these say.
    """

    known_fields: ClassVar = FORMS

    json: Schema | Source | None = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | Source | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: Source | None = None


class FormFields(msgspec.Struct):
    """The ways to hold a reply to a form, of which at most one may be given.

    response_format: OpenAI's way. grammar, json_schema: llama.cpp's. structured_outputs and what begins with `guided`:
    vLLM's newer and older ways, and structural_tag. Schemas may be JSON text too, where vLLM allows it.
    """

    response_format: ResponseFormat | None = None
    grammar: Source | None = None
    regex: Source | None = None
    json_schema: Schema | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    structural_tag: dict[str, Any] | Source | None = None

    def constraint(self) -> Constraint | None:
        """The form that the reply must have, None for any. Raises: ApiError."""
        outputs = self.structured_outputs or StructuredOutputs()
        if outputs.whitespace_pattern:
            path = "structured_outputs.whitespace_pattern"
            raise unsupported(f"{path} cannot be had: JSON comes on one line; lay it out in the client", path)
        forms: tuple[tuple[str, Any, Callable[[Any, str], Constraint | None]], ...] = (
            ("response_format", self.response_format, ResponseFormat.constraint),
            ("grammar", self.grammar, _grammar),
            ("regex", self.regex, _regex),
            ("json_schema", self.json_schema, _json_schema),
            ("guided_json", self.guided_json, _json_schema),
            ("guided_regex", self.guided_regex, _regex),
            ("guided_choice", self.guided_choice, _choice),
            ("guided_grammar", self.guided_grammar, _grammar),
            ("structured_outputs.json", outputs.json, _json_schema),
            ("structured_outputs.regex", outputs.regex, _regex),
            ("structured_outputs.choice", outputs.choice, _choice),
            ("structured_outputs.grammar", outputs.grammar, _grammar),
            ("structured_outputs.json_object", outputs.json_object or None, lambda value, path: JsonObject()),
            ("structured_outputs.structural_tag", outputs.structural_tag, _structural_tag),
            ("structural_tag", self.structural_tag, _structural_tag),
        )
        found = {
            path: form
            for path, value, make in forms
            if value is not None and value != "" and (form := make(value, path))
        }
        if len(found) > 1:
            names = " and ".join(found)
            raise ApiError(400, f"{names} were given, and a reply has one form; choose one", param=list(found)[1])
        return next(iter(found.values()), None)


def _grammar(text: str, path: str) -> Grammar:
    return Grammar(text)


def _regex(pattern: str, path: str) -> Regex:
    return Regex(pattern)


def _choice(texts: Sequence[str], path: str) -> Regex:
    """One of several texts, to the letter."""
    return Regex("|".join(_SYNTAX.sub(r"\\\g<0>", text) for text in texts))


def _structural_tag(tag: dict[str, Any] | str, path: str) -> StructuralTag:
    return StructuralTag(tag)


def _json_schema(schema: Schema | str, path: str, *, is_strict: bool = False) -> JsonSchema:
    size = len(schema.encode() if isinstance(schema, str) else msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise ApiError(
            400,
            f"the schema at {path} has {size:,} bytes; give one of at most {MAX_SCHEMA_BYTES:,}",
            code="unsupported_schema",
            param=path,
        )
    return JsonSchema(schema, strict=is_strict)


Count = Annotated[int, Meta(ge=1, le=1 << 31)]
TextCount = Annotated[int, Meta(ge=1, le=1 << 16)]
"""The most at a time is a setting of the server, see `check_text_count`."""
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=16)]
Biases = Annotated[
    dict[Annotated[str, Meta(pattern=r"^\d{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)
]
Variables = Annotated[dict[str, Any], Meta(max_length=64)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Prompts = str | list[str | TokenId | list[TokenId]]


ProbabilityCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenLimit = Annotated[int, Meta(ge=-1, le=1 << 31)]
Priority = Annotated[
    int,
    Meta(
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="vLLM's: the lower, the earlier the request is served; 0 without it. It changes no token.",
    ),
]
SlotNumber = Annotated[int, Meta(ge=-1, le=1 << 31)]


CacheSalt = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        description="vLLM's: what is cached of this prompt is of use to requests of the same salt only.",
    ),
]


def first_limit(*limits: int | None) -> int | None:
    """The first limit of tokens that is given under one of its names; -1 is none."""
    limit = next((limit for limit in limits if limit is not None), None)
    return None if limit == -1 else limit


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def seeded(options: dict[str, Any], index: int, defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Options for the text of this index: texts of one request differ, and the same seed gives the same ones.

    defaults: the model's, whose seed holds where the options have none.
    """
    if index:
        # What was begun is not given up for what follows.
        options = {name: value for name, value in options.items() if name != "ttft_objective"}
    seed = options.get("seed", defaults.get("seed"))
    return options if seed is None or index == 0 else {**options, "seed": (seed + index) % (MAX_SEED + 1)}


def check_text_count(count: int, settings: ServerSettings) -> None:
    """Refuse a request for more texts than are generated at one time. Raises: ApiError."""
    if count > settings.max_generations:
        raise ApiError(
            400,
            f"{count:,} texts are asked for, and this server generates {settings.max_generations} at most at a time; "
            "ask for fewer, or start it with --max-generations",
            param="n",
        )


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Members of a stream beside text. include_obfuscation: ignored, as chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the reply is likely to have."""

    content: str | list[dict[str, Any]]
    type: Literal["content"] = "content"

    def text(self) -> str:
        """The text, of its parts if it has some. Raises: ApiError for parts that are no text."""
        return joined_text(self.content, "prediction.content", "assistant")


def _number_field(option: NumberOption) -> Any:
    """The type of a numeric sampling option in a request, with the range in which it makes sense there."""
    most = min(option.most, 1 << 31 if option.kind is int else 100)
    return Annotated[option.kind, Meta(ge=option.least, le=most)] | None


if TYPE_CHECKING:

    class NumberFields(FormFields):
        """The numeric sampling options, of which only these are read by name."""

        temperature: float | None = None
        top_p: float | None = None
        dry_last_n: int | None = None

else:
    NumberFields = msgspec.defstruct(
        "NumberFields",
        [
            (name, _number_field(option), None)
            for key, option in NUMBER_OPTIONS.items()
            for name in (key, option.alias)
            if name is not None
        ],
        bases=(FormFields,),
    )


class GenerationFields(NumberFields):
    """Options of sampling, stopping and priority; None is the engine's default."""

    dry_sequence_breakers: Stops | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=1 << 18)] | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=1024)] | None = None
    context_shift: bool | None = None
    pin_cache: bool | None = None
    priority: Priority | None = None

    def sampling_options(self) -> dict[str, Any]:
        """The engine's options about sampling and stopping."""
        numbers = {}
        for name, option in NUMBER_OPTIONS.items():
            number = getattr(self, name)
            numbers[name] = getattr(self, option.alias) if number is None and option.alias else number
        bias = self.logit_bias
        return given(
            **numbers,
            dry_sequence_breakers=self.dry_sequence_breakers,
            logit_bias=None if bias is None else {int(token_id): value for token_id, value in bias.items()},
            # Clients mean "any" by -1, and may have signed numbers.
            seed=None if self.seed is None or self.seed == -1 else self.seed % (MAX_SEED + 1),
            stop=self.stop or None,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids or None,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.min_tokens or None,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words or None,
            context_shift=self.context_shift,
            pin_cache=self.pin_cache,
            priority=self.priority,
        )


class OpenRouterReasoning(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning as OpenRouter has it. max_tokens: of it at most. exclude: it takes place, and is not sent."""

    effort: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class OpenRouterUsage(msgspec.Struct, forbid_unknown_fields=True):
    """Usage in streams, as OpenRouter has it; whole replies always tell it."""

    include: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning before the reply: on or off, and its most tokens.

    display: reasoning is shown as it is, never summarized, whatever word of Anthropic's says how; "omitted" leaves its
    text out of Anthropic's replies.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"
    budget_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    display: str | None = None


StopsLoops = Annotated[
    bool, Meta(description="End loops of lines and of calls, and go on; without it where the model may call tools.")
]


class ChatFields(GenerationFields):
    """Sampling, form, and how the model may reason."""

    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    thinking_budget: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    reasoning_budget_tokens: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    reasoning_effort: str | None = None
    loop_stop: StopsLoops | None = None

    def reply_options(self, reasoning: OpenRouterReasoning | None = None) -> dict[str, Any]:
        """The engine's options for reasoning and form. reasoning: of the member that has this name on chats."""
        variables = dict(self.chat_template_kwargs or {})
        thinks = variables.pop("enable_thinking", None)
        thinks = thinks if self.enable_thinking is None else self.enable_thinking
        budget = self.thinking_budget if self.reasoning_budget_tokens is None else self.reasoning_budget_tokens
        effort = self.reasoning_effort
        if reasoning is not None:
            thinks = reasoning.enabled if reasoning.enabled is not None else thinks
            budget = reasoning.max_tokens if budget is None else budget
            effort = reasoning.effort if effort is None else effort
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            budget = self.thinking.budget_tokens if budget is None else budget
        if effort in ("none", "minimal"):
            thinks = False
        elif effort is not None:
            variables["reasoning_effort"] = effort
        return given(
            constraint=self.constraint(),
            thinking=thinks,
            thinking_budget=budget if budget is not None and budget >= 0 else None,
            template_variables=variables or None,
            loop_stop=self.loop_stop,
        )


ContinueFinalMessage = Annotated[
    bool,
    Meta(description="Continue the last message, a reply that was cut short: only what follows its text is returned."),
]
AddGenerationPrompt = Annotated[
    bool, Meta(description="Begin a new reply; false where continue_final_message is true, which begins none.")
]


def continuation(
    continues: bool | None, begins: bool | None, messages: Sequence[Mapping[str, Any]], *, has_form: bool = False
) -> dict[str, Any]:
    """The engine's option for a last message that is continued.

    continues, begins: continue_final_message and add_generation_prompt. Without either, a last message of the role
    "assistant" that has text and calls no tools is continued, unless the reply is held to a form, which holds for whole
    replies. Raises: ApiError if a new reply is wanted as well.
    """
    if continues and begins:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt are both true, and a reply is either continued or begun; "
            "send add_generation_prompt: false",
            param="add_generation_prompt",
        )
    if continues is None and not begins and not has_form and len(messages) > 1:
        last = messages[-1]
        continues = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
    return given(continue_final_message=continues or None)


def without_missing_thinking(llm: "LLM", options: dict[str, Any]) -> dict[str, Any]:
    """Options of a chat without those that only a model can follow that reasons, for one that does not.

    Clients ask all models alike, and a reply without reasoning is one that took none.
    """
    asks = options.get("thinking") or options.get("thinking_budget") is not None
    if not asks or llm.can_think:
        return options
    return {name: value for name, value in options.items() if name not in ("thinking", "thinking_budget")}


def split_prompts(prompts: Prompts, field: str, *, at_most: int) -> list[str | Sequence[int]]:
    """One prompt per item: `[1, 2]` is one prompt of ids, `[[1, 2], "a"]` are two.

    Raises: ApiError for none, for too many, and for ids beside texts.
    """
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    split: list[str | Sequence[int]] = [item for item in prompts if not isinstance(item, int)]
    if ids or not split:
        raise ApiError(
            400, f"{field} is empty, or has token ids beside texts; give texts, or lists of token ids", param=field
        )
    if len(split) > at_most:
        raise ApiError(400, f"{field} has {len(split)} prompts; give at most {at_most} at a time", param=field)
    return split


Pieces = Sequence[str | int]
"""A prompt: texts and token ids, in order."""
MediaPieces = Sequence[str | MediaSource]
"""A prompt with pictures and sounds between its texts."""
_MARKER = "<__media__>"
"""Stands in llama-server's prompts for the next of the files beside them."""
_MEDIA = ("multimodal_data", "image_data")
_MAX_ID = (1 << 31) - 1
_WANTED_IDS = "give ids of this model's vocabulary, from 0, as /tokenize gives them"


def read_prompts(prompt: Any, field: str, *, at_most: int) -> list[Pieces]:
    """The prompts of a request: `"a"`, `[1, 2]` and `[1, "a"]` are one, `["a", "b"]` and `[[1], "a"]` two.

    An object has its text as `prompt_string`. Raises: ApiError.
    """
    if isinstance(prompt, list) and prompt and not _is_mixed(prompt):
        if len(prompt) > at_most:
            raise ApiError(400, f"{field} has {len(prompt)} prompts; give at most {at_most} at a time", param=field)
        return [_pieces(one, f"{field}[{index}]") for index, one in enumerate(prompt)]
    return [_pieces(prompt, field)]


def media_pieces(prompt: Any, path: str) -> MediaPieces | None:
    """A prompt with pictures or sounds, each in a marker's place; None for one that has none. Raises: ApiError."""
    if not isinstance(prompt, dict) or not (files := prompt.get("multimodal_data")):
        return None
    text = prompt.get("prompt_string")
    if not isinstance(text, str) or not isinstance(files, list):
        raise ApiError(
            400,
            f"{path} has multimodal_data; give files in base64, in a list, and the text as prompt_string",
            param=path,
        )
    texts = text.split(_MARKER)
    if len(texts) != len(files) + 1:
        raise ApiError(
            400,
            f"{path}.prompt_string has {_MARKER} {len(texts) - 1} times, and multimodal_data {len(files)} files; write "
            "it once for each",
            param=path,
        )
    pieces: list[str | MediaSource] = [texts[0]]
    for index, (file, behind) in enumerate(zip(files, texts[1:], strict=True)):
        pieces += [media_file(file, f"{path}.multimodal_data[{index}]"), behind]
    return pieces


def encode_pieces(
    tokenizer: "Tokenizer",
    pieces: Pieces,
    *,
    max_tokens: int | None,
    add_special: bool = False,
    parse_special: bool = False,
    field: str | None = None,
) -> list[int]:
    """The ids of a prompt.

    max_tokens: a longer text is not encoded to its end. add_special: with the tokens that begin and end a text, where
    the prompt begins with one. parse_special: names of special tokens are those tokens. field: the member of the
    request that has the prompt, where it is not the only one. Raises: ContextLengthError, TokenIdError.
    """
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            if piece >= tokenizer.vocab_size:
                raise TokenIdError(
                    f"token id {piece} is not in the vocabulary; wanted 0 to {tokenizer.vocab_size - 1}, as /tokenize "
                    "gives them",
                    field=field,
                )
            ids.append(piece)
        else:
            ids += tokenizer.encode(piece, add_special and not index, parse_special, max_tokens=max_tokens)
    return ids


def embedding_prompt(tokenizer: "Tokenizer", pieces: Pieces) -> str | list[int]:
    """A prompt as `LLM.embed_many` takes it: a text by itself, or the ids of a mixture."""
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    return encode_pieces(tokenizer, pieces, max_tokens=None, add_special=True)


def _is_mixed(items: Sequence[Any]) -> bool:
    """Return whether a list is one prompt: it has ids, and nothing but ids and texts."""
    kinds = set(map(type, items))
    return int in kinds and kinds <= {int, str}


def _pieces(prompt: Any, path: str) -> Pieces:
    match prompt:
        case str():
            return [prompt]
        case list() if _is_mixed(prompt):
            for item in prompt:
                if isinstance(item, int) and not 0 <= item <= _MAX_ID:
                    raise ApiError(400, f"{path} has the token id {item}; {_WANTED_IDS}", param=path)
            return prompt
        case dict():
            return ["".join(_object_texts(prompt, path))]
    raise ApiError(
        400, f"{path} is no prompt; give a text, a list of token ids and texts, or a list of these", param=path
    )


def _object_texts(prompt: dict[str, Any], path: str) -> Iterator[str]:
    for name in _MEDIA:
        if prompt.get(name):
            raise unsupported(
                f"{path}.{name} has pictures or sounds, which /completion takes as prompt_string and multimodal_data, "
                "and chats take in messages; leave it out, or ask there",
                path,
            )
    match prompt:
        case {"prompt_string": str(text)}:
            yield text
        case {"content": [*parts]} if parts:
            for part in parts:
                match part:
                    case {"type": "text", "text": str(text)}:
                        yield text
                    case _:
                        raise unsupported(f"{path}.content has a part that is no text; send its text only", path)
        case _:
            raise ApiError(400, f"{path} is an object without a text; give it as prompt_string", param=path)
