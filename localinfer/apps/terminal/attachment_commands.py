"""Commands that put long texts into messages: files, and lines pasted up to an end mark."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.apps.terminal.command import Command
from localinfer.apps.terminal.paths import complete_path, read_text
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat

END_MARK, CANCEL_MARK = "/end", "/cancel"
_MOST_BYTES_PER_TOKEN = 256
"""No text takes fewer tokens than its bytes over this, so longer files need not be read."""


class AttachmentCommands:
    """/file and /paste."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat
        self._files: list[str] = []
        self._pasted: list[str] | None = None

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/file", "add a text file to your next message, if it fits", self._file, "PATH", complete_path),
            Command("/paste", f"read lines up to one with {END_MARK} only, and send them as one message", self._paste),
        )

    @property
    def is_pasting(self) -> bool:
        """Whether lines are taken as they are, up to an end mark."""
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

    def message(self, text: str) -> str:
        """A message with the files that wait for it."""
        return "\n\n".join([*self._files, text])

    def drop(self) -> None:
        """Forget the files that wait for a message."""
        self._files.clear()

    def _paste(self, first: str) -> None:
        self._pasted = []
        self._chat.notice(f"paste or type; a line with {END_MARK} sends it all, one with {CANCEL_MARK} sends nothing")
        if first and (message := self.take(first)) is not None:
            self._chat.send(message)

    def _file(self, path: str) -> None:
        if not path:
            self._chat.notice("give the path of a text file: /file PATH")
            return
        try:
            text = read_text(path, most_bytes=_MOST_BYTES_PER_TOKEN * self._chat.conversation.context_length)
        except RequestError as error:
            self._chat.notice(str(error))
            return
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


def _count(chat: "Chat", parts: list[str]) -> int:
    """Tokens of a message of these parts alone."""
    return chat.conversation.llm.count_chat_tokens([{"role": "user", "content": "\n\n".join(parts)}])


def _as_part(name: str, text: str) -> str:
    """A file as a part of a message: its name, and its text in a fence that it does not hold itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    body = text if text.endswith("\n") else f"{text}\n"
    return f"File {name}:\n{fence}\n{body}{fence}"
