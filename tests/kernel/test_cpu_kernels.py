"""The fast CPU path gives the bytes of the law, for every kind, block, tail and alignment."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import COLUMN, SHARD, WIDTH, Piece, cut, width_of

KINDS = [
    *sorted(reference.CODE_BITS),
    reference.kind_of(reference.TERNARY, 25),
    *(reference.kind_of(reference.BITS, bits) for bits in (2, 3, 5, 8)),
    reference.kind_of(reference.TOP, 3),
    reference.kind_of(reference.RANDOM, 8),
    reference.kind_of(reference.UNBIASED, 4),
    reference.LOG,
]
LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 2047, 2048, 2049, 5003]


def single(numel: int, rows: int, kind: int, block: int, hash: int = 0):
    """A table of one piece that fills the whole buffer."""
    return cut([Piece(0, numel, kind, block, hash)], rows)


def skip_row_scale(kind: int, block: int) -> None:
    if block == 0 and kind > reference.SIGN_RMS and kind not in reference.CASTS:
        pytest.skip("one scale per row exists for the sign codec only")


def framed(rows: int, row_bytes: int, offset: int) -> torch.Tensor:
    """Rows inside longer, unaligned rows, as they lie behind their message headers; filled with
    rubbish."""
    return torch.full((rows, row_bytes + offset), 0xA5, dtype=torch.uint8)[:, offset:]


def sample(numel: int, seed: int, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(numel) * np.exp(rng.standard_normal(numel) * spread)).astype(
        np.float32
    )
    x[rng.random(numel) < 0.05] = 0.0
    return x


@pytest.mark.parametrize("numel", [1, 65, 5003])
def test_bfloat16_in_and_out_is_float32_and_a_cast(numel):
    x = torch.from_numpy(sample(numel, 3, 4.0)).bfloat16()
    for kind in (reference.FP32, reference.BF16, reference.INT8, reference.SIGN_L1):
        pieces = single(numel, 1, kind, 64)
        received, flags = (
            [framed(1, pieces.row_bytes, 3) for _ in range(2)],
            torch.zeros(2, dtype=torch.uint8),
        )
        for i, given_ in enumerate((x, x.float())):
            cpu.encode(given_, received[i], flags[i : i + 1], pieces)
        assert torch.equal(*received)
        assert flags.tolist() == [0, 0]
        wide, narrow, added, mean = torch.zeros(numel), x.clone(), x.clone(), x.clone()
        cpu.decode(received[0], wide, pieces)
        cpu.decode(received[0], narrow, pieces)
        cpu.decode(received[0], added, pieces, add=True)
        cpu.decode_mean(received[0], mean, pieces, 0)
        assert torch.equal(narrow, wide.bfloat16())
        assert torch.equal(added, (x.float() + wide).bfloat16())
        assert torch.equal(mean, narrow)
    pieces = single(numel, 1, reference.FP32, 64)
    for value in (float("nan"), float("inf"), -float("inf"), 3.3895e38):
        message, narrow, wide = (
            framed(1, pieces.row_bytes, 3),
            x.clone(),
            torch.full((numel,), value),
        )
        cpu.encode(wide, message, flags[:1], pieces)
        cpu.decode(message, narrow, pieces)
        assert torch.equal(narrow.isnan(), wide.isnan())
        assert torch.equal(narrow.nan_to_num(7.0), wide.bfloat16().nan_to_num(7.0))


def check_encode(numel, rows, kind, block, seed, *, offset=3, gain=1.0, spread=1.0):
    width = width_of(numel, rows)
    x, residual = sample(numel, seed, spread), sample(numel, seed + 1, spread)
    want_rows, want_left = (
        reference.encode_with_residual(x, residual, kind, width, block, gain=gain, key=seed)
        if numel
        else (np.zeros((0, 0)), residual)
    )
    pieces = single(numel, rows, kind, block)
    size = reference.row_bytes(kind, width, block)
    message = framed(rows, pieces.row_bytes, offset)
    left, flag = torch.from_numpy(residual.copy()), torch.zeros(1, dtype=torch.uint8)
    out_of_place = torch.full((numel,), 7.0)
    arguments = dict(gain=gain, key=seed)
    cpu.encode(
        torch.from_numpy(x),
        message,
        flag,
        pieces,
        residual=left,
        new_residual=out_of_place,
        **arguments,
    )
    for r in range(rows):
        want = want_rows[r] if r < len(want_rows) else np.zeros(size, np.uint8)
        np.testing.assert_array_equal(message[r, :size].numpy(), want)
    np.testing.assert_array_equal(out_of_place.numpy(), want_left)
    assert flag.item() == 0
    cpu.encode(
        torch.from_numpy(x), message, flag, pieces, residual=left, new_residual=left, **arguments
    )
    np.testing.assert_array_equal(left.numpy(), want_left)
    out = torch.empty(numel)
    cpu.decode(message, out, pieces, gain=0.5)
    want = [
        reference.decode_row(want_rows[r], kind, min(width, numel - r * width), width, block, 0.5)
        for r in range(len(want_rows))
    ]
    np.testing.assert_array_equal(out.numpy(), np.concatenate(want) if want else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 8, 256, 2048])
def test_encode_with_residual_gives_the_bytes_of_the_law(kind, block):
    skip_row_scale(kind, block)
    for i, numel in enumerate(LENGTHS):
        rows = (1, 3, 4)[(i + kind) % 3]
        check_encode(numel, rows, kind, block, seed=i * 7 + rows)


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 9000),
    rows=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([8, 16, 64, 512, 1024, 2048]),
    seed=st.integers(0, 2**31),
    offset=st.integers(0, 40),
    gain=st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-16]),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
)
def test_encode_on_any_geometry(numel, rows, kind, block, seed, offset, gain, spread):
    check_encode(numel, rows, kind, block, seed, offset=offset, gain=gain, spread=spread)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 64, 2048])
@pytest.mark.parametrize("senders", [1, 2, 3, 5])
def test_mean_and_serve_give_the_bytes_of_the_law(kind, block, senders):
    skip_row_scale(kind, block)
    for numel in (1, 64, 1000, 5000):
        pieces, width = single(numel, senders, kind, block), width_of(numel, senders)
        size, rank = reference.row_bytes(kind, width, block), senders - 1
        mine = min(width, max(numel - rank * width, 0))
        rows = np.stack(
            [
                reference.encode_row(sample(mine, 10 * p), kind, width, block, key=p)
                for p in range(senders)
            ]
        )
        received = framed(senders, pieces.row_bytes, 5)
        received[:, :size] = torch.from_numpy(rows)
        want_mean = reference.decode_mean(rows, kind, mine, width, block)
        out = torch.empty(width)
        cpu.decode_mean(received, out, pieces, rank)
        np.testing.assert_array_equal(out[:mine].numpy(), want_mean)

        residual = sample(width, 99)
        c = want_mean + residual[:mine]
        want = reference.encode_row(c, kind, width, block, first=rank * width, key=11)
        left = torch.empty(width)
        message, flag = framed(1, pieces.row_bytes, 1), torch.zeros(1, dtype=torch.uint8)
        cpu.serve(
            received,
            message,
            flag,
            pieces,
            rank,
            key=11,
            residual=torch.from_numpy(residual),
            new_residual=left,
        )
        np.testing.assert_array_equal(message[0, :size].numpy(), want)
        np.testing.assert_array_equal(
            left[:mine].numpy(), c - reference.decode_row(want, kind, mine, width, block)
        )

        cpu.serve(received, message, flag, pieces, rank, divisor=2.25)
        c = reference.decode_mean(rows, kind, mine, width, block, 2.25)
        want = reference.encode_row(c, kind, width, block, first=rank * width)
        np.testing.assert_array_equal(message[0, :size].numpy(), want)


@pytest.mark.parametrize("kind", [reference.SIGN_L1, reference.SIGN_RMS])
def test_lazy_residual_equals_the_plain_one(kind):
    """Three steps with the compensated value kept instead of the residual: same bytes, same
    residual once settled."""
    numel, rows = 10_001, 4
    pieces = single(numel, rows, kind, 0)
    message = framed(rows, pieces.row_bytes, 2)
    lazy_message, flag = message.clone(), torch.zeros(1, dtype=torch.uint8)
    plain, value, scale = torch.zeros(numel), torch.zeros(numel), torch.zeros(rows)
    for step in range(3):
        x = torch.from_numpy(sample(numel, step))
        cpu.encode(x, message, flag, pieces, residual=plain, new_residual=plain)
        new_value, new_scale = torch.empty(numel), torch.empty(rows)
        cpu.encode(
            x,
            lazy_message,
            flag,
            pieces,
            residual=value,
            residual_scale=scale,
            new_residual=new_value,
            new_scale=new_scale,
        )
        value, scale = new_value, new_scale
        assert torch.equal(message, lazy_message)
        assert not torch.equal(value, plain)
    cpu.settle(value, scale, pieces)
    assert torch.equal(value, plain)


def test_pieces_side_by_side_are_the_pieces_one_by_one():
    """One call over a table of nine codecs and tails gives what nine calls give, in any order of
    the table."""
    kinds = [(0, 2048), (0, 0), (1, 64), (2, 256), (3, 8), (4, 1024), (5, 2048), (6, 0), (8, 0)]
    lengths, rows = [5000, 9001, 77, 1000, 13, 4096, 2049, 333, 100], 3
    sources = np.cumsum([10, *lengths[:-1]])
    x, residual = torch.from_numpy(sample(30_000, 1)), torch.from_numpy(sample(sum(lengths), 2))
    items = [
        Piece(int(s), n, k, b, hash=i)
        for i, (s, n, (k, b)) in enumerate(zip(sources, lengths, kinds, strict=True))
    ]
    pieces, flag = cut(items, rows), torch.zeros(1, dtype=torch.uint8)
    message, left = framed(rows, pieces.row_bytes, 64), torch.empty(pieces.residual_numel)
    cpu.encode(x, message, flag, pieces, key=5, residual=residual, new_residual=left)
    out = torch.full((30_000,), -1.0)
    cpu.decode(message, out, pieces)
    reply, shard_left = framed(1, pieces.row_bytes, 0), torch.zeros(pieces.shard)
    cpu.serve(message, reply, flag, pieces, 0, key=6, new_residual=shard_left)
    kept = 0
    for i, item in enumerate(items):
        alone = cut([item._replace(source=0)], rows)
        column, width, shard = (int(pieces.table[i, c]) for c in (COLUMN, WIDTH, SHARD))
        size = reference.row_bytes(item.kind, width, item.block)
        one, one_left = framed(rows, alone.row_bytes, 0), torch.empty(item.numel)
        part = x[item.source : item.source + item.numel].contiguous()
        before = residual[kept : kept + item.numel].contiguous()
        cpu.encode(part, one, flag, alone, key=5, residual=before, new_residual=one_left)
        assert torch.equal(one[:, :size], message[:, column : column + size])
        assert torch.equal(one_left, left[kept : kept + item.numel])
        decoded = torch.empty(item.numel)
        cpu.decode(one, decoded, alone)
        assert torch.equal(decoded, out[item.source : item.source + item.numel])
        one_reply, one_shard = framed(1, alone.row_bytes, 0), torch.zeros(width)
        cpu.serve(one, one_reply, flag, alone, 0, key=6, new_residual=one_shard)
        assert torch.equal(one_reply[:, :size], reply[:, column : column + size])
        assert torch.equal(one_shard, shard_left[shard : shard + width])
        kept += item.numel
    assert flag.item() == 0
    assert (out[:10] == -1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_raises_the_flag(kind, bad):
    for position in (0, 100, 4999):
        x = sample(5000, 1)
        x[position] = bad
        pieces = single(5000, 4, kind, 256)
        message, flag = framed(4, pieces.row_bytes, 0), torch.zeros(1, dtype=torch.uint8)
        cpu.encode(torch.from_numpy(x), message, flag, pieces)
        assert flag.item() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "x",
    [
        np.zeros(40),
        np.full(40, 1e-42),
        np.eye(1, 40)[0] * 3,
        np.full(40, 3e38) * np.tile([1, -1], 20),
        -np.zeros(40),
    ],
    ids=["zeros", "denormal", "one-hot", "huge", "minus-zero"],
)
def test_extreme_values_lose_nothing(kind, x):
    """Encoded plus residual is the input again, even where a block is sent as zero."""
    if kind == reference.SIGN_RMS and x.max() > 1e19:
        pytest.skip("squares overflow: such a buffer reads as not finite")
    if reference.family_of(kind) in (reference.BITS, reference.UNBIASED) and x.max() > 1e37:
        pytest.skip("what it computes overflows: such a buffer reads as not finite")
    if kind == reference.SIGN_L1 and x.max() > 1e37:
        x = x / 40
    x = x.astype(np.float32)
    pieces = single(40, 1, kind, 64)
    rows, left = reference.encode_with_residual(x, np.zeros_like(x), kind, 40, 64)
    message, out = framed(1, pieces.row_bytes, 0), torch.empty(40)
    message[:, : rows.shape[1]] = torch.from_numpy(rows)
    cpu.decode(message, out, pieces)
    np.testing.assert_allclose(out.numpy() + left, x, rtol=3e-7)
    assert np.isfinite(left).all()


def test_two_threads_change_no_bit():
    numel, rows = 3 << 19, 3
    x = torch.from_numpy(sample(numel, 4))
    threads = torch.get_num_threads()
    for block in (0, 2048):
        pieces, results = single(numel, rows, 0, block), []
        for count in (1, 2):
            torch.set_num_threads(count)
            message = framed(rows, pieces.row_bytes, 1)
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
    message, flag = framed(3, pieces.row_bytes, 0), torch.zeros(1, dtype=torch.uint8)
    cpu.encode(torch.from_numpy(sample(shift + numel, 5)), message, flag, pieces)
    room = torch.zeros(shift + numel + 16)
    aligned = room[(-room.data_ptr() % 64) // 4 :][: shift + numel]
    plain = torch.zeros(shift + numel)
    cpu.decode(message, plain, pieces, gain=0.5)
    monkeypatch.setattr(cpu, "_LARGE", 0)
    cpu.decode(message, aligned, pieces, gain=0.5)
    assert torch.equal(aligned, plain)
    assert plain.count_nonzero() == numel


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
    x = sample(4000, 5, spread=6.0)
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
    x, kind = sample(64, 3, spread=0.3), reference.TERNARY
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
