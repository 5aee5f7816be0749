"""A training loop that continues when ranks die, leave or join.

    state = {"model": model, "optimizer": optimizer}
    for loss in commpress.elastic(train_step, state, data=loader, epochs=3):
        ...

If a step fails because a rank has died, left or joined, the present ranks repeat it, or copy its
result from a rank that has committed it. There is no vote on a step: a rank that begins the
exchange of the next one has committed this one, so ranks are at most one step apart. Newcomers and
ranks that are behind are healed over the loop's own channel.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from commpress.checksum import checksum_of
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel, any_rank
from commpress.collectives.transports.membership import differences
from commpress.errors import (
    CommunicationError,
    Excluded,
    InvalidArgument,
    NoQuorum,
    StorageError,
    check_counts,
)
from commpress.integrations.elastic.attendance import (
    Attendance,
    Declaration,
    at_sigterm,
    reformable,
)
from commpress.integrations.elastic.description import Description
from commpress.integrations.elastic.events import ElasticCounters, Events
from commpress.integrations.elastic.exact_means import (
    ExactMeans,
    check_ordered,
    exact_means_hook,
    replicas_of,
)
from commpress.integrations.elastic.healing import (
    Healed,
    gathered_hashes,
    hash_of,
    hash_of_all,
    packed,
    share,
    unpacked,
)
from commpress.integrations.elastic.repeat import (
    Build,
    Rehearsal,
    StepMark,
    fault_of,
    without_frames,
)
from commpress.integrations.elastic.sampler import Batches, Progress
from commpress.integrations.elastic.shared_state import (
    SharedState,
    check_named,
    check_reformable,
    heal,
)
from commpress.integrations.elastic.snapshots import Snapshots, newest
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.optimizer import CompressedOptimizer, RoundKind
from commpress.torch_private import hook_of

TRIES = 3  # failures of a step without a change of ranks before it raises
ATTEMPTS = 5  # failed attempts to reform the group before it raises
# seconds without newcomers after one could not join: at first, and at most
BACKOFF, LONGEST_BACKOFF = 1.0, 8.0
POLL = 0.1  # seconds between two checks for newcomers while there are too few ranks
NAME = "commpress"  # name of the loop's own entry in the shared state

log = logging.getLogger("commpress")


class ElasticOptions(TypedDict, total=False):
    """Keyword options of ``elastic``; ``Elastic`` explains them."""

    data: "DataLoader[Any] | None"
    epochs: int | None
    steps: int | None
    build: Callable[[], tuple[Callable[..., Any], Mapping[str, Any]]] | None
    snapshots: Snapshots | str | Path | None
    minimum: int
    patience: float
    join: Any
    timeout: timedelta | None
    hash_every: int | None
    events: str | Path | None
    process_group: Any


def elastic(
    train_step: Callable[..., Any] | None = None,
    state: Mapping[str, Any] | None = None,
    **options: Unpack[ElasticOptions],
) -> "Elastic":
    """Return an iterator over the results of ``train_step`` in the steps that this rank commits.
    ``options``: see ``Elastic``."""
    return Elastic(train_step, state, **options)


class Elastic:
    """Iterate over the steps of a run in the default group (backend "commpress") while ranks die,
    leave or join.

    - ``train_step``: takes a batch and does one step: forward, backward, one ``optimizer.step()``.
      A failed step is called again. Collectives of your own belong before ``optimizer.step()``.
    - ``state``: objects that must be the same on all ranks, by name: the model, optimizers,
      schedulers, a GradScaler. The position in the data and residuals need not be named.
    - ``data``: a DataLoader with an ``ElasticSampler``; None: ``train_step`` takes nothing. Where
      the sampler's ``batch_size`` is k times the loader's, a step takes a list of k batches
      (gradient accumulation).
    - ``epochs``, ``steps``: the end, whichever comes first.
    - ``build``: for models and optimizers that are divided among the ranks, in place of
      ``train_step`` and ``state``: constructs both for the present ranks. It is called again after
      every change; then the last snapshot is loaded.
    - ``snapshots``: a folder, or ``Snapshots``.
    - ``minimum``: ranks below which no step is taken; the others wait ``patience`` seconds for
      newcomers.
    - ``join``: the address of the others: ``group.contact`` of one of them, or "host:port" of a
      store; by default COMMPRESS_JOIN. A newcomer starts as a group of one
      (``init_process_group("commpress", rank=0, world_size=1, ...)``).
    - ``timeout``: of each agreement on the members; None: that of the group.
    - ``hash_every``: steps between two hashes of the weights in the events; by default
      COMMPRESS_HASH_EVERY, or never. Not with ``build``.
    - ``events``: a file for them; by default COMMPRESS_EVENTS.

    ``leave()``, or a first SIGTERM, hands this rank's residuals over and ends its loop.
    """

    def __init__(
        self,
        train_step: Callable[..., Any] | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        data: "DataLoader[Any] | None" = None,
        epochs: int | None = None,
        steps: int | None = None,
        build: Callable[[], tuple[Callable[..., Any], Mapping[str, Any]]] | None = None,
        snapshots: Snapshots | str | Path | None = None,
        minimum: int = 1,
        patience: float = 600.0,
        join: Any = None,
        timeout: timedelta | None = None,
        hash_every: int | None = None,
        events: str | Path | None = None,
        process_group: Any = None,
    ) -> None:
        self.group = reformable(process_group)
        self.attendance = Attendance(self.group, join, timeout)
        if (build is None) == (train_step is None) or (train_step is None) != (state is None):
            raise InvalidArgument(
                f"train_step is {train_step!r}, state {'given' if state is not None else None} and "
                f"build {build!r}, expected train_step and state, or build, which returns both"
            )
        if epochs is None and steps is None:
            raise InvalidArgument(
                "epochs and steps are both None, expected at least one of them, to end the run"
            )
        if epochs is not None and data is None:
            raise InvalidArgument(
                f"epochs is {epochs!r}, but data is None, which has no epochs: pass steps="
            )
        hash_every = (
            int(os.environ.get("COMMPRESS_HASH_EVERY", 0)) if hash_every is None else hash_every
        )
        check_counts(minimum=minimum, epochs=epochs or 0, steps=steps or 0, hash_every=hash_every)
        if build is not None and snapshots is None:
            raise InvalidArgument(
                "build is given without snapshots=: a divided model can only return to a snapshot "
                "when a rank is lost, so pass a folder"
            )
        self.batches, self.snapshots = (
            Batches(data),
            Snapshots(snapshots) if isinstance(snapshots, str | Path) else snapshots,
        )
        self.epochs, self.last_step, self.minimum, self.patience = (
            epochs,
            steps,
            max(minimum, 1),
            patience,
        )
        self.build: Build | None = None
        self.timeout, self.hash_every = timeout, hash_every
        self.progress, self.counters, self.events = (
            Progress(self.batches),
            ElasticCounters(),
            Events(events),
        )
        self.epoch = 0  # epoch of the group
        self._healed, self._halfway = True, False
        self._begun, self._beginning = monotonic(), self.progress.state_dict()
        self._counted = 0  # last step that was counted here
        self._failures = 0  # since the last committed step or change of ranks
        # seconds without newcomers, and the time when they end
        self._backoff = self._backoff_until = 0.0
        self._again = False  # the next step is a repeat
        self._seen: dict[int, int] = {}  # exchanges of local updates
        # this rank's samples of the current step, the window's beginning, and its place
        self._sent = range(0), 0, self._place
        self.channel = Channel.among(process_group, timeout=timeout, name="commpress-elastic")
        if build is not None:  # a newcomer builds after joining
            self.build = Build(build, self.group.registry)
            train_step, state = self.build() if self.attendance.join is None else (_nothing, {})
        self._take(train_step, state)  # type: ignore[arg-type]

    # ------------------------------------------------------------ trained objects

    def _take(self, train_step: Callable[..., Any], state: Mapping[str, Any]) -> None:
        """Train these objects from now on."""
        if not isinstance(state, Mapping) or (not state and train_step is not _nothing):
            raise InvalidArgument(
                f"state is {state!r}, expected a dictionary, as {{'model': model, 'optimizer': "
                f"optimizer}}"
            )
        if NAME in state:
            raise InvalidArgument(
                f"state has the name {NAME!r}, which the loop uses itself: choose another"
            )
        self.train_step, every = train_step, {**state, NAME: self.progress}
        if self.build is None:
            check_reformable(state)
            check_named(state)
        self.state = SharedState(every, None if self.build is None else self.channel)
        objects = list(state.values())
        self._locals = [each for each in objects if isinstance(each, LocalUpdates)]
        self._modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        self._optimizers = [each for each in objects if isinstance(each, CompressedOptimizer)]
        self._mark = StepMark(objects)
        replicas = replicas_of(self._modules, self.group) if self.build is None else []
        self._describe(state, replicas)
        self._rehearsal = Rehearsal(replicas, self._mark)
        for each in replicas:
            if not hook_of(each):
                check_ordered(each)
                each.register_comm_hook(ExactMeans(self.group), exact_means_hook)

    def _describe(
        self, state: Mapping[str, Any], replicas: Sequence[DistributedDataParallel]
    ) -> None:
        """Set the description by which unlike newcomers are refused. It leaves out models made by
        ``build``, which newcomers do not have yet."""
        snapshots = None if self.snapshots is None else self.snapshots.every
        self.description = Description(
            state if self.build is None else {},
            replicas,
            self.batches.sampler,
            build=self.build is not None,
            epochs=self.epochs,
            steps=self.last_step,
            minimum=self.minimum,
            **{"data: batches in a step": self.batches.count, "snapshots.every": snapshots},
        )
        if hasattr(self.group, "membership"):
            self.group.membership.description = self.description

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.progress.step

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    @property
    def _place(self) -> tuple[int, int, int]:
        """Rank, size and epoch."""
        return self.rank, self.size, self.epoch

    @property
    def contact(self) -> str:
        """Address for newcomers, for their ``join``."""
        return str(self.group.contact)

    # ------------------------------------------------------------ steps

    def __iter__(self) -> Iterator[Any]:
        self._begun, self.counters.most_ranks = monotonic(), self.size
        restore = at_sigterm(self.leave)
        try:
            self._start()
            while not self.left and not (self._has_ended() and self._all_have_ended()):
                if self._has_ended():
                    continue
                if self._somebody_waits():
                    self._reform(between=True)
                    continue
                committed, result = self._attempt()
                if committed:
                    yield result
        except Exception as error:
            self._tell("error", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            restore()
            self.counters.seconds = monotonic() - self._begun
        self._tell("end", **self.counters.as_dict())

    def leave(self) -> None:
        """End this rank's loop as soon as the others have taken over its residuals.

        Divided models end after the next snapshot, local updates after the next exchange. If nobody
        stays, a last snapshot is taken.
        """
        self.attendance.leave()

    @property
    def left(self) -> bool:
        """True if this rank has left and the others continue without it."""
        return self.attendance.left

    def close(self) -> None:
        """Release the snapshots' directory and the file of events."""
        self._mark.close()
        if self.snapshots is not None:
            self.snapshots.close()
        self.events.close()

    def _attempt(self) -> tuple[bool, Any]:
        """Try one step; return whether this rank has committed it with a result, and the result."""
        sampler = self.batches.sampler
        self._sent = (
            (range(0), 0, self._place)
            if sampler is None
            else (sampler.share, sampler.position, self._place)
        )
        self.batches.ready()
        if self._again:
            self._mark.draw_again()
        self._mark.begin()
        begun = monotonic()
        try:
            result = self.train_step(*self.batches.next())
        except Exception as error:
            fault, failure = fault_of(error), error
            if fault is None:
                raise
        else:
            self._committed(monotonic() - begun)
            return True, result
        # the frames would keep objects of the former ranks alive
        if self.build is not None:
            without_frames(failure)
        self._recover(fault, failure)
        return False, None

    def _committed(self, seconds: float) -> None:
        sampler = self.batches.sampler
        self._again, self._failures = False, 0
        if sampler is not None:
            sampler.commit()
        self.progress.step += 1
        self._count(seconds)
        self._save()

    def _count(self, seconds: float) -> None:
        """Count the last step as committed: this rank begins the exchange of the next one."""
        share, position, place = self._sent
        counters = self.counters
        self._counted = self.step
        counters.steps += 1
        counters.samples += len(share)
        counters.ranks += place[1]
        counters.most_ranks = max(counters.most_ranks, self.size)
        counters.step_seconds += seconds
        counters.seconds = monotonic() - self._begun
        if self.events.wanted:
            # a divided model has other weights on each rank
            due = self.hash_every and self.step % self.hash_every == 0 and self.build is None
            hashed = {"hash": f"{self.weights_hash():016x}"} if due else {}
            read = {"samples": [share.start, share.stop], "position": position}
            self.events.write("commit", self.step, place, read | hashed)

    def _has_ended(self) -> bool:
        """Return whether this rank has committed the last step."""
        sampler = self.batches.sampler
        ended = self.last_step is not None and self.step >= self.last_step
        return ended or (
            self.epochs is not None and sampler is not None and sampler.epoch >= self.epochs
        )

    def _all_have_ended(self) -> bool:
        """Return whether all ranks have ended; if some are behind or new, the others help to
        repeat the steps that these have not committed."""
        if not self._vote(False, "end"):
            return True
        try:
            self._reform()
        except CommunicationError as error:
            log.info("all steps are committed here, and the other ranks have ended: %s", error)
            return True
        return False

    def _asked(self, flag: bool, what: str) -> bool:
        """Return whether ``flag`` is set on some rank, with all ranks at this step."""
        channel = self.channel
        steps = any_rank(
            flag, channel, channel.take(), torch.device("cpu"), what=what, numel=self.step
        )
        return channel.run(steps)

    def _vote(self, flag: bool, what: str) -> bool:
        """Return whether ``flag`` is set on some rank, or ranks are lost or want to reform the
        group."""
        try:
            return self._asked(flag, what)
        except CommunicationError as error:
            self._note(error)
            return True

    def state_hash(self) -> int:
        """Return xxh3 of all shared tensors; of the whole model if it is divided, then
        collective."""
        _, tensors = self.state.taken_apart()
        return hash_of_all(b"", [hash_of(each) for each in tensors])

    def weights_hash(self) -> int:
        """Return xxh3 of all parameters, which every rank must have whole."""
        return hash_of_all(
            b"", [hash_of(each) for module in self._modules for each in module.parameters()]
        )

    def _somebody_waits(self) -> bool:
        """Return whether a newcomer waits at this rank, or this rank wants to leave; with local
        updates whether that holds for any rank, exchanged when all are at the same step."""
        if self._locals:
            if not any(
                each.counters.exchanges != self._seen.get(id(each)) for each in self._locals
            ):
                return False
            self._seen = {id(each): each.counters.exchanges for each in self._locals}
            return self._vote(self._knocks or self.attendance.leaving, "newcomers")
        if any(each.round() is RoundKind.LOCAL for each in self._optimizers):
            # such a step has no exchange: the others may be at a later one
            return False
        return self._knocks or (self.attendance.leaving and self.build is None)

    # ------------------------------------------------------------ faults

    def _recover(self, fault: CommunicationError, error: Exception) -> None:
        """Undo the failed step, and continue with the remaining ranks."""
        self._note(fault)
        log.warning("step %d was interrupted: %s", self.step, fault)
        self._failures += not self._others_reform()
        if self._failures > TRIES - (not self.counters.steps):  # a newcomer gives up first
            raise error
        if self._mark.applied:
            self._halfway = True
            if self.batches.sampler is not None:
                self.batches.sampler.commit()
            self.progress.step += 1
            self._mark.forget()
            log.warning(
                "step %d failed after optimizer.step(): it counts as committed, but the rest of "
                "train_step was not run here. Call your own collectives before optimizer.step()",
                self.step - 1,
            )
        else:
            self._mark.undo()
            self._again = True
        self._reform()

    def _reform(self, *, between: bool = False) -> None:
        """Agree on members until there are enough and all have the same state. ``between``: all are
        at the end of a round."""
        begun, failed = monotonic(), 0
        self.counters.reforms += 1
        while True:
            if self.build is not None:
                self._let_go()
            try:
                change = self._agreed(
                    leaves=self.attendance.leaving and (between or not self._locals)
                )
                self.batches.restart()
                self._settle(change)
                if leavers := Declaration.leavers(change):
                    if self._goes(change, leavers):
                        return
                elif change.size >= self.minimum or self._wait_for_more():
                    break
                else:
                    between = True
            except NoQuorum:
                raise
            except Exception as error:
                fault, failed = fault_of(error), failed + 1
                late = (
                    self.attendance.join is not None
                    and monotonic() > begun + self.attendance.patience.total_seconds()
                )
                if fault is None or failed >= ATTEMPTS or late:
                    raise
                if self.build is not None:
                    without_frames(error)
                # stopped or disconnected for too long: this rank can rejoin as a newcomer
                if isinstance(fault, Excluded):
                    log.warning(
                        "the others have continued, and this rank joins them again: %s", fault
                    )
                    self.attendance.join_again(fault)
                    self._healed, self._halfway = False, False  # its state is out of date
                else:
                    log.warning("another rank was lost while the group reformed: %s", fault)
        pause = monotonic() - begun
        self._backoff = (
            0.0
            if change.lost or change.new
            else min(max(2 * self._backoff, BACKOFF), LONGEST_BACKOFF)
        )
        self._backoff_until = monotonic() + self._backoff
        self.counters.pause_seconds += pause
        self._tell("reform", pause=pause, lost=list(change.lost), new=list(change.new))

    def _goes(self, change: Change, leavers: Sequence[int]) -> bool:
        """Hand the residuals of leaving ranks to the others; return true if this rank has left."""
        stay = [rank for rank in range(change.size) if rank not in leavers]
        if change.rank not in leavers:
            # before the end of the handover, after which a rank may be gone at once
            self.attendance.going = set(leavers)
        if stay:
            self.group.hand_over(leavers)
        elif self.build is None and self.snapshots is not None and self.snapshots.last != self.step:
            self._write()
        if change.rank not in leavers:
            return False
        self.group.leave()
        self.attendance.left = True
        self._tell("leave", stay=stay)
        return True

    def _others_reform(self) -> bool:
        """Return whether another rank reforms the group, for example for a newcomer: then a step
        has not failed because of this rank."""
        return bool(getattr(getattr(self.group, "guard", None), "reforming", ()))

    @property
    def _knocks(self) -> bool:
        """True if a newcomer that may still join waits at this rank."""
        waiting = bool(self.group.waiting)  # also refuses unlike newcomers
        return (
            waiting
            and monotonic() >= self._backoff_until
            and self._rehearsal.over(self.counters.steps)
        )

    def _agreed(self, *, leaves: bool) -> Change:
        """Reform the group itself. Owners that cannot follow are an error, unless ``build`` makes
        them again."""
        report = Declaration(
            self.step, healed=self._healed, halfway=self._halfway, leaves=leaves
        ).packed()
        before, age = (
            getattr(self.group, "change", None),
            0 if self.attendance.join is not None else self.step,
        )
        # newcomers have had their own first steps and could not take part in these
        admit = self._rehearsal.over(self.counters.steps)
        try:
            change: Change = self.group.reform(
                self.timeout, report=report, age=age, join=self.attendance.join, admit=admit
            )
        except InvalidArgument:
            # the group was not reformed
            if self.build is None or getattr(self.group, "change", None) in (None, before):
                raise
            change = self.group.change
        self.attendance.join, self.epoch = None, change.epoch
        if change.lost or change.new:
            self._failures = 0
        lost = set(change.lost) - self.attendance.going
        self.counters.left += len(change.lost) - len(lost)
        self.attendance.going = set()
        self.counters.faults += bool(lost)
        self.counters.lost += len(lost)
        self.counters.joined += len(change.new)
        return change

    def _settle(self, change: Change) -> None:
        """Give all ranks the same state: newcomers, ranks behind, and ranks halfway through a step
        that others have finished."""
        if self.batches.sampler is not None:
            self.batches.sampler.reform(change)
        if self.build is not None:
            self._healed &= change.was is not None
            self._rebuild(of=Declaration.healed_before(change))
            self._healed, self._halfway, self._counted = True, False, self.step
            return
        donors = Declaration.donors(change)
        if not donors:
            raise NoQuorum(
                f"none of the {change.size} remaining ranks has the state of the run: those that "
                "had it died before the newcomers were healed. Start again from a snapshot"
            )
        # a rank that is a step behind still has a valid state, if those ahead die now
        self._healed &= change.was is not None
        took_part = self._healed
        donors = self._alike_among(donors)
        needy = [rank for rank in range(change.size) if rank not in donors]
        healed = self.channel.run(heal(self.state, self.channel, donors=donors, needy=needy))
        self._settled(healed, needs=change.rank in needy)
        if self.snapshots is not None and change.was is None:
            self.snapshots.give_way(self.step)
        # committed by others with this rank's data, or by this rank in part
        if took_part and self.step == self._counted + 1:
            self._count(0.0)
        self._counted = self.step

    def _alike_among(self, donors: Sequence[int]) -> list[int]:
        """Return the donors with the weights of the first: a step that changes weights more than
        once may have been interrupted anywhere."""
        if self._locals:
            return list(donors)
        hashes = self.channel.run(gathered_hashes(self.channel, [self.weights_hash()]))[:, 0]
        if others := [rank for rank in donors if hashes[rank] != hashes[donors[0]]]:
            log.warning("ranks %s have other weights than rank %d, which count", others, donors[0])
        return [rank for rank in donors if rank not in others]

    def _settled(self, healed: Healed | None, *, needs: bool) -> None:
        """Record that this rank has the state of the others."""
        self._healed, self._halfway = True, False
        if healed is None:
            return
        if needs:
            self._again = False
            self.counters.healed += 1
            self.counters.healed_bytes += healed.nbytes
            donors, told = sorted(healed.given), f"{healed.hash:016x}"
            self._tell(
                "healed", seconds=healed.seconds, hash=told, bytes=healed.nbytes, donors=donors
            )
            log.info(
                "healed by ranks %s: %d bytes in %.1f s", donors, healed.nbytes, healed.seconds
            )
        self.counters.given_bytes += healed.given.get(self.channel.rank, 0)

    def _wait_for_more(self) -> bool:
        """Wait for newcomers below the minimum, on all ranks together; return whether there are
        enough."""
        if not self._rehearse():
            return False
        until = monotonic() + self.patience
        log.warning(
            "%d ranks remain, expected at least %d: waiting for newcomers",
            self.size,
            self.minimum,
        )
        while monotonic() < until:
            if self._vote(bool(self.group.waiting) or self.attendance.leaving, "newcomers"):
                return False
            sleep(POLL)
        raise NoQuorum(
            f"{self.size} ranks remain, minimum is {self.minimum}, and no process joined within "
            f"{self.patience:g} s: start more processes with join=, or pass a smaller minimum"
        )

    # ------------------------------------------------------------ the beginning

    def _start(self) -> None:
        """Load the newest snapshot, join, and give all ranks the same state before the first
        step."""
        self._seen = {id(each): each.counters.exchanges for each in self._locals}
        joins = self.attendance.begin()
        if self.snapshots is not None:
            self.snapshots.open()
            if self.build is None and self.snapshots.last and not joins and not self.counters.steps:
                step, document, tensors = self.snapshots.load()
                self.state.load(document, tensors)
                log.info("resuming from the snapshot of step %d in %s", step, self.snapshots.place)
        if joins:
            self._rehearse()
            self._reform()
            self.attendance.announce()
        elif self.size > 1:
            alike = self._alike()
            if not alike:
                self._reform()
        if self.build is not None and not joins and not self.counters.steps:
            self._rebuild(built=True)
        self._counted = self.step
        if self.size < self.minimum and not self._wait_for_more():
            self._reform()

    def _rehearse(self) -> bool:
        """Run the first steps of replicas; return False if a rank died during them."""
        if self._rehearsal.over(self.counters.steps):
            return True
        try:
            self._rehearsal.run(
                self.train_step, self.state, self.batches, self.group.registry.owners
            )
        except Exception as error:
            if (fault := fault_of(error)) is None:
                raise
            self._note(fault)
            return False
        if self._vote(False, "rehearsal"):
            return False
        self._rehearsal.end()
        return True

    def _alike(self) -> bool:
        """Give ranks that were started together the newest of their snapshots, which may be of
        different steps. Return False if a rank is lost."""
        channel = self.channel
        try:
            mine = packed(dict(self.description()), [])
            numbers = [float(part) for part in (self.step, *divmod(checksum_of(mine), 1 << 32))]
            told: np.ndarray = channel.run(channel.gathered(numbers))
            steps = told[:, 0]
            self._compare(told[:, 1:], mine)
            if self.build is None and (steps != steps[0]).any():
                donors = [rank for rank, step in enumerate(steps) if step == steps.max()]
                needy = [rank for rank in range(self.size) if rank not in donors]
                healed = channel.run(heal(self.state, channel, donors=donors, needy=needy))
                self._settled(healed, needs=channel.rank in needy)
        except CommunicationError as error:
            self._note(error)
            return False
        return True

    def _compare(self, reports: np.ndarray, mine: bytes) -> None:
        """Raise on all ranks if some were started with other data, models or options than rank
        0."""
        unlike = [rank for rank, each in enumerate(reports) if (each != reports[0]).any()]
        if not unlike:
            return
        alike = [rank for rank in range(self.size) if rank not in unlike]
        first, _, _ = self.channel.run(share(mine, [], self.channel, donors=alike, needy=unlike))
        found = differences(unpacked(first, []), self.description(), others="rank 0 has")
        raise InvalidArgument(
            f"ranks {unlike} were started with other settings than rank "
            f"0{': ' + found if found else ', listed in their own errors'}. Start all of them "
            "with the same data, models and options"
        )

    # ------------------------------------------------------------ snapshots

    def _save(self) -> None:
        """Take a snapshot if it is due and all agree; ranks with divided models may leave after
        it."""
        if self.snapshots is None or self.step % self.snapshots.every:
            return
        leaves = False
        try:
            leaves = self._asked(self.attendance.leaving and self.build is not None, "snapshot")
            self._write()
        except Exception as error:  # other ranks may not have this step
            fault = fault_of(error)
            if fault is None:
                raise
            self._note(fault)
            if self.build is not None:
                without_frames(error)
            leaves = True
        if leaves:
            self._reform()

    def _write(self) -> None:
        """Save a snapshot of this step, as agreed by all ranks."""
        assert self.snapshots is not None
        begun = monotonic()
        content = self.state.taken_apart()
        try:
            self.snapshots.save(self.step, *content)
        except StorageError as error:
            self.counters.failed_snapshots += 1
            log.error(
                (
                    "the snapshot of step %d could not be written, and the run continues with that "
                    "of step %d: %s"
                ),
                self.step,
                self.snapshots.last,
                error,
            )
            self._tell("snapshot", error=str(error), last=self.snapshots.last)
            return
        self.counters.snapshots += 1
        self.counters.snapshot_seconds += monotonic() - begun
        self._tell("snapshot", seconds=monotonic() - begun)

    # ------------------------------------------------------------ divided models

    def _let_go(self) -> None:
        """Release objects that belong to the former ranks."""
        self._mark.close()
        assert self.build is not None
        objects = self.state.objects
        self._take(_nothing, {})
        self.build.let_go(objects)

    def _rebuild(self, *, built: bool = False, of: Sequence[int] = ()) -> None:
        """Construct divided objects for the present ranks and load the newest snapshot ``of`` some
        ranks, if there is one."""
        assert self.build is not None
        assert self.snapshots is not None
        if not built:
            self._take(*self.build())
        before = self.step
        step, document, tensors = newest(self.snapshots, self.channel, of=of)
        self.snapshots.give_way(step)
        if step:
            self.state.load(document, tensors)
        elif not built:
            self.progress.load_state_dict(self._beginning)
        self.counters.undone_steps += max(before - self.step, 0)
        if step or before:
            self._tell("restore", was=before)

    # ------------------------------------------------------------ events

    def _note(self, fault: CommunicationError) -> None:
        self._tell("fault", error=str(fault), ranks=list(fault.ranks))

    def _tell(self, kind: str, **more: Any) -> None:
        self.events.write(kind, self.step, self._place, more)


def _nothing() -> None:
    """Do nothing, as the step without a model."""
