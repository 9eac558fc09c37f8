"""A load that is cancelled ends where it is, at every stage, and leaves nothing of the model."""

import gc
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import localinfer
from localinfer.errors import LoadCancelledError, LocalinferError, RequestError
from localinfer.llm import LLM
from localinfer.loading import drafters, imports
from localinfer.loading.options import model_path
from localinfer.models.load import threads
from localinfer.models.load.weights import CpuWeights
from localinfer.quant.formats.types import TensorType
from tests.support.threads import leave_out_present, own_threads
from tests.support.typed_models import make_model

STAGES = (
    "reading the header",
    "reading the vocabulary",
    "linking kernels",
    "loading weights (MB)",
    threads.STAGE,
    drafters.STAGE,
    "getting ready to answer",
)
DRAFT_STAGE = "measuring the draft model"


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load measures, and remembers nothing."""
    for module in (threads, drafters):
        monkeypatch.setattr(module, "get_measurement", lambda *_: None)
        monkeypatch.setattr(module, "put_measurement", lambda *_, **__: None)
    monkeypatch.setattr(drafters, "is_postponed", lambda *_: False)
    monkeypatch.setattr("localinfer.models.load.loader.available_threads", lambda: 2)


def reports(**options: Any) -> list[tuple[str, int, int]]:
    """Everything that a load reports."""
    told: list[tuple[str, int, int]] = []
    localinfer.load(**options, progress=lambda *words: told.append(words)).close()
    return told


@pytest.fixture(autouse=True, scope="module")
def threads_of_others() -> None:
    leave_out_present()


def leftovers(path: Path) -> tuple[list[str], list[str], list[str], list[int]]:
    """Threads of the package, open files and maps of the model, and child processes."""
    process = psutil.Process()
    maps = process.memory_maps() if hasattr(process, "memory_maps") else []
    mapped = [one.path for one in maps if one.path == str(path)]
    files = [one.path for one in process.open_files() if one.path == str(path)]
    own = [thread.name for thread in own_threads(lambda name: name.startswith("localinfer"))]
    return own, files, mapped, [child.pid for child in process.children()]


def models() -> list[object]:
    """Models and weights that are alive, those of other tests included."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (CpuWeights, LLM)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model under a name of its own, whose maps no other test has."""
    path = tmp_path_factory.mktemp("model") / "cancelled.gguf"
    shutil.copyfile(model_path(None), path)
    yield path


def cancel_at(stage: str, number: int, **options: Any) -> LoadCancelledError:
    """Cancel a load when it reports a stage for the nth time, from 0."""
    cancel, count = threading.Event(), 0

    def progress(reported: str, done: int, total: int) -> None:
        nonlocal count
        assert not cancel.is_set(), "nothing is reported once it is cancelled"
        if reported == stage:
            if count == number:
                cancel.set()
            count += 1

    with pytest.raises(LoadCancelledError) as caught:
        localinfer.load(**options, progress=progress, cancel=cancel)
    return caught.value


def test_every_stage_has_a_name_and_a_fraction(never_measured: None, model: Path) -> None:
    told = reports(model=model)
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    # The first loads of a process import modules, and compile kernels.
    assert [stage for stage in stages if not stage.startswith(("compiling", imports.STAGE))] == [
        *STAGES[:2],
        STAGES[3],
        STAGES[2],
        *STAGES[4:],
    ]
    assert all(0 <= done <= total and total > 0 for _, done, total in told)


def test_cancelling_ends_every_stage_and_leaves_nothing(never_measured: None, model: Path, tmp_path: Path) -> None:
    options = {"model": model, "draft": model, "disk_cache": True, "disk_cache_folder": tmp_path}
    told, empty = [stage for stage, _, _ in reports(**options)], leftovers(model)
    assert empty == ([], [], [], empty[3])
    kept, num_models = [], len(models())
    # A draft model is loaded, and both are measured, by the same stages once more, which a later report is of.
    for index, stage in enumerate((*STAGES, DRAFT_STAGE)):
        error = cancel_at(stage, min(3, told.count(stage) - 1) * (index % 2), **options)
        assert "loading was cancelled while" in str(error)
        # An app may keep the error: no frame of it holds anything.
        kept.append(error)
        assert leftovers(model) == empty
    assert len(models()) <= num_models
    assert kept


def test_an_event_that_is_set_already_loads_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuWeights, "linear", lambda *_: pytest.fail("weights are read"))
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(LoadCancelledError, match="reading the header"):
        localinfer.load(model, cancel=cancel)


def test_an_event_that_is_set_too_late_closes_the_model(model: Path) -> None:
    told, before = reports(model=model, threads=1), leftovers(model)
    assert told[-1] == ("getting ready to answer", 1, 1)
    cancel = threading.Event()

    def progress(*words: object) -> None:
        if words == told[-1]:
            cancel.set()

    with pytest.raises(LoadCancelledError):
        localinfer.load(model, threads=1, progress=progress, cancel=cancel)
    assert leftovers(model) == before


def test_conversions_are_reported_in_between(tmp_path: Path) -> None:
    """Types that no kernel reads directly are rewritten, and packed of memory."""
    path = make_model(TensorType.TQ1_0).write(tmp_path / "ternary.gguf")
    told = reports(model=path, threads=1, device="cpu", speculation=None)
    stage = "converting TQ1_0 weights (MB)"
    assert len([words for words in told if words[0] == stage]) > 2
    before = leftovers(path)
    cancel_at(stage, 1, model=path, threads=1, device="cpu", speculation=None)
    assert leftovers(path) == before


def test_what_progress_raises_ends_the_load_unchanged(model: Path) -> None:
    class Stop(Exception):
        """An app's own."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "linking kernels":
            raise Stop

    before = leftovers(model)
    with pytest.raises(Stop):
        localinfer.load(model, threads=1, progress=progress, cancel=threading.Event())
    assert leftovers(model) == before


def test_only_an_event_cancels() -> None:
    with pytest.raises(RequestError, match="cancel is True; give a threading.Event, or None"):
        localinfer.load(cancel=True)  # type: ignore[arg-type]
    assert issubclass(LoadCancelledError, LocalinferError)
