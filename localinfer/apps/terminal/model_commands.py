"""Commands for the model: switch it, show it, its thinking, its tools."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.apps.cli.models import known_models
from localinfer.apps.terminal.command import Command, beginning_with, complete_path, read_text
from localinfer.errors import LocalinferError, OutOfMemoryError, RequestError

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat
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
                lambda typed: beginning_with(typed, ("on", "off", "auto", *_SHOWS_REASONING)),
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
            try:
                conversation.tools = _read_tools(read_text(argument, most_bytes=1 << 24), argument)
            except RequestError as error:
                self._chat.notice(str(error))
                return
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
                lambda typed: beginning_with(typed, ("template",)),
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
