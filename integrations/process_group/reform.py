"""Reform: the surviving members of a group and newcomers continue as one group, in the same
processes, with the same objects.

They first agree on the members (``collectives.transports.membership``). Then each reconnects the
guard, Gloo and the channels, and objects with a state per rank hand it over. All of this may be
repeated if another rank dies in the meantime; irreversible changes come last, after all ranks have
succeeded.
"""

import hashlib
import json
import logging
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.transports.connection import Message
from commpress.collectives.transports.epochs import Agreement, Terms
from commpress.collectives.transports.meeting import nothing
from commpress.collectives.transports.membership import Proposal, contact_of, is_contact, place_of
from commpress.collectives.transports.mpi import WITH_ULFM, survives
from commpress.collectives.transports.torch import let_go, watched
from commpress.errors import CommunicationError, InvalidArgument, PeerFailure, check_counts
from commpress.integrations.process_group.control_connections import ControlConnections
from commpress.integrations.process_group.inner import mpi_group, torch_group
from commpress.torch_private import (
    RECONFIGURES,
    change_default_group,
    forget_meshes,
    groups_named,
    is_default,
    is_registered,
    other_groups,
)

if TYPE_CHECKING:
    from commpress.integrations.process_group.group import ProcessGroup

log = logging.getLogger("commpress")

MEMBERS = "commpress/members"  # key in stores for the members' contacts
# limit for new connections; one to a store of torch may take 5 s
CONNECTING = timedelta(seconds=10)
_TRIES = 0.2  # seconds between two queries of a store
T = TypeVar("T")


# ids of references, and the references, so that the ids stay unique
Mark = tuple[set[int], list[weakref.ref[Any]]]


class Registry:
    """Objects that follow changes of a group, in the order of creation; references are weak."""

    def __init__(self) -> None:
        self._channels: list[weakref.ref[Channel]] = []
        self._owners: list[weakref.ref[Any]] = []

    def enroll(self, channel: Channel) -> None:
        self._channels.append(weakref.ref(channel))

    def mark(self) -> "Mark":
        """Record the present objects."""
        present = [*self._channels, *self._owners]
        return set(map(id, present)), present

    def return_to(self, mark: "Mark") -> None:
        """Drop and stop objects made since the mark, which callers may still have."""
        known, _ = mark
        for channel in [
            channel
            for each in self._channels
            if id(each) not in known and (channel := each()) is not None
        ]:
            channel.stop("this channel belongs to the ranks before a reform")
        self._channels = [each for each in self._channels if id(each) in known]
        self._owners = [each for each in self._owners if id(each) in known]

    def on_reform(self, owner: Any) -> None:
        self._owners.append(weakref.ref(owner))

    @property
    def channels(self) -> list[Channel]:
        return _alive(self._channels)

    @property
    def owners(self) -> list[Any]:
        return _alive(self._owners)

    def labels(self) -> tuple[str, ...]:
        return (
            *(channel.name for channel in self.channels),
            *(type(owner).__name__ for owner in self.owners),
        )


def _alive(references: list[weakref.ref[T]]) -> list[T]:
    """Return the objects that are left, and forget the references to others."""
    references[:] = [each for each in references if each() is not None]
    return [found for each in references if (found := each()) is not None]


