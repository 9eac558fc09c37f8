"""Masks of grammars, computed by a thread of their own while the model computes the logits that they are for."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from localinfer.sampling.mask import GuidingMask, TokenIds


class MaskWorker:
    """One thread, begun with the first mask. Whoever has the turn may call."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def begin(self, jobs: Sequence[tuple[GuidingMask, TokenIds, int]]) -> None:
        """Begin to prepare masks: of each its history, and the first position that is asked for."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "localinfer-mask")
        for guide, history, position in jobs:
            self._begun.append(self._executor.submit(guide.prepare, history, position))

    def finish(self) -> None:
        """Wait for what was begun; what went wrong is told by the mask when it is asked."""
        while self._begun:
            self._begun[-1].exception()
            self._begun.pop()

    def close(self) -> None:
        """End the thread; may be called again."""
        if self._executor is not None:
            self._executor.shutdown()
