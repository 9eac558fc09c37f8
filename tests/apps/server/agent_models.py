"""A model for sessions of agents: random weights, a long context, tools in its template, and replies that are given.

Every kernel computes as ever; what is given is the token that each step chooses.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from local_servers import MODEL
from numpy.typing import NDArray

import localinfer
from localinfer.generation import text_generation
from localinfer.llm import LLM
from localinfer.quant.gguf.reader import read_gguf
from tests.models.small_models import llama_shapes, write_random_tensors

AssistantMessage = dict[str, Any]
Script = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], AssistantMessage]
"""Messages and options of a chat -> the reply that the model is to give."""

CONTEXT = 131_072
HEAD_SIZE = 16
TEMPLATE = """\
{%- set has_system = messages[0].role == "system" -%}
{%- if has_system or tools -%}
<|im_start|>system
{{ messages[0].content if has_system else "You answer." }}
{%- if tools -%}
{{ "\\n\\n" }}Call a function by its name and arguments as JSON in <tool_call> tags.
<tools>{% for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}{{ "\\n" }}</tools>
{%- endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if loop.first and has_system -%}
{%- elif message.role == "tool" -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content %}{{ "\\n" }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_agent_model(
    path: Path,
    *,
    layers: int = 1,
    heads: int = 2,
    head_size: int = HEAD_SIZE,
    kv_heads: int | None = None,
    feed_forward: int | None = None,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write a llama with the demo model's vocabulary, as wide as its heads are together; return its path."""
    hidden, kv_size = heads * head_size, (kv_heads or max(1, heads // 4)) * head_size
    feed_forward = feed_forward or (hidden if layers == 1 else 3 * hidden)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("agent-test")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_size // head_size)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    with read_gguf(MODEL.path) as demo:
        tokens = demo.metadata["tokenizer.ggml.tokens"]
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([int(kind) for kind in demo.metadata["tokenizer.ggml.token_type"]])
        writer.add_token_merges(demo.metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    write_random_tensors(
        writer, llama_shapes(len(tokens), hidden, feed_forward, kv_size, layers), seed=7, matrix_type=matrix_type
    )
    return path


def load_agent_model(path: Path, script: Script, **options: Any) -> LLM:
    """Load it, to answer every chat as a script says; within `given_replies`."""
    llm = localinfer.load(path, **options)
    stream_chat = llm.stream_chat

    def given(messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        shared = {name: options[name] for name in ("tools", "template_variables") if name in options}
        reply = {"role": "assistant", "content": "", **script(messages, options)}
        before = llm.render_chat(messages, **shared)
        after = llm.render_chat([*messages, reply], add_generation_prompt=False, **shared)
        assert after.startswith(before), "the reply stands behind the prompt"
        text = after[len(before) :].rpartition("<|im_end|>")[0]
        _given.token_ids = llm.tokenizer.encode(text, add_special=False)
        try:
            return stream_chat(messages, **options)
        finally:
            del _given.token_ids

    llm.stream_chat = given  # type: ignore[method-assign]
    return llm


_given = threading.local()
"""The ids of the reply to the prompt that this thread is about to give to the engine."""


@contextmanager
def given_replies() -> Iterator[None]:
    """Have models of `load_agent_model` choose the tokens of their scripts."""
    make_mask = text_generation._make_mask

    def mask_of(
        constraints: Any, tokenizer: Any, options: Any, reply: Any, start: int, vocab_size: int, notices: list[str]
    ) -> Any:
        ids = getattr(_given, "token_ids", None)
        if ids is None:
            return make_mask(constraints, tokenizer, options, reply, start, vocab_size, notices)
        wanted = [*ids, tokenizer.eos_token_id]

        def mask(history: NDArray[np.int32]) -> NDArray[np.bool_]:
            allowed = np.zeros(vocab_size, np.bool_)
            allowed[wanted[min(history.size - start, len(wanted) - 1)]] = True
            return allowed

        return mask

    text_generation._make_mask = mask_of
    try:
        yield
    finally:
        text_generation._make_mask = make_mask
