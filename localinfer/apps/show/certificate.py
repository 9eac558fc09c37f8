"""`localinfer certify`: digests of a model and of what it computes, and the comparison of another copy with them.

A certificate has a digest of every tensor, of every setting and of the vocabulary's reading of 32 probe texts, and one
of the logits, bit for bit, behind each of them. The same file gives the same bits on any CPU, so a copy that is damaged
or was changed, and a machine that computes wrongly, both show; where tensors differ, the report names them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.apps.show.verify import lone_part, passages
from localinfer.errors import RequestError
from localinfer.kernels.kv_layout import PAGE_TOKENS
from localinfer.models.checks import Finding
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.quant.checkpoint.model_file import ModelFile
    from localinfer.quant.formats.types import TensorRecord

FORMAT = 1
NUM_PROBES = 32
_PROBE_TOKENS = 16
_PROBE_CHARACTERS = 100
_PROBES_AT_ONCE = 8
_DIGEST_BYTES = 16
_READ_BYTES = 64 << 20
_UNCHECKED = "general."
"""Settings that name a file and its makers, and change nothing; but for the architecture."""
_MOST_NAMED = 4
_AGAIN = "this is another file, or a damaged one; download the model again, or certify this one if it is the right one"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Digests of a model: hexadecimal, 128 bits of SHA-256."""

    model: str
    """Name of the file or folder."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Of every tensor, by name: its type, its shape and its bytes."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of every setting but names and licences, by key."""
    texts: Sequence[str] = ()
    """Of the ids of every probe; none of a file without a vocabulary, whose probes are ids."""
    outputs: Sequence[str] = ()
    """Of the logits behind every probe, or of an encoder's hidden states; none of a file that answers nothing alone."""
    layers: Sequence[str] = ()
    """Of the keys that each layer with attention over all positions writes for one page of ids, in order. They depend
    on the layers before it, so the first that differs follows the first layer that computes otherwise. None of models
    without such layers, and of certificates by older versions."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """Choices that outputs depend on: how keys and values are kept."""
    format: int = FORMAT
    """Version of this record."""

    def write(self) -> bytes:
        """The certificate as a file."""
        return f"{json.dumps(asdict(self), indent=1, ensure_ascii=False)}\n".encode()

    @classmethod
    def read(cls, path: str | Path) -> "Certificate":
        """Read a certificate. Raises: RequestError for a file that is none, or of a newer version."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}; check the path") from None
        except ValueError:
            value = None
        if not isinstance(value, dict) or "outputs" not in value or not isinstance(value.get("format"), int):
            raise RequestError(f"{path} is no certificate; write one with `localinfer certify`")
        if value["format"] > FORMAT:
            found = f"{path} is of version {value['format']}, and this program reads {FORMAT}"
            raise RequestError(f"{found}; install a newer one")
        try:
            return cls(**value)
        except TypeError as error:
            raise RequestError(f"{path} is no certificate ({error}); write one with `localinfer certify`") from None


def certify(path: str, progress: ProgressCallback | None = None) -> Certificate:
    """Read all of a model, compute behind the probes on the CPU, and return the digests.

    Raises: ModelFileError or a subclass for a model that cannot be opened or run; OutOfMemoryError.
    """
    from localinfer.loading.load import load
    from localinfer.models.load.loader import open_model_file

    file = open_model_file(path)
    try:
        made = certify_file(file, progress)
        if lone_part(file) is not None:
            return made
    finally:
        file.close()
    with load(path, device="cpu", speculation=None, may_measure=False, verify=False, progress=progress) as llm:
        return certify_outputs(made, llm)


class ReadDigests:
    """Digests of tensors that something else reads, from first to last, each by one thread at a time."""

    def __init__(self, file: "ModelFile") -> None:
        self._sizes = {name: record.num_bytes for name, record in file.tensors.items()}
        self._hashers = {name: _hasher(record) for name, record in file.tensors.items() if file.grouped(name) is None}

    def take(self, name: str, data: NDArray[np.uint8]) -> None:
        """Take the next bytes of a tensor."""
        if name in self._hashers:
            self._hashers[name].update(np.ascontiguousarray(data).data)
            self._sizes[name] -= data.size

    def whole(self) -> dict[str, str]:
        """Of the tensors that were read to their ends."""
        return {name: _hex(one) for name, one in self._hashers.items() if self._sizes[name] == 0}


