"""The frames of a kernel, dealt out among the threads of an OpenMP team."""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commpress.kernels.cpu.kinds import I64
from commpress.kernels.cpu.sources.decorators import bare
from commpress.kernels.cpu.sources.kernel import kernel


def _function(builder, address, result, arguments):
    return builder.inttoptr(
        address, ir.FunctionType(result, [a.type for a in arguments]).as_pointer()
    )


@intrinsic
def _ask(typing, address):
    """Answer of the C function int f(void) at an address."""

    def generate(context, builder, signature, args):
        return builder.call(_function(builder, args[0], ir.IntType(32), []), [])

    return types.int32(types.int64), generate


@intrinsic
def _call(typing, address, frame):
    """Call the kernel at an address."""

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[1], ir.IntType(8).as_pointer())
        builder.call(_function(builder, args[0], ir.VoidType(), [place]), [place])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@kernel(number=I64, team=I64, function=I64, frames=I64, size=I64, count=I64)
@bare
def share(number, team, function, frames, size, count):
    """Every thread of the team calls this; a team may be smaller than the frames are many."""
    threads = _ask(team)
    for i in range(_ask(number), count, threads):
        _call(function, frames + i * size)
