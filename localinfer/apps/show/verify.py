"""`localinfer show --verify`: every check of a model's file, over every weight, and texts that the model reads.

A conversion that goes wrong leaves weights that look sound one by one, and a model that guesses. The criteria of
reading need no reference: bits per byte of the easiest of some passages, one of which is in a language of any trained
model, and the loss that is left when a passage stands in the context already.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import LocalinferError, ModelFileError, OutOfMemoryError, RequestError
from localinfer.models.checks import Finding
from localinfer.quant.formats.types import TensorRecord
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.apps.show.certificate import Certificate
    from localinfer.llm import LLM
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.quant.checkpoint.model_file import ModelFile
    from localinfer.quant.formats.types import TensorRecord


_READ_TOKENS = 96
_LEAST_TOKENS = 24
_LEAST_WEIGHTS = 100_000
"""Of layers; with fewer no model speaks, however it was trained."""
_MOST_BITS = ((300_000_000, 1.3), (30_000_000, 1.5), (0, 1.75))
"""Bits per byte by the weights of the layers, from which on a model speaks badly. Plain English takes models of a
billion weights and more 0.6 to 0.9, of a hundred million 0.8 to 1.2, those of stories with some million 0.5 to 1.2; a
language they hardly know takes them 2 and more, and letters by their frequency alone 4."""
_COPYING_WEIGHTS = 30_000_000
_MOST_LEFT, _MOST_LEFT_RECURRENT = 0.4, 0.8
"""Largest share of a passage's loss that is left when models of that size read it again: 0.05 to 0.2 in those that
attend to it and were trained, and all of it where positions or heads are wrong."""
_RECURRENT = re.compile(r"blk\.\d+\.(?:ssm_|shortconv|time_mix)")
_SKIPPED = 8
"""Tokens of the second reading until it is clear that it is one."""
_LEAST_CHARACTERS = 2.0
_LEAST_WIDE_CHARACTERS = 0.5
"""Characters in a token, of alphabets and of scripts of some thousand characters, below which a vocabulary was not made
for a language."""
_WIDE = 0x2E80


@dataclass(frozen=True)
class Passage:
    """A text, and the language it is in."""

    language: str
    text: str


@dataclass(frozen=True)
class Reading:
    """Losses of a model on a passage."""

    language: str
    bits: float
    """Per byte."""
    loss: float
    """In nats per token."""
    again: float
    """Loss when the passage is repeated; NaN if the context has no room for it."""


@cache
def passages() -> tuple[Passage, ...]:
    """The texts that ship inside, the easiest for most models first."""
    parts = (Path(__file__).parent / "passages.txt").read_text(encoding="utf-8").split("\n---\n")
    return tuple(Passage(*part.strip().split("\n", 1)) for part in parts)


def check_reading(llm: "LLM", tensors: Mapping[str, TensorRecord]) -> tuple[list[Finding], str | None]:
    """Let a model read until it finds a passage easy; return what is wrong, and why it was not judged if it was not.

    tensors: of its file.
    """
    try:
        tokenizer = llm.tokenizer
    except RequestError:
        # Which is said where vocabularies are checked.
        return [], None
    layer_weights = sum(math.prod(one.shape) for name, one in tensors.items() if name.startswith("blk."))
    if layer_weights < _LEAST_WEIGHTS:
        return [], None
    most = next(bits for weights, bits in _MOST_BITS if layer_weights >= weights)
    readings = []
    for passage in passages():
        ids = _ids(tokenizer, passage, min(_READ_TOKENS, llm.context_length))
        if ids is None:
            continue
        readings.append(_read(llm, passage, ids))
        if readings[-1].bits <= most:
            break
    if not readings:
        return [], "reading: its vocabulary, or its context, is for none of the texts that ship inside"
    best = min(readings, key=lambda one: one.bits)
    is_recurrent = any(_RECURRENT.match(name) for name in tensors)
    left = _MOST_LEFT_RECURRENT if is_recurrent else _MOST_LEFT
    return list(_judge(best, most, left if layer_weights >= _COPYING_WEIGHTS else None)), None


def _ids(tokenizer: "Tokenizer", passage: Passage, most: int) -> NDArray[np.int64] | None:
    """A passage's first tokens, int64[T]; None where the vocabulary was not made for its language, or they are few."""
    ids = np.asarray(tokenizer.encode(passage.text))[:most]
    text = tokenizer.decode(ids)
    is_wide = ord(max(passage.text)) >= _WIDE
    least = _LEAST_WIDE_CHARACTERS if is_wide else _LEAST_CHARACTERS
    return ids if len(ids) >= _LEAST_TOKENS and len(text) >= least * len(ids) else None


