"""The feed-forward block: two matrices, three with a gate, or mixture of experts."""

import math
from collections.abc import Sequence

import numpy as np

from localinfer.kernels.ops import Buffer, Gating, Routing
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.types import FloatArray

_GATING_CODES = {1: Gating.SOFTMAX, 2: Gating.SIGMOID, 3: Gating.SOFTMAX_SELECTED}


def has_feed_forward(graph: Graph, layer: int) -> bool:
    """Return whether a layer has such a block; in some models whose layers differ (DeciLM) single ones have none."""
    architecture = graph.architecture.of_layer(layer)
    if not architecture.has_feed_forward:
        return False
    names = ["ffn_gate_inp.weight", "ffn_down.weight"]
    if architecture.feed_forward_norm != architecture.attention_norm:
        names.append(f"{architecture.feed_forward_norm}.weight")
    return graph.config.intermediate_size[layer] > 0 or any(graph.weights.has(f"blk.{layer}.{name}") for name in names)


def write_router(graph: Graph, layer: int, x: Buffer) -> Buffer | None:
    """Write the logits of a layer's experts for x and return them; None in a layer without experts."""
    name = f"blk.{layer}.ffn_gate_inp"
    if not graph.weights.has(f"{name}.weight"):
        return None
    if graph.config.experts is None:
        raise refuse(graph.config, "has a router (ffn_gate_inp) but no expert_count")
    return graph.product(name, x, "router_logits", graph.config.experts.num_experts)


def write_feed_forward(
    graph: Graph,
    layer: int,
    hidden: Buffer,
    x: Buffer,
    router_logits: Buffer | None = None,
    expert_x: Buffer | None = None,
) -> None:
    """Add one layer's feed-forward block, reading x, to hidden.

    router_logits: None where they are of what the experts read. expert_x: what they read beside a dense block that
    reads x; None where they take its place.
    """
    post_norm = graph.architecture.of_layer(layer).feed_forward_post_norm
    post_norm = post_norm and f"blk.{layer}.{post_norm}"
    read = x if expert_x is None else expert_x
    logits = write_router(graph, layer, read) if router_logits is None else router_logits
    if logits is not None:
        _write_experts(graph, layer, hidden, read, logits, post_norm)
        if expert_x is None:
            return
    down = f"blk.{layer}.ffn_down"
    inner = _inner(graph, layer, f"blk.{layer}.ffn_gate", f"blk.{layer}.ffn_up", down, x)
    if graph.weights.has(f"blk.{layer}.ffn_sub_norm.weight"):
        graph.norm(inner, inner, f"blk.{layer}.ffn_sub_norm")
    graph.add_branch(hidden, inner, down, post_norm)


def _inner(graph: Graph, layer: int, gate_name: str, up_name: str, down_name: str, x: Buffer) -> Buffer:
    """The input of the down projection: activation(up x), or activation(gate x) * (up x)."""
    tape, architecture = graph.tape, graph.architecture.of_layer(layer)
    size = graph.weights.shape(f"{down_name}.weight")[-1]
    if not architecture.gated:
        up = graph.product(up_name, x, "up", size)
        _activate(graph, layer, up)
        return up
    up = graph.buffer("up", size, x.rows)
    gate = graph.buffer("gate", size, x.rows)
    is_fused = not graph.weights.has(f"{gate_name}.weight") and graph.weights.shape(f"{up_name}.weight")[0] == 2 * size
    if is_fused:
        tape.matmul(x, graph.row_parts(up_name, x, gate, up))
    else:
        tape.matmul(x, [graph.projection(name, out, x.width) for name, out in ((gate_name, gate), (up_name, up))])
    _gate(graph, gate, up, architecture.dense_clamps[layer] if architecture.dense_clamps else 0.0)
    return up


def _gate(graph: Graph, gate: Buffer, up: Buffer, limit: float) -> None:
    """up = activation(gate) * up, both within a limit if it is not 0."""
    if limit and graph.architecture.clamps_gate_input:
        graph.tape.clamp(gate, limit, only_above=True)
        graph.tape.clamp(up, limit)
        limit = 0.0
    graph.tape.gated_activation(up, gate, up, graph.architecture.activation, limit)


def _activate(graph: Graph, layer: int, x: Buffer) -> None:
    """The activation of a block without a gate, in place."""
    architecture = graph.architecture.of_layer(layer)
    if architecture.xielu:
        # The file has its parameters before the softplus that keeps them positive.
        learned = architecture.xielu[layer]
        positive, negative = _softplus(learned.alpha_positive), learned.beta + _softplus(learned.alpha_negative)
        graph.tape.xielu(x, x, positive, negative, learned.beta, learned.epsilon)
        return
    graph.tape.activation(x, x, architecture.activation)
    divisors = graph.weights.optional_vector(f"blk.{layer}.ffn.act.scales", (x.width,))
    if divisors is not None:
        graph.tape.multiply(x, x, np.float32(1) / divisors)


def _softplus(x: float) -> float:
    return x if x > 20.0 else math.log1p(math.exp(x))


