"""An online suffix automaton over token ids, with the continuation of each match, for n-gram drafts.

Every state of the automaton is a set of substrings with the same ends in all texts read so far (Blumer et al., The
smallest automaton recognizing the subwords of a text, 1985); texts share one automaton, each with its own cursor
(the generalised automaton of Mohri, Moreno and Weinstein, 2009). Reading a token takes amortised constant time.

Texts are kept beside it as a tree of nodes, one per distinct prefix, so a text that begins like an older one (the next
turn of a conversation, a second attempt) shares its nodes and adds nothing. Each node has the node that followed it
last. Each state has the node where its strings ended last, for the _RECENT_STEPS longest suffixes of every prefix:
those of ordinary text are far fewer. A node whose follower came twice in a row stays preferred until others came
twice: one exception to what is often said is no reason to expect it again.

The longest suffix of the text so far that occurred before is the first state on the way of suffix links that has ended
anywhere: a match. A draft is what followed there. A match of few tokens says little after a point where a copy was
changed (a name, an inserted word), so the point where the last long match left off is kept, and the window after it is
searched for the last tokens: the nearest point that matches as long wins over a recent one elsewhere.
"""

from typing import Any

import numpy as np
from numba import carray

from localinfer.kernels.cpu.compiled.memory import int32_pointer
from localinfer.kernels.cpu.kernel_abi import EDGE_WORDS, LONG_MATCH, NODE_WORDS, STATE_WORDS
from localinfer.kernels.cpu.parameters import CURSOR, HISTORY
from localinfer.kernels.jit.numba import entry, inline

_LENGTH, _LINK, _RECENT, _PREFIX, _EDGES, _VOTES = range(STATE_WORDS)
"""Of a state: tokens in its longest string; the state of its longest suffix elsewhere; the node where it ended last,
or -1; the node whose whole prefix it is, or -1; its newest edge; and how often what followed there must be contradicted
before another one is preferred."""
_SOURCE, _TOKEN, _TARGET, _OLDER = range(EDGE_WORDS)
"""Of an edge: from, by, to, and the edge added to the same state before it."""
_NODE_TOKEN, _NEXT, _PARENT = range(NODE_WORDS)
"""Of a node: its token, the node that followed it last, or -1, and the one before it."""

