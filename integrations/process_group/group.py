"""The process group "commpress": Gloo and NCCL, or MPI, behind a guard, with optional compression.

Every call is first described to all peers (``guard``) and then carried out by torch's own group, or
by ``mpi_group``. Calls over NCCL are issued at once, because NCCL neither ends the process nor
blocks the host; the guard checks them in the meantime.
"""

# torch's stubs give each collective two or three overloads; one signature here takes them all.
# mypy: disable-error-code="override,assignment"

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.constants import default_pg_timeout

from commpress.collectives.change import Change
from commpress.collectives.transports.epochs import Terms
from commpress.collectives.transports.membership import Membership, contact_of
from commpress.collectives.transports.torch import let_go
from commpress.errors import CommunicationError
from commpress.integrations.process_group.call import FutureWork, GroupWork, profiling
from commpress.integrations.process_group.control_connections import ControlConnections, first_epoch
from commpress.integrations.process_group.group_options import GroupOptions, group_options_from
from commpress.integrations.process_group.guard import Guard
from commpress.integrations.process_group.inner import (
    CurrentBackend,
    at_once,
    mpi_group,
    options_of,
    private_transports,
    ready,
    torch_group,
)
from commpress.integrations.process_group.records import (
    NO_REDUCTION,
    Record,
    all_to_all,
    call,
    counts,
    receiving,
    sending,
)
from commpress.integrations.process_group.reducer import GroupReducer
from commpress.integrations.process_group.reform import (
    Reformation,
    Registry,
    announce,
    appointed_terms,
    call_all,
    cause_of,
    check_reconfigures,
    check_reform,
    fail_subgroups,
    leave_subgroups,
    stop,
    terms_of,
)
from commpress.torch_private import RECONFIGURES, AllgatherOptions, is_default

Tensors = list[torch.Tensor]