def _read(llm: "LLM", passage: Passage, ids: NDArray[np.int64]) -> Reading:
    tokenizer = llm.tokenizer
    start = 1 if tokenizer.is_special(int(ids[0])) else 0
    whole = np.concatenate([ids, ids[start:]])[: llm.context_length]
    losses = _losses(llm.logits(whole), whole)
    # Characters that are no token of a vocabulary, and ends, are no text of its own.
    is_text = np.array([not tokenizer.is_special(int(one)) for one in whole[1:]])
    num_first = len(ids) - 1
    first, again = (losses[part][is_text[part]] for part in (slice(num_first), slice(num_first + 1 + _SKIPPED, None)))
    num_bytes = sum(len(tokenizer.token_bytes(int(one))) for one in ids[1:][is_text[:num_first]])
    return Reading(
        passage.language,
        bits=float(first.sum() / np.log(2) / max(1, num_bytes)),
        loss=float(first.mean()),
        again=float(again.mean()) if len(again) >= _LEAST_TOKENS else float("nan"),
    )


def _losses(logits: NDArray[np.float32], ids: NDArray[Any]) -> NDArray[np.float64]:
    """Nats of each id after the first, float64[T - 1], from logits float32[T, vocab_size]."""
    losses = np.empty(len(ids) - 1)
    for index, wanted in enumerate(ids[1:]):
        row = logits[index].astype(np.float64)
        largest = row.max()
        losses[index] = largest + np.log(np.exp(row - largest).sum()) - row[wanted]
    return losses


def _judge(best: Reading, most: float, left: float | None) -> Iterator[Finding]:
    again = "download the model again, or get another conversion; a model that was not trained reads so too"
    if best.bits > most:
        yield Finding(
            "reading",
            f"a plain text in {best.language}, which it reads best, takes the model {best.bits:.1f} bits a byte, where "
            f"models of its size need less than {most:g}: it was converted wrongly or is damaged; {again}",
        )
    elif left is not None and best.again > left * best.loss:
        yield Finding(
            "reading",
            f"a text in {best.language} is little easier for the model when it is repeated ({best.again:.1f} of "
            f"{best.loss:.1f} nats a token), so positions or heads are likely wrong; {again}",
        )


_TEXT = "The quick brown fox jumps over 13 lazy dogs.\n\nIt's naïve: 1234567 — “2 + 2 = 4”, 你好."
_NUM_TOKENS = 24
_LEAST_SPREAD = 1e-6


