"""Lossless all-gather, all-to-all and broadcast: rows of bfloat16 or float32 as codes of
``kernels.exact_format``.

The length of a code depends on its numbers. A message is therefore cut in two: ``first`` bytes of
the code, a length on which all ranks agree, and, if any rank's code is longer, the rest of the
longest. A code begins with the lengths of its blocks, so its first bytes tell whether more follow.
At worst a row is 5 bytes per block longer than its numbers.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Unpack

import numpy as np
import torch

from commpress.collectives.all_to_all.all_to_all import AllToAllCall, all_to_all, splits_of
from commpress.collectives.allreduce import ALONGSIDE, Call, Workspace, exchange
from commpress.collectives.buckets import MESSAGE
from commpress.collectives.frame import ALL_GATHER, HEADER, Frame
from commpress.collectives.transports.transport import Transport
from commpress.errors import Corrupted, Damaged, Mismatch
from commpress.kernels import exact_format
from commpress.kernels.cpu import exact
from commpress.work import Steps, overlapped

BLOCK = 1 << 17  # numbers that share a window of exponents
EXPECTED = 16  # expect one escaped exponent in 16 numbers until a message has been measured
STEPS = 64  # lengths of ``first`` between nothing and the numbers themselves: buffers are kept
KINDS = {torch.bfloat16: exact_format.BFLOAT16, torch.float32: exact_format.FLOAT32}
_LENGTH = np.dtype("<u4")


def codes_exactly(tensor: torch.Tensor) -> bool:
    """True if the codec knows this tensor's dtype and device."""
    return tensor.dtype in KINDS and tensor.device.type == "cpu"


def encode(values: torch.Tensor) -> np.ndarray:
    """Encode a flat tensor: the lengths of its blocks' codes, then these codes."""
    kind, numbers = KINDS[values.dtype], _patterns(values)
    codes = [
        exact.encode(None, numbers[i : i + BLOCK], kind) for i in range(0, len(numbers), BLOCK)
    ]
    lengths = np.array([*map(len, codes)], _LENGTH)
    return np.frombuffer(bytearray().join([lengths.tobytes(), *codes]), np.uint8)


def decode(code: np.ndarray, out: torch.Tensor) -> None:
    """Decode ``code`` into ``out``, a flat tensor. Raises if it is no code of this length."""
    kind, numbers = KINDS[out.dtype], _patterns(out)
    at = _table(len(numbers))
    for i, length in enumerate(_lengths(code, len(numbers))):
        block = numbers[i * BLOCK : (i + 1) * BLOCK]
        exact.decode(code[at : at + length].data, block, kind)
        at += length


