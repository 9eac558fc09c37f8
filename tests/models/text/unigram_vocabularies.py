"""Small Unigram vocabularies and compiled normalizations, made by program."""

import numpy as np
from numpy.typing import NDArray

from tests.models.text.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, keyed

WORDS = (
    "▁ ▁the ▁a ▁cat ▁dog s ing ed er ▁un able ness ▁re turn 中 国 ▁中国 é ▁é ô ▁= == === ==== ======== … ! ? . , - "
    "▁hell o ▁hello ▁wor ld ▁world ll he lo or"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyzABC0123456789=!.,'"
REPLACED = {
    "Ａ": "A", "\u00a0": " ", "\t": " ", "\n": " ", "e\u0301": "é", "o\u0302": "ô", "ﬁ": "fi", "①": "1", "\u200b": "",
    "½": "1⁄2", "㎏": "kg", "\u3000": " ",
}  # fmt: skip


def unigram_metadata(
    *, seed: int = 0, levels: int = 0, with_bytes: bool = False, **changes: object
) -> dict[str, object]:
    """An XLM-RoBERTa-like vocabulary. levels: how many different scores there are, 0 for as many as tokens."""
    generator = np.random.default_rng(seed)
    letters = [letter for letter in LETTERS if letter not in WORDS]
    pieces = [*WORDS, *letters, *("".join(generator.choice(list("abcdeht"), size)) for size in (2, 3, 3, 4, 5) * 12)]
    words = list(dict.fromkeys(pieces))
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *words, *([f"<0x{byte:02X}>" for byte in range(256)] * with_bytes)]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[NORMAL] * len(words), *([BYTE] * 256 * with_bytes)]
    drawn = -generator.uniform(2, 14, len(tokens))
    scores = (np.round(drawn * levels / 12) * 12 / levels if levels else drawn).astype(np.float32)
    scores[:4] = 0
    metadata = keyed(
        model="t5",
        tokens=tokens,
        scores=scores,
        token_type=np.array(types, np.int32),
        bos_token_id=0,
        eos_token_id=2,
        unknown_token_id=3,
        add_bos_token=True,
        add_eos_token=True,
        add_space_prefix=True,
        remove_extra_whitespaces=True,
    )
    return metadata | keyed(**changes)


def random_texts(count: int, seed: int, *, highest: int = 0x2FFF) -> list[str]:
    """Texts of words, other scripts, combining marks, symbols and spaces, and of any characters up to `highest`."""
    generator = np.random.default_rng(seed)
    parts = [
        *(
            "the",
            "cats",
            "unreturnable",
            "hello world",
            "=====",
            "==========",
            "中国",
            "中x国",
            "e\u0301te\u0301",
            "ﬁ",
            "①",
        ),
        *(
            "  ",
            "\t",
            "\u00a0",
            "\u3000",
            "\u200b",
            "½㎏",
            "😀",
            "ж",
            "‑",
            "a\u0301\u0302",
            "\U00010330",
            "ÀÉ",
            "ß",
            "▁",
        ),
        *("Don't", "[x]", "a_b", "#$%", "C++", "٣", "ñandú", "ﬃ", "ＡＢ"),
    ]
    letters = list("abcdehtABC zé…")
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(int(generator.integers(1, 14))):
            kind = generator.random()
            if kind < 0.5:
                pieces.append(parts[int(generator.integers(len(parts)))])
            elif kind < 0.9:
                pieces.append("".join(generator.choice(letters, int(generator.integers(1, 9)))))
            else:
                pieces.append(chr(int(generator.integers(0x20, highest))))
            pieces.append(" " * int(generator.integers(0, 3)))
        texts.append("".join(pieces))
    return texts


def compiled_map(replaced: dict[str, str]) -> NDArray[np.uint8]:
    """The compiled form of replacements: a double array over the bytes of their keys, then the texts."""
    texts, places = b"", {}
    for key, value in replaced.items():
        places[key.encode()] = len(texts)
        texts += value.encode() + b"\0"
    units: dict[int, int] = {0: 0}
    taken: set[int] = set()

    def write(place: int, prefix: bytes) -> None:
        """Choose the children of the unit at `place` and write them."""
        labels = sorted({key[len(prefix)] for key in places if key.startswith(prefix) and len(key) > len(prefix)})
        is_key = prefix in places
        wanted = [*labels, *([0] if is_key else [])]
        node = next(
            node for node in range(1, 1 << 20) if node not in taken and not any(node ^ each in units for each in wanted)
        )
        taken.add(node)
        units[place] |= (place ^ node) << 10 | is_key << 8
        if is_key:
            units[node] = places[prefix] | 1 << 31
        for label in labels:
            units[node ^ label] = label
        for label in labels:
            write(node ^ label, prefix + bytes([label]))

    write(0, b"")
    array = np.full(-(-(max(units) + 1) // 256) * 256, 0x7F, "<u4")
    for place, unit in units.items():
        array[place] = unit
    blob = array.nbytes.to_bytes(4, "little") + array.tobytes() + texts
    return np.frombuffer(blob, np.uint8)
