"""Layers for next-token prediction against another runtime, by the oracle and on the CPU."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.ops import Attention, StoreKV
from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes, write_decoder, write_draft_layer
from localinfer.models.decoder.draft_layers import short_head_tokens
from localinfer.models.load.loader import load_model
from localinfer.types import FloatArray
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import DATA, REFUSED, build_model, normalized_error, read_config, run_logits, skeletons
from tests.models.numpy_device import NumpyDevice

DEVICES = {"oracle": NumpyDevice, "cpu": lambda: CpuDevice(2)}
_FIRST_ROW = np.zeros(1, np.int32)


def models() -> list[str]:
    with np.load(DATA / "logits.npz") as answers:
        return [name for name in skeletons() if f"{name}.mtp_logits" in answers.files and name not in REFUSED]


def answers_of(name: str) -> tuple[FloatArray, FloatArray]:
    """The states that drafts begin with, and the logits of every draft layer."""
    with np.load(DATA / "logits.npz") as answers:
        hidden, logits = answers[f"{name}.mtp_hidden"], answers[f"{name}.mtp_logits"]
    return hidden, logits if logits.ndim == 3 else logits[None]


class Prefilled:
    """A model with its draft layers, after a prefill in chunks; its cache, and what it showed and carried."""

    def __init__(self, folder: Path, name: str, device: Any, chunks: int) -> None:
        self.model, self.device = build_model(folder, name), device
        self.config = config = read_config(self.model.path, with_draft_layers=True)
        self.layers, num_rows = kv_layer_shapes(config), len(self.model.token_ids)
        program = device.program(write_decoder(config, device.weights(self.model.path)), num_rows)
        self.pages = device.pages(self.layers, num_rows)
        self.carried = aligned_zeros(2 * 4 * 128).view(np.float32)
        self.carried[:] = np.nan
        parts, hidden, source, before = [], [], 0, 0
        for rows in np.array_split(np.arange(num_rows, dtype=np.int32), chunks):
            state = None
            if state_shapes(config):
                (target,) = device.states(state_shapes(config), 1)
                state, source = StateStep(source, [(len(rows), target)]), target
            after = address(self.carried) + (512 if before == address(self.carried) else 0)
            segment = Segment(int(rows[0]), len(rows), self.pages, state=state, carried=(before, after))
            batch = Batch(self.model.token_ids[rows], [segment], rows - rows[0])
            parts.append(program.run(batch).copy())
            hidden.append(program.hidden[: len(rows)].copy())
            before = after
        program.close()
        self.logits, self.hidden = np.concatenate(parts), np.concatenate(hidden)
        self.last = self.carried[(before - address(self.carried)) // 4 :][: config.hidden_size].copy()

    def drafts(self, layer: int) -> Callable[[int, FloatArray | None, Any], FloatArray]:
        """A function of position, states before it and cache pages, which runs one row of a draft layer."""
        weights = self.device.weights(self.model.path)
        graph = write_draft_layer(self.config, weights, self.config.num_main_layers + layer)
        program = self.device.program(graph, 1)
        memory = aligned_zeros(4 * 128).view(np.float32)

        def run(position: int, before: FloatArray | None, pages: Any) -> FloatArray:
            if before is not None:
                memory[: before.size] = before
            segment = Segment(position, 1, pages, carried=(0 if before is None else address(memory), 0))
            return program.run(Batch(self.model.token_ids[position : position + 1], [segment], _FIRST_ROW)).copy()

        return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", models())
def test_draft_layers_equal_those_of_the_reference_runtime(name: str, device: str, folder: Path) -> None:
    prefilled = Prefilled(folder, name, DEVICES[device](), chunks=3)
    hidden, logits = answers_of(name)
    assert normalized_error(prefilled.logits, prefilled.model.logits) <= 1e-6
    assert normalized_error(prefilled.hidden, hidden) <= 1e-6
    np.testing.assert_array_equal(prefilled.last, prefilled.hidden[-1])
    num_rows = len(hidden)
    for layer in range(prefilled.config.num_draft_layers):
        draft, pages = prefilled.drafts(layer), prefilled.device.pages(prefilled.layers, num_rows)
        found = [draft(row, hidden[row - 1] if row else None, pages) for row in range(num_rows)]
        assert normalized_error(np.concatenate(found), logits[layer]) <= 1e-6
        # What the model itself wrote of the same positions serves as well.
        again = draft(num_rows - 1, hidden[-2], prefilled.pages)
        assert normalized_error(again, logits[layer][-1:]) <= 1e-6


@pytest.mark.parametrize("name", ["qwen35-mtp", "deepseek2-mtp"])
def test_the_bits_of_a_model_do_not_depend_on_its_draft_layers(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    without = run_logits(model, CpuDevice(1))
    found = [Prefilled(folder, name, CpuDevice(2), chunks) for chunks in (1, 3, len(model.token_ids))]
    for one in found:
        np.testing.assert_array_equal(one.logits.view(np.uint32), without.view(np.uint32))
        np.testing.assert_array_equal(one.hidden.view(np.uint32), found[0].hidden.view(np.uint32))


@pytest.mark.parametrize("name", ["qwen35-mtp", "mimo2-mtp", "deepseek2-mtp"])
def test_a_short_head_gives_the_first_logits_and_shares_the_weights_of_the_whole(name: str, folder: Path) -> None:
    with closing(load_model(build_model(folder, name).path, threads=1, draft_layers=True)) as model:
        assert model.weights is not None
        sequence = SequenceCache(PagePool(model.kv_layout), max_length=8)
        sequence.reserve_pages(1)
        batch = Batch(np.array([5], np.int32), [sequence.draft_segment(0, None)], _FIRST_ROW)
        for layer, (whole, short) in enumerate(zip(*model.draft_programs, strict=True)):
            wanted, found = whole.run(batch).copy(), short.run(batch)
            assert found.shape == (1, short_head_tokens(model.config.vocab_size))
            np.testing.assert_array_equal(found.view(np.uint32), wanted[:, : found.size].view(np.uint32))
            assert whole.hidden is not None and short.hidden is not None
            np.testing.assert_array_equal(short.hidden, whole.hidden)
            head = "output.weight" if model.weights.has("output.weight") else "token_embd.weight"
            own = f"blk.{model.config.num_main_layers + layer}.nextn.shared_head_head.weight"
            name = own if model.weights.has(own) else head
            parts = [model.weights.linear(name, rows).packed.data for rows in (None, slice(0, found.size))]
            assert np.shares_memory(*parts) and parts[1].size < parts[0].size


def test_of_draft_layers_a_model_computes_only_what_it_caches(folder: Path) -> None:
    model = build_model(folder, "glm4moe-mtp")
    config = read_config(model.path, with_draft_layers=True)
    graph = write_decoder(config, NumpyDevice().weights(model.path))
    plain = write_decoder(read_config(model.path), NumpyDevice().weights(model.path))
    last = config.num_layers - 1
    assert [op.layer for op in graph.ops if isinstance(op, StoreKV)].count(last) == 1
    assert not [op for op in graph.ops if isinstance(op, Attention) and op.layer == last]
    assert 0 < len(graph.ops) - len(plain.ops) < 15
