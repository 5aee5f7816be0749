"""Compressed calls of a process group: decide, submit to a channel, count; save residuals and hand
them over.

Note: routes. Tensors on CUDA are sent over the group's own NCCL communicator if NCCL carries the
group, all others over its connections between hosts, those on CUDA through pinned memory. Each
route has a channel with a worker, buffers and a stream, so algorithms and bits are those of the DDP
hook.

Note: changes of ranks. Residuals of sites are handed over when ranks leave or join (``handover``).
Each call commits by itself, so of the calls running at a rank's death some may have been completed
by other ranks: their residuals are dropped here, and counted.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commpress.codecs import policy_of
from commpress.codecs.exponents import ExponentCodec
from commpress.collectives.all_to_all.all_to_all import (
    AllToAllCall,
    Way,
    compressed_all_to_all,
)
from commpress.collectives.allreduce import Call, Workspace
from commpress.collectives.buckets import FLOATS, Span
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.exact_rows import (
    broadcast_sequences,
    codes_exactly,
    exact_all_to_all,
    exact_broadcast,
    exact_messages,
)
from commpress.collectives.exchange import Exchanges
from commpress.collectives.handover import Handover, cannot_follow
from commpress.collectives.levels import Levels, divide
from commpress.collectives.reduce_scatter import Part, deals
from commpress.collectives.residual_state import exact_state, residuals_of
from commpress.collectives.state import State, Stateful
from commpress.collectives.topology import Topology
from commpress.collectives.transports.transport import Transport
from commpress.collectives.two_level import hierarchy_of
from commpress.errors import StateMismatch, check_entries
from commpress.feedback import ResidualStore
from commpress.integrations.process_group.call import FutureWork
from commpress.integrations.process_group.call_sites import (
    Site,
    exact_gather_site,
    gather_site,
    reduce_site,
    scatter_site,
)
from commpress.integrations.process_group.group_options import GroupOptions
from commpress.logs import warn_on_first
from commpress.torch_private import in_nested_backward
from commpress.totals import Totals
from commpress.work import Steps, future_on

KEPT_BACKWARDS = 8  # backwards without a call of a site before it is dropped
USUAL = (25 << 20) // 4  # elements of DDP's usual bucket
NESTED = "in a backward within another"
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_SITES = {"all_reduce": "call", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}

# makers by device type of tensors; "cpu" carries those of all other devices
Transports = Mapping[str, Callable[[], Transport]]


@dataclass
class GroupCounters(Totals):
    """Totals of one rank since the group was made, for collectives with a codec in its options."""

    compressed_calls: int = 0
    compressed_elements: int = 0  # of inputs or outputs, whichever are longer
    # bytes of the compressed calls in float32: 8·(P−1)/P per element of a ring all-reduce
    logical_bytes: int = 0
    wire_bytes: int = 0  # bytes that they sent, with headers
    between_bytes: int = 0  # part of these that left the node, with a topology
    # calls with NaN or infinity: the result is NaN on all ranks, no residual changed
    skipped_calls: int = 0
    dropped_sites: int = 0  # call sites without further calls; their residuals are lost
    # messages in flight at a rank's death; their residuals are lost
    lost_calls: int = 0
    lost_ranks: int = 0  # ranks that died with their residuals
    calls: dict[str, int] = field(default_factory=dict)  # compressed calls by collective
    # exact calls by reason
    exact_calls: dict[str, int] = field(default_factory=dict)
    exact_elements: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Bytes of float32 per byte sent, for compressed calls."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0


class _Ranked(NamedTuple):
    rank: int
    size: int
    levels: None = None


class GroupReducer(Stateful):
    """Decide on compression, compress and count. Channels are made at the first compressed call,
    with a topology at once.

    - ``steps_done``: backwards with reductions.
    """

    def __init__(
        self, options: GroupOptions | None, rank: int, size: int, transports: Transports
    ) -> None:
        self.options, self.counters = options, GroupCounters()
        self.rank, self.size, self._transports = rank, size, transports
        self._codecs = options.codecs() if options is not None else {}
        self._sites: dict[tuple[object, ...], Site] = {}
        self._task, self._nth = -1, 0
        self._sequence = 0  # equal on all ranks: counts refused calls, too
        self._scattered = ResidualStore()  # residuals of reduce-scatters
        self._calls: dict[str, int] = {}  # loaded counts of sites without a call so far
        self._way = Way()
        self._workspaces: dict[str, Workspace] = defaultdict(Workspace)
        # residuals of all-reduces; every site has exchanges of its own
        self.exchanges = Exchanges(policy_of("none"), size, self._workspaces["cpu"])
        # sites with buffers that the worker has to free, because only it accesses them
        self._dropped: dict[str, list[Site]] = defaultdict(list)
        self._channels: dict[str, Channel] = {}
        self._sent_before = 0  # bytes of earlier channels
        self.handover = Handover(self.channel)
        self._ended = ""  # reason why nothing is compressed any more
        self._topology: Topology | None = None
        if (
            options is not None
            and options.topology is not None
            and size > 1
            and (codec := self._codecs.get("all_reduce"))
        ):
            host = self._connected("cpu")
            divide(host, options.topology, USUAL, codec)
            self._topology = None if host.levels is None else host.levels.hierarchy.topology

    # ------------------------------------------------------------ decide

    def codec_for(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        *,
        numel: int,
        op: Any = None,
        plain: bool = True,
    ) -> str:
        """Return the codec if this call is to be compressed. Otherwise return "", and count the
        reason if its collective has a codec.

        ``numel``: elements of the longer tensor; ``plain``: True for one tensor each way, with
        equal rows of the longer for all ranks.
        """
        reason = self._why_not(name, tensors, op, numel, plain)
        if reason is None:
            return self._codecs[name].spec
        if name == "all_reduce" or name in self._codecs:
            if reason == NESTED and NESTED not in self.counters.exact_calls:
                warn_on_first(
                    self.rank,
                    "gradients of reentrant checkpoints are not compressed, because their backward "
                    "has no fixed order of calls: pass use_reentrant=False to the checkpoints, or "
                    "use commpress.compress(ddp, codec=...) or compress_fsdp",
                )
            self.left_alone(tensors[:1], reason)
        return ""

    def left_alone(self, tensors: Sequence[torch.Tensor], reason: str) -> None:
        calls, elements = self.counters.exact_calls, self.counters.exact_elements
        calls[reason] = calls.get(reason, 0) + 1
        elements[reason] = elements.get(reason, 0) + sum(t.numel() for t in tensors)

    def _why_not(
        self, name: str, tensors: Sequence[torch.Tensor], op: Any, numel: int, plain: bool
    ) -> str | None:
        options = self.options
        if options is None or name not in self._codecs:
            return "no options"
        if self.size == 1 or not plain or self._ended:
            return (
                "one rank" if self.size == 1 else self._ended or "several tensors or unequal rows"
            )
        if (
            name in _REDUCTIONS
            and options.only == "gradients"
            and torch._C._current_graph_task_id() < 0
        ):
            return "not in a backward"
        if any(
            tensor.dtype not in FLOATS or tensor.dtype != tensors[0].dtype for tensor in tensors
        ):
            return "dtype"
        if name in _REDUCTIONS and not options.accepts(op):
            return "reduction"
        if not all(map(_plain, tensors)) or len({tensor.device for tensor in tensors}) > 1:
            return "layout or device"
        if isinstance(self._codecs[name], ExponentCodec) and not codes_exactly(tensors[0]):
            return "dtype" if tensors[0].device.type == "cpu" else "layout or device"
        if name != "all_to_all" and numel < options.min_numel:
            return "small"
        return NESTED if name in _REDUCTIONS and in_nested_backward() else None

    # ------------------------------------------------------------ one call

    def steps(
        self, name: str, inp: torch.Tensor, out: torch.Tensor, op: Any = None
    ) -> Callable[[], FutureWork]:
        """Choose site and sequence numbers now, in the order of calls; return a function that
        starts the call, for when all ranks agree."""
        kind, site = self._kind(inp.device), self._site(name, inp, out)
        sequence, self._sequence = self._sequence, self._sequence + site.sequences
        key, site.calls = site.calls, site.calls + 1
        factor = self.size if op is not None and op == dist.ReduceOp.SUM else 1
        given = inp.detach(), out.detach()
        numel = max(inp.numel(), out.numel())
        logical = (8 if name == "all_reduce" else 4) * (self.size - 1) * numel // self.size

        def made(channel: Channel) -> Steps[bool]:
            dropped = self._dropped[kind]
            while dropped:
                dropped.pop().forget(channel.workspace)
            call = Call(channel.transport, channel.workspace, sequence, key)
            return (yield from site.run(channel, *given, call, factor))

        return partial(self._submitted, name, kind, made, inp, out, logical, site.waits)

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        own: int,
    ) -> Callable[[], FutureWork]:
        """Prepare an all-to-all like ``steps``. ``own``: elements of ``inp`` that this rank
        keeps."""
        codec, given = self._codecs["all_to_all"], (out.detach(), inp.detach())
        exact = isinstance(codec, ExponentCodec)
        kind, sequence = self._kind(inp.device), self._sequence
        self._sequence += 1 + exact

        def made(channel: Channel) -> Steps[bool]:
            how: AllToAllCall = {
                "transport": channel.transport,
                "out_splits": list(out_splits) or None,
                "in_splits": list(in_splits) or None,
                "way": self._way,
                "sequence": sequence,
            }
            if exact:
                yield from exact_all_to_all(*given, **how)
            else:
                yield from compressed_all_to_all(*given, codec=codec, **how)
            return True

        return partial(
            self._submitted, "all_to_all", kind, made, inp, out, 4 * (inp.numel() - own), None
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], FutureWork]:
        """Prepare a broadcast of the root's ``tensor`` like ``steps``."""
        kind, sequence, given = self._kind(tensor.device), self._sequence, tensor.detach()
        self._sequence += broadcast_sequences(tensor.numel(), self.size, tensor.dtype)

        def made(channel: Channel) -> Steps[bool]:
            yield from exact_broadcast(given, root, transport=channel.transport, sequence=sequence)
            return True

        # in a tree a rank sends one message on average
        logical = 4 * tensor.numel() * (self.size - 1) // self.size
        return partial(self._submitted, "broadcast", kind, made, tensor, tensor, logical, None)

    def _submitted(
        self,
        name: str,
        kind: str,
        made: Callable[[Channel], Steps[bool]],
        inp: torch.Tensor,
        out: torch.Tensor,
        logical: int,
        waits: int | None,
    ) -> FutureWork:
        channel, done = self._connected(kind), future_on(out.device)

        def steps() -> Steps[None]:
            finite = yield from made(channel)
            self._count(name, finite, max(inp.numel(), out.numel()), logical)
            # on the job's stream, which is current in this thread: torch makes others wait for it
            done.set_result([out])

        def failed(job: torch.futures.Future[None]) -> None:
            try:
                job.value()
            except Exception as error:
                done.set_exception(error)

        channel.submit(steps(), inp, out, waits=waits).add_done_callback(failed)
        return FutureWork(done, [out])

    def _count(self, name: str, finite: bool, numel: int, logical: int) -> None:
        counters, channels = self.counters, list(self._channels.values())
        counters.compressed_calls += 1
        counters.calls[name] = counters.calls.get(name, 0) + 1
        counters.skipped_calls += not finite
        counters.compressed_elements += numel
        counters.logical_bytes += logical
        counters.wire_bytes = self._sent_before + sum(channel.sent_bytes for channel in channels)
        counters.between_bytes = sum(channel.between_bytes for channel in channels)

    # ------------------------------------------------------------ channels

    def _kind(self, device: torch.device) -> str:
        return device.type if device.type in self._transports else "cpu"

    @property
    def channel(self) -> Any:  # type: ignore[override]
        """The channel between hosts, or its rank and size before it is connected."""
        return self._channels.get("cpu", _Ranked(self.rank, self.size))

    def _connected(self, kind: str) -> Channel:
        """Return the channel for tensors on a kind of device.

        Note: the channel between hosts connects when it is made, NCCL with its first message.
        """
        if kind not in self._channels:
            channel = Channel(
                self._transports[kind](), name="commpress-group", workspace=self._workspaces[kind]
            )
            if kind != "cpu" and self._topology is not None:
                channel.levels, channel.at_once = (
                    Levels(hierarchy_of(self._topology, channel.inner)),
                    1,
                )
            self._channels[kind] = channel
            if kind == "cpu":
                self.handover.channel = channel
        return self._channels[kind]

    # ------------------------------------------------------------ call sites

    def _site(self, name: str, inp: torch.Tensor, out: torch.Tensor) -> Site:
        task = torch._C._current_graph_task_id() if name in _REDUCTIONS else -1
        if task >= 0 and task != self._task:
            self._task, self._nth, self.steps_done = task, 0, self.steps_done + 1
            self._forget_old_sites()
        nth, numel = self._nth if task >= 0 else -1, max(inp.numel(), out.numel())
        self._nth += task >= 0
        key = name, nth, numel, inp.dtype if name == "all_gather" else None, inp.device
        if key not in self._sites:
            called = f"{_SITES[name]} {nth} of {numel}"
            self._sites[key] = self._made(name, called, inp, out, feedback=task >= 0)
            self._sites[key].calls = self._calls.pop(called, 0)
        site = self._sites[key]
        site.last_backward = self.steps_done
        return site

    def _made(
        self, name: str, called: str, inp: torch.Tensor, out: torch.Tensor, *, feedback: bool
    ) -> Site:
        codec, kind = self._codecs[name], self._kind(inp.device)
        if isinstance(codec, ExponentCodec):
            return exact_gather_site(called, exact_messages(inp.numel(), self.size, inp.dtype))
        if name != "all_reduce":
            row = inp if name == "all_gather" else out
            part = Part(called, 0, row.numel(), row.numel() * self.size)
            plan = deals(
                [part], policy_of(codec), rank=self.rank, ranks=self.size, feedback=feedback
            )
            if name == "all_gather":
                return gather_site(called, plan)
            attach = self._scattered.attach
            kept = [attach(deal.every.keys, deal.every.pieces, row.device) for deal in plan]
            return scatter_site(called, plan, kept)
        exchanges = Exchanges(
            policy_of(codec),
            self.size,
            self._workspaces[kind],
            levels=None if self._topology is None else self._connected(kind).levels,
            feedback=feedback,
            residuals=self.exchanges.residuals,
        )
        where = [Span(called, 0, inp.numel())], [inp.shape]
        return reduce_site(called, exchanges.of((called,), lambda: where, inp.device))

    def _forget_old_sites(self) -> None:
        for key in [
            k for k, s in self._sites.items() if s.last_backward < self.steps_done - KEPT_BACKWARDS
        ]:
            site = self._sites.pop(key)
            self.counters.dropped_sites += key[0] in _REDUCTIONS
            self._dropped[self._kind(key[-1])].append(site)  # type: ignore[arg-type]
            for store in (self.exchanges.residuals, self._scattered):
                store.take({site.name})

    # ------------------------------------------------------------ state

    def schedule(self) -> State:
        calls = self._calls | {site.name: site.calls for site in self._sites.values()}
        return {"codecs": {name: c.spec for name, c in self._codecs.items()}, "calls": calls}

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        if schedule["codecs"] != (own := self.schedule()["codecs"]):
            raise StateMismatch(
                f"the state was saved with the codecs {schedule['codecs']}, but this group has "
                f"{own}: load it into a group with the same GroupOptions"
            )

    def part(self) -> State:
        return super().part() | {
            "scattered": exact_state(self._scattered, self, self.steps_done)["residuals"]
        }

    def joined(self, states: Sequence[State], missing: str) -> State:
        """Return this rank's rows of reduce-scatters, which fit only the same number of ranks."""
        for state in states:
            check_entries(state, ("scattered",), "the state of a group")
        own = states[0]
        if not own["scattered"]:
            return {"rows": {}}
        if own["size"] != self.size:
            raise StateMismatch(
                f"the state is of {own['size']} ranks, but this group has {self.size}: residuals "
                "of reduce-scatters fit only the same number of ranks"
            )
        rows = own | {"residuals": own["scattered"], "nodes": ""}
        found = residuals_of([rows], self)[1]
        self._scattered.check(found)
        return {"rows": found}

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        if change is None:
            self._scattered.load(schedule["rows"])
            self._calls = dict(schedule["calls"])
            for site in self._sites.values():
                site.calls, site.last_backward = self._calls.pop(site.name, 0), self.steps_done
            return
        # sites are made again; each finds its residual at its next call, except for rows of
        # reduce-scatters
        self.counters.dropped_sites += len({name for name, _ in self._scattered.every()})
        self._scattered = ResidualStore()
        self._sites, self._task, self._nth = {}, -1, 0
        self._dropped.clear()
        self._calls.clear()
        self._sequence = self.channel.take(0)
        for workspace in self._workspaces.values():
            workspace.clear()
        self.counters.lost_ranks = self.handover.lost

    # ------------------------------------------------------------ other ranks

    def stop(self, reason: str) -> None:
        """End running calls with an error that gives ``reason``."""
        for channel in self._channels.values():
            channel.stop(reason)

    def abort(self) -> None:
        """Abort calls over NCCL, which does not notice dead ranks."""
        for kind, channel in list(self._channels.items()):
            if kind != "cpu":
                channel.inner.abandon("the group has failed.")

    def reconnect(self, rank: int, size: int, transports: Transports) -> None:
        """Continue among other ranks. ``reform`` hands the old ones' residuals over."""
        self.rank, self.size, self._transports = rank, size, transports
        self._sent_before += sum(channel.sent_bytes for channel in self._channels.values())
        self._channels.clear()

    def reform(self, change: Change) -> Callable[[], None] | None:  # type: ignore[override]
        if self.options is None:
            return None
        if self.options.topology is not None:
            self._ended = "other ranks"
            raise cannot_follow(self, "topology names the earlier ranks")
        self._connected("cpu")
        self.counters.lost_calls += sum(
            workspace.proposed for workspace in self._workspaces.values()
        )
        for kind, workspace in self._workspaces.items():
            if kind != "cpu":
                workspace.settle(taken=False)
        return super().reform(change)

    def hand_over(self, leaving: Sequence[int]) -> None:
        if "cpu" in self._channels:
            super().hand_over(leaving)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
