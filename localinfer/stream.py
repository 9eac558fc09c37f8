"""The handle of one generation that callers hold: its events, its result, and its end."""

from collections.abc import Iterator

from localinfer.closing import Closing
from localinfer.completion import Completion, Stats, StreamEvent
from localinfer.text_generation import TextGeneration


class TextStream(Closing, Iterator[StreamEvent]):
    """A generation in progress: iterate for its events, or take its `result`.

    Any thread may cancel or close it, and ask for its figures. One thread reads it at a time; a second one that does
    meanwhile gets a RequestError. Leaving a `with` block closes it.
    """

    def __init__(self, generation: TextGeneration) -> None:
        self._generation = generation

    @property
    def stats(self) -> Stats:
        """The numbers so far; final once the stream has ended or was closed. Any thread may ask."""
        return self._generation.stats

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has. Any thread may ask."""
        return self._generation.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """How many tokens of prompt and completion the model has read so far, those from the cache included.

        Up to `prompt_tokens`, less those dropped by `context_shift`, it is the progress of the prefill. Any thread may
        ask, also after the end.
        """
        return self._generation.computed_tokens

    def __next__(self) -> StreamEvent:
        return next(self._generation)

    def result(self) -> Completion:
        """Read to the end, and return everything from the first token on, what was read before included.

        After `cancel` or `close`, by any thread, it waits for the step in progress at most, and gives what came until
        then, with the reason "cancelled", unless the generation had ended by itself. May be called again.
        Raises: what ended the generation; RequestError while another thread reads it.
        """
        generation = self._generation
        if generation.is_cancelled:
            generation.close()
            generation.has_ended.wait()
        elif not generation.has_ended.is_set():
            for _ in self:
                pass
        return generation.completion()

    def cancel(self) -> None:
        """End the stream from any thread, at any time: its reader gets one last event, of reason "cancelled".

        The step in progress is finished, of a long prompt a chunk, and what was computed stays in the cache. Nothing
        happens if the stream has ended by itself. May be called again.
        """
        self._generation.cancel()

    def close(self) -> None:
        """End the stream from any thread, and read no more of it; what it computed stays in the cache.

        A thread that is waiting for an event gets one last event, as after `cancel`. May be called again.
        """
        self._generation.close()

    def __del__(self) -> None:
        self._generation.leave()
