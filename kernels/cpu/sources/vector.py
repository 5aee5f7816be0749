"""64 floats as one value of a kernel: loaded, computed with, stored; what is past the end of an
array is not touched.

Numba's vectoriser makes a loop of its own for every array that may lie on top of another, with
tests before it and a rest behind it; in a block of 128 elements these took a fifth of a pass.
``vector`` is their type. Operations are those of float32, each rounded. ``sums`` are of float64, 32
side by side, so that an addition need not wait for the one before.
"""

import operator

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

WIDE = 64
_I64 = ir.IntType(64)
_VECTOR, _WORDS, _MASK = (
    ir.VectorType(of, WIDE) for of in (ir.FloatType(), ir.IntType(32), ir.IntType(1))
)


class _VectorType(types.Type):
    def __init__(self):
        super().__init__(name="Vector")


class _Sums(types.Type):
    def __init__(self):
        super().__init__(name="Sums")


vector, sums = _VectorType(), _Sums()
_TOTALS = ir.VectorType(ir.DoubleType(), WIDE // 2)


@register_model(_VectorType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


@register_model(_Sums)
class _ModelOfSums(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _TOTALS)


def _spread(builder, scalar):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * WIDE))


def _operation(name):
    def generate(context, builder, signature, args):
        sides = (
            value if kind == vector else _spread(builder, value)
            for kind, value in zip(signature.args, args, strict=True)
        )
        return getattr(builder, name)(*sides)

    return generate


_OPERATIONS = {
    operator.add: "fadd",
    operator.sub: "fsub",
    operator.mul: "fmul",
    operator.truediv: "fdiv",
}

for _operator, _name in _OPERATIONS.items():

    @infer_global(_operator)
    class _Typing(AbstractTemplate):
        def generic(self, args, kws):
            return (
                signature(vector, *args)
                if vector in args and {*args} <= {vector, types.float32}
                else None
            )

    for _kinds in ((vector, vector), (types.float32, vector), (vector, types.float32)):
        lower_builtin(_operator, *_kinds)(_operation(_name))


def _place(context, builder, kind, array, at):
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer())


def _first(builder, left):
    """The mask of the first ``left`` elements, fewer than all."""
    ones = builder.sub(builder.shl(_I64(1), left), _I64(1))
    return builder.bitcast(ones, _MASK)


def _masked(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), arguments)


def _part(builder, value, first, count):
    which = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(first, first + count)))
    return builder.shuffle_vector(value, value, which)


@intrinsic
def load(typing, array, at, left):
    """array[at : at + 64], or the first ``left`` of them and zeros."""

    def generate(context, builder, signature, args):
        place = _place(context, builder, array, *args[:2])
        with builder.if_else(builder.icmp_signed(">=", args[2], _I64(WIDE))) as (whole, part):
            with whole:
                every, from_whole = builder.load(place, align=4), builder.block
            with part:
                some = _masked(
                    builder,
                    "llvm.masked.load.v64f32.p0",
                    _VECTOR,
                    place,
                    ir.IntType(32)(4),
                    _first(builder, args[2]),
                    ir.Constant(_VECTOR, [0.0] * WIDE),
                )
                from_part = builder.block
        value = builder.phi(_VECTOR)
        value.add_incoming(every, from_whole)
        value.add_incoming(some, from_part)
        return value

    return vector(array, types.intp, types.intp), generate


@intrinsic
def put(typing, value, array, at, left, past):
    """array[at : at + 64] := value, or the first ``left``; ``past`` the caches if so asked: then
    the place begins a line."""

    def generate(context, builder, signature, args):
        place = _place(context, builder, array, *args[1:3])
        with builder.if_else(builder.icmp_signed(">=", args[3], _I64(WIDE))) as (whole, part):
            with (
                whole,
                builder.if_else(context.cast(builder, args[4], past, types.boolean)) as (
                    beyond,
                    within,
                ),
            ):
                with beyond:
                    store = builder.store(args[0], place, align=64)
                    store.set_metadata(
                        "nontemporal", builder.module.add_metadata([ir.IntType(32)(1)])
                    )
                with within:
                    builder.store(args[0], place, align=4)
            with part:
                mask = _first(builder, args[3])
                _masked(
                    builder,
                    "llvm.masked.store.v64f32.p0",
                    ir.VoidType(),
                    args[0],
                    place,
                    ir.IntType(32)(4),
                    mask,
                )
        return context.get_dummy_value()

    return types.none(vector, array, types.intp, types.intp, past), generate


