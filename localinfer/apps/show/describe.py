"""The contents of a model on disk, as text and as JSON.

Of a GGUF file only the header is read, so any architecture can be shown; a Hugging Face folder is shown as the GGUF
file it converts to, which needs a supported architecture.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from localinfer.engine.sampling.params import file_sampling
from localinfer.errors import ModelFileError
from localinfer.loading.memory.gpu_plan import describe_gpus, gpu_line
from localinfer.loading.memory.report import describe_memory, memory_lines
from localinfer.quant.formats.types import TensorRecord, bits_per_weight
from localinfer.quant.gguf.reader import GGUFFile, Metadata, read_gguf
from localinfer.terminal import neutralise_controls

if TYPE_CHECKING:
    from localinfer.apps.show.verify import Verification
    from localinfer.loading.media import MediaPlan
    from localinfer.models.checkpoint.model import CheckpointModel

LONGEST_ARRAY = 16
"""Arrays with more elements are shown by their count."""
LONGEST_TEXT = 72

# The name of each size, and its key after the architecture's name.
_SIZE_KEYS = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "context_length": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_used": "expert_used_count",
}


@dataclass(frozen=True)
class TypeShare:
    """The tensors of one type in a file."""

    type: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    bits_per_weight: float


@dataclass(frozen=True, kw_only=True)
class FileDescription:
    """Everything that `localinfer show` prints of a model."""

    path: str
    num_parts: int
    """Files of a model that is split into several."""
    num_bytes: int
    gguf_version: int | None
    """None for a Hugging Face folder, whose tensors are described as in GGUF."""
    architecture: str
    name: str | None
    sizes: dict[str, Any]
    """Context length, layers, heads and the like; those that the file lacks are absent."""
    num_parameters: int
    bits_per_weight: float
    types: list[TypeShare]
    tokenizer: dict[str, Any]
    chat_template: dict[str, Any] | None
    unknown_settings: list[str]
    """Metadata keys that this version ignores and that may change results."""
    metadata: dict[str, Any]
    tensors: list[dict[str, Any]]
    stored_as: list[str] = field(default_factory=list)
    """Storage of a folder's quantized matrices, the types they run as, and unused parts; empty for a file."""
    drafts_for: str | None = None
    """Architecture of the target, for a draft model that runs beside its target only."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Memory needed by context length, see `memory.report.describe_memory`."""
    gpus: dict[str, Any] | None = None
    """Parts that GPUs would hold, see `memory.gpu_plan.describe_gpus`; None without an NVIDIA driver."""
    program: dict[str, Any] | None = None
    """The model's ops (`models.decoder.listing`), if requested."""
    sampling: dict[str, float | int] = field(default_factory=dict)
    """Sampling options that the file recommends."""
    encoders: dict[str, Any] | None = None
    """File of the encoders beside a model, and what it reads by them; of a file of encoders itself, what it is for."""
    adapter: str = ""
    """An adapter that changes some texts, in words; empty without one."""


def describe_file(path: str, *, ops: bool = False) -> FileDescription:
    """Read the header of the GGUF file, or the settings of the Hugging Face folder, at `path`.

    ops: also list the model's ops, which needs a supported architecture.
    Raises: ModelFileError or a subclass if it cannot be opened or is invalid.
    """
    with _open(path) as file:
        metadata: Mapping[str, object] = file.metadata
        tensors: list[TensorRecord] = list(file.tensors.values())
        num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE
        from localinfer.models.decoder.metadata_keys import unknown_settings

        version = file.version if isinstance(file, GGUFFile) else None
        stored_bytes = file.num_bytes if version is None else sum(tensor.num_bytes for tensor in tensors)
        architecture = _string(metadata, "general.architecture") or "unknown"
        encoders, plan = _encoders(file, architecture)
        return FileDescription(
            path=str(file.path),
            num_parts=sum(path.suffix != ".json" for path in file.paths),
            num_bytes=file.num_bytes,
            gguf_version=version,
            architecture=architecture,
            name=_string(metadata, "general.name"),
            sizes=_sizes(metadata, architecture),
            num_parameters=num_parameters,
            bits_per_weight=8 * stored_bytes / num_parameters if num_parameters else 0.0,
            types=_type_shares(tensors),
            tokenizer=_tokenizer(metadata),
            chat_template=_chat_template(metadata),
            unknown_settings=unknown_settings(file),
            metadata={key: _plain_value(metadata, key) for key in metadata},
            tensors=[
                {"name": one.name, "type": one.type.name, "shape": list(one.shape), "num_bytes": one.num_bytes}
                for one in tensors
            ],
            stored_as=_stored_as(file),
            drafts_for=OF_ANOTHER_CACHE.get(architecture),
            memory=describe_memory(path, media=plan),
            gpus=describe_gpus(path),
            program=_program(file) if ops else None,
            sampling=file_sampling(metadata, name=file.path.name),
            encoders=encoders,
            adapter=getattr(file, "adapter", ""),
        )


