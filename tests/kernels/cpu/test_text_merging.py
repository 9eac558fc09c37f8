"""Words cut and merged by compiled code, against the slow and obvious way."""

import random

import numpy as np
import pytest

from localinfer.kernels.cpu import kernel_abi as protocol
from localinfer.kernels.cpu.text_merging import MergeTable, WordShape, split_words


def merge_slowly(symbols: list[int], merges: dict[tuple[int, int], tuple[int, int]]) -> list[tuple[int, int]]:
    """The symbols left, each with the place of its first; lowest rank first, leftmost among equals."""
    row = [(symbol, place) for place, symbol in enumerate(symbols)]
    while True:
        found = [
            (merges[left, right][0], place)
            for place, ((left, _), (right, _)) in enumerate(zip(row, row[1:], strict=False))
            if (left, right) in merges
        ]
        if not found:
            return row
        place = min(found)[1]
        row[place : place + 2] = [(merges[row[place][0], row[place + 1][0]][1], row[place][1])]


def table(merges: dict[tuple[int, int], tuple[int, int]], **options: object) -> MergeTable:
    pairs = np.array([left << 32 | right for left, right in merges], np.int64)
    values = np.array([rank << 32 | result for rank, result in merges.values()], np.int64)
    return MergeTable(pairs, values, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_random_merges_give_what_the_slow_way_gives_in_short_and_long_words(seed: int):
    draw = random.Random(seed)
    count = draw.randint(2, 12)
    merges = {
        (draw.randrange(count), draw.randrange(count)): (draw.randrange(6), draw.randrange(count))
        for _ in range(draw.randint(0, 40))
    }
    words = [[draw.randrange(-1, 4) for _ in range(draw.choice((0, 1, 2, 9, 24, 25, 80)))] for _ in range(12)]
    ends = np.cumsum([len(word) for word in words])
    symbols = np.array([symbol for word in words for symbol in word], np.int32)
    expected = [
        (symbol, place + int(end) - len(word))
        for word, end in zip(words, ends, strict=True)
        for symbol, place in merge_slowly(word, merges)
    ]
    merged, places = table(merges).merge(symbols, ends.astype(np.int64))
    assert list(zip(merged.tolist(), places.tolist(), strict=True)) == expected


def test_word_that_is_a_token_as_a_whole_is_not_merged():
    whole = (np.array([0, 1, 0, 1, 2], np.int32), np.array([0, 0, 2, 5], np.int64))
    merges = {(0, 1): (0, 9)}
    merged, places = table(merges, whole=whole).merge(
        np.array([0, 1, 0, 1, 2, 0, 1, 0], np.int32), np.array([2, 5, 8], np.int64)
    )
    assert merged.tolist() == [1, 2, 9, 0]
    assert places.tolist() == [0, 2, 5, 7]


def test_of_equal_pairs_the_first_counts():
    twice = MergeTable(np.array([1 << 32 | 2] * 2, np.int64), np.array([5 << 32 | 7, 1 << 32 | 8], np.int64))
    merged, _ = twice.merge(np.array([1, 2], np.int32), np.array([2], np.int64))
    assert merged.tolist() == [7]


def test_ends_that_are_not_the_text_are_refused():
    for ends in ([1], [2, 1], [3], []):
        with pytest.raises(AssertionError):
            table({}).merge(np.array([0, 1], np.int32), np.array(ends, np.int64))


def test_words_that_more_text_may_change_are_left_open():
    codes = np.array(list(map(ord, "ab  cd ")), np.int32)
    letter, space = protocol.CHARACTER_LETTER, protocol.CHARACTER_SPACE
    kinds = np.array([letter if chr(code).isalpha() else space for code in codes], np.uint8)
    assert split_words(codes, kinds, WordShape(), is_end=True).tolist() == [2, 3, 6, 7]
    assert split_words(codes, kinds, WordShape(), is_end=False).tolist() == [2, 3]
