"""A world of ranks that come and go: threads of this process, a group that can be formed anew, and
messages that may break.

It does what the group of backend "commpress" promises, and nothing else: whoever waits for someone
that has died, or that has begun to form the group anew, fails; ``reform`` returns on all who live,
the same epoch for all of them.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta

from commpress.collectives.agreement import gathered
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel, Counted, Numbers
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import PeerFailure

PATIENCE = 20.0


class Killed(BaseException):
    """The process of a rank ends here."""


@dataclass(eq=False)
class Group:
    """One group's switches, one for each channel."""

    members: list["Rank"]
    number: int = 0
    switches: dict = field(default_factory=dict)
    broken: bool = False


class Blocking:
    """A loopback transport whose waits block until the message is there, or the epoch has
    broken."""

    def __init__(self, world, epoch, name, rank):
        self.world, self.epoch = world, epoch
        with world.changed:
            switch = epoch.switches.setdefault(name, Loopback(len(epoch.members)))
        self.inner = switch.transport(rank)
        self.rank, self.size, self.ordered, self.checks = rank, len(epoch.members), False, True

    def abandon(self, reason):
        self.world.break_up(self.epoch)

    def all_to_all(self, out, inp, tag):
        return self._post(self.inner.all_to_all, out, inp, tag)

    def all_gather(self, out, inp, tag):
        return self._post(self.inner.all_gather, out, inp, tag)

    def exchange(self, out, inp, wanted, tag):
        return self._post(self.inner.exchange, out, inp, wanted, tag)

    def _post(self, call, *arguments):
        with self.world.changed:
            self.world.at_message(self)
            if self.epoch.broken:
                raise PeerFailure(f"rank {self.rank}: somebody has gone")
            work = call(*arguments)
            self.world.changed.notify_all()
        rank = self.epoch.members[self.rank]
        return _Wait(self, work, lost=rank.messages == rank.loses_at)


class _Wait:
    def __init__(self, transport, work, *, lost):
        self.transport, self.work, self.lost = transport, work, lost

    def wait(self):
        world, epoch = self.transport.world, self.transport.epoch
        with world.changed:
            done = world.changed.wait_for(
                lambda: epoch.broken or not (self.work.missing | self.work.kept), PATIENCE
            )
            assert done, "a rank waited in vain, and nobody told it"
            if self.lost:
                world.break_up(epoch)
                raise PeerFailure(f"rank {self.transport.rank}: connection reset")
            self.work.wait()  # complete, although the epoch may have broken since


class Rank:
    """One process: its group, and the channels made over it. ``owed``: a number that it owes the
    others."""

    timeout = timedelta(seconds=PATIENCE)

    def __init__(self, world):
        self.world, self.channels, self.alive, self.messages = world, {}, True, 0
        self.epoch = Group([self])
        self.change = None
        self.kill_at = self.loses_at = None  # numbers of messages
        self.owed = 0.0

    # ---- what a loop needs of a group

    def rank(self):
        return self.epoch.members.index(self)

    def size(self):
        return len(self.epoch.members)

    @property
    def waiting(self):
        with self.world.changed:
            return sum(
                1
                for visitor in self.world.visitors
                if visitor.alive and self.epoch is self.world.current
            )

    def reform(self, timeout=None, *, report=b"", age=0, join=None, minimum=1, admit=True):
        assert admit, "there is nothing to rehearse"
        return self.world.reform(self, report, age, join is not None)

    def hand_over(self, leaving):
        """The first who stays owes from now on what the leavers do."""
        channel = self.channels["gradients"]
        mine = [self.owed if self.rank() in leaving else 0.0]
        given = channel.run(gathered(mine, transport=channel.transport, sequence=channel.take()))[
            :, 0
        ].sum()
        stay = [rank for rank in range(self.size()) if rank not in leaving]
        self.owed = 0.0 if self.rank() in leaving else self.owed + given * (self.rank() == stay[0])

    def leave(self):
        self.world.kill(self)

    def channel(self, name):
        """Over this rank's group as it is now, and as it will be."""
        channel = Channel(Blocking(self.world, self.epoch, name, self.rank()), name=name)
        self.channels[name] = channel
        return channel

    def connect(self):
        for name, channel in self.channels.items():
            transport = Blocking(self.world, self.epoch, name, self.rank())
            channel.transport, channel.rank, channel.size = (
                Counted(transport),
                transport.rank,
                transport.size,
            )
            channel._numbers = Numbers()