@dataclass(frozen=True)
class Verification:
    """Results of all checks of a model."""

    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Checks that could not be made, each a line with the reason."""

    def as_json(self) -> dict[str, Any]:
        """For `show --json`."""
        return {"findings": [vars(finding) for finding in self.findings], "unchecked": self.unchecked}

    def lines(self) -> list[str]:
        """For `show`."""
        kinds = {True: "error", False: "warning"}
        found = [f"  {kinds[one.is_error]:<8} {one.check}: {one.message}" for one in self.findings]
        return [
            *(found or ["  nothing wrong was found"]),
            *(f"  {'not done':<8} {line}" for line in self.unchecked),
        ]


def verify_model(path: str, progress: ProgressCallback | None = None, certificate: str | None = None) -> Verification:
    """Make every check of a GGUF file or a Hugging Face folder; takes as long as reading all of it, and one load.

    certificate: a file with which the model is compared bit for bit.
    Raises: ModelFileError or a subclass for a file that cannot be opened, or was changed meanwhile.
    """
    from localinfer.apps.show.certificate import ReadDigests
    from localinfer.models.load.loader import open_model_file

    result = Verification()
    certified = None if certificate is None else _Certified.read(certificate)
    file = open_model_file(path)
    try:
        read = None if certified is None else ReadDigests(file)
        result.findings.extend(_check_digests(file, result, progress))
        result.findings.extend(dict.fromkeys(_check_file(file, result, progress, None if read is None else read.take)))
        if certified is not None and read is not None:
            certified.add_file(file, result, progress, read.whole())
        is_alone = lone_part(file) is None
        # Decoders that were made into embedding models and rerankers do not speak any more.
        pools = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type", 0) != 0
        tensors = {} if pools else dict(file.tensors)
    finally:
        file.close()
    if any(finding.is_error for finding in result.findings):
        result.unchecked.append("output: the model cannot work as it is")
    elif is_alone:
        _check_output(path, tensors, result, progress, certified)
    if certified is not None:
        certified.compare(result)
    return result


def verify_certificate(path: str, certificate: str, progress: ProgressCallback | None = None) -> Verification:
    """Compare a model with a certificate, and make no check that costs more than writing one.

    Raises: as `verify_model`, and RequestError for a file that is no certificate.
    """
    from localinfer.models.load.loader import open_model_file

    result, certified = Verification(), _Certified.read(certificate)
    file = open_model_file(path)
    try:
        certified.add_file(file, result, progress, {})
        is_alone = lone_part(file) is None
    finally:
        file.close()
    if is_alone and certified.found is not None:
        _check_output(path, None, result, progress, certified)
    certified.compare(result)
    return result


@dataclass
class _Certified:
    """A certificate that a model is compared with, and what is found of the model."""

    wanted: "Certificate"
    found: "Certificate | None" = None
    """Digests of the file, and of what it computes once that was computed; None if they could not be made."""

    @classmethod
    def read(cls, path: str) -> "_Certified":
        """Read a certificate. Raises: RequestError for a file that is none."""
        from localinfer.apps.show.certificate import Certificate

        return cls(Certificate.read(path))

    def add_file(
        self, file: "ModelFile", result: Verification, progress: ProgressCallback | None, known: Mapping[str, str]
    ) -> None:
        """Add the digests of the file. known: of tensors, which are not read again."""
        from localinfer.apps.show.certificate import certify_file

        try:
            self.found = certify_file(file, progress, known)
        except LocalinferError as error:
            result.findings.append(Finding("certificate", str(error).removesuffix("."), is_error=True))

    def add_outputs(self, llm: "LLM") -> None:
        """Add those of what the loaded model computes."""
        from localinfer.apps.show.certificate import certify_outputs

        if self.found is not None:
            self.found = certify_outputs(self.found, llm)

    def compare(self, result: Verification) -> None:
        """Add the differences, first; of outputs only where they were computed."""
        from localinfer.apps.show.certificate import compare

        found, wanted = self.found, self.wanted
        if found is None:
            return
        if wanted.outputs and not found.outputs:
            wanted = replace(wanted, texts=found.texts, outputs=found.outputs)
            result.unchecked.append("certificate: the model computes nothing to compare")
        result.findings[:0] = compare(wanted, found)


def _check_digests(file: "ModelFile", result: Verification, progress: ProgressCallback | None) -> list[Finding]:
    """Compare the files with the checksums that were recorded when they were pulled."""
    from localinfer.storage.hub.download import differing_files, recorded_files
    from localinfer.storage.hub.places import Places

    try:
        differing = differing_files(recorded_files(file.paths, Places.of_user()), progress)
    except OSError as error:
        result.unchecked.append(f"checksums: {error.strerror or error}")
        return []
    return [Finding("checksum", line) for line in differing]


def _check_file(
    file: "ModelFile",
    result: Verification,
    progress: ProgressCallback | None,
    take: "Callable[[str, NDArray[np.uint8]], object] | None",
) -> Iterator[Finding]:
    from localinfer.models.checks.tensor_samples import check_conversion
    from localinfer.models.checks.tensor_scan import check_tensors
    from localinfer.models.load.loader import read_config

    part = lone_part(file)
    if part is not None:
        result.unchecked.append(f"settings and output: {part}")
        yield from _check_settings(file, None, result)
        yield from check_tensors(file, progress, take=take)
        return
    try:
        config = read_config(file)
    except ModelFileError as error:
        yield Finding("model", str(error).removesuffix("."), is_error=True)
        return
    yield from _check_settings(file, config, result)
    yield from check_conversion(file, config)
    yield from check_tensors(file, progress, config, take)


def lone_part(file: "ModelFile") -> str | None:
    """Kinds of files that are sound and answer nothing by themselves: vocabularies, draft models of another's cache."""
    from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE

    target = OF_ANOTHER_CACHE.get(str(file.metadata.get("general.architecture")))
    if target is not None:
        return f"a draft model, which runs beside its {target} model only"
    if not file.tensors and "tokenizer.ggml.tokens" in file.metadata:
        return "a vocabulary without weights"
    return None


def _check_settings(file: "ModelFile", config: "ModelConfig | None", result: Verification) -> list[Finding]:
    """Check the metadata, and collect warnings of the vocabulary and template that are built of it.

    config: None for a file that is not run by itself.
    """
    from localinfer.models.checks.quick import check_settings, check_text_settings
    from localinfer.models.checks.text_checks import check_template
    from localinfer.models.text.encoders import TokenizerWarning

    found: list[Finding] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tokenizer, template, problem = _text_parts(file, result)
        if problem is not None:
            found.append(Finding("tokenizer", problem))
        is_encoder = config is not None and config.is_encoder
        if config is not None:
            found += check_settings(file, config, tokenizer)
        elif tokenizer is not None:
            found += check_text_settings(file, tokenizer)
        if tokenizer is not None:
            found += _check_text(tokenizer)
            if template is not None and not is_encoder:
                rendered = list(check_template(template, tokenizer))
                # A rendered chat shows more exactly what the source of its template made likely.
                found = [one for one in found if one.check not in {other.check for other in rendered}] + rendered
    notes = [str(one.message).removesuffix(".") for one in warned if issubclass(one.category, TokenizerWarning)]
    return found + [Finding("tokenizer", note) for note in notes]