def _write_experts(graph: Graph, layer: int, hidden: Buffer, x: Buffer, logits: Buffer, post_norm: str | None) -> None:
    tape, architecture, experts = graph.tape, graph.architecture, graph.config.experts
    assert experts is not None, "there is a router"
    block = f"blk.{layer}"
    num_selected = experts.num_selected
    expert_ids = graph.buffer("expert_ids", num_selected, x.rows)
    expert_weights = graph.buffer("expert_weights", num_selected, x.rows)
    # A residual scale is folded into the expert weights, unless a post-norm would undo it.
    scale = 1.0 if post_norm else architecture.residual_scale
    if graph.weights.has(f"{block}.ffn_down_shexp.weight"):
        scale *= architecture.shared_expert_share
    tape.route(expert_ids, expert_weights, logits, _routing(graph, layer, scale))

    latent = _latent_input(graph, block, x)
    wide_x, x = x, x if latent is None else latent
    size = graph.weights.shape(f"{block}.ffn_down_exps.weight")[-1]
    up = graph.buffer("expert_up", num_selected * size, x.rows)
    if architecture.gated:
        gate = graph.buffer("expert_gate", num_selected * size, x.rows)
        multiply_experts(graph, block, [("gate", gate), ("up", up)], size, x, expert_ids)
        if architecture.weigh_expert_inputs:
            # Weighting x weights gate and up; the sum over experts then needs no weights.
            tape.expert_scale(gate, expert_weights)
        _gate(graph, gate, up, architecture.expert_clamps[layer] if architecture.expert_clamps else 0.0)
    else:
        multiply_experts(graph, block, [("up", up)], size, x, expert_ids)
        tape.activation(up, up, architecture.activation)
    width = hidden.width if latent is None else latent.width
    down = graph.buffer("expert_down", num_selected * width, x.rows)
    graph.expert_product(f"{block}.ffn_down_exps", down, up, expert_ids, size, input_per_slot=True)
    out = graph.buffer("branch", hidden.width, x.rows) if post_norm else hidden
    if latent is None:
        tape.expert_sum(out, down, expert_weights, residual=None if post_norm else hidden)
    else:
        summed = graph.buffer("expert_sum", latent.width, x.rows)
        tape.expert_sum(summed, down, expert_weights)
        residual, x = None if post_norm else hidden, wide_x
        tape.matmul(summed, [graph.projection(f"{block}.ffn_latent_up", out, summed.width, residual=residual)])
    _write_shared_expert(graph, layer, out, x)
    if architecture.dense_share and graph.weights.has(f"{block}.ffn_down.weight"):
        inner = _inner(graph, layer, f"{block}.ffn_gate", f"{block}.ffn_up", f"{block}.ffn_down", x)
        tape.matmul(inner, [graph.projection(f"{block}.ffn_down", out, inner.width, residual=out)])
        tape.scale(out, architecture.dense_share)
    if post_norm:
        graph.add_normed(hidden, out, post_norm)


def _latent_input(graph: Graph, block: str, x: Buffer) -> Buffer | None:
    """The input of routed experts in models whose experts are narrower than the residual stream (Nemotron 3)."""
    name = f"{block}.ffn_latent_down"
    if not graph.weights.has(f"{name}.weight"):
        return None
    return graph.product(name, x, "expert_latent", graph.weights.shape(f"{name}.weight")[0])


def _routing(graph: Graph, layer: int, residual_scale: float) -> Routing:
    experts, architecture = graph.config.experts, graph.architecture
    assert experts is not None, "the caller has checked that the model has experts"
    gating = architecture.gating if experts.gating is None else _GATING_CODES[experts.gating]
    return Routing(
        num_experts=experts.num_experts,
        num_selected=experts.num_selected,
        gating=gating if experts.margin is None else Gating.SPARSE_MIXER,
        normalise=architecture.normalise_experts and experts.margin is None,
        scale=experts.scale * residual_scale,
        selection_bias=_selection_bias(graph, layer, experts.num_experts),
        num_groups=experts.num_groups,
        num_selected_groups=experts.num_selected_groups,
        num_group_values=experts.num_group_values,
        margin=experts.margin or 0.0,
    )


def _selection_bias(graph: Graph, layer: int, num_experts: int) -> FloatArray | None:
    """The bias of routing values for the choice alone; some files name it without the usual ending."""
    name = f"blk.{layer}.exp_probs_b"
    found = graph.weights.optional_vector(f"{name}.bias", (num_experts,))
    return graph.weights.optional_vector(name, (num_experts,)) if found is None else found


def multiply_experts(
    graph: Graph, block: str, outs: Sequence[tuple[str, Buffer]], size: int, x: Buffer, ids: Buffer
) -> None:
    """Gate and up of the selected experts: two stacks, or the rows of one; up alone in models without a gate."""
    fused = f"{block}.ffn_gate_up_exps"
    for position, (letter, out) in enumerate(outs):
        if graph.weights.has(f"{fused}.weight") and len(outs) == 2:
            graph.expert_product(fused, out, x, ids, x.width, rows=(position * size, 2 * size))
        else:
            graph.expert_product(f"{block}.ffn_{letter}_exps", out, x, ids, x.width)


def _write_shared_expert(graph: Graph, layer: int, out: Buffer, x: Buffer) -> None:
    """Add the shared expert, if the file has one, optionally gated."""
    block = f"blk.{layer}"
    down_name = f"{block}.ffn_down_shexp"
    if not graph.weights.has(f"{down_name}.weight"):
        return
    inner = _inner(graph, layer, f"{block}.ffn_gate_shexp", f"{block}.ffn_up_shexp", down_name, x)
    gate_name = f"{block}.ffn_gate_inp_shexp"
    architecture = graph.architecture.of_layer(layer)
    scale = 1.0 if architecture.feed_forward_post_norm else architecture.residual_scale
    scale *= architecture.shared_expert_share
    if not graph.weights.has(f"{gate_name}.weight"):
        graph.tape.matmul(inner, [graph.projection(down_name, out, inner.width, residual=out, scale=scale)])
        return
    shared = graph.buffer("shared_expert", out.width, x.rows)
    gate = graph.buffer("shared_expert_gate", 1, x.rows)
    graph.tape.matmul(inner, [graph.projection(down_name, shared, inner.width)])
    graph.tape.matmul(x, [graph.projection(gate_name, gate, x.width)])
    graph.tape.multiply_sigmoid(shared, shared, gate)
    graph.tape.add(out, out, shared, scale)
