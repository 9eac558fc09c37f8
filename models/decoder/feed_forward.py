"""The feed-forward block: two matrices, three with a gate, or mixture of experts."""

from collections.abc import Sequence

from localinfer.kernels.ops import Buffer, Gating, LinearWeight, Projection, Routing
from localinfer.models.decoder.graph import Graph, refuse

_GATING_CODES = {1: Gating.SOFTMAX, 2: Gating.SIGMOID, 3: Gating.SOFTMAX_SELECTED}


def write_feed_forward(graph: Graph, layer: int, hidden: Buffer, x: Buffer) -> None:
    """Add one layer's feed-forward block, reading x, to hidden."""
    post_norm = graph.architecture.feed_forward_post_norm
    post_norm = post_norm and f"blk.{layer}.{post_norm}"
    if graph.weights.has(f"blk.{layer}.ffn_gate_inp.weight"):
        _write_experts(graph, layer, hidden, x, post_norm)
        return
    inner = _inner(graph, f"blk.{layer}.ffn_gate", f"blk.{layer}.ffn_up", f"blk.{layer}.ffn_down", x)
    down = f"blk.{layer}.ffn_down"
    graph.add_branch(hidden, inner, _down(graph, down, hidden), graph.bias(down, hidden.width), post_norm)


def _down(graph: Graph, name: str, hidden: Buffer) -> LinearWeight:
    return graph.weights.linear(f"{name}.weight", hidden.width, graph.weights.shape(f"{name}.weight")[-1])


def _inner(graph: Graph, gate_name: str, up_name: str, down_name: str, x: Buffer) -> Buffer:
    """The input of the down projection: activation(up x), or activation(gate x) * (up x)."""
    tape, architecture = graph.tape, graph.architecture
    size = graph.weights.shape(f"{down_name}.weight")[-1]
    up = graph.buffer("up", size, x.rows)
    if not architecture.gated:
        weight = graph.weights.linear(f"{up_name}.weight", size, x.width)
        tape.matmul(x, [Projection(weight, up, graph.bias(up_name, size))])
        tape.activation(up, up, architecture.activation)
        return up
    gate = graph.buffer("gate", size, x.rows)
    is_fused = not graph.weights.has(f"{gate_name}.weight") and graph.weights.shape(f"{up_name}.weight")[0] == 2 * size
    if not is_fused:
        gate_weight = graph.weights.linear(f"{gate_name}.weight", size, x.width)
        up_weight = graph.weights.linear(f"{up_name}.weight", size, x.width)
        gate_bias, up_bias = graph.bias(gate_name, size), graph.bias(up_name, size)
    else:
        fused = f"{up_name}.weight"
        gate_weight = graph.weights.linear(fused, 2 * size, x.width, slice(0, size))
        up_weight = graph.weights.linear(fused, 2 * size, x.width, slice(size, 2 * size))
        bias = graph.bias(up_name, 2 * size)
        gate_bias, up_bias = (None, None) if bias is None else (bias[:size], bias[size:])
    tape.matmul(x, [Projection(gate_weight, gate, gate_bias), Projection(up_weight, up, up_bias)])
    tape.gated_activation(up, gate, up, architecture.activation)
    return up


