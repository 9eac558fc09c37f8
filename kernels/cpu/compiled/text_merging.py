"""Tokenization of long texts: splitting words by character class, and merging pairs inside words.

The pair of the lowest rank is merged first, the leftmost on ties, until no pair has a rank: by linear search in short
words, and with a heap of (rank, position) and lazy deletion in long ones, so time grows as n log n with the longest
word.
"""

from typing import Any

import numpy as np
from numba import carray

from localinfer.kernels.cpu.compiled.memory import int32_pointer, int64_pointer, load_u8
from localinfer.kernels.cpu.kernel_abi import (
    CHARACTER_DIGIT,
    CHARACTER_LETTER,
    CHARACTER_NEWLINE,
    CHARACTER_SPACE,
    CHARACTER_SYMBOL,
    SCAN_SYMBOLS,
)
from localinfer.kernels.cpu.parameters import MERGE, SPLIT
from localinfer.kernels.jit.numba import entry, inline

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NEVER = np.int64(0x7FFFFFFFFFFFFFFF)
_LOW = np.int64(0xFFFFFFFF)
_APOSTROPHE = 39
_BLANK = 32


@inline
def _mixed(key: Any) -> Any:
    mixed = np.uint64(key) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


@inline
def _value(keys: Any, values: Any, mask: Any, left: Any, right: Any) -> Any:
    """rank << 32 | result of a pair of symbols, or _NEVER."""
    if left < 0 or right < 0:
        return _NEVER
    key = (np.int64(left) << 32) | np.int64(right)
    place = np.int64(_mixed(key) & np.uint64(mask))
    while keys[place] >= 0:
        if keys[place] == key:
            return values[place]
        place = (place + 1) & mask
    return _NEVER


@entry("q", "qqqqqq")
def fill_pairs(pairs: int, pair_values: int, count: int, keys_address: int, values_address: int, size: int) -> int:
    """Enter int64[count] pairs and their values into a hash table of -1, whose size is a power of two; return 0.

    Of equal pairs the first counts.
    """
    source = carray(int64_pointer(pairs), count)
    source_values = carray(int64_pointer(pair_values), count)
    keys = carray(int64_pointer(keys_address), size)
    values = carray(int64_pointer(values_address), size)
    mask = size - 1
    for index in range(count):
        place = np.int64(_mixed(source[index]) & np.uint64(mask))
        while keys[place] >= 0 and keys[place] != source[index]:
            place = (place + 1) & mask
        if keys[place] < 0:
            keys[place] = source[index]
            values[place] = source_values[index]
    return 0


@inline
def _hash(symbols: Any, start: Any, end: Any) -> Any:
    found = np.uint64(1469598103934665603)
    for place in range(start, end):
        found = (found ^ np.uint64(symbols[place])) * np.uint64(1099511628211)
    return _mixed(np.int64(found))


@entry("q", "qqqqq")
def fill_whole(symbols_address: int, starts_address: int, count: int, table_address: int, size: int) -> int:
    """Enter int64[count] words, symbols[starts[i]:starts[i + 1]], into an int32 hash table of -1; return 0."""
    starts = carray(int64_pointer(starts_address), count + 1)
    symbols = carray(int32_pointer(symbols_address), starts[count])
    table = carray(int32_pointer(table_address), size)
    mask = size - 1
    for index in range(count):
        if starts[index + 1] > starts[index]:
            place = np.int64(_hash(symbols, starts[index], starts[index + 1]) & np.uint64(mask))
            while table[place] >= 0:
                place = (place + 1) & mask
            table[place] = index
    return 0


@inline
def _whole(p: Any, symbols: Any, start: Any, end: Any) -> Any:
    """The token that a word is as a whole, or -1."""
    mask = p.whole_mask
    table = carray(int32_pointer(p.whole_table), mask + 1)
    starts = int64_pointer(p.whole_starts)
    tokens = int32_pointer(p.whole_symbols)
    place = np.int64(_hash(symbols, start, end) & np.uint64(mask))
    while table[place] >= 0:
        token = np.int64(table[place])
        first = starts[token]
        if starts[token + 1] - first == end - start:
            same = np.int64(0)
            while same < end - start and tokens[first + same] == symbols[start + same]:
                same += 1
            if same == end - start:
                return token
        place = (place + 1) & mask
    return np.int64(-1)


@inline
def _push(heap: Any, size: Any, entry_value: Any) -> Any:
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent] <= entry_value:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = entry_value
    return size + 1