def certify_file(
    file: "ModelFile", progress: ProgressCallback | None = None, known: Mapping[str, str] | None = None
) -> Certificate:
    """The digests of an open file, without those of what it computes. Raises: CorruptFileError.

    known: digests of tensors, which are not read again.
    """
    tensors, settings = dict(_tensor_digests(file, progress, known or {})), dict(_setting_digests(file))
    return Certificate(model=file.path.name, tensors=tensors, settings=settings)


def certify_outputs(made: Certificate, llm: "LLM") -> Certificate:
    """The digests of a file with those of what its model computes, loaded as `certify` does."""
    tokenizer = _tokenizer_of(llm)
    probes = [_ids(tokenizer, number, llm) for number in range(NUM_PROBES)]
    texts = [] if tokenizer is None else [_digest(probe) for probe in probes]
    outputs = [_digest(row) for row in _outputs(llm, probes)]
    layers = list(_layer_keys(llm))
    return replace(made, texts=texts, outputs=outputs, layers=layers, computed={"kv_type": llm.info.kv_type})


def compare(certificate: Certificate, found: Certificate) -> list[Finding]:
    """Differences from a certificate; none where the model is the one that it was written for."""
    findings = list(_differences("tensor", certificate.tensors, found.tensors))
    findings += _differences("setting", certificate.settings, found.settings)
    finding = partial(Finding, "certificate", is_error=True)
    if list(certificate.texts) != list(found.texts):
        number = _first_difference(certificate.texts, found.texts)
        findings.append(finding(f"the vocabulary cuts probe {number} of {NUM_PROBES} into other tokens: {_AGAIN}"))
    if list(certificate.outputs) == list(found.outputs):
        return findings
    wanted, ours = dict(certificate.computed), dict(found.computed)
    if wanted != ours:
        reason = f"outputs were computed with {wanted}, and here with {ours}, so they cannot be compared"
        findings.append(finding(f"{reason}; certify the model anew with this version"))
    else:
        number = _first_difference(certificate.outputs, found.outputs)
        same = "the file is the same, so this machine or version computes otherwise; see `localinfer doctor`"
        reason = _AGAIN if findings else same
        where = _where(certificate.layers, found.layers)
        findings.append(finding(f"other logits from probe {number} of {NUM_PROBES} on{where}: {reason}"))
    return findings


def _differences(kind: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Finding]:
    for what, names in (
        ("differs from", [name for name in wanted if name in found and wanted[name] != found[name]]),
        ("is missing, of", [name for name in wanted if name not in found]),
        ("is not of", [name for name in found if name not in wanted]),
    ):
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            shown = ", ".join(names[:_MOST_NAMED])
            yield Finding("certificate", f"{kind} {shown}{more} {what} those certified: {_AGAIN}", is_error=True)


def _where(wanted: Sequence[str], found: Sequence[str]) -> str:
    """The place of the first layer that computes otherwise, as far as digests of keys tell it."""
    if not wanted or len(wanted) != len(found):
        return ""
    number = _first_difference(wanted, found)
    if number > len(wanted):
        return ", behind the keys of the last layer with attention, which are the same"
    return f", as are the keys of layer {number} of {len(wanted)} with attention, the first that differ"


def _first_difference(wanted: Sequence[str], found: Sequence[str]) -> int:
    """Number, from 1, of the first entry that differs."""
    pairs = enumerate(zip(wanted, found, strict=False), 1)
    return next((number for number, (one, other) in pairs if one != other), min(len(wanted), len(found)) + 1)


def _hasher(record: "TensorRecord") -> "hashlib._Hash":
    return hashlib.sha256(f"{record.type} {record.shape}".encode())


def _hex(hasher: "hashlib._Hash") -> str:
    return hasher.hexdigest()[: 2 * _DIGEST_BYTES]


