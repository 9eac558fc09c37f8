"""Print digests of what small models of ten architectures compute: a command, for machines of another architecture.

`python -m tests.models.fixture_digests` prints a line for each: its name, and SHA-256 of its file and of the logits of
all its positions, in batches of several rows and of one. They are the same on every machine. The ten have what decoders
are made of: grouped heads, experts, latent and windowed attention, sinks, slopes instead of rotations, norms of both
kinds, states of three kinds, and activations of four.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from localinfer.kernels.jit import compile_ahead
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import ArchRun, build_model

NAMES = (
    *("llama-gqa", "gemma3-gqa", "qwen3moe-gqa", "gpt-oss-gqa", "deepseek2-moe", "bloom-dense", "phi2-dense"),
    *("nemotron-dense", "mamba2-dense", "qwen3next-moe"),
)
"""None of these has weights that a logarithm was taken for, whose last bit differs between libraries."""
CHUNK_ROWS = 13
"""Several rows of a batch, and at the end one."""


def digests(folder: Path, names: Sequence[str] = NAMES) -> Iterator[tuple[str, str, str]]:
    """Name of each model, and the digests of its file and of its logits."""
    for name in names:
        model = build_model(folder, name)
        with ArchRun(model, CpuDevice(2, "f16"), CHUNK_ROWS) as run:
            logits = run.logits(CHUNK_ROWS)
        assert np.isfinite(logits).all(), f"{name} has no numbers"
        yield name, hashlib.sha256(model.path.read_bytes()).hexdigest(), hashlib.sha256(logits).hexdigest()


def main() -> None:
    """Print them."""
    # A child process would import Numba for a kernel or two, which takes minutes where a processor is emulated.
    compile_ahead.can_start_children = lambda: False
    with tempfile.TemporaryDirectory() as folder:
        for name, *found in digests(Path(folder)):
            print(name, *found, flush=True)


if __name__ == "__main__":
    main()
