"""The model that ships on a GPU: `localinfer bench`'s figures, then a start with everything cached.

usage: python3 -m tests.bench.cuda_demo [--dry-run]; the dry run takes a tiny model on an emulated GPU.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import pytest

import localinfer
from localinfer.apps.bench import gpu
from localinfer.apps.bench.decode import BenchSettings
from localinfer.apps.bench.report import render_gpu
from localinfer.loading.options import model_path


def measure(settings: BenchSettings, prompt: str | list[int], max_tokens: int) -> None:
    """Print the figures of a model, and how long loading it again and a reply to `prompt` take."""
    record = gpu.run_gpu_bench(settings, lambda *stage: None)
    print(json.dumps(record))
    print(render_gpu(record))
    began = time.perf_counter()
    with localinfer.load(settings.model, device="cuda", speculation=None) as llm:
        print(f"loaded after {time.perf_counter() - began:.3f} s")
        reply = llm.complete(prompt, temperature=0, max_tokens=max_tokens)
        print(f"{max_tokens} tokens after {time.perf_counter() - began:.3f} s: {reply.token_ids}")


def main() -> None:
    if "--dry-run" not in sys.argv:
        measure(BenchSettings(model=str(model_path(None)), prompt=512, repetitions=3), "Once upon a time", 64)
        return
    from tests.models.emulated_gpu import emulate_gpu
    from tests.models.small_models import write_small_llama

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        emulate_gpu(patch)
        patch.setattr(gpu, "VERIFIED_ROWS", (1, 2))
        model = write_small_llama(Path(folder) / "small.gguf", num_layers=1)
        measure(BenchSettings(model=str(model), prompt=2, decode=1, context=1, repetitions=1), [1], 1)


if __name__ == "__main__":
    main()