@inline
def _sink(heap: Any, size: Any, place: Any, entry_value: Any) -> None:
    child = 2 * place + 1
    while child < size:
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= entry_value:
            break
        heap[place] = heap[child]
        place = child
        child = 2 * place + 1
    heap[place] = entry_value


@inline
def _scan(p: Any, symbols: Any, start: Any, end: Any, out: Any, places: Any, done: Any) -> Any:
    """Merge a short word by looking for its lowest rank again and again; return how many symbols are written."""
    keys, values, mask = int64_pointer(p.keys), int64_pointer(p.values), p.mask
    count = end - start
    ranks = carray(int64_pointer(p.heap), SCAN_SYMBOLS)
    for place in range(count):
        out[done + place] = symbols[start + place]
        places[done + place] = start + place
    for place in range(count - 1):
        ranks[place] = _value(keys, values, mask, out[done + place], out[done + place + 1])
    while count > 1:
        best, best_rank = np.int64(-1), _NEVER >> 32
        for place in range(count - 1):
            if ranks[place] >> 32 < best_rank:
                best, best_rank = np.int64(place), ranks[place] >> 32
        if best < 0:
            break
        out[done + best] = np.int32(ranks[best] & _LOW)
        count -= 1
        for place in range(best + 1, count):
            out[done + place] = out[done + place + 1]
            places[done + place] = places[done + place + 1]
            ranks[place - 1] = ranks[place]
        if best > 0:
            ranks[best - 1] = _value(keys, values, mask, out[done + best - 1], out[done + best])
        if best < count - 1:
            ranks[best] = _value(keys, values, mask, out[done + best], out[done + best + 1])
    return done + count


@inline
def _sort_out(p: Any, symbols: Any, start: Any, end: Any, out: Any, places: Any, done: Any) -> Any:
    """Merge a long word with a heap; return how many symbols are written in all."""
    keys, values, mask = int64_pointer(p.keys), int64_pointer(p.values), p.mask
    count = end - start
    heap = carray(int64_pointer(p.heap), 2 * count)
    following = carray(int32_pointer(p.following), count)
    preceding = carray(int32_pointer(p.preceding), count)
    size = np.int64(0)
    for place in range(count):
        following[place] = place + 1
        preceding[place] = place - 1
        if place < count - 1:
            value = _value(keys, values, mask, symbols[start + place], symbols[start + place + 1])
            if value != _NEVER:
                heap[size] = (value >> 32 << 32) | np.int64(place)
                size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sink(heap, size, np.int64(place), heap[place])
    while size > 0:
        first = heap[0]
        size -= 1
        if size > 0:
            _sink(heap, size, np.int64(0), heap[size])
        left = first & _LOW
        right = np.int64(following[left])
        # A symbol that was merged into the one before it follows nothing.
        if right < 0 or right >= count:
            continue
        value = _value(keys, values, mask, symbols[start + left], symbols[start + right])
        if value == _NEVER or value >> 32 != first >> 32:
            continue
        symbols[start + left] = np.int32(value & _LOW)
        after = np.int64(following[right])
        following[left] = after
        following[right] = -1
        if after < count:
            preceding[after] = left
            value = _value(keys, values, mask, symbols[start + left], symbols[start + after])
            if value != _NEVER:
                size = _push(heap, size, (value >> 32 << 32) | left)
        before = np.int64(preceding[left])
        if before >= 0:
            value = _value(keys, values, mask, symbols[start + before], symbols[start + left])
            if value != _NEVER:
                size = _push(heap, size, (value >> 32 << 32) | before)
    at = np.int64(0)
    while at < count:
        out[done] = symbols[start + at]
        places[done] = start + at
        done += 1
        at = np.int64(following[at])
    return done


@entry("q", "q")
def merge(parameters: int) -> Any:
    """Merge the symbols of words, which it may overwrite; return how many are left, written beside their positions."""
    p = MERGE.load(parameters)
    ends = carray(int64_pointer(p.ends), p.num_words)
    symbols = int32_pointer(p.symbols)
    out = int32_pointer(p.out)
    places = int32_pointer(p.places)
    done, start = np.int64(0), np.int64(0)
    for index in range(p.num_words):
        end = ends[index]
        token = np.int64(-1)
        if p.whole_table != 0:
            token = _whole(p, symbols, start, end)
        if token >= 0:
            out[done] = np.int32(token)
            places[done] = np.int32(start)
            done += 1
        elif end - start <= SCAN_SYMBOLS:
            done = _scan(p, symbols, start, end, out, places, done)
        else:
            done = _sort_out(p, symbols, start, end, out, places, done)
        start = end
    return done


