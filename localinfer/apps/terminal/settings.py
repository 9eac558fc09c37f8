"""The options of the next replies that /set changes: values, reading, display, and the command."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localinfer.apps.terminal.command import Command, beginning_with, complete_path, read_text
from localinfer.arguments import check_number
from localinfer.engine.sampling.params import MAX_SEED, NUMBER_OPTIONS, NumberOption, SamplingParams
from localinfer.errors import LocalinferError, RequestError
from localinfer.generation.chat.constraints import Constraint, JsonObject, JsonSchema, check_enforceable
from localinfer.generation.options import check_options
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat
    from localinfer.apps.terminal.conversation import Conversation

_WORDS_FOR_DEFAULT = ("default", "none", "random")
_WORDS_FOR_OFF = ("off", *_WORDS_FOR_DEFAULT)
_MOST_SCHEMA_BYTES = 1 << 24
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^\s"\']\S*')
_QUOTED = 'a text with spaces in quotes, a new line as "\\n"'


@dataclass(frozen=True)
class Setting:
    """One option."""

    name: str
    form: str
    """The range or form of its values."""
    help: str
    default: str
    """As it is written."""
    words: tuple[str, ...]
    """Values that completion offers."""
    change: "Callable[[Conversation, str], None]"
    """Sets it from typed text. Raises: RequestError."""
    shown: "Callable[[Conversation], str]"
    """Its value, as it is written."""


def _number_setting(name: str, option: NumberOption) -> Setting:
    def change(conversation: "Conversation", text: str) -> None:
        if text in _WORDS_FOR_DEFAULT:
            conversation.sampling.pop(name, None)
            return
        conversation.sampling[name] = getattr(SamplingParams(**{name: _number(text, option.kind)}), name)

    unlimited = math.isinf(option.most)
    return Setting(
        name,
        f"{option.least:g} or more" if unlimited else f"{option.least:g} to {option.most:g}",
        option.help.format(default=f"{option.default:g}"),
        f"{option.default:g}",
        ("default",),
        change,
        lambda conversation: f"{conversation.sampling.get(name, conversation.defaults.get(name, option.default)):g}",
    )


def _set_max_tokens(conversation: "Conversation", text: str) -> None:
    limit = None if text in _WORDS_FOR_DEFAULT else _number(text, int)
    conversation.max_tokens = check_number("max_tokens", limit, 1, none="", hint="default: what fits")


def _set_seed(conversation: "Conversation", text: str) -> None:
    seed = None if text in _WORDS_FOR_DEFAULT else _number(text, int)
    conversation.seed = check_number("seed", seed, 0, MAX_SEED, none="", hint="random: another one for each reply")


def _set_stop(conversation: "Conversation", text: str) -> None:
    if text in _WORDS_FOR_OFF:
        conversation.sampling.pop("stop", None)
        return
    stops = _texts("stop", text)
    check_options({"stop": stops}, conversation.llm.tokenizer)
    conversation.sampling["stop"] = stops


def _set_breakers(conversation: "Conversation", text: str) -> None:
    if text in _WORDS_FOR_DEFAULT:
        conversation.sampling.pop("dry_sequence_breakers", None)
        return
    breakers = [] if text == "off" else _texts("dry_sequence_breakers", text)
    # Only where DRY is on are they looked up in the vocabulary.
    check_options({"dry_sequence_breakers": breakers, "dry_multiplier": 1.0}, conversation.llm.tokenizer)
    conversation.sampling["dry_sequence_breakers"] = breakers


def _set_logit_bias(conversation: "Conversation", text: str) -> None:
    if text in _WORDS_FOR_OFF:
        conversation.sampling.pop("logit_bias", None)
        return
    biases: dict[int, float] = {}
    for pair in re.split(r"[\s,]+", text.strip(", ")):
        token_id, _, bias = pair.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise RequestError(f"logit_bias is given {pair}; it must be ID=NUMBER, such as 42=-5 or 42=-inf") from None
    conversation.sampling["logit_bias"] = dict(SamplingParams(logit_bias=biases).logit_bias)


def _set_format(conversation: "Conversation", text: str) -> None:
    if text in _WORDS_FOR_OFF:
        conversation.sampling.pop("constraint", None)
        return
    constraint: Constraint = JsonObject()
    if text != "json":
        constraint = JsonSchema(read_text(text, most_bytes=_MOST_SCHEMA_BYTES))
    check_enforceable(constraint)
    conversation.sampling["constraint"] = constraint


def _shown_format(conversation: "Conversation") -> str:
    match conversation.sampling.get("constraint"):
        case None:
            return "off"
        case JsonObject():
            return "json"
        case JsonSchema():
            return "JSON of a schema"
        case other:
            return f"a {type(other).__name__.lower()} of the command line"


def _shown_texts(name: str, default: str) -> "Callable[[Conversation], str]":
    def shown(conversation: "Conversation") -> str:
        texts = conversation.sampling.get(name)
        if texts is None:
            return default
        return " ".join(json.dumps(text, ensure_ascii=False) for text in texts) or "off"

    return shown


def _shown_biases(conversation: "Conversation") -> str:
    biases = conversation.sampling.get("logit_bias") or {}
    return " ".join(f"{token_id}={bias:g}" for token_id, bias in biases.items()) or "off"


_ALL = (
    *(_number_setting(name, option) for name, option in NUMBER_OPTIONS.items()),
    Setting(
        "dry_sequence_breakers",
        f"one text or several; {_QUOTED}; off: none",
        "Repetitions end at them for DRY.",
        '"\\n" ":" "\\"" "*"',
        ("default", "off"),
        _set_breakers,
        _shown_texts("dry_sequence_breakers", '"\\n" ":" "\\"" "*"'),
    ),
    Setting(
        "logit_bias",
        "one ID=NUMBER or several; -1000 to 1000, or -inf, which forbids the token",
        "Added to the logits of tokens.",
        "off",
        ("off",),
        _set_logit_bias,
        _shown_biases,
    ),
    Setting(
        "stop",
        f"one text or several; {_QUOTED}",
        "A reply ends before them.",
        "off",
        ("off",),
        _set_stop,
        _shown_texts("stop", "off"),
    ),
    Setting(
        "format",
        "json, or the file of a JSON schema",
        "What replies have to be.",
        "off",
        ("json", "off"),
        _set_format,
        _shown_format,
    ),
    Setting(
        "max_tokens",
        "1 or more",
        "Most tokens of a reply.",
        "what fits",
        ("default",),
        _set_max_tokens,
        lambda conversation: "what fits" if conversation.max_tokens is None else str(conversation.max_tokens),
    ),
    Setting(
        "seed",
        f"0 to {MAX_SEED}",
        "The same seed gives the same text.",
        "random",
        ("random",),
        _set_seed,
        lambda conversation: "random" if conversation.seed is None else str(conversation.seed),
    ),
)
SETTINGS = {setting.name: setting for setting in _ALL}
"""The options by name, in the order in which they are listed."""


def setting_named(given: str) -> Setting | None:
    """The option that a name means, written as on the command line or by its other name too."""
    name = given.lower().lstrip("-").replace("-", "_")
    aliases = {option.alias: known for known, option in NUMBER_OPTIONS.items() if option.alias is not None}
    return SETTINGS.get(aliases.get(name, name))


def _number(text: str, kind: type[int] | type[float]) -> Any:
    """The number that a text is, or the text, which the check of the option then refuses."""
    for read in (int, float) if kind is int else (float,):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _texts(name: str, typed: str) -> list[str]:
    """The texts of a line, words or in quotes; in double ones with the escapes of JSON. Raises: RequestError."""
    check_text(typed, name)
    texts, place = [], 0
    while place < len(typed):
        found = _PIECE.match(typed, place)
        end = place if found is None else found.end()
        if found is None or (end < len(typed) and not typed[end].isspace()):
            raise RequestError(f"{name} has a quotation mark without its other one; give {_QUOTED}")
        piece = found[0]
        try:
            texts.append(json.loads(piece) if piece[0] == '"' else piece[1:-1] if piece[0] == "'" else piece)
        except ValueError:
            raise RequestError(f"{name} is given {piece}, which is no text of JSON; give {_QUOTED}") from None
        place = end + len(typed[end:]) - len(typed[end:].lstrip())
    return texts


_WORDS = re.compile(r"([^\s=]*)(?:\s*=\s*|\s*)(.*)", re.DOTALL)
_NAME_COLUMNS = max(18, *map(len, SETTINGS))


class SetCommand:
    """/set."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat

    def commands(self) -> tuple[Command, ...]:
        """The command."""
        return (
            Command(
                "/set",
                "list or change options of sampling, seed, stop texts, format",
                self._set,
                "[NAME [VALUE|default]]",
                _complete,
            ),
        )

    def _set(self, argument: str) -> None:
        words = _WORDS.match(argument)
        assert words is not None, "it matches any text"
        given, value = words[1], words[2].strip()
        if not given:
            for one in SETTINGS.values():
                self._describe(one)
            self._chat.notice("/set NAME VALUE changes one, /set NAME default takes it back")
            return
        setting = setting_named(given)
        if setting is None:
            near = difflib.get_close_matches(given, SETTINGS, n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]}?)" if near else ""
            self._chat.notice(f"there is no option {given}{meant}; /set lists them")
        elif not value:
            self._describe(setting)
        else:
            self._change(setting, value)

    def _change(self, setting: Setting, value: str) -> None:
        conversation = self._chat.conversation
        try:
            setting.change(conversation, value)
        except LocalinferError as error:
            self._chat.notice(f"{error}; it stays {setting.shown(conversation)}")
            return
        self._chat.notice(f"{setting.name} is {setting.shown(conversation)} from the next reply on")

    def _describe(self, setting: Setting) -> None:
        shown = setting.shown(self._chat.conversation)
        own = self._chat.conversation.defaults.get(setting.name)
        default = setting.default if own is None else f"{own:g}, the model's"
        changed = "" if default.startswith(f"{shown},") or shown == default else f" (default {default})"
        text = f"{setting.name:<{_NAME_COLUMNS}}  {shown}{changed}; {setting.form}. {setting.help}"
        self._chat.notice(text, hanging=_NAME_COLUMNS + 2)


def _complete(typed: str) -> Iterable[str]:
    name, space, value = typed.partition(" ")
    if not space:
        yield from beginning_with(typed, sorted(SETTINGS))
    elif (setting := setting_named(name)) is not None:
        yield from (f"{name} {word}" for word in beginning_with(value, setting.words))
        if setting.name == "format" and value:
            yield from (f"{name} {path}" for path in complete_path(value))
