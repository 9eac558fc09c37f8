"""`llm.info`: what a loaded model is, for a program that shows it or decides by it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localinfer.cache.eviction import KVEviction
    from localinfer.chat.reply import TemplateFormats
    from localinfer.models.load.loader import Model


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a loaded model is.

    name: as the file says it, or else the file's. path: of the file or folder. architecture: GGUF's name of it.
    capabilities: what it can be asked for: "completion", "chat", "embeddings", "rerank".
    parameters: number of weights. quantization: the type of most of them, as GGUF names it, or how a folder stores
        them. bits_per_weight: on disk. file_bytes: on disk, all parts.
    num_layers, num_experts: blocks, and experts in each; 0 for a model without.
    vocab_size: token ids. context_length: tokens of prompt and completion together, as loaded; trained_context_length:
        as the file says.
    device: "cpu" or "cuda". threads: the most that compute on the CPU. kv_type: of keys and values.
    memory_bytes: of weights, buffers, and keys and values of a text as long as the context; of a draft model none. On a
        GPU about as much of its memory.
    chat_template: Jinja source, None without one, where `chat` takes a general form.
    supports_tools: the template describes tools to the model, or writes its calls; with others `chat` does, for a
        model that may never have seen any. supports_thinking: the template has reasoning, so that
        `thinking` may be given.
    warnings: what the checks of a load found likely wrong with the file, a line each; see `verify` of `load`.
    sampling: options that the file recommends, by name; empty without. `llm.set_defaults(**llm.info.sampling)` obeys.
    """

    name: str
    path: Path
    architecture: str
    capabilities: tuple[str, ...]
    parameters: int
    quantization: str
    bits_per_weight: float
    file_bytes: int
    num_layers: int
    num_experts: int
    vocab_size: int
    context_length: int
    trained_context_length: int
    device: str
    threads: int
    kv_type: str
    memory_bytes: int
    chat_template: str | None
    supports_tools: bool
    supports_thinking: bool
    sampling: Mapping[str, float | int]
    warnings: tuple[str, ...] = ()


def model_info(model: "Model", replies: "TemplateFormats | None", kv_window: "KVEviction | None" = None) -> ModelInfo:
    """Gather the facts of a loaded model, in some ten milliseconds.

    replies: of its chat template, if it has one. kv_window: what bounds its texts' keys and values.
    Raises: ClosedError once the model is closed.
    """
    from localinfer.memory.plan import plan_memory
    from localinfer.sampling.file_defaults import file_sampling

    config, file, template = model.config, model.file, model.chat_template
    tensors = file.tensors.values()
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    plan = plan_memory(file, config, kv_type=model.kv_layout.kv_type)
    if kv_window is not None:
        plan = replace(plan, kv_tokens=kv_window.most_tokens)
    name, trained = file.metadata.get("general.name"), file.metadata.get(f"{config.architecture}.context_length")
    source = None if template is None or template.source is None or template.is_fallback else template.source
    # A general form, which stands in for a missing template, says nothing about the model.
    own = replies if source is not None and "chat" in model.capabilities else None
    return ModelInfo(
        name=name if isinstance(name, str) and name else file.path.stem,
        path=file.path,
        architecture=config.architecture,
        capabilities=model.capabilities,
        parameters=parameters,
        quantization=_quantization(model),
        bits_per_weight=8 * sum(tensor.num_bytes for tensor in tensors) / max(1, parameters),
        file_bytes=file.num_bytes,
        num_layers=config.num_main_layers,
        num_experts=0 if config.experts is None else config.experts.num_experts,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        trained_context_length=trained if isinstance(trained, int) else config.context_length,
        device=model.device,
        threads=model.pool.num_threads,
        kv_type=model.kv_layout.kv_type,
        memory_bytes=plan.total_bytes(config.context_length),
        chat_template=source,
        supports_tools=own is not None and (own.calls.is_native or own.calls.describes_tools),
        supports_thinking=own is not None and own.reasoning is not None,
        sampling=file_sampling(file.metadata, name=file.path.name),
        warnings=tuple(finding.message for finding in model.findings),
    )


def _quantization(model: "Model") -> str:
    """The type of most weights; of a folder how it stores its quantized matrices."""
    stored = getattr(model.file, "quantization", ())
    if stored:
        return ", ".join(str(form) for form in stored)
    weights: Counter[str] = Counter()
    for tensor in model.file.tensors.values():
        weights[tensor.type.name] += math.prod(tensor.shape)
    return weights.most_common(1)[0][0]
