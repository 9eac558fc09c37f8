"""Prompts that one model computes and writes at once, and another reads beside what it generates: the same bits."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import RequestError
from localinfer.generation.kv_transfer import Prefilled
from localinfer.llm import LLM
from localinfer.storage import restore as restoring
from localinfer.storage.restore import stored_tokens
from tests.models.arch_models import build_model
from tests.support.inside import engine_of

KINDS = {
    "dense": "llama-gqa",
    "sliding window": "gemma3-gqa",
    "mixture with windows": "gpt-oss-gqa",
    "mixture": "qwen3moe-gqa",
    "latent attention": "mistral4-mla",
    "shared layers": "gemma4-e2b",
    "hybrid": "qwen3next-hybrid",
    "hybrid with draft layers": "qwen35-mtp",
    "convolutions": "lfm2-hybrid",
    "recurrent": "mamba2-recurrent",
}
OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8, "seed": 5, "logprobs": 4}


def load(path: Path | None, folder: Path | None, **options: Any) -> LLM:
    more: dict[str, Any] = {} if folder is None else {"disk_cache": True, "disk_cache_folder": folder}
    return localinfer.load(path, **{"threads": 1, "kv_memory": 64 << 20, **more, **options})


def prompt_of(llm: LLM, count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(3, llm.vocab_size, count).astype(np.int32)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_continues_what_another_process_computed(kind: str, tmp_path: Path) -> None:
    path = build_model(tmp_path, KINDS[kind]).path
    with load(path, None) as alone:
        whole = prompt_of(alone, 160)
        wanted = [alone.complete(whole[:length], **OPTIONS) for length in (100, 160)]
    with load(path, tmp_path) as prefill, load(path, tmp_path) as decode:
        for turn, length in enumerate((100, 160)):
            ids = whole[:length]
            done = prefill.prefill(ids)
            assert done == Prefilled(length, done.cached_tokens, length - 1)
            # Of the second turn the beginning is in the memory of both.
            assert (done.cached_tokens > 0) == (turn > 0)
            assert decode.stored_tokens(ids) == length - 1
            assert decode.fetch_prompt(ids) == length - 1
            assert decode.cached_tokens(ids) == length - 1
            found = decode.complete(ids, **OPTIONS)
            assert found.stats.cached_tokens == length - 1
            assert (found.token_ids, found.logprobs) == (wanted[turn].token_ids, wanted[turn].logprobs)


NEAR = (0, 1, 2, 15, 16, 17, 40)
"""How many ids of a prompt follow where it parts from another one."""


@pytest.mark.parametrize("kind", ["hybrid", "hybrid with draft layers", "convolutions", "recurrent"])
def test_a_state_is_kept_where_a_handover_goes_on_however_near_another_one_is(kind: str, tmp_path: Path) -> None:
    path = build_model(tmp_path, KINDS[kind]).path
    with load(path, tmp_path) as prefill, load(path, tmp_path) as decode:
        base = prompt_of(prefill, 200)
        assert prefill.prefill(base[:150]).stored_tokens == 149
        for number, rest in enumerate(NEAR):
            others = (base[150 - rest : 150] + 1 + number) % (prefill.vocab_size - 3) + 3
            ids = np.concatenate((base[: 150 - rest], others, base[: number % 3 + 1]))
            done = prefill.prefill(ids)
            assert (done.stored_tokens, done.problem) == (ids.size - 1, None), rest
            assert decode.fetch_prompt(ids) >= ids.size - 1 - engine_of(decode)._cache.near_tokens


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder with the files of a prompt of the demo model, which must not be changed."""
    folder = tmp_path_factory.mktemp("filled")
    with load(None, folder) as llm:
        ids = prompt_of(llm, 300)
        llm.prefill(ids)
    return folder, ids


