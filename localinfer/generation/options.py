"""The options of one generation, checked before anything runs."""

import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from localinfer.arguments import check_flag, check_hashable, check_number, check_priority, half_character, owned
from localinfer.engine.cache.block_hashes import salt_of
from localinfer.engine.sampling.params import SamplingOptions, SamplingParams, TokenRules
from localinfer.errors import RequestError
from localinfer.types import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.models.text.tokenizer import Tokenizer

_FLAGS = ("ignore_eos", "include_stop", "context_shift", "pin_cache")
_DRY_BREAKERS = ("\n", ":", '"', "*")
_OF_REPLIES = ("thinking", "thinking_budget", "template_variables", "loop_stop")
"""Options that only chats have; the prompt depends on them too."""
_OF_ONE_GENERATION = ("constraint", "prediction", "owner", "cache_salt")


class JsonObject(Record):
    """Any JSON object, on one line as `json.dumps` writes it: a space after each comma and colon."""


class JsonSchema(Record):
    """A JSON text that a schema accepts (JSON Schema 2020-12), on one line as `json.dumps` writes it.

    schema: as a mapping, which is copied, or as JSON text; properties come in the order in which it lists them. It
        is enforced to the letter, or refused: ConstraintError names the keyword that cannot be. Objects
        whose schema has `properties` take no others, unless it has `additionalProperties` too.
    """

    schema: Mapping[str, Any] | str | bool
    strict: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", owned(self.schema))


class Regex(Record):
    """A text that a regular expression matches as a whole.

    pattern: in the syntax of Rust's regex crate, which is Python's without look-around and back-references.
    """

    pattern: str


class Grammar(Record):
    """A text of a context-free grammar.

    text: in Lark's syntax, beginning at the rule `start`, or in llama.cpp's GBNF, beginning at `root`; which of them is
        read off the rules' signs, `:` or `::=`.
    """

    text: str


class StructuralTag(Record):
    """Free text in which tags hold what is between them to a form, as vLLM, SGLang and xgrammar have it.

    form: {"format": {"type": "triggered_tags", ...}}, or {"structures": [...], "triggers": [...]}, as a mapping, which
        is copied, or as JSON text.
    """

    form: Mapping[str, Any] | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", owned(self.form))


Constraint = JsonObject | JsonSchema | Regex | Grammar | StructuralTag
"""Types of the option `constraint`."""

ToolChoice = Literal["auto", "none", "required", "any"] | Mapping[str, Any]
"""auto: the model decides. none: it may not call. required, any: it has to. {"type": "function", "function": {"name":
...}}: it has to call that one, once; the name may stand beside the type, which may be "tool". {"type": "allowed_tools",
"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}: it may call these, or has to; mode and tools may stand
beside the type."""


