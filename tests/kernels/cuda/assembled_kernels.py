"""Every CUDA kernel that a model, a layout, a cache, a sampler or a picture takes, through NVIDIA's assembler.

The driver assembles PTX when a kernel is loaded, so what it refuses is found only on a GPU, unless `ptxas` says so
before. Kernels are listed by lowering to a device that only records.

usage: python -m tests.kernels.cuda.assembled_kernels [--capabilities 75,80,90,100,120]

Needs ptxas in PATH; ends with 1 and a line for each kernel that it refuses. The whole takes an hour of
processor time, so those that tell most come first.
"""

import argparse
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import LocalinferError
from localinfer.kernels.cuda import experts, jit
from localinfer.kernels.cuda.kernel_cache import KernelKey, entry_name
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.sampling import SampleMode, TokenChoice
from localinfer.kernels.cuda.weights import DeviceWeight, array_offsets
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import CUDA_LAYOUTS, Layout
from localinfer.kernels.ops import OpGraph
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.decoder.text_head import write_text_model
from tests.bench import random_llama
from tests.kernels.cuda.recording_device import RecordingDevice
from tests.kernels.cuda.test_cuda_launches import weights_of
from tests.models.arch_models import architectures, build_model, build_text_model, read_config, text_models

CAPABILITIES = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))
KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
_ROWS = (1, 2, 4, 8, 16, 40)


def note(device: RecordingDevice, graph: OpGraph, kv_type: str, *, sums: int = 0) -> None:
    """Add a graph's kernels to the keys of a device, those of one to many rows, summed by page if asked."""
    layout = KVLayout(kv_type, graph.kv_layers)
    program = lower_to_cuda(graph, device, layout, max_batch_rows=64, max_output_rows=64, max_summed_tokens=sums)
    for rows in _ROWS if sums else ():
        pages = np.array([device.allocate(layout.page_bytes)] * 2, np.int64)
        segment = Segment(0, rows, pages, attention_sums=np.zeros(2, np.float32))
        program.run(Batch(np.zeros(rows, np.int32), [segment], np.zeros(1, np.int32)))


def of_models(device: RecordingDevice, folder: Path) -> None:
    """Every architecture, as words and with pictures, and every encoder of texts."""
    for name in architectures():
        path = build_model(folder, name).path
        for takes_media in (False, True):
            config = replace(read_config(path), takes_media=takes_media)
            for kv_type in KV_TYPES if not takes_media else ("f16",):
                try:
                    note(device, write_decoder(config, weights_of(path, device)), kv_type)
                except LocalinferError:
                    # This device refuses the model, or the model takes no pictures.
                    continue
    for name in text_models():
        path = build_text_model(folder, name).path
        for pooling in Pooling:
            try:
                graph = write_text_model(read_config(path), weights_of(path, device), pooling, Pooling.FIRST)
                note(device, graph, "f16")
            except LocalinferError:
                continue


def of_llamas(device: RecordingDevice) -> None:
    """The shapes that people run, in every layout, and with every type of cache, of attention that is summed too."""

    def placed(device: RecordingDevice, layout: Layout, rows: int, columns: int, _random: object) -> DeviceWeight:
        return DeviceWeight(layout, rows, columns, 1, device.allocate(array_offsets(layout, rows, columns)[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_llama, "random_planes", placed)
        for name in random_llama.SHAPES:
            for layout in CUDA_LAYOUTS:
                random_llama.make_program(device, name, layout, "f16", num_layers=1)
            for kv_type in KV_TYPES:
                patch.setattr(random_llama, "lower_to_cuda", partial(_noted, kv_type=kv_type))
                random_llama.make_program(device, name, Layout.Q4_0, kv_type, num_layers=1)
                patch.setattr(random_llama, "lower_to_cuda", lower_to_cuda)


def _noted(graph: OpGraph, device: RecordingDevice, _layout: KVLayout, *, kv_type: str) -> None:
    note(device, graph, kv_type, sums=64)


def every_key(capability: tuple[int, int], folder: Path) -> list[KernelKey]:
    """Constants and names of all kernels for a compute capability, with overlapping launches where it has them."""
    keys: set[KernelKey] = {("experts.route", (gating,)) for gating in experts.GATINGS.values()}
    for overlaps in (False, True):
        device = RecordingDevice(overlaps=overlaps, capability=capability)
        if device.overlaps != overlaps:
            continue
        of_llamas(device)
        of_models(device, folder)
        for power in range(7):
            choice = TokenChoice(device, device.allocate(1 << 20), 1 << 16, 128 << power, 1)
            for mode in SampleMode:
                device.run(list(choice.steps(mode, 1)))
        keys |= device.keys | {launch.key for launch in device.launches}
    return sorted(keys)


def _pairs(name: str, constants: tuple[int, ...]) -> set[tuple[object, ...]]:
    return {(name, *pair) for pair in combinations(["", *enumerate(constants)], 2)} or {(name,)}


def most_telling_first(keys: Iterable[KernelKey]) -> list[KernelKey]:
    """Kernels so that each has the most pairs of constants that no one before it has."""
    left = {(name, constants): _pairs(name, constants) for name, constants in sorted(keys)}
    ordered: list[KernelKey] = []
    while left:
        key = max(left, key=lambda one: len(left[one]))
        new = left.pop(key)
        ordered.append(key)
        for pairs in left.values():
            pairs -= new
    return ordered


def refusals(assembler: str, key: KernelKey, capabilities: Sequence[tuple[int, int]]) -> list[str]:
    """What the assembler says of a kernel on those GPUs for which it refuses it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        for capability in capabilities:
            source.write_text(jit.compile_ptx(*key, capability))
            name = f"sm_{capability[0]}{capability[1]}"
            command = [assembler, f"-arch={name}", str(source), "-o", str(source.with_suffix(".cubin"))]
            report = subprocess.run(command, capture_output=True, text=True, check=False)
            if report.returncode:
                found.append(f"{entry_name(key)} for {name}: {report.stderr.strip()}")
    return found


def compile_ir_once() -> None:
    """In a child process: what a kernel is on all GPUs is compiled for the first alone."""
    jit.kernel_ir = functools.lru_cache(1)(jit.kernel_ir)
    gc.disable()


def main() -> int:
    parser = argparse.ArgumentParser(description="Assemble every CUDA kernel.")
    parser.add_argument("--capabilities", default=",".join(f"{major}{minor}" for major, minor in CAPABILITIES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    assembler = shutil.which("ptxas")
    if assembler is None:
        sys.exit("ptxas is not in PATH; it comes with the CUDA toolkit, and in the wheel nvidia-cuda-nvcc")
    wanted: dict[KernelKey, list[tuple[int, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for capability in CAPABILITIES:
            if f"{capability[0]}{capability[1]}" in options.capabilities.split(","):
                keys = every_key(capability, Path(folder))
                print(f"sm_{capability[0]}{capability[1]}: {len(keys)} kernels", flush=True)
                for key in keys:
                    wanted.setdefault(key, []).append(capability)
    count = 0
    with ProcessPoolExecutor(options.processes, get_context("spawn"), compile_ir_once) as pool:
        tasks = [pool.submit(refusals, assembler, key, wanted[key]) for key in most_telling_first(wanted)]
        for done, task in enumerate(as_completed(tasks), 1):
            for line in task.result():
                count += 1
                print(f"refused: {line}", flush=True)
            if done % 50 == 0 or done == len(tasks):
                print(f"{done} of {len(tasks)} kernels assembled for all, {count} refused", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
