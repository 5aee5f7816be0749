"""Arrays that nobody owns, and kernels that do not count who refers to one.

Note: why. Numba counts references to every slice, with locked instructions: two for each, in each
block of a loop, and each of them waits until all stores past the caches have arrived. A step of 0/1
Adam took 2.5 times as long with them. A ``bare`` kernel counts none; so it cannot make arrays, nor
return one, and takes ``floats`` instead.
"""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commpress.kernels.cpu.sources.decorators import bare


def _unowned(context, builder, kind, data, numel):
    array = context.make_array(kind)(context, builder)
    size = ir.IntType(64)(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    context.populate_array(
        array, data=data, shape=[numel], strides=[size], itemsize=size, meminfo=None
    )
    return array._getvalue()


def _at_address(number, element):
    kind = types.Array(number, 1, "C")

    def generate(context, builder, signature, args):
        return _unowned(
            context, builder, kind, builder.inttoptr(args[0], element.as_pointer()), args[1]
        )

    return kind(types.intp, types.intp), generate


@intrinsic
def floats(typing, address, numel):
    """The float32 numbers at an address."""
    return _at_address(types.float32, ir.FloatType())


@bare
def begins_line(array, first):
    """True if array[first] begins a cache line."""
    return (array.ctypes.data + 4 * first) % 64 == 0
