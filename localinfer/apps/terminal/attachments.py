"""Files that go with the next message of a chat: /file, /image, /audio, /paste, and paths that are dragged in."""

import re
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from localinfer.apps.terminal.command import Command, complete_path, read_text
from localinfer.errors import LocalinferError, RequestError
from localinfer.generation.chat.media_parts import CAPABILITIES, MediaKind, read_media_part
from localinfer.generation.chat.messages import Content
from localinfer.system.extras import require

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat

END_MARK, CANCEL_MARK = "/end", "/cancel"
_MOST_BYTES_PER_TOKEN = 256
"""No text takes fewer tokens than its bytes over this, so longer files need not be read."""


_KINDS: dict[str, MediaKind] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac", ".ogg"), "audio"),
}
"""Suffixes of files that are taken where their path is dragged into the terminal."""


class AttachmentCommands:
    """/file, /image, /audio and /paste."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat
        self._files: list[str] = []
        self._media: list[dict[str, str]] = []
        self._pasted: list[str] | None = None

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/file", "add a text file to your next message, if it fits", self._file, "PATH", complete_path),
            Command(
                "/image",
                "add a picture, or the clipboard's",
                partial(self._add_media, "image"),
                "[PATH]",
                complete_path,
            ),
            Command(
                "/audio", "add a sound file to your message", partial(self._add_media, "audio"), "PATH", complete_path
            ),
            Command(
                "/paste",
                f"read lines up to one with {END_MARK} only, and send them as one message",
                self._paste,
                may_raise=True,
            ),
        )

    @property
    def is_pasting(self) -> bool:
        """True while lines are taken as they are, up to an end mark."""
        return self._pasted is not None

    @property
    def files(self) -> tuple[str, ...]:
        """The files that go with the next message, as text."""
        return tuple(self._files)

    def take(self, text: str) -> str | None:
        """Take lines of a paste; return the whole message at its end mark."""
        assert self._pasted is not None, "asked for while pasting only"
        for line in text.split("\n"):
            if line.strip() == CANCEL_MARK:
                self._pasted = None
                self._chat.notice("nothing was sent")
                return None
            if line.strip() == END_MARK:
                return self.end_paste()
            self._pasted.append(line)
        return None

    def end_paste(self) -> str | None:
        """End the paste; return its message, if it has any text."""
        lines, self._pasted = self._pasted or [], None
        message = "\n".join(lines)
        return message if message.strip() else None

    def message(self, text: str) -> Content:
        """A message with the files that wait for it."""
        whole = "\n\n".join([*self._files, text])
        return [*self._media, whole] if self._media else whole

    def drop(self) -> None:
        """Forget the files that wait for a message."""
        self._files.clear()
        self._media.clear()

    def take_dropped(self, line: str) -> bool:
        """Add the picture or sound of a line that is nothing but its path, as terminals type a file that is dragged in;
        return False for any other line."""
        path = dropped_path(line)
        kind = None if path is None else _KINDS.get(path.suffix.lower())
        if path is None or kind is None or CAPABILITIES[kind] not in self._chat.conversation.llm.capabilities:
            return False
        self._add_media(kind, str(path))
        return True

    def _paste(self, first: str) -> None:
        self._pasted = []
        self._chat.notice(f"paste or type; a line with {END_MARK} sends it all, one with {CANCEL_MARK} sends nothing")
        if first and (message := self.take(first)) is not None:
            self._chat.send(message)

    def _file(self, path: str) -> None:
        if not path:
            self._chat.notice("give the path of a text file: /file PATH")
            return
        text = read_text(path, most_bytes=_MOST_BYTES_PER_TOKEN * self._chat.conversation.context_length)
        conversation, name = self._chat.conversation, Path(path).name
        part = _as_part(name, text)
        room = conversation.context_length - conversation.reply_tokens
        alone = _count(self._chat, [part])
        together = _count(self._chat, [*self._files, part])
        if together > room:
            with_others = "" if not self._files else f", {together:,} with the files that already wait"
            self._chat.notice(
                f"{name} takes {alone:,} tokens{with_others}, and the context has room for {room:,} beside a reply: it "
                "was not added; give a part of it, or start with a larger --context-length"
            )
            return
        self._files.append(part)
        left = room - conversation.context_used
        self._chat.notice(f"{name} takes {alone:,} tokens and goes with your next message; /clear drops it")
        if together > left:
            self._chat.notice(
                f"only {max(0, left):,} tokens are free, so the oldest messages will be left out for it; /context "
                "summarise keeps what they say"
            )

    def _add_media(self, kind: MediaKind, path: str) -> None:
        chat, conversation = self._chat, self._chat.conversation
        named = {"image": "a picture", "audio": "a sound file"}[kind]
        if not path and kind == "audio":
            chat.notice(f"give the path of {named}: /audio PATH")
            return
        if CAPABILITIES[kind] not in conversation.llm.capabilities:
            chat.notice(
                f"this model does not read {named}: /model switches to one that does, with its encoders' file (mmproj) "
                "beside it"
            )
            return
        try:
            value = _clipboard_picture() if not path else Path(path).expanduser()
            source = read_media_part({"type": kind, kind: value}, path or "the clipboard")
            assert source is not None, "its type is that of a picture or sound"
            part = source.as_part()
            num_tokens = conversation.llm.count_chat_tokens([{"role": "user", "content": [part]}])
        except LocalinferError as error:
            chat.notice(str(error))
            return
        room = conversation.context_length - conversation.reply_tokens
        name = source.name or "the picture"
        if num_tokens > room:
            chat.notice(f"{name} takes {num_tokens:,} tokens, and the context has room for {room:,} beside a reply")
            return
        self._media.append(part)
        chat.notice(f"{name} takes {num_tokens:,} tokens and goes with your next message; /clear drops it")


def dropped_path(line: str) -> Path | None:
    """The file of a line that is one path, quoted or with backslashes as terminals write it; None if there is none."""
    text = line.strip()
    if not text or "\n" in text:
        return None
    readings = [text]
    with suppress(ValueError):
        words = shlex.split(text)
        readings += words if len(words) == 1 else []
    for reading in readings:
        path = Path(unquote(reading.removeprefix("file://")) if reading.startswith("file://") else reading)
        with suppress(OSError, ValueError):
            if path.expanduser().is_file():
                return path.expanduser()
    return None


def _clipboard_picture() -> Any:
    """The picture of the clipboard. Raises: RequestError where there is none, or none can be had."""
    require("media", "the clipboard's picture", ("PIL",))
    from PIL import Image, ImageGrab

    try:
        found = ImageGrab.grabclipboard()
    except (OSError, NotImplementedError, ValueError) as error:
        raise RequestError(f"the clipboard cannot be read: {error}; give a path: /image PATH") from None
    if isinstance(found, list) and found:
        return found[0]
    if not isinstance(found, Image.Image):
        raise RequestError("the clipboard holds no picture; copy one, or give a path: /image PATH")
    return found


def _count(chat: "Chat", parts: list[str]) -> int:
    """Tokens of a message of these parts alone."""
    return chat.conversation.llm.count_chat_tokens([{"role": "user", "content": "\n\n".join(parts)}])


def _as_part(name: str, text: str) -> str:
    """A file as a part of a message: its name, and its text in a fence that it does not hold itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    body = text if text.endswith("\n") else f"{text}\n"
    return f"File {name}:\n{fence}\n{body}{fence}"