def longest_code(numel: int, dtype: torch.dtype) -> int:
    """Return the greatest length of a code in bytes."""
    return dtype.itemsize * numel + -(-numel // BLOCK) + _table(numel)


class ExactMessage:
    """Elements ``start`` to ``stop`` of every rank's row; the ``first`` bytes of its code travel in
    the first collective."""

    def __init__(self, start: int, stop: int, dtype: torch.dtype) -> None:
        self.part, self.numel, self.dtype = slice(start, stop), (numel := stop - start), dtype
        self._step = 64 * -(-dtype.itemsize * numel // (64 * STEPS))
        blocks = [min(BLOCK, numel - i) for i in range(0, numel, BLOCK)]
        codes = sum(exact_format.exponent_bytes(block, KINDS[dtype]) for block in blocks)
        self.expect(_table(numel) + codes + numel // EXPECTED)

    def expect(self, length: int) -> None:
        """Set ``first`` for codes a little longer than ``length``, the same on every rank."""
        self.first = self._step * -(-(length + length // 256) // self._step)

    @property
    def size(self) -> int:
        """Bytes of a row in the first collective."""
        return HEADER + self.first

    def received(self, ranks: int) -> tuple[int, int]:
        """Return the number of elements of all rows; each is compressed."""
        return ranks * self.numel, 0


class Received(NamedTuple):
    """One received message: a row of every rank."""

    head: torch.Tensor
    rest: torch.Tensor | None

    def code(self, rank: int) -> np.ndarray:
        first = self.head[rank, HEADER:].numpy()
        return first if self.rest is None else np.append(first, self.rest[rank, HEADER:].numpy())


def exact_messages(numel: int, ranks: int, dtype: torch.dtype) -> list[ExactMessage]:
    """Cut rows of ``numel`` elements into messages of about ``MESSAGE`` elements."""
    length = BLOCK * max(1, MESSAGE // ranks // BLOCK)
    return [
        ExactMessage(start, min(start + length, numel), dtype) for start in range(0, numel, length)
    ]


def gather_exactly(
    row: torch.Tensor,
    out: torch.Tensor,
    plan: Sequence[ExactMessage],
    call: Call,
    *,
    learn: bool = False,
    kept: list[Received] | None = None,
) -> Steps[None]:
    """Gather the rows of all ranks into ``out``, bit for bit; ``row`` may be this rank's part of
    it.

    Uses two sequence numbers per message. ``learn``: set ``first`` from the lengths of this call;
    calls with such a plan must not overlap. Received messages are appended to ``kept`` for
    ``decode_rows`` and belong to the caller.
    """
    received = yield from overlapped(
        (_gather(row, out, message, call.after(2 * i), learn) for i, message in enumerate(plan)),
        limit=ALONGSIDE,
    )
    if kept is not None:
        kept[:] = received
    else:
        give_back(received, call.workspace)


def decode_rows(
    received: Sequence[Received],
    row: torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Sequence[ExactMessage],
    rank: int,
    workspace: Workspace,
) -> None:
    """Decode messages that ``gather_exactly`` kept into ``out`` again."""
    start = perf_counter()
    for message, each in zip(plan, received, strict=True):
        _decode(each, row, out, message, rank)
    workspace.decoded(start)


def give_back(received: Sequence[Received], workspace: Workspace) -> None:
    workspace.give_rows(*(each.head for each in received))


def exact_all_to_all(
    out: torch.Tensor, inp: torch.Tensor, **call: Unpack[AllToAllCall]
) -> Steps[None]:
    """Run ``all_to_all`` with each block as a code: first the codes' lengths, then the codes. Uses
    two sequence numbers."""
    transport, sequence = call["transport"], call.get("sequence", 0)
    outs, ins = splits_of(out, inp, call.get("out_splits"), call.get("in_splits"), transport)
    blocks, answers, rank = inp.split(ins), out.split(outs), transport.rank
    answers[rank].copy_(blocks[rank])
    codes = [b"" if r == rank else encode(each.reshape(-1)) for r, each in enumerate(blocks)]
    lengths = torch.tensor([*map(len, codes)])
    told = torch.zeros_like(lengths)
    how: AllToAllCall = {"transport": transport, "way": call.get("way"), "sequence": sequence}
    yield from all_to_all(told, lengths, **how)
    for r, (length, answer) in enumerate(zip(told.tolist(), answers, strict=True)):
        if not 0 <= length <= (most := longest_code(answer.numel(), out.dtype)):
            raise Mismatch(
                f"rank {r} told rank {rank} of a code of {length} bytes for {answer.numel()} "
                f"elements of {out.dtype}, which has at most {most}",
                ranks=(r,),
            )
    inbox = torch.empty(int(told.sum()), dtype=torch.uint8)
    outbox = torch.from_numpy(np.concatenate([np.frombuffer(code, np.uint8) for code in codes]))
    how |= {"out_splits": told.tolist(), "in_splits": lengths.tolist(), "sequence": sequence + 1}
    yield from all_to_all(inbox, outbox, **how)
    for r, code in enumerate(inbox.split(told.tolist())):
        if r != rank:
            decode(code.numpy(), answers[r].reshape(-1))


def exact_broadcast(
    tensor: torch.Tensor, root: int, *, transport: Transport, sequence: int
) -> Steps[None]:
    """Replace every rank's tensor by the root's: the root scatters equal parts, and all ranks
    gather them. Uses ``broadcast_sequences`` sequence numbers."""
    flat, ranks = tensor.view(-1), transport.size
    part = -(-flat.numel() // ranks)
    whole, own = flat.new_zeros(part * ranks), flat.new_empty(part)
    gives = part if transport.rank == root else 0
    whole[: flat.numel()] = flat
    yield from exact_all_to_all(
        own,
        whole[: gives * ranks],
        transport=transport,
        in_splits=[gives] * ranks,
        out_splits=[part if r == root else 0 for r in range(ranks)],
        sequence=sequence,
    )
    plan = exact_messages(part, ranks, flat.dtype)
    yield from gather_exactly(own, whole, plan, Call(transport, Workspace(), sequence + 2))
    flat.copy_(whole[: flat.numel()])


def broadcast_sequences(numel: int, ranks: int, dtype: torch.dtype) -> int:
    return 2 + 2 * len(exact_messages(-(-numel // ranks), ranks, dtype))


def _gather(
    row: torch.Tensor, out: torch.Tensor, message: ExactMessage, call: Call, learn: bool
) -> Steps[Received]:
    transport, workspace, sequence = call[:3]
    start, first, ranks = perf_counter(), message.first, transport.size
    code = encode(row[message.part])
    numel, flag = message.numel, torch.zeros(1, dtype=torch.uint8)
    head, mine = (workspace.rows(message.size, n, row.device) for n in (ranks, 1))
    mine.numpy()[0, HEADER : HEADER + len(code)] = code[:first]
    workspace.encoded(start)
    frame = Frame(ALL_GATHER, ranks, f"exact/{message.dtype.itemsize}", numel, sequence, first)
    yield from exchange(head, mine, frame, flag, transport, workspace)
    workspace.give_rows(mine)
    lengths = [_table(numel) + sum(_lengths(row[HEADER:], numel)) for row in head.numpy()]
    longest, rest = max(lengths), None
    if longest > longest_code(numel, message.dtype):
        damaged = Corrupted(
            f"rank {(r := lengths.index(longest))} announced a code of {longest:,} bytes for "
            f"{numel:,} numbers of {message.dtype}. Memory or network corrupt data; check both",
            ranks=(r,),
        )
        transport.abandon(str(damaged))
        raise damaged
    if longest > first:
        rest, mine = (
            torch.zeros(n, HEADER + longest - first, dtype=torch.uint8) for n in (ranks, 1)
        )
        mine.numpy()[0, HEADER : HEADER + max(len(code) - first, 0)] = code[first:]
        frame = frame._replace(sequence=sequence + 1, label=longest)
        yield from exchange(rest, mine, frame, flag, transport, workspace)
    if learn:
        message.expect(longest)
    start, received = perf_counter(), Received(head, rest)
    _decode(received, row, out, message, transport.rank)
    workspace.decoded(start)
    return received


def _decode(
    received: Received, row: torch.Tensor, out: torch.Tensor, message: ExactMessage, rank: int
) -> None:
    for r, part in enumerate(out.view(len(received.head), -1)[:, message.part]):
        if r != rank:
            decode(received.code(r), part)
        elif part.data_ptr() != row[message.part].data_ptr():
            part.copy_(row[message.part])


def _patterns(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.uint8).numpy().view(f"u{values.itemsize}")


def _table(numel: int) -> int:
    """Return the bytes of the lengths of its blocks' codes."""
    return _LENGTH.itemsize * -(-numel // BLOCK)


def _lengths(code: np.ndarray, numel: int) -> list[int]:
    if len(code) < (size := _table(numel)):
        raise Damaged(f"the code of {numel:,} numbers has {len(code):,} bytes, at least {size:,}")
    return code[:size].view(_LENGTH).tolist()
