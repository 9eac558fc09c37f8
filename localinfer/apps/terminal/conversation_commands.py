"""Commands for the conversation: context, saved conversations, editing of messages, copying."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

import click

from localinfer.apps.terminal.command import Command
from localinfer.apps.terminal.markdown import code_blocks
from localinfer.errors import LocalinferError, RequestError, SessionFileError
from localinfer.storage.conversations import turn_text
from localinfer.terminal import check_text, describe_stats, stats_parts

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat
    from localinfer.storage.conversations import ConversationStore, ConversationSummary


_WARNING_SHARE = 0.8
"""Of what the messages may take, from which on the end is announced."""
_CHOICES = (
    "/compact has the model sum the older messages up, /context shift leaves them out now, /context new starts anew"
)


class ContextCommands:
    """/context, /tokens and /stats, and the notices about a context that fills."""

    def __init__(self, chat: "Chat", *, shows_stats: bool) -> None:
        self._chat = chat
        self._shows_stats = shows_stats
        self._warned = 0

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command(
                "/context",
                "make room: leave the oldest out, sum them up, or start anew",
                self._context,
                "shift|summarise|new",
                ("shift", "summarise", "new"),
            ),
            Command(
                "/compact",
                "have the model sum up the older messages, and say what to keep",
                self._summarise,
                "[WHAT TO KEEP]",
            ),
            Command("/tokens", "tokens of the conversation, and how many are left", self._tokens),
            Command(
                "/stats",
                "statistics of the last reply, or of every one from here on",
                self._stats,
                "[on|off]",
                ("on", "off"),
            ),
        )

    def report_reply(self) -> None:
        """Tell what a reply cost, where it was cut, and how full the context is."""
        conversation = self._chat.conversation
        stats = conversation.last_stats
        if stats is None:
            return
        if self._shows_stats:
            self._chat.notice(describe_stats(stats))
        elif stats.dropped_tokens:
            self._chat.notice(
                f"the context is full: {stats.dropped_tokens} tokens before its recent half were left out"
            )
        if conversation.context_is_full:
            self._warned = 2
            self._chat.notice(
                "the reply was cut at the end of the context (finish_reason: length). The next message leaves out the "
                f"oldest ones; {_CHOICES}, and then /continue completes the reply. --context-length N makes room "
                "for more"
            )
        else:
            if conversation.finish_reason == "length":
                way_on = "/continue completes it, and"
                if conversation.sampling.get("constraint") is not None:
                    way_on = "the format holds for whole replies, so /regen makes it again;"
                self._chat.notice(
                    f"the reply was cut after {stats.completion_tokens} tokens (finish_reason: length); {way_on} "
                    "/set max_tokens N allows more"
                )
            self._announce_end()

    def report_dropped(self, num_messages: int) -> None:
        """Say that messages are no longer read by the model."""
        self._chat.notice(f"the context is full: the {num_messages} oldest messages are left out from now on")

    def report_compaction(self, before: int, after: int | None) -> None:
        """Say that the older messages are being summed up, and once they are, what that gave."""
        if after is None:
            self._chat.notice(
                f"the context is filling ({before:,} of {self._chat.conversation.context_length:,} tokens): the model "
                "sums up the older messages first, and Ctrl-C stops it"
            )
            return
        self._warned = 0
        self._chat.notice(
            f"the conversation continues from its summary: {before:,} tokens became {after:,}; the older messages stay "
            "in the saved conversation"
        )

    def _announce_end(self) -> None:
        """Say once that the context is filling, and once that the next reply may not fit."""
        conversation = self._chat.conversation
        used, room = conversation.context_used, conversation.context_length - conversation.reply_tokens
        level = 2 if used >= room else 1 if used >= _WARNING_SHARE * room else 0
        if level > self._warned:
            begins = "the next reply may not fit" if level == 2 else "the context is filling"
            then = "the oldest messages will be left out"
            if conversation.compact_at is not None:
                then = "the model will sum up the older messages"
            if conversation.sampling.get("context_shift"):
                then = "all but the system prompt and the recent half will be left out"
            self._chat.notice(f"{begins}: {self._usage()}. When it is full, {then}; {_CHOICES}")
        self._warned = level

    def _usage(self) -> str:
        conversation = self._chat.conversation
        length = conversation.context_length
        # The count has what begins the next reply, too.
        used = min(conversation.context_used, length)
        return f"{used:,} of {length:,} tokens are used ({100 * used / length:.0f} %), {length - used:,} left"

    def _context(self, argument: str) -> None:
        conversation = self._chat.conversation
        if argument == "new":
            self._chat.start_anew()
        elif argument == "shift":
            dropped = conversation.shift_context()
            if dropped:
                self._chat.notice(f"the {dropped} oldest messages are left out from now on: {self._usage()}")
            else:
                self._chat.notice("there is but one exchange, which stays; /context summarise or /context new")
        elif argument in ("summarise", "summarize"):
            self._summarise("")
        elif argument:
            self._chat.notice(f"/context is given {argument}; it takes shift, summarise or new")
        else:
            self._chat.notice(f"{self._usage()}. {_CHOICES}")

    def _summarise(self, keep: str) -> None:
        conversation = self._chat.conversation
        before = conversation.context_used
        num_turns = len(conversation.turns)
        self._chat.print_aside(conversation.summarise(check_text(keep, "what to keep")))
        if len(conversation.turns) == num_turns:
            self._chat.notice("there is no summary, and the conversation is as it was")
        else:
            self._warned = 0
            self._chat.notice(
                f"the conversation continues from its summary: {before:,} tokens became {conversation.context_used:,}; "
                "/context shows what is left, and /undo brings the former back"
            )

    def _tokens(self, _: str) -> None:
        conversation = self._chat.conversation
        self._chat.notice(f"{self._usage()}; {conversation.reply_tokens:,} of them are kept for a reply")
        texts: dict[str, list[str]] = {}
        for message in conversation.messages:
            texts.setdefault(message["role"], []).append(turn_text(message))
        names = {"system": "system prompt", "user": "your messages", "assistant": "replies", "tool": "results of calls"}
        for role, found in texts.items():
            tokenizer = conversation.llm.tokenizer
            count = sum(len(tokenizer.encode(text, add_special=False)) for text in found if text)
            number = "" if role == "system" else f" in {len(found)}"
            self._chat.notice(f"  {names.get(role, role)}: {count:,} tokens{number}")
        left_out = len(conversation.turns) - sum(message["role"] != "system" for message in conversation.messages)
        if left_out:
            self._chat.notice(f"  {left_out} older messages are no longer read by the model")
        waiting = self._chat.attachments.files
        if waiting:
            count = sum(len(conversation.llm.tokenizer.encode(text, add_special=False)) for text in waiting)
            self._chat.notice(f"  waiting for your next message: {len(waiting)} files of {count:,} tokens")

    def _stats(self, argument: str) -> None:
        if argument in ("on", "off"):
            self._shows_stats = argument == "on"
            self._chat.notice(f"statistics after every reply: {argument}")
            return
        stats = self._chat.conversation.last_stats
        for part in ["there is no reply yet"] if stats is None else stats_parts(stats):
            self._chat.notice(part, hanging=2)


_MOST_LISTED = 20
_NOT_KEPT = "conversations are not kept here: they were switched off (--no-history), or you have no state folder"


class SessionCommands:
    """/save, /load and /sessions."""

    def __init__(self, chat: "Chat", store: "ConversationStore | None") -> None:
        self._chat = chat
        self._store = store
        self._reported = ""

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/save", "name this conversation, which is saved after every reply", self._save, "NAME"),
            Command("/load", "resume a saved conversation", self._load, "NAME", self._complete_name),
            Command("/sessions", "list the saved conversations", self._list),
        )

    def report_failure(self, error: SessionFileError) -> None:
        """Say once why turns are not saved: each of them would have the same reason."""
        if str(error) != self._reported:
            self._reported = str(error)
            self._chat.notice(f"not saved: {error}; /save tries again")

    def _save(self, name: str) -> None:
        conversation = self._chat.conversation
        if self._store is None or conversation.saved is None:
            self._chat.notice(_NOT_KEPT)
            return
        if not conversation.turns:
            self._chat.notice("there is nothing to save yet")
            return
        conversation.keep()
        if name:
            self._store.rename(self._store.id_of(conversation.saved), name)
            conversation.saved = replace(conversation.saved, name=name)
        shown = self._store.load(self._store.id_of(conversation.saved)).name
        self._chat.notice(f"saved as {shown}; localinfer chat --session {quote(shown)} resumes it")

    def _load(self, name: str) -> None:
        if self._store is None:
            self._chat.notice(_NOT_KEPT)
            return
        if not name:
            self._chat.notice("name the conversation: /load NAME; /sessions lists them")
            return
        conversation = self._chat.conversation
        model = None if conversation.saved is None else conversation.saved.model
        saved = self._store.load(name)
        conversation.restore(saved)
        count = f"{len(saved.turns):,} message{'' if len(saved.turns) == 1 else 's'}"
        self._chat.notice(f"{saved.name or saved.id}: {count}")
        self._chat.show_exchange(saved.turns)
        if model is not None and saved.model != model:
            self._chat.notice(f"it was held with {saved.model}; /model {saved.model} switches to that")
        if conversation.can_resume:
            self._chat.notice("its last reply was cut; /continue completes it")

    def _list(self, _: str) -> None:
        summaries = self._summaries()
        if self._store is None:
            self._chat.notice(_NOT_KEPT)
        elif not summaries:
            self._chat.notice("no conversation is saved yet")
        saved = self._chat.conversation.saved
        for summary in summaries[:_MOST_LISTED]:
            mark = "*" if saved is not None and summary.id == saved.id else " "
            when = summary.changed.astimezone().strftime("%Y-%m-%d %H:%M")
            self._chat.notice(f"{mark} {when}  {summary.name}  ({summary.num_messages} messages, {summary.model})")
        if len(summaries) > _MOST_LISTED:
            more = len(summaries) - _MOST_LISTED
            self._chat.notice(f"and {more} older ones, which localinfer sessions lists")

    def _complete_name(self, typed: str) -> Iterable[str]:
        names = (summary.name for summary in self._summaries())
        return [name for name in names if name.casefold().startswith(typed.casefold()) and name.isprintable()]

    def _summaries(self) -> "list[ConversationSummary]":
        try:
            return [] if self._store is None else self._store.list()
        except LocalinferError as error:
            self._chat.notice(str(error))
            return []


EditText = Callable[[str], str | None]
"""Lets the user edit a text; None where it was left as it is."""
_MOST_SHOWN = 60


def edit_in_editor(text: str) -> str | None:
    """Open the editor that VISUAL or EDITOR names, or the system's; None if nothing was saved. Raises: RequestError."""
    try:
        edited = click.edit(text, extension=".md")
    except click.ClickException as error:
        raise RequestError(f"{error.format_message()}; set EDITOR to the command of an editor") from None
    return None if edited is None or edited.rstrip("\n") == text.rstrip("\n") else edited.rstrip("\n")


