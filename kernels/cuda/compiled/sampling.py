"""Sampling a token from a row of logits: the likeliest, or by top-k, top-p, min-p and the Gumbel race.

The CPU's order and weights (`cpu/sampling.py`), so a step brings four bytes back to the host instead of a row. Filters
keep the head of one order, so only a row's head is sorted out: the maxima of warps give a key that at least as many
tokens reach as are wanted, and those that reach it are listed. In the list every token is compared with every other,
which gives its rank and the weight ahead of it, whatever order it was listed in: whole numbers are summed. A row
without top-k and top-p needs no list, all of it takes part in the race. Longer lists are left to the host,
which draws the same token.

No measurement on a GPU has justified this file yet: what the first run shows to be no gain is to be deleted.
"""

from numba import cuda, float64, int64

from localinfer.kernels.cpu.kernel_abi import NOT_FINITE, NOTHING_LEFT
from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.reductions import beats, block_argmax, block_sum
from localinfer.kernels.cuda.compiled.sampling_weights import score_of, weight_of
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.cuda.sampling import CAPACITY, DRAW_BYTES, STATE_BYTES, UNDECIDED

THREADS = 128
MODE, BEST_TOKEN, BEST, BOUND, COUNT = range(0, STATE_BYTES, 8)
"""Fields of a row's state in which a kernel leaves results for the next one."""
TAKE_BEST, FROM_LIST, FROM_ALL = range(3)
_LOWEST = -(2**31)
_HIGHEST = 2**31 - 1
_NO_TOKEN = 2**30
_WORST = -1e300
"""Lower than every score."""


@inline
def order_key(value):
    """A whole number that grows with a float, from its bits: the highest for NaN and infinity, the lowest for -inf.

    Those of 0.0 and -0.0 are the same.
    """
    bits = ptx.float_bits(value)
    magnitude = bits & 0x7FFFFFFF
    key = magnitude
    if bits > 0x80000000:
        key = -1 - magnitude
    if magnitude >= 0x7F800000:
        key = int64(_HIGHEST)
        if bits == 0xFF800000:
            key = int64(_LOWEST)
    return key


@inline
def best_of_warp(key, token):
    """The largest key of a warp and its token, of equal keys the lowest token."""
    for distance in (16, 8, 4, 2, 1):
        other_key = ptx.shuffle_int(key, distance)
        other_token = ptx.shuffle_int(token, distance)
        if beats(other_key, other_token, key, token):
            key = other_key
            token = other_token
    return key, token


@inline
def token_or_code(key, token):
    """A row's best token, or where its key says that there is none, NOT_FINITE or NOTHING_LEFT, below zero."""
    if key == _HIGHEST:
        token = int64(NOT_FINITE)
    elif key == _LOWEST:
        token = int64(NOTHING_LEFT)
    return token


