"""Kernels of rows give the bytes of the law, for every kind, block, tail and alignment: the CPU's,
CUDA's from the same source thread by thread on the CPU (``cuda_shim``), and CUDA's on a card, where
there is one."""

import ctypes
import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuda_shim
import kernel_twin as twin
from commpress.codecs import SparseCodec, codec_named
from commpress.codecs.family import NAMES
from commpress.codecs.registry import EXAMPLES
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.cuda import row_codec as cuda
from commpress.kernels.pieces import Piece, cut, width_of
from variants import seldom

CARD = ["card"] * (torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None)
CUDA = ["source", *CARD]
CPU = twin.Side(cpu, "cpu", strict=False)


@pytest.fixture(scope="session")
def libraries(run_folder):
    if cuda_shim.compiler() is None:
        pytest.skip("no g++ to run the CUDA source on the CPU")
    return cuda_shim.Shim(run_folder, twin.FAMILIES)


@pytest.fixture
def on(request, monkeypatch):
    """The side that a test asks for, of all sides unless it says otherwise."""
    if request.param != "source":
        return {"cpu": CPU, "card": twin.Side(cuda, "cuda")}[request.param]
    libraries = request.getfixturevalue("libraries")
    libraries.reverse = False
    monkeypatch.setattr(cuda, "execute", libraries.execute)
    return twin.Side(cuda, "cpu", libraries)


NARROW = (reference.FP32, reference.BF16, reference.INT8, reference.SIGN_L1)
every_side = pytest.mark.parametrize("on", ["cpu", *CUDA], indirect=True)
cuda_sides = pytest.mark.parametrize("on", CUDA, indirect=True)


def single(numel, rows, kind, block, hash=0):
    """A table of one piece that fills the whole buffer."""
    return cut([Piece(0, numel, kind, block, hash)], rows)


def sides(pairs):
    """Each pair on one side after the other, on the rest with the slow tests."""
    every = ("cpu", *CUDA)
    return pytest.mark.parametrize(
        ("on", "kind", "block"),
        [
            pytest.param(side, *pair) if (i + j) % len(every) == 0 else seldom(side, *pair)
            for i, pair in enumerate(pairs)
            for j, side in enumerate(every)
        ],
        indirect=["on"],
    )


@sides(twin.PAIRS)
def test_encode_and_decode_give_the_bytes_of_the_law(on, kind, block):
    # the others with other kinds and blocks
    for i, numel in list(enumerate(twin.LENGTHS))[(kind + block // 8) % 2 :: 2]:
        rows, gain = (1, 3, 2, 5, 4)[(i + kind) % 5], (1.0, 1 / 3)[i % 2]
        seed = 31 * i + rows
        twin.check_round(on.turn(), numel, rows, kind, block, seed, offset=i % 5, gain=gain)


@sides([pair for pair in twin.PAIRS if pair[1] in (0, 64, 256, 2048)])
def test_mean_and_serve_give_the_bytes_of_the_law(on, kind, block):
    for numel, senders in [(0, 1), (1, 2), (2049, 1), (5000, 2), (70, 5)]:
        twin.check_serve(on.turn(), numel, senders, kind, block, seed=senders)


@every_side
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    numel=st.integers(0, 7000),
    rows=st.integers(1, 9),
    pair=st.sampled_from(twin.PAIRS),
    seed=st.integers(0, 2**40),
    offset=st.integers(0, 40),
    gain=st.sampled_from([1.0, -1.0, 0.5, 1 / 3, 2.0**-16, 0.0]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 30.0]),
)
def test_any_geometry(on, numel, rows, pair, seed, offset, gain, spread):
    spread = spread if on.strict else min(spread, 8.0)  # beyond, buffers are not finite
    twin.check_round(on.turn(), numel, rows, *pair, seed, offset=offset, gain=gain, spread=spread)


@every_side
@pytest.mark.parametrize("kind", [reference.SIGN_L1, reference.SIGN_RMS])
def test_lazy_residual(on, kind):
    for numel, rows in ((10_001, 4), (20, 5)):
        twin.check_lazy(on.turn(), kind, numel, rows)
        twin.check_lazy_serve(on, kind, 9000, 2)


@every_side
@pytest.mark.parametrize("repeat", [1, 4])
def test_pieces_side_by_side_are_the_pieces_one_by_one(on, repeat):
    twin.check_pieces(on, repeat)


@every_side
def test_every_named_codec_of_rows(on):
    for codec in map(codec_named, (*NAMES, *EXAMPLES)):
        if not isinstance(codec, WholeTensorCodec | SparseCodec):
            twin.check_round(on, 7001, 2, codec.kind, codec.block, seed=8)


