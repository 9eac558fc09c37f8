"""When a process is killed: at any time of its life, or right after one of the changes that it makes to its files."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.proof.soak.folder_watch import FolderWatch

_SHARE_OF_WRITES = 0.6
_LATEST_AFTER_WRITE_SECONDS = 0.002
_WEIGHT_OF_LAST = 0.2
_LOOK_SECONDS = 0.05


@dataclass
class Life:
    """How long a process lives that ends by itself, in seconds and in changes of files, as measured until now."""

    seconds: float
    num_changes: float

    def measured(self, seconds: float, num_changes: int) -> None:
        """Take over another life that nothing cut short."""
        self.seconds += _WEIGHT_OF_LAST * (seconds - self.seconds)
        self.num_changes += _WEIGHT_OF_LAST * (num_changes - self.num_changes)


@dataclass(frozen=True)
class Moment:
    """After so many seconds, or after so many changes and some more seconds."""

    seconds: float
    num_changes: int | None = None

    @classmethod
    def draw(cls, random: Random, life: Life) -> "Moment":
        """A moment of a life: its whole time, or all changes, are equally likely."""
        if life.num_changes >= 1 and random.random() < _SHARE_OF_WRITES:
            after = random.choice((0.0, random.uniform(0, _LATEST_AFTER_WRITE_SECONDS)))
            return cls(after, random.randint(1, max(1, round(life.num_changes))))
        return cls(random.uniform(0, life.seconds))

    def wait(self, watch: FolderWatch, began: float, longest: float, has_ended: Callable[[], object]) -> None:
        """Wait for it, at most so many seconds after the beginning, a moment of `time.monotonic`, or until the end."""
        last = began + (self.seconds if self.num_changes is None else longest)
        while (left := last - time.monotonic()) > 0 and not has_ended():
            if watch.wait(time.monotonic() + min(left, _LOOK_SECONDS), self.num_changes):
                time.sleep(self.seconds)
                return

    def __str__(self) -> str:
        if self.num_changes is None:
            return f"{self.seconds:.3f} s after the start"
        return f"{1e3 * self.seconds:.1f} ms after change {self.num_changes} of its files"