def test_a_salted_prompt_is_found_by_its_salt_alone(tmp_path: Path) -> None:
    from localinfer.engine.cache.block_hashes import salt_of

    with load(None, tmp_path) as prefill, load(None, tmp_path) as decode:
        ids = prompt_of(prefill, 100)
        prefill.prefill(ids, cache_salt="mine")
        assert (decode.cached_tokens(ids), decode.stored_tokens(ids)) == (0, 0)
        assert (decode.cached_tokens(ids, salt_of("mine")), decode.stored_tokens(ids, salt_of("mine"))) == (0, 99)
        assert decode.fetch_prompt(ids, salt_of("mine")) == 99
        assert decode.complete(ids, max_tokens=1, cache_salt="mine").stats.cached_tokens == 99
        assert decode.complete(ids, max_tokens=1).stats.cached_tokens == 0


def test_steps_are_taken_while_files_are_read(filled: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is read while the engine is held, and no more than some pages are copied then."""
    folder, ids = filled
    with load(None, folder) as llm:
        held: list[bool] = []
        pieces: list[int] = []
        restore, insert = restoring.DiskTier.restore, restoring._insert_piece

        def restored(self: Any, *arguments: Any) -> Any:
            free = engine_of(llm).scheduler.step_lock.try_acquire()
            held.append(not free)
            if free:
                engine_of(llm).scheduler.step_lock.release()
            return restore(self, *arguments)

        def inserted(cache: Any, piece: Any, *arguments: Any) -> bool:
            pieces.append(len(piece.pages))
            return insert(cache, piece, *arguments)

        monkeypatch.setattr(restoring.DiskTier, "restore", restored)
        monkeypatch.setattr(restoring.DiskTier, "pages_at_once", 3)
        monkeypatch.setattr(restoring, "_insert_piece", inserted)
        assert llm.fetch_prompt(ids) == 299
        assert not any(held)
        assert pieces == [3, 3, 3, 1]


def test_what_memory_has_no_room_for_is_read_at_admission(filled: tuple[Path, np.ndarray]) -> None:
    folder, ids = filled
    with load(None, folder) as roomy:
        page = engine_of(roomy).pool.page_bytes
        wanted = roomy.complete(ids, **OPTIONS)
    with load(None, folder, kv_memory=11 * page) as llm:
        with llm.stream(prompt_of(llm, 70), max_tokens=20, ignore_eos=True) as other:
            next(other)
            assert llm.fetch_prompt(ids) == 0
        found = llm.complete(ids, **OPTIONS)
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


@pytest.mark.parametrize("which", [0, 4, 9])
def test_a_damaged_file_ends_what_is_read(which: int, tmp_path: Path) -> None:
    with load(None, tmp_path) as prefill:
        ids = prompt_of(prefill, 300)
        prefill.prefill(ids)
        wanted = prefill.complete(ids, **OPTIONS)
    with load(None, tmp_path) as llm:
        tiers = llm._kv_transfer._tiers(b"")
        path = tiers.pages.find(ids[:-1]).pages[which].path
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert stored_tokens(engine_of(llm).pool, tiers, ids[:-1]) == 299
        assert llm.fetch_prompt(ids) == 32 * which
        assert not path.exists()
        found = llm.complete(ids, **OPTIONS)
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


def test_a_model_that_is_closed_meanwhile_is_left_alone(
    filled: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = filled
    llm = load(None, folder)
    pieces = restoring._pieces

    def closing(*arguments: Any) -> Any:
        for piece in pieces(*arguments):
            closer = threading.Thread(target=llm.close)
            closer.start()
            closer.join()
            yield piece

    monkeypatch.setattr(restoring, "_pieces", closing)
    with pytest.raises(localinfer.errors.ClosedError):
        llm.fetch_prompt(ids)


def test_without_a_disk_cache_nothing_can_be_handed_over() -> None:
    with load(None, None) as llm:
        for call in (llm.handover_fingerprint, lambda: llm.prefill([5, 6]), lambda: llm.stored_tokens(np.arange(3))):
            with pytest.raises(RequestError, match="disk_cache=True"):
                call()
