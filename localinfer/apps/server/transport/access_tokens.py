"""The tokens that clients show: several may be valid, each with a name for logs and limits."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from localinfer.apps.server.transport.quotas import Quota, looks_like_a_limit, read_quota
from localinfer.errors import RequestError

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.@-]{1,64}):(?P<rest>.*)")
_BOM = "\ufeff"
"""What some editors write before the first line."""


@dataclass(frozen=True)
class AccessToken:
    """A token and the name of who has it. is_named: by the file, and not by its line there. quota: its own limits.

    Raises: RequestError for a value that no header can hold.
    """

    name: str
    value: str = field(repr=False)
    is_named: bool = True
    quota: Quota = Quota()

    def __post_init__(self) -> None:
        if not (self.value and self.value.isascii() and self.value.isprintable()):
            raise RequestError("the token is empty or has characters that no header can hold; use letters and digits")

    @property
    def identity(self) -> str:
        """Whose texts are those of this token: a name's, whatever its token is now; without a name the token's own.

        A line of the file is nobody: other tokens may move there.
        """
        return f"name {self.name}" if self.is_named else f"token {hashlib.sha256(self.value.encode()).hexdigest()}"


def parse_tokens(text: str) -> tuple[AccessToken, ...]:
    """The tokens of a file: one per line, `NAME:` before it if it is to have one, and behind it its own limits, as
    `LIMIT=NUMBER`; blank lines and `#` lines are none.

    Those without a name are called by their line, `token-3`.
    Raises: RequestError for a file without tokens, for two of one name or one value, and for a line with white space
    in a token or a name, or anything else that a token would have by mistake only.
    """
    tokens: list[AccessToken] = []
    for number, line in enumerate(text.removeprefix(_BOM).splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            token = _token_of_line(line, number)
        except RequestError as error:
            raise RequestError(f"line {number}: {error}") from None
        for other in tokens:
            if other.name == token.name or other.value == token.value:
                what = f"the name {token.name}" if other.name == token.name else f"the token of {other.name}"
                raise RequestError(f"line {number} has {what} a second time; give each token its own line and name")
        tokens.append(token)
    if not tokens:
        raise RequestError("there is no token in it; write one per line")
    return tuple(tokens)


def _token_of_line(line: str, number: int) -> AccessToken:
    named = _NAMED.fullmatch(line)
    value, *behind = (line if named is None else named["rest"]).split() or [""]
    if not value:
        raise RequestError("there is a name and no token; write NAME: TOKEN")
    if looks_like_a_limit(value):
        raise RequestError(
            "there is a limit where the token should stand; write NAME: TOKEN LIMIT=NUMBER, with a space before each"
        )
    quota = read_quota(behind)
    if named is None:
        return AccessToken(f"token-{number}", value, is_named=False, quota=quota)
    return AccessToken(named["name"], value, quota=quota)


def matching_token(shown: str, tokens: Sequence[AccessToken]) -> AccessToken | None:
    """The token that a client shows; how long that takes says nothing about how much of one was right, nor which."""
    given = shown.encode()
    found = None
    for token in tokens:
        if hmac.compare_digest(given, token.value.encode()):
            found = token
    return found
