"""The disk under the engine: what was computed before a restart, or was evicted, is not computed again."""

import itertools
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from localinfer.errors import ClosedError, RequestError, SessionFileError, SessionMismatchError
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from localinfer.loading.load import load
from localinfer.storage import page_store
from localinfer.storage.fingerprint import Fingerprint
from localinfer.storage.page_store import Rejection
from localinfer.storage.prompt_cache import DiskCache, DiskOptions, describe_differences
from tests.engine.fakes import PAGE_BYTES, FakeModel, fake_model
from tests.kernels.subprocesses import finish, start
from tests.support.inside import engine_of
from tests.support.limits import seconds, wait_until

WINDOWS = sys.platform == "win32"


@dataclass
class FakeIdentity:
    """An identity that is known at once, unless it is slow."""

    parts: dict[str, str] = field(default_factory=lambda: {"weights": "w", "key-value layout": "f16 1"})
    is_known: bool = True
    name: str = "fake.gguf"
    paths: tuple[Path, ...] = ()
    has_changed: bool = False

    def known(self) -> Fingerprint | None:
        return Fingerprint(self.parts) if self.is_known else None

    def compute(self, **_: object) -> Fingerprint:
        self.is_known = True
        return Fingerprint(self.parts)


def open_llm(folder: Path, *, model: FakeModel | None = None, identity: FakeIdentity | None = None, **options) -> LLM:
    disk = DiskOptions(folder / "conversations", options.pop("max_bytes", 1 << 20))
    identity = identity or FakeIdentity()
    return LLM(model or fake_model(), identity=identity, disk=disk, **options)  # type: ignore[arg-type]


def disk_of(llm: LLM) -> DiskCache:
    disk = llm._disk
    assert disk is not None
    return disk


def pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


PROMPT = [256, *b"how are you today?"]


def answer(llm: LLM, prompt: list[int], **options) -> Completion:
    return llm.complete(prompt, **{"temperature": 0, "max_tokens": 9, **options})


def cold(prompt: list[int], **options) -> Completion:
    return answer(LLM(fake_model()), prompt, **options)  # type: ignore[arg-type]


def test_restart_computes_only_what_is_new(tmp_path: Path):
    with open_llm(tmp_path) as llm:
        first = answer(llm, PROMPT)
    prompt = [*PROMPT, *first.token_ids, 1, 2, 3]
    model = fake_model()
    with open_llm(tmp_path, model=model) as llm:
        second = answer(llm, prompt)
    # The last token that was sampled has never been computed.
    assert second.stats.cached_tokens == len(PROMPT) + len(first.token_ids) - 1
    assert sum(model.program.batch_sizes) == 1 + 3 + 8
    assert second.token_ids == cold(prompt).token_ids


@pytest.mark.parametrize("length", range(2, 24))
def test_restart_with_any_beginning_gives_the_same_text_as_cold(tmp_path: Path, length: int):
    with open_llm(tmp_path) as llm:
        answer(llm, PROMPT)
    prompt = [*PROMPT[:length], 7, 8]
    with open_llm(tmp_path) as llm:
        again = answer(llm, prompt)
    assert again.stats.cached_tokens == min(length, len(PROMPT))
    assert again.token_ids == cold(prompt).token_ids


def test_what_was_evicted_comes_back_from_disk(tmp_path: Path):
    prompts = [[256, *range(start, start + 30)] for start in (0, 50, 100)]
    with open_llm(tmp_path, kv_memory=12 * PAGE_BYTES) as llm:
        for prompt in prompts:
            answer(llm, prompt)
            disk_of(llm).flush()
        again = answer(llm, prompts[0])
    assert again.stats.cached_tokens == 30
    assert again.token_ids == cold(prompts[0]).token_ids