@dataclass
class Reformation:
    """One process's part in a reform of a group: the ``Builder`` of an agreement."""

    group: "ProcessGroup"
    timeout: timedelta
    refused: Exception | None = None

    def __post_init__(self) -> None:
        self._alone = self.group.guard is None

    @property
    def refusal(self) -> str:
        return "" if self.refused is None else f"{type(self.refused).__name__}: {self.refused}"

    def run(self, terms: Terms) -> Change:
        """Run the agreement; return the change when all ranks have made it."""
        group = self.group
        try:
            change, refusal = Agreement(
                group.membership, terms, self, self.timeout.total_seconds()
            ).run()
        except BaseException as error:
            self._fail(error)
            raise
        group.change = change
        announce(group)
        if self.refused is not None:
            raise self.refused
        if refusal:
            raise InvalidArgument(f"an object of another rank cannot continue: {refusal}")
        return change

    # ------------------------------------------------------------ of an agreement

    def offer(self, places: Sequence[str]) -> Message:
        """Offer a store for all members."""
        if len(places) == 1:
            return {}
        host, held = self.group.membership.here.split(" ")[0], self.group.held_store
        if held is None or held[0] is not None:  # this process has no store so far
            store = _store_on(host)
            held = self.group.held_store = None, store
        return {"host": host, "port": held[1].port, "leader": self.group.membership.here}

    def build(self, proposal: Proposal, watch: Callable[[], object]) -> Callable[[], None]:
        self.refused = None
        # an epoch in doubt that was completed may have connections
        stop(self.group, CommunicationError("this group reforms again"))
        self._connect(proposal, watch)
        commits = [self._staged(owner, proposal.change) for owner in self.group.registry.owners]
        return partial(call_all, [commit for commit in commits if commit is not None])

    def _connect(self, proposal: Proposal, watch: Callable[[], object] = nothing) -> None:
        """Connect everything of the group among the new ranks.

        ``watch`` ends waits until there is a guard, which ends later ones.
        """
        group, rank, size = self.group, proposal.change.rank, proposal.change.size
        within = min(CONNECTING, self.timeout)
        leads = proposal.facts.get("leader") == group.membership.here
        prefix = f"epoch{proposal.epoch.number}-{proposal.epoch.key:x}"
        store = dist.PrefixStore(prefix, self._store_of(proposal.facts, watch, leads=leads))
        store.set_timeout(within)
        connections = (
            ControlConnections(group.membership, proposal.epoch, within, watch)
            if size > 1
            else None
        )
        inner: Any
        try:
            data = dist.PrefixStore("data", store)
            if group.communicator is None:
                inner, abort = torch_group(
                    data, rank, size, group.timeout, group, within=within, watch=watch
                )
            else:
                inner, abort = mpi_group(
                    data, rank, size, group.timeout, group, within=within, epoch=prefix
                )
        except BaseException:
            if connections is not None:
                connections.close()
            raise
        group.enter(rank, size, store, inner, abort, connections)
        store.set_timeout(group.timeout)
        if is_default(group):
            change_default_group(size, store, proposal.count)
            forget_meshes()
        for channel in group.registry.channels:
            channel.reform()

    def _store_of(self, facts: Message, watch: Callable[[], object], *, leads: bool) -> Any:
        """Connect to the store of an epoch, in the process that led to it."""
        if not facts:
            return dist.HashStore()
        where, held = (facts["host"], facts["port"]), self.group.held_store
        if leads:
            assert held is not None
            return held[1]
        if held is None or held[0] != where:
            connect: Callable[[], Any] = partial(
                dist.TCPStore, *where, is_master=False, timeout=CONNECTING
            )
            held = self.group.held_store = where, watched(connect, watch)
        return held[1]

    def undo(self) -> None:
        """End what was built, also at the peers, so that no rank waits for it."""
        stop(
            self.group,
            CommunicationError(
                "a reform of this group was given up, because a rank failed during it."
            ),
        )
        # a connection to it may be in use by a wait, and serves one query at a time
        self.group.held_store = None

    def _staged(self, owner: Any, change: Change) -> Callable[[], None] | None:
        try:
            return owner.reform(change)
        except (CommunicationError, OSError, dist.DistError):
            raise
        except Exception as error:  # the group continues without this object
            log.warning("%s cannot continue with other ranks: %s", type(owner).__name__, error)
            self.refused = self.refused or error
            return None

    def _fail(self, error: BaseException) -> None:
        """Record that the group is unusable, except that a group of one rank becomes usable
        again."""
        group = self.group
        if self._alone and group.membership.ready is None:
            epoch = group.membership.epoch
            change = Change(epoch.number, 0, 1, (0,), (b"",))
            self._connect(Proposal(epoch, change, {}, groups_named() if is_default(group) else 0))
        elif group.guard is not None:
            group.guard.stop(
                CommunicationError(f"this group could not reform: {error}"), reforms=True
            )


def _store_on(host: str) -> dist.TCPStore:
    """Make a store of torch that listens at one address, instead of at all addresses of this
    machine."""
    listener = socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECTING,
        master_listen_fd=listener.detach(),
    )


# ---------------------------------------------------------------- before and after


def stop(group: "ProcessGroup", error: CommunicationError) -> None:
    """End all operations over the group's connections, here and at the peers, with one error."""
    if group.guard is not None:
        group.guard.stop(error, reforms=True)
        error = group.guard.failure or error
        group.abort_inner()
    for channel in group.registry.channels:
        channel.stop(str(error))
    group.reducer.stop(str(error))


def leave_subgroups(error: CommunicationError) -> None:
    """Destroy groups of some ranks of the default group, because ranks get new numbers."""
    let_go([_left(other, error) for other in other_groups()])


def _left(other: Any, error: CommunicationError) -> Any:
    if hasattr(other, "registry"):
        stop(other, error)
    dist.destroy_process_group(other)
    return other


def fail_subgroups(error: CommunicationError) -> None:
    """End waits in groups of some ranks, because the default group ends."""
    for other in other_groups():
        if (guard := getattr(other, "guard", None)) is not None:
            guard.stop(error)
        for channel in other.registry.channels if hasattr(other, "registry") else ():
            channel.inner.abandon(str(error))


