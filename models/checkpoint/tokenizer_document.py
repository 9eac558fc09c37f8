"""Checked access to tokenizer.json: every complaint names the file, what was found, what was wanted and the way out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localinfer.errors import TokenizerError

_WAY_OUT = "Use a GGUF file of the model, or run it with token ids only."


def object_in(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key. Raises: TokenizerError."""
    value = record.get(key)
    if not isinstance(value, dict):
        raise wrong(f"{key} is {shown(value, 60)}; wanted an object")
    return value


def list_in(record: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key, empty where there is none. Raises: TokenizerError."""
    value = record.get(key, [])
    if not isinstance(value, list):
        raise wrong(f"{key} is {shown(value, 60)}; wanted a list")
    return value


def flag_in(record: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false under a key. Raises: TokenizerError."""
    value = record.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(f"{key} is {shown(value, 60)}; wanted true or false")
    return default if value is None else value


def metaspace_scheme(step: Mapping[str, Any], built: Sequence[str]) -> str:
    """Where a Metaspace puts a space before a text: always, never or first; older files say it in a flag.

    built: the ones that the caller can do. Raises: TokenizerError.
    """
    scheme = step.get("prepend_scheme", "always" if flag_in(step, "add_prefix_space", True) else "never")
    if scheme not in built:
        raise unsupported(f"its prepend_scheme is {shown(scheme, 40)}", f"{', '.join(built[:-1])} or {built[-1]}")
    return str(scheme)


def check_whole(texts: Iterable[str], where: str) -> None:
    """Refuse half characters, which JSON can spell and no text holds."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise wrong(f"{where} has half a character, U+{ord(found):04X}; wanted whole Unicode characters") from None


def shown(value: object, size: int) -> str:
    """The beginning of a value as Python writes it, for a message; a file may nest values however deep."""
    try:
        return repr(value)[:size]
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def wrong(complaint: str) -> TokenizerError:
    """An error, to be raised by the caller, about a tokenizer that makes no sense."""
    return TokenizerError(f"tokenizer.json: {complaint}. {_WAY_OUT}")


def unsupported(found: str, wanted: str) -> TokenizerError:
    """An error, to be raised by the caller, about one that this version does not build."""
    return wrong(f"{found}, which this version does not build; wanted {wanted}")
