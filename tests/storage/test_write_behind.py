"""Writing behind in steps: by a thread, or by whom asks for the next one."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.storage import prompt_cache
from localinfer.storage.prompt_cache import IdleSequence, Steps, WriteBehind
from tests.proof.simulation.clock import Clock
from tests.support.limits import seconds


class Saved:
    """What was written, step by step."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.is_done = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, pending: Sequence[IdleSequence], *, is_behind: bool) -> Steps:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for token_ids, _ in pending:
            for token in token_ids:
                self.steps.append(f"{token}{'' if is_behind else ' at once'}")
                yield
        self.is_done.set()


def ids(*tokens: int, salt: bytes = NO_SALT) -> IdleSequence:
    return IdleSequence(np.array(tokens, np.int32), salt)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(prompt_cache, "time", clock)
    return clock


def test_steps_are_taken_once_a_sequence_is_idle(clock: Clock):
    saved = Saved()
    behind = WriteBehind(saved, 0.5, has_thread=False)
    behind.add(ids(1))
    behind.add(ids(1, 2))
    assert not behind.write_next()
    clock.advance(0.5)
    assert behind.write_next() and saved.steps == ["1"]
    while behind.write_next():
        pass
    assert saved.steps == ["1", "2"]


def test_a_beginning_of_another_salt_is_written_too(clock: Clock):
    behind = WriteBehind(saved := Saved(), 0.5, has_thread=False)
    behind.add(ids(1, salt=b"another"))
    behind.add(ids(1, 2))
    behind.write_all()
    assert saved.steps == ["1 at once", "1 at once", "2 at once"]


def test_others_that_go_idle_put_it_off_four_times_at_most(clock: Clock):
    behind = WriteBehind(saved := Saved(), 0.5, has_thread=False)
    for token in range(5):
        behind.add(ids(token))
        assert not behind.write_next()
        clock.advance(0.4)
    assert behind.write_next() and saved.steps == ["0"]


def test_what_was_begun_is_finished_before_the_rest_is_written(clock: Clock):
    behind = WriteBehind(saved := Saved(), 0.0, has_thread=False)
    behind.add(ids(1, 2))
    behind.write_next()
    behind.add(ids(3))
    behind.write_all()
    assert saved.steps == ["1", "2", "3 at once"]


def test_a_step_that_fails_does_not_end_writing(monkeypatch: pytest.MonkeyPatch):
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: failed.append(found.exc_type))
    behind = WriteBehind(saved := Saved(), 0.0, has_thread=True)
    saved.error = MemoryError()
    behind.add(ids(1))
    assert behind.join(seconds(10)) and failed == [MemoryError]
    behind.add(ids(2))
    assert saved.is_done.wait(seconds(10)) and saved.steps == ["2"]
    behind.stop()
    assert behind.join(seconds(10))