class GenerationOptions(SamplingOptions, total=False):
    """Keyword options of `complete`, `stream`, `chat` and `stream_chat`.

    max_tokens: most tokens to add; None, the default, sets no limit but the end of the context.
    stop: a text or several that end the completion; the stop text itself is left out. In a chat they are looked for in
        the content only, not in reasoning or tool calls.
    ignore_eos: continue past end tokens.
    stop_token_ids: more tokens that end the completion, as its end tokens do; with ignore_eos these still do.
    include_stop: whether the completion has the stop text that ended it.
    min_tokens: so many tokens come before any that ends the completion; stop texts end it anyway.
    allowed_token_ids: the only tokens that may come, beside those that end the completion.
    bad_words: texts that are not written, however they are cut at their beginning; their last token does not come
        behind the others.
    context_shift: at the end of the context, continue with the system message and the recent half of the rest, instead
        of ending (or, for a prompt, refusing); `stats.dropped_tokens` says how much was left out.
    pin_cache: keep this prompt and completion in memory longer than others.
    prediction: text, or token ids, that the completion is likely to have, such as the file to be edited: where it has,
        the completion comes faster. It changes speed only, and nothing where speculation is off.
    constraint: what the completion has to be: a JsonObject, JsonSchema, Regex, Grammar or StructuralTag. It then
        ends with an end token, or incomplete at max_tokens; penalties, seeds and drafts work as ever. In a chat it
        counts for the content, after the reasoning; the model may still call a tool instead.
    dry_sequence_breakers: texts whose tokens no repetition goes across, for dry_multiplier; special tokens are
        breakers always. Without them: a new line, a colon, a quotation mark and an asterisk.
    owner: anything hashable, such as a connection: prompts are computed in fair round-robin by owner.
    priority: a whole number, 0 without it: where several generations run, those of a lower one are begun first, have
        their prompts computed first, and keep their memory longer. It changes no token.
    ttft_objective: seconds in which the first token is wanted: where it is predicted for later, for what else runs and
        waits, OverloadedError says so at once, and when to come back.
    cache_salt: any text: what is cached, remembered or drafted of this prompt and its completion is of use to those
        with the same one only, and nothing tells others that it was. Without: to all without one.
    The rest is described, with its defaults, at `localinfer.engine.sampling.params.SamplingParams`.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    include_stop: bool
    min_tokens: int
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    context_shift: bool
    pin_cache: bool
    prediction: str | Sequence[int]
    constraint: Constraint | None
    dry_sequence_breakers: str | Sequence[str]
    owner: Hashable
    priority: int
    ttft_objective: float | None
    cache_salt: str | None


class ReplyOptions(TypedDict, total=False):
    """Keyword options of `chat` and `stream_chat` beside those of `complete`.

    tools: functions that the model may call, in OpenAI's shape: {"type": "function", "function": {"name",
        "description", "parameters", "strict"}}; custom tools, whose one argument `input` is a text that may have to
        follow a grammar: {"type": "custom", "name", "description", "format": {"type": "grammar", "syntax": "lark" or
        "regex", "definition"}}; and {"type": "apply_patch"}, for patches of the V4A format. Their calls come back in
        `tool_calls`, with arguments that their schema accepts. Where a part of a schema cannot be enforced, `"strict":
        true` makes that a ConstraintError naming the keyword; of any other tool that part is left out, and
        `Stats.notices` names it.
    tool_choice: "auto" (the default), "none", "required", {"type": "function", "function": {"name": ...}} for one call
        of that one, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}. The prompt
        describes all tools whatever is chosen, so that it stays the one that is cached.
    parallel_tool_calls: whether one reply may have several calls; yes by default, where the template can write them.
    thinking: whether the model reasons before it answers; None, the default, leaves that to its template.
    thinking_budget: most tokens of reasoning; then it is closed, and the answer follows. None sets no limit.
    template_variables: more variables for the chat template, by name. `template_date` among them, "today" or a day such
        as "2026-10-01", is the date that the template writes if it writes one; its own by default.
    loop_stop: end loops and go on; without it where there are tools. The ninth round of lines that came eight times in
        a row is not allowed, nor a call that has come three times in a turn with the same arguments and result, behind
        which a note says so. `Stats.notices` names what was ended.
    continue_final_message: the last message is a reply that was cut short, which is continued where it ends; the
        completion has only what is new. Its `reasoning_content` counts too. Not with a constraint.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    thinking: bool | None
    thinking_budget: int | None
    template_variables: Mapping[str, Any]
    loop_stop: bool | None
    continue_final_message: bool


class ChatOptions(GenerationOptions, ReplyOptions, total=False):
    """Keyword options of `chat` and `stream_chat`: those of `complete`, and those that only chats have."""


