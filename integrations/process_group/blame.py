"""Blame: the typed errors of the guard, which name the ranks at fault, what they did and what
should be done."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from commpress.errors import CommunicationError, Mismatch, PeerFailure
from commpress.integrations.process_group.records import GAVE_UP, REFORM, Record, unpack

_NAMED = 63  # ranks below it fit into the record of one who gives up
_KINDS: dict[int, type[CommunicationError]] = {0: CommunicationError, 1: Mismatch, 2: PeerFailure}


class BlamedCall(Protocol):
    expected: dict[int, bytes]  # the record that each peer must send

    def describe(self) -> str: ...


class Blame:
    """Errors of one rank; ``name`` tells how a peer is called."""

    def __init__(self, rank: int, name: Callable[[int], str]) -> None:
        self.rank, self._name = rank, name

    def disagreement(self, work: BlamedCall, wrong: Sequence[tuple[int, bytes]]) -> Mismatch:
        mine, theirs, wrong = work.describe(), [], sorted(wrong)  # whoever came first
        for peer, data in wrong:
            record = unpack(data)
            what = record.describe() if record else "something that is no call"
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
        """``work`` has waited too long: for ranks that are silent and ranks that do something else
        instead."""
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
        """A peer has given up: the group is over. If it blames this rank, the two disagree, and it
        is the other one."""
        blamed = tuple(r for r in range(_NAMED) if record.give >> r & 1)
        # a send or receive that it will not meet
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
        """A peer wants to agree on who goes on; it may say whom it misses."""
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
    """The record by which a rank that gives up, or ``reforms`` the group, tells its peers why."""
    kind = 1 if isinstance(error, Mismatch) else 2 if isinstance(error, PeerFailure) else 0
    give = sum(1 << r for r in error.ranks if r < _NAMED)
    return Record(kind=REFORM if reforms else GAVE_UP, reduction=kind, give=give)


def again(error: CommunicationError) -> CommunicationError:
    """For every call after the failure."""
    return type(error)(
        (
            f"this group failed before: {error} group.reform() goes on with those who are left; or "
            "destroy it and build a new one."
        ),
        ranks=error.ranks,
    )


def grace_of(timeout: timedelta) -> float:
    """Seconds, of a timeout, kept for finding out who is at fault."""
    return min(2.0, timeout.total_seconds() / 5)


def speaks_of_a_peer(text: str) -> bool:
    """True if an error of the transport may come from a peer's failure."""
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
