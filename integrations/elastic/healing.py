"""Healing: ranks that are new or a step behind receive the state of the others, bit for bit.

    1  all ranks exchange the length and hash of their documents; ranks that are no donors, zeros
    2  the first donor sends its document, the list of tensors and all other data, to all
    3  all ranks exchange hashes of every tensor: ranks with the first donor's bits may send it
    4  slices are sent, each from one donor and several donors at once, to all that need them
    5  healed ranks compare hashes, and only then load

Nothing is loaded before everything was received and checked, so a donor's death does no harm.

Note: differing donors. Buffers such as BatchNorm's differ between ranks between two steps; the
first donor's are sent, as DistributedDataParallel takes those of rank 0.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.collectives.all_to_all.all_to_all import all_to_all
from commpress.collectives.channel import Channel
from commpress.collectives.frame import memory_of
from commpress.errors import Corrupted, InvalidArgument, StateMismatch
from commpress.tiered_mem.manifest import DTYPES
from commpress.work import Steps, overlapped

SLICE = 4 << 20  # bytes that one donor sends at a time
ALONGSIDE = 2  # rounds of slices sent at once
TELL_EVERY = 2.0  # seconds between log messages of a long transfer

LONGEST = 1 << 28  # bytes of a document
_LARGE = 1 << 63  # whole numbers from here on, such as seeds, are written as text

log = logging.getLogger("commpress")


@dataclass(frozen=True)
class Healed:
    """Account of one healing, equal on every rank except for ``seconds``."""

    hash: int
    nbytes: int  # of the state
    given: dict[int, int]  # donor → bytes that it sent to each needy rank
    seconds: float
    differing: int = 0  # tensors that differ between donors


class TensorRange(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor, by its number."""

    tensor: int
    start: int
    stop: int


Slice = list[TensorRange]


