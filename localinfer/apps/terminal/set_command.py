"""The command that lists, shows and changes options of the next replies."""

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from localinfer.apps.terminal.command import Command, beginning_with
from localinfer.apps.terminal.paths import complete_path
from localinfer.apps.terminal.settings import SETTINGS, Setting, setting_named
from localinfer.errors import LocalinferError

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat

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
