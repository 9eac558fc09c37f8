"""Values of requests that other servers take for "nothing" or for the same number, brought into the form of ours.

Clients are written against servers that read `-1` as "no limit", an empty text as "none", and `3.0` as 3. What they
mean is beyond doubt, so they are not refused; a value with a second reading is.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_NO_LIMIT = ((-1, None),)
_NO_TEXT = (("", None),)
_OFF = ((0, 1),)
_MEANT: Mapping[str, tuple[tuple[Any, Any], ...]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _NO_LIMIT),
    **dict.fromkeys(
        ("stop", "grammar", "regex", "json_schema", "guided_json", "guided_regex", "guided_grammar"), _NO_TEXT
    ),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), _OFF),
    "top_k": ((-1, 0),),
}
"""Member -> pairs of a value that clients send and the one that it means here; None: as if it were not there."""
_STOPS = ("stop", "stop_sequences")
_OPTIONS = "options"
"""The member in which Ollama's requests have such members."""
_NAMES = frozenset((*_MEANT, *_STOPS))
_LARGEST = 1 << 53
"""Beyond it not every whole number is a float, so that one could mean another."""
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\d++(?:\.\d++)?+(?:[eE][+-]?\d++)?+', re.DOTALL)


def with_meant_values(members: Mapping[str, msgspec.Raw], record: type) -> dict[str, Any] | None:
    """The members of a request with what they mean; None if they mean what they say.

    record: what they are decoded as; a member that it must have is never taken for nothing.
    """
    made: dict[str, Any] = {}
    for name in members.keys() & _NAMES:
        try:
            value = msgspec.json.decode(members[name])
        except msgspec.DecodeError:
            # A number with too many digits; the record refuses it by its name.
            continue
        if name in _STOPS and isinstance(value, list) and "" in value:
            made[name] = [text for text in value if text != ""]
        for sent, meant in _MEANT.get(name, ()):
            # True is no number here.
            if value == sent and not isinstance(value, bool):
                made[name] = meant
    if (inner := _object(members.get(_OPTIONS))) is not None and (
        meant := with_meant_values(inner, record)
    ) is not None:
        made[_OPTIONS] = meant
    if made:
        required = {field.encode_name for field in msgspec.structs.fields(record) if field.required}
        made = {name: value for name, value in made.items() if value is not None or name not in required}
    return {**members, **made} if made else None


def _object(member: msgspec.Raw | None) -> dict[str, msgspec.Raw] | None:
    """The members of an object; None of anything else."""
    try:
        return None if member is None else msgspec.json.decode(member, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None


def with_whole_numbers(body: bytes | bytearray) -> bytes:
    """JSON in which numbers such as `3.0` are written `3`, in texts excepted."""

    def whole(found: re.Match[bytes]) -> bytes:
        text = found[0]
        if text[:1] == b'"' or not {*b".eE"} & {*text}:
            return text
        number = float(text)
        return b"%d" % number if number.is_integer() and abs(number) <= _LARGEST else text

    return bytes(_STRING_OR_NUMBER.sub(whole, body))