def test_memory_without_room_for_what_is_on_disk_changes_nothing(tmp_path: Path):
    with open_llm(tmp_path) as llm:
        answer(llm, PROMPT)
    with open_llm(tmp_path, kv_memory=12 * PAGE_BYTES) as llm:
        with llm.stream([256, *range(40)], temperature=0, max_tokens=7) as stream:
            next(stream)
            assert answer(llm, PROMPT).token_ids == cold(PROMPT).token_ids
            assert len(list(stream)) == 6
        again = answer(llm, PROMPT)
    assert again.stats.cached_tokens == len(PROMPT) - 1
    assert again.token_ids == cold(PROMPT).token_ids


def test_idle_conversation_is_written_without_being_asked(tmp_path: Path):
    llm = LLM(fake_model(), identity=FakeIdentity())  # type: ignore[arg-type]
    disk = DiskCache(engine_of(llm), FakeIdentity(), DiskOptions(tmp_path), idle_seconds=0.01)  # type: ignore[arg-type]
    answer(llm, PROMPT)
    assert wait_until(lambda: len(pages(tmp_path)) == 7)
    assert wait_until(lambda: "localinfer-write-behind" not in {thread.name for thread in threading.enumerate()})
    answer(llm, [*PROMPT, 5, 5, 5, 5])
    assert wait_until(lambda: len(pages(tmp_path)) > 7)
    disk.close()
    llm.close()


def test_conversations_are_written_though_others_go_idle_all_the_time(tmp_path: Path):
    llm = LLM(fake_model(), identity=FakeIdentity())  # type: ignore[arg-type]
    options, moment = DiskOptions(tmp_path), seconds(0.02)
    disk = DiskCache(engine_of(llm), FakeIdentity(), options, idle_seconds=moment)  # type: ignore[arg-type]
    others = itertools.count()
    assert wait_until(lambda: answer(llm, [256, next(others) % 200, *PROMPT]) and pages(tmp_path))
    assert next(others) > 10
    disk.close()
    llm.close()


def test_fingerprint_that_takes_long_is_computed_when_there_is_something_to_write(tmp_path: Path):
    identity = FakeIdentity(is_known=False)
    with open_llm(tmp_path, identity=identity) as llm:
        answer(llm, PROMPT)
        assert not identity.is_known
    assert identity.is_known and pages(tmp_path)


def test_damaged_page_is_computed_again_and_told(tmp_path: Path):
    with open_llm(tmp_path) as llm:
        answer(llm, PROMPT)
    for path in pages(tmp_path):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with open_llm(tmp_path) as llm:
        again = answer(llm, PROMPT)
        assert disk_of(llm).counters.rejected == {Rejection.ALTERED: 1}
    assert again.stats.cached_tokens == 0
    assert "does not match its checksum, and was deleted" in (again.stats.cache_miss or "")
    assert again.token_ids == cold(PROMPT).token_ids
    with open_llm(tmp_path) as llm:
        assert answer(llm, PROMPT).stats.cached_tokens == 4  # the next page was damaged too


def test_other_settings_are_not_used_and_are_named(tmp_path: Path):
    with open_llm(tmp_path) as llm:
        answer(llm, PROMPT)
    other = FakeIdentity({"weights": "w", "key-value layout": "f32 2"})
    with open_llm(tmp_path, identity=other) as llm:
        again = answer(llm, PROMPT)
    assert again.stats.cached_tokens == 0
    assert again.stats.cache_miss == "what is stored cannot be used: it was stored with different key-value layout"
    assert describe_differences({"a": "1", "b": "2"}, {"a": "2", "b": "3", "c": "4"}) == (
        "it was stored with different a, b, c"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"parts": 1}', "\xff", "[" * 100_000])
def test_damaged_description_of_others_is_left_alone(tmp_path: Path, text: str):
    with open_llm(tmp_path) as llm:
        answer(llm, PROMPT)
    (description,) = tmp_path.rglob("about.json")
    description.write_text(text, "latin-1")
    with open_llm(tmp_path, identity=FakeIdentity({"weights": "x"})) as llm:
        assert answer(llm, PROMPT).stats.cached_tokens == 0


