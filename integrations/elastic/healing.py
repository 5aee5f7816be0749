"""Healing: ranks that are new, or a step behind, become like those that are not, in every bit.

    1  everybody tells how long its document is, and a hash of it; who is no donor tells zeros
    2  the first donor sends the document to all: which tensors there are, and all that is no tensor
    3  everybody tells its hash of every tensor: who has the first donor's bits may give it
    4  slices, each from one donor, several donors side by side, to all who need them
    5  who was healed compares hashes, and only then loads

Nothing is loaded before all of it is here and right: a donor that dies meanwhile has spoilt
nothing.

Note: where donors differ. Buffers such as BatchNorm's are each rank's own between two steps; the
first donor's count, as DistributedDataParallel takes those of rank 0.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.collectives.all_to_all.all_to_all import all_to_all
from commpress.collectives.channel import Channel
from commpress.collectives.scalars import gathered
from commpress.collectives.transports.rows import memory_of
from commpress.errors import Corrupted, InvalidArgument, StateMismatch
from commpress.integrations.elastic.shared_state import (
    LONGEST,
    SharedState,
    bytes_of,
    empty_tensors,
    hash_of,
    hash_of_all,
)
from commpress.work import Steps, overlapped

SLICE = 4 << 20  # bytes that one donor sends at a time
ALONGSIDE = 2  # rounds of slices under way at once
TELL_EVERY = 2.0  # seconds between two words about a long transfer

log = logging.getLogger("commpress")


@dataclass(frozen=True)
class Healed:
    """Account of one healing, the same on every rank but for ``seconds``."""

    hash: int
    nbytes: int  # of the state
    given: dict[int, int]  # by donor: bytes that it gave to each who needed them
    seconds: float
    differing: int = 0  # tensors in which donors were not alike


@dataclass
class HealingProgress:
    """Progress of a healing, for whoever watches."""

    nbytes: int
    donors: int
    done: int = 0
    begun: float = field(default_factory=monotonic)

    @property
    def seconds_left(self) -> float:
        return (
            (self.nbytes - self.done) * (monotonic() - self.begun) / self.done
            if self.done
            else float("inf")
        )


class TensorRange(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor, by its number."""

    tensor: int
    start: int
    stop: int


Slice = list[TensorRange]


def heal(
    state: SharedState,
    channel: Channel,
    *,
    donors: Sequence[int],
    needy: Sequence[int],
    **options: Any,
) -> Steps[Healed | None]:
    """Make the ranks in ``needy`` like the ``donors``; all ranks of the channel call it alike. None
    where nobody needs it."""
    if not needy:
        return None
    document, tensors = state.taken_apart() if channel.rank in donors else (b"", [])
    document, tensors, healed = yield from share(
        document, tensors, channel, donors=donors, needy=needy, **options
    )
    if channel.rank in needy:
        state.load(document, tensors)
    return healed


def share(
    document: bytes,
    tensors: Sequence[torch.Tensor],
    channel: Channel,
    *,
    donors: Sequence[int],
    needy: Sequence[int],
    slice_bytes: int = SLICE,
    watch: Callable[[HealingProgress], object] = lambda transfer: None,
) -> Steps[tuple[bytes, list[torch.Tensor], Healed]]:
    """The donors' document and tensors, on those in ``needy`` too, which bring none."""
    if not donors or set(donors) & set(needy):
        raise InvalidArgument(
            f"donors are {list(donors)} and needy {list(needy)}, expected at least one donor that "
            "needs nothing itself"
        )
    begun = monotonic()
    document, first, same = yield from _send_document(channel, document, donors)
    held = (
        [each.detach().cpu().contiguous() for each in tensors] if same else empty_tensors(document)
    )
    hashes = [hash_of(each) for each in held] if same else [0] * len(held)
    every = yield from gathered_hashes(channel, hashes)
    right = [int(each) for each in every[first]]
    able = [tuple(d for d in donors if int(every[d][i]) == right[i]) for i in range(len(held))]
    given = yield from _send_slices(channel, held, able, needy, slice_bytes, watch)
    if channel.rank in needy:
        came = [hash_of(each) for each in held]
        if came != right:
            wrong = next(i for i, each in enumerate(came) if each != right[i])
            raise Corrupted(
                f"rank {channel.rank}: tensor {wrong} of the state that came has another hash than "
                f"rank {first} told: memory or network corrupt data; nothing was loaded",
                ranks=(first,),
            )
    differing = sum(len(each) < len(donors) for each in able)
    if differing:
        log.info(
            "donors differ in %d tensors, such as buffers of their own: those of rank %d count",
            differing,
            first,
        )
    whole, total = hash_of_all(document, right), sum(each.nbytes for each in held)
    return document, held, Healed(whole, total, given, monotonic() - begun, differing)