_RECENT_STEPS = 64
_MOST_VOTES = 1
_WINDOW = 48
"""Tokens after the end of a copy within which it may continue."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@inline
def _tables(history: int) -> Any:
    """States, edges, nodes and the hash table, as arrays."""
    p = HISTORY.load(history)
    return (
        carray(int32_pointer(p.states), (p.state_room, STATE_WORDS)),
        carray(int32_pointer(p.edges), (p.edge_room, EDGE_WORDS)),
        carray(int32_pointer(p.nodes), (p.node_room, NODE_WORDS)),
        carray(int32_pointer(p.table), p.table_size),
    )


@inline
def _slot(table: Any, edges: Any, state: int, token: int) -> Any:
    """Slot of the hash table with the edge from a state by a token, or the free slot for it."""
    mask = np.uint64(table.size - 1)
    key = (np.uint64(state) << np.uint64(32)) | np.uint64(token)
    mixed = key * _MULTIPLIER
    place = (mixed ^ (mixed >> np.uint64(29))) & mask
    while True:
        edge = table[place]
        if edge < 0 or (edges[edge, _SOURCE] == state and edges[edge, _TOKEN] == token):
            return place
        place = (place + np.uint64(1)) & mask


@inline
def _add_edge(history: int, table: Any, edges: Any, states: Any, source: int, token: int, target: int) -> None:
    edge = HISTORY.num_edges(history)
    HISTORY.set_num_edges(history, edge + 1)
    edges[edge, _SOURCE] = source
    edges[edge, _TOKEN] = token
    edges[edge, _TARGET] = target
    edges[edge, _OLDER] = states[source, _EDGES]
    states[source, _EDGES] = edge
    table[_slot(table, edges, source, token)] = edge


@inline
def _add_state(history: int, states: Any, length: int) -> Any:
    state = HISTORY.num_states(history)
    HISTORY.set_num_states(history, state + 1)
    states[state, _LENGTH] = length
    states[state, _LINK] = 0
    states[state, _RECENT] = -1
    states[state, _PREFIX] = -1
    states[state, _EDGES] = -1
    states[state, _VOTES] = 0
    return state


@inline
def _target(history: int, table: Any, edges: Any, states: Any, source: int, token: int) -> Any:
    """The state that an existing edge leads to, of which source + token is the longest string: split off if need be."""
    old = np.int64(edges[table[_slot(table, edges, source, token)], _TARGET])
    if states[old, _LENGTH] == states[source, _LENGTH] + 1:
        return old
    split = _add_state(history, states, states[source, _LENGTH] + 1)
    edge = np.int64(states[old, _EDGES])
    while edge >= 0:
        _add_edge(history, table, edges, states, split, edges[edge, _TOKEN], edges[edge, _TARGET])
        edge = np.int64(edges[edge, _OLDER])
    states[split, _LINK] = states[old, _LINK]
    states[split, _RECENT] = states[old, _RECENT]
    states[split, _VOTES] = states[old, _VOTES]
    states[old, _LINK] = split
    state = np.int64(source)
    while state >= 0:
        edge = np.int64(table[_slot(table, edges, state, token)])
        if edge < 0 or edges[edge, _TARGET] != old:
            break
        edges[edge, _TARGET] = split
        state = np.int64(states[state, _LINK])
    return split


@inline
def _edges_needed(table: Any, edges: Any, states: Any, last: int, token: int) -> Any:
    """At most how many edges reading a token adds."""
    needed = 0
    state = np.int64(last)
    while state >= 0:
        edge = np.int64(table[_slot(table, edges, state, token)])
        if edge >= 0:
            old = np.int64(edges[edge, _TARGET])
            if states[old, _LENGTH] != states[state, _LENGTH] + 1:
                edge = np.int64(states[old, _EDGES])
                while edge >= 0:
                    needed += 1
                    edge = np.int64(edges[edge, _OLDER])
            break
        needed += 1
        state = np.int64(states[state, _LINK])
    return needed


@inline
def _step(history: int, table: Any, edges: Any, states: Any, last: int, token: int) -> Any:
    """The state after reading a token in a state that is a whole prefix."""
    if table[_slot(table, edges, last, token)] >= 0:
        return _target(history, table, edges, states, last, token)
    current = _add_state(history, states, states[last, _LENGTH] + 1)
    state = np.int64(last)
    while state >= 0 and table[_slot(table, edges, state, token)] < 0:
        _add_edge(history, table, edges, states, state, token, current)
        state = np.int64(states[state, _LINK])
    if state >= 0:
        states[current, _LINK] = _target(history, table, edges, states, state, token)
    return current


@inline
def _remember(states: Any, nodes: Any, state: Any, node: Any, token: Any) -> None:
    """Let a prefix and its suffixes be those that ended last here, if it is clear enough that `token` follows them."""
    for _ in range(_RECENT_STEPS):
        if state <= 0:
            break
        known = np.int64(states[state, _RECENT])
        votes = states[state, _VOTES]
        if known >= 0 and nodes[nodes[known, _NEXT], _NODE_TOKEN] == token:
            states[state, _VOTES] = min(votes + 1, _MOST_VOTES)
            states[state, _RECENT] = node
        elif votes > 0:
            states[state, _VOTES] = votes - 1
        else:
            states[state, _RECENT] = node
        state = np.int64(states[state, _LINK])


@inline
def _match(states: Any, cursor: int, state: Any) -> None:
    """Find the longest suffix of a prefix that has ended somewhere and was followed."""
    while state > 0 and states[state, _RECENT] < 0:
        state = np.int64(states[state, _LINK])
    CURSOR.set_match(cursor, states[state, _RECENT])
    CURSOR.set_match_length(cursor, states[state, _LENGTH])


@inline
def _align(nodes: Any, cursor: int, node: int) -> None:
    """Follow the copy in progress, or look for the point where it continues after a change."""
    if CURSOR.match_length(cursor) >= LONG_MATCH:
        CURSOR.set_aligned(cursor, CURSOR.match(cursor))
        CURSOR.set_lost(cursor, 0)
        return
    aligned = CURSOR.aligned(cursor)
    if aligned < 0:
        return
    best, best_length = np.int64(-1), np.int64(0)
    place = np.int64(nodes[aligned, _NEXT])
    for _ in range(_WINDOW):
        if place < 0 or place == node:
            break
        length = np.int64(0)
        left, right = place, np.int64(node)
        while length < LONG_MATCH and left > 0 and right > 0 and nodes[left, _NODE_TOKEN] == nodes[right, _NODE_TOKEN]:
            length += 1
            left, right = np.int64(nodes[left, _PARENT]), np.int64(nodes[right, _PARENT])
        if length > best_length:
            best, best_length = place, length
        place = np.int64(nodes[place, _NEXT])
    if best_length > 0 and best_length >= CURSOR.match_length(cursor) and nodes[best, _NEXT] >= 0:
        CURSOR.set_match(cursor, best)
        CURSOR.set_match_length(cursor, best_length)
        if best_length > 1:
            CURSOR.set_aligned(cursor, best)
            CURSOR.set_lost(cursor, 0)
            return
    CURSOR.set_lost(cursor, CURSOR.lost(cursor) + 1)
    if CURSOR.lost(cursor) > _WINDOW:
        CURSOR.set_aligned(cursor, -1)


@entry("q", "qqqq")
def extend(history: int, cursor: int, tokens: int, count: int) -> int:
    """Read int32[count] tokens at a cursor; return how many were read before memory ran out.

    history, cursor: addresses of these blocks.
    """
    states, edges, nodes, table = _tables(history)
    token_ids = carray(int32_pointer(tokens), count)
    for index in range(count):
        token = np.int64(token_ids[index])
        last, parent = CURSOR.state(cursor), CURSOR.node(cursor)
        needed = _edges_needed(table, edges, states, last, token)
        if (
            HISTORY.num_states(history) + 2 > HISTORY.state_room(history)
            or HISTORY.num_nodes(history) + 1 > HISTORY.node_room(history)
            or HISTORY.num_edges(history) + needed > HISTORY.edge_room(history)
        ):
            return index
        state = _step(history, table, edges, states, last, token)
        node = np.int64(states[state, _PREFIX])
        if node < 0:
            node = HISTORY.num_nodes(history)
            HISTORY.set_num_nodes(history, node + 1)
            nodes[node, _NODE_TOKEN] = token
            nodes[node, _NEXT] = -1
            nodes[node, _PARENT] = parent
            states[state, _PREFIX] = node
        nodes[parent, _NEXT] = node
        CURSOR.set_state(cursor, state)
        CURSOR.set_node(cursor, node)
        _remember(states, nodes, last, parent, token)
        _match(states, cursor, state)
        _align(nodes, cursor, node)
    return count


@entry("q", "qqqq")
def draft(history: int, cursor: int, out: int, count: int) -> int:
    """Write int32[count] tokens that followed the cursor's match, as far as they are known; return how many.

    A match that ends at the cursor itself repeats: what follows it is the draft.
    """
    _, _, nodes, _ = _tables(history)
    tokens = carray(int32_pointer(out), count)
    node = CURSOR.match(cursor)
    if node < 0:
        return 0
    for index in range(count):
        following = np.int64(nodes[node, _NEXT])
        if following < 0:
            if node != CURSOR.node(cursor):
                return index
            following = np.int64(nodes[CURSOR.match(cursor), _NEXT])
        tokens[index] = nodes[following, _NODE_TOKEN]
        node = following
    return count


@entry("q", "q")
def rehash(history: int) -> int:
    """Enter every edge into a hash table of -1."""
    _, edges, _, table = _tables(history)
    for edge in range(HISTORY.num_edges(history)):
        table[_slot(table, edges, edges[edge, _SOURCE], edges[edge, _TOKEN])] = edge
    return 0


@entry("q", "qqqq")
def trace(history: int, node: Any, out: int, count: int) -> int:
    """Write the last int32[count] tokens of a prefix, the last one last; return how many are missing at the start."""
    _, _, nodes, _ = _tables(history)
    tokens = carray(int32_pointer(out), count)
    while count > 0 and node > 0:
        count -= 1
        tokens[count] = nodes[node, _NODE_TOKEN]
        node = np.int64(nodes[node, _PARENT])
    return count
