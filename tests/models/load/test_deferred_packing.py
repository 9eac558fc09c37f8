"""A first batch before matrices are packed: the same bits as after, whatever comes between, no crash by the file."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.kernels.cpu import deferred_packing, guard
from localinfer.kernels.cpu.deferred_packing import DeferredPacking
from localinfer.kernels.cpu.memory import aligned_zeros
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.load.loader import Model, load_model
from localinfer.models.load.weights import DEFERRED_TYPES
from localinfer.quant.formats.types import TensorType
from tests.models.load.test_weight_types import TOKEN_IDS, write_model
from tests.models.small_models import write_small_mixture

pytestmark = pytest.mark.skipif(guard.IS_ON or not deferred_packing.can_defer(), reason="packs first here")
PARTS = (slice(0, 38), slice(38, 39), slice(39, 41))
"""Rows of the batches of one text. The model's output matrix has 300 rows: its last tile is not whole."""


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one to three tiles, and a thread that leaves all to the batches."""
    monkeypatch.setattr(deferred_packing, "PIECE_BYTES", 48 * 550)
    monkeypatch.setattr(deferred_packing, "_STEP_PIECES", 3)
    monkeypatch.setattr(deferred_packing, "_IDLE_SECONDS", 3600.0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[TensorType, Path]:
    found = {type: tmp_path_factory.mktemp("models") / f"{type.name}.gguf" for type in DEFERRED_TYPES}
    for type, path in found.items():
        write_model(path, type)
    return found


class Run:
    """Batches of a text on a model that is loaded and closed by the test."""

    def __init__(self, path: Path, threads: int = 1, *, defers: bool = True) -> None:
        self.model: Model = load_model(path, threads=threads, defers_packing=defers, context_length=128)
        assert isinstance(self.model.program, CpuProgram)
        self.program = self.model.program
        layout = self.model.kv_layout
        size = layout.page_bytes
        self._memory = aligned_zeros(4 * size)
        self._pages = self._memory.ctypes.data + size * np.arange(4, dtype=np.int64)
        self._vocab = self.model.config.vocab_size

    @property
    def deferred(self) -> DeferredPacking:
        assert self.program.deferred is not None
        return self.program.deferred

    def batch(self, part: slice) -> Batch:
        ids = TOKEN_IDS[part] % self._vocab
        rows = np.arange(len(ids), dtype=np.int32)
        return Batch(ids, [Segment(part.start, len(ids), self._pages)], rows)

    def logits(self, parts: Sequence[slice] = PARTS) -> list[NDArray[np.float32]]:
        return [self.program.run(self.batch(part)).copy() for part in parts]


def same(found: list[NDArray[np.float32]], wanted: list[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True)) and bool(found[0].any())


def packed_first(path: Path) -> list[NDArray[np.float32]]:
    run = Run(path, defers=False)
    assert run.program.deferred is None
    with_all = run.logits()
    run.model.close()
    return with_all


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("type", DEFERRED_TYPES, ids=lambda type: type.name)
def test_first_batches_have_the_bits_of_packed_matrices(
    type: TensorType, threads: int, paths: dict[TensorType, Path]
) -> None:
    run = Run(paths[type], threads)
    weights = run.deferred._matrices
    assert len(weights) == 15 and not any(one.packed.data.any() for one in weights)
    first = run.logits(PARTS[:1])
    assert not run.deferred.is_done and not any(one.packed.data.any() for one in weights)
    later = run.logits(PARTS[1:])
    assert run.program.deferred is None and all(one.packed.data.any() for one in weights)
    assert same(first + later, packed_first(paths[type]))
    run.model.close()


def test_experts_are_packed_first_and_the_rest_is_not(tmp_path: Path) -> None:
    path = write_small_mixture(tmp_path / "mixture.gguf")
    run = Run(path, 2)
    assert not any("exps" in one.name for one in run.deferred._matrices)
    assert same(run.logits(), packed_first(path))
    run.model.close()


def leave(run: Run) -> None:
    """Leave the first batch half done."""
    assert run.program.run_abortable(run.batch(PARTS[0]), lambda done: done > 0.4, least_rows=1) is None


def interrupt(run: Run) -> None:
    """Compute the first batch, and let Ctrl-C come while matrices are packed by the next."""
    run.logits(PARTS[:1])
    steps, step = [0], run.deferred._step

    def interrupted(*given: object) -> None:
        step(*given)  # type: ignore[arg-type]
        steps[0] += 1
        if steps[0] == 2:
            raise KeyboardInterrupt

    run.deferred._step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.logits(PARTS[1:2])
    assert not run.deferred.is_done


def write_another(run: Run) -> None:
    """Write another program over the same weights, which may run at once."""
    program = run.model.text_program(Pooling.LAST)
    assert run.deferred.is_done
    program.run(run.batch(PARTS[0]))


def run_operations(run: Run) -> None:
    """Measure the model's ops after its first batch."""
    run.logits(PARTS[:1])
    run.program.run_operations(0, len(run.program.operations()))


@pytest.mark.parametrize("happens", [leave, interrupt, write_another, run_operations])
def test_what_comes_between_changes_no_bit(happens: Callable[[Run], None], paths: dict[TensorType, Path]) -> None:
    run = Run(paths[TensorType.F16], 2)
    happens(run)
    assert same(run.logits(), packed_first(paths[TensorType.F16])) and run.program.deferred is None
    run.model.close()


@pytest.mark.parametrize("batches", [0, 1])
def test_a_thread_packs_while_no_batch_runs(
    batches: int, paths: dict[TensorType, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_packing, "_IDLE_SECONDS", 0.01 if not batches else 0.3)
    run = Run(paths[TensorType.Q8_0], 2)
    deferred = run.deferred
    first = run.logits(PARTS[:batches])
    until = time.monotonic() + 60
    while not deferred.is_done and time.monotonic() < until:
        time.sleep(0.01)
    assert deferred.is_done
    assert same(first + run.logits(PARTS[batches:]), packed_first(paths[TensorType.Q8_0]))
    run.model.close()


def test_closing_ends_the_thread(paths: dict[TensorType, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_packing, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(DeferredPacking, "_step", lambda *_: time.sleep(0.001))
    run = Run(paths[TensorType.F16])
    thread = run.deferred._thread
    assert thread is not None and thread.is_alive()
    run.model.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_file_that_shrinks_is_an_error_of_every_batch_and_not_the_end(
    when: str, paths: dict[TensorType, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(paths[TensorType.BF16], tmp_path))
    run = Run(path, 2)

    def cut(done: float = 0.0) -> bool:
        # Its last pages are not there any more: a map of them would be a SIGBUS.
        os.truncate(path, 4096)
        return False

    if when == "after":
        run.logits(PARTS[:1])
    if when == "within":
        with pytest.raises(CorruptFileError, match=r"shrank .* restore the file and load the model again"):
            run.program.run_abortable(run.batch(PARTS[0]), cut, least_rows=1)
    else:
        cut()
    for part in PARTS:
        with pytest.raises(CorruptFileError, match=r"shrank .* restore the file and load the model again"):
            run.logits([part])
    run.model.close()


def test_an_error_of_the_disk_is_reported(paths: dict[TensorType, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(paths[TensorType.F16])
    place = deferred_packing.READ_FILE.fields.index("descriptor")
    for words in run.deferred._pieces.kept:
        if words.shape[1] == len(deferred_packing.READ_FILE.fields):
            words[:, place] = -1
    with pytest.raises(CorruptFileError, match="load the model again"):
        run.logits(PARTS[:1])
    run.model.close()