class ProcessGroup(dist.ProcessGroup):
    """A process group made by ``init_process_group("commpress")`` and ``new_group``, or directly,
    like ``ProcessGroupGloo``.

    - ``pg_options``: the calls that may be compressed; None reads ``COMMPRESS_GROUP_OPTIONS``,
      without which all are exact.
    - ``name``: name of its backend; "gloo" if it replaces Gloo.
    - ``inner``: carrier of data: torch's Gloo and NCCL, or MPI.
    - ``formed``: False for a group that has no members, and allows no calls, until
      ``reconfigure``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = default_pg_timeout,
        *,
        pg_options: GroupOptions | str | None = None,
        global_ranks: Sequence[int] | None = None,
        name: str = "gloo",
        inner: Literal["torch", "mpi"] = "torch",
        formed: bool = True,
    ) -> None:
        self._rank, self._size, self._formed = rank, size, formed
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.pg_options, self._called = group_options_from(pg_options), name
        self._store, self._timeout = store, timeout
        self._global_ranks = list(global_ranks or range(size))
        make = mpi_group if inner == "mpi" else torch_group
        self._inner: Any
        self._inner, self._abort = make(dist.PrefixStore("data", store), rank, size, timeout, self)
        self.options = self._get_backend(torch.device("cpu")).options
        self.guard: Guard | None = None
        # objects that follow changes of the group; stores with its members
        self.registry, self.stores = Registry(), [store]
        self.change: Change | None = None  # the last change of ranks
        # store of the epochs and its address (None: in this process)
        self.held_store: tuple[tuple[str, int] | None, Any] | None = None
        self._parts: list[Any] = []  # to close with the group
        weakref.finalize(self, _close, self._parts)
        self._membership: Membership | None = None
        connections = None
        if size > 1:
            self._membership = first_epoch(dist.PrefixStore("guard", store), rank, size)
            self._parts.append(self._membership)
            connections = ControlConnections(self._membership, self._membership.epoch, timeout)
        self.reducer = GroupReducer(self.pg_options, rank, size, self._private())
        self.registry.on_reform(self.reducer)
        self._connect(connections)
        self._backward: tuple[int, list[GroupWork]] = (-1, [])

    def _private(self) -> Any:
        store = dist.PrefixStore("compressed", self._store)
        check = partial(_check_peers, weakref.ref(self))
        return private_transports(self._inner, store, self._rank, self._size, self._timeout, check)

    def _connect(self, connections: ControlConnections | None) -> None:
        """Guard the calls, if there are other ranks."""
        self.guard = None
        if connections is not None:
            self.guard = Guard(
                connections,
                timeout=self._timeout,
                abort=partial(call_all, [self._abort, self.reducer.abort]),
                name=self._peer_names(),
                reforms=partial(_reforms, weakref.ref(self)),
            )
        self._parts[:] = [
            part for part in (self.guard, self.reducer, self._membership) if part is not None
        ]

    @property
    def timeout(self) -> timedelta:
        """Timeout of every call."""
        return self._timeout

    @property
    def communicator(self) -> Any:
        """MPI communicator of these ranks, for making copies; None over torch's own groups."""
        return getattr(self._inner, "communicator", None)

    @property
    def counters(self) -> Any:
        """Counters of this group's compressed and exact calls."""
        return self.reducer.counters

    # ------------------------------------------------------------ collectives

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GroupWork:
        tensors = _listed(tensors)
        opts = options_of(dist.AllreduceOptions, opts, timeout, named, "reduceOp")
        numel, op = tensors[0].numel() if tensors else 0, opts.reduceOp
        codec = self.reducer.codec_for(
            "all_reduce", tensors, numel=numel, op=op, plain=len(tensors) == 1
        )
        if not codec:
            return self._exact("all_reduce", self._inner.allreduce, (tensors,), tensors, opts)
        return self._compressed("all_reduce", tensors[0], tensors[0], tensors, opts, codec)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        self.reducer.left_alone(tensors, "coalesced")
        start = self._inner.allreduce_coalesced
        return self._exact("all_reduce_coalesced", start, (tensors,), tensors, opts)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GroupWork:
        tensors = _listed(tensors)
        opts = options_of(dist.BroadcastOptions, opts, timeout, named, "rootRank")
        numel, plain = sum(tensor.numel() for tensor in tensors), len(tensors) == 1
        codec = self.reducer.codec_for("broadcast", tensors, numel=numel, plain=plain)
        if not codec:
            return self._exact("broadcast", self._inner.broadcast, (tensors,), tensors, opts)
        issue = self.reducer.broadcast(tensors[0], opts.rootRank)
        record = _record("broadcast", tensors, opts, codec)
        return self._begin(record, lambda work: issue(), tensors, opts)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> GroupWork:
        tensors = _listed(tensors)
        opts = options_of(dist.ReduceOptions, opts, timeout, named, "rootRank")
        if op is not None:
            opts.reduceOp = op
        return self._exact("reduce", self._inner.reduce, (tensors,), tensors, opts)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(AllgatherOptions, opts, timeout, {}, "")
        self.reducer.codec_for("all_gather", inputs, numel=0, plain=False)
        return self._exact("all_gather", self._inner.allgather, (outputs, inputs), inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        start, opts = self._inner.allgather_coalesced, opts or AllgatherOptions()
        return self._exact("all_gather_coalesced", start, (outputs, inputs), inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        start, opts = self._inner._allgather_base, opts or AllgatherOptions()
        equal = output.numel() == self._size * input.numel()
        codec = self.reducer.codec_for(
            "all_gather", [input, output], numel=output.numel(), plain=equal
        )
        if codec:
            return self._compressed("all_gather", input, output, [input], opts, codec)
        return self._exact("all_gather_single", start, (output, input), [input], opts, [output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        name, opts = "all_gather_single_coalesced", opts or AllgatherOptions()
        start = self._inner.allgather_into_tensor_coalesced
        self.reducer.codec_for("all_gather", inputs, numel=0, plain=False)
        return self._exact(name, start, (outputs, inputs), inputs, opts, outputs)

    def gather(self, outputs: Any, inputs: Any, *how: Any, **named: Any) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        return self._rooted("gather", dist.GatherOptions, inputs, (outputs, inputs), *how, **named)

    def scatter(self, outputs: Any, inputs: Any, *how: Any, **named: Any) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        return self._rooted(
            "scatter", dist.ScatterOptions, outputs, (outputs, inputs), *how, **named
        )

    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(dist.ReduceScatterOptions, opts, timeout, named, "reduceOp")
        start = self._inner.reduce_scatter
        self.reducer.codec_for("reduce_scatter", outputs, numel=0, plain=False)
        return self._exact("reduce_scatter", start, (outputs, inputs), outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        start, opts = self._inner._reduce_scatter_base, opts or dist.ReduceScatterOptions()
        equal = input.numel() == self._size * output.numel()
        codec = self.reducer.codec_for(
            "reduce_scatter", [input, output], numel=input.numel(), op=opts.reduceOp, plain=equal
        )
        if codec:
            return self._compressed("reduce_scatter", input, output, [output], opts, codec)
        return self._exact("reduce_scatter_single", start, (output, input), [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        name, opts = "reduce_scatter_single_coalesced", opts or dist.ReduceScatterOptions()
        start = self._inner.reduce_scatter_tensor_coalesced
        self.reducer.codec_for("reduce_scatter", outputs, numel=0, plain=False)
        return self._exact(name, start, (outputs, inputs), outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllToAllOptions()
        gives, takes = [t.numel() for t in inputs], [t.numel() for t in outputs]
        start = partial(self._inner.alltoall, outputs, inputs, opts)
        self.reducer.codec_for("all_to_all", inputs, numel=0, plain=False)
        return self._all_to_all("all_to_all", inputs[0].dtype, gives, takes, start, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        opts = options_of(dist.AllToAllOptions, opts, timeout, {}, "")
        gives = counts(input, input_splits, self._size)
        takes = counts(output, output_splits, self._size)
        start: Callable[[], Any] = partial(
            self._inner.alltoall_base, output, input, list(output_splits), list(input_splits), opts
        )
        own, fits = gives[self._rank], sum(gives) == input.numel() and sum(takes) == output.numel()
        rows = input.dim() > 0 and input.shape[1:] == output.shape[1:]
        plain = fits and own == takes[self._rank] and rows
        codec = self.reducer.codec_for("all_to_all", [input, output], numel=0, plain=plain)
        if codec:
            start = self.reducer.all_to_all(output, input, output_splits, input_splits, own)
        return self._all_to_all(
            "all_to_all_single", input.dtype, gives, takes, start, [output], opts, codec
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        opts = options_of(dist.BarrierOptions, opts, timeout, {}, "")
        return self._exact("barrier", self._inner.barrier, (), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run Gloo's monitored barrier, which names missing ranks; over MPI the guard names
        them."""
        self._check_formed()
        if self.communicator is None:
            self._inner.monitored_barrier(timeout, wait_all_ranks)
        else:
            self.barrier().wait(timeout or timedelta())

    # ------------------------------------------------------------ point to point

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> GroupWork:
        record = sending(tensors[0], tag)
        return self._point_to_point(self._inner.send, tensors, peer, record)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> GroupWork:
        record = receiving(tensors[0], tag)
        return self._point_to_point(self._inner.recv, tensors, peer, record)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        if self.guard is None:
            return self._started(
                GroupWork(None, lambda work: self._inner.recv_anysource(tensors, tag), tensors)
            )
        # a profiler knows this call by its name, so Gloo must find the source
        profiled = profiling() and self.communicator is None

        def issue(work: GroupWork) -> Any:
            return (
                self._inner.recv_anysource(tensors, tag)
                if profiled
                else self._inner.recv(tensors, work.source, tag)
            )

        work = GroupWork(self.guard, issue, tensors)
        self.guard.any_source(receiving(tensors[0], tag), work)
        return self._left_to_guard(work)

    def _point_to_point(
        self, start: Callable[..., Any], tensors: Tensors, peer: int, record: Record
    ) -> GroupWork:
        work = GroupWork(self.guard, lambda work: start(tensors, peer, record.root), tensors)
        if self.guard is None or peer == self.rank() or at_once(self._inner, work.tensors):
            return self._started(work)
        ready(work.tensors)
        self.guard.point_to_point(record, peer, work)
        return self._left_to_guard(work)

    # ------------------------------------------------------------ names of torch before 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------ every call

    def _rooted(
        self,
        name: str,
        kind: type,
        tensors: Tensors,
        ends: tuple[Any, ...],
        opts: Any = None,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> GroupWork:
        """Make a call that begins or ends at one rank. ``tensors``: those that every rank has."""
        opts = options_of(kind, opts, timeout, named, "rootRank")
        return self._exact(name, getattr(self._inner, name), ends, tensors, opts)

    def _exact(
        self,
        name: str,
        start: Callable[..., Any],
        ends: tuple[Any, ...],
        described: Tensors,
        opts: Any,
        result: Tensors | None = None,
    ) -> GroupWork:
        """Make a call of torch's own group. ``described``: tensors that are alike on all ranks."""
        return self._begin(
            _record(name, described, opts),
            lambda work: start(*ends, opts),
            described if result is None else result,
            opts,
        )

    def _compressed(
        self,
        name: str,
        input: torch.Tensor,
        output: torch.Tensor,
        described: Tensors,
        opts: Any,
        codec: str,
    ) -> GroupWork:
        issue = self.reducer.steps(name, input, output, getattr(opts, "reduceOp", None))
        called = name if name == "all_reduce" else f"{name}_single"
        record = _record(called, described, opts, codec)
        return self._begin(record, lambda work: issue(), [output], opts)

    def _all_to_all(
        self,
        name: str,
        dtype: torch.dtype,
        gives: Sequence[int],
        takes: Sequence[int],
        start: Callable[[], Any],
        tensors: Tensors,
        opts: Any,
        codec: str = "",
    ) -> GroupWork:
        records = all_to_all(name, dtype, gives, takes, codec)
        if len({*gives, *takes}) == 1:
            return self._begin(records[0], lambda work: start(), tensors, opts)
        record = {r: each for r, each in enumerate(records) if r != self._rank}
        expected = {r: each.mirrored() for r, each in record.items()}
        return self._begin(record, lambda work: start(), tensors, opts, expected)

    def _begin(
        self,
        record: Record | dict[int, Record],
        issue: Callable[[GroupWork], Any],
        tensors: Tensors,
        opts: Any,
        expected: dict[int, Record] | None = None,
    ) -> GroupWork:
        """Describe the call to the peers, and wait for their agreement unless the call is
        asynchronous."""
        work = GroupWork(self.guard, issue, tensors)
        if self.guard is None:
            return self._started(work)
        work.early = at_once(self._inner, tensors)
        work.sliced = not work.early
        if work.sliced:
            ready(tensors)
        else:
            inner = issue(work)
            work.issue = lambda work: inner
        try:
            self.guard.collective(record, work, expected)
        except CommunicationError as error:
            if torch._C._current_graph_task_id() < 0:
                raise
            # no raise: DDP's C++, which calls this at the end of a backward, must complete that
            work.fail(error)
        if not getattr(opts, "asyncOp", True) or profiling():
            if not work.settled:
                self.guard.settle(work)
            if work.error is not None:
                raise work.error
            return work
        self._queue_for_autograd(work)
        return self._left_to_guard(work)

    def _left_to_guard(self, work: GroupWork) -> GroupWork:
        """Let the guard's thread issue the call when all agree.

        While a profiler runs, which sees only calls of the profiled thread, the waiting thread
        issues the call instead.
        """
        if self.guard is not None and not work.settled and not profiling():
            self.guard.nudge()
        return work

    def _started(self, work: GroupWork) -> GroupWork:
        self._check_formed()
        work.start()
        if work.error is not None:
            raise work.error
        return work

    def _check_formed(self) -> None:
        if not self._formed:
            raise CommunicationError(
                "this group has no members: call dist._reconfigure(uuid, handles) with all handles "
                "first"
            )

    def _queue_for_autograd(self, work: GroupWork) -> None:
        """Let the running backward wait for this call, so that its error keeps its type.

        DDP waits only for futures, and turns an exception in one into "RuntimeError: Unable to
        cast".
        """
        task = torch._C._current_graph_task_id()
        if task < 0:
            return
        if self._backward[0] != task:
            works: list[GroupWork] = []
            self._backward = (task, works)
            if torch._C._current_autograd_node() is not None:
                Variable._execution_engine.queue_callback(partial(_wait_all, works))
        self._backward[1].append(work)

    # ------------------------------------------------------------ life of the group

    def name(self) -> str:
        return self._called

    getBackendName = name  # C++'s name of the method

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the inner backends have had theirs since they were made."""

    def _get_sequence_number_for_group(self) -> int:
        return self._inner._get_sequence_number_for_group()

    def get_group_store(self) -> dist.Store:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ProcessGroup | None":
        """Make a group of these ranks, by themselves alone; return None on the others."""
        if self.rank() not in ranks:
            return None
        ordered = sorted(ranks)
        label = group_name or "split:" + ",".join(map(str, ordered))
        store = dist.PrefixStore(f"{label}/", self._store)
        members = [self._global_ranks[r] for r in ordered]
        group = ProcessGroup(
            store,
            ordered.index(self.rank()),
            len(ordered),
            timeout or self._timeout,
            # topology describes the nodes of all ranks
            pg_options=(self.pg_options and replace(self.pg_options, topology=None)) or "exact",
            global_ranks=members,
            name=self._called,
            inner="torch" if self.communicator is None else "mpi",
        )
        group._set_group_name(label)  # type: ignore[arg-type]
        group._set_group_desc(group_desc or "undefined")
        return group

    splitGroup = split_group  # C++'s name of the method

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and counts of this rank's compressed calls, between two backwards, as
        plain data and tensors."""
        return self.reducer.state_dict()

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Load this rank's state, to resume bit for bit, or those of all ranks at another world
        size."""
        self.reducer.load_state_dict(*states)

    # ------------------------------------------------------------ other ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # C++'s names of the methods

    def reform(
        self,
        timeout: timedelta | None = None,
        *,
        report: bytes = b"",
        age: int = 0,
        join: Any = None,
        minimum: int = 1,
        admit: bool = True,
    ) -> Change:
        """Continue with the surviving ranks and with newcomers, in this process and with this
        object; collective over all of them.

        It returns the same change on each, or raises the same error on each within ``timeout``, by
        default the group's. Afterwards ranks have new numbers, and all collectives of torch and all
        channels work among them. Calls in progress fail. Groups of some ranks (``new_group``,
        ``split_group``, meshes) are destroyed: make them again.

        - ``report``: bytes for all ranks.
        - ``age``: steps trained so far. If two groups meet, the members continue and the ranks of
          the other are newcomers; an older one is refused.
        - ``join``: on newcomers, a member's ``contact`` or a store that the members use.
        - ``minimum``: fewest members that may continue.
        - ``admit``: False on the first survivor lets newcomers wait for a later reform.
        """
        limit = check_reform(self, timeout, report, age, minimum, join, admit)
        terms = terms_of(self, report=report, age=age, join=join, minimum=minimum, admit=admit)
        return self._reform(terms, limit)

    def _reform(self, terms: Terms, limit: timedelta) -> Change:
        error = cause_of(self)
        stop(self, error)
        if is_default(self):
            leave_subgroups(error)
        return Reformation(self, limit).run(terms)

    @property
    def membership(self) -> Membership:
        """This process's part in agreements of the group. A group of one rank begins to listen on
        first use."""
        if self._membership is None:
            self._membership = first_epoch(dist.HashStore(), self._rank, self._size)
            self._parts.append(self._membership)
        return self._membership

    @property
    def contact(self) -> str:
        """Text by which newcomers find this member: ``reform(join=contact)``."""
        return contact_of(self.membership.here)

    @property
    def waiting(self) -> int:
        """Number of newcomers that wait for this member to ``reform``."""
        return self.membership.waiting

    def check_peers(self) -> None:
        """Raise if a peer is dead or the group has failed."""
        if self.guard is not None:
            self.guard.check()

    def announce(self, store: dist.Store) -> None:
        """Publish the members in another ``store``, now and after each change, for example in one
        that may outlive the first."""
        self.stores.append(store)
        announce(self)

    def enroll(self, channel: Any) -> None:
        """Reconnect ``channel`` when the ranks change; the reference is weak."""
        self.registry.enroll(channel)

    def on_reform(self, owner: Any) -> None:
        """Call ``owner.reform(change)`` after the ranks have changed and channels are connected;
        the reference is weak.

        ``reform`` may communicate. It must change nothing but return a function that does, which is
        called after all ranks have succeeded so far.
        """
        self.registry.on_reform(owner)

    def hand_over(self, leaving: Sequence[int]) -> None:
        """Hand the residuals of ranks that are about to ``leave`` to the others; collective."""
        for owner in self.registry.owners:
            if hasattr(owner, "hand_over"):
                owner.hand_over(leaving)

    def leave(self) -> None:
        """Leave the group for good: the others no longer wait for this rank, and all its later
        calls fail."""
        stop(
            self, CommunicationError("this rank has left the group: destroy it, or build a new one")
        )
        self._close()

    def enter(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        inner: Any,
        abort: Callable[[], object],
        connections: ControlConnections | None,
    ) -> None:
        """Continue among other ranks; for ``Reformation``."""
        self._rank, self._size, self._store = rank, size, store
        self._global_ranks = list(range(size))
        old = [self._inner, self._abort]
        self._inner, self._abort = inner, abort
        let_go(old)
        self.reducer.reconnect(rank, size, self._private())
        self._connect(connections)

    def abort_inner(self) -> None:
        """Abort Gloo's pending calls."""
        self._abort()

    def get_backend(self, device: torch.device) -> Any:
        """Return the backend for ``dist.get_backend_impl`` of torch 2.14 and later; it follows the
        group when its ranks change."""
        if self.communicator is not None:
            return self._get_backend(device)
        return CurrentBackend(self, torch.device(device))

    @property
    def supports_reconfigure(self) -> bool:
        """True since torch 2.14, except over MPI: then ``dist._reconfigure`` gives the group other
        ranks."""
        return RECONFIGURES and self.communicator is None

    def get_reconfigure_handle(self) -> str:
        """Return the text by which others find this member: its ``contact``."""
        check_reconfigures(self)
        return self.contact

    def reconfigure(self, options: Any) -> GroupWork:
        """Form the group of exactly the members in torch's ``ReconfigureOptions``, by the method of
        ``reform``.

        The group is formed on return; an error names missing members.
        """
        check_reconfigures(self)
        limit = check_reform(self, options.timeout, b"", 0, 1, None)
        terms = appointed_terms(self, options)
        self._formed = True
        try:
            self._reform(terms, limit)
        except BaseException:
            self._formed = False
            raise
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([])
        return self._started(GroupWork(None, lambda work: FutureWork(done, []), []))

    def shutdown(self) -> None:
        self._close()
        if self.communicator is not None:
            self._inner.shutdown()
        super().shutdown()

    def abort(self) -> None:
        self._close()
        self._abort()

    def _close(self) -> None:
        _close(self._parts)

    def _peer_names(self) -> Callable[[int], str]:
        ranks = self._global_ranks
        return lambda r: f"rank {r}" if ranks[r] == r else f"rank {r} (global rank {ranks[r]})"


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _record(name: str, tensors: Tensors, opts: Any, codec: str = "") -> Record:
    op = getattr(opts, "reduceOp", None)
    reduction, root = NO_REDUCTION if op is None else int(op.op), getattr(opts, "rootRank", 0)
    return call(name, tensors, reduction=reduction, root=root, codec=codec)


def _close(parts: list[Any]) -> None:
    while parts:
        parts.pop(0).close()


def _reforms(group: "weakref.ref[ProcessGroup]", error: CommunicationError) -> None:
    """End waits in groups of some ranks, because a peer reforms the default group."""
    here = group()
    if here is not None and is_default(here):
        fail_subgroups(error)


def _check_peers(group: "weakref.ref[ProcessGroup]") -> None:
    if (here := group()) is not None:
        here.check_peers()


def _wait_all(works: list[GroupWork]) -> None:
    """Raise, at the end of a backward, an error that DDP would find in a future. DDP itself waits
    for other works."""
    for work in works:
        if work.has_future:
            work.wait()
