"""Code that intrinsics emit on the arrays among their arguments, 64 elements at a time."""

from llvmlite import ir

WIDE = 64
FLOATS = ir.VectorType(ir.FloatType(), WIDE)
_INT = ir.IntType(32)


class Emitted:
    """Loads and stores of one intrinsic; what it is called with as llvmlite gives it."""

    align = 4  # of the arrays' elements in bytes

    def __init__(self, context, builder, signature, args):
        self.context, self.builder, self.types, self.args = context, builder, signature.args, args

    def element(self, array):
        return self.context.get_data_type(self.types[array].dtype)

    def place(self, array, index, to=FLOATS):
        data = self.context.make_array(self.types[array])(
            self.context, self.builder, self.args[array]
        ).data
        return self.builder.bitcast(self.builder.gep(data, [index]), to.as_pointer())

    def load(self, array, index, to=FLOATS):
        return self.builder.load(self.place(array, index, to), align=self.align)

    def store(self, value, array, index):
        self.builder.store(value, self.place(array, index, value.type), align=self.align)

    def spread(self, scalar):
        """A vector of equal elements."""
        vector = ir.VectorType(scalar.type, WIDE)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _INT(0))
        return self.builder.shuffle_vector(
            one, one, ir.Constant(ir.VectorType(_INT, WIDE), [0] * WIDE)
        )

    def nothing(self):
        return self.context.get_dummy_value()
