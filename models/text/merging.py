"""Pairwise merging, the loop that SentencePiece (by score) and BPE (by rank) share."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

# Scanning a short list for its lowest rank beats keeping a heap up to about this many symbols.
_SCAN_LIMIT = 32
_NEVER = 1 << 62


def merge_by_rank(symbols: list[str], ranks: Mapping[str, int], separator: str) -> list[str]:
    """Merge neighbours, lowest rank first and leftmost among equals, until no pair has a rank.

    A pair's rank is looked up as `left + separator + right`. Ranks lie in 0 .. 2**31 - 1.
    Time grows as n log n with the number of symbols; `symbols` may be changed.
    """
    if len(symbols) <= _SCAN_LIMIT:
        return _merge_by_scanning(symbols, ranks, separator)
    return _merge_by_heap(symbols, ranks, separator)


def _merge_by_scanning(symbols: list[str], ranks: Mapping[str, int], separator: str) -> list[str]:
    pair_ranks = [
        ranks.get(left + separator + right, _NEVER) for left, right in zip(symbols, symbols[1:], strict=False)
    ]
    while pair_ranks:
        lowest = min(pair_ranks)
        if lowest == _NEVER:
            break
        index = pair_ranks.index(lowest)
        merged = symbols[index] + symbols[index + 1]
        symbols[index : index + 2] = [merged]
        del pair_ranks[index]
        if index:
            pair_ranks[index - 1] = ranks.get(symbols[index - 1] + separator + merged, _NEVER)
        if index < len(pair_ranks):
            pair_ranks[index] = ranks.get(merged + separator + symbols[index + 1], _NEVER)
    return symbols


def _merge_by_heap(symbols: list[str], ranks: Mapping[str, int], separator: str) -> list[str]:
    count = len(symbols)
    following = [*range(1, count), -1]
    preceding = list(range(-1, count - 1))
    # pair_ranks[i] is the rank of the pair that starts at symbol i now; a heap entry that says
    # otherwise is out of date. An entry is rank * count + i, one integer, which compares fastest.
    pair_ranks = [
        ranks.get(left + separator + right, _NEVER) for left, right in zip(symbols, symbols[1:], strict=False)
    ]
    pair_ranks.append(_NEVER)
    heap = [rank * count + index for index, rank in enumerate(pair_ranks) if rank != _NEVER]
    heapify(heap)
    while heap:
        rank, left = divmod(heappop(heap), count)
        if pair_ranks[left] != rank:
            continue
        right = following[left]
        merged = symbols[left] + symbols[right]
        symbols[left] = merged
        symbols[right] = ""
        pair_ranks[right] = _NEVER
        after = following[left] = following[right]
        pair_ranks[left] = _NEVER
        if after >= 0:
            preceding[after] = left
            rank = ranks.get(merged + separator + symbols[after], _NEVER)
            if rank != _NEVER:
                pair_ranks[left] = rank
                heappush(heap, rank * count + left)
        before = preceding[left]
        if before >= 0:
            rank = ranks.get(symbols[before] + separator + merged, _NEVER)
            pair_ranks[before] = rank
            if rank != _NEVER:
                heappush(heap, rank * count + before)
    return [symbol for symbol in symbols if symbol]
