"""Commands for the context: what it holds, what is left, and what to do before it is full."""

from typing import TYPE_CHECKING

from localinfer.apps.terminal.command import Command, beginning_with
from localinfer.errors import RequestError
from localinfer.terminal import describe_stats, stats_parts

if TYPE_CHECKING:
    from localinfer.apps.terminal.commands import Chat

_WARNING_SHARE = 0.8
"""Of what the messages may take, from which on the end is announced."""
_CHOICES = (
    "/context summarise has the model sum the older messages up, /context shift leaves them out now, /context new "
    "starts anew"
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
                lambda typed: beginning_with(typed, ("shift", "summarise", "new")),
            ),
            Command("/tokens", "tokens of the conversation, and how many are left", self._tokens),
            Command(
                "/stats",
                "statistics of the last reply, or of every one from here on",
                self._stats,
                "[on|off]",
                lambda typed: beginning_with(typed, ("on", "off")),
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
                f"oldest ones; {_CHOICES}, and then /continue goes on with the reply. --context-length N makes room "
                "for more"
            )
        else:
            if conversation.finish_reason == "length":
                way_on = "/continue goes on with it, and"
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

    def _announce_end(self) -> None:
        """Say once that the context is filling, and once that the next reply may not fit."""
        conversation = self._chat.conversation
        used, room = conversation.context_used, conversation.context_length - conversation.reply_tokens
        level = 2 if used >= room else 1 if used >= _WARNING_SHARE * room else 0
        if level > self._warned:
            begins = "the next reply may not fit" if level == 2 else "the context is filling"
            then = "the oldest messages will be left out"
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
            self._summarise()
        elif argument:
            self._chat.notice(f"/context is given {argument}; it takes shift, summarise or new")
        else:
            self._chat.notice(f"{self._usage()}. {_CHOICES}")

    def _summarise(self) -> None:
        conversation = self._chat.conversation
        before = conversation.context_used
        num_turns = len(conversation.turns)
        try:
            self._chat.print_aside(conversation.summarise())
        except RequestError as error:
            self._chat.notice(str(error))
            return
        if len(conversation.turns) == num_turns:
            self._chat.notice("there is no summary, and the conversation is as it was")
        else:
            self._warned = 0
            self._chat.notice(
                f"the conversation goes on from its summary: {before:,} tokens became {conversation.context_used:,}; "
                "/context shows what is left"
            )

    def _tokens(self, _: str) -> None:
        conversation = self._chat.conversation
        self._chat.notice(f"{self._usage()}; {conversation.reply_tokens:,} of them are kept for a reply")
        texts: dict[str, list[str]] = {}
        for message in conversation.messages:
            texts.setdefault(message["role"], []).append(message["content"])
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
