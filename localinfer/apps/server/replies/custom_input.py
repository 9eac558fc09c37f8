"""The input of a custom tool, read out of the arguments of the function that it became, while they are written."""

import json
import re

from localinfer.apps.server.replies.tool_fields import CUSTOM_ARGUMENT

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SPECIAL = re.compile(r'["\\]')
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class CustomInput:
    """Takes the JSON of one call's arguments in pieces, cut anywhere, and gives the text that they hold."""

    def __init__(self) -> None:
        self._json = ""
        self._at = 0
        self._given: list[str] = []

    def push(self, piece: str) -> str:
        """The text that a piece adds; it may be empty."""
        self._json += piece
        if not self._at:
            opening = _OPENING.match(self._json)
            if opening is None:
                return ""
            self._at = opening.end()
        text = self._read()
        self._given.append(text)
        return text

    def rest(self) -> str:
        """What is missing to the whole text at the end: of arguments that are no such JSON, all of them as they are."""
        given = "".join(self._given)
        whole = self._whole(given)
        rest = whole.removeprefix(given)
        self._given.append(rest)
        return rest

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._given)

    def _whole(self, given: str) -> str:
        try:
            arguments = json.loads(self._json)
        except ValueError:
            # Cut short, or no JSON.
            return given if self._at else self._json
        text = arguments.get(CUSTOM_ARGUMENT) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) and text.startswith(given) else given or self._json

    def _read(self) -> str:
        """Decode what can be decoded by now; stops before the closing quote and before an escape that is not whole."""
        parts: list[str] = []
        while self._at < len(self._json):
            sign = self._json[self._at]
            if sign == '"':
                break
            if sign != "\\":
                found = _SPECIAL.search(self._json, self._at)
                end = len(self._json) if found is None else found.start()
                parts.append(self._json[self._at : end])
                self._at = end
                continue
            decoded, length = self._escape()
            if not length:
                break
            parts.append(decoded)
            self._at += length
        return "".join(parts)

    def _escape(self) -> tuple[str, int]:
        """The character of the escape here, and its length in JSON; 0 if it is not whole yet."""
        kind = self._json[self._at + 1 : self._at + 2]
        if kind != "u":
            return _ESCAPES.get(kind, kind), 2 if kind else 0
        first = _UNICODE.match(self._json, self._at)
        if first is None:
            # Not whole yet, or no escape that JSON knows: the end decides.
            return "", 0
        code = int(first[1], 16)
        if code not in _HIGH:
            return chr(code) if code not in _LOW else "\ufffd", 6
        second = _UNICODE.match(self._json, self._at + 6)
        if second is None:
            is_cut = r"\u".startswith(self._json[self._at + 6 : self._at + 8]) and len(self._json) < self._at + 12
            return ("", 0) if is_cut else ("\ufffd", 6)
        low = int(second[1], 16)
        if low not in _LOW:
            return "\ufffd", 6
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), 12
