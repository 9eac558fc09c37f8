"""Conversations that several replicas serve: texts and token counts from one seed, for the model and for measurements.

Each conversation has one of a few system prompts, a first message that brings a text along, and two short ones after
it; replies have a fixed length, so that all token counts are known before anything is computed. Words are single tokens
of the demo model's vocabulary, and `<|im_start|>role` and its ends cost what its chat template writes. Sizes fit its
context of 1,024 tokens.

A prompt's shareable tokens are those that begin like an earlier text, given one cache that forgets nothing: of a first
prompt the system prompt, if another conversation had it before; of a later one the prompt before it and the reply but
its last token, whose keys and values are computed only when something follows. So a hit rate is hits / shareable, and
1.0 is reached by one replica that never evicts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REPLICA_KV_TOKENS = 8_192
"""Room for tokens in each of two replicas: twelve conversations and all system prompts fit, twenty do not."""
REPLICA_KV_BYTES = REPLICA_KV_TOKENS * 3_072
"""The same in bytes, of the demo model in f16: `--kv-memory`."""

_BEGIN = 1
_MESSAGE = 5
"""Tokens of a text's start, and of a message around its words: start, role, line, end, line."""
_REPLY_HEAD = 3
"""Tokens that a prompt ends with: start, role, line."""
_TURNS = 3
_END_TOKEN_IDS = (1, 3)
"""Of the demo model; a reply that has none is the same tokens again when it comes back as text."""

_NAMES = (
    "Alice Anna Ben Billy Daisy Ella Emma Finn Hazel Henry Ivy Jack Jake John Leo Lila Lily Lucy Mary Max Mia Molly "
    "Noah Nora Oscar Otto Penny Pip Rosie Ruby Rusty Sam Sara Sophie Tim Timmy Tina Toby Tom Zoe"
).split()
_OPENINGS = "You Please Help Tell Make Write Give Always".split()
_REQUESTS = "What Then Tell Please Now Where Who How Why When Which Say".split()
_WORDS = (
    "said that with about they very want look there story have little small happy were your time friend play them went "
    "wanted like came looked will could know some from this good help their make stories when more back would every "
    "asked again what down home other then friends lived something away should into call thought things care named "
    "took made found sorry after come never much liked kind need long best girl together called under over than start"
).split()


@dataclass(frozen=True)
class Turn:
    """One request of a conversation, and what comes back.

    think_seconds: from the end of the reply before it (0 for the first) to sending it. prompt_tokens: of the whole
    prompt, with all that was said before. shareable_tokens: see the module.
    """

    text: str
    think_seconds: float
    prompt_tokens: int
    reply_tokens: int
    shareable_tokens: int
    seed: int


@dataclass(frozen=True)
class Conversation:
    """A system prompt, by its number and text, and turns. system_tokens: how many all prompts with it begin with."""

    number: int
    start_seconds: float
    system: int
    system_text: str
    system_tokens: int
    turns: tuple[Turn, ...]

    @property
    def total_tokens(self) -> int:
        """Of the last prompt and its reply."""
        return self.turns[-1].prompt_tokens + self.turns[-1].reply_tokens

    def messages(self, turn: int, replies: Sequence[str]) -> list[dict[str, str]]:
        """The messages of a turn's request. replies: the texts that came back for the turns before it."""
        messages = [{"role": "system", "content": self.system_text}]
        for past, reply in zip(self.turns[:turn], replies, strict=True):
            messages += [{"role": "user", "content": past.text}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": self.turns[turn].text}]

    def request_body(self, turn: int, replies: Sequence[str]) -> dict[str, Any]:
        """A streamed chat request for exactly the turn's `reply_tokens`, the same on every replica."""
        return {
            "messages": self.messages(turn, replies),
            "max_tokens": self.turns[turn].reply_tokens,
            "seed": self.turns[turn].seed,
            "ignore_eos": True,
            "logit_bias": {str(token_id): -100 for token_id in _END_TOKEN_IDS},
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True)
class Workload:
    """Conversations by their start."""

    conversations: tuple[Conversation, ...]

    @property
    def turns(self) -> list[Turn]:
        """Of all conversations."""
        return [turn for conversation in self.conversations for turn in conversation.turns]

    @property
    def prompt_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def reply_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.reply_tokens for turn in self.turns)

    @property
    def shareable_tokens(self) -> int:
        """Of all turns; the same whatever the order in which conversations go on."""
        return sum(turn.shareable_tokens for turn in self.turns)


def make_workload(
    seed: int = 1, *, num_conversations: int = 20, num_systems: int = 4, arrival_seconds: float = 3.0
) -> Workload:
    """The conversations of a seed.

    arrival_seconds: in which all begin, at random moments. At most 40 conversations of 8 system prompts: each begins
    with a word of its own, so that two share their system prompt and nothing else.
    """
    if not 0 < num_conversations <= len(_NAMES) or not 0 < num_systems <= len(_OPENINGS):
        raise ValueError(f"there are words for {len(_NAMES)} conversations and {len(_OPENINGS)} system prompts")
    random_numbers = random.Random(f"fleet {seed}")
    systems = [_words(opening, random_numbers.randrange(48, 65), random_numbers) for opening in _OPENINGS[:num_systems]]
    names = random_numbers.sample(_NAMES, num_conversations)
    starts = sorted(random_numbers.uniform(0.0, arrival_seconds) for _ in range(num_conversations))
    # In turns, so that each system prompt is had by as many.
    conversations = [
        _conversation(number, start, number % num_systems, systems, name, number < num_systems, random_numbers)
        for number, (start, name) in enumerate(zip(starts, names, strict=True))
    ]
    return Workload(tuple(conversations))


def _conversation(
    number: int, start: float, system: int, systems: list[str], name: str, is_first: bool, random_numbers: random.Random
) -> Conversation:
    """A conversation; is_first: none with its system prompt began before."""
    system_text = systems[system]
    # The start of the user's message is the same for all.
    before = _BEGIN + _MESSAGE + _count(system_text)
    system_tokens = before + _REPLY_HEAD
    turns: list[Turn] = []
    shareable = (_BEGIN + _REPLY_HEAD if number else 0) if is_first else system_tokens
    for index in range(_TURNS):
        if index:
            text = _words(random_numbers.choice(_REQUESTS), random_numbers.randrange(16, 33), random_numbers)
            think = round(random_numbers.uniform(3.0, 6.0), 3)
        else:
            text, think = _words(name, random_numbers.randrange(420, 561), random_numbers), 0.0
        prompt = before + _MESSAGE + _count(text) + _REPLY_HEAD
        reply = random_numbers.randrange(32, 65)
        turns.append(Turn(text, think, prompt, reply, shareable, random_numbers.randrange(1 << 31)))
        shareable = prompt + reply - 1
        # The reply has its head already, and what ends a message follows it.
        before = prompt + reply + _MESSAGE - _REPLY_HEAD
    return Conversation(number, round(start, 3), system, system_text, system_tokens, tuple(turns))


def _words(first: str, count: int, random_numbers: random.Random) -> str:
    return " ".join([first, *(random_numbers.choice(_WORDS) for _ in range(count - 1))])


def _count(text: str) -> int:
    return len(text.split())