def _text_parts(file: "ModelFile", result: Verification) -> tuple[Any, Any, str | None]:
    """The tokenizer and the template of a file; or neither, and what keeps its vocabulary from being built."""
    from localinfer.errors import TokenizerError
    from localinfer.models.load.loader import read_tokenizer
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.vocabulary import KINDS, PREFIX

    kind = file.metadata.get(f"{PREFIX}model")
    has_kind = (isinstance(kind, str) and kind in KINDS) or (kind is None and f"{PREFIX}tokens" in file.metadata)
    if not has_kind and file.tokenizer_error is None:
        why = "there is none" if kind is None else f"this version does not build those of the kind {kind!r:.60}"
        result.unchecked.append(f"vocabulary and chat template: {why}")
        return None, None, None
    if file.tokenizer_error is not None and not (file.path / "tokenizer.json").exists():
        result.unchecked.append(f"vocabulary and chat template: {file.tokenizer_error}")
        return None, None, None
    try:
        tokenizer = read_tokenizer(file)
    except TokenizerError as error:
        return None, None, str(error).removesuffix(".")
    return tokenizer, ChatTemplate.from_metadata(file.metadata, tokenizer), None


def _check_text(tokenizer: "Tokenizer") -> Iterator[Finding]:
    """A text that becomes ids becomes the same text again, where no normalization changes it."""
    vocabulary = tokenizer.vocabulary
    if tokenizer.kind not in ("bpe", "spm") or len(vocabulary.tokens) < 300:
        return
    if tokenizer.kind == "spm" and min(vocabulary.byte_ids) < 0:
        return
    ids = tokenizer.encode(_TEXT, add_special=False)
    found = tokenizer.decode(ids)
    if found != _TEXT:
        place = next((i for i, pair in enumerate(zip(found, _TEXT, strict=False)) if pair[0] != pair[1]), len(found))
        yield Finding(
            "tokenizer",
            f"a text comes back from its {len(ids)} ids changed, at {_TEXT[place : place + 12]!r}: the vocabulary "
            "lacks tokens, or has them in another form; get a current conversion of the model",
        )


def _check_output(
    path: str,
    tensors: "Mapping[str, TensorRecord] | None",
    result: Verification,
    progress: ProgressCallback | None,
    certified: _Certified | None = None,
) -> None:
    """Load the model and let it read texts. tensors: of its file; empty if it was not made to speak, None to compute
    for the certificate alone. certified: gets what it computes."""
    from localinfer.loading.load import load

    try:
        llm = load(
            path,
            device="cpu",
            speculation=None,
            may_measure=False,
            verify=False,
            progress=progress,
        )
    except OutOfMemoryError as error:
        result.unchecked.append(f"output: {error}")
        return
    except LocalinferError as error:
        result.findings.append(Finding("load", str(error).removesuffix("."), is_error=True))
        return
    with llm:
        try:
            if certified is not None:
                certified.add_outputs(llm)
            found = [] if tensors is None else list(_output_findings(llm))
            if not found and tensors and "completion" in llm.info.capabilities:
                found, unread = check_reading(llm, tensors)
                result.unchecked.extend([] if unread is None else [unread])
            result.findings.extend(found)
        except LocalinferError as error:
            result.findings.append(Finding("output", str(error).removesuffix("."), is_error=True))


def _output_findings(llm: "LLM") -> Iterator[Finding]:
    again = "the weights are likely damaged; download the model again"
    info = llm.info
    size = min(_NUM_TOKENS, llm.context_length)
    ids = (np.arange(size) * 7919 + 3) % info.vocab_size
    if "completion" not in info.capabilities:
        if "embeddings" in info.capabilities:
            found = llm.embed_many([ids, ids[: size // 2 + 1]], normalize=False)
            # Of many vectors the last: of a text's last token.
            vectors = np.stack([one.reshape(-1, one.shape[-1])[-1] for one in found])
            if _spread(vectors.T) < _LEAST_SPREAD:
                yield Finding("output", f"two texts have the same vector: {again}", is_error=True)
        return
    logits = llm.logits(ids)
    if _spread(logits) < _LEAST_SPREAD:
        yield Finding("output", f"every token is as likely as any other, whatever the text: {again}", is_error=True)
    elif size > 1 and _spread(logits.T) < _LEAST_SPREAD:
        yield Finding("output", f"what comes next is the same after any text: {again}", is_error=True)


def _spread(rows: "np.ndarray[Any, Any]") -> float:
    """Range of the values of the most varied row, as a share of the largest value of all."""
    largest = float(np.abs(rows).max())
    return float(np.ptp(rows, axis=1).max()) / largest if largest else 0.0
