"""Vector code as LLVM IR, sixteen lanes at a time with the same bits on every instruction set; intrinsics made of it.

An `Emitter` wraps the IR builder that Numba hands to an intrinsic. Sixteen-lane values are the currency of every
kernel: one AVX-512 register, two AVX2 registers, four NEON registers; LLVM splits them where the CPU is narrower. Only
the integer dot products differ by instruction set, and those are exact sums, so every path agrees bit for bit.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from localinfer.kernels.cpu import guard
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.host import is_arm64
from localinfer.kernels.jit.isa import ISA, NEON

LANES = 16

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
F64 = ir.DoubleType()

Value = Any

_UNMAPPED = 64
"""An address in a page that no process has, and a multiple of every alignment that is asked for."""


@functools.cache
def vector(element: Any, lanes: int = LANES) -> Any:
    """The IR type of `lanes` elements."""
    return ir.VectorType(element, lanes)


@functools.cache
def _constants(element: Any, values: tuple[float, ...], _text: str) -> Value:
    """A vector of constants, whose IR is written once for all kernels; the text tells 0.0 and -0.0 apart."""
    return ir.Constant(vector(element, len(values)), list(values))


def _target_features(context: Any) -> frozenset[str]:
    return _features_of(context.codegen().magic_tuple()[2])


@functools.cache
def _features_of(flags: str) -> frozenset[str]:
    return frozenset(name[1:] for name in flags.split(",") if name.startswith("+"))


def target_isa(context: Any) -> ISA:
    """The selected instruction set, or the best below it that the compile target has.

    Checked for every intrinsic: LLVM aborts the process on an instruction that its target lacks.
    """
    features, paths = _target_features(context), list(ISA)
    return next(path for path in paths[paths.index(isa.SELECTED) :] if isa.runs_on(path, features))


def _converts_halves(context: Any) -> bool:
    """True if the target converts float16 itself; elsewhere LLVM calls a function that no process is sure to have."""
    return is_arm64(context.codegen().magic_tuple()[0]) or "f16c" in _target_features(context)


@dataclass(frozen=True)
class PairSums:
    """A dot product in the making with AVX2."""

    total: Value
    """int32 that is there already."""
    words: list[Value]
    """Registers of sixteen int16, two to a lane of the total: sums of products that it lacks."""
    bound: int
    """Largest magnitude that a word may have."""


class Emitter:
    """IR building blocks over sixteen-lane vectors; every method returns an IR value."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.builder = builder
        self.triple: str = context.codegen().magic_tuple()[0]
        self.is_arm64 = is_arm64(self.triple)
        path = target_isa(context)
        self.has_matrices = path is ISA.AMX
        """Matrices of bytes can be multiplied by one instruction (AMX)."""
        self.isa = ISA.AVX512_VNNI if self.has_matrices else path
        self.is_neon = self.isa in NEON
        self._converts_halves = _converts_halves(context)
        self.has_byte_permutes = self.isa is ISA.AVX512_VNNI and "avx512vbmi" in _target_features(context)
        """Bytes can be shuffled and shifted across a whole vector of 64 (AVX-512 VBMI)."""

    # Constants and conversions

    def i32(self, value: int) -> Value:
        return ir.Constant(I32, value)

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def splat_constant(self, element: Any, value: float, lanes: int = LANES) -> Value:
        return self.constants(element, [value] * lanes)

    def zeros(self, element: Any, lanes: int = LANES) -> Value:
        return ir.Constant(vector(element, lanes), None)

    def splat(self, value: Value, lanes: int = LANES) -> Value:
        """Broadcast a scalar; from memory this folds into the consumer's broadcast operand."""
        kind = vector(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, self.i32(0))
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), self.splat_constant(I32, 0, lanes))

    def bitcast(self, value: Value, kind: Any) -> Value:
        return self.builder.bitcast(value, kind)

    def to_float(self, value: Value) -> Value:
        """int32 lanes to float32, rounding to nearest even."""
        return self.builder.sitofp(value, vector(F32, value.type.count))

    def half_to_float(self, bits: Value) -> Value:
        """The float32 of float16 bits, an i16 or a vector of them."""
        builder, is_vector = self.builder, isinstance(bits.type, ir.VectorType)
        half, wide, single = (vector(kind, bits.type.count) if is_vector else kind for kind in (F16, I32, F32))
        if self._converts_halves:
            return builder.fpext(builder.bitcast(bits, half), single)
        word = builder.zext(bits, wide)
        sign = builder.shl(builder.and_(word, self._constant(wide, 0x8000)), self._constant(wide, 16))
        # Shifted to float32's bits, the exponent is 112 short; a product corrects it, for subnormal numbers too.
        magnitude = builder.shl(builder.and_(word, self._constant(wide, 0x7FFF)), self._constant(wide, 13))
        scaled = builder.fmul(builder.bitcast(magnitude, single), self._constant(single, 2.0**112))
        finite = builder.bitcast(scaled, wide)
        is_finite = builder.icmp_unsigned("<", magnitude, self._constant(wide, 0x7C00 << 13))
        special = builder.or_(magnitude, self._constant(wide, 0x7F800000))
        return builder.bitcast(builder.or_(builder.select(is_finite, finite, special), sign), single)

    def float_to_half(self, value: Value) -> Value:
        """Float16 bits (i16) of a float32 or a vector of them, rounded to nearest even."""
        builder, is_vector = self.builder, isinstance(value.type, ir.VectorType)
        half, word_type, single, bits = (
            vector(kind, value.type.count) if is_vector else kind for kind in (F16, I32, F32, I16)
        )
        if self._converts_halves:
            return builder.bitcast(builder.fptrunc(value, half), bits)

        def constant(number: int) -> Value:
            return self._constant(word_type, number)

        word = builder.bitcast(value, word_type)
        magnitude = builder.and_(word, constant(0x7FFFFFFF))
        # Normal numbers: move the exponent, round at bit 13. What lies under 2**-14 is rounded by adding 0.5, whose
        # last bit is float16's smallest number. Too large becomes infinite.
        odd = builder.and_(builder.lshr(magnitude, constant(13)), constant(1))
        moved = builder.add(builder.add(magnitude, odd), constant(0xFFF - (112 << 23)))
        normal = builder.lshr(moved, constant(13))
        offset = self._constant(single, 0.5)
        added = builder.bitcast(builder.fadd(builder.bitcast(magnitude, single), offset), word_type)
        small = builder.sub(added, builder.bitcast(offset, word_type))
        result = builder.select(builder.icmp_unsigned("<", magnitude, constant(113 << 23)), small, normal)
        is_large = builder.icmp_unsigned(">=", magnitude, constant(0x477FF000))
        result = builder.select(is_large, constant(0x7C00), result)
        is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
        result = builder.select(is_nan, constant(0x7E00), result)
        sign = builder.and_(builder.lshr(word, constant(16)), constant(0x8000))
        return builder.trunc(builder.or_(result, sign), bits)

    def _constant(self, kind: Any, value: float) -> Value:
        if isinstance(kind, ir.VectorType):
            return self.splat_constant(kind.element, value, kind.count)
        return ir.Constant(kind, value)

    def opaque(self, value: Value, beside: Value, number: int = 0) -> Value:
        """An integer of which LLVM does not know that it is `value`, made anew for each `number` and value `beside` it.

        What is read from an opaque address is read again, instead of being held in registers that are needed.
        """
        kind = ir.FunctionType(value.type, [value.type, beside.type, I32])
        same = self.builder.asm(kind, "", "=r,0,r,i", [value, beside, self.i32(number)], False)
        same.attributes.add("readnone")
        same.attributes.add("nounwind")
        return same

    def ordered(self, total: Any, address: Value) -> tuple[Any, Value]:
        """A sum, and an address that LLVM knows only when the sum is there, by no instruction; with AVX2."""
        chain = isinstance(total, PairSums)
        registers = total.words if chain else [self.lanes(total, start, 8) for start in range(0, total.type.count, 8)]
        known = []
        for register in registers:
            register, address = self._known_with(register, address)
            known.append(register)
        return (PairSums(total.total, known, total.bound) if chain else self.join(known)), address

    def _known_with(self, register: Value, address: Value) -> tuple[Value, Value]:
        both = ir.LiteralStructType([register.type, address.type])
        kind = ir.FunctionType(both, [register.type, address.type])
        found = self.builder.asm(kind, "", "=x,=r,0,1", [register, address], False)
        found.attributes.add("readnone")
        found.attributes.add("nounwind")
        return self.builder.extract_value(found, 0), self.builder.extract_value(found, 1)

    def barrier(self) -> None:
        """No instruction, which LLVM moves no load past: what is loaded earlier would need more registers."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), []), "", "", [], True)

    # Memory: addresses are i64 values

    def pointer(self, address: Value, offset: int = 0, align: int = 1) -> Value:
        """A pointer for an access that LLVM may take to be aligned; in guard mode one that faults where it is not.

        A wrong promise is an error on some processors only: where LLVM chooses an instruction that needs it kept.
        """
        builder = self.builder
        if offset:
            address = builder.add(address, self.i64(offset))
        if guard.IS_ON and align > 1:
            is_aligned = builder.icmp_unsigned("==", builder.and_(address, self.i64(align - 1)), self.i64(0))
            address = builder.select(is_aligned, address, self.i64(_UNMAPPED))
        return builder.inttoptr(address, ir.PointerType())

    def load(self, address: Value, kind: Any, offset: int = 0, align: int = 1) -> Value:
        return self.builder.load(self.pointer(address, offset, align), align=align, typ=kind)

    def store(self, value: Value, address: Value, offset: int = 0, align: int = 1) -> None:
        self.builder.store(value, self.pointer(address, offset, align), align=align)

    def stored(self, value: Value) -> Value:
        """Address of a copy of a vector on the stack, of which LLVM knows nothing, so that it loads the parts."""
        builder = self.builder
        with builder.goto_entry_block():
            place = builder.alloca(value.type)
        place.align = 16
        builder.store(value, place, align=16)
        kind = ir.FunctionType(I64, [I64])
        return builder.asm(kind, "", "=r,0,~{memory}", [builder.ptrtoint(place, I64)], True)

    def store_past_caches(self, value: Value, address: Value, offset: int = 0) -> None:
        """Store sixteen float32 at a multiple of 64 without reading what the line held into the caches first."""
        stored = self.builder.store(value, self.pointer(address, offset, 64), align=64)
        stored.set_metadata("nontemporal", self.builder.module.add_metadata([self.i32(1)]))

    def load_floats(self, address: Value, offset: int = 0, element: Any = F32, lanes: int = LANES) -> Value:
        """Sixteen (or `lanes`) float32, float16 or bfloat16 (element I16) values as float32."""
        if element is F32:
            return self.load(address, vector(F32, lanes), offset, align=4)
        if element is F16:
            return self.half_to_float(self.load(address, vector(I16, lanes), offset, align=2))
        raw = self.load(address, vector(I16, lanes), offset, align=2)
        wide = self.builder.shl(self.builder.zext(raw, vector(I32, lanes)), self.splat_constant(I32, 16, lanes))
        return self.bitcast(wide, vector(F32, lanes))

    def store_first(self, value: Value, address: Value, count: Value) -> None:
        """Store the first `count` (i64; none of fewer than one) lanes of float32."""
        width = value.type.count
        lanes = self.constants(I64, range(width))
        mask = self.builder.icmp_signed("<", lanes, self.splat(count, width))
        kind = ir.FunctionType(ir.VoidType(), [value.type, ir.PointerType(), I32, vector(I1, width)])
        function = self.declare(f"llvm.masked.store.v{width}f32.p0", kind)
        self.builder.call(function, [value, self.pointer(address), self.i32(4), mask])

    def load_first(self, address: Value, count: Value) -> Value:
        """The first `count` (i64, 0..16) of sixteen float32, and zeros; reads nothing after them."""
        builder = self.builder
        lanes = self.constants(I64, range(LANES))
        is_whole = builder.icmp_signed(">=", count, self.i64(LANES))
        with builder.if_else(is_whole) as (whole, part):
            with whole:
                all_lanes, whole_block = self.load_floats(address), builder.block
            with part:
                mask = builder.icmp_signed("<", lanes, self.splat(count))
                kind = ir.FunctionType(vector(F32), [ir.PointerType(), I32, vector(I1), vector(F32)])
                function = self.declare("llvm.masked.load.v16f32.p0", kind)
                arguments = [self.pointer(address), self.i32(4), mask, self.zeros(F32)]
                first_lanes, part_block = builder.call(function, arguments), builder.block
        value = builder.phi(vector(F32))
        value.add_incoming(all_lanes, whole_block)
        value.add_incoming(first_lanes, part_block)
        return value

    def prefetch(self, address: Value, offset: int = 0, locality: int = 3) -> None:
        """Ask for a cache line that will be read soon; never faults."""
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), I32, I32, I32])
        function = self.declare("llvm.prefetch.p0", kind)
        self.builder.call(function, [self.pointer(address, offset), self.i32(0), self.i32(locality), self.i32(1)])

    # Calls

    def declare(self, name: str, kind: Any) -> Any:
        module = self.builder.module
        found = module.globals.get(name)
        return found if found is not None else ir.Function(module, kind, name)

    def call(self, name: str, result: Any, arguments: Sequence[Value]) -> Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(self.declare(name, kind), arguments)

    # Float arithmetic: explicit, so that rounding is the same everywhere

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c with one rounding."""
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])

    def mul(self, a: Value, b: Value) -> Value:
        return self.builder.fmul(a, b)

    def add(self, a: Value, b: Value) -> Value:
        return self.builder.fadd(a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.builder.fsub(a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce_add(self, value: Value) -> Value:
        """Sum of sixteen lanes in one fixed tree: halves added, three more times."""
        return self._reduce(value, self.builder.fadd)

    def reduce_max(self, value: Value) -> Value:
        return self._reduce(value, self.maximum)

    def _reduce(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        lanes = value.type.count
        while lanes > 1:
            lanes //= 2
            low, high = self.lanes(value, 0, lanes), self.lanes(value, lanes, lanes)
            value = combine(low, high)
        return self.builder.extract_element(value, self.i32(0))

    def exp(self, x: Value, highest: float = 88.0) -> Value:
        """e**x per lane, relative error below 2.5e-7; 0 below -87.3, inf never needed (x is capped at 88).

        highest: 0 says that x is never above it, which saves the cap.
        Cody and Waite reduction to |r| <= ln2 / 2, then a degree-6 polynomial, then the exponent by integer addition.
        """
        low = self.splat_constant(F32, -87.3)
        clamped = self.builder.select(self.builder.fcmp_ordered("<", x, low), low, x)
        if highest > 0.0:
            high = self.splat_constant(F32, highest)
            clamped = self.builder.select(self.builder.fcmp_ordered(">", clamped, high), high, clamped)
        scaled = self.mul(clamped, self.splat_constant(F32, 1.4426950408889634))
        # Adding 1.5 * 2**23 rounds to the nearest whole number and leaves it in the low mantissa bits.
        magic = self.splat_constant(F32, 12582912.0)
        shifted = self.add(scaled, magic)
        whole = self.sub(shifted, magic)
        remainder = self.fma(whole, self.splat_constant(F32, -0.693359375), clamped)
        remainder = self.fma(whole, self.splat_constant(F32, 2.12194440e-4), remainder)
        result = self.splat_constant(F32, 1.0 / 720)
        for coefficient in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
            result = self.fma(result, remainder, self.splat_constant(F32, coefficient))
        exponent = self.builder.shl(self.bitcast(shifted, vector(I32)), self.splat_constant(I32, 23))
        bits = self.builder.add(self.bitcast(result, vector(I32)), exponent)
        power = self.bitcast(bits, vector(F32))
        return self.builder.select(self.builder.fcmp_ordered("<", x, low), self.zeros(F32), power)

    # Lanes

    def lanes(self, value: Value, start: int, count: int) -> Value:
        return self.builder.shuffle_vector(value, value, self.constants(I32, range(start, start + count)))

    def shuffle(self, value: Value, places: Sequence[int]) -> Value:
        """The lanes of these numbers, which are constants."""
        return self.builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), self.constants(I32, places))

    def constants(self, element: Any, values: Sequence[float]) -> Value:
        """A vector of different constants."""
        return _constants(element, tuple(values), repr(values))

    def bits_to_bytes(self, value: Value, places: Sequence[int]) -> Value:
        """Eight bits from each of four positions of every lane of 32 bits; only where `has_byte_permutes`.

        Bits around a position that lie outside of the lane are the other's of a pair.
        """
        control = [(32 * (byte // 4 % 2) + places[byte % 4]) % 64 for byte in range(64)]
        operands = [self.constants(I8, control), value]
        return self.call("llvm.x86.avx512.pmultishift.qb.512", vector(I8, 64), operands)

    def join(self, parts: Sequence[Value]) -> Value:
        """Concatenate equal vectors; a power of two of them."""
        values = list(parts)
        while len(values) > 1:
            count = 2 * values[0].type.count
            mask = self.constants(I32, range(count))
            values = [self.builder.shuffle_vector(a, b, mask) for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Sixteen vectors of sixteen lanes as a matrix, transposed."""
        masks = [self.constants(I32, [lane for i in range(8) for lane in (half + i, half + i + 16)]) for half in (0, 8)]
        # Interleaving vector i with vector i + 8, four times over, is the transposition.
        vectors = list(rows)
        for _ in range(4):
            vectors = [
                self.builder.shuffle_vector(vectors[i], vectors[i + 8], mask) for i in range(8) for mask in masks
            ]
        return vectors

    def bytes_to_floats(self, codes: Value, count: int, less: int = 0) -> Value:
        """The first `count` of unsigned bytes, less a number, as float32.

        They become the last bits of 2**23, which is taken off again, because NEON's conversions take two turns.
        """
        size = codes.type.count
        places = [place for lane in range(count) for place in (lane, size + lane)]
        halves = self.builder.shuffle_vector(codes, self.splat_constant(I8, 0, size), self.constants(I32, places))
        pairs = self.bitcast(halves, vector(I16, count))
        places = [place for lane in range(count) for place in (lane, count + lane)]
        upper = self.splat_constant(I16, 0x4B00, count)
        words = self.builder.shuffle_vector(pairs, upper, self.constants(I32, places))
        return self.sub(self.bitcast(words, vector(F32, count)), self.splat_constant(F32, 2.0**23 + less, count))

    def bytes_to_exponents(self, codes: Value, count: int) -> Value:
        """The first `count` of unsigned bytes as the exponents of float32, 2 ** (e - 127) or 0; only with NEON."""
        size = codes.type.count
        places = [place for lane in range(count) for place in (size + lane, lane)]
        halves = self.builder.shuffle_vector(codes, self.splat_constant(I8, 0, size), self.constants(I32, places))
        words = self.builder.zext(self.bitcast(halves, vector(I16, count)), vector(I32, count))
        return self.builder.shl(words, self.splat_constant(I32, 15, count))

    def shifted(self, codes: Value, distances: Value) -> Value:
        """Bytes, each shifted left by its distance, or right where that is negative; only with NEON."""
        size = min(codes.type.count, 16)
        starts = range(0, codes.type.count, size)
        parts = [[self.lanes(value, start, size) for value in (codes, distances)] for start in starts]
        return self.join([self.call(f"llvm.aarch64.neon.ushl.v{size}i8", vector(I8, size), part) for part in parts])

    def inserted(self, codes: Value, others: Value, distance: int) -> Value:
        """Bytes whose upper `distance` bits stay, and whose lower ones are others' upper ones."""
        count, b = codes.type.count, self.builder
        if not self.is_neon:
            kept = b.and_(codes, self.splat_constant(I8, 256 - (256 >> distance), count))
            return b.or_(kept, b.lshr(others, self.splat_constant(I8, distance, count)))
        size = min(count, 16)
        parts = [[self.lanes(one, start, size) for one in (codes, others)] for start in range(0, count, size)]
        name = f"llvm.aarch64.neon.vsri.v{size}i8"
        return self.join([self.call(name, part[0].type, [*part, I32(distance)]) for part in parts])

    # Integer dot products of four neighbouring bytes per int32 lane

    def dot_codes(self, total: Value, codes: Value, x: Value) -> Value:
        """total[l] += sum over c of codes[4l + c] * x[4l + c]; codes 0..127, x int8 in -127..127.

        Sixteen lanes; with NEON any number that fills whole registers, in all dot products of bytes.
        """
        if self.isa is ISA.AVX512_VNNI:
            return self.call("llvm.x86.avx512.vpdpbusd.512", vector(I32), [total, codes, x])
        if self.isa is ISA.AVX_VNNI:
            return self._by_parts(total, codes, x, 32, self._vpdpbusd256)
        if self.isa is ISA.AVX2:
            return self._by_parts(total, codes, x, 32, self._maddubs)
        if self.is_neon:
            return self._by_parts(total, codes, x, 16, self._sdot)
        return self._dot_generic(total, codes, x)

    def chained(self, total: Any, codes: Value, x: Value, largest: int) -> "PairSums":
        """`dot_codes` with AVX2 for codes up to `largest`: words hold sums of several products, as many as fit.

        So a product takes two operations, where one that is added to int32 takes three. `dot_total` has the sum.
        """
        chain = total if isinstance(total, PairSums) else PairSums(total, [], 0)
        bound = 2 * largest * 127
        if chain.bound + bound > 32767:
            chain = PairSums(self.dot_total(chain), [], 0)
        pairs = []
        for start in range(0, codes.type.count, 32):
            both = [self.lanes(part, start, 32) for part in (codes, x)]
            pairs.append(self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), both))
        if chain.words:
            pairs = [self.builder.add(before, new) for before, new in zip(chain.words, pairs, strict=True)]
        return PairSums(chain.total, pairs, chain.bound + bound)

    def dot_total(self, chain: Any) -> Value:
        """A dot product of `dot_codes` or `chained` as int32."""
        if not isinstance(chain, PairSums):
            return chain
        ones = self.splat_constant(I16, 1, 16)
        quads = [self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), [words, ones]) for words in chain.words]
        return self.builder.add(chain.total, self.join(quads))

    def dot_biased(self, total: Value, codes: Value, x: Value) -> Value:
        """total[l] += sum of (codes - 128) * x for unsigned codes 0..255, up to `biased_start`."""
        if not self.multiplies_unsigned:
            codes = self.builder.xor(codes, self.splat_constant(I8, 0x80, codes.type.count))
        return self.dot_levels(total, codes, x)

    def dot_levels(self, total: Value, levels: Value, x: Value) -> Value:
        """total[l] += sum of levels * x for levels of `lookup_levels`, up to `biased_start`."""
        if self.isa is ISA.AVX512_VNNI:
            return self.call("llvm.x86.avx512.vpdpbusd.512", vector(I32), [total, levels, x])
        if self.isa is ISA.AVX_VNNI:
            return self._by_parts(total, levels, x, 32, self._vpdpbusd256)
        if self.isa is ISA.AVX2:
            return self._by_parts(total, levels, x, 32, self._maddubs_signed)
        if self.is_neon:
            return self._by_parts(total, levels, x, 16, self._sdot)
        return self._dot_generic(total, levels, x)

    def biased_start(self, minus_128_sums: Value) -> Value:
        """The start of a chain of `dot_biased`: -128 * sum(x) where bytes are multiplied unsigned, else 0."""
        return minus_128_sums if self.multiplies_unsigned else self.zeros(I32, minus_128_sums.type.count)

    @property
    def multiplies_unsigned(self) -> bool:
        """True if dot products take weights as unsigned bytes."""
        return self.isa in (ISA.AVX512_VNNI, ISA.AVX_VNNI)

    def lookup(self, table: Sequence[int], codes: Value) -> Value:
        """Bytes of a table of sixteen, chosen by 64 codes 0..15; with NEON by any number that fills registers.

        Where `has_byte_permutes`, upper bits of codes may be any.
        """
        if self.has_byte_permutes:
            return self.call("llvm.x86.avx512.permvar.qi.512", vector(I8, 64), [self._bytes(table, 4), codes])
        if self.isa is ISA.AVX512_VNNI:
            return self.call("llvm.x86.avx512.pshuf.b.512", vector(I8, 64), [self._bytes(table, 4), codes])
        if self.isa in (ISA.AVX_VNNI, ISA.AVX2):
            parts = [[self._bytes(table, 2), self.lanes(codes, start, 32)] for start in range(0, codes.type.count, 32)]
            return self.join([self.call("llvm.x86.avx2.pshuf.b", vector(I8, 32), part) for part in parts])
        if self.is_neon:
            parts = [[self._bytes(table, 1), self.lanes(codes, start, 16)] for start in range(0, codes.type.count, 16)]
            return self.join([self.call("llvm.aarch64.neon.tbl1.v16i8", vector(I8, 16), part) for part in parts])
        count = codes.type.count
        choices = [self.splat_constant(I8, value & 255, count) for value in table]
        for bit in range(4):
            masked = self.builder.and_(codes, self.splat_constant(I8, 1 << bit, count))
            is_set = self.builder.icmp_unsigned("!=", masked, self.zeros(I8, count))
            choices = [self.builder.select(is_set, b, a) for a, b in zip(choices[::2], choices[1::2], strict=True)]
        return choices[0]

    def lookup_levels(self, table: Sequence[int], codes: Value) -> Value:
        """Levels -127..127 of a table of sixteen, as `dot_levels` wants them."""
        bias = 128 if self.multiplies_unsigned else 0
        return self.lookup([level + bias for level in table], codes)

    def _bytes(self, table: Sequence[int], repetitions: int) -> Value:
        return self.constants(I8, [value & 255 for value in table] * repetitions)

    def _by_parts(
        self, total: Value, codes: Value, x: Value, width: int, part: Callable[[Value, Value, Value], Value]
    ) -> Value:
        results = []
        for start in range(0, codes.type.count, width):
            lanes = self.lanes(total, start // 4, width // 4)
            results.append(part(lanes, self.lanes(codes, start, width), self.lanes(x, start, width)))
        return self.join(results)

    def _vpdpbusd256(self, total: Value, codes: Value, x: Value) -> Value:
        return self.call("llvm.x86.avx512.vpdpbusd.256", vector(I32, 8), [total, codes, x])

    def _maddubs(self, total: Value, codes: Value, x: Value) -> Value:
        # Pairs reach 2 * 127 * 127 = 32258, within int16, so the instruction's saturation never acts.
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), [codes, x])
        ones = self.splat_constant(I16, 1, 16)
        quads = self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), [pairs, ones])
        return self.builder.add(total, quads)

    def _maddubs_signed(self, total: Value, codes: Value, x: Value) -> Value:
        # |code| is at most 128 and |x| at most 127: pairs reach 32512.
        magnitude = self.call("llvm.abs.v32i8", vector(I8, 32), [codes, ir.Constant(I1, 0)])
        moved = self.call("llvm.x86.avx2.psign.b", vector(I8, 32), [x, codes])
        return self._maddubs(total, magnitude, moved)

    def _sdot(self, total: Value, codes: Value, x: Value) -> Value:
        return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", vector(I32, 4), [total, codes, x])

    def matrix_product(self, totals: Value, rows: Value, others: Value, *, is_signed: bool = True) -> Value:
        """totals[2i + j] += the product of row i of `rows` and row j of `others`, int8[2][8].

        is_signed: False if `rows` are uint8.
        """
        if self.isa is ISA.NEON_I8MM:
            name = "smmla" if is_signed else "usmmla"
            return self.call(f"llvm.aarch64.neon.{name}.v4i32.v16i8", vector(I32, 4), [totals, rows, others])
        left = self.shuffle(rows, [8 * row + column for row in (0, 0, 1, 1) for column in range(8)])
        right = self.shuffle(others, [*range(16), *range(16)])
        wide = vector(I32, 32)
        left = self.builder.sext(left, wide) if is_signed else self.builder.zext(left, wide)
        sums = self.builder.mul(left, self.builder.sext(right, wide))
        for _ in range(3):
            sums = self._pair_sums(sums)
        return self.builder.add(totals, sums)

    def _dot_generic(self, total: Value, codes: Value, x: Value) -> Value:
        wide = vector(I16, 64)
        products = self.builder.mul(self.builder.sext(codes, wide), self.builder.sext(x, wide))
        pairs = self.builder.sext(self._pair_sums(products), vector(I32, 32))
        return self.builder.add(total, self._pair_sums(pairs))

    def _pair_sums(self, value: Value) -> Value:
        """Each lane of an even number added to the one after it."""
        count = value.type.count
        even, odd = (ir.Constant(vector(I32, count // 2), list(range(first, count, 2))) for first in (0, 1))
        shuffle = self.builder.shuffle_vector
        return self.builder.add(shuffle(value, value, even), shuffle(value, value, odd))

    def dot_pairs(self, total: Value, codes: Value, x: Value) -> Value:
        """total[l] += codes[2l] * x[2l] + codes[2l + 1] * x[2l + 1], int16 each; the sum of two fits an int32."""
        if self.isa is ISA.AVX512_VNNI:
            return self.call("llvm.x86.avx512.vpdpwssd.512", vector(I32), [total, codes, x])
        if self.isa is ISA.AVX_VNNI:
            return self._by_words(total, codes, x, self._vpdpwssd256)
        if self.isa is ISA.AVX2:
            return self._by_words(total, codes, x, self._madd)
        wide = vector(I32, codes.type.count)
        products = self.builder.mul(self.builder.sext(codes, wide), self.builder.sext(x, wide))
        return self.builder.add(total, self._pair_sums(products))

    def _by_words(self, total: Value, codes: Value, x: Value, part: Callable[[Value, Value, Value], Value]) -> Value:
        halves = [[self.lanes(value, 16 * half, 16) for value in (codes, x)] for half in range(2)]
        return self.join([part(self.lanes(total, 8 * half, 8), *halves[half]) for half in range(2)])

    def _vpdpwssd256(self, total: Value, codes: Value, x: Value) -> Value:
        return self.call("llvm.x86.avx512.vpdpwssd.256", vector(I32, 8), [total, codes, x])

    def _madd(self, total: Value, codes: Value, x: Value) -> Value:
        return self.builder.add(total, self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), [codes, x]))

    # Matrices of bytes: registers 0..7 of AMX, which belong to a thread between `matrix_configure` and `matrix_release`

    def matrix_configure(self, address: Value) -> None:
        """Configure the registers by 64 bytes: rows, and bytes of a row, of each."""
        self.call("llvm.x86.ldtilecfg", ir.VoidType(), [self.pointer(address)])

    def matrix_release(self) -> None:
        self.call("llvm.x86.tilerelease", ir.VoidType(), [])

    def matrix_zero(self, register: int) -> None:
        self.call("llvm.x86.tilezero", ir.VoidType(), [I8(register)])

    def matrix_load(self, register: int, address: Value, stride: Value) -> None:
        """Load rows that are `stride` bytes apart."""
        self.call("llvm.x86.tileloadd64", ir.VoidType(), [I8(register), self.pointer(address), stride])

    def matrix_store(self, register: int, address: Value, stride: Value) -> None:
        self.call("llvm.x86.tilestored64", ir.VoidType(), [I8(register), self.pointer(address), stride])

    def matrix_dot(self, total: int, rows: int, columns: int) -> None:
        """total[m][n] += sum over k, c of rows[m][4k + c] * columns[k][4n + c], of signed bytes to int32."""
        self.call("llvm.x86.tdpbssd", ir.VoidType(), [I8(total), I8(rows), I8(columns)])

    # Control flow

    def loop(
        self, start: Value, stop: Value, step: int, carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:  # fmt: skip
        """for i in range(start, stop, step): carried = body(i, carried); values stay in registers."""
        builder = self.builder
        before = builder.block
        head = builder.append_basic_block("loop")
        inside = builder.append_basic_block("loop.body")
        after = builder.append_basic_block("loop.end")
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        phis = [builder.phi(value.type) for value in carried]
        index.add_incoming(start, before)
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
        builder.position_at_end(inside)
        results = list(body(index, list(phis)))
        following = builder.add(index, self.i64(step))
        end = builder.block
        index.add_incoming(following, end)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, end)
        builder.branch(head)
        builder.position_at_end(after)
        return list(phis)


ADDRESS = types.int64
FLOAT = types.float32
VOID = types.void
LITERAL = object()
"""Type of an operand that chooses the code to emit: the function gets its value, a Python integer."""


def emitted(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function of an Emitter and the operands' IR values, which returns the result's.

    result and operands: Numba's types; of a VOID function nothing is returned.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            kinds = [found if kind is LITERAL else kind for kind, found in zip(operands, given, strict=True)]
            literals = [kind is LITERAL for kind in operands]
            if not all(
                isinstance(kinds[i], types.IntegerLiteral) for i, is_literal in enumerate(literals) if is_literal
            ):
                raise RequireLiteralValue("an operand that chooses the code that is emitted must be a literal")

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                chosen = [
                    kind.literal_value if is_literal else value
                    for kind, is_literal, value in zip(kinds, literals, values, strict=True)
                ]
                found = function(Emitter(context, builder), *chosen)
                return context.get_dummy_value() if found is None else found

            return result(*kinds), generate

        parameters = list(inspect.signature(function).parameters.values())[: 1 + len(operands)]
        typed.__signature__ = inspect.Signature([one.replace(annotation=Any) for one in parameters])  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__, typed.__module__ = function.__name__, function.__doc__, function.__module__
        return intrinsic(typed)

    return decorate