class World:
    def __init__(self):
        self.changed = threading.Condition(threading.RLock())
        self.current = None  # the epoch that trains
        self.visitors = []  # ranks that want to join
        self.arrived = defaultdict(dict)  # by epoch: what ranks said that form it anew
        self.ranks, self.threads, self.results, self.epochs = [], [], {}, 0

    # ---- processes

    def start(self, function, *args):
        """A process that runs ``function(rank, *args)``."""
        rank = Rank(self)
        self.ranks.append(rank)
        thread = threading.Thread(target=self._run, args=(rank, function, args), daemon=True)
        self.threads.append(thread)
        thread.start()
        return rank

    def _run(self, rank, function, args):
        try:
            self.results[rank] = function(rank, *args)
        except Killed:
            pass
        except BaseException as error:
            self.results[rank] = error
        finally:
            self.kill(rank)

    def kill(self, rank):
        """Whoever waits for it is told; it says no more."""
        with self.changed:
            rank.alive = False
            self.break_up(rank.epoch)
            self._form()

    def found(self, count):
        """A group of so many ranks that have been together from the start."""
        epoch = Group([Rank(self) for _ in range(count)])
        for rank in epoch.members:
            rank.epoch = epoch
        self.current, self.ranks = epoch, list(epoch.members)
        return epoch.members

    def go(self, ranks, function, *args):
        for rank in ranks:
            thread = threading.Thread(target=self._run, args=(rank, function, args), daemon=True)
            self.threads.append(thread)
            thread.start()

    def join(self):
        for thread in self.threads:  # to which others are added meanwhile
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a rank hangs"
        for result in self.results.values():
            if isinstance(result, BaseException):
                raise result
        return self.results

    # ---- groups

    def break_up(self, epoch):
        with self.changed:
            epoch.broken = True
            self.changed.notify_all()

    def at_message(self, transport):
        """Each message is a moment at which a process may die."""
        rank = transport.epoch.members[transport.rank]
        rank.messages += 1
        if rank.kill_at is not None and rank.messages >= rank.kill_at:
            raise Killed

    def reform(self, rank, said, age, joins):
        with self.changed:
            if not rank.alive:
                raise Killed
            before = rank.epoch
            self.break_up(before)
            rank.said, rank.age, rank.change = said, age, None
            if joins and before is not self.current and (self.current is not None):
                self.visitors.append(rank)
            else:
                if self.current is None or joins:
                    self.current = before
                self.arrived[before][rank] = said
            self._form()
            self.changed.notify_all()
            done = self.changed.wait_for(
                lambda: rank.change is not None or not rank.alive, PATIENCE
            )
            assert done, "reform hangs"
            if not rank.alive:
                raise Killed
            rank.connect()
            return rank.change

    def _form(self):
        """A new epoch, once all who live of the current one have come."""
        epoch = self.current
        if epoch is None:
            return
        living = [rank for rank in epoch.members if rank.alive]
        if not living and self.visitors:  # nobody is left of it: whoever waits begins anew
            first = self.visitors.pop(0)
            self.current = epoch = first.epoch
            self.arrived[epoch][first] = first.said
            living = [first]
        if not living or set(self.arrived[epoch]) < set(living):
            return
        newcomers = [rank for rank in self.visitors if rank.alive]
        self.visitors.clear()
        members = living + newcomers
        self.epochs += 1
        new = Group(members, self.epochs)
        sources = tuple(epoch.members.index(rank) for rank in living) + (None,) * len(newcomers)
        said = tuple(rank.said for rank in members)
        for number, rank in enumerate(members):
            rank.epoch = new
            rank.change = Change(new.number, number, len(epoch.members), sources, said)
        self.current = new
        self.changed.notify_all()


def until(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)
