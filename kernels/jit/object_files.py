"""Where a function lies among the code of an object file."""

import struct

_ELF = b"\x7fELF\x02\x01"
"""The beginning of a file of 64 bits, little-endian."""
_SYMBOL_TABLE = 2
_SECTIONS_OFFSET, _SECTIONS_COUNT = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


def code_around(code: bytes, symbol: str) -> tuple[int, int]:
    """How many bytes of its section precede a function, and how many there are from its beginning to the section's end.

    Of other formats than ELF, 0 and the size of the file, which is more.
    """
    if not code.startswith(_ELF):
        return 0, len(code)
    wanted = symbol.encode() + b"\0"
    (start,) = struct.unpack_from("<Q", code, _SECTIONS_OFFSET)
    size, count = struct.unpack_from("<HH", code, _SECTIONS_COUNT)
    sections = [_SECTION.unpack_from(code, start + size * index) for index in range(count)]
    for _, kind, _, _, offset, num_bytes, link, _, _, _ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names = sections[link][4]
        for name, _, _, section, value, _ in _SYMBOL.iter_unpack(code[offset : offset + num_bytes]):
            if code.startswith(wanted, names + name):
                return value, sections[section][5] - value
    return 0, len(code)