def share(
    document: bytes,
    tensors: Sequence[torch.Tensor],
    channel: Channel,
    *,
    donors: Sequence[int],
    needy: Sequence[int],
    slice_bytes: int = SLICE,
) -> Steps[tuple[bytes, list[torch.Tensor], Healed]]:
    """Return the donors' document and tensors on every rank, also on those in ``needy``, which
    bring none."""
    if not donors or set(donors) & set(needy):
        raise InvalidArgument(
            f"donors are {list(donors)} and needy {list(needy)}, expected at least one donor, and "
            "no rank in both"
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
    given = yield from _send_slices(channel, held, able, needy, slice_bytes)
    if channel.rank in needy:
        came = [hash_of(each) for each in held]
        if came != right:
            wrong = next(i for i, each in enumerate(came) if each != right[i])
            raise Corrupted(
                f"rank {channel.rank}: tensor {wrong} of the received state has another hash than "
                f"rank {first} sent: memory or network corrupt data; nothing was loaded",
                ranks=(first,),
            )
    differing = sum(len(each) < len(donors) for each in able)
    if differing:
        log.info(
            "donors differ in %d tensors, such as local buffers: those of rank %d were sent",
            differing,
            first,
        )
    whole, total = hash_of_all(document, right), sum(each.nbytes for each in held)
    return document, held, Healed(whole, total, given, monotonic() - begun, differing)


def _send_document(
    channel: Channel, document: bytes, donors: Sequence[int]
) -> Steps[tuple[bytes, int, bool]]:
    """Return the first donor's document, its rank, and whether this rank had the same one."""
    digest, first, me, ranks = checksum_of(document), min(donors), channel.rank, range(channel.size)
    words = [float(len(document)), float(digest >> 32), float(digest & 0xFFFFFFFF)]
    told = yield from channel.gathered(words)
    length = int(told[first][0])
    if not 0 < length <= LONGEST:
        raise StateMismatch(
            f"rank {first} has a state whose document has {length} bytes, expected 1 to {LONGEST}"
        )
    lack = [r for r in ranks if (told[r] != told[first]).any()]
    if others := [r for r in lack if r in donors]:
        log.warning(
            "ranks %s differ from rank %d in numbers, as of a scheduler: the latter's were sent",
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
    """Send ``ins[r]`` bytes of ``inp`` to each rank r; return the ``outs[r]`` bytes from each."""
    if not isinstance(inp, torch.Tensor):
        inp = torch.frombuffer(inp, dtype=torch.uint8) if inp else torch.empty(0, dtype=torch.uint8)
    out = torch.empty(sum(outs), dtype=torch.uint8)
    yield from all_to_all(
        out, inp, transport=channel.transport, out_splits=outs, in_splits=ins, sequence=sequence
    )
    return out


def gathered_hashes(channel: Channel, hashes: Sequence[int]) -> Steps[np.ndarray]:
    """Gather the hashes of all ranks as uint64[ranks, tensors]."""
    halves = [float(part) for each in hashes for part in (each >> 32, each & 0xFFFFFFFF)]
    every = yield from channel.gathered(halves)
    numbers = every.astype(np.uint64).reshape(channel.size, -1, 2)
    return (numbers[:, :, 0] << np.uint64(32)) | numbers[:, :, 1]


def _send_slices(
    channel: Channel,
    tensors: Sequence[torch.Tensor],
    able: Sequence[tuple[int, ...]],
    needy: Sequence[int],
    slice_bytes: int,
) -> Steps[dict[int, int]]:
    """Send all bytes of ``tensors`` into those of ranks that need them; return the bytes sent by
    each donor."""
    queues = dealt([each.nbytes for each in tensors], able, slice_bytes)
    total, done, told = sum(each.nbytes for each in tensors), 0, monotonic()

    def exchange(slices: dict[int, Slice], sequence: int) -> Steps[None]:
        nonlocal done, told
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
        done += sum(map(nbytes, slices.values()))
        if monotonic() - told > TELL_EVERY:
            told, share = monotonic(), 100 * done / max(total, 1)
            log.info("healing: %.0f %% of %.1f MB from %d donors", share, total / 1e6, len(queues))

    rounds = range(max(map(len, queues.values()), default=0))
    jobs = ({donor: queue[i] for donor, queue in queues.items() if i < len(queue)} for i in rounds)
    yield from overlapped((exchange(slices, channel.take()) for slices in jobs), limit=ALONGSIDE)
    return {donor: sum(map(nbytes, queue)) for donor, queue in queues.items()}


def dealt(
    lengths: Sequence[int], able: Sequence[tuple[int, ...]], slice_bytes: int
) -> dict[int, list[Slice]]:
    """Assign every slice of each tensor to a donor that has it, the one with the fewest bytes so
    far; return the slices of each donor in order."""
    donors = sorted({donor for each in able for donor in each})
    queues: dict[int, list[Slice]] = {donor: [] for donor in donors}
    load = dict.fromkeys(donors, 0)
    for tensor, length in enumerate(lengths):
        for at in range(0, length, slice_bytes):
            part = TensorRange(tensor, at, min(at + slice_bytes, length))
            donor = min(able[tensor], key=lambda d: (load[d], d))
            queue, count = queues[donor], part.stop - at
            load[donor] += count
            if queue and nbytes(queue[-1]) + count <= slice_bytes:
                queue[-1].append(part)
            else:
                queue.append([part])
    return queues


def nbytes(part: Slice | None) -> int:
    return sum(each.stop - each.start for each in part or ())


# ---------------------------------------------------------------- documents


def packed(content: Any, tensors: list[torch.Tensor]) -> bytes:
    """Make a document of ``content``, and append its tensors to ``tensors``."""
    outline = _outlined(content, tensors, "state")
    heads = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    return bytes(msgpack.packb({"outline": outline, "tensors": heads}, use_bin_type=True))


def unpacked(document: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild the content from a document and its tensors."""
    return _filled(_read(document)["outline"], tensors)


def empty_tensors(document: bytes) -> list[torch.Tensor]:
    """Make uninitialized host tensors for those that a document describes."""
    found = []
    for kind, shape in _read(document)["tensors"]:
        if kind not in DTYPES:
            raise StateMismatch(
                f"a state has a tensor of {kind!r}, expected one of {', '.join(DTYPES)}"
            )
        found.append(torch.empty(shape, dtype=DTYPES[kind]))
    return found


def _read(document: bytes) -> dict[str, Any]:
    return dict(msgpack.unpackb(document, strict_map_key=False))


def _outlined(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    match value:
        case torch.Tensor():
            if hasattr(value, "placements"):
                raise InvalidArgument(
                    f"{where} is a DTensor, expected a whole tensor: for a sharded model pass "
                    "build= and snapshots="
                )
            if value.layout != torch.strided or value.dtype not in DTYPES.values():
                raise InvalidArgument(
                    f"{where} is a tensor of {value.layout} and {value.dtype}, expected a dense "
                    "tensor of numbers"
                )
            tensors.append(value.detach())
            return {"tensor": len(tensors) - 1}
        case None | bool() | float() | str() | bytes():
            return value
        case int():
            return value if -_LARGE <= value < _LARGE else {"int": str(value)}
        case Mapping():
            kind = "counts" if isinstance(value, Counter) else "items"
            return {
                kind: [
                    [_key(k, where), _outlined(each, tensors, f"{where}[{k!r}]")]
                    for k, each in value.items()
                ]
            }
        case tuple():
            return {
                "tuple": [_outlined(each, tensors, f"{where}[{i}]") for i, each in enumerate(value)]
            }
        case list():
            return [_outlined(each, tensors, f"{where}[{i}]") for i, each in enumerate(value)]
        case set() | frozenset():
            return {"set": [_outlined(each, tensors, where) for each in sorted(value)]}
    raise InvalidArgument(
        f"{where} is a {type(value).__name__}, expected tensors, numbers, text, and dictionaries "
        "or lists of these: received data is never evaluated, so nothing else is sent"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float) and not isinstance(key, bool):
        return key
    raise InvalidArgument(f"{where} has the key {key!r}, expected text or numbers")


def _filled(outline: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(outline, list):
        return [_filled(each, tensors) for each in outline]
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "int":
        return int(content)
    if kind == "tuple":
        return tuple(_filled(each, tensors) for each in content)
    if kind == "set":
        return {_filled(each, tensors) for each in content}
    items = {key: _filled(each, tensors) for key, each in content}
    return Counter(items) if kind == "counts" else OrderedDict(items)


# ---------------------------------------------------------------- bytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as uint8[n] on the host, a view if they are contiguous there."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def hash_of(tensor: torch.Tensor) -> int:
    """Return the xxh3 hash of a tensor's bytes."""
    part = bytes_of(tensor)
    return checksum_of(memory_of(part)) if part.numel() else 0


def hash_of_all(document: bytes, hashes: Sequence[int]) -> int:
    """Return one hash of a whole state."""
    return checksum_of(document + b"".join(each.to_bytes(8, "little") for each in hashes))
