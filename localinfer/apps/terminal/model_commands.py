"""Commands for the model: switch it, show it, its thinking, its tools, and the options that /set changes."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.apps.cli.models import known_models
from localinfer.apps.terminal.command import Command, beginning_with, complete_path, read_text
from localinfer.arguments import check_number
from localinfer.engine.sampling.params import MAX_SEED, NUMBER_OPTIONS, NumberOption, SamplingParams
from localinfer.errors import LocalinferError, OutOfMemoryError, RequestError
from localinfer.generation.chat.constraints import check_enforceable
from localinfer.generation.options import Constraint, JsonObject, JsonSchema, check_options
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat
    from localinfer.apps.terminal.conversation import Conversation
    from localinfer.llm import LLM
    from localinfer.types import ModelInfo


LoadModel = Callable[[str | None], "LLM"]
"""Loads a model by its name; None: the default one. Raises: LocalinferError."""

_SHOWS_REASONING = {"show": True, "hide": False}


class OptionCommands:
    """/think, /tools and /model."""

    def __init__(self, chat: "Chat", load_model: LoadModel | None, model_name: str | None) -> None:
        self._chat = chat
        self._load_model = load_model
        self.model_name = model_name
        self._first_llm = chat.conversation.llm

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/model", "switch to another model; the messages stay", self._model, "NAME", _complete_model),
            Command(
                "/think",
                "let the model reason first, for at most N tokens; show or hide that",
                self._think,
                "on|off|auto|N|show|hide",
                ("on", "off", "auto", *_SHOWS_REASONING),
            ),
            Command(
                "/tools",
                "let the model call tools, of a file in OpenAI's shape",
                self._tools,
                "FILE|off",
                _complete_tools,
            ),
        )

    def close(self) -> None:
        """Close a model that was switched to."""
        if self._chat.conversation.llm is not self._first_llm:
            self._chat.conversation.llm.close()

    def _think(self, argument: str) -> None:
        conversation = self._chat.conversation
        if argument in _SHOWS_REASONING:
            self._chat.reply_output.shows_reasoning = _SHOWS_REASONING[argument]
            self._chat.notice(f"reasoning: {self._reasoning_shown()}")
            return
        wanted = {"on": (True, None), "off": (False, None), "auto": (None, None)}.get(argument)
        if argument and wanted is None and not argument.isdecimal():
            self._chat.notice(f"/think is given {argument}; it takes on, off, auto, a number of tokens, show or hide")
            return
        if argument:
            thinking, budget = wanted or (True, int(argument))
            if not self._can_think():
                self._chat.notice("the model's chat template knows no thinking, so there is nothing to switch")
                return
            conversation.thinking, conversation.thinking_budget = thinking, budget
        named = {None: "as the model's template says", True: "on", False: "off"}[conversation.thinking]
        limit = conversation.thinking_budget
        most = "" if limit is None else f", for at most {limit} tokens"
        self._chat.notice(f"thinking: {named}{most}; reasoning: {self._reasoning_shown()}")

    def _reasoning_shown(self) -> str:
        return "shown in full" if self._chat.reply_output.shows_reasoning else "folded into a line; Ctrl-O shows it"

    def _can_think(self) -> bool:
        try:
            self._chat.conversation.llm.count_chat_tokens([{"role": "user", "content": "?"}], thinking=True)
        except RequestError:
            return False
        return True

    def _tools(self, argument: str) -> None:
        conversation = self._chat.conversation
        if argument == "off":
            conversation.tools = ()
        elif argument:
            conversation.tools = _read_tools(read_text(argument, most_bytes=1 << 24), argument)
        names = [tool.get("function", tool).get("name") for tool in conversation.tools]
        self._chat.notice(f"tools: {', '.join(names) or 'none'}")
        if argument and names:
            self._chat.notice("what the model calls is shown; the line that you then type is sent as its result")

    def show_calls(self) -> None:
        """Show the calls that wait for a result."""
        calls = self._chat.conversation.open_calls
        for call in calls:
            self._chat.notice(f"call {call.name} {call.arguments}")
        if calls:
            self._chat.notice(f"type the result of {calls[0].name}, or /undo to take your message back")

    def _model(self, name: str) -> None:
        if not name:
            self._chat.notice(f"model: {self.model_name or 'the demo model'}; /model NAME switches")
        elif self._load_model is None:
            self._chat.notice(f"the model cannot be switched here; leave, and chat with -m {name}")
        else:
            try:
                self._switch(self._load_model, name)
            except (LocalinferError, MemoryError, OSError) as error:
                self._chat.notice(f"{name} was not loaded: {error or 'memory ran out'}")

    def _switch(self, load: LoadModel, name: str) -> None:
        """Load a model and let it answer. Where memory is too small for two, the former is closed first."""
        conversation = self._chat.conversation
        former = conversation.llm
        try:
            llm = load(name)
        except (OutOfMemoryError, MemoryError, OSError) as error:
            if not _is_shortage(error):
                raise
            self._chat.notice("memory is too small for both models, so the former is closed first")
            former.close()
            try:
                llm = load(name)
            except (LocalinferError, MemoryError, OSError):
                conversation.switch_model(load(self.model_name), self.model_name or "")
                raise
        conversation.switch_model(llm, name)
        self.model_name = name
        former.close()
        if self._chat.on_model_change is not None:
            self._chat.on_model_change(name, llm.context_length)
        self._chat.notice(f"{name} answers from here on, with a context of {llm.context_length} tokens")
        if conversation.sampling.pop("logit_bias", None):
            self._chat.notice("logit_bias is off again: its token ids were the former model's")
        if conversation.thinking is not None and not self._can_think():
            conversation.thinking = conversation.thinking_budget = None
            self._chat.notice("its chat template knows no thinking, so /think is back to auto")


def _complete_model(typed: str) -> Iterable[str]:
    """Names of models that are here, then files."""
    yield from (name for name in known_models() if name.lower().startswith(typed.lower()))
    yield from complete_path(typed)


def _complete_tools(typed: str) -> Iterable[str]:
    yield from beginning_with(typed, ("off",))
    yield from complete_path(typed)


def _is_shortage(error: Exception) -> bool:
    from localinfer.kernels.address_space import is_shortage

    return isinstance(error, OutOfMemoryError) or is_shortage(error)


def _read_tools(text: str, path: str) -> tuple[dict[str, Any], ...]:
    """Tools of a JSON text: a list, an object with one as `tools`, or one tool. Raises: RequestError."""
    from localinfer.generation.chat.messages import read_tools

    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{Path(path).name} is not JSON ({error}); give a list of tools in OpenAI's shape") from None
    tools = read.get("tools", [read]) if isinstance(read, dict) else read
    read_tools(tools)
    return tuple(tools)


_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_NAME_COLUMNS = 12


class ShowCommand:
    """/show."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat

    def commands(self) -> tuple[Command, ...]:
        """The command."""
        return (
            Command(
                "/show",
                "what the model is: its size, memory, abilities; its chat template",
                self._show,
                "[template]",
                ("template",),
            ),
        )

    def _show(self, what: str) -> None:
        if what not in ("", "template"):
            self._chat.notice(f"/show is given {what}; it takes nothing, or template for the chat template")
            return
        try:
            info = self._chat.conversation.llm.info
        except LocalinferError as error:
            self._chat.notice(str(error))
            return
        if not what:
            for name, value in _facts(info):
                self._chat.notice(f"{name:<{_NAME_COLUMNS}}  {value}", hanging=_NAME_COLUMNS + 2)
        elif info.chat_template is None:
            self._chat.notice("the model has no chat template of its own; a general form stands in for it")
        else:
            self._chat.notice(info.chat_template.rstrip("\n"), wraps=False)


