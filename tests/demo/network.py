"""The demo model in torch: a Llama of a few million weights, named as GGUF names its tensors."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model; every matmul input is a multiple of 256 wide, as block formats want."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    context_length: int = 1024
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, both float32[length, head_dim / 2], of rotary positions."""
    half = shape.head_dim // 2
    frequencies = shape.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate neighbouring pairs (2i, 2i + 1) of x[batch, time, heads, head_dim], GGUF's llama way."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cosines[:, None], sines[:, None]
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, block: int = 256) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v for q, k, v[batch, heads, time, head_dim], query block by block.

    Plain products in bfloat16 took half of torch's fused CPU attention's time, forward and backward.
    """
    with torch.autocast("cpu", enabled=False):
        q, time_steps = q * q.shape[-1] ** -0.5, q.shape[2]
        outputs = []
        for start in range(0, time_steps, block):
            end = min(time_steps, start + block)
            is_future = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
            mask = torch.zeros(end - start, end, dtype=q.dtype).masked_fill_(is_future, -math.inf)
            scores = q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2) + mask
            outputs.append(scores.softmax(-1) @ v[:, :, :end])
        return torch.cat(outputs, 2)


class Layer(nn.Module):
    """One Llama block: attention with grouped KV heads, then SwiGLU, both pre-normed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.attn_norm = nn.RMSNorm(h, shape.norm_epsilon)
        self.attn_q = nn.Linear(h, q, bias=False)
        self.attn_k = nn.Linear(h, kv, bias=False)
        self.attn_v = nn.Linear(h, kv, bias=False)
        self.attn_output = nn.Linear(q, h, bias=False)
        self.ffn_norm = nn.RMSNorm(h, shape.norm_epsilon)
        self.ffn_gate = nn.Linear(h, shape.intermediate_size, bias=False)
        self.ffn_up = nn.Linear(h, shape.intermediate_size, bias=False)
        self.ffn_down = nn.Linear(shape.intermediate_size, h, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map x[batch, time, hidden] to the same shape."""
        normed = self.attn_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.shape.head_dim))
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = rotate_pairs(q, cosines, sines).type_as(v), rotate_pairs(k, cosines, sines).type_as(v)
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(normed)) * self.ffn_up(normed))


class DemoModel(nn.Module):
    """The whole decoder; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blk = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.output_norm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.num_layers) if is_residual else 0.02)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return logits[batch, time, vocab] for token_ids int64[batch, time]."""
        x = self.token_embd(token_ids)
        cosines, sines = rope_tables(self.shape, token_ids.shape[1])
        for layer in self.blk:
            x = layer(x, cosines, sines)
        return F.linear(self.output_norm(x), self.token_embd.weight)
