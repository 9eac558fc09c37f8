"""Token ids read so far, and the continuation of the longest match: memory and growth around the compiled steps.

How it works is in `compiled/token_history.py`.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import guard, kernel_abi
from localinfer.kernels.cpu.memory import address, empty, placed, zeros
from localinfer.kernels.cpu.parameters import CURSOR, HISTORY
from localinfer.kernels.jit.object_cache import Function

_EXTEND = Function("token_history.extend", "q", "qqqq")
_DRAFT = Function("token_history.draft", "q", "qqqq")
_REHASH = Function("token_history.rehash", "q", "q")
_TRACE = Function("token_history.trace", "q", "qqqq")
KERNELS = (_EXTEND, _DRAFT, _REHASH, _TRACE)
"""Kernels of drafting from history, so that a loader can compile them before the first token."""

_NODE, _MATCH_LENGTH = map(CURSOR.fields.index, ("node", "match_length"))
_NUM_NODES = HISTORY.fields.index("num_nodes")
_NEW_CURSOR = CURSOR.pack(state=0, node=0, match=-1, match_length=0, aligned=-1, lost=0)
_FIRST_ROOM = 1024
"""Tokens; a power of two, and doubled when it is full."""
_SEPARATOR = 2**31 - 1


class Cursor:
    """A text being read into a history, and its longest match there."""

    def __init__(self) -> None:
        self.words = placed(_NEW_CURSOR.copy())
        self.address = self.words.ctypes.data

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that occurred before; 0 if there is no draft."""
        return int(self.words[_MATCH_LENGTH])


class TokenHistory:
    """Texts of token ids in one automaton; one thread at a time.

    Takes 156 bytes per token there is room for; a cursor belongs to one history.
    """

    def __init__(self) -> None:
        self._words = zeros(len(HISTORY.fields), np.int64)
        self._address = address(self._words)
        self._states = empty((0, kernel_abi.STATE_WORDS), np.int32)
        self._edges = empty((0, kernel_abi.EDGE_WORDS), np.int32)
        self._nodes = empty((0, kernel_abi.NODE_WORDS), np.int32)
        self._table = empty(0, np.int32)
        self._grow(_FIRST_ROOM)
        # Length 0, no link, never a match, the node before all tokens, no edges; and that node.
        self._states[0] = (0, -1, -1, 0, -1, 0)
        self._nodes[0] = (-1, -1, -1)
        HISTORY.write(self._words, num_states=1, num_nodes=1)

    @property
    def num_tokens(self) -> int:
        """Tokens held, those of a common beginning once."""
        return int(self._words[_NUM_NODES]) - 1

    def extend(self, cursor: Cursor, token_ids: NDArray[np.int32]) -> None:
        """Read the next tokens of a text, contiguous int32[T]."""
        assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous, "ids are read in place"
        token_ids = placed(token_ids)
        done, place, size = 0, token_ids.ctypes.data, token_ids.size
        while (done := done + _EXTEND.call(self._address, cursor.address, place + 4 * done, size - done)) < size:
            self._grow(2 * len(self._nodes))

    def draft(self, cursor: Cursor, out: NDArray[np.int32]) -> int:
        """Write the continuation of the longest match into contiguous int32[K]; return how many tokens are known."""
        assert out.dtype == np.int32 and out.flags.c_contiguous, "ids are written in place"
        target = placed(out)
        count = int(_DRAFT.call(self._address, cursor.address, target.ctypes.data, target.size))
        if guard.IS_ON:
            out[:] = target
        return count

    def expect(self, cursor: Cursor, token_ids: NDArray[np.int32]) -> None:
        """Read another text, contiguous int32[T], and expect the cursor's text to continue it."""
        source = Cursor()
        # A token of its own before it, since what follows the node before all tokens is the newest text.
        self.extend(source, np.array([_SEPARATOR], np.int32))
        before = int(source.words[_NODE])
        self.extend(source, token_ids)
        CURSOR.write(cursor.words, aligned=before, match=before, match_length=kernel_abi.LONG_MATCH, lost=0)

    def tokens(self, cursor: Cursor, most: int) -> NDArray[np.int32]:
        """The last tokens of a cursor's text, at most so many."""
        out = empty(most, np.int32)
        node = int(cursor.words[_NODE])
        return out[_TRACE(self._address, node, address(out), most) :]

    def _grow(self, num_nodes: int) -> None:
        self._nodes = _resized(self._nodes, num_nodes)
        self._states = _resized(self._states, 2 * num_nodes)
        self._edges = _resized(self._edges, 4 * num_nodes)
        self._table = placed(np.full(8 * num_nodes, -1, np.int32))
        HISTORY.write(
            self._words, states=address(self._states), edges=address(self._edges), nodes=address(self._nodes),
            table=address(self._table), state_room=len(self._states), edge_room=len(self._edges),
            node_room=num_nodes, table_size=self._table.size,
        )  # fmt: skip
        _REHASH(self._address)


def _resized(array: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """The array with room for more rows, which are not written."""
    larger = empty((size, array.shape[1]), np.int32)
    larger[: len(array)] = array
    return larger
