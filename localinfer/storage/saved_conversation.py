"""A saved conversation: its turns and what is told of them, as JSON and as Markdown."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Self

from localinfer.errors import RequestError, SessionFileError

FORMAT = "localinfer conversation"
FORMAT_VERSION = 1
MOST_NAME_CHARACTERS = 80
_MOST_FIRST_WORDS = 60
_MOST_SLUG_CHARACTERS = 40
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_ENDS = {"length": "cut at its maximum length", "cancelled": "stopped"}
_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class SavedConversation:
    """One conversation as a file keeps it; times are in UTC.

    name: unique in a store, without regard to case; empty until the store gives it one. model: what loads it again.
    turns: messages with `role` and `content`, replies also with `reasoning` and `finish_reason` where there are any;
    the system message is apart.
    """

    id: str
    name: str
    model: str
    system: str | None
    turns: Sequence[Mapping[str, Any]]
    created: datetime
    changed: datetime

    @classmethod
    def begin(cls, model: str, *, name: str = "", system: str | None = None) -> Self:
        """A conversation without turns, under a new id."""
        now = datetime.now(UTC)
        return cls(f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", name, model, system, [], now, now)

    def with_turns(self, turns: Sequence[Mapping[str, Any]], *, system: str | None) -> Self:
        """The same conversation with these turns, changed now."""
        changed = max(datetime.now(UTC), self.changed)
        return replace(self, turns=[dict(turn) for turn in turns], system=system, changed=changed)

    @property
    def first_words(self) -> str:
        """The beginning of the first user message, on one line; empty without one."""
        for turn in self.turns:
            if turn["role"] == "user":
                text = " ".join(turn["content"].split())
                return text if len(text) <= _MOST_FIRST_WORDS else f"{text[: _MOST_FIRST_WORDS - 1].rstrip()}…"
        return ""

    @property
    def model_label(self) -> str:
        """The model to be read: of a file, its name without the folders that it lies in."""
        return model_label(self.model)

    def to_json(self) -> str:
        """The text of its file: one JSON object, with the format's name and version first."""
        fields = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "id": self.id,
            "name": self.name,
            "model": self.model,
            "system": self.system,
            "created": _write_time(self.created),
            "changed": _write_time(self.changed),
            "turns": [dict(turn) for turn in self.turns],
        }
        text = json.dumps(fields, ensure_ascii=False, indent=1)
        try:
            text.encode()
        except UnicodeEncodeError:
            # Half of a surrogate pair has no UTF-8; as an escape it is kept.
            text = json.dumps(fields, indent=1)
        return f"{text}\n"

    def to_markdown(self) -> str:
        """The conversation to be read: a heading for each message, reasoning as a quotation, cut replies marked."""
        parts = [
            f"# {self.name or self.id}",
            f"Model: {self.model_label}  \nBegun: {self.created:%Y-%m-%d %H:%M} UTC  \n"
            f"Last changed: {self.changed:%Y-%m-%d %H:%M} UTC",
        ]
        if self.system:
            parts += ["## System", self.system]
        for turn in self.turns:
            parts.append(f"## {_ROLES.get(turn['role'], turn['role'])}")
            if turn.get("reasoning"):
                lines = ["**Reasoning**", "", *turn["reasoning"].strip().splitlines()]
                parts.append("\n".join(f"> {line}".rstrip() for line in lines))
            parts.append(turn["content"].strip("\n"))
            if turn.get("tool_calls"):
                parts.append(f"```json\n{json.dumps(turn['tool_calls'], ensure_ascii=False, indent=1)}\n```")
            if turn.get("finish_reason") in _ENDS:
                parts.append(f"*({_ENDS[turn['finish_reason']]})*")
        return "\n\n".join(part for part in parts if part) + "\n"

    @classmethod
    def from_json(cls, content: bytes | str) -> Self:
        """Parse and check what `to_json` wrote. Raises: SessionFileError with what is wrong, without the way out."""
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SessionFileError(f"it is not JSON ({error})") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise SessionFileError("it is not a saved conversation")
        if fields.get("version") != FORMAT_VERSION:
            raise SessionFileError(
                f"it has format version {fields.get('version')!r}, and this localinfer reads {FORMAT_VERSION}"
            )
        id, name, model = (_text(fields, member) for member in ("id", "name", "model"))
        if not is_id(id):
            raise SessionFileError(f"its id is {id!r}")
        system = None if fields.get("system") is None else _text(fields, "system")
        turns = fields.get("turns")
        if not isinstance(turns, list) or not all(map(_is_turn, turns)):
            raise SessionFileError("its turns are not messages with a role and content")
        return cls(id, name, model, system, turns, _time(fields, "created"), _time(fields, "changed"))


def model_label(model: str) -> str:
    """A model as it is shown: the name of its file or folder, without the suffix .gguf; other names as they are."""
    path = PurePath(model)
    return (path.name.removesuffix(".gguf") if path.is_absolute() else model) or "demo"


def is_id(text: str) -> bool:
    """Whether a text is the id of a conversation, which no name may be."""
    return _ID.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return a name that a user gave if a conversation may have it. Raises: RequestError with the reason."""
    reason = None
    if not name or name != name.strip():
        reason = "it is empty, or begins or ends with white space"
    elif len(name) > MOST_NAME_CHARACTERS:
        reason = f"it has {len(name)} characters, more than {MOST_NAME_CHARACTERS}"
    elif not name.isprintable():
        reason = "it has characters that cannot be printed"
    elif name.startswith("-"):
        reason = "it begins like an option"
    elif is_id(name):
        reason = "it looks like the id of a conversation"
    if reason is not None:
        raise RequestError(f"{name!r} cannot be the name of a conversation: {reason}; give another name")
    return name


def name_from(conversation: SavedConversation) -> str:
    """A name to type, made of the first words of the first message."""
    words = re.findall(r"\w+", conversation.first_words.casefold())
    slug = ""
    for word in words:
        if len(slug) + len(word) >= _MOST_SLUG_CHARACTERS:
            break
        slug = f"{slug}-{word}" if slug else word
    return slug or (words[0][:_MOST_SLUG_CHARACTERS] if words else "conversation")


def _is_turn(turn: object) -> bool:
    if not isinstance(turn, dict):
        return False
    is_said = turn.get("role") in _ROLES and isinstance(turn.get("content"), str)
    return is_said and all(isinstance(turn.get(name), str | None) for name in ("reasoning", "finish_reason"))


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise SessionFileError(f"its {name} is not text")
    return value


def _write_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _time(fields: Mapping[str, Any], name: str) -> datetime:
    try:
        time = datetime.fromisoformat(_text(fields, name))
    except ValueError as error:
        raise SessionFileError(f"its time {name!r} is not a time ({error})") from error
    if time.tzinfo is None:
        raise SessionFileError(f"its time {name!r} has no time zone")
    return time.astimezone(UTC)