def _finite(builder, value):
    bits = builder.and_(builder.bitcast(value, _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * WIDE))
    return builder.icmp_unsigned("<", bits, ir.Constant(_WORDS, [0x7F800000] * WIDE))


@intrinsic
def where_finite(typing, of, value, other):
    """``value`` where ``of`` is finite, else ``other``."""

    def generate(context, builder, signature, args):
        return builder.select(_finite(builder, args[0]), args[1], args[2])

    return vector(vector, vector, vector), generate


@intrinsic
def all_finite(typing, of):
    def generate(context, builder, signature, args):
        return builder.icmp_unsigned(
            "==", builder.bitcast(_finite(builder, args[0]), _I64), _I64(-1)
        )

    return types.boolean(vector), generate


@intrinsic
def root(typing, value):
    def generate(context, builder, signature, args):
        return _masked(builder, "llvm.sqrt.v64f32", _VECTOR, *args)

    return vector(vector), generate


@intrinsic
def less(typing, value, other):
    """The smaller of each two; ``other`` where one is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def more(typing, value, other):
    """The larger of each two; ``other`` where one is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def within(typing, value, bound):
    """The value cut to at most the bound, which is no less than 0, and at least minus the bound;
    the bound where it is NaN."""

    def generate(context, builder, signature, args):
        value, bound = args
        value = builder.select(builder.fcmp_ordered("<", value, bound), value, bound)
        least = builder.fneg(bound)
        return builder.select(builder.fcmp_ordered(">", value, least), value, least)

    return vector(vector, vector), generate


@intrinsic
def where_less(typing, one, other, value, otherwise):
    """``value`` where ``one`` is less than ``other``, else ``otherwise``."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args[:2]), *args[2:])

    return vector(vector, vector, vector, vector), generate


@intrinsic
def beyond(typing, value, bound):
    """Number of those further from zero than the bound."""

    def generate(context, builder, signature, args):
        bits = builder.and_(
            builder.bitcast(args[0], _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * WIDE)
        )
        far = builder.fcmp_ordered(">", builder.bitcast(bits, _VECTOR), args[1])
        return _masked(builder, "llvm.ctpop.i64", _I64, builder.bitcast(far, _I64))

    return types.int64(vector, vector), generate


@intrinsic
def add_count(typing, counts, at, more):
    """counts[at] += more, whichever threads do it at the same time."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "monotonic")
        return context.get_dummy_value()

    return types.none(counts, types.intp, types.int64), generate


@intrinsic
def same(typing, number):
    def generate(context, builder, signature, args):
        return _spread(builder, *args)

    return vector(types.float32), generate


@intrinsic
def the_first(typing, value, left, other):
    """``value`` in the first ``left`` elements, ``other`` behind them."""

    def generate(context, builder, signature, args):
        value, left, other = args
        every, whole = ir.Constant(_MASK, [1] * WIDE), builder.icmp_signed(">=", left, _I64(WIDE))
        return builder.select(builder.select(whole, every, _first(builder, left)), value, other)

    return vector(vector, types.intp, vector), generate


@intrinsic
def least(typing, value):
    """The smallest of all."""

    def generate(context, builder, signature, args):
        value, width = args[0], WIDE
        while width > 1:
            width //= 2
            low, high = _part(builder, value, 0, width), _part(builder, value, width, width)
            value = builder.select(builder.fcmp_ordered("<", low, high), low, high)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float32(vector), generate


@intrinsic
def no_sums(typing):
    def generate(context, builder, signature, args):
        return ir.Constant(_TOTALS, [0.0] * (WIDE // 2))

    return sums(), generate


@intrinsic
def add_squares(typing, before, value):
    """In float64, where the square of a float32 is exact."""

    def generate(context, builder, signature, args):
        total = args[0]
        for first in (0, WIDE // 2):
            half = builder.fpext(_part(builder, args[1], first, WIDE // 2), _TOTALS)
            total = builder.fadd(
                total, builder.fmul(half, half, flags=["contract"]), flags=["contract"]
            )
        return total

    return sums(sums, vector), generate


@intrinsic
def total(typing, of):
    """The sum of all, by halves."""

    def generate(context, builder, signature, args):
        value, width = args[0], WIDE // 2
        while width > 1:
            width //= 2
            value = builder.fadd(
                _part(builder, value, 0, width), _part(builder, value, width, width)
            )
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float64(sums), generate
