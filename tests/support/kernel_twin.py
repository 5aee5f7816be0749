"""The functions of a ``row_codec``, the CPU's or CUDA's, beside their meaning in ``reference``, bit
for bit.

Every check fills what must not be written with rubbish, puts rows behind an unaligned header, and
looks at both after.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from commpress.kernels import reference
from commpress.kernels.pieces import COLUMN, RESIDUAL, SHARD, WIDTH, Piece, Pieces, cut, width_of
from commpress.kernels.reference import (
    BITS,
    LOG,
    RANDOM,
    SHIFTED,
    TERNARY,
    TOP,
    UNBIASED,
    family_of,
    kind_of,
)

KINDS = sorted(reference.CODE_BITS)
BLOCKS = [0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
LENGTHS = [0, 1, 7, 8, 9, 31, 32, 33, 255, 257, 2047, 2048, 2049, 5000]
RUBBISH = 0xA5


def has(kind: int, block: int) -> bool:
    """One scale per row exists for the sign codec only, and casts do not look at the block."""
    return kind <= reference.SIGN_RMS or (
        block in (0, 256) if kind in reference.CASTS else block > 0
    )


PARAMETERS = {  # family: parameter and block
    TERNARY: [(25, 64), (10, 8), (25, 256), (25, 2048)],
    BITS: [
        (3, 512),
        (2, 8),
        (4, 64),
        (5, 2048),
        (6, 256),
        (7, 32),
        (8, 1024),
        (8 | SHIFTED, 512),
        (2 | SHIFTED, 16),
        (5 | SHIFTED, 2048),
    ],
    TOP: [(5, 64), (1, 8), (32, 256), (8, 512), (32, 2048), (2048, 2048)],
    RANDOM: [(4, 64), (8, 8), (32, 512), (32, 2048), (1, 256), (1024, 1024)],
    UNBIASED: [(8, 64), (2, 256), (8, 2048)],
    LOG: [(0, 8), (0, 64), (0, 256), (0, 2048)],
}
PAIRS = [(kind, block) for kind in KINDS for block in BLOCKS if has(kind, block)]
PAIRS += [
    (kind_of(family, parameter), block)
    for family, many in PARAMETERS.items()
    for parameter, block in many
]
FAMILIES = sorted({family_of(kind) for kind, _ in PAIRS})


def sample(numel: int, seed: int, spread: float = 1.0) -> np.ndarray:
    """Normal numbers whose exponents vary by ``spread`` (30: they over- and underflow), with zeros
    of both signs."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = (rng.standard_normal(numel) * np.exp(rng.standard_normal(numel) * spread)).astype(
            np.float32
        )
    x[rng.random(numel) < 0.05] = 0.0
    x[rng.random(numel) < 0.05] = -0.0
    return x


