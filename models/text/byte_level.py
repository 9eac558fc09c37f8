"""The alphabet of byte-level BPE: every byte has a printable character that stands for it."""


def _byte_characters() -> str:
    """Return 256 characters; the one at index b stands for byte b.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in
    order. Source: the GPT-2 vocabulary, which every byte-level vocabulary since then shares.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
_TO_CHARACTER = dict(enumerate(BYTE_CHARACTERS))
_TO_BYTE = {character: bytes([byte]) for byte, character in enumerate(BYTE_CHARACTERS)}


def bytes_to_characters(text: str) -> str:
    """Write the UTF-8 bytes of `text` in the byte-level alphabet."""
    return text.encode("utf-8").decode("latin-1").translate(_TO_CHARACTER)


def characters_to_bytes(token: str) -> bytes:
    """Return the bytes a byte-level token stands for.

    A character outside the alphabet (some vocabularies store added tokens as plain text) gives its
    own UTF-8.
    """
    return b"".join(_TO_BYTE.get(character) or character.encode("utf-8", "surrogateescape") for character in token)
