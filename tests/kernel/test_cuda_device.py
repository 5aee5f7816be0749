"""The CUDA path on a real GPU: on torch's stream, at the speed of memory. Most of the law is in
``test_row_codecs``."""

import numpy as np
import pytest
import torch

import kernel_twin as twin
from commpress.kernels import reference
from commpress.kernels.cuda import row_codec as cuda
from commpress.kernels.pieces import Piece, cut

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip(
    "cupy", reason="no CuPy: pip install 'commpress[cuda12]' or 'commpress[cuda13]'"
)

NUMEL = 256 << 20  # for bandwidth: far more than the cache holds
SHARE_OF_COPY = 0.8
CARD = twin.Side(cuda, "cuda")


@pytest.mark.parametrize(("kind", "block"), twin.PAIRS)
def test_numbers_from_denormal_to_overflow(kind, block):
    """CuPy asks the compiler to flush denormals; the law keeps them."""
    for seed in range(3):
        twin.check_round(CARD, 100_003, 2, kind, block, seed, spread=30.0)
        twin.check_serve(CARD, 100_003, 8, kind, block, seed)


def test_many_pieces():
    twin.check_pieces(CARD, 20)


def test_the_tree_over_a_long_row():
    """So many tiles that the float64 tree takes several rounds."""
    twin.check_round(CARD, 40_000_001, 1, reference.SIGN_RMS, 0, seed=1)


def test_runs_on_the_current_stream():
    """Between two writes on a side stream, kernels see the first and not the second."""
    pieces, flag = (
        cut([Piece(0, 1 << 22, reference.SIGN_L1, 0)], 1),
        CARD.flag(),
    )
    message, x = twin.MessageRows(1, pieces, 0, "cuda").rows, torch.zeros(1 << 22, device="cuda")
    scale = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(1, 20):
            torch.cuda._sleep(100_000)
            x.fill_(step)
            cuda.encode(x, message, flag, pieces, new_scale=scale)
            x.fill_(-1)
            assert scale.item() == step


def test_offsets_beyond_32_bits():
    """A piece that lies behind 2³¹ elements."""
    first, numel = (1 << 31) + 8, 5000
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip(f"{free >> 30} GiB free on the device, 12 needed")
    x = torch.empty(first + numel, device="cuda")
    values = twin.sample(numel, 3)
    x[first:] = torch.from_numpy(values)
    pieces = cut([Piece(first, numel, reference.INT4, 256)], 2)
    message, flag = (
        twin.MessageRows(2, pieces, 1, "cuda"),
        CARD.flag(),
    )
    cuda.encode(x, message.rows, flag, pieces)
    want, want_left = twin.expected(values, 2, reference.INT4, 256, 0)
    twin.check_rows(message, want, reference.INT4, 2504, 256)
    cuda.decode(message.rows, x, pieces)
    twin.same(x[first:], values - want_left)


# ---------------------------------------------------------------- speed


def bytes_per_second(function, moved: int) -> float:
    """The best of several runs, each long enough for the clock of the device."""
    function()
    best = np.inf
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            function()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 4e3)
    return moved / best


@pytest.mark.parametrize("name", ["encode-lazy", "encode-blocks", "decode"])
def test_reaches_the_speed_of_a_copy(name):
    """Bytes that have to move, over time, against those of a copy of as many elements."""
    free, _ = torch.cuda.mem_get_info()
    if free < 5 << 30:
        pytest.skip(f"{free >> 30} GiB free on the device, 5 needed")
    x, value = torch.randn(NUMEL, device="cuda"), torch.randn(NUMEL, device="cuda")
    copy = bytes_per_second(lambda: value.copy_(x), 8 * NUMEL)
    pieces = cut([Piece(0, NUMEL, reference.SIGN_L1, 2048 if name == "encode-blocks" else 0)], 1)
    message, flag = (
        twin.MessageRows(1, pieces, 32, "cuda").rows,
        CARD.flag(),
    )
    scale = torch.zeros(1, device="cuda")
    lazy = dict(residual_scale=scale, new_scale=scale) if name == "encode-lazy" else {}

    def encode():
        cuda.encode(x, message, flag, pieces, residual=value, new_residual=value, **lazy)

    encode()
    if name == "decode":
        moved = 4 * NUMEL + pieces.row_bytes
        rate = bytes_per_second(lambda: cuda.decode(message, x, pieces), moved)
    else:
        rate = bytes_per_second(encode, 12 * NUMEL + pieces.row_bytes)
    print(f"{name}: {rate / 1e9:.0f} GB/s, copy {copy / 1e9:.0f} GB/s, {rate / copy:.2f} of it")
    assert rate >= SHARE_OF_COPY * copy
