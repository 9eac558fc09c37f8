"""A Hugging Face folder, read as the GGUF file it would convert to.

Callers of this module get GGUF's names, metadata and blocks, so a folder runs, and is converted, by the same code
as a file. Plain tensors are views of the map; only what GGUF stores otherwise is made on access: rows of
queries and keys in another order, norms plus one, stacks of experts.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, ModelFileError, TokenizerError, UnsupportedFormatError
from localinfer.models.checkpoint.adapter import ADAPTER_FILE, ADAPTER_KEY, read_adapter
from localinfer.models.checkpoint.changes import Derived, ExpertRows, RowOrder
from localinfer.models.checkpoint.contrastive_families import reading_metadata
from localinfer.models.checkpoint.hyperparameters import Hyperparameters, read_hyperparameters
from localinfer.models.checkpoint.late_families import prompt_metadata
from localinfer.models.checkpoint.tensor_plan import PlannedTensor, has_head, part_names, plan_tensors
from localinfer.models.checkpoint.text_modules import decision_metadata, is_jev, name_head, read_text_modules
from localinfer.models.checkpoint.tokenizer_json import read_tokenizer
from localinfer.models.decoder.checked_weights import is_of_adapter
from localinfer.models.decoder.metadata_keys import SAMPLING_PREFIX
from localinfer.quant.checkpoint.folder import CheckpointFolder, open_folder
from localinfer.quant.checkpoint.groups import GroupedMatrix, stored_form
from localinfer.quant.checkpoint.module_reader import StoredForm, StoredMatrix, common_type, left_aside
from localinfer.quant.checkpoint.quantization import open_quantization, quantization_settings
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.mapped_file import FileStretch
from localinfer.quant.gguf.reader import SingleValue
from localinfer.types import Closing, is_finite_number

_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "penalty_repeat",
}
"""Setting of generation_config.json -> key."""
_OF_ANY_CHOICE = "repetition_penalty"
"""Setting that holds without sampling too."""


def read_sampling(folder: CheckpointFolder) -> dict[str, object]:
    """The metadata of the numbers in generation_config.json, without those that its `do_sample` switches off.

    Raises: CorruptFileError if the file is damaged.
    """
    settings = folder.json("generation_config.json") or {}
    samples = settings.get("do_sample") is not False
    return {
        f"{SAMPLING_PREFIX}{key}": value
        for name, key in _KEYS.items()
        if (samples or name == _OF_ANY_CHOICE) and is_finite_number(value := settings.get(name))
    }


logger = logging.getLogger(__name__)

_TYPES = {"F16": TensorType.F16, "BF16": TensorType.BF16, "F32": TensorType.F32}
_TEMPLATE = "tokenizer.chat_template"
_OF_ONE_PROMPT = ("paligemma",)
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Template of models that were trained on one prompt and its answer, without marks of turns."""
_COMPARED_BYTES = 1 << 22
_WAY_OUT = "Download the folder again or choose another copy of the model."


class ReplacedMetadata(dict[str, object]):
    """Metadata with other values under some keys. `replaced_keys`: those that are not the folder's."""

    def __init__(self, metadata: Mapping[str, object], values: Mapping[str, SingleValue]) -> None:
        super().__init__({**metadata, **values})
        self.replaced_keys = frozenset(values) | getattr(metadata, "replaced_keys", frozenset())


