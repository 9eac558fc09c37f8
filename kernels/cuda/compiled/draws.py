"""Drawing a token from a row of logits: top-k, top-p, min-p and the race, as `cpu/sampling.py` defines them.

Filters keep the head of one order, so only a row's head is looked at: the maxima of warps give a key that at least so
many tokens reach as are wanted, and those that reach it are listed. In the list every token is compared with every
other, which gives its rank and the weight ahead of it, whatever order it was listed in: whole numbers are summed. A row
without top-k and top-p needs no list, all of it takes part in the race.

What does not fit the list is left to the host, which draws the same token.
"""

from numba import cuda, float64, int64

from localinfer.kernels.cpu.kernel_abi import NOT_FINITE, NOTHING_LEFT
from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.chances import score_of, weight_of
from localinfer.kernels.cuda.compiled.sampling import order_key
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.cuda.sampling import (
    BEST,
    BEST_TOKEN,
    BOUND,
    CAPACITY,
    COUNT,
    DRAW_WORDS,
    INVERSE_TEMPERATURE,
    LEAST_WEIGHT,
    MODE,
    POSITION,
    SEED,
    STATE_WORDS,
    TOP_K,
    TOP_P,
    UNDECIDED,
)  # fmt: skip

THREADS = 128
TAKE_BEST, FROM_LIST, FROM_ALL = range(3)
_LOWEST = -(2**31)
_HIGHEST = 2**31 - 1
_NO_TOKEN = 2**30
_WORST = -1e300
"""A score that every other beats."""