@every_side
@pytest.mark.parametrize(("kind", "block"), [pair for pair in twin.PAIRS if pair[0] > 255])
def test_of_equals_the_first(on, kind, block):
    """Few different magnitudes: top-k and the extremes choose among many equals; zeros of both
    signs are equal."""
    for seed in range(3):
        x = np.rint(twin.sample(2500, seed, 0.0) * (seed + 1) / 2)
        x = [x, np.where(x > 0, x, x * 0), np.where(x < 0, x, x * 0)][seed % 3]
        twin.check_round(on.turn(), 2500, 1, kind, block, seed, x=x)


@every_side
@pytest.mark.parametrize(("kind", "block"), dict(reversed(twin.PAIRS)).items())
def test_adding_leaves_what_was_not_sent(on, kind, block):
    """To the bit: -0 stays -0 there, as on the CPU."""
    pieces, added = single(3000, 1, kind, block), []
    message = twin.MessageRows(1, pieces, 3, on.device)
    x = torch.from_numpy(twin.sample(3000, 5)).to(on.device)
    on.kernels.encode(x, message.rows, on.flag(), pieces)
    for kernels, device in ((on.kernels, on.device), (cpu, "cpu")):
        added.append(torch.full((3000,), -0.0, device=device))
        kernels.decode(message.rows.to(device), added[-1], pieces, gain=-0.5, add=True)
    twin.same(added[0], added[1].numpy())


EXTREMES = {
    "zeros": np.zeros(40),
    "minus-zero": np.full(40, -0.0),
    "denormal": np.full(40, 1e-42),
    "smallest": np.eye(1, 40)[0] * 1e-45,
    "tiny": np.full(40, 2.0**-101),
    "one-hot": np.eye(1, 40)[0] * 3,
    "huge": np.full(40, 3e38) * np.tile([1, -1], 20),
    "half-way": np.arange(40) / 2 + 0.25,
    "range": 2.0 ** np.arange(-149, 128, 7)[:40],
}
NOT_FINITE = {
    "nan": np.where(np.arange(40) == 13, np.nan, 1),
    "infinity": np.where(np.arange(40) == 39, np.inf, -1),
    "both": np.where(np.arange(40) < 2, [np.inf, -np.inf] * 20, 0),
}


@every_side
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values(on, name):
    check_extreme(on, EXTREMES[name].astype(np.float32), kept=name != "range")


@cuda_sides
@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite(on, name):
    check_extreme(on, NOT_FINITE[name].astype(np.float32), kept=False)


def check_extreme(on, x, *, kept):
    """Overflow of sums may raise the flag. ``kept``: encoded plus residual is the input again where
    it does not, even where a block is sent as zero."""
    for kind, block in twin.PAIRS:
        if kind <= 255 and block not in (0, 8, 64, 2048):
            continue
        pieces, flag = single(len(x), 1, kind, block), on.flag()
        want, want_left = twin.expected(x, 1, kind, block, 3)
        message = twin.MessageRows(1, pieces, 1, on.device)
        left, out = torch.empty(len(x), device=on.device), torch.empty(len(x), device=on.device)
        given_ = torch.from_numpy(x).to(on.device)
        on.kernels.encode(given_, message.rows, flag, pieces, key=3, new_residual=left)
        message.check(0, want[0], twin.scales_of(kind, width_of(len(x), 1), block))
        on.same(left, want_left)
        finite = twin.finite(x, want, kind, width_of(len(x), 1), block)
        assert flag.item() == int(not finite)
        if finite and kept:
            on.kernels.decode(message.rows, out, pieces)
            np.testing.assert_allclose((out + left).cpu().numpy(), x, rtol=3e-7)


@every_side
@pytest.mark.parametrize(("kind", "block"), dict(reversed(twin.PAIRS)).items())
def test_one_bad_number_raises_the_flag(on, kind, block):
    pieces = single(5000, 4, kind, block)
    for bad in (np.nan, np.inf, -np.inf):
        for position in (0, 100, 4999):
            x, flag = twin.sample(5000, 1), on.flag()
            x[position] = bad
            message = twin.MessageRows(4, pieces, 0, on.device)
            on.kernels.encode(torch.from_numpy(x).to(on.device), message.rows, flag, pieces)
            assert flag.item() == 1


@cuda_sides
@pytest.mark.parametrize("kind", [k for k in twin.KINDS if reference.CODE_BITS[k] in (8, 16)])
def test_every_code_decodes_as_the_law_says(on, kind):
    """Also those that no encoder writes: -128, NaN and infinity."""
    count = 1 << reference.CODE_BITS[kind]
    block = 0 if kind in reference.CASTS else 2048
    pieces = single(count, 1, kind, block)
    row = np.zeros(pieces.row_bytes, np.uint8)
    header = 4 * reference.scale_count(kind, count, block)
    row[:header].view(np.float32)[:] = 1.5
    codes = np.arange(count, dtype=np.uint8 if count == 256 else np.uint16).view(np.uint8)
    row[header : header + len(codes)] = codes
    out = torch.empty(count, device=on.device)
    on.kernels.decode(torch.from_numpy(row[None]).to(on.device), out, pieces)
    with np.errstate(invalid="ignore"):  # NaN among the codes
        twin.same(out, reference.decode_row(row, kind, count, count, block))


