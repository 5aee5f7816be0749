"""Headers written and compared by CUDA's kernels, on the processor, as by the host."""

import numpy as np
import pytest
import torch

from commpress.collectives import frame
from commpress.kernels.cuda import headers as cuda_headers
from commpress.kernels.cuda.modules import HEADERS
from cuda_shim import Shim, compiler


@pytest.fixture
def shim(run_folder, monkeypatch):
    if compiler() is None:
        pytest.skip("g++ is missing")
    shim = Shim(run_folder, [HEADERS])
    monkeypatch.setattr(cuda_headers, "execute", shim.execute)
    return shim


def header():
    draw = torch.Generator().manual_seed(1)
    found = torch.randint(0, 256, (frame.HEADER,), dtype=torch.uint8, generator=draw)
    found[frame.FLAGS : frame.FLAGS + 2] = 0  # without a checksum
    return found


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("flags", [(0,), (1,), (0, 2), (1, 2)])
def test_stamped_rows_are_equal_and_nothing_else_is_written(shim, rows, flags):
    both = [torch.full((rows, 96), 7, dtype=torch.uint8) for _ in range(2)]
    flags = torch.tensor(flags, dtype=torch.uint8)
    for each, messages in zip((frame, cuda_headers), both, strict=True):
        each.stamp(messages[:, :80], header(), flags)
    assert torch.equal(*both)
    assert torch.equal(both[0][:, frame.HEADER :], torch.full((rows, 32), 7, dtype=torch.uint8))
    assert (both[0][:, frame.FLAGS] == int(np.bitwise_or.reduce(flags.numpy()))).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_any_other_byte_counts_as_not_finite_but_for_flags_and_checksum(shim, rows, reverse):
    shim.reverse = reverse
    message = torch.zeros(rows, 80, dtype=torch.uint8)
    frame.stamp(message, header(), torch.zeros(1, dtype=torch.uint8))
    for at in range(frame.HEADER):
        for row in (0, rows - 1):
            for bit in (1, 2, 128):
                other = message.clone()
                other[row, at] ^= bit
                found = cuda_headers.compare(other, header())
                assert torch.equal(found, frame.compared(other, header()))
                known = (at == frame.FLAGS and bit in (1, 2)) or (
                    at < frame.SUM and at != frame.FLAGS
                )
                asks = at == frame.FLAGS and bit == 2
                assert found.tolist() == [int(known and not asks), 2 * asks]