class CheckpointModel(Closing):
    """A `ModelFile` over a Hugging Face folder, open until `close` (or the end of a `with` block).

    A vocabulary that is not built leaves its keys out of `metadata` and says why in `tokenizer_error`: the model still
    runs on token ids.
    """

    path: Path
    paths: tuple[Path, ...]
    num_bytes: int
    metadata: Mapping[str, object]
    tensors: dict[str, TensorRecord]
    tokenizer_error: TokenizerError | None = None
    unknown_settings: tuple[str, ...]
    """Settings of config.json that may change results and that nothing here obeys."""
    quantization: tuple[StoredForm, ...]
    """Forms in which the folder stores its quantized matrices, and the types they run as."""
    notices: tuple[str, ...]
    """Changes of weights that do not stay as they are, and tensors that are not used."""
    adapter: str
    """An adapter that changes some texts, in words; empty without one."""
    adapter_error: ModelFileError | None = None
    """The reason why there is none, in a folder of such a model."""

    def __init__(self, folder: CheckpointFolder, *, warns: bool = True) -> None:
        """Read a folder, which is closed with it. warns: of tensors that are left aside."""
        name_head(folder)
        parameters = read_hyperparameters(folder.config, folder.path.resolve().name)
        self._reader = open_quantization(folder)
        settings = quantization_settings(folder)
        unused, asides = left_aside(folder.tensors, settings)
        if self._reader is not None:
            unused.update(name for name in folder.tensors if self._reader.is_unused(name))
        parts = {name: self._part(name) for name in folder.tensors if name not in unused}
        text_modules = read_text_modules(folder)
        is_headless = text_modules.pooling_type is not None or is_jev(folder.config)
        is_headless = is_headless and not has_head(folder.tensors)
        if is_headless or parameters.metadata.get(f"{parameters.family.architecture}.late_interaction"):
            parameters = replace(parameters, ties_embeddings=None)
        self._folder = folder
        plan = plan_tensors(parts, parameters, self._are_equal)
        adapter = None
        try:
            adapter = read_adapter(folder, plan.tensors)
        except ModelFileError as error:
            # Texts run without it; sounds are refused by it.
            self.adapter_error = type(error)(*error.args)
        self._plan = plan.tensors | ({} if adapter is None else adapter.tensors)
        self.adapter = "" if adapter is None else adapter.description
        other_parts = ", ".join(f"{part}: {count}" for part, count in part_names(plan.other_parts).items())
        first_drafter = next(iter(plan.drafters), "")
        for names, words, which in (
            (plan.other_parts, "its text model runs without %d tensors of other parts (%s)", other_parts),
            (
                plan.drafters,
                "it runs without drafting; %d tensors of layers that predict further tokens are left out (%s)",
                first_drafter,
            ),
        ):
            if names and warns:
                logger.warning(f"%s: {words}", folder.path.name, len(names), which)
        self._num_experts = parameters.metadata.get(f"{parameters.family.architecture}.expert_count", 1)
        self._forms: list[StoredForm] = []
        self._decoded: tuple[str, NDArray[np.uint8]] | None = None
        self._derived = parameters.derived
        self._made = {**parameters.tensors, **text_modules.tensors, **({} if adapter is None else adapter.made)}
        self.unknown_settings = parameters.unknown_settings
        self.path = folder.path
        self.paths = (*folder.paths, folder.path / "config.json", *text_modules.paths)
        self.num_bytes = folder.num_bytes
        # Not GGUF's, but what the codes mean depends on it, and so does whatever is kept of a model's results.
        quantization = {"checkpoint.quantization": json.dumps(settings, sort_keys=True)} if settings else {}
        metadata = parameters.metadata | self._per_layer(parameters) | ({} if adapter is None else adapter.metadata)
        if text_modules.pooling_type is not None:
            metadata.setdefault(f"{parameters.family.architecture}.pooling_type", text_modules.pooling_type)
        metadata |= decision_metadata(folder, parameters.family.architecture)
        spelling = folder.json("tokenizer_config.json") or {}
        metadata |= reading_metadata(metadata, spelling)
        metadata |= prompt_metadata(metadata, folder.json("processor_config.json") or {}, spelling)
        self.metadata = metadata | quantization | self._read_tokenizer() | read_sampling(folder)
        if folder.config.get("model_type") in _OF_ONE_PROMPT and _TEMPLATE not in self.metadata:
            self.metadata |= {_TEMPLATE: _PLAIN_TEMPLATE}
        self._records = {name: self._record(planned) for name, planned in self._plan.items()}
        self.tensors = {name: found for name, found in self._records.items() if not _is_inner(name, parameters)}
        for name, derived in self._derived.items():
            self.tensors[name] = self._derived_record(name, derived)
        for name, values in self._made.items():
            self.tensors[name] = TensorRecord(name, TensorType.F32, values.shape)
        forms = {replace(form, num_matrices=0): 0 for form in self._forms}
        for form in self._forms:
            forms[replace(form, num_matrices=0)] += form.num_matrices
        self.quantization = tuple(replace(form, num_matrices=count) for form, count in forms.items())
        self.notices = tuple(str(form) for form in self.quantization if form.change) + tuple(asides)
        if self._reader is not None:
            self.notices += tuple(self._reader.notices)
        if not self.adapter and self.adapter_error is None and (folder.path / ADAPTER_FILE).exists():
            self.notices += (
                f"its adapter ({ADAPTER_FILE}) is not applied; for its answers merge it into the weights "
                "(merge_and_unload and save_pretrained of peft)",
            )
        if plan.is_head_untied:
            self.notices += (
                "its lm_head differs from the embedding and is used, although config.json says that they are one "
                "matrix (tie_word_embeddings)",
            )
        causal = f"{parameters.family.architecture}.attention.causal"
        if is_headless and metadata.get(causal, True):
            self.notices += ("it has no lm_head: it embeds texts, and what it generates has no meaning",)
        if "cls.output.weight" in self.tensors and metadata.get(causal, True) and "output.weight" not in self.tensors:
            self.notices += ("it has no lm_head: it scores texts, and what it generates has no meaning",)

    def replace_metadata(self, values: Mapping[str, SingleValue]) -> None:
        """Go on as if the folder said so; it is left as it is."""
        self.metadata = ReplacedMetadata(self.metadata, values)

    def leave_out_adapter(self) -> None:
        """Go on as if the folder had no adapter, as files that hold no sounds' encoders do."""
        self.tensors = {name: record for name, record in self.tensors.items() if not is_of_adapter(name)}
        self.metadata = {key: value for key, value in self.metadata.items() if key != ADAPTER_KEY}

    def tensor(self, name: str) -> TensorRecord:
        """Return a tensor's record. Raises: CorruptFileError if the model lacks it."""
        if name not in self.tensors:
            raise CorruptFileError(
                f"{self.path.name} has nothing that is GGUF's {name!r} among its {len(self.tensors)} tensors; wanted a "
                f"complete model of this architecture. {_WAY_OUT}"
            )
        return self.tensors[name]

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes]: a view into the map, or a copy where the tensor is made from others."""
        info = self.tensor(name)
        if name in self._made:
            return self._made[name].view(np.uint8)
        if name in self._derived:
            return self._derive(name, self._derived[name])
        return self._planned_bytes(name, info)

    def _planned_bytes(self, name: str, info: TensorRecord) -> NDArray[np.uint8]:
        planned = self._plan[name]
        if self._is_quantized(planned):
            # Writers ask for a stretch at a time.
            if self._decoded is None or self._decoded[0] != name:
                self._decoded = name, _joined([matrix.gguf_bytes(info.type) for matrix in self._matrices(planned)])
            return self._decoded[1]
        return _joined([self._source_bytes(planned, source) for source in planned.sources])

    def grouped(self, name: str) -> tuple[GroupedMatrix, ...] | None:
        """Return the codes, scales and zero points of a weight in integers, one matrix per expert; None for others."""
        planned = self._plan.get(name)
        if planned is None or not self._is_quantized(planned):
            return None
        matrices = self._matrices(planned)
        found = tuple(matrix for matrix in matrices if isinstance(matrix, GroupedMatrix))
        return found if len(found) == len(matrices) else None

    def stretch(self, name: str) -> FileStretch | None:
        """Return the stretch of a file with a tensor's bytes, if they are one and as GGUF has them."""
        planned = self._plan.get(name)
        if planned is None or len(planned.sources) != 1 or planned.change is not None:
            return None
        return None if self._is_quantized(planned) else self._folder.stretch(f"{planned.sources[0]}.{planned.leaf}")

    @property
    def has_changed(self) -> bool:
        """Return whether a file of tensors was written since it was opened, or another one has its name."""
        return self._folder.has_changed

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop the memory behind a tensor, once all of it has been packed."""
        planned = self._plan.get(name)
        if planned is not None and end == self.tensors[name].num_bytes:
            self._decoded = None
            leaves = [planned.leaf, *(() if self._reader is None else self._reader.leaves)]
            for source in planned.sources:
                for stored in (f"{source}.{leaf}" for leaf in leaves):
                    if stored in self._folder.tensors:
                        self._folder.forget(stored)

    def close(self) -> None:
        """Refuse further access and unmap what no view still uses. Safe to call twice."""
        self._decoded = None
        self._folder.close()

    def _part(self, name: str) -> tuple[str, str]:
        """The module of a tensor, and what of it the tensor is: `weight` for all that a quantized one is made of."""
        if self._reader is None:
            module, _, leaf = name.rpartition(".")
            return module, leaf
        module, leaf = self._reader.split_name(name)
        return module, "weight" if leaf in self._reader.leaves else leaf

    def _are_equal(self, first: str, second: str) -> bool:
        """Return whether two modules have the same tensors, byte for byte."""
        found = [
            {
                name.removeprefix(f"{module}."): info
                for name, info in self._folder.tensors.items()
                if self._part(name) == (module, "weight")
            }
            for module in (first, second)
        ]
        forms = [{leaf: (info.shape, info.dtype) for leaf, info in leaves.items()} for leaves in found]
        if forms[0] != forms[1]:
            return False
        for leaf in found[0]:
            one, other = (self._folder.tensor_bytes(f"{module}.{leaf}").reshape(-1) for module in (first, second))
            for start in range(0, len(one), _COMPARED_BYTES):
                end = start + _COMPARED_BYTES
                if not np.array_equal(one[start:end], other[start:end]):
                    return False
        return True

    def _per_layer(self, parameters: Hyperparameters) -> dict[str, object]:
        """Metadata that the folder holds as tensors of one number."""
        found: dict[str, object] = {}
        for key, (name, default) in parameters.family.per_layer.items():
            values = []
            for layer in range(parameters.num_layers):
                whole_name = f"model.layers.{layer}.{name}"
                stored = self._folder.tensors.get(whole_name)
                if stored is None:
                    values.append(default)
                elif prod(stored.shape) != 1 or stored.dtype not in _TYPES:
                    raise CorruptFileError(
                        f"{whole_name} is {stored.dtype} of shape {stored.shape}; wanted one number. {_WAY_OUT}"
                    )
                else:
                    data = self._folder.tensor_bytes(whole_name)
                    values.append(float(dequantize(data, _TYPES[stored.dtype], (1,))[0]))
            found[key] = values
        return found

    def _matrices(self, planned: PlannedTensor) -> list[StoredMatrix]:
        """The matrices of a quantized weight, one per expert."""
        assert self._reader is not None, "nothing is quantized without a reader"
        matrices = [self._reader.matrix(source) for source in self._expert_sources(planned)]
        if planned.change is None:
            return matrices
        if not isinstance(planned.change, RowOrder | ExpertRows):
            raise UnsupportedFormatError(
                f"{planned.sources[0]} is quantized, and {planned.name} is not made of whole rows of it; this version "
                f"needs it as plain numbers. Use a GGUF file of the model. {_WAY_OUT}"
            )
        order = planned.change.order(matrices[0].shape[0])
        return [matrix.rows(order) for matrix in matrices]

    def _expert_sources(self, planned: PlannedTensor) -> list[str]:
        """Modules of single matrices: those of a stack are numbered."""
        if not isinstance(planned.change, ExpertRows):
            return list(planned.sources)
        assert isinstance(self._num_experts, int), "it was read as a number"
        return [f"{source}#{expert}" for source in planned.sources for expert in range(self._num_experts)]

    def _read_tokenizer(self) -> dict[str, object]:
        planned = self._plan["token_embd.weight"]
        if self._reader is not None and self._is_quantized(planned):
            num_tokens = self._reader.shape(planned.sources[0])[0]
        else:
            num_tokens = (*self._folder.tensor(f"{planned.sources[0]}.weight").shape, 0)[0]
        try:
            return read_tokenizer(self._folder, num_tokens)
        except TokenizerError as error:
            # Without the frames it came from, which would keep all of a closed model alive.
            self.tokenizer_error = type(error)(*error.args)
            return {}

    def _derived_record(self, name: str, derived: Derived) -> TensorRecord:
        missing = next((source for source in derived.sources if source not in self._records), None)
        if missing is not None:
            raise CorruptFileError(
                f"{self.path.name} has nothing that is {missing}, of which {name} is made. {_WAY_OUT}"
            )
        return TensorRecord(name, TensorType.F32, derived.shape)

    def _derive(self, name: str, derived: Derived) -> NDArray[np.uint8]:
        """The bytes of a tensor that is made of several, of which writers ask for a stretch at a time."""
        if self._decoded is None or self._decoded[0] != name:
            records = [self._records[source] for source in derived.sources]
            values = [
                dequantize(self._planned_bytes(one.name, one), one.type, one.shape).reshape(one.shape)
                for one in records
            ]
            try:
                found = np.ascontiguousarray(derived.function(*values), np.float32)
            except ValueError as error:
                shapes = ", ".join(f"{one.name} {one.shape}" for one in records)
                raise CorruptFileError(f"{name} cannot be made of {shapes} ({error}). {_WAY_OUT}") from None
            if found.shape != derived.shape:
                raise CorruptFileError(f"{name} has shape {found.shape}; config.json wants {derived.shape}. {_WAY_OUT}")
            self._decoded = name, found.reshape(-1).view(np.uint8)
        return self._decoded[1]

    def _is_quantized(self, planned: PlannedTensor) -> bool:
        if self._reader is None or planned.leaf != "weight":
            return False
        stored = self._folder.tensors
        leaves = [self._reader.codes_leaf(source) for source in planned.sources]
        found = [leaf is not None for leaf in leaves]
        pairs = zip(planned.sources, leaves, strict=True)
        both = next((s for s, leaf in pairs if leaf not in (None, "weight") and f"{s}.weight" in stored), None)
        if both is not None or any(found) != all(found):
            raise CorruptFileError(
                f"{both or planned.name} is stored both quantized and as plain numbers; wanted one of the "
                f"two. {_WAY_OUT}"
            )
        return found[0]

    def _record(self, planned: PlannedTensor) -> TensorRecord:
        if self._is_quantized(planned):
            return self._quantized_record(planned)
        sources = [self._folder.tensor(f"{source}.{planned.leaf}") for source in planned.sources]
        first = sources[0]
        for source in sources:
            if (source.shape, source.dtype) != (first.shape, first.dtype):
                raise CorruptFileError(
                    f"{source.name} is {source.dtype} of shape {source.shape}, {first.name} {first.dtype} of shape "
                    f"{first.shape}; wanted experts that are alike. {_WAY_OUT}"
                )
        if first.dtype not in _TYPES:
            raise UnsupportedFormatError(
                f"{first.name} is {first.dtype}; this version runs F16, BF16 and F32 weights, and others if "
                f"config.json has a quantization_config of a method it knows. {_WAY_OUT}"
            )
        is_computed = planned.change is not None and planned.change.is_arithmetic
        shape = _changed_shape(planned, first.shape)
        if (
            not shape
            or len(shape) > 3
            or 0 in shape
            or (len(shape) > 2 and planned.change is None and not planned.name.endswith("_exps.weight"))
        ):
            raise CorruptFileError(f"{first.name} has shape {first.shape}; wanted a vector or a matrix. {_WAY_OUT}")
        return _described(planned, TensorType.F32 if is_computed else _TYPES[first.dtype], shape)

    def _quantized_record(self, planned: PlannedTensor) -> TensorRecord:
        assert self._reader is not None, "nothing is quantized without a reader"
        shapes = {self._reader.shape(source) for source in self._expert_sources(planned)}
        shape = shapes.pop()
        if shapes or 0 in shape:
            raise CorruptFileError(f"{planned.name} has parts of shapes {shape}, {shapes}; wanted equal ones")
        is_stack = isinstance(planned.change, ExpertRows)
        changed = shape if is_stack else _changed_shape(planned, shape)  # before rows are taken by it
        matrices = self._matrices(planned)
        self._forms.append(stored_form(matrices))
        if is_stack:
            return TensorRecord(planned.name, common_type(matrices), (len(matrices), *matrices[0].shape))
        return _described(planned, common_type(matrices), changed)

    def _source_bytes(self, planned: PlannedTensor, source: str) -> NDArray[np.uint8]:
        name = f"{source}.{planned.leaf}"
        stored = self._folder.tensor(name)
        change = planned.change
        if change is None:
            data: NDArray[Any] = self._folder.array(name)
        elif change.is_arithmetic:
            values = dequantize(self._folder.tensor_bytes(name), _TYPES[stored.dtype], stored.shape)
            data = change.apply(values.reshape(stored.shape))
        else:
            data = change.apply(self._folder.array(name))
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _is_inner(name: str, parameters: Hyperparameters) -> bool:
    """Return whether a tensor is only there for others to be made of."""
    return re.sub(r"^blk\.\d+\.", "", name) in parameters.family.inner


def _joined(parts: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _changed_shape(planned: PlannedTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    if planned.change is None:
        return shape
    try:
        return planned.change.shape(shape)
    except (ValueError, IndexError) as error:
        raise CorruptFileError(
            f"{planned.sources[0]}.{planned.leaf} of shape {shape} cannot become GGUF's {planned.name} ({error}). "
            f"{_WAY_OUT}"
        ) from None


def _described(planned: PlannedTensor, type: TensorType, shape: tuple[int, ...]) -> TensorRecord:
    """The record of a tensor whose parts have this shape."""
    if planned.is_stacked:
        shape = (len(planned.sources), *shape)
    return TensorRecord(planned.name, type, shape)


def open_checkpoint(path: str | os.PathLike[str], *, warns: bool = True) -> CheckpointModel:
    """Open a Hugging Face folder. warns: of tensors that are left aside.

    Raises: ModelFileError if it holds no model; UnsupportedFormatError if this version cannot run it; CorruptFileError
        if its files contradict each other.
    """
    folder = open_folder(path)
    try:
        return CheckpointModel(folder, warns=warns)
    except BaseException:
        folder.close()
        raise