class CheckedOptions(Record, kw_only=True):
    """Options of a generation, each of the kind it must have; texts that the engine wants as token ids are those."""

    max_tokens: int | None
    stops: list[str]
    ignore_eos: bool
    stop_ids: frozenset[int]
    """Ids of `stop_token_ids`."""
    include_stop: bool
    rules: TokenRules
    """Rules of min_tokens, allowed_token_ids and bad_words."""
    context_shift: bool
    pin_cache: bool
    prediction_ids: "Sequence[int] | NDArray[np.integer]"
    constraint: Constraint | None
    owner: Hashable
    priority: int
    ttft_objective: float | None
    salt: bytes
    """Salt of `cache_salt`."""
    sampling: SamplingParams
    began: float
    """Time of the call, on the clock of `time.perf_counter`."""


def check_options(options: Mapping[str, Any], tokenizer: "Tokenizer | None") -> CheckedOptions:
    """Check GenerationOptions. tokenizer: None for a model without one, which takes token ids only.

    Raises: RequestError for a name that is no option, and for a value that it cannot have.
    """
    began = time.perf_counter()
    values = dict(options)
    stops = _check_texts("stop", values.pop("stop", None))
    if stops and tokenizer is None:
        raise RequestError("the model file has no tokenizer, so stop texts cannot be found; leave them out")
    owner = values.pop("owner", None)
    check_hashable("owner", owner)
    objective = check_number("ttft_objective", values.pop("ttft_objective", None), 0, kind=float, none="for none")
    priority = check_priority(values.pop("priority", 0))
    salt = salt_of(values.pop("cache_salt", None))
    flags = {name: check_flag(name, values.pop(name, False)) for name in _FLAGS}
    stop_ids, rules = _check_token_ids("stop_token_ids", values.pop("stop_token_ids", None)), _rules(values, tokenizer)
    max_tokens, constraint = values.pop("max_tokens", None), values.pop("constraint", None)
    prediction, breakers = values.pop("prediction", None), values.pop("dry_sequence_breakers", None)
    unknown = sorted(values.keys() - SamplingOptions.__annotations__.keys())
    if unknown:
        known = sorted(GenerationOptions.__annotations__, key=lambda name: name in SamplingOptions.__annotations__)
        raise RequestError(f"there is no option {', '.join(unknown)}; the options are {', '.join(known)}")
    sampling = SamplingParams(**values)
    if sampling.has_dry_penalty:
        breaker_ids = _breaker_ids(breakers, tokenizer) | frozenset(sampling.dry_breaker_ids)
        sampling = replace(sampling, dry_breaker_ids=breaker_ids)
    return CheckedOptions(
        max_tokens=max_tokens,
        stops=stops,
        stop_ids=frozenset(stop_ids),
        rules=rules,
        prediction_ids=_prediction_ids(prediction, tokenizer),
        constraint=constraint,
        owner=owner,
        priority=priority,
        ttft_objective=objective,
        salt=salt,
        sampling=sampling,
        began=began,
        **flags,
    )