def _send_document(
    channel: Channel, document: bytes, donors: Sequence[int]
) -> Steps[tuple[bytes, int, bool]]:
    """The first donor's document, its rank, and whether this rank had the same."""
    said, first, me, ranks = checksum_of(document), min(donors), channel.rank, range(channel.size)
    words = [float(len(document)), float(said >> 32), float(said & 0xFFFFFFFF)]
    told = yield from gathered(words, transport=channel.transport, sequence=channel.take())
    length = int(told[first][0])
    if not 0 < length <= LONGEST:
        raise StateMismatch(
            f"rank {first} has a state whose document has {length} bytes, expected 1 to {LONGEST}"
        )
    lack = [r for r in ranks if (told[r] != told[first]).any()]
    if others := [r for r in lack if r in donors]:
        log.warning(
            "ranks %s differ from rank %d in numbers, as of a scheduler: the latter's count",
            others,
            first,
        )
    inp = bytearray(document * len(lack)) if me == first else b""
    outs = [length if r == first and me in lack else 0 for r in ranks]
    came = yield from _swapped(
        channel,
        inp,
        [length if me == first and r in lack else 0 for r in ranks],
        outs,
        channel.take(),
    )
    return (bytes(memory_of(came)), first, False) if me in lack else (document, first, True)


def _swapped(
    channel: Channel,
    inp: bytes | bytearray | torch.Tensor,
    ins: Sequence[int],
    outs: Sequence[int],
    sequence: int,
) -> Steps[torch.Tensor]:
    """Bytes that come, when ``ins[r]`` of ``inp`` go to rank r and ``outs[r]`` come from it."""
    if not isinstance(inp, torch.Tensor):
        inp = torch.frombuffer(inp, dtype=torch.uint8) if inp else torch.empty(0, dtype=torch.uint8)
    out = torch.empty(sum(outs), dtype=torch.uint8)
    yield from all_to_all(
        out, inp, transport=channel.transport, out_splits=outs, in_splits=ins, sequence=sequence
    )
    return out


def gathered_hashes(channel: Channel, hashes: Sequence[int]) -> Steps[np.ndarray]:
    """uint64[ranks, tensors]."""
    halves = [float(part) for each in hashes for part in (each >> 32, each & 0xFFFFFFFF)]
    every = yield from gathered(halves, transport=channel.transport, sequence=channel.take())
    numbers = every.astype(np.uint64).reshape(channel.size, -1, 2)
    return (numbers[:, :, 0] << np.uint64(32)) | numbers[:, :, 1]


def _send_slices(
    channel: Channel,
    tensors: Sequence[torch.Tensor],
    able: Sequence[tuple[int, ...]],
    needy: Sequence[int],
    slice_bytes: int,
    watch: Callable[[HealingProgress], object],
) -> Steps[dict[int, int]]:
    """All bytes of ``tensors``, into those of who needs them; what each donor gave."""
    queues = dealt([each.nbytes for each in tensors], able, slice_bytes)
    transfer, told = HealingProgress(sum(each.nbytes for each in tensors), len(queues)), monotonic()

    def exchange(slices: dict[int, Slice], sequence: int) -> Steps[None]:
        nonlocal told
        me, ranks = channel.rank, range(channel.size)
        ins = [nbytes(slices.get(me)) if r in needy else 0 for r in ranks]
        outs = [nbytes(slices.get(r)) if me in needy else 0 for r in ranks]
        parts = [
            bytes_of(tensors[each.tensor])[each.start : each.stop] for each in slices.get(me, ())
        ]
        came = yield from _swapped(
            channel, torch.cat(parts * len(needy)) if parts else b"", ins, outs, sequence
        )
        at = 0
        for part in (
            [part for _, each in sorted(slices.items()) for part in each] if me in needy else ()
        ):
            bytes_of(tensors[part.tensor])[part.start : part.stop] = came[
                at : at + part.stop - part.start
            ]
            at += part.stop - part.start
        transfer.done += sum(map(nbytes, slices.values()))
        if monotonic() - told > TELL_EVERY:
            told = monotonic()
            watch(transfer)

    rounds = range(max(map(len, queues.values()), default=0))
    jobs = ({donor: queue[i] for donor, queue in queues.items() if i < len(queue)} for i in rounds)
    yield from overlapped((exchange(slices, channel.take()) for slices in jobs), limit=ALONGSIDE)
    return {donor: sum(map(nbytes, queue)) for donor, queue in queues.items()}


def dealt(
    lengths: Sequence[int], able: Sequence[tuple[int, ...]], slice_bytes: int
) -> dict[int, list[Slice]]:
    """Slices of each donor, in order: every slice by one of those who are able, the one that has
    the least to give so far."""
    queues: dict[int, list[Slice]] = {
        donor: [] for donor in sorted({d for each in able for d in each})
    }
    load = dict.fromkeys(queues, 0)
    for donors in dict.fromkeys(able):
        for part in cut(
            [(i, length) for i, length in enumerate(lengths) if able[i] == donors], slice_bytes
        ):
            donor = min(donors, key=lambda d: (load[d], d))
            queues[donor].append(part)
            load[donor] += nbytes(part)
    return queues


def cut(tensors: Sequence[tuple[int, int]], slice_bytes: int) -> list[Slice]:
    """Slices of so many bytes, the last of fewer, of tensors and their lengths laid side by
    side."""
    slices: list[Slice] = []
    room = 0
    for tensor, length in tensors:
        at = 0
        while at < length:
            if not room:
                slices.append([])
                room = slice_bytes
            stop = min(at + room, length)
            slices[-1].append(TensorRange(tensor, at, stop))
            room -= stop - at
            at = stop
    return slices


def nbytes(part: Slice | None) -> int:
    return sum(each.stop - each.start for each in part or ())
