"""Recurrent ops to test, with random weights and inputs: how each is written, and what its rows read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import (
    Buffer,
    RecurrentOp,
    delta_rule_state,
    selective_scan_state,
    short_convolution_state,
    wkv_state,
)
from localinfer.types import FloatArray

Buffers = dict[str, Buffer]
OUTPUTS = ("out", "bonus")


@dataclass(frozen=True)
class RecurrentCase:
    """widths: of every buffer that the op reads, and of `out`. write: appends the op, from buffers and random numbers.

    unit_heads: size of the heads of buffers, by name, that get unit length. positive: buffers of positive numbers.
    """

    widths: dict[str, int]
    write: Callable[[GraphBuilder, Buffers, np.random.Generator], None]
    unit_heads: dict[str, int]
    positive: tuple[str, ...] = ()

    def inputs(self, num_rows: int, seed: int) -> dict[str, FloatArray]:
        """Random rows of every buffer."""
        generator = np.random.default_rng(seed)
        found = {}
        for name, width in self.widths.items():
            if name in OUTPUTS:
                continue
            rows = generator.standard_normal((num_rows, width)).astype(np.float32)
            if name in self.unit_heads:
                heads = rows.reshape(num_rows, -1, self.unit_heads[name])
                rows = (heads / np.linalg.norm(heads, axis=2, keepdims=True)).reshape(num_rows, width)
            found[name] = np.abs(rows) if name in self.positive else rows
        return found

    def op(self) -> RecurrentOp:
        """The op alone."""
        tape = GraphBuilder()
        self.write(tape, {name: tape.buffer(name, width) for name, width in self.widths.items()}, _weights())
        op = tape.ops[-1]
        assert isinstance(op, RecurrentOp)
        return op


def _weights() -> np.random.Generator:
    return np.random.default_rng(1)


def _convolution(width: int, taps: int, *, has_bias: bool, has_silu: bool) -> RecurrentCase:
    def write(tape: GraphBuilder, buffers: Buffers, generator: np.random.Generator) -> None:
        weight = generator.standard_normal((width, taps)).astype(np.float32)
        bias = generator.standard_normal(width).astype(np.float32) if has_bias else None
        tape.add_state(short_convolution_state(width, taps))
        tape.short_convolution(len(tape.states) - 1, buffers["out"], buffers["x"], weight, bias, has_silu)

    return RecurrentCase({"x": width, "out": width}, write, {})


def _delta_rule(
    heads: int, key_heads: int, key_size: int, value_size: int, *, by_channel: bool, bound: float, is_tiled: bool
) -> RecurrentCase:
    keys, values, decays = key_heads * key_size, heads * value_size, heads * (key_size if by_channel else 1)
    widths = {"queries": keys, "keys": keys, "values": values, "decay": decays, "beta": heads, "out": values}

    def write(tape: GraphBuilder, buffers: Buffers, generator: np.random.Generator) -> None:
        factor = generator.random(heads if bound else decays).astype(np.float32) * np.float32(1.0 if bound else -1.0)
        bias = generator.standard_normal(decays).astype(np.float32)
        tape.add_state(delta_rule_state(heads, key_heads, key_size, value_size, decays))
        tape.gated_delta_rule(
            len(tape.states) - 1, buffers["out"], buffers["queries"], buffers["keys"], buffers["values"],
            buffers["decay"], buffers["beta"], factor, bias, key_heads, 0.25, bound, is_tiled,
        )  # fmt: skip

    return RecurrentCase(widths, write, {"keys": key_size, "queries": key_size})


def _scan(
    heads: int, size: int, states: int, groups: int, *, by_channel: bool, offset: int = 0, has_steps: bool = True
) -> RecurrentCase:
    channels, steps = heads * size, size if by_channel else heads
    widths = {"x": channels + offset, "b": groups * states + offset, "c": offset + groups * states}
    if has_steps:
        widths["dt"] = steps

    def write(tape: GraphBuilder, buffers: Buffers, generator: np.random.Generator) -> None:
        rates = -generator.random((steps, states) if by_channel else steps).astype(np.float32)
        skip = generator.standard_normal(steps).astype(np.float32)
        tape.add_state(selective_scan_state(heads, size, states, groups, is_by_channel=by_channel))
        tape.selective_scan(
            len(tape.states) - 1, buffers["out"], buffers["x"], buffers.get("dt"), buffers["b"], buffers["c"], rates,
            skip, heads, size, states, groups, x_offset=offset, c_offset=offset,
        )  # fmt: skip

    return RecurrentCase({**widths, "out": channels}, write, {}, positive=("dt",))


def _wkv(heads: int, head_size: int) -> RecurrentCase:
    width = heads * head_size
    inputs = ("receptance", "decay", "keys", "values", "rate")

    def write(tape: GraphBuilder, buffers: Buffers, generator: np.random.Generator) -> None:
        scales = [generator.standard_normal(width).astype(np.float32) for _ in range(3)]
        tape.add_state(wkv_state(width, head_size))
        tape.wkv(
            len(tape.states) - 1, buffers["out"], buffers["bonus"], *(buffers[name] for name in inputs), *scales,
            head_size,
        )  # fmt: skip

    return RecurrentCase(dict.fromkeys((*inputs, "out", "bonus"), width), write, {"keys": head_size})


CASES = {
    "convolution": _convolution(37, 4, has_bias=True, has_silu=True),
    "wide convolution": _convolution(300, 2, has_bias=False, has_silu=False),
    "delta rule": _delta_rule(4, 2, 16, 48, by_channel=False, bound=0.0, is_tiled=False),
    "delta rule, tiled": _delta_rule(6, 2, 32, 16, by_channel=False, bound=0.0, is_tiled=True),
    "delta rule by channel": _delta_rule(3, 3, 48, 64, by_channel=True, bound=0.0, is_tiled=False),
    "delta rule, bounded": _delta_rule(2, 2, 16, 32, by_channel=True, bound=-5.0, is_tiled=False),
    "scan by head": _scan(4, 8, 5, 2, by_channel=False),
    "scan by head, wide": _scan(3, 64, 128, 1, by_channel=False, offset=3),
    "scan by channel": _scan(1, 37, 16, 1, by_channel=True),
    "scan with a fixed decay": _scan(3, 20, 20, 3, by_channel=False, has_steps=False),
    "wkv": _wkv(2, 48),
}
