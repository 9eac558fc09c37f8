"""Token ids read so far, ready to say what followed the longest match: memory and growth around the compiled steps.

How it works is in `compiled/tokens/token_history.py`.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.cpu.memory import address
from localinfer.kernels.jit.object_cache import Function

_EXTEND = Function("token_history.extend", "q", "qqqq")
_DRAFT = Function("token_history.draft", "q", "qqqq")
_REHASH = Function("token_history.rehash", "q", "q")
_TRACE = Function("token_history.trace", "q", "qqqq")
KERNELS = (_EXTEND, _DRAFT, _REHASH, _TRACE)
"""What drafting from history may call, so that a loader can compile it before the first token."""

_FIRST_ROOM = 1024
"""Tokens; a power of two, and doubled when it is full."""
_SEPARATOR = 2**31 - 1


class Cursor:
    """A text being read into a history, and its longest match there."""

    def __init__(self) -> None:
        self.words = np.array([0, 0, -1, 0, -1, 0], np.int64)
        self.address = self.words.ctypes.data

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that occurred before; 0 if there is no draft."""
        return int(self.words[kernel_abi.CURSOR_MATCH_LENGTH])


class TokenHistory:
    """Texts of token ids in one automaton; one thread at a time.

    Takes 156 bytes per token there is room for; a cursor belongs to one history.
    """

    def __init__(self) -> None:
        self._words = np.zeros(kernel_abi.HISTORY_WORDS, np.int64)
        self._address = address(self._words)
        self._states = np.empty((0, kernel_abi.STATE_WORDS), np.int32)
        self._edges = np.empty((0, kernel_abi.EDGE_WORDS), np.int32)
        self._nodes = np.empty((0, kernel_abi.NODE_WORDS), np.int32)
        self._table = np.empty(0, np.int32)
        self._grow(_FIRST_ROOM)
        # Length 0, no link, never a match, the node before all tokens, no edges; and that node.
        self._states[0] = (0, -1, -1, 0, -1, 0)
        self._nodes[0] = (-1, -1, -1)
        self._words[kernel_abi.HISTORY_NUM_STATES] = self._words[kernel_abi.HISTORY_NUM_NODES] = 1

    @property
    def num_tokens(self) -> int:
        """Tokens held, those of a common beginning once."""
        return int(self._words[kernel_abi.HISTORY_NUM_NODES]) - 1

    def extend(self, cursor: Cursor, token_ids: NDArray[np.int32]) -> None:
        """Read the next tokens of a text, contiguous int32[T]."""
        assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous, "ids are read in place"
        done, place, size = 0, token_ids.ctypes.data, token_ids.size
        while (done := done + _EXTEND.call(self._address, cursor.address, place + 4 * done, size - done)) < size:
            self._grow(2 * len(self._nodes))

    def draft(self, cursor: Cursor, out: NDArray[np.int32]) -> int:
        """Write what followed the longest match into contiguous int32[K]; return how many tokens are known."""
        assert out.dtype == np.int32 and out.flags.c_contiguous, "ids are written in place"
        return int(_DRAFT.call(self._address, cursor.address, out.ctypes.data, out.size))

    def expect(self, cursor: Cursor, token_ids: NDArray[np.int32]) -> None:
        """Read another text, contiguous int32[T], and expect the cursor's text to go on with it."""
        source = Cursor()
        # A token of its own before it, since what follows the node before all tokens is the newest text.
        self.extend(source, np.array([_SEPARATOR], np.int32))
        before = source.words[kernel_abi.CURSOR_NODE]
        self.extend(source, token_ids)
        cursor.words[kernel_abi.CURSOR_ALIGNED] = cursor.words[kernel_abi.CURSOR_MATCH] = before
        cursor.words[kernel_abi.CURSOR_MATCH_LENGTH] = kernel_abi.LONG_MATCH
        cursor.words[kernel_abi.CURSOR_LOST] = 0

    def tokens(self, cursor: Cursor, most: int) -> NDArray[np.int32]:
        """The last tokens of a cursor's text, at most so many."""
        out = np.empty(most, np.int32)
        node = int(cursor.words[kernel_abi.CURSOR_NODE])
        return out[_TRACE(self._address, node, address(out), most) :]

    def _grow(self, num_nodes: int) -> None:
        words = self._words
        self._nodes = _resized(self._nodes, num_nodes)
        self._states = _resized(self._states, 2 * num_nodes)
        self._edges = _resized(self._edges, 4 * num_nodes)
        self._table = np.full(8 * num_nodes, -1, np.int32)
        for name, array in (
            (kernel_abi.HISTORY_STATES, self._states),
            (kernel_abi.HISTORY_EDGES, self._edges),
            (kernel_abi.HISTORY_NODES, self._nodes),
            (kernel_abi.HISTORY_TABLE, self._table),
        ):
            words[name] = address(array)
        words[kernel_abi.HISTORY_STATE_ROOM] = len(self._states)
        words[kernel_abi.HISTORY_EDGE_ROOM] = len(self._edges)
        words[kernel_abi.HISTORY_NODE_ROOM] = len(self._nodes)
        words[kernel_abi.HISTORY_TABLE_SIZE] = self._table.size
        _REHASH(self._address)


def _resized(array: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """The array with room for more rows, which are not written."""
    larger = np.empty((size, array.shape[1]), np.int32)
    larger[: len(array)] = array
    return larger
