"""Attendance of a process in a run: finding the others, joining them again, leaving, and its report
to them.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commpress.collectives.change import COMMITTED, Change
from commpress.collectives.transports.meeting import DIFFERS, PING, WELCOME, knock
from commpress.collectives.transports.membership import contact_of, is_contact
from commpress.collectives.transports.mpi import WITH_ULFM, survives
from commpress.errors import CommunicationError, Excluded, InvalidArgument
from commpress.integrations.process_group.reform import MEMBERS, contacts_in

ANSWER = 1.0  # seconds for a member's answer


class Attendance:
    """Attendance of this process. It has ``join`` until it has joined the others.

    - ``join``: a member's contact, a store, or "host:port" of one; by default COMMPRESS_JOIN. None
      on processes that begin the run.
    - COMMPRESS_STORE: "host:port" of a store that outlives the members and lists them.
    """

    def __init__(self, group: Any, join: Any, timeout: timedelta | None) -> None:
        self.join = join if join is not None else os.environ.get("COMMPRESS_JOIN") or None
        self.leaving = self.left = False  # it wants to leave; it has left
        self.going: set[int] = set()  # ranks that have handed over their residuals and leave now
        self._group, self._timeout = group, timeout

    @property
    def patience(self) -> timedelta:
        return self._timeout or self._group.timeout

    def begin(self) -> bool:
        """Return whether this process has to join others, after connecting to their store if it is
        given; a process that begins the run announces its group."""
        if self.join is None:
            self.announce(first=True)
            return False
        if isinstance(self.join, str) and not is_contact(self.join):
            self.join = store_at(self.join, self.patience)
        return True

    def announce(self, *, first: bool = False) -> None:
        """List the members in the launcher's store. A newcomer does so only after joining, because
        alone it would replace the others there. ``first``: raise if the store lists running members
        of another run."""
        place = os.environ.get("COMMPRESS_STORE")
        if not place or not hasattr(self._group, "announce"):
            return
        store = store_at(place, self.patience)
        if first and (others := self._others(store)):
            raise InvalidArgument(
                f"the store at {place} lists members of a running run, at {others[0]}, but this "
                "process was started without join=: pass join= or set COMMPRESS_JOIN to that "
                "store, or end that run first"
            )
        self._group.announce(store)

    def _others(self, store: dist.Store) -> list[str]:
        """Return contacts of running members that are not of this group."""
        if not store.check([MEMBERS]):
            return []
        mine, found = self._group.membership.epoch.places, list[str]()
        for place in [place for place in contacts_in(store) if place not in mine]:
            with contextlib.suppress(OSError), knock(place, PING, 0, (0, 0), ANSWER) as call:
                found += [contact_of(place)] if call.look() in (WELCOME, DIFFERS) else []
        return found

    def join_again(self, error: Excluded) -> None:
        """Join the others as a newcomer, because they have continued without this rank."""
        place = os.environ.get("COMMPRESS_STORE")
        if not error.contact and not place:
            raise error
        self.join = error.contact or store_at(place, self.patience)  # type: ignore[arg-type]

    def leave(self) -> None:
        self.leaving = True


def store_at(place: str, timeout: timedelta) -> dist.TCPStore:
    """Connect to a launcher's store, in which a run registers its members.

    Note: the thread. torch waits forever for a server that accepts connections but is no store,
    whatever the timeout.
    """
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal()):
        raise InvalidArgument(f"the store is {place!r}, expected host:port, such as 10.0.0.1:29500")
    made: Future[dist.TCPStore] = Future()

    def connect() -> None:
        try:
            made.set_result(
                dist.TCPStore(
                    host, int(port), is_master=False, wait_for_workers=False, timeout=timeout
                )
            )
        except RuntimeError as error:
            made.set_exception(error)

    threading.Thread(target=connect, name="commpress-store", daemon=True).start()
    try:
        return made.result(timeout.total_seconds())
    except (RuntimeError, TookTooLong) as error:
        raise CommunicationError(
            f"the store at {place}, which lists the members of the run, has not answered within "
            f"{timeout.total_seconds():g} s: its host or its process is down, or it is no store. "
            "Join by a member's group.contact instead"
        ) from error


def at_sigterm(call: Callable[[], None]) -> Callable[[], object]:
    """Call ``call`` at the first SIGTERM, unless the program handles it; return a function that
    undoes this."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return lambda: None

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        call()

    signal.signal(signal.SIGTERM, handle)

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return restore


def reformable(group: Any) -> Any:
    """Return the group itself, if it can be formed again."""
    found = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
    if found is None:
        raise InvalidArgument(
            "torch.distributed is not initialized: call init_process_group('commpress') before "
            "commpress.elastic"
        )
    if not callable(getattr(found, "reform", None)):
        raise InvalidArgument(
            f"the group is of backend {dist.get_backend(found)!r}, expected 'commpress', the only "
            "one that can continue with other ranks: call init_process_group('commpress')"
        )
    if getattr(found, "communicator", None) is not None and not survives():
        raise InvalidArgument(
            f"the group is of backend {dist.get_backend(found)!r}, over MPI, which ends a job with "
            f"its first rank: {WITH_ULFM}, or init_process_group('commpress')"
        )
    return found


_HEALED, _HALFWAY, _LEAVES = 1, 2, 4


@dataclass(frozen=True)
class Declaration:
    """Report of one rank to the others.

    - ``healed``: it has the state of the run; a newcomer does not before it is healed.
    - ``halfway``: its last step failed after the optimizer's step.
    - ``leaves``: it leaves after the others have taken over its residuals.
    """

    steps: int
    healed: bool = True
    halfway: bool = False
    leaves: bool = False

    def packed(self) -> bytes:
        flags = _HEALED * self.healed | _HALFWAY * self.halfway | _LEAVES * self.leaves
        return COMMITTED.pack(self.steps) + bytes([flags])

    @classmethod
    def of(cls, report: bytes) -> "Declaration | None":
        """Parse a report; None if it is no ``Declaration``."""
        if len(report) <= COMMITTED.size:
            return None
        (steps,), flags = COMMITTED.unpack_from(report), report[COMMITTED.size]
        return cls(
            steps,
            healed=bool(flags & _HEALED),
            halfway=bool(flags & _HALFWAY),
            leaves=bool(flags & _LEAVES),
        )

    @classmethod
    def all(cls, change: Change) -> Mapping[int, "Declaration"]:
        """Return the declarations of present ranks that have made one."""
        return {
            rank: each
            for rank, report in enumerate(change.reports)
            if (each := cls.of(report)) is not None
        }

    @classmethod
    def healed_before(cls, change: Change) -> list[int]:
        """Return the survivors with the state of the run; the newest newcomers may not be
        healed."""
        return [
            rank
            for rank, each in cls.all(change).items()
            if rank in change.survivors and each.healed
        ]

    @classmethod
    def donors(cls, change: Change) -> list[int]:
        """Return the ranks with the state of the run: those healed survivors that have committed
        most steps, completely if there are such; else only the first one, because others may be
        elsewhere in that step."""
        able = {
            rank: each
            for rank, each in cls.all(change).items()
            if rank in cls.healed_before(change)
        }
        most = max((each.steps for each in able.values()), default=0)
        first = {rank: each for rank, each in able.items() if each.steps == most}
        return [rank for rank, each in first.items() if not each.halfway] or list(first)[:1]

    @classmethod
    def leavers(cls, change: Change) -> list[int]:
        """Return the ranks that are about to leave."""
        return [rank for rank, each in cls.all(change).items() if each.leaves]