# ---------------------------------------------------------------- of one side alone


def drawn_halves(on, numel):
    """bfloat16 in the middle of a longer tensor, at an odd multiple of two bytes."""
    room = torch.full((numel + 2,), 7.0, dtype=torch.bfloat16, device=on.device)
    room[1:-1] = torch.from_numpy(on.sample(numel, 3)).bfloat16().to(on.device)
    return room, room[1:-1]


@every_side
@pytest.mark.parametrize("numel", [1, 65, 5003])
def test_bfloat16_in_and_out_is_float32_and_a_cast(on, numel):
    kernels, (_, x) = on.kernels, drawn_halves(on, numel)
    for kind in (*NARROW, reference.BITS | 5 << 8, reference.TOP | 5 << 8):
        pieces = single(numel, 1, kind, 64)
        received = [twin.MessageRows(1, pieces, 3, on.device).rows for _ in range(2)]
        left = torch.zeros(2, numel, device=on.device)
        flags = torch.zeros(2, dtype=torch.uint8, device=on.device)
        for i, given_ in enumerate((x, x.float())):
            owed = {"residual": left[i].fill_(0.25), "new_residual": left[i]}
            kernels.encode(given_, received[i], flags[i : i + 1], pieces, gain=1.5, **owed)
        assert torch.equal(*(row[:, : pieces.row_bytes] for row in received))
        assert torch.equal(*left)
        assert flags.tolist() == [0, 0]
        wide = torch.zeros(numel, device=on.device)
        (room, narrow), (more, added) = (drawn_halves(on, numel) for _ in range(2))
        rest, mean = drawn_halves(on, pieces.shard)
        on.turn().kernels.decode(received[0], wide, pieces)
        kernels.decode(received[0], narrow, pieces)
        kernels.decode(received[0], added, pieces, add=True)
        kernels.decode_mean(received[0], mean, pieces, 0)
        assert torch.equal(narrow, wide.bfloat16())
        assert torch.equal(added, (x.float() + wide).bfloat16())
        assert torch.equal(mean[:numel], narrow)
        for around in (room, more, rest):
            assert around[[0, -1]].tolist() == [7.0, 7.0]
    pieces = single(numel, 1, reference.FP32, 64)
    for value in (float("nan"), -float("nan"), float("inf"), -float("inf"), 3.3895e38):
        message, narrow, wide = (
            twin.MessageRows(1, pieces, 3, on.device).rows,
            x.clone(),
            torch.full((numel,), value, device=on.device),
        )
        wide.view(torch.int32)[wide.isnan()] |= 0x3FFFFF  # a NaN that rounding would overflow
        kernels.encode(wide, message, flags[:1], pieces)
        kernels.decode(message, narrow, pieces)
        assert torch.equal(narrow.isnan(), wide.isnan())
        assert torch.equal(narrow.nan_to_num(7.0), wide.bfloat16().nan_to_num(7.0))


def test_two_threads_change_no_bit():
    numel, rows = 3 << 19, 3
    x = torch.from_numpy(twin.sample(numel, 4))
    threads = torch.get_num_threads()
    for block in (0, 2048):
        pieces, results = single(numel, rows, 0, block), []
        for count in (1, 2):
            torch.set_num_threads(count)
            message = twin.MessageRows(rows, pieces, 1, "cpu").rows
            left, flag = torch.zeros(numel), torch.zeros(1, dtype=torch.uint8)
            cpu.encode(x, message, flag, pieces, residual=left, new_residual=left)
            out = torch.empty(numel)
            cpu.decode(message, out, pieces)
            results.append((message.clone(), left, out))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shift", [0, 1, 16])