def same(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal bit for bit; of a NaN only that it is one, because processors make different ones."""
    numbers = got.cpu().numpy()
    assert numbers.dtype == want.dtype == np.float32
    nan = np.isnan(numbers) & np.isnan(want)
    np.testing.assert_array_equal(numbers.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def floats(values: np.ndarray, device: str, shift: int = 1) -> torch.Tensor:
    """``values`` on the device, 4 · shift bytes behind an aligned address."""
    buffer = torch.empty(len(values) + shift, device=device)
    buffer[shift:] = torch.from_numpy(values)
    return buffer[shift:]


class Side(NamedTuple):
    """Kernels and the device of the tensors that they are given."""

    kernels: Any
    device: str
    shim: Any = None  # runs threads in one order or the other
    # as CUDA, to which zero has a sign; the CPU's may lose it, and writes behind a short row
    strict: bool = True

    def turn(self) -> "Side":
        """Threads run in the other order from here on."""
        if self.shim is not None:
            self.shim.reverse = not self.shim.reverse
        return self

    def sample(self, numel: int, seed: int) -> np.ndarray:
        found = sample(numel, seed)
        return found if self.strict else found + np.float32(0)  # without zeros below zero

    def same(self, got: torch.Tensor, want: np.ndarray) -> None:
        if self.strict:
            same(got, want)
        else:
            np.testing.assert_array_equal(got.numpy(), want)

    def flag(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device=self.device)


class MessageRows:
    """Rows of bytes with a header before each, all rubbish; ``check`` compares rows and what lies
    between them."""

    def __init__(self, rows: int, pieces: Pieces, offset: int, device: str) -> None:
        self.all = torch.full(
            (rows, offset + pieces.row_bytes), RUBBISH, dtype=torch.uint8, device=device
        )
        self.rows = self.all[:, offset:]
        self.offset = offset

    def fill(self, rows: np.ndarray) -> "MessageRows":
        self.rows[:, : rows.shape[1]] = torch.from_numpy(rows)
        return self

    def check(self, row: int, want: np.ndarray, scales: int) -> None:
        """Row ``row`` of one piece, of which the first 4 · scales bytes are float32 that computing
        may have made NaN."""
        line = self.all[row].cpu()
        got = line[self.offset : self.offset + len(want)]
        same(got[: 4 * scales].clone().view(torch.float32), want[: 4 * scales].view(np.float32))
        np.testing.assert_array_equal(got[4 * scales :].numpy(), want[4 * scales :])
        assert (line[: self.offset] == RUBBISH).all()
        assert (line[self.offset + len(want) :] == RUBBISH).all()


def expected(
    c: np.ndarray, rows: int, kind: int, block: int, key: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """The law: all rows of one piece, those of padding included, and the residual."""
    width, message, left = width_of(len(c), rows), [], np.zeros_like(c)
    with np.errstate(all="ignore"):
        for r in range(rows):
            part = c[r * width : (r + 1) * width]
            message.append(reference.encode_row(part, kind, width, block, first=r * width, key=key))
            left[r * width : (r + 1) * width] = part - reference.decode_row(
                message[-1], kind, len(part), width, block
            )
    return message, left


def scales_of(kind: int, width: int, block: int) -> int:
    return 0 if family_of(kind) >= BITS else reference.scale_count(kind, width, block)


def finite(c: np.ndarray, rows: list[np.ndarray], kind: int, width: int, block: int) -> bool:
    """Every scale is a number; every element where there are no scales; with headers also what they
    decode to."""
    if kind in reference.CASTS:
        return bool(np.isfinite(c).all())
    if family_of(kind) < BITS:
        scales = [
            row[: 4 * reference.scale_count(kind, width, block)].view(np.float32) for row in rows
        ]
        return bool(np.isfinite(scales).all())
    with np.errstate(all="ignore"):
        decoded = [reference.decode_row(row, kind, width, width, block) for row in rows]
    return bool(np.isfinite(c).all() and np.isfinite(np.concatenate(decoded)[: len(c)]).all())


def check_rows(
    message: MessageRows, want: list[np.ndarray], kind: int, width: int, block: int
) -> None:
    for r, row in enumerate(want):
        message.check(r, row, scales_of(kind, width, block))


def check_round(on, numel, rows, kind, block, seed, *, offset=3, gain=1.0, spread=1.0, x=None):
    """encode without, with and in place of a residual; then decode."""
    width, key = width_of(numel, rows), seed % 2**32
    x = sample(numel, seed, spread) if x is None else x
    residual = sample(numel, seed + 1, spread)
    pieces = cut([Piece(0, numel, kind, block, hash=seed & 0xFF)], rows)
    key_of_piece = key ^ (seed & 0xFF)
    with np.errstate(all="ignore"):
        scaled, compensated = x * np.float32(gain), reference.compensate(x, residual, gain)
    on_device = floats(x, on.device)
    for c, old, in_place in [
        (scaled, None, False),
        (compensated, residual, False),
        (compensated, residual, True),
    ]:
        want, want_left = expected(c, rows, kind, block, key_of_piece)
        message, flag = (
            MessageRows(rows, pieces, offset, on.device),
            on.flag(),
        )
        before = None if old is None else floats(old, on.device)
        left = before if in_place else torch.full((numel,), 7.0, device=on.device)
        on.kernels.encode(
            on_device,
            message.rows,
            flag,
            pieces,
            gain=gain,
            key=key,
            residual=before,
            new_residual=left,
        )
        check_rows(message, want, kind, width, block)
        on.same(left, want_left)
        assert flag.item() == int(not finite(c, want, kind, width, block))
    out = torch.full((numel + 2,), 7.0, device=on.device)
    on.kernels.decode(message.rows, out[1:-1], pieces, gain=0.3)
    with np.errstate(all="ignore"):
        parts = [
            reference.decode_row(
                row, kind, min(max(numel - r * width, 0), width), width, block, 0.3
            )
            for r, row in enumerate(want)
        ]
    on.same(out[1:-1], np.concatenate(parts))
    on.kernels.decode(message.rows, out[1:-1], pieces, gain=0.3, add=True)
    with np.errstate(all="ignore"):
        on.same(out[1:-1], np.concatenate(parts) + np.concatenate(parts))
    assert out[0] == out[-1] == 7


def check_serve(on, numel, senders, kind, block, seed, *, offset=5):
    """decode_mean and serve for every rank, with and without a residual."""
    width = width_of(numel, senders)
    pieces = cut([Piece(0, numel, kind, block, hash=9)], senders)
    for rank in range(senders):
        mine = min(width, max(numel - rank * width, 0))
        rows = np.stack(
            [
                reference.encode_row(
                    on.sample(mine, seed + p), kind, width, block, first=rank * width, key=p
                )
                for p in range(senders)
            ]
        )
        received = MessageRows(senders, pieces, offset, on.device).fill(rows)
        mean = reference.decode_mean(rows, kind, mine, width, block)
        out = torch.full((width,), 7.0, device=on.device)
        on.kernels.decode_mean(received.rows, out, pieces, rank)
        on.same(out[:mine], mean)
        assert (out[mine:] == 7).all()
        residual = on.sample(width, seed + 99)
        for old, in_place in [(None, False), (residual, False), (residual, True)]:
            c = mean if old is None else mean + old[:mine]
            want = reference.encode_row(c, kind, width, block, first=rank * width, key=11 ^ 9)
            message, flag = (
                MessageRows(1, pieces, offset, on.device),
                on.flag(),
            )
            before = None if old is None else floats(old, on.device)
            left = before if in_place else torch.full((width,), 7.0, device=on.device)
            on.kernels.serve(
                received.rows,
                message.rows,
                flag,
                pieces,
                rank,
                key=11,
                residual=before,
                new_residual=left,
            )
            message.check(0, want, scales_of(kind, width, block))
            on.same(left[:mine], c - reference.decode_row(want, kind, mine, width, block))
            assert in_place or not on.strict or (left[mine:] == 7).all()
            assert flag.item() == 0
        message = MessageRows(1, pieces, offset, on.device)
        on.kernels.serve(received.rows, message.rows, flag, pieces, rank, divisor=2.25)
        c = reference.decode_mean(rows, kind, mine, width, block, 2.25)
        want = reference.encode_row(c, kind, width, block, first=rank * width, key=9)
        message.check(0, want, scales_of(kind, width, block))


def check_lazy(on, kind, numel, rows):
    """Three steps with the compensated value kept instead of the residual; settled, it is the
    residual."""
    pieces, width = cut([Piece(0, numel, kind, 0)], rows), width_of(numel, rows)
    plain, flag = np.zeros(numel, np.float32), on.flag()
    value, scale = floats(plain, on.device), torch.zeros(rows, device=on.device)
    for step in range(3):
        x = sample(numel, step)
        c = reference.compensate(x, plain)
        want, plain = expected(c, rows, kind, 0, 0)
        message = MessageRows(rows, pieces, 2, on.device)
        on.kernels.encode(
            floats(x, on.device),
            message.rows,
            flag,
            pieces,
            residual=value,
            residual_scale=scale,
            new_residual=value,
            new_scale=scale,
        )
        check_rows(message, want, kind, width, 0)
        on.same(value, c)
        on.same(scale, np.array([row[:4].view(np.float32)[0] for row in want]))
    on.kernels.settle(value, scale, pieces)
    on.same(value, plain)
    assert flag.item() == 0


def check_lazy_serve(on, kind, numel, senders):
    pieces, width = cut([Piece(0, numel, kind, 0)], senders), width_of(numel, senders)
    plain, flag = np.zeros(width, np.float32), on.flag()
    value, scale, rank = floats(plain, on.device), torch.zeros(1, device=on.device), 0
    for step in range(2):
        rows = np.stack(
            [
                reference.encode_row(sample(width, 7 * step + p), kind, width, 0)
                for p in range(senders)
            ]
        )
        c = reference.decode_mean(rows, kind, width, width, 0) + plain
        want = reference.encode_row(c, kind, width, 0)
        plain = c - reference.decode_row(want, kind, width, width, 0)
        message = MessageRows(1, pieces, 1, on.device)
        on.kernels.serve(
            MessageRows(senders, pieces, 6, on.device).fill(rows).rows,
            message.rows,
            flag,
            pieces,
            rank,
            residual=value,
            residual_scale=scale,
            new_residual=value,
            new_scale=scale,
        )
        message.check(0, want, 1)
        on.same(value, c)
    on.kernels.settle(value, scale, pieces, shard=True)
    on.same(value, plain)


def check_pieces(on, repeat: int = 1):
    """A table of many codecs and tails, out of order and with gaps, gives the bytes of its pieces
    one by one."""
    kinds = [
        (0, 2048),
        (0, 0),
        (1, 64),
        (2, 256),
        (3, 8),
        (1, 0),
        (4, 1024),
        (5, 2048),
        (6, 0),
        (0, 0),
        (7, 0),
        (8, 0),
    ]
    lengths = [5000, 9001, 77, 1000, 13, 1, 4096, 2049, 333, 2050, 8, 100]
    more = [(kind, block) for kind, block in PAIRS if kind > 255][::2]
    kinds, lengths, rows = (
        (kinds + more) * repeat,
        (lengths + [601 * i % 3000 for i in range(len(more))]) * repeat,
        3,
    )
    sources = 10 + sum(lengths) + 5 * len(lengths) - np.cumsum([n + 5 for n in lengths])
    items = [
        Piece(int(s), n, *k, hash=i, feedback=i % 5 != 3)
        for i, (s, n, k) in enumerate(zip(sources, lengths, kinds, strict=True))
    ]
    pieces, flag = cut(items, rows), on.flag()
    x, residual = sample(int(max(sources + lengths)) + 3, 1), sample(pieces.residual_numel, 2)
    stale = (
        np.where([k == (0, 0) or k == (1, 0) for k in kinds], 0.25, 0)
        .astype(np.float32)
        .repeat(rows)
    )
    value, scale = floats(residual, on.device), torch.full((len(stale),), 7.0, device=on.device)
    message, left = (
        MessageRows(rows, pieces, 64, on.device),
        torch.full((pieces.residual_numel,), 7.0, device=on.device),
    )
    on.kernels.encode(
        floats(x, on.device),
        message.rows,
        flag,
        pieces,
        key=5,
        residual=value,
        residual_scale=floats(stale, on.device),
        new_residual=left,
        new_scale=scale,
    )
    out = torch.full((len(x),), 7.0, device=on.device)
    on.kernels.decode(message.rows, out, pieces)
    touched = np.zeros(len(x), bool)
    for i, (item, line) in enumerate(zip(items, pieces.table, strict=True)):
        width, lazy = int(line[WIDTH]), item.block == 0 and item.kind <= reference.SIGN_RMS
        span = slice(item.source, item.source + item.numel)
        kept = slice(int(line[RESIDUAL]), int(line[RESIDUAL]) + item.numel)
        old = residual[kept] if item.feedback else None
        if lazy and item.feedback:
            old = old - np.where(old >= 0, np.float32(0.25), np.float32(-0.25))
        c = x[span] if old is None else reference.compensate(x[span], old)
        want, want_left = expected(c, rows, item.kind, item.block, 5 ^ i)
        columns = slice(int(line[COLUMN]), int(line[COLUMN]) + len(want[0]))
        np.testing.assert_array_equal(message.rows[:, columns].cpu().numpy(), np.stack(want))
        if item.feedback:
            on.same(left[kept], c if lazy else want_left)
        scales = [row[:4].view(np.float32)[0] if lazy else np.float32(0) for row in want]
        on.same(scale[i * rows : (i + 1) * rows], np.array(scales))
        parts = [
            reference.decode_row(
                row, item.kind, min(max(item.numel - r * width, 0), width), width, item.block
            )
            for r, row in enumerate(want)
        ]
        on.same(out[span], np.concatenate(parts))
        touched[span] = True
    assert (out.cpu().numpy()[~touched] == 7).all()
    check_pieces_served(on, message, pieces, items)


def check_pieces_served(on, message: MessageRows, pieces: Pieces, items: list[Piece]) -> None:
    rank, flag = 1, on.flag()
    reply, left = (
        MessageRows(1, pieces, 1, on.device),
        torch.full((pieces.shard,), 7.0, device=on.device),
    )
    mean = torch.full((pieces.shard,), 7.0, device=on.device)
    on.kernels.decode_mean(message.rows, mean, pieces, rank)
    on.kernels.serve(message.rows, reply.rows, flag, pieces, rank, key=6, new_residual=left)
    sent = message.rows.cpu().numpy()
    for item, line in zip(items, pieces.table, strict=True):
        width, column, shard = int(line[WIDTH]), int(line[COLUMN]), int(line[SHARD])
        mine = min(width, max(item.numel - rank * width, 0))
        rows = sent[:, column : column + reference.row_bytes(item.kind, width, item.block)]
        c = reference.decode_mean(rows, item.kind, mine, width, item.block)
        want = reference.encode_row(
            c, item.kind, width, item.block, first=rank * width, key=6 ^ item.hash
        )
        np.testing.assert_array_equal(
            reply.rows[0, column : column + len(want)].cpu().numpy(), want
        )
        on.same(mean[shard : shard + mine], c)
        written = mine if item.feedback else 0
        left_of_row = c - reference.decode_row(want, item.kind, mine, width, item.block)
        on.same(left[shard : shard + written], left_of_row[:written])
        assert not on.strict or (left[shard + written : shard + width] == 7).all()
