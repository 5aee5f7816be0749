"""The compressed all-reduces of a process group: decided, given to a channel, counted; residuals
that it saves and hands over.

Note: the call site. DDP reduces its buckets in the same order in every backward, so the n-th
compressed reduction of a backward with so many elements is one site and keeps one residual. After
DDP has rebuilt its buckets, at its first step, sites change and what the old ones still owed is
dropped. The hook (``commpress.compress``) keys residuals by parameter and loses nothing. Two models
that train over one group need one group each. Outside a backward there is no such order: a metric
between two gradients would receive the residual of another tensor. Reductions there are compressed
without residuals, by codecs that need none (``GroupOptions``).

Note: where they go. Tensors on CUDA go over a communicator of NCCL of the group's own where NCCL
carries the group, all others over its connections between hosts, those on CUDA by way of pinned
memory. Either way has a channel, with a worker, buffers and a stream, so the algorithms are those
of the DDP hook, and so are the bits.

Note: other ranks. What sites owe is handed over when ranks come and go (``handover``). A call
decides by itself, so of those that were under way when a rank died some may have been finished by
others: they are left out here, and counted.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commpress.codecs import codec_named, policy_of
from commpress.collectives.allreduce import Workspace, settle
from commpress.collectives.buckets import Span
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.collectives.handover import Handover
from commpress.collectives.residual_state import exact_state, residuals_of
from commpress.collectives.transports.transport import Transport
from commpress.errors import StateMismatch
from commpress.feedback import ResidualStore
from commpress.integrations.process_group.call import FutureWork
from commpress.integrations.process_group.group_options import DTYPES, GroupOptions
from commpress.totals import Totals
from commpress.work import Steps, future_on

KEPT_BACKWARDS = 8  # a site that has not come for so many backwards is let go
# by type of the devices whose tensors they carry; "cpu" carries all others
Transports = Mapping[str, Callable[[], Transport]]


@dataclass
class GroupCounters(Totals):
    """All-reduces of one rank since the group was made."""

    compressed_calls: int = 0
    compressed_elements: int = 0
    # what float32 takes for the compressed calls: 8·(P−1)/P per element, by a ring
    logical_bytes: int = 0
    wire_bytes: int = 0  # what they sent, headers included
    # NaN or infinity somewhere: the result is NaN on all ranks, no residual changed
    skipped_calls: int = 0
    dropped_sites: int = 0  # call sites that did not come again; what they owed is lost
    # messages under way when a rank died; what they would have left behind is lost
    lost_calls: int = 0
    lost_ranks: int = 0  # that died, and with each what it owed
    # why a call was left alone → how many
    exact_calls: dict[str, int] = field(default_factory=dict)
    exact_elements: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Bytes of float32 for each byte sent, of the compressed calls."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0


class CallSite:
    """One reduction of every backward, with its exchange and the number of its calls."""

    def __init__(self, name: str, exchange: Exchange, calls: int) -> None:
        self.name, self.exchange, self.calls, self.last_backward = name, exchange, calls, 0
        self._scratch: torch.Tensor | None = None

    def steps(
        self, channel: Channel, tensor: torch.Tensor, *, sequence: int, key: int, factor: int
    ) -> Steps[bool]:
        """``tensor`` := ``factor`` times its mean, or NaN if some rank's numbers were not finite:
        then no residual changes. Whether they were."""
        buffer = tensor.view(-1)
        if tensor.dtype != torch.float32:
            if self._scratch is None:
                self._scratch = torch.empty(tensor.numel(), device=tensor.device)
            buffer = self._scratch.copy_(buffer)
        outcomes = yield from self.exchange.steps(channel, buffer, sequence=sequence, key=key)
        finite = all(outcome.finite for outcome in outcomes)
        if not finite:
            tensor.fill_(float("nan"))
        else:
            if factor != 1:
                buffer *= factor
            if tensor.dtype != torch.float32:
                tensor.view(-1).copy_(buffer)
        settle(outcomes, taken=finite)
        return finite


class GroupReducer:
    """Decides, compresses, counts. Its channels exist from the first compressed call on."""

    def __init__(
        self, options: GroupOptions | None, rank: int, size: int, transports: Transports
    ) -> None:
        self.options, self.counters = options, GroupCounters()
        self.rank, self.size, self._transports = rank, size, transports
        self._codec = None if options is None else codec_named(options.codec)
        self._sites: dict[tuple[int, int, torch.device], CallSite] = {}
        self._task, self._backwards, self._nth = -1, 0, 0
        self._sequence = 0  # every rank counts, also a call that the others then refuse
        self._residuals = ResidualStore()
        self._calls: dict[str, int] = {}  # loaded, of sites that have not come yet
        self._workspaces: dict[str, Workspace] = defaultdict(Workspace)
        # whose buffers the worker, which alone touches them, lets go
        self._dropped: dict[str, list[CallSite]] = defaultdict(list)
        self._channels: dict[str, Channel] = {}
        self._sent_before = 0  # bytes, by channels that are no more
        self._handover: Handover | None = None
        self._cut = rank, size  # of residuals

    # ------------------------------------------------------------ decide

    def codec_for(self, tensors: Sequence[torch.Tensor], op: Any) -> str:
        """The codec if this all-reduce is to be compressed; otherwise "", and counted why not."""
        reason = self._why_not(tensors, op)
        if reason:
            self.left_alone(tensors[:1], reason)
        return "" if reason or self._codec is None else self._codec.spec

    def left_alone(self, tensors: Sequence[torch.Tensor], reason: str) -> None:
        calls, elements = self.counters.exact_calls, self.counters.exact_elements
        calls[reason] = calls.get(reason, 0) + 1
        elements[reason] = elements.get(reason, 0) + sum(t.numel() for t in tensors)

    def _why_not(self, tensors: Sequence[torch.Tensor], op: Any) -> str:
        options = self.options
        if options is None:
            return "no options"
        if self.size == 1 or len(tensors) != 1:
            return "one rank" if self.size == 1 else "several tensors"
        if options.only == "gradients" and torch._C._current_graph_task_id() < 0:
            return "not in a backward"
        (tensor,) = tensors
        if tensor.dtype not in DTYPES:
            return "dtype"
        if not options.accepts(op):
            return "reduction"
        if not _plain(tensor):
            return "layout or device"
        return "small" if tensor.numel() < options.min_numel else ""

    # ------------------------------------------------------------ one call

    def steps(self, tensor: torch.Tensor, op: Any) -> Callable[[], FutureWork]:
        """Fix site and order now, in the order of the calls; the result starts the call once all
        ranks agree."""
        kind, site = self._kind(tensor.device), self._site(tensor)
        sequence, self._sequence = self._sequence, self._sequence + site.exchange.sequences
        key, site.calls = site.calls, site.calls + 1
        factor, given = self.size if op == dist.ReduceOp.SUM else 1, tensor.detach()

        def start() -> FutureWork:
            channel, done = self._connected(kind), future_on(tensor.device)

            def steps() -> Steps[None]:
                dropped = self._dropped[kind]
                while dropped:
                    dropped.pop().exchange.forget(channel.workspace)
                finite = yield from site.steps(
                    channel, given, sequence=sequence, key=key, factor=factor
                )
                self._count(finite, tensor.numel())
                # here, on the stream of the job: torch lets others wait for this thread's stream
                done.set_result([tensor])

            def failed(job: torch.futures.Future[None]) -> None:
                try:
                    job.value()
                except Exception as error:
                    done.set_exception(error)

            waits = site.exchange.waits
            channel.submit(steps(), tensor, waits=waits).add_done_callback(failed)
            return FutureWork(done, [tensor])

        return start

    def _count(self, finite: bool, numel: int) -> None:
        counters, channels = self.counters, list(self._channels.values())
        counters.compressed_calls += 1
        counters.skipped_calls += not finite
        counters.compressed_elements += numel
        counters.logical_bytes += 8 * (self.size - 1) * numel // self.size
        counters.wire_bytes = self._sent_before + sum(channel.sent_bytes for channel in channels)

    # ------------------------------------------------------------ channels

    def _kind(self, device: torch.device) -> str:
        return device.type if device.type in self._transports else "cpu"

    def _connected(self, kind: str) -> Channel:
        """The channel for tensors of a kind of device.

        Note: only the one between hosts meets the others when it is made; NCCL does at its first
        message.
        """
        if kind not in self._channels:
            self._channels[kind] = Channel(
                self._transports[kind](), name="commpress-group", workspace=self._workspaces[kind]
            )
        return self._channels[kind]

    # ------------------------------------------------------------ call sites

    def _site(self, tensor: torch.Tensor) -> CallSite:
        task, numel = torch._C._current_graph_task_id(), tensor.numel()
        if task >= 0 and task != self._task:
            self._task, self._nth, self._backwards = task, 0, self._backwards + 1
            self._forget_old_sites()
        nth = self._nth if task >= 0 else -1
        self._nth += task >= 0
        site = self._sites.get((nth, numel, tensor.device))
        if site is None:
            assert self._codec is not None
            name, workspace = f"call {nth} of {numel}", self._workspaces[self._kind(tensor.device)]
            exchanges = Exchanges(
                policy_of(self._codec),
                self.size,
                workspace,
                feedback=task >= 0,
                residuals=self._residuals,
            )
            where = [Span(name, 0, numel)], [tensor.shape]
            exchange = exchanges.of((name,), lambda: where, tensor.device)
            site = CallSite(name, exchange, self._calls.pop(name, 0))
            self._sites[nth, numel, tensor.device] = site
        site.last_backward = self._backwards
        return site

    def _forget_old_sites(self) -> None:
        oldest = self._backwards - KEPT_BACKWARDS
        for key in [key for key, site in self._sites.items() if site.last_backward < oldest]:
            site = self._sites.pop(key)
            self.counters.dropped_sites += 1
            self._dropped[self._kind(key[-1])].append(site)
            self._residuals.take({site.name})

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Residuals and counts of this rank's sites, between two backwards: numbers, texts and
        tensors."""
        state = exact_state(self._residuals, self, self._backwards)
        calls = self._calls | {site.name: site.calls for site in self._sites.values()}
        return state | {"codecs": self._specs(), "calls": calls}

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """From this rank's state, or those of all ranks at another world size. All or nothing."""
        for state in states:
            if "codecs" not in state or "calls" not in state:
                raise StateMismatch(
                    "expected what state_dict() of a group gave; this is something else"
                )
            if state["codecs"] != self._specs():
                raise StateMismatch(
                    f"the state was saved with the codecs {state['codecs']}, this group has "
                    f"{self._specs()}: load it into a group with the same GroupOptions"
                )
        backwards, residuals = residuals_of(states, self)
        own = next(
            (each for each in states if (each["size"], each["rank"]) == (self.size, self.rank)),
            states[0],
        )
        self._residuals.load(residuals)
        self._calls, self._backwards = dict(own["calls"]), backwards
        for site in self._sites.values():
            site.calls, site.last_backward = self._calls.pop(site.name, 0), backwards

    def _specs(self) -> dict[str, str]:
        return {} if self._codec is None else {"all_reduce": self._codec.spec}

    # ------------------------------------------------------------ other ranks

    def stop(self, reason: str) -> None:
        """End what is under way with an error that gives ``reason``."""
        for channel in self._channels.values():
            channel.stop(reason)

    def abort(self) -> None:
        """End what NCCL has under way, which knows nothing of a rank that is gone."""
        for kind, channel in list(self._channels.items()):
            if kind != "cpu":
                channel.inner.abandon("the group has failed.")

    def connect(self, rank: int, size: int, transports: Transports) -> None:
        """Work among other ranks from here on. ``reform`` hands over what the old ones owed."""
        self.rank, self.size, self._transports = rank, size, transports
        self._sent_before += sum(channel.sent_bytes for channel in self._channels.values())
        self._channels.clear()

    def reform(self, change: Change) -> Callable[[], None] | None:
        """Hand over what call sites owe; collective. Call the result when all have come as far."""
        if self.options is None:
            return None
        channel = self._connected("cpu")
        if self._handover is None:
            self._handover = Handover(channel)
            self._handover.rank, self._handover.size = self._cut
        self._handover.channel = channel
        self.counters.lost_calls += sum(
            workspace.proposed for workspace in self._workspaces.values()
        )
        for kind, workspace in self._workspaces.items():
            if kind != "cpu":
                workspace.settle(taken=False)
        channel.run(self._handover.steps(change, {"": self._residuals}, self._workspaces["cpu"]))
        return self._handover.with_it(self._follow)

    def hand_over(self, leaving: Sequence[int]) -> None:
        """Let the others take over what these ranks owe, which are about to leave; collective over
        all, between calls."""
        if self._handover is not None:
            self._handover.channel.run(self._handover.leaving(leaving, {"": self._residuals}))

    def _follow(self) -> None:
        """Sites are cut anew; each finds what it owes when it comes again."""
        assert self._handover is not None
        self._cut = self._handover.rank, self._handover.size
        self._sites, self._task, self._nth = {}, -1, 0
        self._dropped.clear()
        self._calls.clear()
        self._sequence = self._connected("cpu").take(0)
        for workspace in self._workspaces.values():
            workspace.clear()
        self.counters.lost_ranks = self._handover.lost

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
