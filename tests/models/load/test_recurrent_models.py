"""Models with recurrent layers through the loader: their device, their layout, and drafts verified on a whole model."""

import logging
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch, Segment, StatefulProgram, StateStep
from localinfer.models.decoder.block_config import has_recurrent_layers
from localinfer.models.decoder.decoder import state_shapes, write_decoder
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.loader import load_model
from localinfer.types import FloatArray
from tests.kernels.cpu.device import CpuWeights
from tests.models.arch_models import build_further, build_model, further_skeletons, read_config


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


class Sequences:
    """A model's program with room for blocks of states and logs, over the pages of one sequence."""

    def __init__(self, path: Path, pool: ThreadPool, num_positions: int) -> None:
        graph = write_decoder(read_config(path), CpuWeights(pool, path))
        self.layout = KVLayout("f32", graph.kv_layers, graph.states)
        self.program = lower_to_cpu(graph, pool, self.layout, max_batch_rows=64, max_output_rows=64)
        assert isinstance(self.program, StatefulProgram)
        count = -(-num_positions // self.layout.page_tokens)
        self._memory = [aligned_zeros(count * self.layout.page_bytes + 64)]
        self._pages = address(self._memory[0]) + np.arange(count, dtype=np.int64) * self.layout.page_bytes

    def block(self, size: int) -> int:
        """Fresh memory that holds NaN."""
        memory = aligned_zeros(size)
        memory[:] = 255
        self._memory.append(memory)
        return address(memory)

    def run(self, token_ids: np.ndarray, start: int, step: StateStep) -> FloatArray:
        """Logits of all rows."""
        rows = np.arange(len(token_ids), dtype=np.int32)
        return self.program.run(Batch(token_ids, [Segment(start, len(rows), self._pages, state=step)], rows)).copy()


FURTHER = [name for name, skeleton in further_skeletons().items() if has_recurrent_layers(skeleton["arch"])]


@pytest.mark.parametrize("name", ["qwen35-hybrid", "lfm2-hybrid", "kimi-linear-hybrid", "rwkv7-recurrent", *FURTHER])
def test_a_model_goes_on_after_any_part_of_a_draft_as_if_it_had_never_been(name: str, folder: Path) -> None:
    model, pool = (build_further if name in FURTHER else build_model)(folder, name), ThreadPool(2)
    ids = model.token_ids
    sequences = Sequences(model.path, pool, len(ids))
    states, logs = sequences.layout.state_bytes, sequences.layout.log_bytes
    whole = sequences.run(ids, 0, StateStep(0, [(len(ids), sequences.block(states))]))
    source, log = sequences.block(states), sequences.block(logs)
    sequences.run(ids[:9], 0, StateStep(0, [(9, source)]))
    for accepted in (0, 2, 5):
        draft = ids[9:14].copy()
        draft[accepted:] = (draft[accepted:] + 1) % 128
        verified = sequences.run(draft, 9, StateStep(source, new_log=log))
        np.testing.assert_array_equal(verified[:accepted].view(np.uint32), whole[9 : 9 + accepted].view(np.uint32))
        settled, start = sequences.block(states), 9 + accepted
        sequences.program.settle(StateStep(source, [(0, settled)], log, accepted))
        for step in (StateStep(source, [], log, accepted), StateStep(settled)):
            rest = sequences.run(ids[start:], start, step)
            np.testing.assert_array_equal(rest.view(np.uint32), whole[start:].view(np.uint32))
    pool.close()


def test_a_model_with_recurrent_layers_is_loaded_on_the_cpu(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(folder, "qwen35-hybrid")
    for arguments in ({"device": "cuda"}, {"device": "auto", "gpu_layers": 2}):
        with pytest.raises(UnsupportedFormatError, match=r"recurrent layers.*--device cpu"):
            load_model(model.path, threads=1, device=DeviceRequest(**arguments))  # type: ignore[arg-type]
    monkeypatch.setattr("localinfer.models.load.device_request.has_driver", lambda: True)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(model.path, threads=2, device=DeviceRequest(device="auto"))
    assert loaded.device == "cpu" and "running on the CPU: this model has recurrent layers" in caplog.text
    layout = loaded.kv_layout
    assert tuple(layout.states) == tuple(state_shapes(loaded.config)) and layout.state_bytes > 0
    # Keys and values of its two layers with attention alone.
    assert [shape.num_kv_heads for shape in layout.layers] == [0, 0, 2, 0, 0, 2]
    operations = loaded.program.operations()  # type: ignore[attr-defined]
    carried = sum(operation.state_bytes for operation in operations)
    assert carried == 8 * sum(shape.num_values for shape in layout.states)
    loaded.close()
