"""Layers for next-token prediction (MTP, "nextn" in GGUF): what they read, and what of them the model itself needs.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2. Such a layer joins the embedding of a token with the hidden states
of the position before it. It has keys and values of its own, which the model's passes also write, from its true hidden
states, so that they are there for every prefix, cached ones included, whenever drafts are wanted.
"""

from dataclasses import replace

import numpy as np

from localinfer.kernels import ops
from localinfer.kernels.layouts import TILE_ROWS
from localinfer.kernels.ops import Buffer, Matmul, Op, OpGraph, StateShape, short_convolution_state
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.graph_parts import buffers_of, is_whole, read_by, written_by

_SHORT_HEAD_SHARE = 8


def short_head_tokens(vocab_size: int) -> int:
    """Number of tokens, the first of the vocabulary, of a draft layer's short output head; 0 for no such head.

    A draft computes a whole output head per token, which of a small model is most of its work, and what it leaves out
    is only not drafted. Vocabularies of byte pairs are in the order of merges, so their first eighth is 85 to 91 % of
    English and of source code (of Qwen's 152 thousand tokens and Llama 3's 128), and less of other languages. Source:
    FR-Spec (arXiv 2502.14856), which takes the most frequent tokens of a corpus.
    """
    return vocab_size // (_SHORT_HEAD_SHARE * TILE_ROWS) * TILE_ROWS


def carried_states(config: ModelConfig) -> list[StateShape]:
    """Beside the states of recurrent layers: the hidden states of the position before, for draft layers."""
    return [short_convolution_state(config.hidden_size, 2)] if config.num_draft_layers else []


def write_previous_states(graph: Graph, states: Buffer) -> Buffer:
    """Write every row's hidden states of the position before it, which draft layers cache something of.

    Of a segment's first row the sequence carries them. A model with recurrent layers has them among its states, so that
    they are there wherever a sequence resumes from a snapshot, by a convolution that takes the row before and nothing
    of its own.
    """
    previous = graph.buffer("previous_hidden", states.width, states.rows)
    graph.tape.previous_row(previous, states)
    if graph.tape.states:
        taps = np.zeros((states.width, 2), np.float32)
        taps[:, 0] = 1.0
        graph.short_convolution(previous, states, taps, has_silu=False)
    return previous


def write_draft_input(graph: Graph, layer: int, previous: Buffer) -> Buffer:
    """Write what a layer's block reads: eh_proj of the normed embedding and the normed hidden states before it."""
    config, tape, name = graph.config, graph.tape, f"blk.{layer}.nextn"
    width = config.hidden_size
    embedding, before, joined = (
        graph.buffer(f"draft_{part}", size, previous.rows)
        for part, size in (("embedding", width), ("previous", width), ("pair", 2 * width))
    )
    own_table = f"{name}.embed_tokens.weight"
    table = own_table if graph.weights.has(own_table) else "token_embd.weight"
    tape.embed(embedding, graph.weights.embedding(table, config.vocab_size, width), graph.architecture.embedding_scale)
    if config.takes_media:
        tape.embed_media(embedding)
    graph.norm(embedding, embedding, f"{name}.enorm")
    graph.norm(before, previous, f"{name}.hnorm")
    for half, buffer in enumerate((embedding, before)):
        tape.copy_heads(joined, buffer, 1, width, 2 * width, width, out_offset=half * width)
    hidden = graph.buffer("draft_hidden", width, previous.rows)
    tape.matmul(joined, [graph.projection(f"{name}.eh_proj", hidden, 2 * width)])
    return hidden


def write_draft_norm(graph: Graph, layer: int, hidden: Buffer) -> Buffer:
    """Write the norm before a layer's output head: its own, or else the model's."""
    normed = graph.buffer("draft_norm", hidden.width, hidden.rows)
    names = (f"blk.{layer}.nextn.shared_head_norm", f"blk.{layer}.layer_output_norm", graph.architecture.output_norm)
    name = next(name for name in names if name is not None and graph.weights.has(f"{name}.weight"))
    if graph.architecture.draft_layers.has_layer_norm:
        weight = graph.weights.vector(f"{name}.weight", (hidden.width,))
        graph.tape.layer_norm(normed, hidden, weight, None, graph.config.layer_norm_epsilon)
    else:
        graph.norm(normed, hidden, name)
    return normed


def without_unused(graph: OpGraph) -> OpGraph:
    """A graph without the ops whose results nothing reads; what writes a cache or carries a state stays."""
    wanted = {graph.output.index} | ({graph.hidden.index} if graph.hidden is not None else set())
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if isinstance(op, Matmul):
            projections = [one for one in op.projections if one.out.index in wanted]
            if not projections:
                continue
            op = replace(op, projections=projections)
        written = set(written_by(op))
        if written and not written & wanted and not isinstance(op, ops.RecurrentOp | ops.PreviousRow):
            continue
        read = {buffer.index for buffer in buffers_of(op)}
        if is_whole(op):
            wanted -= written - read_by(op)
        wanted |= read - written | read_by(op)
        kept.append(op)
    return replace(graph, ops=tuple(reversed(kept)), typed_ops=frozenset())
