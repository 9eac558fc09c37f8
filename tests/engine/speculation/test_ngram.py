"""Drafts from what was read before: across texts, with a prediction, and within a budget of tokens."""

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.speculation.ngram import NgramDrafter, NgramText


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def draft(text: NgramText, tokens: NDArray[np.int32], count: int = 4) -> list[int]:
    out = np.empty(count, np.int32)
    return out[: text.draft(tokens, out)].tolist()


def test_a_text_is_continued_by_itself_and_by_texts_before_it() -> None:
    drafter = NgramDrafter()
    first = drafter.begin()
    tokens = np.arange(30, dtype=np.int32)
    assert draft(first, tokens) == []
    assert draft(first, np.append(tokens, ids(4, 5))) == [6, 7, 8, 9]
    assert first.match_length == 2
    assert draft(drafter.begin(), ids(90, 91, 20, 21)) == [22, 23, 24, 25]


def test_a_prediction_is_drafted_at_once_and_again_after_a_change() -> None:
    text = NgramDrafter().begin(prediction=np.arange(100, 120, dtype=np.int32))
    assert draft(text, ids(1, 2, 3)) == [100, 101, 102, 103]
    assert draft(text, ids(1, 2, 3, 100, 101, 55, 103)) == [104, 105, 106, 107]


def test_the_older_half_is_forgotten_and_running_texts_go_on() -> None:
    drafter = NgramDrafter(max_tokens=1000)
    running = drafter.begin()
    tokens = np.arange(100, dtype=np.int32)
    assert draft(running, tokens) == []
    for start in range(1000, 3000, 100):
        draft(drafter.begin(), np.arange(start, start + 100, dtype=np.int32))
        assert drafter.num_tokens <= 1000
    assert draft(drafter.begin(), ids(2990, 2991)) == [2992, 2993, 2994, 2995]
    assert draft(drafter.begin(), ids(1010, 1011)) == []
    assert draft(running, np.append(tokens, ids(50, 51))) == [52, 53, 54, 55]


def test_a_text_longer_than_the_budget_is_drafted_from_its_end() -> None:
    drafter = NgramDrafter(max_tokens=400)
    text = drafter.begin()
    tokens = np.append(np.arange(5000, dtype=np.int32), ids(4950, 4951))
    assert draft(text, tokens) == [4952, 4953, 4954, 4955]
    for token in range(4952, 4952 + 600):
        tokens = np.append(tokens, np.int32(token % 4990))
        draft(text, tokens)
    assert drafter.num_tokens <= 400
