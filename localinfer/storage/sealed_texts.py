"""Texts that clients keep for us: they can neither read nor change them, and only their owner may send them back.

A text is compressed, encrypted and authenticated, with keys that are derived from one of 32 bytes. It is encrypted with
a stream of keyed BLAKE2b over a random nonce and a counter, and authenticated, with its context, by another keyed
BLAKE2b (RFC 7693; encrypt, then authenticate).
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import time
import zlib
from pathlib import Path

from localinfer.system.folders import make_private

_PREFIX = "localinfer-sealed-1:"
_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES, _BLOCK_BYTES = 32, 16, 32, 64
_MOST_BYTES = 16 << 20
"""Of a text: what is sealed is no file, and what comes back must not fill the memory."""


_TORN_SECONDS = 60.0


def _open_privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class TextSealer:
    """Seals and unseals texts with one key."""

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(_KEY_BYTES) if key is None else key
        self._encryption, self._authentication = (
            hashlib.blake2b(key=key, person=purpose, digest_size=_KEY_BYTES).digest()
            for purpose in (b"encrypt", b"authenticate")
        )

    @classmethod
    def kept_in(cls, folder: Path | None) -> "TextSealer":
        """One whose key is kept in a private folder, so that a later process reads what this one sealed.

        Without a folder, or where it cannot be written or others could read it, the key ends with the process.
        """
        if folder is None or make_private(folder) is not None:
            return cls()
        file = folder / "sealed-texts.key"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError), open(file, "xb", opener=_open_privately) as output:
                output.write(secrets.token_bytes(_KEY_BYTES))
            key = file.read_bytes()
            if len(key) == _KEY_BYTES:
                return cls(key)
            # It is being written, or was when the power went: the next process finds it whole, or makes another.
            if time.time() - file.stat().st_mtime > _TORN_SECONDS:
                file.unlink()
        return cls()

    def seal(self, text: str, context: str) -> str:
        """The text as only `unseal` reads it, in characters that JSON leaves as they are. context: its owner."""
        nonce = os.urandom(_NONCE_BYTES)
        content = self._crypted(zlib.compress(text.encode("utf-8", "surrogatepass")), nonce)
        sealed = nonce + content + self._tag(nonce, content, context)
        return _PREFIX + base64.urlsafe_b64encode(sealed).decode("ascii")

    def unseal(self, sealed: str, context: str) -> str:
        """The text. Raises: ValueError for what was changed, or sealed with another key or context."""
        try:
            if not sealed.startswith(_PREFIX):
                raise ValueError("it does not begin as a sealed text")
            raw = base64.b64decode(sealed.removeprefix(_PREFIX), b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ValueError("it is no base64") from error
        nonce, content, tag = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:-_TAG_BYTES], raw[-_TAG_BYTES:]
        if len(raw) < _NONCE_BYTES + _TAG_BYTES or not hmac.compare_digest(tag, self._tag(nonce, content, context)):
            raise ValueError("it was changed, or sealed elsewhere or for another owner")
        reader = zlib.decompressobj()
        text = reader.decompress(self._crypted(content, nonce), _MOST_BYTES)
        if not reader.eof:
            raise ValueError(f"it is longer than {_MOST_BYTES:,} bytes")
        return text.decode("utf-8", "surrogatepass")

    def _crypted(self, content: bytes, nonce: bytes) -> bytes:
        """The content, encrypted or decrypted."""
        blocks = (
            hashlib.blake2b(nonce + number.to_bytes(8, "big"), key=self._encryption, digest_size=_BLOCK_BYTES).digest()
            for number in range(-(-len(content) // _BLOCK_BYTES))
        )
        stream = b"".join(blocks)[: len(content)]
        return (int.from_bytes(content, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(content), "big")

    def _tag(self, nonce: bytes, content: bytes, context: str) -> bytes:
        owner = context.encode("utf-8", "surrogatepass")
        told = len(owner).to_bytes(8, "big") + owner + nonce + content
        return hashlib.blake2b(told, key=self._authentication, digest_size=_TAG_BYTES).digest()
