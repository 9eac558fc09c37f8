"""Print the instruction set in use and a hash of what kernels compute with it; run as a program by test_isa.py."""

import hashlib

import numpy as np

from localinfer.kernels import isa
from localinfer.kernels.cpu.layouts import SIZES, Layout, is_float
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Activation, AttentionShape, Buffer, KVLayerShape, Projection
from tests.kernels.random_weights import random_weights
from tests.kernels.tape_runs import linear, random_rows, run_rows

# One of each way that products differ by instruction set; Q6_K has scales per half block.
LAYOUTS = [Layout.F16, Layout.Q8_0, Layout.Q4_0, Layout.Q6_K]
ROWS = 7


def digest() -> str:
    """Hash of products, attention and row-wise arithmetic on fixed inputs."""
    pool, result = ThreadPool(1), hashlib.sha256()
    for layout in LAYOUTS:
        shape = (21, 37 if is_float(layout) else 2 * SIZES[layout].unit)
        weight = linear(pool, layout, random_weights(layout, shape, 1), shape)

        def product(tape: CpuTape, inputs: list[Buffer], weight: object = weight) -> Buffer:
            out = tape.buffer("out", 21)
            tape.matmul(inputs[0], [Projection(weight, out)])  # type: ignore[arg-type]
            return out

        result.update(run_rows(pool, [random_rows(ROWS, shape[1], 2)], product))
    shape = AttentionShape(2, 1, 20, 24, 0.3, softcap=3.0)

    def attention(tape: CpuTape, inputs: list[Buffer]) -> Buffer:
        queries, keys, values = inputs
        out = tape.buffer("out", 48)
        tape.rms_norm(queries, queries, None, 1e-5, 20)
        tape.store_kv(0, keys, values)
        tape.attention(out, queries, 0, shape)
        tape.activation(out, out, Activation.SILU)
        return out

    inputs = [random_rows(150, width, seed) for seed, width in enumerate([40, 20, 24])]
    result.update(run_rows(pool, inputs, attention, kv_layout=KVLayout("f16", [KVLayerShape(1, 20, 24)])))
    assert np.isfinite(run_rows(pool, inputs, attention, kv_layout=KVLayout("f16", [KVLayerShape(1, 20, 24)]))).all()
    return result.hexdigest()


if __name__ == "__main__":
    print(isa.SELECTED.value, digest())