@pytest.mark.skipif(WINDOWS, reason="modes mean something else there")
def test_folder_that_others_can_write_is_refused_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "conversations"
    folder.mkdir()
    folder.chmod(0o777)
    with open_llm(tmp_path) as llm:
        assert answer(llm, PROMPT).token_ids == cold(PROMPT).token_ids
    assert "can be written by other users" in caplog.text
    assert not pages(tmp_path)


def test_file_in_place_of_the_folder_is_refused_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "conversations").write_text("a file")
    with open_llm(tmp_path) as llm:
        answer(llm, PROMPT)
    assert "prompts are not cached on disk" in caplog.text


def test_disk_that_fails_is_told_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_store, "write_all", full)
    with open_llm(tmp_path) as llm, caplog.at_level(logging.WARNING):
        assert answer(llm, PROMPT).token_ids == cold(PROMPT).token_ids
    assert "No space left on device" in caplog.text
    assert not pages(tmp_path)


def test_closing_stops_writing_after_its_time(tmp_path: Path):
    llm = open_llm(tmp_path)
    answer(llm, list(range(60)), max_tokens=1)
    disk_of(llm).close(seconds=0.0)
    llm.close()
    assert len(pages(tmp_path)) < 15


def test_closing_twice_and_using_it_afterwards(tmp_path: Path):
    llm = open_llm(tmp_path)
    answer(llm, PROMPT)
    llm.close()
    llm.close()
    with pytest.raises(ClosedError):
        answer(llm, PROMPT)


def test_generations_of_threads_and_writing_do_not_disturb_each_other(tmp_path: Path):
    wrong: list[object] = []

    def talk(number: int) -> None:
        for turn in range(6):
            prompt = [256, number, *range(turn * 3)]
            if answer(llm, prompt).token_ids != expected[tuple(prompt)]:
                wrong.append(prompt)

    prompts = [[256, number, *range(turn * 3)] for number in range(4) for turn in range(6)]
    expected = {tuple(prompt): cold(prompt).token_ids for prompt in prompts}
    with open_llm(tmp_path, kv_memory=40 * PAGE_BYTES, max_bytes=30 * 400) as llm:
        disk_of(llm)._behind.idle_seconds = 0.0
        threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert disk_of(llm).counters.pages_written and not disk_of(llm).counters.rejected


_LEAVE = """
import sys
from pathlib import Path
from tests.storage.test_prompt_cache import PROMPT, answer, open_llm
llm = open_llm(Path({folder!r}))
answer(llm, PROMPT)
{end}
"""


def test_end_of_the_process_writes_what_is_left(tmp_path: Path):
    finish(start(_LEAVE.format(folder=str(tmp_path), end="")))
    with open_llm(tmp_path) as llm:
        assert answer(llm, PROMPT).stats.cached_tokens == len(PROMPT) - 1


def test_killed_process_leaves_what_went_idle(tmp_path: Path):
    process = start(_LEAVE.format(folder=str(tmp_path), end="sys.stdin.read()"))
    assert wait_until(lambda: len(pages(tmp_path)) == 7)
    os.kill(process.pid, signal.SIGTERM if WINDOWS else signal.SIGKILL)
    process.communicate()
    model = fake_model()
    with open_llm(tmp_path, model=model) as llm:
        again = answer(llm, [*PROMPT, 3, 4])
    assert again.stats.cached_tokens == len(PROMPT)
    assert again.token_ids == cold([*PROMPT, 3, 4]).token_ids


def plain_llm(**options) -> LLM:
    identity = options.pop("identity", None) or FakeIdentity()
    return LLM(options.pop("model", None) or fake_model(), identity=identity, **options)  # type: ignore[arg-type]


def test_saved_session_goes_on_elsewhere_with_the_same_text(tmp_path: Path):
    with plain_llm() as llm:
        first = answer(llm, PROMPT)
        num_tokens = llm.save_session(tmp_path / "session")
    assert num_tokens == len(PROMPT) + len(first.token_ids) - 1
    model = fake_model()
    with plain_llm(model=model) as llm:
        known = llm.load_session(tmp_path / "session")
        assert known == [*PROMPT, *first.token_ids[:-1]]
        second = answer(llm, [*known, 1, 2])
        assert second.stats.cached_tokens == len(known)
        assert sum(model.program.batch_sizes) == 2 + 8
        assert second.token_ids == cold([*known, 1, 2]).token_ids
        assert llm.save_session(tmp_path / "again", known) == len(known)


