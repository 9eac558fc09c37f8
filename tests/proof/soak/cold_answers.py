"""What the demo model answers where nothing is cached: what every restored answer is compared with."""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import localinfer
from localinfer.types import Closing

_SENTENCES = """Once upon a time there was a little dog named Tim.|The sun was warm and the garden was full of flowers.
He found a red ball under the old tree.|His friend, a small cat, wanted to play too.|They ran to the river and back.
Suddenly it began to rain, and the dog was afraid.|"Do not worry," said the cat, "the rain will stop soon."
A kind girl opened the door of her house.|She gave them milk and a soft blanket.|In the evening they saw many stars.
The next day the ball was gone.|They looked behind the house, under the bed and in the kitchen.
A bird had seen where the ball was.|It was in the nest of a big black crow.|Tim asked the crow to give it back."""
SENTENCES = tuple(sentence for line in _SENTENCES.splitlines() for sentence in line.split("|"))
QUESTIONS = (
    "Tell me a story about a little dog that finds a red ball in the garden.",
    "And then?",
    "Tell me more about the cat.",
    "What did the bird say?",
    "How does it end?",
)
MOST_TURNS = 4


class Answer(NamedTuple):
    """Ids, text and log probabilities of a reply; equal only if all bits are."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, completion: localinfer.Completion) -> "Answer":
        logprobs = tuple(one.logprob for one in completion.logprobs or ())
        return cls(tuple(completion.token_ids), completion.text, logprobs)


def draw_prompt(random: Random) -> str:
    """A text of one to twelve sentences; many begin alike, and there are few enough that they come again."""
    story = Random(random.randrange(6))
    sentences = [story.choice(SENTENCES) for _ in range(12)]
    return " ".join(sentences[: random.randrange(1, 13)])


class ColdAnswers(Closing):
    """Answers of a model of which nothing is cached, each computed once."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._llm = localinfer.load(model, threads=1, speculation=None, may_measure=False, **options)
        self._known: dict[str, Answer] = {}

    @property
    def llm(self) -> localinfer.LLM:
        """The model itself."""
        return self._llm

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """The completion of a text."""
        asked = prompt if isinstance(prompt, str) else list(prompt)
        return self._once([asked, options], lambda: self._llm.complete(prompt, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """The reply to messages."""
        return self._once([list(messages), options], lambda: self._llm.chat(messages, **options))

    def close(self) -> None:
        """Unload the model."""
        self._llm.close()

    def _once(self, asked: object, ask: Callable[[], localinfer.Completion]) -> Answer:
        key = json.dumps(asked, sort_keys=True)
        if key not in self._known:
            self._llm.clear_cache()
            self._known[key] = Answer.of(ask())
        return self._known[key]
