"""Reform: those of a group who can still speak, and newcomers, go on as one, in the same processes,
with the same objects.

Who that is, they agree on over their doors (``collectives.transports.membership``). Then each
connects anew what the group has, the guard, Gloo and the channels, and lets whoever keeps something
by rank hand it over. All of that may be done again if somebody dies meanwhile; what changes for
good comes last, when all have come as far.
"""

import hashlib
import json
import logging
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.transports.connection import Message
from commpress.collectives.transports.epochs import Agreement, Terms
from commpress.collectives.transports.gloo import let_go, watched
from commpress.collectives.transports.meeting import nothing
from commpress.collectives.transports.membership import Proposal, contact_of, is_contact, place_of
from commpress.collectives.transports.mpi_job import WITH_ULFM, survives
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

MEMBERS = "commpress/members"  # the key under which stores have the members' contacts
# until connections that are made anew stand; to a store of torch that may take 5
CONNECTING = timedelta(seconds=10)
_TRIES = 0.2  # seconds between two looks into a store


# numbers of references, and these, so that no other gets one of them
Mark = tuple[set[int], list[weakref.ref[Any]]]


class Registry:
    """Objects over a group that are to go on with it, in the order in which they were made; none is
    kept alive."""

    def __init__(self) -> None:
        self._channels: list[weakref.ref[Channel]] = []
        self._owners: list[weakref.ref[Any]] = []

    def enroll(self, channel: Channel) -> None:
        self._channels.append(weakref.ref(channel))

    def mark(self) -> "Mark":
        """Of what there is by now."""
        return {id(each) for each in self._channels + self._owners}, [
            *self._channels,
            *self._owners,
        ]

    def return_to(self, mark: "Mark") -> None:
        """Objects that were made since go no further, although somebody may still hold them."""
        known, _ = mark
        for channel in [
            channel
            for each in self._channels
            if id(each) not in known and (channel := each()) is not None
        ]:
            channel.stop("this channel is of ranks that there were")
        self._channels = [each for each in self._channels if id(each) in known]
        self._owners = [each for each in self._owners if id(each) in known]

    def on_reform(self, owner: Any) -> None:
        self._owners.append(weakref.ref(owner))

    @property
    def channels(self) -> list[Channel]:
        self._channels = [each for each in self._channels if each() is not None]
        return [channel for each in self._channels if (channel := each()) is not None]

    @property
    def owners(self) -> list[Any]:
        self._owners = [each for each in self._owners if each() is not None]
        return [owner for each in self._owners if (owner := each()) is not None]

    def labels(self) -> tuple[str, ...]:
        return (
            *(channel.name for channel in self.channels),
            *(type(owner).__name__ for owner in self.owners),
        )