def _rules(values: dict[str, Any], tokenizer: "Tokenizer | None") -> TokenRules:
    """Take the rules about single tokens out of the options. Raises: RequestError."""
    allowed = values.pop("allowed_token_ids", None)
    least = check_number("min_tokens", values.pop("min_tokens", 0), 0)
    words = _check_texts("bad_words", values.pop("bad_words", None))
    if words and tokenizer is None:
        raise RequestError("the model file has no tokenizer; leave bad_words out", field="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, word.lstrip(), f" {word.lstrip()}"):
            if text and tokenizer is not None:
                sequences[tuple(tokenizer.encode(text, add_special=False))] = None
    return TokenRules(
        allowed_ids=None if allowed is None else _check_token_ids("allowed_token_ids", allowed),
        min_tokens=int(least or 0),
        bad_sequences=tuple(sequences),
    )


def _check_token_ids(name: str, value: object) -> Sequence[int]:
    found = [] if value is None else value
    is_flat = getattr(found, "ndim", 1) == 1
    if not isinstance(found, Collection) or isinstance(found, str | bytes | Mapping) or not is_flat:
        raise RequestError(f"{name} is {value!r:.60}; give a list of token ids", field=name)
    for token_id in found:
        check_number(f"a token id of {name}", token_id, 0, hint="see tokenizer.encode", field=name)
    return [int(token_id) for token_id in found]


def _prediction_ids(prediction: Any, tokenizer: "Tokenizer | None") -> "Sequence[int] | NDArray[np.integer]":
    if prediction is None:
        return ()
    if not isinstance(prediction, str):
        return prediction  # type: ignore[no-any-return]
    if tokenizer is None:
        raise RequestError("the model file has no tokenizer; give the prediction as token ids, or leave it out")
    try:
        return tokenizer.encode(prediction, add_special=False)
    except RequestError as error:
        raise RequestError(f"prediction: {error}", field="prediction") from None


def _breaker_ids(breakers: Any, tokenizer: "Tokenizer | None") -> frozenset[int]:
    """The ids of the tokens that a repetition ends at."""
    if tokenizer is None:
        if breakers is not None:
            raise RequestError("the model file has no tokenizer; give dry_breaker_ids instead of dry_sequence_breakers")
        return frozenset()
    texts = _check_texts("dry_sequence_breakers", _DRY_BREAKERS if breakers is None else breakers)
    found = {text: tokenizer.ids_containing(text) for text in texts}
    for text, token_ids in found.items():
        if not token_ids and breakers is not None:
            raise RequestError(
                f"dry_sequence_breakers has {text!r}, which no token contains; give shorter texts",
                field="dry_sequence_breakers",
            )
    return frozenset(tokenizer.special_ids.values()).union(*found.values())


def _check_texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} is {value!r}; give one text or a list of texts, none of them empty", field=name)
    for text in texts:
        place = half_character(text)
        if place is not None:
            half = f"U+{ord(text[place]):04X}"
            raise RequestError(f"{name} holds {half}, half of a character; give whole ones", field=name)
    return list(texts)


class DefaultOptions:
    """Checked defaults, and options completed by them."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = MappingProxyType({})
        """By name; none until they are set."""

    def set(self, options: Mapping[str, Any], tokenizer: "Tokenizer | None") -> None:
        """Check defaults, and take them in place of those before. Raises: RequestError."""
        from localinfer.generation.chat.reply import check_template_variables

        thinking = options.get("thinking")
        if not isinstance(thinking, bool | None):
            raise RequestError(f"thinking is {thinking!r:.60}; give True, False, or None", field="thinking")
        if not isinstance(stops_loops := options.get("loop_stop"), bool | None):
            raise RequestError(f"loop_stop is {stops_loops!r:.60}; give True, False, or None", field="loop_stop")
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("max_tokens", "thinking_budget"):
            check_number(name, given.get(name), 0, none="for no limit")
        of_one = sorted(given.keys() & set(_OF_ONE_GENERATION))
        if of_one:
            raise RequestError(f"{', '.join(of_one)} belongs to one generation, and not to all; give it to each")
        check_options({name: given[name] for name in given if name not in _OF_REPLIES}, tokenizer)
        if variables := check_template_variables(given.pop("template_variables", None)):
            given["template_variables"] = MappingProxyType(dict(variables))
        self.values = MappingProxyType(given)

    def of_generation(self, options: Mapping[str, Any], *, in_chat: bool = False) -> dict[str, Any]:
        """The options of one generation."""
        names = [name for name in self.values if in_chat or name not in _OF_REPLIES]
        return self._completed(options, names)

    def of_reply(self, options: Mapping[str, Any]) -> Any:
        """The options that the prompt of a chat depends on."""
        return self._completed(options, [name for name in _OF_REPLIES if name in self.values])

    def _completed(self, options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Options with the defaults of these names that they do not give."""
        made = {**{name: self.values[name] for name in names}, **options}
        before, own = self.values.get("template_variables"), options.get("template_variables")
        if "template_variables" in names and before is not None and isinstance(own, Mapping):
            made["template_variables"] = {**before, **own}
        return made