class EditingCommands:
    """/regen, /edit, /undo, /fork and /continue. All of them compute from the change on only."""

    def __init__(self, chat: "Chat", edit_text: EditText) -> None:
        self._chat = chat
        self._edit_text = edit_text

    def commands(self) -> tuple[Command, ...]:
        """The commands, in the order of help."""
        return (
            Command("/regen", "regenerate the last reply", self._regenerate, may_raise=True),
            Command(
                "/edit", "edit your last message, or the N-th, and answer from there", self._edit, "[N]", may_raise=True
            ),
            Command("/undo", "remove your last message and its reply", self._undo),
            Command("/fork", "continue in a copy of the conversation, under a name", self._fork, "NAME"),
            Command("/continue", "complete a reply that was cut or stopped", self._continue, may_raise=True),
        )

    def _regenerate(self, _: str) -> None:
        if self._chat.conversation.can_regenerate:
            self._chat.print_reply(self._chat.conversation.regenerate())
        else:
            self._chat.notice("there is no reply to make again")

    def _edit(self, argument: str) -> None:
        number, _, text = argument.partition(" ")
        if argument and (not number.isdecimal() or not int(number)):
            self._chat.notice(f"{number} is no number of a message; /edit 1 edits your first, /edit the last")
            return
        index = int(number) - 1 if number else -1
        try:
            former = self._chat.conversation.user_message(index)
            edited = text.strip() or self._edit_text(former)
        except RequestError as error:
            self._chat.notice(str(error))
            return
        if edited is None or not edited.strip():
            self._chat.notice("the message was left as it is")
            return
        if not text.strip():
            self._chat.notice(f"> {_shortened(edited)}")
        self._chat.print_reply(self._chat.conversation.edit(index, check_text(edited, "the message")))

    def _undo(self, _: str) -> None:
        if self._chat.conversation.undo_summary():
            self._chat.notice("the summary is gone, and the conversation is as it was before")
            return
        removed = self._chat.conversation.undo()
        if not removed:
            self._chat.notice("there is nothing to undo")
            return
        self._chat.notice(
            f'removed "{_shortened(turn_text(removed[0]))}" and what followed it ({len(removed)} messages)'
        )

    def _fork(self, name: str) -> None:
        conversation, store = self._chat.conversation, self._chat.store
        former = conversation.saved
        if store is None or former is None:
            self._chat.notice("conversations are not kept here, so there can be no copy; see --no-history")
        elif not name:
            self._chat.notice("give the copy a name: /fork NAME")
        elif not conversation.turns:
            self._chat.notice("there is nothing to copy yet")
        else:
            conversation.keep()
            conversation.fork()
            copy = conversation.saved
            assert copy is not None, "there was a saved one"
            try:
                store.rename(copy.id, name)
            except (RequestError, SessionFileError):
                conversation.saved = former
                with suppress(SessionFileError):
                    store.delete(copy.id)
                raise
            conversation.saved = replace(copy, name=name)
            self._chat.notice(f"this is {name} from here on; the former conversation stays as it is")

    def _continue(self, _: str) -> None:
        conversation = self._chat.conversation
        if not conversation.turns:
            self._chat.notice("there is no reply to continue yet")
        elif conversation.open_calls:
            self._chat.notice(f"the model waits for the result of {conversation.open_calls[0].name}; type it")
        elif not conversation.can_resume:
            self._chat.notice("the last reply is whole; /regen makes it again")
        elif conversation.sampling.get("constraint") is not None and conversation.turns[-1]["role"] == "assistant":
            self._chat.notice(
                "the format holds for whole replies; /regen makes this one again (/set max_tokens N allows more), and "
                "after /set format off it can be gone on with"
            )
        else:
            self._chat.print_reply(conversation.resume())
            if not conversation.is_reply_kept and conversation.context_used >= conversation.context_length:
                self._chat.notice(
                    "there is no room for more: your message and its reply fill the context by themselves"
                )


