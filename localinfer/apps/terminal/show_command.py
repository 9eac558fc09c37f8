"""The command that shows what the model is."""

from typing import TYPE_CHECKING

from localinfer.apps.terminal.command import Command, beginning_with
from localinfer.errors import LocalinferError

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat
    from localinfer.types import ModelInfo

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
