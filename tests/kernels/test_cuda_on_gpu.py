"""What only a GPU can show: every kernel, graphs and library products run there, against the oracle and the CPU.

`pytest -m cuda` runs these; without a GPU they are skipped. The emulator runs the same kernels everywhere.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from localinfer.kernels.cpu.layouts import SIZES, Layout, is_float
from localinfer.kernels.cuda.device import CudaDevice, has_driver
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Batch, EmbeddingTable, LinearWeight, Projection, Rows, Segment
from tests.kernels.cpu_device import CpuDevice
from tests.kernels.cuda_device import CudaTestDevice
from tests.kernels.random_weights import decoded, quantized_activations, random_weights
from tests.models.arch_models import architectures, build_model, normalized_error, run_logits

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not has_driver(), reason="there is no NVIDIA driver here")]

FRESH_SEED = time.time_ns() % 2**32
"""New inputs every time; a failure shows the seed."""


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice()
    yield made
    made.close()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 16, 40])
@pytest.mark.parametrize("layout", list(Layout), ids=[layout.name for layout in Layout])
def test_product_on_the_gpu_is_the_oracles(device: CudaDevice, layout: Layout, rows: int) -> None:
    from localinfer.kernels.cuda.planes import upload
    from localinfer.kernels.cuda.tape import CudaTape

    columns = 1003 if is_float(layout) else 11 * SIZES[layout].unit
    shape = (517, columns)
    data = random_weights(layout, shape, FRESH_SEED)
    x = np.random.default_rng(FRESH_SEED).standard_normal((rows, columns)).astype(np.float32)
    tape = CudaTape(device, KVLayout("f32", []), max_batch_rows=rows, max_output_rows=rows)
    inputs, selected = tape.buffer("x", columns), tape.buffer("selected", columns, Rows.OUTPUT)
    table = upload(device, Layout.F32, x.reshape(-1).view(np.uint8), 1, rows, columns)
    tape.embed(inputs, EmbeddingTable("x", rows, columns, table))
    tape.select_output(selected, inputs)
    out = tape.buffer("out", shape[0], Rows.OUTPUT)
    weight = LinearWeight("weight", *shape, upload(device, layout, data, 1, *shape))
    tape.matmul(selected, [Projection(weight, out)])
    program = tape.finish(out)
    ids = np.arange(rows, dtype=np.int32)
    pages = np.array([device.allocate(256)] * 2, np.int64)
    batch = Batch(ids, [Segment(0, rows, pages)], ids)
    found = program.run(batch).copy()
    np.testing.assert_array_equal(found, program.run(batch), err_msg="the graph gives what its launches gave")
    is_exact = is_float(layout) or rows > 16
    wanted = (x.astype(np.float64) if is_exact else quantized_activations(x)) @ decoded(layout, data, shape).T
    tolerance = 0.02 if rows > 16 else 2e-6
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max(), err_msg=f"seed {FRESH_SEED}"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archs")


@pytest.mark.parametrize("name", architectures())
def test_logits_of_every_architecture_are_the_reference_runtimes_and_the_cpus(
    device: CudaDevice, name: str, shared: Path, folder: Path
) -> None:
    model = build_model(shared, folder, name)
    cpu = run_logits(model, CpuDevice(1))
    for chunk in (0, 1, 7):
        fresh = CudaDevice()
        found = run_logits(model, CudaTestDevice(fresh), chunk)
        assert normalized_error(found, model.logits) <= 1e-6
        assert normalized_error(found, cpu) <= 1e-6


def greedy_text(model: Path | None, device: str, prompt: str, count: int) -> Sequence[int]:
    import localinfer

    with localinfer.load(model, device=device, speculation=None) as llm:
        return llm.complete(prompt, temperature=0, max_tokens=count, ignore_eos=True).token_ids


@pytest.mark.parametrize("is_demo", [False, True])
def test_two_hundred_greedy_tokens_are_the_cpus(shared: Path, is_demo: bool) -> None:
    model = None if is_demo else shared / "models" / "stories260K.gguf"
    prompt = "Once upon a time"
    assert greedy_text(model, "cuda", prompt, 200) == greedy_text(model, "cpu", prompt, 200)


def test_a_device_that_ran_out_of_memory_says_so_and_goes_on(device: CudaDevice) -> None:
    from localinfer.errors import OutOfMemoryError

    with pytest.raises(OutOfMemoryError, match="free"):
        device.allocate(1 << 50)
    address = device.allocate(64)
    device.write(address, np.arange(16, dtype=np.float32))
    out = np.empty(16, np.float32)
    device.read(address, out)
    np.testing.assert_array_equal(out, np.arange(16))
