"""The prefix cache of a simulated replica: which texts it holds, in pages of a bounded memory, and what is evicted.

As in `localinfer.engine.cache`: pages of a system prompt are shared, a text's last pages go first, first those of texts
that were continued least and used longest ago, system prompts last; what a running request uses stays. Texts are
counted and not compared: two share their system prompt, and a conversation's next prompt continues its text.
"""

from dataclasses import dataclass, field

EVICTION_SHARE = 64
"""At least this part of all pages is evicted at once."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its reply on their way through a fleet.

    own_tokens: that the conversation's text before has in common with it. shareable: of the prompt, see
    `fleet_workload`. hands_over: only the prompt is computed, for another replica; handed_tokens: that came so; hits:
    of those, from a cache, -1 for a request that is computed in one place. computed: of the prompt, those from the
    cache included. Times in seconds; sent: by the client.
    """

    conversation: int
    system: int
    system_tokens: int
    own_tokens: int
    prompt: int
    reply: int
    shareable: int
    sent: float = 0.0
    first_token: float = -1.0
    ended: float = -1.0
    replica: int = -1
    cached: int = 0
    computed: int = 0
    generated: int = 0
    handed_tokens: int = 0
    hits: int = -1
    hands_over: bool = False
    served: int = 0
    estimate: int = 0

    @property
    def length(self) -> int:
        """Of the text in the end."""
        return self.prompt + (0 if self.hands_over else max(0, self.reply - 1))


@dataclass(eq=False, slots=True)
class CachedText:
    """A conversation's text. pages: beyond those of its system prompt. users: running requests."""

    system: int
    length: int
    pages: int
    turns: int = 0
    worth: int = 0
    last_used: int = 0
    users: int = 0


@dataclass(eq=False, slots=True)
class CachedSystem:
    """A system prompt: how much of it is computed, and the texts that continue it. users: running requests."""

    computed: int = 0
    pages: int = 0
    users: int = 0
    texts: set[int] = field(default_factory=set)


class PrefixMemory:
    """Texts in `capacity` pages."""

    def __init__(self, capacity: int, page_tokens: int) -> None:
        self.capacity, self.page_tokens = capacity, page_tokens
        self.used_pages = 0
        self.evicted_pages = 0
        self.texts: dict[int, CachedText] = {}
        self.systems: dict[int, CachedSystem] = {}
        self._running_pages = 0
        self._clock = self._age = 0

    def match(self, request: Request) -> int:
        """How many tokens of a prompt are held; the last one is always computed."""
        text = self.texts.get(request.conversation)
        own = 0 if text is None else min(text.length, request.own_tokens)
        return min(max(own, request.handed_tokens, self._system_match(request)), request.prompt - 1)

    def has_room(self, request: Request) -> bool:
        """Whether a request fits beside those that run."""
        system = self.systems.get(request.system)
        more = self._own_pages(request) + (0 if system and system.users else self._system_pages(request))
        return self._running_pages + more <= self.capacity

    def admit(self, request: Request) -> int:
        """Hold a request's text until `finish`; return how much of its prompt is cached."""
        cached = self.match(request)
        own_pages, system_pages = self._own_pages(request), self._system_pages(request)
        if own_pages + system_pages > self.capacity:
            raise ValueError(
                f"a text of {request.length} tokens takes {own_pages + system_pages} pages and the replica has "
                f"{self.capacity}; give it more memory, or shorter texts"
            )
        self._clock += 1
        system = self.systems.setdefault(request.system, CachedSystem())
        text = self.texts.get(request.conversation)
        if text is None:
            text = self.texts[request.conversation] = CachedText(request.system, 0, 0)
            system.texts.add(request.conversation)
        elif cached > request.system_tokens:
            text.turns += 1
        text.users += 1
        if text.users > 1:
            raise ValueError("a conversation has one request at a time")
        self._running_pages += own_pages + (0 if system.users else system_pages)
        system.users += 1
        needed = max(0, own_pages - text.pages) + max(0, system_pages - system.pages)
        self._make_room(self.used_pages + needed - self.capacity)
        self.used_pages += needed
        text.pages, system.pages = max(text.pages, own_pages), max(system.pages, system_pages)
        self._use(text)
        return cached

    def publish(self, request: Request) -> None:
        """Let others find the system prompt of a request as far as it is computed."""
        system = self.systems[request.system]
        system.computed = max(system.computed, min(request.computed, request.system_tokens))

    def finish(self, request: Request) -> None:
        """Keep a request's text for whoever continues it."""
        text = self.texts[request.conversation]
        text.users -= 1
        system = self.systems[request.system]
        system.users -= 1
        self._running_pages -= self._own_pages(request) + (0 if system.users else self._system_pages(request))
        text.length = max(text.length, request.length)
        self._clock += 1
        self._use(text)

    def _system_match(self, request: Request) -> int:
        system = self.systems.get(request.system)
        return 0 if system is None else min(system.computed, request.system_tokens)

    def _system_pages(self, request: Request) -> int:
        return request.system_tokens // self.page_tokens

    def _own_pages(self, request: Request) -> int:
        return -(-request.length // self.page_tokens) - self._system_pages(request)

    def _use(self, text: CachedText) -> None:
        text.last_used, text.worth = self._clock, self._age + min(text.turns, 32)

    def _make_room(self, needed: int) -> None:
        if needed <= 0:
            return
        wanted = max(needed, self.capacity // EVICTION_SHARE)
        while wanted > 0:
            idle = [(text.worth, text.last_used, number) for number, text in self.texts.items() if not text.users]
            if not idle:
                break
            number = min(idle)[2]
            text = self.texts[number]
            freed = min(wanted, text.pages)
            self._age = max(self._age, text.worth)
            text.pages -= freed
            # Whole pages are left.
            system = self.systems[text.system]
            text.length = min(text.length, (text.pages + system.pages) * self.page_tokens)
            if not text.pages:
                del self.texts[number]
                system.texts.discard(number)
            self._free(freed)
            wanted -= freed
            needed -= freed
        for number in [number for number, system in self.systems.items() if not system.texts]:
            if needed <= 0:
                return
            pages = self.systems.pop(number).pages
            self._free(pages)
            needed -= pages
        if needed > 0:
            raise ValueError(f"{needed} pages are missing though a request was admitted")

    def _free(self, pages: int) -> None:
        self.used_pages -= pages
        self.evicted_pages += pages
