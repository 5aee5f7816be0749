"""The process group "commpress": Gloo and NCCL, or MPI, behind a guard, and all-reduces compressed where asked for.

Every call is described to all peers first (``guard``); what it then does is torch's own, or ``mpi_group``'s. Calls over NCCL
are issued at once, because NCCL neither ends the process nor blocks the host; the guard checks them meanwhile.
"""

# torch's stubs give each collective two or three overloads; one signature here takes them all.
# mypy: disable-error-code="override,assignment"

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.constants import default_pg_timeout

from commpress.errors import InvalidArgument
from commpress.integrations.process_group.call import GroupWork, profiling
from commpress.integrations.process_group.control_connections import ControlConnections
from commpress.integrations.process_group.group_options import GroupOptions, group_options_from
from commpress.integrations.process_group.guard import Guard
from commpress.integrations.process_group.inner import (
    at_once,
    mpi_group,
    options_of,
    private_transport,
    ready,
    torch_group,
)  # fmt: skip
from commpress.integrations.process_group.records import Record, all_to_all, call, counts, receiving, sending
from commpress.integrations.process_group.reducer import GroupReducer
from commpress.torch_private import AllgatherOptions

Tensors = list[torch.Tensor]


class ProcessGroup(dist.ProcessGroup):
    """Made by ``init_process_group("commpress")`` and ``new_group``; directly like ``ProcessGroupGloo``.

    ``pg_options``: the all-reduces that may be compressed; None reads ``COMMPRESS_GROUP_OPTIONS``, without which all are exact.
    ``name``: what it answers for its backend; as a stand-in for Gloo, Gloo's.
    ``inner``: what carries the data: torch's own Gloo and NCCL, or MPI.
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
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.pg_options, self._called = group_options_from(pg_options), name
        self._store, self._timeout, self._global_ranks = store, timeout, list(global_ranks or range(size))
        make = mpi_group if inner == "mpi" else torch_group
        self._inner: Any
        self._inner, self._abort = make(dist.PrefixStore("data", store), rank, size, timeout, self)
        self.options = self._get_backend(torch.device("cpu")).options
        self._guard: Guard | None = None
        if size > 1:
            connections = ControlConnections(dist.PrefixStore("guard", store), rank, size, timeout)
            self._guard = Guard(connections, timeout=timeout, abort=self._abort, name=self._peer_names())
            weakref.finalize(self, self._guard.close)
        private = partial(private_transport, self._inner, dist.PrefixStore("compressed", store), rank, size, timeout)
        self.reducer = GroupReducer(self.pg_options, rank, size, private)
        weakref.finalize(self, self.reducer.close)
        self._backward: tuple[int, list[GroupWork]] = (-1, [])

    @property
    def timeout(self) -> timedelta:
        """Of every call."""
        return self._timeout

    @property
    def communicator(self) -> Any:
        """Of these ranks, where MPI carries the data, to make copies of; None over torch's own groups."""
        return getattr(self._inner, "communicator", None)

    @property
    def counters(self) -> Any:
        """Counters of what this group compressed and what it left alone."""
        return self.reducer.counters

    # ------------------------------------------------------------ collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any) -> GroupWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = options_of(dist.AllreduceOptions, opts, timeout, named, "reduceOp")
        codec = self.reducer.codec_for(tensors, opts.reduceOp)
        if codec is None:
            return self._reduction("all_reduce", self._inner.allreduce, (tensors, opts), tensors, opts)
        issue = self.reducer.steps(tensors[0], opts.reduceOp)
        record = call("all_reduce", tensors, reduction=int(opts.reduceOp.op), codec=codec)
        return self._begin(record, None, lambda work: issue(), tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        self.reducer.left_alone(tensors, "coalesced")
        return self._reduction("all_reduce_coalesced", self._inner.allreduce_coalesced, (tensors, opts), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any) -> GroupWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = options_of(dist.BroadcastOptions, opts, timeout, named, "rootRank")
        record = call("broadcast", tensors, root=opts.rootRank)
        return self._call(record, self._inner.broadcast, (tensors, opts), tensors, opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GroupWork:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = options_of(dist.ReduceOptions, opts, timeout, named, "rootRank")
        if op is not None:
            opts.reduceOp = op
        return self._reduction("reduce", self._inner.reduce, (tensors, opts), tensors, opts, root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(AllgatherOptions, opts, timeout, {}, "")
        return self._call(call("all_gather", inputs), self._inner.allgather, (outputs, inputs, opts), inputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or AllgatherOptions()
        record = call("all_gather_coalesced", inputs)
        return self._call(record, self._inner.allgather_coalesced, (outputs, inputs, opts), inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        opts = opts or AllgatherOptions()
        record = call("all_gather_single", [input])
        return self._call(record, self._inner._allgather_base, (output, input, opts), [output], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or AllgatherOptions()
        record = call("all_gather_single_coalesced", inputs)
        return self._call(record, self._inner.allgather_into_tensor_coalesced, (outputs, inputs, opts), outputs, opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GroupWork:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = options_of(dist.GatherOptions, opts, timeout, named, "rootRank")
        record = call("gather", inputs, root=opts.rootRank)
        return self._call(record, self._inner.gather, (outputs, inputs, opts), inputs, opts)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = options_of(dist.ScatterOptions, opts, timeout, named, "rootRank")
        record = call("scatter", outputs, root=opts.rootRank)
        return self._call(record, self._inner.scatter, (outputs, inputs, opts), outputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, **named: Any
    ) -> GroupWork:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = options_of(dist.ReduceScatterOptions, opts, timeout, named, "reduceOp")
        return self._reduction("reduce_scatter", self._inner.reduce_scatter, (outputs, inputs, opts), outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        opts = opts or dist.ReduceScatterOptions()
        arguments = (output, input, opts)
        return self._reduction("reduce_scatter_single", self._inner._reduce_scatter_base, arguments, [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.ReduceScatterOptions()
        start, arguments = self._inner.reduce_scatter_tensor_coalesced, (outputs, inputs, opts)
        return self._reduction("reduce_scatter_single_coalesced", start, arguments, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllToAllOptions()
        gives, takes = [t.numel() for t in inputs], [t.numel() for t in outputs]
        arguments = (outputs, inputs, opts)
        return self._all_to_all("all_to_all", inputs[0].dtype, gives, takes, self._inner.alltoall, arguments, outputs)

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
        gives, takes = counts(input, input_splits, self.size()), counts(output, output_splits, self.size())
        arguments = (output, input, list(output_splits), list(input_splits), opts)
        start = self._inner.alltoall_base
        return self._all_to_all("all_to_all_single", input.dtype, gives, takes, start, arguments, [output])

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> GroupWork:
        opts = options_of(dist.BarrierOptions, opts, timeout, {}, "")
        return self._call(call("barrier", []), self._inner.barrier, (opts,), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Gloo's own, which names who is missing by itself."""
        self._inner.monitored_barrier(timeout, wait_all_ranks)

    # ------------------------------------------------------------ point to point

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> GroupWork:
        work = GroupWork(self._guard, lambda work: self._inner.send(tensors, peer, tag), tensors)
        return self._point_to_point(work, sending(tensors[0], tag), peer)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> GroupWork:
        work = GroupWork(self._guard, lambda work: self._inner.recv(tensors, peer, tag), tensors)
        return self._point_to_point(work, receiving(tensors[0], tag), peer)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        if self._guard is None:
            return self._started(GroupWork(None, lambda work: self._inner.recv_anysource(tensors, tag), tensors))
        # a profiler knows this call by its own name; Gloo finds the source
        profiled = profiling() and self.communicator is None

        def issue(work: GroupWork) -> Any:
            return self._inner.recv_anysource(tensors, tag) if profiled else self._inner.recv(tensors, work.source, tag)

        work = GroupWork(self._guard, issue, tensors)
        self._guard.any_source(receiving(tensors[0], tag), work)
        return self._left_to_guard(work)

    def _point_to_point(self, work: GroupWork, record: Record, peer: int) -> GroupWork:
        if self._guard is None or peer == self.rank() or at_once(self._inner, work.tensors):
            return self._started(work)
        ready(work.tensors)
        self._guard.point_to_point(record, peer, work)
        return self._left_to_guard(work)

    # ------------------------------------------------------------ names of torch before 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------ every call

    def _reduction(
        self, name: str, start: Callable[..., Any], arguments: tuple[Any, ...], tensors: Tensors, opts: Any, root: int = 0
    ) -> GroupWork:
        record = call(name, tensors, reduction=int(opts.reduceOp.op), root=root)
        return self._call(record, start, arguments, tensors, opts)

    def _all_to_all(
        self, name: str, dtype: torch.dtype, gives: Sequence[int], takes: Sequence[int], start: Callable[..., Any],
        arguments: tuple[Any, ...], tensors: Tensors,
    ) -> GroupWork:  # fmt: skip
        records = all_to_all(name, dtype, gives, takes, 0)
        if len({*gives, *takes}) == 1:
            return self._call(records[0].pack(), start, arguments, tensors, arguments[-1])
        peers = [r for r in range(self.size()) if r != self.rank()]
        record = {r: records[r].pack() for r in peers}
        expected = {r: records[r].mirrored().pack() for r in peers}
        return self._begin(record, expected, lambda work: start(*arguments), tensors, arguments[-1])

    def _call(
        self, record: bytes, start: Callable[..., Any], arguments: tuple[Any, ...], tensors: Tensors, opts: Any
    ) -> GroupWork:
        return self._begin(record, None, lambda work: start(*arguments), tensors, opts)

    def _begin(
        self,
        record: bytes | dict[int, bytes],
        expected: dict[int, bytes] | None,
        issue: Callable[[GroupWork], Any],
        tensors: Tensors,
        opts: Any,
    ) -> GroupWork:
        """Describe the call to the peers; wait for their agreement here, unless the caller wants to go on meanwhile."""
        work = GroupWork(self._guard, issue, tensors)
        if self._guard is None:
            return self._started(work)
        work.early = at_once(self._inner, tensors)
        work.sliced = not work.early
        if work.sliced:
            ready(tensors)
        else:
            inner = issue(work)
            work.issue = lambda work: inner
        self._guard.collective(record, expected, work)
        if not getattr(opts, "asyncOp", True) or profiling():
            if not work.settled:
                self._guard.settle(work)
            if work.error is not None:
                raise work.error
            return work
        self._queue_for_autograd(work)
        return self._left_to_guard(work)

    def _left_to_guard(self, work: GroupWork) -> GroupWork:
        """Let the guard's thread issue the call when all agree.

        A profiler sees only what the profiled thread issues: while one runs, it is issued by whoever waits for it.
        """
        if self._guard is not None and not work.settled and not profiling():
            self._guard.nudge()
        return work

    @staticmethod
    def _started(work: GroupWork) -> GroupWork:
        work.start()
        if work.error is not None:
            raise work.error
        return work

    def _queue_for_autograd(self, work: GroupWork) -> None:
        """Inside a backward: have it wait for this call, so that an error comes out as what it is.

        DDP looks at futures only, and makes "RuntimeError: Unable to cast" of an exception in one.
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

    getBackendName = name  # what C++ looks for

    def _set_sequence_number_for_group(self) -> None:
        """The backends inside have theirs since they were made."""

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
        """A group of these ranks of this one, made by them alone; None for the others."""
        if self.rank() not in ranks:
            return None
        ordered = sorted(ranks)
        label = group_name or "split:" + ",".join(map(str, ordered))
        store = dist.PrefixStore(f"{label}/", self._store)
        members = [self._global_ranks[r] for r in ordered]
        group = ProcessGroup(
            store, ordered.index(self.rank()), len(ordered), timeout or self._timeout,
            pg_options=self.pg_options, global_ranks=members, name=self._called,
            inner="torch" if self.communicator is None else "mpi",
        )  # fmt: skip
        group._set_group_name(label)  # type: ignore[arg-type]
        group._set_group_desc(group_desc or "undefined")
        return group

    splitGroup = split_group  # what C++ looks for

    supports_reconfigure = False  # the backends inside say True from torch 2.14 on, and know nothing of the guard

    def reconfigure(self, *_: Any) -> Any:
        raise InvalidArgument("a group of commpress keeps its ranks: make a new one with dist.new_group for others")

    get_reconfigure_handle = reconfigure

    def shutdown(self) -> None:
        self._close()
        if self.communicator is not None:
            self._inner.shutdown()
        super().shutdown()

    def abort(self) -> None:
        self._close()
        self._abort()

    def _close(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self.reducer.close()

    def _peer_names(self) -> Callable[[int], str]:
        ranks = self._global_ranks
        return lambda r: f"rank {r}" if ranks[r] == r else f"rank {r} (global rank {ranks[r]})"


def _wait_all(works: list[GroupWork]) -> None:
    for work in works:
        work.wait()