def _tensor_digests(
    file: "ModelFile", progress: ProgressCallback | None, known: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    from localinfer.quant.checkpoint.model_file import read_stretch

    names = sorted(file.tensors)
    for number, name in enumerate(names):
        if name in known:
            yield name, known[name]
            continue
        if progress is not None:
            progress("reading tensors", number, len(names))
        record = file.tensors[name]
        grouped = file.grouped(name)
        hasher = _hasher(record)
        if grouped is not None:
            for matrix in grouped:
                for part in (matrix.scales, matrix.zeros, matrix.groups):
                    hasher.update(np.ascontiguousarray(part).tobytes())
                num_rows, num_columns = matrix.shape
                step = max(1, _READ_BYTES // max(1, num_columns))
                for first in range(0, num_rows, step):
                    hasher.update(matrix.read(np.arange(first, min(first + step, num_rows))).tobytes())
        else:
            for first in range(0, record.num_bytes, _READ_BYTES):
                end = min(first + _READ_BYTES, record.num_bytes)
                hasher.update(np.ascontiguousarray(read_stretch(file, name, first, end)).data)
                file.forget(name, first, end)
        yield name, _hex(hasher)


def _setting_digests(file: "ModelFile") -> Iterator[tuple[str, str]]:
    for key in sorted(file.metadata):
        if not key.startswith(_UNCHECKED) or key == "general.architecture":
            value = file.metadata[key]
            told = np.asarray(value).tolist() if isinstance(value, np.ndarray) else value
            yield key, hashlib.sha256(repr(told).encode("utf-8", "surrogatepass")).hexdigest()[: 2 * _DIGEST_BYTES]


def _tokenizer_of(llm: "LLM") -> "Tokenizer | None":
    try:
        return llm.tokenizer
    except RequestError:
        return None


def _ids(tokenizer: "Tokenizer | None", number: int, llm: "LLM") -> NDArray[np.int32]:
    """A probe's ids: the beginning of a part of a passage; without a vocabulary ids from all over it."""
    size = min(_PROBE_TOKENS, llm.context_length)
    if tokenizer is None:
        return ((np.arange(size) * 7919 + number * 104_729 + 3) % llm.vocab_size).astype(np.int32)
    texts = passages()
    text = texts[number % len(texts)].text
    first = (number // len(texts)) * _PROBE_CHARACTERS % max(1, len(text) - _PROBE_CHARACTERS)
    return np.asarray(tokenizer.encode(text[first : first + _PROBE_CHARACTERS]), np.int32)[:size]


def _outputs(llm: "LLM", probes: Sequence[NDArray[np.int32]]) -> Iterator[NDArray[np.float32]]:
    """Results behind every probe: logits, or the hidden states of an encoder."""
    if "completion" not in llm.info.capabilities:
        for vectors in llm.embed_many(list(probes), pooling="none", normalize=False):
            yield np.asarray(vectors, np.float32)
        return
    from localinfer.engine.cache.sequence import forward
    from localinfer.engine.sampling.sampler import not_finite_error

    engine = llm._engine
    # Weights are read once for each batch; the cache of a short context has few pages.
    at_once = max(1, min(_PROBES_AT_ONCE, llm.context_length // PAGE_TOKENS))
    for first in range(0, len(probes), at_once):
        batch = probes[first : first + at_once]
        last_rows = np.cumsum([probe.size for probe in batch], dtype=np.int32) - 1
        with engine.exclusive_cache() as cache, ExitStack() as stack:
            sequences = [stack.enter_context(closing(cache.open())) for _ in batch]
            found = forward(engine.program.run, sequences, batch, last_rows).copy()
        for probe, row in zip(batch, found, strict=True):
            if not np.isfinite(row).all():
                raise not_finite_error(probe.size)
            yield row


def _layer_keys(llm: "LLM") -> Iterator[str]:
    """Digests of the keys of one page, by layer; nothing where there are none of fixed places and plain numbers."""
    from localinfer.engine.cache.prefix_cache import CacheHints
    from localinfer.engine.cache.sequence import forward

    engine = llm._engine
    layout, count = llm._model.kv_layout, PAGE_TOKENS
    sizes = {"f32": 4, "f16": 2}
    if llm.context_length < count or layout.key_type not in sizes or "completion" not in llm.info.capabilities:
        return
    ids = ((np.arange(count) * 7919 + 3) % llm.vocab_size).astype(np.int32)
    with engine.exclusive_cache() as cache:
        # A salt of its own: these ids are no text that anything else would send.
        sequence = cache.admit(ids, CacheHints(salt=b"certificate")).sequence
        try:
            forward(engine.program.run, [sequence], [ids[sequence.length :]], np.empty(0, np.int32))
            page = engine.pool.view(int(sequence.pages[0]))
            for layer, shape in enumerate(layout.layers):
                if shape.window or not shape.num_kv_heads:
                    continue
                head, first = layout.head(layer), layout.layer_offset(layer)
                num_bytes = count * shape.key_size * sizes[layout.key_type]
                heads = range(first, first + shape.num_kv_heads * head.num_bytes, head.num_bytes)
                yield _digest(np.concatenate([page[start : start + num_bytes] for start in heads]))
        finally:
            sequence.close()


def _digest(values: NDArray[Any]) -> str:
    data = np.ascontiguousarray(values)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(little.tobytes()).hexdigest()[: 2 * _DIGEST_BYTES]