@inline
def _lower(code: Any) -> Any:
    """A letter of a contraction in lower case; the long s is one of them."""
    if code >= 65 and code <= 90:
        return code + 32
    return np.int64(115) if code == 383 else code


@inline
def _contraction(codes: Any, start: Any, end: Any, any_case: Any) -> Any:
    """Characters of a contraction at an apostrophe, 0 for none, -1 where that depends on what is beyond the end."""
    if codes[start] != _APOSTROPHE:
        return np.int64(0)
    if start + 1 >= end:
        return np.int64(-1)
    first = np.int64(codes[start + 1])
    if any_case:
        first = _lower(first)
    if first == 115 or first == 116 or first == 109 or first == 100:
        return np.int64(2)
    if first != 114 and first != 118 and first != 108:
        return np.int64(0)
    if start + 2 >= end:
        return np.int64(-1)
    second = np.int64(codes[start + 2])
    if any_case:
        second = _lower(second)
    # 're, 've, 'll
    return np.int64(3) if second == (108 if first == 108 else 101) else np.int64(0)


@inline
def _run(kinds: Any, start: Any, end: Any, kind: Any) -> Any:
    while start < end and load_u8(kinds + start) == kind:
        start += 1
    return start


@inline
def _word_end(p: Any, codes: Any, start: Any, end: Any) -> Any:
    """End of the word that starts here, as if nothing came after `end`."""
    kinds = p.kinds
    kind = np.int64(load_u8(kinds + start))
    if kind == CHARACTER_SYMBOL:
        size = _contraction(codes, start, end, p.any_case)
        if size > 0:
            return start + size
    after = start + 1
    next_kind = np.int64(load_u8(kinds + after)) if after < end else np.int64(0)
    is_blank = codes[start] == _BLANK
    leads = is_blank
    if p.leads_with_symbols:
        leads = kind in (CHARACTER_SYMBOL, CHARACTER_SPACE)
    if kind == CHARACTER_LETTER or (leads and next_kind == CHARACTER_LETTER):
        return _run(kinds, after, end, CHARACTER_LETTER)
    most = p.digits
    if kind == CHARACTER_DIGIT or (most == 0 and is_blank and next_kind == CHARACTER_DIGIT):
        return _run(kinds, after, end if most == 0 else min(end, start + most), CHARACTER_DIGIT)
    if kind == CHARACTER_SYMBOL or (is_blank and next_kind == CHARACTER_SYMBOL):
        place = _run(kinds, after, end, CHARACTER_SYMBOL)
        return _run(kinds, place, end, CHARACTER_NEWLINE) if p.symbol_lines else place
    newline = np.int64(-1)
    place = np.int64(start)
    while place < end:
        found = load_u8(kinds + place)
        if found == CHARACTER_NEWLINE:
            newline = place
        elif found != CHARACTER_SPACE:
            break
        place += 1
    if newline >= 0 and p.lines:
        return newline + 1
    return place if place == end or place == start + 1 else place - 1


@inline
def _sees_end(p: Any, codes: Any, start: Any, stop: Any, end: Any) -> Any:
    """True if more text after `end` could change the word text[start:stop]."""
    kinds = p.kinds
    # A contraction looks two characters beyond its apostrophe, every other rule one beyond the word, white space apart.
    if stop + 2 >= end:
        return True
    kind = load_u8(kinds + start)
    if kind != CHARACTER_SPACE and kind != CHARACTER_NEWLINE:
        return False
    place = stop
    while place < end and (load_u8(kinds + place) == CHARACTER_SPACE or load_u8(kinds + place) == CHARACTER_NEWLINE):
        place += 1
    return place >= end


@entry("q", "q")
def split(parameters: int) -> Any:
    """Write where each word of a text ends; return how many.

    Where more text follows, only words that it cannot change.
    """
    p = SPLIT.load(parameters)
    count = p.count
    codes = carray(int32_pointer(p.codes), count)
    ends = int64_pointer(p.ends)
    kinds = p.kinds
    done, start, limit = np.int64(0), np.int64(0), np.int64(0)
    while start < count:
        if p.digits_first:
            # Digits are cut out first, so to other words a text ends there.
            if start >= limit:
                limit = start
                while limit < count and load_u8(kinds + limit) != CHARACTER_DIGIT:
                    limit += 1
            stop = start + 1 if limit == start else _word_end(p, codes, start, limit)
            is_open = limit == count and limit != start
        else:
            limit = count
            stop = _word_end(p, codes, start, count)
            is_open = True
        if is_open and not p.is_end and _sees_end(p, codes, start, stop, count):
            break
        ends[done] = stop
        done += 1
        start = stop
    return done