def test_session_of_another_model_is_refused(tmp_path: Path):
    with plain_llm() as llm:
        answer(llm, PROMPT)
        llm.save_session(tmp_path / "session")
    with plain_llm(identity=FakeIdentity({"weights": "v", "key-value layout": "f16 1"})) as llm:
        with pytest.raises(SessionMismatchError, match="weights: w in the file, v here"):
            llm.load_session(tmp_path / "session")
        assert answer(llm, PROMPT).stats.cached_tokens == 0


def test_damaged_session_changes_nothing(tmp_path: Path):
    with plain_llm() as llm:
        answer(llm, PROMPT)
        llm.save_session(tmp_path / "session")
    content = bytearray((tmp_path / "session").read_bytes())
    content[-5] ^= 1
    (tmp_path / "session").write_bytes(content)
    with plain_llm() as llm:
        with pytest.raises(SessionFileError, match="does not match its checksum"):
            llm.load_session(tmp_path / "session")
        assert engine_of(llm).pool.num_free_pages == engine_of(llm).pool.num_pages
        assert answer(llm, PROMPT).stats.cached_tokens == 0


def test_sessions_that_cannot_be_are_errors(tmp_path: Path):
    with plain_llm() as llm:
        with pytest.raises(SessionFileError, match="no conversation to save yet"):
            llm.save_session(tmp_path / "session")
        answer(llm, PROMPT)
        with pytest.raises(SessionFileError, match="nothing of this conversation"):
            llm.save_session(tmp_path / "session", [1, 2, 3])
        with pytest.raises(RequestError, match="not in the vocabulary"):
            llm.save_session(tmp_path / "session", [9999])
        with pytest.raises(SessionFileError, match="cannot be written"):
            llm.save_session(tmp_path / "no" / "session")
        llm.save_session(tmp_path / "session")
    with pytest.raises(ClosedError):
        llm.save_session(tmp_path / "session")
    with plain_llm(model=fake_model(context_length=20)) as llm, pytest.raises(SessionMismatchError, match="20"):
        llm.load_session(tmp_path / "session")
    with LLM(fake_model()) as llm, pytest.raises(SessionFileError, match="told apart"):  # type: ignore[arg-type]
        llm.load_session(tmp_path / "session")


@pytest.mark.parametrize("value", [-1, 1.5, "yes", None])
def test_disk_cache_that_has_no_meaning_is_refused(value: object):
    with pytest.raises(RequestError, match="disk_cache"):
        load(disk_cache=value)  # type: ignore[arg-type]


def test_demo_model_goes_on_after_a_restart_with_the_same_text(tmp_path: Path):
    messages = [{"role": "user", "content": "Tell me a story about a dog and a very big red ball."}]
    options = {"temperature": 0, "max_tokens": 40}
    with load() as llm:
        expected = llm.chat(messages, **options)
    with load(disk_cache=True, disk_cache_folder=tmp_path) as llm:
        first = llm.chat(messages, **options)
        llm.save_session(tmp_path / "session")
    with load(disk_cache=1 << 30, disk_cache_folder=tmp_path) as llm:
        second = llm.chat(messages, **options)
    with load() as llm:
        llm.load_session(tmp_path / "session")
        third = llm.chat(messages, **options)
    with load(kv_type="f32") as llm, pytest.raises(SessionMismatchError, match="key-value layout: f16"):
        llm.load_session(tmp_path / "session")
    with load(kv_type="f32", disk_cache=True, disk_cache_folder=tmp_path) as llm:
        other = llm.chat(messages, **options)
    assert expected.text == first.text == second.text == third.text
    for completion in (second, third):
        assert completion.stats.cached_tokens == completion.stats.prompt_tokens - 1
    assert other.stats.cached_tokens == 0
    assert "different key-value layout" in (other.stats.cache_miss or "")