def _write_experts(graph: Graph, layer: int, hidden: Buffer, x: Buffer, post_norm: str | None) -> None:
    tape, architecture, experts = graph.tape, graph.architecture, graph.config.experts
    if experts is None:
        raise refuse(graph.config, "has a router (ffn_gate_inp) but no expert_count")
    block = f"blk.{layer}"
    num_experts, num_selected = experts.num_experts, experts.num_selected
    logits = graph.buffer("router_logits", num_experts, x.rows)
    expert_ids = graph.buffer("expert_ids", num_selected, x.rows)
    expert_weights = graph.buffer("expert_weights", num_selected, x.rows)
    router = graph.weights.linear(f"{block}.ffn_gate_inp.weight", num_experts, x.width)
    tape.matmul(x, [Projection(router, logits, graph.bias(f"{block}.ffn_gate_inp", num_experts))])
    # A residual scale is folded into the expert weights, unless a post-norm would undo it.
    residual_scale = 1.0 if post_norm else architecture.residual_scale
    tape.route(expert_ids, expert_weights, logits, _routing(graph, layer, residual_scale))

    size = graph.weights.shape(f"{block}.ffn_down_exps.weight")[-1]
    up = graph.buffer("expert_up", num_selected * size, x.rows)
    if architecture.gated:
        gate = graph.buffer("expert_gate", num_selected * size, x.rows)
        _multiply_experts(graph, block, [("gate", gate), ("up", up)], size, x, expert_ids)
        if architecture.weigh_expert_inputs:
            # Weighting x weights gate and up; the sum over experts then needs no weights.
            tape.expert_scale(gate, expert_weights)
        tape.gated_activation(up, gate, up, architecture.activation)
    else:
        _multiply_experts(graph, block, [("up", up)], size, x, expert_ids)
        tape.activation(up, up, architecture.activation)
    down = graph.buffer("expert_down", num_selected * hidden.width, x.rows)
    weight = graph.weights.experts(f"{block}.ffn_down_exps.weight", num_experts, hidden.width, size)
    bias = graph.weights.optional_vector(f"{block}.ffn_down_exps.bias", (num_experts, hidden.width))
    tape.expert_matmul(down, up, weight, expert_ids, bias, input_per_slot=True)
    out = graph.buffer("branch", hidden.width, x.rows) if post_norm else hidden
    tape.expert_sum(out, down, expert_weights, residual=None if post_norm else hidden)
    _write_shared_expert(graph, block, out, x)
    if post_norm:
        graph.add_normed(hidden, out, post_norm)


def _routing(graph: Graph, layer: int, residual_scale: float) -> Routing:
    experts, architecture = graph.config.experts, graph.architecture
    assert experts is not None, "the caller has checked that the model has experts"
    return Routing(
        num_experts=experts.num_experts,
        num_selected=experts.num_selected,
        gating=architecture.gating if experts.gating is None else _GATING_CODES[experts.gating],
        normalise=architecture.normalise_experts,
        scale=experts.scale * residual_scale,
        selection_bias=graph.weights.optional_vector(f"blk.{layer}.exp_probs_b.bias", (experts.num_experts,)),
        num_groups=experts.num_groups,
        num_selected_groups=experts.num_selected_groups,
    )


def _multiply_experts(
    graph: Graph, block: str, outs: Sequence[tuple[str, Buffer]], size: int, x: Buffer, ids: Buffer
) -> None:
    """Gate and up of the selected experts: two stacks, or the rows of one; up alone in models without a gate."""
    experts = graph.config.experts
    assert experts is not None, "the caller has checked that the model has experts"
    fused = f"{block}.ffn_gate_up_exps.weight"
    for position, (letter, out) in enumerate(outs):
        if graph.weights.has(fused) and len(outs) == 2:
            rows = slice(position * size, (position + 1) * size)
            weight = graph.weights.experts(fused, experts.num_experts, 2 * size, x.width, rows)
            bias = None
        else:
            name = f"{block}.ffn_{letter}_exps"
            weight = graph.weights.experts(f"{name}.weight", experts.num_experts, size, x.width)
            bias = graph.weights.optional_vector(f"{name}.bias", (experts.num_experts, size))
        graph.tape.expert_matmul(out, x, weight, ids, bias)


def _write_shared_expert(graph: Graph, block: str, out: Buffer, x: Buffer) -> None:
    """Add the shared expert, if the file has one, optionally gated."""
    down_name = f"{block}.ffn_down_shexp"
    if not graph.weights.has(f"{down_name}.weight"):
        return
    inner = _inner(graph, f"{block}.ffn_gate_shexp", f"{block}.ffn_up_shexp", down_name, x)
    down = _down(graph, down_name, out)
    gate_name = f"{block}.ffn_gate_inp_shexp.weight"
    scale = 1.0 if graph.architecture.feed_forward_post_norm else graph.architecture.residual_scale
    if not graph.weights.has(gate_name):
        graph.tape.matmul(inner, [Projection(down, out, residual=out, scale=scale)])
        return
    shared = graph.buffer("shared_expert", out.width, x.rows)
    gate = graph.buffer("shared_expert_gate", 1, x.rows)
    graph.tape.matmul(inner, [Projection(down, shared)])
    graph.tape.matmul(x, [Projection(graph.weights.linear(gate_name, 1, x.width), gate)])
    graph.tape.multiply_sigmoid(shared, shared, gate)
    graph.tape.add(out, out, shared, scale)