def test_signs_past_the_caches_are_the_same(monkeypatch, shift):
    """A block of the result begins with a line (shift 0, 16), or does not."""
    numel = 3 * 5120 + 37
    pieces = cut([Piece(shift, numel, reference.SIGN_RMS, 512, 0)], 3)
    message, flag = twin.MessageRows(3, pieces, 0, "cpu").rows, torch.zeros(1, dtype=torch.uint8)
    cpu.encode(torch.from_numpy(twin.sample(shift + numel, 5)), message, flag, pieces)
    room = torch.zeros(shift + numel + 16)
    aligned = room[(-room.data_ptr() % 64) // 4 :][: shift + numel]
    plain = torch.zeros(shift + numel)
    cpu.decode(message, plain, pieces, gain=0.5)
    monkeypatch.setattr(cpu, "_LARGE", 0)
    cpu.decode(message, aligned, pieces, gain=0.5)
    assert torch.equal(aligned, plain)
    assert plain.count_nonzero() == numel


@pytest.mark.parametrize("tiles", [1, 1000, 1025, 20_000, 70_001])
@pytest.mark.parametrize("kind", [reference.SIGN_L1, reference.SIGN_RMS])
def test_the_tree_over_a_long_row(libraries, monkeypatch, kind, tiles):
    """finish_rows alone, over totals made up for rows too long to encode here; the tensors are
    never touched."""
    totals = np.random.default_rng(tiles).random(tiles).astype(np.float32)
    pieces = cut([Piece(0, tiles * cuda.TILE, kind, 0)], 1)
    x, message = torch.empty(tiles * cuda.TILE), torch.empty(1, pieces.row_bytes, dtype=torch.uint8)
    scale, flag = torch.empty(1), torch.zeros(1, dtype=torch.uint8)

    def execute(launch):
        if launch.kernel == "encode_measure":
            ctypes.memmove(int(launch.args[-1]), totals.ctypes.data, totals.nbytes)
        else:
            libraries.execute(launch)

    monkeypatch.setattr(cuda, "execute", execute)
    cuda.encode(x, message, flag, pieces, new_scale=scale)
    mean = reference.tree_sum(totals.astype(np.float64)) / np.float64(tiles * cuda.TILE)
    twin.same(scale, np.array([mean if kind == reference.SIGN_L1 else np.sqrt(mean)], np.float32))


# ---------------------------------------------------------------- the law


def test_golden_bytes():
    alternating = np.tile(np.float32([1, -1]), 8)
    assert reference.pack_signs(alternating).tolist() == [0xAA, 0xAA]
    assert reference.pack_signs(np.ones(8)).tolist() == [0xFF]
    # mean |c| = 4
    assert reference.encode_row(np.float32([7, -1] * 4), 0, 8, 0).tolist() == [0, 0, 128, 64, 0xAA]
    # rms = 5
    assert reference.encode_row(np.float32([7, -1] * 4), 1, 8, 0).tolist() == [0, 0, 160, 64, 0xAA]
    assert reference.encode_row(np.float32([127, -1, 0, 64]), reference.INT8, 8, 8).tolist() == (
        [0, 0, 128, 63] + [127, 255, 0, 64] + [0] * 4
    )
    assert reference.encode_row(np.float32([7, -7, 1, 0]), reference.INT4, 8, 8).tolist() == (
        [0, 0, 128, 63] + [0x79, 0x10, 0, 0]
    )
    assert reference.encode_row(np.float32([2, -2, 0, 2]), reference.TERNARY, 8, 8).tolist() == (
        [0, 0, 0, 64] + [0b01_11_00_01, 0]
    )
    assert (
        reference.encode_row(np.float32([1, -2.5]), reference.BF16, 8, 0).tolist()
        == [128, 63, 32, 192] + [0] * 12
    )
    assert (
        reference.encode_row(np.float32([1, 1e9]), reference.FP16, 8, 0).tolist()
        == [0, 60, 255, 123] + [0] * 12
    )
    assert reference.encode_row(np.float32([448, -1, 2**-9]), reference.FP8, 8, 8).tolist() == (
        [0, 0, 128, 63] + [0x7E, 0xB8, 0x01] + [0] * 5
    )


def test_every_byte_pattern_of_signs_survives():
    patterns = np.arange(256, dtype=np.uint8)
    assert np.array_equal(reference.pack_signs(reference.unpack_signs(patterns, 2048)), patterns)


def test_casts_equal_torch():
    x = twin.sample(4000, 5, spread=6.0)
    assert np.array_equal(
        reference.to_bf16(x),
        torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16),
    )
    assert np.array_equal(
        reference.to_fp16(x), torch.from_numpy(x).clamp(-65504, 65504).half().numpy()
    )
    fp8 = np.clip(x, -448, 448)
    want = torch.from_numpy(fp8).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(reference.to_fp8(fp8), want)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.isfinite(values)
    assert np.array_equal(
        reference.from_fp8(np.arange(256, dtype=np.uint8))[finite], values[finite]
    )


def test_ternary_is_unbiased():
    """The mean of K draws lies within 5 standard errors of the input: variance is s·|g| − g²."""
    x, kind = twin.sample(64, 3, spread=0.3), reference.TERNARY
    draws = np.stack(
        [
            reference.decode_row(
                reference.encode_row(x, kind, 64, 64, key=k * 7919), kind, 64, 64, 64
            )
            for k in range(4000)
        ]
    )
    error = np.sqrt(np.abs(x).max() * np.abs(x) - x**2) / np.sqrt(4000)
    assert (np.abs(draws.astype(np.float64).mean(0) - x) <= 5 * error + 1e-6).all()