def _encoders(
    file: "GGUFFile | CheckpointModel", architecture: str
) -> "tuple[dict[str, Any] | None, MediaPlan | None]":
    """The field `encoders` of a description, and what they take."""
    from localinfer.loading.options import media_path_of

    path = file.path if architecture == "clip" else media_path_of("auto", file.path)
    if path is None:
        return None, None
    from localinfer.loading.media import plan_media

    try:
        plan = plan_media(path)
    except ModelFileError as error:
        return {"file": path.name, "reads": [], "problem": str(error)}, None
    reads = ["pictures" if kind == "image" else "sounds" for kind in plan.kinds]
    sizes = {"weight_bytes": plan.weight_bytes, "buffer_bytes": plan.buffer_bytes}
    return {"file": path.name, "reads": reads, **sizes}, plan


def _program(file: "GGUFFile | CheckpointModel") -> dict[str, Any]:
    from localinfer.models.decoder.listing import list_program

    return list_program(file)


def _stored_as(file: "GGUFFile | CheckpointModel") -> list[str]:
    forms = [str(form) for form in getattr(file, "quantization", ())]
    return forms + [notice for notice in getattr(file, "notices", ()) if notice not in forms]


def _open(path: str) -> "GGUFFile | CheckpointModel":
    if not os.path.isdir(path):
        return read_gguf(path)
    from localinfer.models.checkpoint.model import open_checkpoint

    return open_checkpoint(path)


def _string(metadata: Mapping[str, object], key: str) -> str | None:
    if key not in metadata:
        return None
    return metadata.string(key) if isinstance(metadata, Metadata) else str(metadata[key])


def _sizes(metadata: Mapping[str, object], architecture: str) -> dict[str, Any]:
    sizes = {
        word: _plain_value(metadata, f"{architecture}.{key}")
        for word, key in _SIZE_KEYS.items()
        if f"{architecture}.{key}" in metadata
    }
    tokens = "tokenizer.ggml.tokens"
    if tokens in metadata:
        sizes["vocab_size"] = _length(metadata, tokens)
    return sizes


def _length(metadata: Mapping[str, object], key: str) -> int | None:
    """The length of an array, without decoding it; None for other values."""
    if isinstance(metadata, Metadata):
        return metadata.stored(key).count
    value = metadata[key]
    return len(value) if isinstance(value, list | np.ndarray) else None


def _type_shares(tensors: list[TensorRecord]) -> list[TypeShare]:
    """One share per tensor type, largest first."""
    shares = []
    for kind in {tensor.type for tensor in tensors}:
        members = [tensor for tensor in tensors if tensor.type is kind]
        num_parameters = sum(math.prod(tensor.shape) for tensor in members)
        num_bytes = sum(tensor.num_bytes for tensor in members)
        shares.append(TypeShare(kind.name, len(members), num_parameters, num_bytes, bits_per_weight(kind)))
    return sorted(shares, key=lambda share: (-share.num_bytes, share.type))


def _tokenizer(metadata: Mapping[str, object]) -> dict[str, Any]:
    keys = {name: f"tokenizer.ggml.{name}" for name in ("model", "pre", "bos_token_id", "eos_token_id")}
    return {name: _plain_value(metadata, key) for name, key in keys.items() if key in metadata}


def _chat_template(metadata: Mapping[str, object]) -> dict[str, Any] | None:
    key = "tokenizer.chat_template"
    template = _string(metadata, key)
    if template is None:
        return None
    return {"num_characters": len(template), "sha256": hashlib.sha256(template.encode()).hexdigest()}


def _plain_value(metadata: Mapping[str, object], key: str) -> Any:
    """A value for JSON: long arrays become a description, non-finite numbers text."""
    if not isinstance(metadata, Metadata):
        count = _length(metadata, key)
        return _plain_number(metadata[key]) if count is None or count <= LONGEST_ARRAY else f"array of {count}"
    stored = metadata.stored(key)
    if stored.count is not None and stored.count > LONGEST_ARRAY:
        return stored.description
    if stored.count is not None and stored.type.name == "STRING":
        return [entry.decode("utf-8", "replace") for entry in metadata.raw_strings(key)]
    value = metadata[key]
    if isinstance(value, np.ndarray):
        return [_plain_number(element) for element in value.tolist()]
    if stored.type.name == "FLOAT32" and isinstance(value, float):
        return _plain_number(float(str(np.float32(value))))
    return _plain_number(value)


