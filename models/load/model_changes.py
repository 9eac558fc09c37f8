"""Settings in place of those of a model's file: metadata, chat template and RoPE options; and those not understood."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING

from localinfer.errors import RequestError
from localinfer.models.decoder.metadata import shown
from localinfer.models.decoder.metadata_keys import is_understood, listed, unknown_settings
from localinfer.models.decoder.rope_options import RopeOptions, rope_metadata
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.gguf.reader import SingleValue
from localinfer.system.folders import expand_home
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.models.checkpoint.model import CheckpointModel
    from localinfer.quant.gguf.reader import GGUFFile

logger = logging.getLogger(__name__)

_TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_TEMPLATE_BYTES = 1 << 20
_TYPED = r"(?s)(int|float|bool|str):(.*)"
_WHOLE_NUMBER = r"[+-]?\d{1,40}"


class ModelChanges(Record, kw_only=True):
    """Settings in place of those of a model's file."""

    overrides: Mapping[str, SingleValue] = field(default_factory=lambda: MappingProxyType({}))
    """Metadata by whole GGUF key."""
    chat_template: str | None = None
    """Jinja source."""
    rope: RopeOptions = field(default_factory=RopeOptions)

    def __post_init__(self) -> None:
        """Raises: RequestError for an invalid key or value, or a template that does not compile."""
        for key, value in self.overrides.items():
            if not _is_text(key) or not key or not key.isprintable():
                raise RequestError(f"the key {shown(key)} cannot be set; give a metadata key, such as llama.vocab_size")
            is_number = isinstance(value, bool | int) or (isinstance(value, float) and abs(value) < float("inf"))
            if not is_number and not _is_text(value):
                raise RequestError(f"{key} is set to {shown(value)}; give a finite number, true or false, or text")
        if self.chat_template is not None:
            _check_template(self.chat_template)


def apply_changes(file: "GGUFFile | CheckpointModel", changes: ModelChanges, context_length: int | None) -> None:
    """Replace metadata of an open model, before anything is built from it, so that its fingerprint changes too.

    context_length: the requested one, or None.
    Raises: RequestError naming a key that the file lacks and localinfer does not read, or options that contradict each
        other.
    """
    lacking = [key for key in changes.overrides if key not in file.metadata]
    if changes.overrides:
        file.replace_metadata(changes.overrides)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return  # refused when the model is read
    unread = [key for key in lacking if not is_understood(key, architecture)]
    if unread:
        raise RequestError(
            f"{', '.join(unread)} cannot be set: the model's file has no such key, and it is not read for the "
            f"architecture {architecture!r}; 'localinfer show' lists the keys of a file"
        )
    if not changes.rope.is_empty:
        file.replace_metadata(rope_metadata(changes.rope, file.metadata, architecture, context_length))
    if changes.chat_template is not None:
        keys = (_TEMPLATE_KEY, f"{_TEMPLATE_KEY}.tool_use")
        file.replace_metadata({key: changes.chat_template for key in keys if key == keys[0] or key in file.metadata})


def note_unknown_settings(file: ModelFile, consequence: str) -> None:
    """Log the settings of a model's file that are not read, and what follows from that."""
    unknown = unknown_settings(file)
    if unknown:
        logger.warning(
            "%s: settings unknown to this version, %s, are ignored: %s", file.path.name, consequence, listed(unknown)
        )


def template_source(template: str | os.PathLike[str] | None) -> str | None:
    """The Jinja source of a template, given as text, which contains a brace, or as the path of its file.

    Raises: RequestError for a file that cannot be read.
    """
    if template is None:
        return None
    if not isinstance(template, str | os.PathLike):
        raise RequestError(f"chat_template is {shown(template)}; give a template as text, or the path of its file")
    if isinstance(template, str) and ("{" in template or "\n" in template):
        return template
    path = expand_home(template)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(content) > _MAX_TEMPLATE_BYTES:
            raise RequestError(
                f"the chat template {path} has more than {_MAX_TEMPLATE_BYTES} bytes; give a shorter one"
            )
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"the chat template {str(path)!r} cannot be read: {error}") from None


def parse_override(text: str) -> tuple[str, SingleValue]:
    """Parse KEY=VALUE. VALUE may begin with its type (int:, float:, bool: or str:), else the type is inferred.

    Raises: RequestError.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RequestError(f"{text!r:.80} is not a setting; give KEY=VALUE, such as llama.rope.freq_base=1e6")
    typed = re.fullmatch(_TYPED, value)
    kind, value = typed.groups() if typed else ("", value)
    try:
        if kind == "str":
            return key, value
        if kind in ("bool", "") and value in ("true", "false"):
            return key, value == "true"
        if kind in ("int", "") and re.fullmatch(_WHOLE_NUMBER, value):
            return key, int(value)
        if kind in ("float", ""):
            return key, float(value)
    except ValueError:
        if not kind:
            return key, value
    raise RequestError(f"{key} is set to {value!r:.80}, which is not of type {kind}; give such a value or another type")


def _check_template(source: str) -> None:
    from localinfer.models.text.template_sandbox import TemplateSandbox

    if not _is_text(source):
        raise RequestError("the chat template has lone surrogates; give valid Unicode text")
    try:
        TemplateSandbox().from_string(source)
    # Jinja reports syntax errors; Python's compiler may exceed limits of stack, memory and nesting.
    except Exception as error:
        raise RequestError(
            f"the chat template does not compile ({type(error).__name__}: {str(error):.200}); give a Jinja template"
        ) from None


def _is_text(value: object) -> bool:
    """True if a value is text without lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