@template("qqqqq")
def find_heads(slices):
    """How each row is drawn, and the key that its list begins at, of [1, rows]; a thread to each warp's maximum.

    bests: of `best_of_warps`. draws: int64[rows][DRAW_WORDS]. states: int64[rows][STATE_WORDS], written here.
    """
    warps = 4 * slices

    def kernel(bests, logits, stride, draws, states):
        keys = cuda.shared.array(warps, int64)
        tokens = cuda.shared.array(warps, int64)
        draw = draws + ptx.block_y() * 8 * DRAW_WORDS
        state = states + ptx.block_y() * 8 * STATE_WORDS
        own_key = ptx.load_i64(bests + (ptx.block_y() * warps + ptx.thread()) * 16)
        own_token = ptx.load_i64(bests + (ptx.block_y() * warps + ptx.thread()) * 16 + 8)
        if own_key == _LOWEST:
            own_token = _NO_TOKEN + ptx.thread()
        keys[ptx.thread()] = own_key
        tokens[ptx.thread()] = own_token
        ptx.meet()
        rank = int64(0)
        other = int64(0)
        while other < warps:
            if keys[other] > own_key or (keys[other] == own_key and tokens[other] < own_token):
                rank = rank + 1
            other = other + 1
        top_k = ptx.load_i64(draw + 8 * TOP_K)
        top_p = ptx.load_f64(draw + 8 * TOP_P)
        if rank == 0:
            mode = int64(FROM_LIST)
            best = own_token
            if own_key == _HIGHEST:
                mode = int64(TAKE_BEST)
                best = int64(NOT_FINITE)
            elif own_key == _LOWEST:
                mode = int64(TAKE_BEST)
                best = int64(NOTHING_LEFT)
            elif ptx.load_f64(draw + 8 * INVERSE_TEMPERATURE) == float64(0.0):
                mode = int64(TAKE_BEST)
            elif top_k == 0 and top_p == float64(1.0):
                mode = int64(FROM_ALL)
            if mode != TAKE_BEST:
                ptx.store_i64(
                    state + 8 * BEST, ptx.f64_bits(ptx.widen(ptx.load_f32(logits + ptx.block_y() * stride + 4 * best)))
                )
            ptx.store_i64(state + 8 * MODE, mode)
            ptx.store_i64(state + 8 * BEST_TOKEN, best)
            ptx.store_i64(state + 8 * COUNT, 0)
        wanted = top_k
        if top_k == 0:
            wanted = int64(warps - warps // 4)
        if rank == min(wanted, warps) - 1:
            bound = max(own_key, _LOWEST + 1)
            if wanted > warps:
                bound = int64(_LOWEST + 1)
            ptx.store_i64(state + 8 * BOUND, bound)

    return kernel


@inline
def race(score, token, scores, tokens):
    """The largest score of a block of THREADS and its token, of equal scores the lowest token, for every thread."""
    scores[ptx.thread()] = score
    tokens[ptx.thread()] = token
    ptx.meet()
    for distance in (64, 32, 16, 8, 4, 2, 1):
        if ptx.thread() < distance:
            other_score = scores[ptx.thread() + distance]
            other_token = tokens[ptx.thread() + distance]
            if other_score > scores[ptx.thread()] or (
                other_score == scores[ptx.thread()] and other_token < tokens[ptx.thread()]
            ):
                scores[ptx.thread()] = other_score
                tokens[ptx.thread()] = other_token
        ptx.meet()
    return scores[0], tokens[0]


@inline
def total_of(value, values):
    """The sum of whole numbers over a block of THREADS, for every thread."""
    ptx.meet()
    values[ptx.thread()] = value
    ptx.meet()
    for distance in (64, 32, 16, 8, 4, 2, 1):
        if ptx.thread() < distance:
            values[ptx.thread()] = values[ptx.thread()] + values[ptx.thread() + distance]
        ptx.meet()
    return values[0]


@template("qqqqqqq")
def gather(slices):
    """List what reaches a row's bound, and sum or race the rest of the row, of [slices, rows].

    lists: int64[rows][CAPACITY][2], keys and tokens. parts: int64[rows][slices][2], the weight of a slice's tokens, or
    the score (as bits) and token of its winner.
    """
    step = THREADS * slices

    def kernel(logits, stride, vocab_size, draws, states, lists, parts):
        scores = cuda.shared.array(THREADS, float64)
        tokens = cuda.shared.array(THREADS, int64)
        draw = draws + ptx.block_y() * 8 * DRAW_WORDS
        state = states + ptx.block_y() * 8 * STATE_WORDS
        mode = ptx.load_i64(state + 8 * MODE)
        if mode != TAKE_BEST:
            bound = ptx.load_i64(state + 8 * BOUND)
            best = ptx.load_f64(state + 8 * BEST)
            top_k = ptx.load_i64(draw + 8 * TOP_K)
            least = ptx.load_i64(draw + 8 * LEAST_WEIGHT)
            seed = ptx.load_i64(draw + 8 * SEED)
            position = ptx.load_i64(draw + 8 * POSITION)
            inverse_temperature = ptx.load_f64(draw + 8 * INVERSE_TEMPERATURE)
            mass = int64(0)
            winning_score = float64(_WORST)
            winner = int64(_HIGHEST)
            token = ptx.block_x() * THREADS + ptx.thread()
            while token < vocab_size:
                logit = ptx.load_f32(logits + ptx.block_y() * stride + 4 * token)
                key = order_key(logit)
                if key > _LOWEST and (mode == FROM_ALL or top_k == 0):
                    x = ptx.multiply_f64(ptx.widen(logit) - best, inverse_temperature)
                    weight = weight_of(x)
                    mass = mass + weight
                    if mode == FROM_ALL and weight >= least:
                        score = score_of(x, token, seed, position)
                        if score > winning_score:
                            winning_score = score
                            winner = token
                if mode == FROM_LIST and key >= bound:
                    index = ptx.add_u32(state + 8 * COUNT, 1)
                    if index < CAPACITY:
                        place = lists + (ptx.block_y() * CAPACITY + index) * 16
                        ptx.store_i64(place, key)
                        ptx.store_i64(place + 8, token)
                token = token + step
            part = parts + (ptx.block_y() * slices + ptx.block_x()) * 16
            if mode == FROM_ALL:
                winning_score, winner = race(winning_score, winner, scores, tokens)
                if ptx.thread() == 0:
                    ptx.store_i64(part, ptx.f64_bits(winning_score))
                    ptx.store_i64(part + 8, winner)
            else:
                mass = total_of(mass, tokens)
                if ptx.thread() == 0:
                    ptx.store_i64(part, mass)

    return kernel


@template("qqqqqqq")
def choose(slices):
    """Choose the token of every row, int32[rows], or UNDECIDED, NOT_FINITE or NOTHING_LEFT, of [1, rows]."""

    def kernel(logits, stride, draws, states, lists, parts, chosen):
        scores = cuda.shared.array(THREADS, float64)
        sums = cuda.shared.array(THREADS, int64)
        keys = cuda.shared.array(CAPACITY, int64)
        tokens = cuda.shared.array(CAPACITY, int64)
        weights = cuda.shared.array(CAPACITY, int64)
        ahead = cuda.shared.array(CAPACITY, int64)
        draw = draws + ptx.block_y() * 8 * DRAW_WORDS
        state = states + ptx.block_y() * 8 * STATE_WORDS
        mode = ptx.load_i64(state + 8 * MODE)
        count = ptx.load_i64(state + 8 * COUNT) & 0xFFFFFFFF
        token = ptx.load_i64(state + 8 * BEST_TOKEN)
        part = parts + ptx.block_y() * slices * 16
        if mode == FROM_ALL:
            score = float64(_WORST)
            token = int64(_HIGHEST)
            if ptx.thread() < slices:
                score = ptx.bits_f64(ptx.load_i64(part + 16 * ptx.thread()))
                token = ptx.load_i64(part + 16 * ptx.thread() + 8)
            score, token = race(score, token, scores, sums)
        elif mode == FROM_LIST and count > CAPACITY:
            token = int64(UNDECIDED)
        elif mode == FROM_LIST:
            best = ptx.load_f64(state + 8 * BEST)
            inverse_temperature = ptx.load_f64(draw + 8 * INVERSE_TEMPERATURE)
            seed = ptx.load_i64(draw + 8 * SEED)
            position = ptx.load_i64(draw + 8 * POSITION)
            top_k = ptx.load_i64(draw + 8 * TOP_K)
            top_p = ptx.load_f64(draw + 8 * TOP_P)
            least = ptx.load_i64(draw + 8 * LEAST_WEIGHT)
            index = ptx.thread()
            while index < count:
                place = lists + (ptx.block_y() * CAPACITY + index) * 16
                keys[index] = ptx.load_i64(place)
                own = ptx.load_i64(place + 8)
                tokens[index] = own
                logit = ptx.widen(ptx.load_f32(logits + ptx.block_y() * stride + 4 * own))
                weights[index] = weight_of(ptx.multiply_f64(logit - best, inverse_temperature))
                index = index + THREADS
            ptx.meet()
            kept_mass = int64(0)
            index = ptx.thread()
            while index < count:
                rank = int64(0)
                mass = int64(0)
                other = int64(0)
                while other < count:
                    if keys[other] > keys[index] or (keys[other] == keys[index] and tokens[other] < tokens[index]):
                        rank = rank + 1
                        mass = mass + weights[other]
                    other = other + 1
                if top_k == 0 or rank < top_k:
                    kept_mass = kept_mass + weights[index]
                else:
                    mass = int64(-1)
                ahead[index] = mass
                index = index + THREADS
            kept_mass = total_of(kept_mass, sums)
            total = kept_mass
            if top_k == 0:
                mass = int64(0)
                if ptx.thread() < slices:
                    mass = ptx.load_i64(part + 16 * ptx.thread())
                total = total_of(mass, sums)
            target = total + 1
            if top_p < float64(1.0):
                target = ptx.to_i64(ptx.ceil_f64(ptx.multiply_f64(top_p, ptx.to_f64(total))))
                target = max(int64(1), min(total, target))
            winning_score = float64(_WORST)
            winner = int64(_HIGHEST)
            index = ptx.thread()
            while index < count:
                if ahead[index] >= 0 and ahead[index] < target and weights[index] >= least:
                    own = tokens[index]
                    logit = ptx.widen(ptx.load_f32(logits + ptx.block_y() * stride + 4 * own))
                    score = score_of(ptx.multiply_f64(logit - best, inverse_temperature), own, seed, position)
                    if score > winning_score:
                        winning_score = score
                        winner = own
                    elif score == winning_score:
                        winner = min(winner, own)
                index = index + THREADS
            ptx.meet()
            winning_score, token = race(winning_score, winner, scores, sums)
            if top_k == 0 and kept_mass < target:
                token = int64(UNDECIDED)
        if ptx.thread() == 0:
            ptx.store_u32(chosen + 4 * ptx.block_y(), token)

    return kernel
