"""Records: the description of a call that a rank sends to each peer before its data; and errors
that name the ranks at fault if records differ or are missing.

Two ranks agree on a call if each receives from the other exactly the record it expects. In a
collective with parts of one size that is the record it sent itself; in an all-to-all, the sizes of
sending and receiving are swapped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from commpress.errors import CommunicationError, Mismatch, PeerFailure

# kinds; ANY_SOURCE: the rank begins or ends waiting for any source
CALL, LEAVE, GAVE_UP, ANY_SOURCE, REFORM = 1, 2, 3, 6, 9

OPERATIONS = (
    "nothing",
    "send",
    "recv",
    "barrier",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all",
    "all_to_all_single",
)
_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
SEND, RECV = _NUMBERS["send"], _NUMBERS["recv"]
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
NO_REDUCTION = 255
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_DTYPES = {dtype: number for number, dtype in enumerate(DTYPES)}
OTHER_DTYPE = 254
NO_DTYPE = 255


class Record(NamedTuple):
    """Fields of one record, from the sender's view."""

    kind: int = CALL
    operation: int = 0
    reduction: int = NO_REDUCTION
    dtype: int = NO_DTYPE
    sequence: int = 0
    root: int = 0  # or tag
    give: int = 0  # elements from the sender to the receiver
    take: int = 0  # elements from the receiver to the sender
    shape: int = 0  # a hash of the shapes
    codec: str = ""

    @classmethod
    def of(cls, message: Any) -> "Record | None":
        """Parse a received message; None if it is no record."""
        fits = isinstance(message, list) and [*map(type, message)] == _FIELDS
        return cls(*message) if fits else None

    def mirrored(self) -> "Record":
        """Return the record that the peer must send to agree."""
        operation = {SEND: RECV, RECV: SEND}.get(self.operation, self.operation)
        return self._replace(operation=operation, give=self.take, take=self.give)

    def describe(self) -> str:
        name = (
            OPERATIONS[self.operation]
            if self.operation < len(OPERATIONS)
            else f"operation {self.operation}"
        )
        if self.operation in (SEND, RECV):
            count = self.give if self.operation == SEND else self.take
            return f"{name} of {count} {_dtype_name(self.dtype)} with tag {self.root}"
        words = [f"{name} number {self.sequence}"]
        if self.dtype != NO_DTYPE:
            both = (
                f"{self.give}"
                if self.give == self.take
                else f"{self.give} to and {self.take} from its peer"
            )
            words.append(f"of {both} {_dtype_name(self.dtype)}")
        if self.reduction < len(REDUCTIONS):
            words.append(REDUCTIONS[self.reduction])
        if name in ROOTED:
            words.append(f"root {self.root}")
        if self.codec:
            words.append(f"codec {self.codec!r}")
        return ", ".join([" ".join(words[:2]), *words[2:]])


_FIELDS = [*map(type, Record())]


def call(
    name: str,
    tensors: Sequence[torch.Tensor],
    *,
    reduction: int = NO_REDUCTION,
    root: int = 0,
    codec: str = "",
) -> Record:
    """Make the record of a collective in which every rank sends and receives the same amount."""
    dtype = tensors[0].dtype if tensors else None
    return _described(name, tuple(t.shape for t in tensors), dtype, reduction, root, codec)


@lru_cache(maxsize=1024)
def _described(
    name: str,
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype | None,
    reduction: int,
    root: int,
    codec: str,
) -> Record:
    numel = sum(shape.numel() for shape in shapes)
    shape = hash(shapes[0] if len(shapes) == 1 else shapes) & 0xFFFFFFFF
    if name == "broadcast":  # torch requires only equal numbers of elements here
        shape = 0
    code = NO_DTYPE if dtype is None else _DTYPES.get(dtype, OTHER_DTYPE)
    return Record(CALL, _NUMBERS[name], reduction, code, 0, root, numel, numel, shape, codec)


def all_to_all(
    name: str,
    dtype: torch.dtype,
    gives: Sequence[int],
    takes: Sequence[int],
    codec: str = "",
) -> list[Record]:
    """Make the records of an all-to-all, one for each peer."""
    number, code = _NUMBERS[name], _DTYPES.get(dtype, OTHER_DTYPE)
    return [
        Record(operation=number, dtype=code, give=give, take=take, codec=codec)
        for give, take in zip(gives, takes, strict=True)
    ]


def counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements for or from each rank."""
    if not len(splits):
        return [tensor.numel() // size] * size
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [row * split for split in splits]


def sending(tensor: torch.Tensor, tag: int) -> Record:
    code = _DTYPES.get(tensor.dtype, OTHER_DTYPE)
    return Record(operation=SEND, dtype=code, root=tag, give=tensor.numel())


def receiving(tensor: torch.Tensor, tag: int) -> Record:
    return sending(tensor, tag).mirrored()


def _dtype_name(code: int) -> str:
    return (
        str(DTYPES[code]).removeprefix("torch.")
        if code < len(DTYPES)
        else "elements of another dtype"
    )


_NAMED = 63  # ranks below it fit into a record of giving up
_KINDS: dict[int, type[CommunicationError]] = {0: CommunicationError, 1: Mismatch, 2: PeerFailure}


class BlamedCall(Protocol):
    expected: dict[int, Record]  # the record that each peer must send

    def describe(self) -> str: ...


@dataclass
class Blame:
    """Make errors of one rank; ``_name`` returns a peer's name."""

    rank: int
    _name: Callable[[int], str]

    def disagreement(self, work: BlamedCall, wrong: Sequence[tuple[int, Record]]) -> Mismatch:
        mine, theirs, wrong = work.describe(), [], sorted(wrong)  # independent of arrival
        for peer, record in wrong:
            what = record.describe()
            theirs.append(
                f"{self._name(peer)} calls "
                f"{what if what != mine else 'it with tensors of another shape'}"
            )
        return Mismatch(
            f"rank {self.rank} calls {mine}, but {'; '.join(theirs)}. Nothing was sent. Every rank "
            "must make the same calls, in the same order, with the same shape, dtype and codec.",
            ranks=tuple(peer for peer, _ in wrong),
        )

    def lost(self, work: BlamedCall, gone: Sequence[int], *, left: bool) -> PeerFailure:
        how = "left the group" if left else "died: its connection closed without a word"
        return PeerFailure(
            f"rank {self.rank} waits in {work.describe()}, but {self._names(gone)} {how}.",
            ranks=tuple(gone),
        )

    def died(self, gone: Sequence[int]) -> PeerFailure:
        return PeerFailure(
            f"{self._names(gone)} died: its connection closed without a word.", ranks=tuple(gone)
        )

    def expired(
        self, work: BlamedCall, seconds: float, silent: Sequence[int], others: Mapping[int, Record]
    ) -> CommunicationError:
        """Make the error of a ``work`` that has reached its timeout, because of silent ranks and of
        ranks with other calls."""
        busy = "; ".join(
            f"{self._name(peer)} calls {record.describe()}" for peer, record in others.items()
        )
        text = f"rank {self.rank} reached its timeout of {seconds:g} s in {work.describe()}"
        if not silent:
            return Mismatch(
                f"{text}, but {busy}. Every rank must make matching calls.", ranks=tuple(others)
            )
        what = (
            f"{text}: {self._names(silent)} did not make a matching call: stopped, stuck or far "
            "behind."
        )
        return PeerFailure(what + (f" Besides, {busy}." if busy else ""), ranks=tuple(silent))

    def unanswered(self, work: BlamedCall, silent: Sequence[int], text: str) -> PeerFailure:
        return PeerFailure(
            f"rank {self.rank}: {work.describe()} did not finish, and the process of "
            f"{self._names(silent)} does not answer: stopped, or its machine is gone ({text}).",
            ranks=tuple(silent),
        )

    def failed(self, work: BlamedCall, text: str) -> CommunicationError:
        return CommunicationError(f"rank {self.rank}: {work.describe()} failed: {text}")

    def notice(self, peer: int, record: Record, works: Sequence[BlamedCall]) -> CommunicationError:
        """Make the error after a peer has given up, which ends the group. If the peer blames this
        rank, the two disagree, and the error blames the peer."""
        blamed = tuple(r for r in range(_NAMED) if record.give >> r & 1)
        # a send or receive that the peer will not match
        direct = any(work.expected.keys() == {peer} for work in works)
        mine = self.rank in blamed or not blamed
        kind = _KINDS.get(record.reduction, CommunicationError)
        what = "a disagreement with" if kind is Mismatch else "the failure of"
        whom = "this rank" if mine else self._names(blamed)
        doing = "; ".join(work.describe() for work in works[:3])
        return kind(
            (
                f"rank {self.rank}{' in ' + doing if doing else ''}: {self._name(peer)} has given "
                f"up after {what} {whom}."
            ),
            ranks=(peer,) if mine or direct else blamed,
        )

    def reforms(self, peer: int | None, record: Record | None) -> CommunicationError:
        """Make the error after a peer has begun to agree on new members; its record may name the
        ranks it misses."""
        blamed = tuple(
            r
            for r in range(_NAMED)
            if record is not None and record.give >> r & 1 and r != self.rank
        )
        who = "a peer" if peer is None else self._name(peer)
        why = f" after the failure of {self._names(blamed)}" if blamed else ""
        kind = PeerFailure if blamed else CommunicationError
        return kind(
            f"rank {self.rank}: {who} reforms the group{why}. Call reform() here too.", ranks=blamed
        )

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._name, ranks))


def give_up_record(error: CommunicationError, *, reforms: bool = False) -> Record:
    """Make the record by which a rank that gives up, or ``reforms`` the group, tells its peers the
    reason."""
    kind = 1 if isinstance(error, Mismatch) else 2 if isinstance(error, PeerFailure) else 0
    give = sum(1 << r for r in error.ranks if r < _NAMED)
    return Record(kind=REFORM if reforms else GAVE_UP, reduction=kind, give=give)


def again(error: CommunicationError) -> CommunicationError:
    """Make the error of every call after the failure."""
    return type(error)(
        (
            f"this group failed before: {error} Call group.reform() to continue with the remaining "
            "ranks, or destroy it and build a new one."
        ),
        ranks=error.ranks,
    )


def grace_of(timeout: timedelta) -> float:
    """Return the seconds of a timeout that are reserved for finding the ranks at fault."""
    return min(2.0, timeout.total_seconds() / 5)


def speaks_of_a_peer(text: str) -> bool:
    """Return whether an error of the transport may be due to a peer's failure."""
    lower = text.lower()
    words = (
        "timed out",
        "timeout",
        "closed",
        "reset by peer",
        "broken pipe",
        "abort",
        "socket",
        "connect",
        "nccl",
    )
    return any(word in lower for word in words)