def _shortened(text: str) -> str:
    """The beginning of a text, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_SHOWN else f"{words[: _MOST_SHOWN - 3]}..."


CopyText = Callable[[str, Callable[[str], bool]], str]
"""The signature of `copy_to_clipboard`."""

_PARTS = ("code", "reply")


class CopyCommand:
    """/copy."""

    def __init__(self, chat: "Chat", copy_text: CopyText) -> None:
        self._chat = chat
        self._copy_text = copy_text

    def commands(self) -> tuple[Command, ...]:
        """The command."""
        return (
            Command(
                "/copy",
                "copy the last code block of the last reply; without one, all of it",
                self._copy,
                "[code|reply]",
                _PARTS,
            ),
        )

    def _copy(self, part: str) -> None:
        if part not in ("", *_PARTS):
            self._chat.notice(
                f"/copy is given {part}; it takes nothing, code for the last code block, or reply for all"
            )
            return
        replies = [turn["content"] for turn in self._chat.conversation.turns if turn["role"] == "assistant"]
        if not replies:
            self._chat.notice("there is no reply yet")
            return
        blocks = [] if part == "reply" else code_blocks(replies[-1])
        if part == "code" and not blocks:
            self._chat.notice("the last reply has no code block; /copy reply copies all of it")
            return
        what, text = ("the last code block", blocks[-1]) if blocks else ("the whole last reply", replies[-1])
        by = self._copy_text(text, self._chat.send_to_terminal)
        self._chat.notice(f"copied {what}, {_length(text)}, by {by}")


def _length(text: str) -> str:
    num_lines = len(text.splitlines())
    lines = f"{num_lines:,} lines of " if num_lines > 1 else ""
    return f"{lines}{len(text):,} character{'' if len(text) == 1 else 's'}"


_PROGRAM_SECONDS = 5
_MOST_SEQUENCE_BYTES = 74_994
"""Many terminals ignore longer ones."""


def copy_to_clipboard(text: str, send_to_terminal: Callable[[str], bool]) -> str:
    """Copy text by a program of the system or, over a network or without one, by the terminal; say by which.

    send_to_terminal: writes a control sequence; False where there is no terminal. Whether a terminal takes it, it does
    not tell. Source: xterm's "Control Sequences", OSC 52. Raises: RequestError where neither can be had.
    """
    program = _clipboard_program()
    is_remote = "SSH_CONNECTION" in os.environ
    if program is not None and not is_remote:
        encoding = "utf-16-le" if program[0] == "clip" else "utf-8"
        try:
            subprocess.run(
                program,
                input=text.encode(encoding, "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PROGRAM_SECONDS,
                check=True,
            )
            return program[0]
        except (OSError, subprocess.SubprocessError):
            pass
    sequence = f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\x07"
    if len(sequence) > _MOST_SEQUENCE_BYTES:
        raise RequestError(
            f"the text has {len(text)} characters, more than a terminal takes into its clipboard, and no clipboard "
            "program works here (wl-copy, xclip, xsel); /copy code takes less"
        )
    if not send_to_terminal(sequence):
        raise RequestError("there is no terminal, and no clipboard program works here (wl-copy, xclip, xsel)")
    return "the terminal"


def _clipboard_program() -> list[str] | None:
    if sys.platform == "darwin":
        found = [["pbcopy"]]
    elif sys.platform == "win32":
        found = [["clip"]]
    else:
        found = [["wl-copy"]] if os.environ.get("WAYLAND_DISPLAY") else []
        found += [["xclip", "-selection", "clipboard"], ["xsel", "-b", "-i"]] if os.environ.get("DISPLAY") else []
    return next((program for program in found if shutil.which(program[0]) is not None), None)
