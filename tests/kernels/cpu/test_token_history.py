"""The history of tokens against a search of every place in every text."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.cpu.kernel_abi import LONG_MATCH
from localinfer.kernels.cpu.parameters import CURSOR
from localinfer.kernels.cpu.token_history import Cursor, TokenHistory


def read(history: TokenHistory, cursor: Cursor, *token_ids: int) -> None:
    history.extend(cursor, np.array(token_ids, np.int32))


def draft(history: TokenHistory, cursor: Cursor, count: int) -> list[int]:
    out = np.empty(count, np.int32)
    return out[: history.draft(cursor, out)].tolist()


def suffix_length(text: list[int], other: list[int], end: int) -> int:
    """Tokens before `end` of another text that equal the end of this one."""
    length = 0
    while length < min(end, len(text)) and other[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 20])
def test_the_longest_match_is_what_a_search_of_all_texts_finds(vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    for _ in range(12):
        history = TokenHistory()
        texts: list[list[int]] = [[], [], []]
        cursors = [Cursor() for _ in texts]
        for _ in range(120):
            which = int(generator.integers(3))
            text = texts[which]
            token = int(generator.integers(vocabulary))
            text.append(token)
            read(history, cursors[which], token)
            longest = max(
                suffix_length(text, other, end)
                for other in texts
                for end in range(len(other))
            )  # fmt: skip
            # Long matches become a place to go on from; here only matches count.
            CURSOR.write(cursors[which].words, aligned=-1)
            assert cursors[which].match_length == longest
            found = draft(history, cursors[which], 3)
            assert bool(found) == bool(longest)
            if found:
                places = [(other, end) for other in texts for end in range(len(other))]
                follow = [other[end] for other, end in places if suffix_length(text, other, end) == longest]
                assert found[0] in follow


def test_the_most_recent_of_equal_matches_is_continued() -> None:
    history, cursor = TokenHistory(), Cursor()
    read(history, cursor, 7, 1, 7, 2, 7, 3, 7)
    assert draft(history, cursor, 3) == [3, 7, 3]
    newer = Cursor()
    read(history, newer, 9, 7, 4, 7)
    assert draft(history, newer, 1) == [4]


def test_one_exception_does_not_end_a_habit() -> None:
    history, cursor = TokenHistory(), Cursor()
    read(history, cursor, 1, 7, 2, 3, 7, 2, 4, 7, 9, 5, 7)
    assert draft(history, cursor, 2) == [2, 4]
    read(history, cursor, 9, 6, 7, 9, 8, 7)
    assert draft(history, cursor, 2) == [9, 8]


def test_a_match_that_reaches_the_end_of_its_own_text_repeats() -> None:
    history, cursor = TokenHistory(), Cursor()
    read(history, cursor, 1, 2, 3, 1, 2, 3, 1)
    assert draft(history, cursor, 8) == [2, 3, 1, 2, 3, 1, 2, 3]


def test_a_text_that_begins_like_an_older_one_adds_nothing_and_drafts_its_rest() -> None:
    history, first, second = TokenHistory(), Cursor(), Cursor()
    text = np.arange(100, dtype=np.int32)
    history.extend(first, text)
    history.extend(second, text[:60])
    assert history.num_tokens == 100
    assert second.match_length == 60
    assert draft(history, second, 50) == list(range(60, 100))
    read(history, second, 5)
    assert history.num_tokens == 101
    assert history.tokens(second, 3).tolist() == [58, 59, 5]
    assert history.tokens(first, 200).tolist() == text.tolist()


@pytest.mark.parametrize("changed", [[500], [500, 501, 502], []])
def test_a_copy_goes_on_after_a_change_at_the_nearest_place(changed: list[int]) -> None:
    history, cursor = TokenHistory(), Cursor()
    # Each line ends with the token 9, so that 9 alone says nothing; the newest 9 is followed by 999.
    lines = [[100 + 10 * i + j for j in range(5)] + [9] for i in range(6)]
    read(history, cursor, *sum(lines, []), 9, 999)
    read(history, cursor, *sum(lines[:3], []), *lines[3][:2], *changed, 9)
    assert cursor.match_length < LONG_MATCH
    assert draft(history, cursor, 3) == lines[4][:3]


def test_an_expected_text_is_drafted_from_its_first_token_on() -> None:
    history, cursor = TokenHistory(), Cursor()
    read(history, cursor, 1, 2, 3)
    history.expect(cursor, np.arange(50, 60, dtype=np.int32))
    assert draft(history, cursor, 3) == [50, 51, 52]
    read(history, cursor, 40, 50)
    assert draft(history, cursor, 2) == [51, 52]


def test_reading_at_once_and_token_by_token_across_growth_gives_the_same_drafts() -> None:
    generator = np.random.default_rng(0)
    text: NDArray[np.int32] = generator.integers(0, 40, 6000).astype(np.int32)
    at_once, singly = TokenHistory(), TokenHistory()
    cursor, other = Cursor(), Cursor()
    at_once.extend(cursor, text)
    for index in range(text.size):
        singly.extend(other, text[index : index + 1])
    assert cursor.words.tolist() == other.words.tolist()
    assert draft(at_once, cursor, 16) == draft(singly, other, 16)


def test_one_token_repeated_is_read_in_linear_time_and_memory() -> None:
    history, cursor = TokenHistory(), Cursor()
    history.extend(cursor, np.zeros(100_000, np.int32))
    assert history.num_tokens == 100_000
    assert cursor.match_length == 99_999
    assert draft(history, cursor, 4) == [0, 0, 0, 0]
