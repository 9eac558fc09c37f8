"""What AWQ's scales are worth, alone and before GPTQ: KL divergence of four files of one size from their source.

python -m tests.bench.bench_scales MODEL TYPE CALIBRATION TEXT [TOKENS]: both texts are files; TOKENS are calibrated on.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import localinfer
from localinfer.apps.evaluate.measure import compare
from localinfer.apps.evaluate.report import render_summary
from localinfer.apps.evaluate.texts import evaluation_text
from localinfer.kernels.cpu.encoding import ENCODERS, prepare_encoders
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.calibration.run import calibrate, calibration_sequences
from localinfer.models.calibration.scales import round_by_calibration, scale_for_rounding
from localinfer.models.load.loader import load_tokenizer, open_model_file
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.methods.imatrix import ImportanceVisitor
from localinfer.quant.methods.presets import ModelFacts, choose_types, find_preset
from localinfer.quant.methods.workers import Workers
from localinfer.quant.pipeline.quantize import PartialResults, quantize_model

SEQUENCE_LENGTH, NUM_CHUNKS = 256, 60


class Bench:
    """One model, one preset and one calibration text."""

    def __init__(self, file: ModelFile, type: str, token_ids: NDArray[np.int32], folder: Path) -> None:
        self._file, self._token_ids, self._folder = file, token_ids, folder
        self._preset = find_preset(type)
        facts = ModelFacts.from_metadata(file.metadata)
        self._choices = choose_types(self._preset, file.tensors, facts, has_importance=True)
        prepare_encoders(ENCODERS)
        self._pool = ThreadPool(2)

    def write(self, name: str, *, has_scales: bool, has_feedback: bool) -> Path:
        """Quantize one way and say how long it took."""
        target, start = self._folder / f"{name}.gguf", time.perf_counter()
        with Workers(2) as workers:
            file: ModelFile = self._file
            if has_scales:
                file, _ = scale_for_rounding(
                    file, self._token_ids, self._choices, self._pool, workers, is_proven_by_feedback=has_feedback
                )
            if has_feedback:
                results = PartialResults(self._folder / f"{name}.partial", name)
                prepared = round_by_calibration(file, self._token_ids, self._choices, self._pool, workers, results)
                quantize_model(file, target, self._preset, self._pool, prepared=prepared)
                results.delete()
            else:
                visitor = ImportanceVisitor()
                calibrate(file, self._token_ids, workers, visitor)
                importance = visitor.importance(name, len(self._token_ids))
                quantize_model(file, target, self._preset, self._pool, importance=importance)
        print(f"{name}: {time.perf_counter() - start:.1f} s", end=", ", flush=True)
        return target


def main() -> None:
    model, type, calibration, text = sys.argv[1:5]
    num_tokens = int(sys.argv[5]) if len(sys.argv) > 5 else 8192
    tokens = calibration_sequences(load_tokenizer(model), evaluation_text(calibration), num_tokens, SEQUENCE_LENGTH)
    with tempfile.TemporaryDirectory() as folder, localinfer.load(model, speculation=None) as base:
        bench = Bench(open_model_file(model), type, tokens, Path(folder))
        for name, has_scales, has_feedback in (
            ("importance", False, False),
            ("scales", True, False),
            ("gptq", False, True),
            ("scales and gptq", True, True),
        ):
            path = bench.write(name, has_scales=has_scales, has_feedback=has_feedback)
            with localinfer.load(path, speculation=None) as candidate:
                found = compare(
                    base, candidate, evaluation_text(text), context_length=SEQUENCE_LENGTH, max_chunks=NUM_CHUNKS
                )
            print(f"{render_summary(found)}, 99.9 %: {found.quantile(0.999):.3f}")


if __name__ == "__main__":
    main()
