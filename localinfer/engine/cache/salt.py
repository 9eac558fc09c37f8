"""Salts of prefixes: texts of different salts share nothing of the cache, in memory or on disk.

What can be told by one caller from the cache, such as how many tokens of a prompt were found, is then of its own texts.
"""

import hashlib

from localinfer.arguments import shown
from localinfer.errors import RequestError

NO_SALT = b""
"""Of texts that all callers without a salt share."""
SALT_BYTES = (0, 32)
"""Of NO_SALT, and of any other."""
_DOMAIN = b"localinfer cache salt\0"


def salt_of(name: str | None) -> bytes:
    """The salt that a caller's name for it stands for, 32 bytes of SHA-256; NO_SALT for None.

    The name itself is kept nowhere. Raises: RequestError for what is no text, or an empty one.
    """
    if name is None:
        return NO_SALT
    if not isinstance(name, str) or not name:
        reason = f"cache_salt is {name!r:.80}; give a text that is not empty, or leave it out"
        raise RequestError(reason, field="cache_salt")
    return hashlib.sha256(_DOMAIN + name.encode("utf-8", "surrogatepass")).digest()


def check_salt(salt: bytes) -> bytes:
    """Return what may be a salt. Raises: RequestError for what `salt_of` never gives."""
    if not isinstance(salt, bytes) or len(salt) not in SALT_BYTES:
        raise RequestError(f"salt is {shown(salt)}; give the 32 bytes of salt_of, or none", field="salt")
    return salt
