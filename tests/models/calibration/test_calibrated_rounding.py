"""A whole model quantized by calibration: stopped and gone on with, and with other numbers of threads."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models import demo
from localinfer.models.calibration.run import calibration_sequences
from localinfer.models.calibration.scales import round_by_calibration
from localinfer.models.load.loader import load_tokenizer
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.methods.gptq import PreparedTensor
from localinfer.quant.methods.presets import ModelFacts, choose_types, find_preset
from localinfer.quant.methods.workers import Workers
from localinfer.quant.pipeline.quantize import PartialResults

MODEL = Path(demo.__file__).parent / "demo-f16.gguf"
TEXT = "Once upon a time there was a fox. He asked the bear for a lamp, and they went to the lake at night. " * 30


class Stopped(Exception):
    """What ends a run in a test, where a user would kill it."""


def run(folder: Path, *, threads: int = 2, stop_at: int = 99, identity: str = "same") -> Mapping[str, PreparedTensor]:
    calls: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        calls.append(done)
        if done == stop_at:
            raise Stopped

    tokens = calibration_sequences(load_tokenizer(MODEL), TEXT, 320, 160)
    assert tokens.shape == (2, 160)
    pool = ThreadPool(1)
    try:
        with read_gguf(MODEL) as file, Workers(threads) as workers:
            facts = ModelFacts.from_metadata(file.metadata)
            choices = choose_types(find_preset("Q4_K_M"), file.tensors, facts, has_importance=True)
            results = PartialResults(folder, identity)
            found = round_by_calibration(file, tokens, choices, pool, workers, results, progress=progress)
            return {"first call": PreparedTensor(TensorType.F32, np.array(calls[:1]), 0.0), **found}
    finally:
        pool.close()


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", stop_at=3)
    resumed = run(tmp_path / "stopped", threads=1)
    assert (whole["first call"].blocks, resumed["first call"].blocks) == ([0], [3])
    assert whole.keys() == resumed.keys()
    assert len(whole) == 43
    for name in whole.keys() - {"first call"}:
        assert whole[name].type is resumed[name].type
        np.testing.assert_array_equal(whole[name].blocks, resumed[name].blocks)
        assert 0.001 < whole[name].relative_error < 0.2


def test_results_of_something_else_or_damaged_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    with pytest.raises(Stopped):
        run(folder, stop_at=1)
    assert PartialResults(folder, "same").load() is not None
    assert PartialResults(folder, "other").load() is None
    layer = folder / "layer-0000.npz"
    layer.write_bytes(layer.read_bytes()[:-100])
    assert PartialResults(folder, "same").load() is None
    with pytest.raises(Stopped):
        run(folder, stop_at=1, identity="other")
    assert PartialResults(folder, "other").load() is not None
    PartialResults(folder, "other").delete()
    assert not folder.exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds something else"):
        PartialResults(tmp_path, "same")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_text_that_is_too_short_says_so() -> None:
    with pytest.raises(RequestError, match="the calibration text has"):
        calibration_sequences(load_tokenizer(MODEL), "Short.", 512, 512)
