"""Graphs cut for several devices say to the bit what they say whole, wherever they are cut: every part is a CPU."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import ops
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import EmbeddingTable, OpGraph, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.decoder import crosses_layers, write_decoder
from localinfer.models.decoder.graph_parts import CutGraph, cut_graph
from localinfer.types import FloatArray
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import architectures, build_model, read_config

PROMPT = 3


class Pipeline:
    """The parts of a cut graph as programs of one pool, over the same pages: each reads and writes its own layers."""

    def __init__(self, cut: CutGraph, device: CpuDevice, max_rows: int = PROMPT) -> None:
        self._cut = cut
        self.parts: list[CpuProgram] = [device.program(graph, max_rows) for graph in cut.graphs]

    def run(self, batch: Batch) -> FloatArray:
        for part in self.parts:
            part.begin(batch)
        for stage in self._cut.stages:
            part = self.parts[stage.part]
            for buffer, source in stage.uploads:
                assert source != stage.part
                num_rows = len(batch.output_rows if buffer.is_output else batch.token_ids)
                part.upload(buffer, self.parts[source].download(buffer, num_rows).copy())
            part.run_stage(stage.stage)
        last = self._cut.stages[-1].part
        return self.parts[last].download(self._cut.graphs[last].output, len(batch.output_rows)).copy()


def logits(run: Callable[[Batch], FloatArray], ids: NDArray[np.int32], pages: NDArray[np.int64]) -> list[FloatArray]:
    """Of a prompt without its first rows' logits, and of the token after it."""
    prompt = Batch(ids[:PROMPT], [Segment(0, PROMPT, pages)], np.array([1, 2], np.int32))
    following = Batch(ids[PROMPT : PROMPT + 1], [Segment(PROMPT, 1, pages)], np.zeros(1, np.int32))
    unseen = Batch(ids[:PROMPT], [Segment(0, PROMPT, pages)], np.zeros(0, np.int32))
    assert run(unseen).shape[0] == 0
    return [run(prompt).copy(), run(following).copy()]


def parts_of(graph: OpGraph, marks: Sequence[int]) -> list[int]:
    """Layers by turns on parts 0 and 1, and experts on part 2: as many exchanges as there can be."""
    found, is_in_experts = [], False
    for index, op in enumerate(graph.ops):
        is_in_experts = is_in_experts or isinstance(op, ops.Route)
        found.append(2 if is_in_experts else max(0, bisect_right(marks, index) - 1) % 2)
        is_in_experts = is_in_experts and not isinstance(op, ops.ExpertSum)
    # A part without ops is none.
    used = sorted(set(found))
    return [used.index(part) for part in found]


def test_every_architecture_says_cut_what_it_says_whole(folder: Path) -> None:
    num_cut = num_with_experts = 0
    for name in architectures():
        model = build_model(folder, name)
        config = read_config(model.path)
        device, marks = CpuDevice(1), list[int]()
        graph = write_decoder(config, device.weights(model.path), marks=marks)
        if graph.states or crosses_layers(config):
            continue
        assert len(marks) == config.num_main_layers + 1 and marks[-1] < len(graph.ops)
        parts = parts_of(graph, marks)
        pages = device.pages(graph.kv_layers, 32)
        whole = device.program(graph, PROMPT)
        wanted = logits(whole.run, model.token_ids, pages)
        cut = cut_graph(graph, parts, [graph.kv_layers] * (max(parts) + 1))
        found = logits(Pipeline(cut, device).run, model.token_ids, pages)
        whole.close()
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32), err_msg=name)
        num_cut += 1
        num_with_experts += any(isinstance(op, ops.Route) for op in graph.ops)
    assert num_cut > 60 and num_with_experts > 20


def test_only_what_the_next_stage_reads_is_copied() -> None:
    """A value that another part has still, or makes itself, is not; one that is changed in place is copied back."""
    builder = GraphBuilder([])
    table = EmbeddingTable("table", 5, 4, None)
    first, second, third = (builder.buffer(name, 4) for name in ("first", "second", "third"))
    out = builder.buffer("out", 4, Rows.OUTPUT)
    builder.embed(first, table)
    builder.add(second, first, first)
    builder.add(third, first, second)
    builder.scale(first, 2.0)
    builder.add(third, third, first)
    builder.add(third, third, second)
    builder.select_output(out, third)
    graph = builder.finish(out)
    cut = cut_graph(graph, [0, 0, 1, 1, 0, 1, 1], [[], []])
    taken = [(stage.part, [(buffer.name, source) for buffer, source in stage.uploads]) for stage in cut.stages]
    assert taken == [
        (0, []),
        (1, [("first", 0), ("second", 0)]),
        (0, [("first", 1), ("third", 1)]),
        (1, [("third", 0)]),
    ]
    # The part that is entered last began with an exchange, and the other one ends with one.
    assert [stage.stage for stage in cut.stages] == [0, 1, 1, 2]
    kinds = [[type(op).__name__ for op in graph.ops] for graph in cut.graphs]
    assert kinds == [
        ["Embed", "Add", "StageBoundary", "Add", "StageBoundary"],
        ["StageBoundary", "Add", "Scale", "StageBoundary", "Add", "SelectOutput"],
    ]
    widths = [[buffer.width for buffer in graph.buffers] for graph in cut.graphs]
    assert widths == [[4, 4, 4, 0], [4, 4, 4, 4]]


def test_a_cut_graph_has_memory_for_its_own_buffers_only(folder: Path) -> None:
    model = build_model(folder, "llama-dense")
    config, device, marks = read_config(model.path), CpuDevice(1), list[int]()
    graph = write_decoder(config, device.weights(model.path), marks=marks)
    cut = cut_graph(graph, [int(index >= marks[1]) for index in range(len(graph.ops))], [graph.kv_layers] * 2)
    first, second = cut.graphs
    logits_index = graph.output.index
    assert first.buffers[logits_index].width == 0 and second.buffers[logits_index].width == config.vocab_size
    assert [type(op) for op in first.ops].count(ops.StageBoundary) == 1
    program = device.program(second, PROMPT)
    assert len(program.tape.stage_starts) == 2
    program.close()
