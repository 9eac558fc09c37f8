"""What is compiled ahead is what a model needs, with a report of how far it is, and can be given up."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.errors import LoadCancelledError, RequestError
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.loading import warm_up as warming
from localinfer.loading.options import model_path
from localinfer.models.load.needed_kernels import needed_kernels

NEEDED = needed_kernels(model_path(None))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what would be compiled, of which the first three are missing."""
    names: list[str] = []
    missing = {kernel.name for kernel in NEEDED[:3]}
    monkeypatch.setattr(Kernel, "is_cached", property(lambda self: self.name not in missing - set(names)))

    def compile_ahead(kernels, progress) -> None:
        for done, kernel in enumerate(kernels):
            progress(f"compiling {kernel.name}", done, len(kernels))
            names.append(kernel.name)

    monkeypatch.setattr("localinfer.kernels.jit.compile_ahead.compile_ahead", compile_ahead)
    return names


def test_what_is_missing_is_compiled_and_told(compiled: list[str]) -> None:
    told: list[tuple[str, int, int]] = []
    done = localinfer.warm_up(device="cpu", progress=lambda *words: told.append(words))
    assert compiled == [kernel.name for kernel in NEEDED[:3]]
    assert (done.num_kernels, done.num_compiled) == (len(NEEDED), 3) and done.seconds > 0
    assert told[:2] == [(warming.STAGE, 0, 1), (warming.STAGE, 1, 1)]
    assert told[2:] == [(f"compiling {name}", index, 3) for index, name in enumerate(compiled)]
    assert localinfer.warm_up(device="cpu").num_compiled == 0


def test_it_can_be_given_up_and_keeps_what_there_is(compiled: list[str]) -> None:
    cancel = threading.Event()

    def progress(stage: str, done: int, total: int) -> None:
        if (done, total) == (1, 3):
            cancel.set()

    with pytest.raises(LoadCancelledError, match="what is compiled is kept"):
        localinfer.warm_up(device="cpu", progress=progress, cancel=cancel)
    assert compiled == [kernel.name for kernel in NEEDED[:2]]


@pytest.mark.parametrize(
    "options",
    [{"kv_type": "q9"}, {"device": "tpu"}, {"kv_window": 0}, {"cancel": 1}, {"progress": 1}, {"model": 5}],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        localinfer.warm_up(**options)  # type: ignore[arg-type]


def test_with_a_gpu_the_model_is_loaded_once_for_it(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[dict[str, object]] = []
    monkeypatch.setattr("localinfer.system.machine_limits.has_driver", lambda: True)
    monkeypatch.setattr(
        warming, "load", lambda path, **options: loads.append(options) or SimpleNamespace(close=lambda: None)
    )
    localinfer.warm_up(device="cpu")
    assert not loads
    localinfer.warm_up(kv_type="q8_0")
    assert [(one["device"], one["kv_type"]) for one in loads] == [("auto", "q8_0")]


def test_the_command_says_what_it_did(compiled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for said in (f"compiled 3 of {len(NEEDED)} kernels in ", f"all {len(NEEDED)} kernels are compiled\n"):
        assert main(["warmup", "--device", "cpu", "--no-config"]) == 0
        assert capsys.readouterr().out.startswith(said)