class Reformation:
    """One reform of a group, as one process takes part in it. The ``Builder`` of an agreement."""

    def __init__(self, group: "ProcessGroup", timeout: timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.refused: Exception | None = None
        self._alone = group.guard is None

    @property
    def refusal(self) -> str:
        return "" if self.refused is None else f"{type(self.refused).__name__}: {self.refused}"

    def run(self, terms: Terms) -> Change:
        """The change, when all have made it."""
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
            raise InvalidArgument(f"an object of another rank cannot go on: {refusal}")
        return change

    # ------------------------------------------------------------ of an agreement

    def offer(self, places: Sequence[str]) -> Message:
        """A store for all members."""
        if len(places) == 1:
            return {}
        host, held = self.group.membership.here.split(" ")[0], self.group.held_store
        if held is None or held[0] is not None:  # none of its own so far
            store = _store_on(host)
            held = self.group.held_store = None, store
        return {"host": host, "port": held[1].port, "leader": self.group.membership.here}

    def build(self, proposal: Proposal, watch: Callable[[], object]) -> Callable[[], None]:
        self.refused = None
        # an epoch in doubt that was completed listens here
        stop(self.group, CommunicationError("this group reforms again"))
        self._connect(proposal, watch)
        commits = [self._staged(owner, proposal.change) for owner in self.group.registry.owners]
        return partial(_all, [commit for commit in commits if commit is not None])

    def _connect(self, proposal: Proposal, watch: Callable[[], object] = nothing) -> None:
        """Everything of the group works among the new ranks.

        ``watch`` ends every wait until there is a guard, which ends those that follow.
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
        """The store of an epoch, at the process that led to it."""
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
        """End what was built, at the peers too, so that nobody waits for it."""
        stop(
            self.group,
            CommunicationError(
                "a reform of this group was given up, because somebody failed meanwhile."
            ),
        )
        # a connection to it may still be waited on, and takes one question at a time
        self.group.held_store = None

    def _staged(self, owner: Any, change: Change) -> Callable[[], None] | None:
        try:
            return owner.reform(change)
        except (CommunicationError, OSError, dist.DistError):
            raise
        except Exception as error:  # it cannot; the group goes on without it
            log.warning("%s cannot go on with other ranks: %s", type(owner).__name__, error)
            self.refused = self.refused or error
            return None

    def _fail(self, error: BaseException) -> None:
        """The group is of no use; but one that was alone is again."""
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
    """A store of torch, which by itself listens at all addresses of this machine, at one of them
    alone."""
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
    """End everything that is under way over the group's connections, here and at the peers, with
    one error."""
    if group.guard is not None:
        group.guard.stop(error, reforms=True)
        error = group.guard.failure or error
        group.abort_inner()
    for channel in group.registry.channels:
        channel.stop(str(error))
    group.reducer.stop(str(error))


def leave_subgroups(error: CommunicationError) -> None:
    """Groups of some ranks of the default one end with it: their ranks have other numbers from now
    on."""
    let_go([_left(other, error) for other in other_groups()])


def _left(other: Any, error: CommunicationError) -> Any:
    if hasattr(other, "registry"):
        stop(other, error)
    dist.destroy_process_group(other)
    return other


def fail_subgroups(error: CommunicationError) -> None:
    """Let nobody wait in groups of some of the ranks, because the default one ends."""
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
    """The time that a reform may take; refuses what cannot be."""
    if group.communicator is not None and not survives():
        raise InvalidArgument(
            f"MPI ends the whole job when one of its ranks dies: {WITH_ULFM}, or use the backend "
            "'commpress', whose groups reform"
        )
    if group.communicator is not None and join is not None:
        raise InvalidArgument(
            "join= takes a process into a group over MPI, whose processes mpirun has started all "
            "at once"
        )
    if is_registered(group) and not is_default(group):
        raise InvalidArgument(
            "only the default group reforms, which destroys this one: make it anew afterwards"
        )
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise InvalidArgument(
            f"timeout is {timeout!r}, expected a positive datetime.timedelta, such as "
            "timedelta(seconds=60)"
        )
    if not isinstance(report, bytes):
        raise InvalidArgument(f"report is a {type(report).__name__}, expected bytes")
    if not isinstance(admit, bool):
        raise InvalidArgument(
            f"admit is {admit!r}, expected True, or False to leave newcomers at the door"
        )
    check_counts(age=age, minimum=minimum)
    if isinstance(join, str):
        place_of(join)
    return timeout or group.timeout


def cause_of(group: "ProcessGroup") -> CommunicationError:
    """The error that made somebody reform the group, as far as this process knows."""
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
    """Objects that go on with the group, and what carries its data: a newcomer with another kind is
    not let in."""
    return (*(["MPI"] if group.communicator is not None else []), *group.registry.labels())


def check_reconfigures(group: "ProcessGroup") -> None:
    """Refuse where torch, or what carries the data, has no way to be given other ranks."""
    if not RECONFIGURES:
        raise InvalidArgument(
            f"reconfigure needs torch 2.14 or later, this is {torch.__version__}: group.reform() "
            "gives a group other ranks here"
        )
    if group.communicator is not None:
        raise InvalidArgument(
            "reconfigure gives a group over MPI no other ranks; group.reform() goes on with those "
            "left"
        )
    check_reform(group, None, b"", 0, 1, None)


def appointed_terms(group: "ProcessGroup", options: Any) -> Terms:
    """Terms on which those form a group whom torch's ``ReconfigureOptions`` name."""
    handles, here = options.handles, group.membership.here
    for handle in handles:
        if not is_contact(handle):
            raise InvalidArgument(
                f"handles has {handle!r}, expected what dist._get_reconfigure_handle() says on "
                "each member"
            )
    ordered = not isinstance(handles, set | frozenset)
    places = tuple(place_of(handle) for handle in (handles if ordered else sorted(handles)))
    if len(set(places)) < len(places):
        raise InvalidArgument(f"handles is {handles!r}, expected each member once")
    if here not in places:
        raise InvalidArgument(
            f"handles lacks this member's own, {contact_of(here)!r}: only members form the group"
        )
    if options.hints:
        raise InvalidArgument(
            f"hints is {options.hints!r}, expected none: the backend 'commpress' has no use for any"
        )
    key = (
        int.from_bytes(
            hashlib.blake2b(str(options.uuid).encode(), digest_size=8).digest(), "little"
        )
        >> 1
        | 1
    )
    if key == group.membership.epoch.key:
        raise CommunicationError(  # a RuntimeError, as Gloo's groups raise
            f"uuid is {options.uuid}, which is already used for the group of now: give a new one "
            "each time"
        )
    terms = terms_of(group, report=b"", age=0, join=None, minimum=1)
    return replace(terms, appointed=places, ordered=ordered, key=key)


def contacts_in(join: Any) -> list[str]:
    """The doors that are known by now."""
    if isinstance(join, str):
        return [place_of(join)]
    try:
        if not join.check([MEMBERS]):
            time.sleep(_TRIES)
            return []
        return [place_of(each) for each in json.loads(join.get(MEMBERS))["contacts"]]
    except (RuntimeError, OSError):  # its host is gone; it may come back
        time.sleep(_TRIES)
        return []


def announce(group: "ProcessGroup") -> None:
    """Tell all stores that are still there who the members are."""
    epoch = group.membership.epoch
    text = json.dumps(
        {"epoch": epoch.number, "contacts": [contact_of(place) for place in epoch.places]}
    )
    for store in group.stores:
        try:
            store.set(MEMBERS, text)
        # its host may be gone, which is why there may be a second one
        except (RuntimeError, OSError) as error:
            log.warning("a store cannot be told who the members of the group are: %s", error)


def _all(commits: Sequence[Callable[[], None]]) -> None:
    for commit in commits:
        commit()
