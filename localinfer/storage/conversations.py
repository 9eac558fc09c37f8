"""Saved conversations: turns and facts as JSON and Markdown, one JSON file each, in a folder of the user's.

Files are records (`records.py`) that outlive a power cut; pictures and sounds are files beside them
(`conversation_media.py`). Writers take turns by a lock on the folder; readers need
none. A file that cannot be read is named in a warning, and neither deleted nor overwritten.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Self, TypeAlias

from localinfer.errors import RequestError, SessionFileError
from localinfer.storage.conversation_media import FOLDER, ConversationMedia, is_reference, packed, references
from localinfer.storage.records import LOCK, RecordStore
from localinfer.system import disk
from localinfer.system.files import unwritable
from localinfer.system.folders import make_private, user_folder

FORMAT = "localinfer conversation"
FORMAT_VERSION = 1
STORED_VERSION = 2
"""Of a record whose pictures and sounds are files beside it."""
MOST_NAME_CHARACTERS = 80
_MOST_FIRST_WORDS = 60
_MOST_SLUG_CHARACTERS = 40
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_ENDS = {"length": "cut at its maximum length", "cancelled": "stopped"}
_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class SavedConversation:
    """One conversation as a file keeps it; times are in UTC."""

    id: str
    """Name of its file."""
    name: str
    """Unique in a store, without regard to case; empty until the store gives it one."""
    model: str
    """Path or name that loads the model again."""
    system: str | None
    """The system message, which is no turn."""
    turns: Sequence[Mapping[str, Any]]
    """Messages with `role` and `content`, replies also with `reasoning` and `finish_reason` where there are any."""
    created: datetime
    """Time of its beginning."""
    changed: datetime
    """Time of its last turn."""

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
                text = " ".join(turn_text(turn).split())
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
            "version": STORED_VERSION if references(self.turns) else FORMAT_VERSION,
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
            parts.append(f"## {'Summary' if turn.get('is_summary') else _ROLES.get(turn['role'], turn['role'])}")
            if turn.get("is_summary"):
                parts.append("*(The conversation continues from the summary that follows.)*")
            if turn.get("reasoning"):
                lines = ["**Reasoning**", "", *turn["reasoning"].strip().splitlines()]
                parts.append("\n".join(f"> {line}".rstrip() for line in lines))
            if turn.get("continues") or not turn.get("is_summary"):
                parts.append(turn_text(turn).strip("\n"))
            if turn.get("tool_calls"):
                parts.append(f"```json\n{json.dumps(turn['tool_calls'], ensure_ascii=False, indent=1)}\n```")
            if turn.get("finish_reason") in _ENDS:
                parts.append(f"*({_ENDS[turn['finish_reason']]})*")
        return "\n\n".join(part for part in parts if part) + "\n"

    @classmethod
    def from_json(cls, content: bytes | str, *, is_stored: bool = False) -> Self:
        """Parse and check what `to_json` wrote.

        is_stored: it is a record of a store, which may have pictures as digests. Raises: SessionFileError with what is
        wrong, without the way out.
        """
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SessionFileError(f"it is not JSON ({error})") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise SessionFileError("it is not a saved conversation")
        version = fields.get("version")
        if version == STORED_VERSION and not is_stored:
            raise SessionFileError(
                "it is a record whose pictures are files beside it; take what 'localinfer sessions export' writes of it"
            )
        if version not in (FORMAT_VERSION, STORED_VERSION):
            raise SessionFileError(
                f"it has format version {version!r}, and this localinfer reads {FORMAT_VERSION} and {STORED_VERSION}"
            )
        id, name, model = (_text(fields, member) for member in ("id", "name", "model"))
        if not is_id(id):
            raise SessionFileError(f"its id is {id!r}")
        system = None if fields.get("system") is None else _text(fields, "system")
        turns = fields.get("turns")
        if not isinstance(turns, list) or not all(_is_turn(turn, is_stored=is_stored) for turn in turns):
            raise SessionFileError("its turns are not messages with a role and content")
        return cls(id, name, model, system, turns, _time(fields, "created"), _time(fields, "changed"))


def turn_text(turn: Mapping[str, Any]) -> str:
    """The content of a turn to be read: pictures and sounds as their type, and name where they have one."""
    content = turn["content"]
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if part["type"] == "text" else f"[{' '.join((part['type'], *filter(None, [part.get('name')])))}]"
        for part in content
    )


def model_label(model: str) -> str:
    """A model as it is shown: the name of its file or folder, without the suffix .gguf; other names as they are."""
    path = PurePath(model)
    return (path.name.removesuffix(".gguf") if path.is_absolute() else model) or "demo"


def is_id(text: str) -> bool:
    """Return True for the id of a conversation, which no name may be."""
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


def _is_turn(turn: object, *, is_stored: bool) -> bool:
    if not isinstance(turn, dict):
        return False
    content = turn.get("content")
    has_parts = isinstance(content, list) and all(_is_part(part, is_stored=is_stored) for part in content)
    is_said = turn.get("role") in _ROLES and (isinstance(content, str) or has_parts)
    return is_said and all(isinstance(turn.get(name), str | None) for name in ("reasoning", "finish_reason"))


def _is_part(part: object, *, is_stored: bool) -> bool:
    """True for a part with a text, or a picture or sound with its bytes as base64, or in a record with their digest."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    if is_stored and part["type"] != "text" and is_reference(part):
        return isinstance(part.get("name"), str | None)
    return isinstance(part.get("text" if part["type"] == "text" else "data"), str)


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