def check_reform(
    group: "ProcessGroup",
    timeout: object,
    report: object,
    age: object,
    minimum: object,
    join: object,
    admit: object = True,
) -> timedelta:
    """Return the time limit of a reform; refuse arguments that cannot work."""
    if group.communicator is not None and not survives():
        raise InvalidArgument(
            f"MPI ends the whole job when one of its ranks dies: {WITH_ULFM}, or use the backend "
            "'commpress', whose groups reform"
        )
    if group.communicator is not None and join is not None:
        raise InvalidArgument(
            "join= is given for a group over MPI, which cannot take newcomers, because mpirun has "
            "started all its processes at once: leave it out"
        )
    if is_registered(group) and not is_default(group):
        raise InvalidArgument(
            "only the default group can reform, which destroys this one: make it again afterwards"
        )
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise InvalidArgument(
            f"timeout is {timeout!r}, expected a positive datetime.timedelta, such as "
            "timedelta(seconds=60)"
        )
    if not isinstance(report, bytes):
        raise InvalidArgument(f"report is a {type(report).__name__}, expected bytes")
    if not isinstance(admit, bool):
        raise InvalidArgument(f"admit is {admit!r}, expected True, or False to let newcomers wait")
    check_counts(age=age, minimum=minimum)
    if isinstance(join, str):
        place_of(join)
    return timeout or group.timeout


def cause_of(group: "ProcessGroup") -> CommunicationError:
    """Return the error that made this process reform the group, as far as it is known."""
    if group.guard is not None and group.guard.failure is not None:
        return group.guard.failure
    for channel in group.registry.channels:
        if reason := getattr(channel.inner, "failure", None):
            return PeerFailure(reason)
    return CommunicationError(f"rank {group.rank()} reforms the group. Call reform() here too.")


def terms_of(
    group: "ProcessGroup",
    *,
    report: bytes,
    age: int,
    join: Any,
    minimum: int,
    admit: bool = True,
) -> Terms:
    began = (
        ()
        if group.guard is None
        else tuple(group.membership.epoch.places[peer] for peer in group.guard.reforming)
    )
    return Terms(
        age=age,
        said=report,
        minimum=minimum,
        admits=admit,
        labels=partial(_labels, group),
        count=groups_named() if is_default(group) else 0,
        contacts=None if join is None else partial(contacts_in, join),
        began=began,
    )


def _labels(group: "ProcessGroup") -> tuple[str, ...]:
    """Return labels of the objects that follow the group and of the data's carrier: a newcomer with
    other ones is refused."""
    return (*(["MPI"] if group.communicator is not None else []), *group.registry.labels())


def check_reconfigures(group: "ProcessGroup") -> None:
    """Raise ``InvalidArgument`` if this torch, or the carrier of the data, cannot take other
    ranks."""
    if not RECONFIGURES:
        raise InvalidArgument(
            f"reconfigure needs torch 2.14 or later, this is {torch.__version__}: group.reform() "
            "gives a group other ranks here"
        )
    if group.communicator is not None:
        raise InvalidArgument(
            "reconfigure cannot give a group over MPI other ranks: use group.reform() to continue "
            "with the remaining ones"
        )
    check_reform(group, None, b"", 0, 1, None)


def appointed_terms(group: "ProcessGroup", options: Any) -> Terms:
    """Return the terms by which exactly the members in torch's ``ReconfigureOptions`` form a
    group."""
    handles, here = options.handles, group.membership.here
    for handle in handles:
        if not is_contact(handle):
            raise InvalidArgument(
                f"handles has {handle!r}, expected the result of dist._get_reconfigure_handle() on "
                "each member"
            )
    ordered = not isinstance(handles, set | frozenset)
    places = tuple(place_of(handle) for handle in (handles if ordered else sorted(handles)))
    if len(set(places)) < len(places):
        raise InvalidArgument(f"handles is {handles!r}, expected each member once")
    if here not in places:
        raise InvalidArgument(
            f"handles does not include this member's own, {contact_of(here)!r}: only members form "
            "the group"
        )
    if options.hints:
        raise InvalidArgument(
            f"hints is {options.hints!r}, expected none: the backend 'commpress' does not use hints"
        )
    hashed = hashlib.blake2b(str(options.uuid).encode(), digest_size=8).digest()
    key = int.from_bytes(hashed, "little") >> 1 | 1
    if key == group.membership.epoch.key:
        raise CommunicationError(  # a RuntimeError, as Gloo's groups raise
            f"uuid is {options.uuid}, which the present group already has: pass a new one each time"
        )
    terms = terms_of(group, report=b"", age=0, join=None, minimum=1)
    return replace(terms, appointed=places, ordered=ordered, key=key)


def contacts_in(join: Any) -> list[str]:
    """Return the addresses of members known so far."""
    if isinstance(join, str):
        return [place_of(join)]
    with suppress(RuntimeError, OSError):  # its host is down and may come back
        if join.check([MEMBERS]):
            return [place_of(each) for each in json.loads(join.get(MEMBERS))["contacts"]]
    time.sleep(_TRIES)
    return []


def announce(group: "ProcessGroup") -> None:
    """Publish the members in all stores that still answer."""
    epoch = group.membership.epoch
    text = json.dumps(
        {"epoch": epoch.number, "contacts": [contact_of(place) for place in epoch.places]}
    )
    for store in group.stores:
        try:
            store.set(MEMBERS, text)
        # its host may be down, for which there may be a second store
        except (RuntimeError, OSError) as error:
            log.warning("a store does not take the members of the group: %s", error)


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