def _facts(info: "ModelInfo") -> list[tuple[str, str]]:
    experts = f", {info.num_experts} experts" if info.num_experts else ""
    trained = (
        "" if info.trained_context_length == info.context_length else f", trained with {info.trained_context_length:,}"
    )
    template = "none of its own, so a general form is used"
    if info.chat_template is not None:
        template = f"{len(info.chat_template):,} characters; /show template shows it"
    tools = (
        "described by its chat template"
        if info.supports_tools
        else "not in its chat template; /tools works all the same"
    )
    thinking = "/think switches it" if info.supports_thinking else "not in its chat template"
    return [
        ("name", info.name),
        ("file", str(info.path)),
        ("architecture", f"{info.architecture}, {info.num_layers} layers{experts}"),
        ("parameters", _count(info.parameters)),
        ("quantization", f"{info.quantization}, {info.bits_per_weight:.2f} bits per weight"),
        ("context", f"{info.context_length:,} tokens{trained}"),
        ("device", f"{info.device}, {info.threads} thread{'' if info.threads == 1 else 's'}"),
        ("memory", f"{_size(info.memory_bytes)} with a full context, keys and values in {info.kv_type}"),
        ("tools", tools),
        ("thinking", thinking),
        ("template", template),
    ]


def _count(number: int) -> str:
    """A number of weights, with its unit where it has thousands."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


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
_SETTING_COLUMNS = max(18, *map(len, SETTINGS))


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
        text = f"{setting.name:<{_SETTING_COLUMNS}}  {shown}{changed}; {setting.form}. {setting.help}"
        self._chat.notice(text, hanging=_SETTING_COLUMNS + 2)


def _complete(typed: str) -> Iterable[str]:
    name, space, value = typed.partition(" ")
    if not space:
        yield from beginning_with(typed, sorted(SETTINGS))
    elif (setting := setting_named(name)) is not None:
        yield from (f"{name} {word}" for word in beginning_with(value, setting.words))
        if setting.name == "format" and value:
            yield from (f"{name} {path}" for path in complete_path(value))
