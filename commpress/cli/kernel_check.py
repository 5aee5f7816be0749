"""A check of this processor's kernels: bytes, residuals and floats against the reference."""

import numpy as np
import torch

from commpress.codecs import Codec
from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import WIDTH, Piece, cut

ROWS = 4  # ranks


def check_bytes(codec: Codec, numel: int = 10_007) -> None:
    """Encode, residual and decode of the fast path equal the reference bit for bit, or an
    AssertionError says where."""
    draw = np.random.default_rng(0)
    x, residual = (draw.standard_normal(numel).astype(np.float32) for _ in range(2))
    pieces = cut([Piece(0, numel, codec.kind, codec.block)], ROWS)
    width = int(pieces.table[0, WIDTH])
    rows, left = reference.encode_with_residual(x, residual, codec.kind, width, codec.block)
    message = torch.zeros(ROWS, pieces.row_bytes, dtype=torch.uint8)
    kept, out, flag = torch.empty(numel), torch.empty(numel), torch.zeros(1, dtype=torch.uint8)
    given, old = torch.from_numpy(x), torch.from_numpy(residual)
    cpu.encode(given, message, flag, pieces, residual=old, new_residual=kept)
    cpu.decode(message, out, pieces)
    decoded = [
        reference.decode_row(row, codec.kind, min(width, numel - r * width), width, codec.block)
        for r, row in enumerate(rows)
    ]
    size, spec = codec.row_bytes(width), codec.spec
    np.testing.assert_array_equal(message[:, :size].numpy(), rows, f"bytes of {spec}")
    np.testing.assert_array_equal(kept.numpy(), left, f"residual of {spec}")
    np.testing.assert_array_equal(out.numpy(), np.concatenate(decoded), f"decoded floats of {spec}")