__all__ = ["ConversationStore", "ConversationSummary", "SavedConversation", "open_store"]

logger = logging.getLogger(__name__)

_SUFFIX = ".json"
_MOST_BYTES = 256 << 20
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class ConversationSummary:
    """A line of the list of conversations; `num_bytes`: of its files."""

    id: str
    name: str
    model: str
    num_messages: int
    first_words: str
    created: datetime
    changed: datetime
    num_bytes: int


# The store has a method of the type's name.
_Summaries: TypeAlias = list[ConversationSummary]
_Texts: TypeAlias = list[str]


class _Seen(NamedTuple):
    """A conversation as this store last read or wrote it: its name in the file and as the caller has it.

    states: what was said, as digests, where the file may have it from this store: the last one, and after a write that
    failed the one before too.
    """

    states: tuple[bytes, ...]
    stored_name: str
    given_name: str


class ConversationStore:
    """The conversations in one folder, which is made when the first is saved.

    Any number of processes may use it. Of two that continue one conversation, the second to save continues under a new
    name, with a warning, so that the turns of both are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = RecordStore(folder, most_bytes=_MOST_BYTES, is_durable=True)
        self._media = ConversationMedia(folder)
        self._seen: dict[str, _Seen] = {}
        self._moved: dict[str, str] = {}
        self._warned: set[str] = set()
        self._is_swept = self._is_named = False

    def save(self, conversation: SavedConversation) -> None:
        """Write a conversation, durably, over its former state.

        A conversation without a name gets one from its first words. A name that another has is given a number: turns
        are never lost over a name. One renamed elsewhere meanwhile keeps its new name.
        Raises: SessionFileError if it cannot be written; what was saved before is then unchanged.
        """
        with self._locked():
            given = conversation
            conversation = replace(given, id=self.id_of(given))
            seen, path = self._seen.get(given.id), self._path(conversation.id)
            name = seen.stored_name if seen is not None else ""
            if self._is_there(path):
                stored = self._read_if_whole(path)
                if stored is None or (seen is not None and _state(stored) not in seen.states):
                    conversation = self._move(conversation)
                else:
                    name = stored.name
            has_name = bool(name) and self._is_there(self._path(conversation.id))
            wanted = name if seen is not None and given.name == seen.given_name else given.name or name
            wanted = wanted or given.name or name_from(given)
            if wanted != name or not has_name:
                name = self._free_name(wanted, conversation.id)
            if name != wanted and wanted == given.name:
                logger.warning("another conversation is named %r; this one is saved as %r", wanted, name)
            self._write(replace(conversation, name=name), given)

    def id_of(self, conversation: SavedConversation) -> str:
        """The id under which a conversation is saved: another one since a program changed the file of its own."""
        return self._moved.get(conversation.id, conversation.id)

    def load(self, name_or_id: str) -> SavedConversation:
        """Read one conversation; what of its pictures and sounds is gone or damaged is named in a warning.

        Raises: RequestError if there is none of this name, SessionFileError if its file cannot be read.
        """
        path = self._path(self._find(name_or_id))
        conversation, _ = self._read(path)
        turns, problems = self._unpacked(path, conversation)
        while problems and (latest := self._read(path)[0]).changed != conversation.changed:
            # Another program has saved it since it was read, with other pictures.
            conversation = latest
            turns, problems = self._unpacked(path, conversation)
        self._seen[conversation.id] = _Seen((_state(conversation),), conversation.name, conversation.name)
        self._moved.pop(conversation.id, None)
        if problems:
            logger.warning("%s: %s; its name stands in its place", path, ", ".join(problems))
        return replace(conversation, turns=turns)

    def _unpacked(self, path: Path, conversation: SavedConversation) -> tuple[Sequence[Mapping[str, Any]], _Texts]:
        """Turns with the bytes of their pictures, and what is wrong with some. Raises: SessionFileError."""
        try:
            return self._media.unpacked(conversation.id, conversation.turns)
        except OSError as error:
            reason = error.strerror or error
            raise SessionFileError(
                f"{path}: its pictures cannot be read: {reason}; they are kept as they are: try again"
            ) from error

    def find(self, name_or_id: str) -> SavedConversation | None:
        """Read one conversation; None if there is none of this name. Raises: as `load`."""
        return self.load(name_or_id) if is_id(name_or_id) or self._named(name_or_id) else None

    def similar_names(self, name: str) -> _Texts:
        """The names that a user may have meant, at most three, the likeliest first."""
        return get_close_matches(name, [summary.name for summary in self.list()], n=3)

    def latest(self) -> SavedConversation | None:
        """The conversation that was changed last; None if there is none."""
        summaries = self.list()
        return self.load(summaries[0].id) if summaries else None

    def list(self) -> _Summaries:
        """Every conversation that can be read, the last changed first; the others are named in a warning."""
        found = []
        media_bytes = self._media.num_bytes()
        for file_name in self._names():
            try:
                conversation, num_bytes = self._read(self.folder / file_name)
            except SessionFileError as error:
                if not isinstance(error.__cause__, FileNotFoundError) and str(error) not in self._warned:
                    self._warned.add(str(error))
                    logger.warning("%s", error)
                continue
            found.append(
                ConversationSummary(
                    conversation.id,
                    conversation.name,
                    conversation.model,
                    len(conversation.turns),
                    conversation.first_words,
                    conversation.created,
                    conversation.changed,
                    num_bytes + media_bytes.get(conversation.id, 0),
                )
            )
        return sorted(found, key=lambda summary: (summary.changed, summary.id), reverse=True)

    def rename(self, name_or_id: str, name: str) -> None:
        """Give a conversation another name.

        Raises: RequestError if the name is taken or cannot be one, or there is no such conversation; SessionFileError
        if its file cannot be read or written.
        """
        check_name(name)
        id = self._find(name_or_id)
        with self._locked():
            conversation, _ = self._read(self._path(id))
            if self._free_name(name, id) != name:
                raise RequestError(
                    f"another conversation is named {name!r}; give another name, or rename that one first"
                )
            seen = self._seen.get(id)
            given = conversation if seen is None else replace(conversation, name=seen.given_name)
            try:
                self._write(replace(conversation, name=name), given)
            finally:
                if seen is not None:
                    # Turns of another program that are renamed here have not been seen by the caller.
                    self._seen[id] = self._seen[id]._replace(states=seen.states)

    def delete(self, name_or_id: str) -> None:
        """Delete a conversation; by its id also one whose file cannot be read.

        Raises: RequestError if there is no such conversation, SessionFileError if the system refuses.
        """
        path = self._path(self._find(name_or_id))
        with self._locked():
            try:
                self._records.delete(path.name)
            except OSError as error:
                raise SessionFileError(f"{path} cannot be deleted: {error.strerror or error}") from error
            self._media.keep(path.name.removesuffix(_SUFFIX), ())

    def _path(self, id: str) -> Path:
        return self.folder / f"{id}{_SUFFIX}"

    def _is_there(self, path: Path) -> bool:
        """Return True if something is at a path. Raises: SessionFileError if that cannot be seen."""
        try:
            return disk.exists(path)
        except OSError as error:
            raise SessionFileError(f"{path} cannot be read: {error.strerror or error}") from error

    def _names(self) -> _Texts:
        try:
            return [name for name in self._records.names() if name != FOLDER]
        except OSError as error:
            raise SessionFileError(f"{self.folder} cannot be read: {error.strerror or error}") from error

    def _find(self, name_or_id: str) -> str:
        """The id of a conversation by its name, or by its id. Raises: RequestError."""
        if is_id(name_or_id) and self._is_there(self._path(name_or_id)):
            return name_or_id
        matches = self._named(name_or_id)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise RequestError(f"several conversations are named {name_or_id!r}; give one of {', '.join(matches)}")
        similar = self.similar_names(name_or_id)
        hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        raise RequestError(f"there is no saved conversation {name_or_id!r}; 'localinfer sessions' lists all{hint}")

    def _named(self, name: str) -> _Texts:
        """The ids of the conversations of this name: one or none, unless another program wrote files here."""
        wanted = _folded(name)
        return [summary.id for summary in self.list() if _folded(summary.name) == wanted]

    def _read(self, path: Path) -> tuple[SavedConversation, int]:
        """A conversation and the bytes of its file. Raises: SessionFileError, which names the file."""
        try:
            content = self._records.read(path.name)
            conversation = SavedConversation.from_json(content, is_stored=True)
            if path.name != f"{conversation.id}{_SUFFIX}":
                raise SessionFileError(f"its name does not fit its id, {conversation.id}")
        except (OSError, SessionFileError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise SessionFileError(
                f"{path} cannot be read as a conversation: {reason}; it is kept as it is: repair, move or delete it"
            ) from error
        return conversation, len(content)

    def _read_if_whole(self, path: Path) -> SavedConversation | None:
        try:
            return self._read(path)[0]
        except SessionFileError:
            return None

    def _write(self, conversation: SavedConversation, given: SavedConversation) -> None:
        path = self._path(conversation.id)
        seen, state = self._seen.get(given.id) or _Seen((), "", given.name), _state(conversation)
        self._seen[given.id] = seen._replace(states=(*seen.states, state))
        turns, files = packed(conversation.turns)
        try:
            if files:
                self._media.write(conversation.id, files)
            self._records.write(path.name, replace(conversation, turns=turns).to_json().encode())
        except OSError as error:
            raise SessionFileError(unwritable(path, error)) from error
        self._media.keep(conversation.id, references(turns))
        self._seen[given.id] = _Seen((state,), conversation.name, given.name)

    def _move(self, conversation: SavedConversation) -> SavedConversation:
        """The conversation under another id, as its file has something else by now."""
        moved = replace(conversation, id=SavedConversation.begin(conversation.model).id)
        logger.warning(
            "%s was changed by another program; this conversation continues as %s",
            self._path(conversation.id),
            moved.id,
        )
        self._moved[conversation.id] = moved.id
        return moved

    def _free_name(self, name: str, id: str) -> str:
        """The name, or if another conversation has it, the name with the first free number."""
        taken = {_folded(summary.name) for summary in self.list() if summary.id != id}
        free, number = name, 2
        while _folded(free) in taken:
            free, number = f"{name}-{number}", number + 1
        return free

    def _sync_name(self, folders: _Texts) -> None:
        """Make the names of folders durable, which a power cut would take with all that is in them."""
        try:
            for folder in folders:
                disk.sync_folder(os.path.dirname(folder))
        except PermissionError:
            # A folder above may be one that cannot be read.
            return
        except OSError as error:
            raise SessionFileError(unwritable(self.folder, error)) from error
        self._is_named = True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder, which is made if it is missing. Raises: SessionFileError."""
        new: list[str] = []
        # Only the last folder of a path is made with the mode that is asked for.
        with contextlib.suppress(OSError):
            new += disk.make_folder(self.folder.parent)
        problem = make_private(self.folder)
        if problem is not None:
            raise SessionFileError(f"conversations cannot be saved: {problem}; change that, or chat with --no-history")
        self._sync_name([*new, str(self.folder)] if not self._is_named else new)
        path = self.folder / LOCK
        with contextlib.ExitStack() as held:
            try:
                is_ours = held.enter_context(self._records.locked(seconds=_LOCK_SECONDS))
            except OSError as error:
                raise SessionFileError(unwritable(path, error)) from error
            if not is_ours:
                raise SessionFileError(
                    f"another program has held {path} for {_LOCK_SECONDS:g} s; end it, and the next turn is saved"
                )
            if not self._is_swept:
                with contextlib.suppress(OSError):
                    self._records.delete_unfinished(is_locked=True)
                    self._media.keep_of(name.removesuffix(_SUFFIX) for name in self._records.names())
                    self._is_swept = True
            yield


def open_store() -> ConversationStore | None:
    """The store in this user's state folder; None for a user without one."""
    state = user_folder("state")
    return None if state is None else ConversationStore(state / "conversations")


def _state(conversation: SavedConversation) -> bytes:
    """A digest of the messages: times may be the same of two writers, and a name may be given by any."""
    return hashlib.sha256(json.dumps([conversation.system, packed(conversation.turns)[0]]).encode()).digest()


def _folded(name: str) -> str:
    """A name as names are compared: composed, without case."""
    return unicodedata.normalize("NFC", name).casefold()