@template()
def best_of_warps(slices):
    """The best key and token of every warp's share of a row, int64[rows][4 * slices][2], of [slices, rows].

    Tokens are dealt out in turn, so that those which are often likely, the lowest, are spread over all warps. A warp
    without any leaves the lowest key.
    """
    step = THREADS * slices

    def kernel(logits, stride, vocab_size, bests):
        token = ptx.block_x() * THREADS + ptx.thread()
        key = int64(_LOWEST)
        best = int64(_HIGHEST)
        while token < vocab_size:
            other = order_key(ptx.load_f32(logits + ptx.block_y() * stride + 4 * token))
            if other > key:
                key = other
                best = token
            token = token + step
        key, best = best_of_warp(key, best)
        if ptx.thread() % 32 == 0:
            place = bests + ((ptx.block_y() * slices + ptx.block_x()) * 4 + ptx.thread() // 32) * 16
            ptx.store_i64(place, key)
            ptx.store_i64(place + 8, best)

    return kernel


@template()
def best_of_row(slices):
    """The best token of every row, int32[rows], or NOT_FINITE or NOTHING_LEFT, of [1, rows]; 32 threads."""
    warps = 4 * slices

    def kernel(bests, chosen):
        key = int64(_LOWEST)
        token = int64(_HIGHEST)
        index = ptx.thread()
        while index < warps:
            place = bests + (ptx.block_y() * warps + index) * 16
            other_key = ptx.load_i64(place)
            other_token = ptx.load_i64(place + 8)
            if beats(other_key, other_token, key, token):
                key = other_key
                token = other_token
            index = index + 32
        key, token = best_of_warp(key, token)
        if ptx.thread() == 0:
            ptx.store_u32(chosen + 4 * ptx.block_y(), token_or_code(key, token))

    return kernel


@inline
def draw_of(draws):
    """Draw parameters of this block's row: the fields of `kernels.cuda.sampling.DRAW` in order."""
    draw = draws + ptx.block_y() * DRAW_BYTES
    inverse_temperature, top_p = ptx.load_f64(draw), ptx.load_f64(draw + 8)
    top_k, least_weight = ptx.load_i64(draw + 16), ptx.load_i64(draw + 24)
    return inverse_temperature, top_p, top_k, least_weight, ptx.load_i64(draw + 32), ptx.load_i64(draw + 40)


@inline
def scaled(row, token, best, inverse_temperature):
    """A token's logit relative to its row's best, over the temperature, in float64."""
    return ptx.multiply_f64(ptx.widen(ptx.load_f32(row + 4 * token)) - best, inverse_temperature)


@template()
def find_heads(slices):
    """Draw parameters of each row, and the key that its list begins at, of [1, rows]; a thread to each warp's maximum.

    bests: of `best_of_warps`. draws: of `draw_of`. states: STATE_BYTES to a row, written here.
    """
    warps = 4 * slices

    def kernel(bests, logits, stride, draws, states):
        keys = cuda.shared.array(warps, int64)
        tokens = cuda.shared.array(warps, int64)
        state = states + ptx.block_y() * STATE_BYTES
        thread = ptx.thread()
        place = bests + (ptx.block_y() * warps + thread) * 16
        own_key = ptx.load_i64(place)
        own_token = ptx.load_i64(place + 8)
        if own_key == _LOWEST:
            own_token = _NO_TOKEN + thread
        keys[thread] = own_key
        tokens[thread] = own_token
        ptx.syncthreads()
        rank = int64(0)
        other = int64(0)
        while other < warps:
            if beats(keys[other], tokens[other], own_key, own_token):
                rank = rank + 1
            other = other + 1
        inverse_temperature, top_p, top_k, _, _, _ = draw_of(draws)
        if rank == 0:
            best = token_or_code(own_key, own_token)
            mode = int64(FROM_LIST)
            if best < 0 or inverse_temperature == float64(0.0):
                mode = int64(TAKE_BEST)
            else:
                if top_k == 0 and top_p == float64(1.0):
                    mode = int64(FROM_ALL)
                logit = ptx.load_f32(logits + ptx.block_y() * stride + 4 * best)
                ptx.store_i64(state + BEST, ptx.f64_bits(ptx.widen(logit)))
            ptx.store_i64(state + MODE, mode)
            ptx.store_i64(state + BEST_TOKEN, best)
            ptx.store_i64(state + COUNT, 0)
        wanted = top_k
        if top_k == 0:
            wanted = int64(warps - warps // 4)
        if rank == min(wanted, warps) - 1:
            bound = max(own_key, _LOWEST + 1)
            if wanted > warps:
                bound = int64(_LOWEST + 1)
            ptx.store_i64(state + BOUND, bound)

    return kernel


@template()
def gather(slices):
    """List what reaches a row's bound, and sum or race the rest of the row, of [slices, rows].

    lists: int64[rows][CAPACITY][2], keys and tokens. parts: int64[rows][slices][2], the weight of a slice's tokens, or
    the score (as bits) and token of its winner.
    """
    step = THREADS * slices

    def kernel(logits, stride, vocab_size, draws, states, lists, parts):
        scores = cuda.shared.array(THREADS, float64)
        tokens = cuda.shared.array(THREADS, int64)
        state = states + ptx.block_y() * STATE_BYTES
        row = logits + ptx.block_y() * stride
        mode = ptx.load_i64(state + MODE)
        if mode != TAKE_BEST:
            bound = ptx.load_i64(state + BOUND)
            best = ptx.load_f64(state + BEST)
            inverse_temperature, _, top_k, least_weight, seed, position = draw_of(draws)
            mass = int64(0)
            winning_score = float64(_WORST)
            winner = int64(_HIGHEST)
            token = ptx.block_x() * THREADS + ptx.thread()
            while token < vocab_size:
                key = order_key(ptx.load_f32(row + 4 * token))
                if key > _LOWEST and (mode == FROM_ALL or top_k == 0):
                    x = scaled(row, token, best, inverse_temperature)
                    weight = weight_of(x)
                    mass = mass + weight
                    if mode == FROM_ALL and weight >= least_weight:
                        score = score_of(x, token, seed, position)
                        if score > winning_score:
                            winning_score = score
                            winner = token
                if mode == FROM_LIST and key >= bound:
                    index = ptx.add_u32(state + COUNT, 1)
                    if index < CAPACITY:
                        place = lists + (ptx.block_y() * CAPACITY + index) * 16
                        ptx.store_i64(place, key)
                        ptx.store_i64(place + 8, token)
                token = token + step
            part = parts + (ptx.block_y() * slices + ptx.block_x()) * 16
            if mode == FROM_ALL:
                winning_score, winner = block_argmax(winning_score, winner, scores, tokens)
                if ptx.thread() == 0:
                    ptx.store_i64(part, ptx.f64_bits(winning_score))
                    ptx.store_i64(part + 8, winner)
            else:
                mass = block_sum(mass, tokens)
                if ptx.thread() == 0:
                    ptx.store_i64(part, mass)

    return kernel


@template()
def choose(slices):
    """Choose the token of every row, int32[rows], or UNDECIDED, NOT_FINITE or NOTHING_LEFT, of [1, rows]."""

    def kernel(logits, stride, draws, states, lists, parts, chosen):
        scores = cuda.shared.array(THREADS, float64)
        sums = cuda.shared.array(THREADS, int64)
        keys = cuda.shared.array(CAPACITY, int64)
        tokens = cuda.shared.array(CAPACITY, int64)
        weights = cuda.shared.array(CAPACITY, int64)
        ahead = cuda.shared.array(CAPACITY, int64)
        state = states + ptx.block_y() * STATE_BYTES
        row = logits + ptx.block_y() * stride
        mode = ptx.load_i64(state + MODE)
        count = ptx.load_i64(state + COUNT) & 0xFFFFFFFF
        token = ptx.load_i64(state + BEST_TOKEN)
        part = parts + (ptx.block_y() * slices + ptx.thread()) * 16
        if mode == FROM_ALL:
            score = float64(_WORST)
            token = int64(_HIGHEST)
            if ptx.thread() < slices:
                score = ptx.bits_f64(ptx.load_i64(part))
                token = ptx.load_i64(part + 8)
            score, token = block_argmax(score, token, scores, sums)
        elif mode == FROM_LIST and count > CAPACITY:
            token = int64(UNDECIDED)
        elif mode == FROM_LIST:
            best = ptx.load_f64(state + BEST)
            inverse_temperature, top_p, top_k, least_weight, seed, position = draw_of(draws)
            index = ptx.thread()
            while index < count:
                place = lists + (ptx.block_y() * CAPACITY + index) * 16
                own = ptx.load_i64(place + 8)
                keys[index] = ptx.load_i64(place)
                tokens[index] = own
                weights[index] = weight_of(scaled(row, own, best, inverse_temperature))
                index = index + THREADS
            ptx.syncthreads()
            kept_mass = int64(0)
            index = ptx.thread()
            while index < count:
                rank = int64(0)
                mass = int64(0)
                other = int64(0)
                while other < count:
                    if beats(keys[other], tokens[other], keys[index], tokens[index]):
                        rank = rank + 1
                        mass = mass + weights[other]
                    other = other + 1
                if top_k == 0 or rank < top_k:
                    kept_mass = kept_mass + weights[index]
                else:
                    mass = int64(-1)
                ahead[index] = mass
                index = index + THREADS
            kept_mass = block_sum(kept_mass, sums)
            total = kept_mass
            if top_k == 0:
                mass = int64(0)
                if ptx.thread() < slices:
                    mass = ptx.load_i64(part)
                total = block_sum(mass, sums)
            target = total + 1
            if top_p < float64(1.0):
                target = ptx.to_i64(ptx.ceil_f64(ptx.multiply_f64(top_p, ptx.to_f64(total))))
                target = max(int64(1), min(total, target))
            winning_score = float64(_WORST)
            winner = int64(_HIGHEST)
            index = ptx.thread()
            while index < count:
                if ahead[index] >= 0 and ahead[index] < target and weights[index] >= least_weight:
                    own = tokens[index]
                    score = score_of(scaled(row, own, best, inverse_temperature), own, seed, position)
                    if beats(score, own, winning_score, winner):
                        winning_score = score
                        winner = own
                index = index + THREADS
            ptx.syncthreads()
            winning_score, token = block_argmax(winning_score, winner, scores, sums)
            if top_k == 0 and kept_mass < target:
                token = int64(UNDECIDED)
        if ptx.thread() == 0:
            ptx.store_u32(chosen + 4 * ptx.block_y(), token)

    return kernel
