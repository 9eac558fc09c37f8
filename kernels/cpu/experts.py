"""What the ops over experts are given: routers proven to be possible, their words, and biases of every expert.

The tape writes these; the kernels that read them are in `compiled/matmul/experts.py`.
"""

import numpy as np

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.cpu.attention import float_word
from localinfer.kernels.cpu.memory import check, padded
from localinfer.kernels.cpu.weights import PackedWeight
from localinfer.kernels.ops import FloatArray, Gating, Routing

_GATING_CODES = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2}


def check_routing(routing: Routing) -> None:
    """Raise ShapeError unless so many experts can be chosen, in groups that they split into."""
    count, selected = routing.num_experts, routing.num_selected
    check(0 < selected <= count <= kernel_abi.MAX_EXPERTS, f"{selected} of {count} experts cannot be chosen")
    check(count % routing.num_groups == 0, f"{count} experts do not split into {routing.num_groups} groups")
    kept = count // routing.num_groups * routing.num_selected_groups
    check(routing.num_groups == 1 or selected <= kept, f"{selected} experts do not fit the {kept} of the kept groups")


def gating_words(routing: Routing, bias: int) -> tuple[int, ...]:
    """How scores become weights. bias: address of what is added to them for the choice, or 0."""
    return _GATING_CODES[routing.gating], int(routing.normalise), float_word(routing.scale), bias


def bias_stride(packed: PackedWeight) -> int:
    """Bytes from one expert's bias to the next."""
    return 4 * padded(packed.num_rows)


def padded_biases(bias: FloatArray, packed: PackedWeight, name: str) -> FloatArray:
    """float32[experts, rows padded to whole vectors] of float32[experts, rows]. Raises: ShapeError."""
    check(bias.shape == (packed.num_experts, packed.num_rows), f"bias of {name} is {bias.shape}")
    rows = np.zeros((packed.num_experts, padded(packed.num_rows)), np.float32)
    rows[:, : packed.num_rows] = bias
    return rows