def _plain_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def render_json(description: FileDescription, *, tensors: bool, verification: "Verification | None" = None) -> str:
    """One JSON object, with tensors, ops and what checks have found if requested."""
    record = dict(vars(description), types=[vars(share) for share in description.types])
    if verification is not None:
        record["verification"] = verification.as_json()
    if not tensors:
        del record["tensors"]
    if description.program is None:
        del record["program"]
    return json.dumps(record, indent=2, ensure_ascii=False)


def render_text(description: FileDescription, *, tensors: bool, verification: "Verification | None" = None) -> str:
    """Aligned lines without terminal controls."""
    lines = list(_summary_lines(description))
    lines += ["", "tensor types", *_type_lines(description)]
    if description.stored_as:
        lines += ["", "quantized in the folder, and run as", *(f"  {line}" for line in description.stored_as)]
    lines += ["", "memory on the CPU", *memory_lines(description.memory)]
    if description.gpus is not None:
        lines += ["", "on GPUs", f"  {gpu_line(description.gpus)}"]
    lines += ["", "metadata"]
    lines += [f"  {key} = {_short(value)}" for key, value in description.metadata.items()]
    if tensors:
        lines += ["", "tensors"]
        for tensor in description.tensors:
            shape = " x ".join(map(str, tensor["shape"]))
            lines.append(f"  {tensor['name']}  {tensor['type']}  {shape}  {_size(tensor['num_bytes'])}")
    if description.program is not None:
        from localinfer.models.decoder.listing import program_lines

        lines += ["", *program_lines(description.program)]
    if verification is not None:
        lines += ["", "verification", *verification.lines()]
    return neutralise_controls("\n".join(lines))


def _summary_lines(description: FileDescription) -> Iterator[str]:
    from localinfer.models.decoder.metadata_keys import listed

    template = description.chat_template
    kind = "Hugging Face folder" if description.gguf_version is None else f"GGUF {description.gguf_version}"
    rows: dict[str, str] = {
        "file": f"{_short(description.path, None)}, {_size(description.num_bytes)}, {kind}",
        "name": _short(description.name, None) if description.name else "not stated",
        "architecture": _short(description.architecture, None),
        "parameters": f"{_count(description.num_parameters)}, {description.bits_per_weight:.2f} bits per weight",
        **{word.replace("_", " "): _short(value) for word, value in description.sizes.items()},
        "tokenizer": ", ".join(f"{key} {_short(value)}" for key, value in description.tokenizer.items()) or "none",
        "chat template": (
            f"{template['num_characters']} characters, sha256 {template['sha256'][:12]}" if template else "none"
        ),
    }
    if description.drafts_for is not None:
        rows["architecture"] += f", a draft model: for a {description.drafts_for} model, given with it as --draft"
    if (encoders := description.encoders) is not None:
        reads = " and ".join(encoders["reads"]) or f"nothing: {encoders['problem']}"
        is_itself = encoders["file"] == os.path.basename(description.path)
        if not is_itself:
            rows["reads"] = f"text, {reads} by {_short(encoders['file'], None)}"
        elif os.path.isdir(description.path):
            rows["reads"] = f"text, {reads}"
        else:
            rows["reads"] = f"{reads}, for a model that it is given to as --mmproj"
    if description.adapter:
        rows["adapter"] = description.adapter
    if description.sampling:
        rows["sampling"] = ", ".join(f"{name} {value:g}" for name, value in description.sampling.items())
    if description.unknown_settings:
        rows["not understood"] = f"{listed(description.unknown_settings)} (ignored; may change the model's answers)"
    if description.num_parts > 1:
        rows["file"] += f", {description.num_parts} parts"
    width = max(map(len, rows))
    for label, value in rows.items():
        yield f"{label:<{width}}  {value}"


def _type_lines(description: FileDescription) -> Iterator[str]:
    width = max((len(share.type) for share in description.types), default=0)
    total = sum(share.num_bytes for share in description.types) or 1
    for share in description.types:
        yield (
            f"  {share.type:<{width}}  {share.num_tensors:>5} tensors  {_count(share.num_parameters):>8} weights  "
            f"{_size(share.num_bytes):>9}  {100 * share.num_bytes / total:5.1f}%"
        )


def _short(value: Any, longest: int | None = LONGEST_TEXT) -> str:
    """A value on one line, truncated; text without quotes."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        text = text[1:-1].replace('\\"', '"')
    if longest is not None and len(text) > longest:
        return f"{text[:longest]}..."
    return text


def _count(number: int) -> str:
    return _scaled(number, "B", "M", "K") or str(number)


def _size(num_bytes: int) -> str:
    return _scaled(num_bytes, "GB", "MB", "kB") or f"{num_bytes} B"


def _scaled(number: int, *units: str) -> str:
    """A number of 1000 or more in the largest of three units; "" for a smaller one."""
    scales = zip((10**9, 10**6, 10**3), units, strict=True)
    return next((f"{number / scale:.2f} {unit}" for scale, unit in scales if number >= scale), "")
