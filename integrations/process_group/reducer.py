"""The compressed all-reduce of a process group: residuals per call site, and counters of what was left alone.

Note: the call site. DDP reduces its buckets in the same order in every backward, so the n-th compressed call of a backward
with so many elements of that dtype is one site and keeps one residual. After DDP has rebuilt its buckets, at its first
step, sites change and what the old ones still owed is dropped. The hook (``commpress.compress``) keys residuals by parameter
and loses nothing. Two models that train over one group need one group each. Outside a backward there is no such
order: ``only="everything"`` compresses there without residuals.

Note: other ranks. What sites owe is handed over when ranks come and go (``handover``). A call decides by itself, so of those
that were under way when a rank died some may have been finished by others: they are left out here, and counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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
from commpress.collectives.transports.transport import Transport
from commpress.feedback import ResidualStore
from commpress.integrations.process_group.call import FutureWork
from commpress.integrations.process_group.group_options import DTYPES, GroupOptions
from commpress.work import Steps

KEPT_BACKWARDS = 8  # a site that has not come for so many backwards is let go


@dataclass
class GroupCounters:
    """All-reduces of one rank since the group was made."""

    compressed_calls: int = 0
    compressed_elements: int = 0
    logical_bytes: int = 0  # what a float32 ring sends for the compressed calls: 8·(P−1)/P per element
    wire_bytes: int = 0  # what they sent, headers included
    skipped_calls: int = 0  # NaN or infinity somewhere: the result is NaN on all ranks, no residual changed
    dropped_sites: int = 0  # call sites that did not come again; what they owed is lost
    lost_calls: int = 0  # messages under way when a rank died; what they would have left behind is lost
    lost_ranks: int = 0  # that died, and with each what it owed
    exact_calls: dict[str, int] = field(default_factory=dict)  # why a call was left alone → how many
    exact_elements: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Bytes of float32 for each byte sent, of the compressed calls."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


class _Site:
    """One call site: how its tensor crosses, what is owed."""

    def __init__(
        self, name: str, tensor: torch.Tensor, options: GroupOptions, size: int, workspace: Workspace, residuals: ResidualStore,
        *, feedback: bool,
    ) -> None:  # fmt: skip
        exchanges = Exchanges(policy_of(options.codec), size, workspace, feedback=feedback, residuals=residuals)
        where = [Span(name, 0, tensor.numel())], [tensor.shape]
        self.name, self.exchange = name, exchanges.of((name,), lambda: where, tensor.device)
        self.scratch: torch.Tensor | None = None
        self.last_backward, self.calls = 0, 0


class GroupReducer:
    """Decides, reduces, counts. Its channel exists from the first compressed call on."""

    def __init__(self, options: GroupOptions | None, rank: int, size: int, transport: Callable[[], Transport]) -> None:
        self.options, self.counters = options, GroupCounters()
        self._rank, self._size, self._private = rank, size, transport
        self._codec = codec_named(options.codec).spec.encode() if options is not None else b""
        self._sites: dict[tuple[object, ...], _Site] = {}
        self._task, self._backwards, self._nth = -1, 0, 0
        self._sequence = 0  # every rank counts, also a call that the others then refuse
        self._workspace, self._residuals = Workspace(), ResidualStore()
        self._dropped: list[Exchange] = []  # whose buffers the worker, which alone touches the workspace, lets go
        self._channel: Channel | None = None
        self._sent_before = 0  # bytes, by channels that are no more
        self._handover: Handover | None = None
        self._cut = rank, size  # of residuals

    # ------------------------------------------------------------ decide

    def codec_for(self, tensors: Any, op: Any) -> bytes | None:
        """The codec if this all-reduce is to be compressed; otherwise count why not."""
        reason = self._why_not(tensors, op)
        if reason is None:
            return self._codec
        self.left_alone(tensors, reason)
        return None

    def left_alone(self, tensors: Any, reason: str) -> None:
        calls, elements = self.counters.exact_calls, self.counters.exact_elements
        calls[reason] = calls.get(reason, 0) + 1
        elements[reason] = elements.get(reason, 0) + sum(t.numel() for t in tensors)

    def _why_not(self, tensors: Any, op: Any) -> str | None:
        options = self.options
        if options is None:
            return "no options"
        if self._size == 1 or len(tensors) != 1:
            return "one rank" if self._size == 1 else "several tensors"
        if options.only == "gradients" and torch._C._current_graph_task_id() < 0:
            return "not in a backward"
        tensor = tensors[0]
        if tensor.dtype not in DTYPES:
            return "dtype"
        if not options.accepts(op):
            return "reduction"
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.layout is not torch.strided:
            return "layout or device"
        return "small" if tensor.numel() < options.min_numel else None

    # ------------------------------------------------------------ reduce

    def steps(self, tensor: torch.Tensor, op: Any) -> Callable[[], FutureWork]:
        """Fix site and order now, in the order of the calls; the result starts the reduction once all ranks agree."""
        site = self._site(tensor)
        sequence, self._sequence = self._sequence, self._sequence + site.exchange.sequences
        key, site.calls = site.calls, site.calls + 1
        total = op == dist.ReduceOp.SUM

        def start() -> FutureWork:
            channel = self._connected()
            steps = self._reduce(channel, tensor, site, sequence, key, total)
            return FutureWork(channel.submit(steps, tensor, waits=site.exchange.waits), [tensor])

        return start

    def _connected(self) -> Channel:
        if self._channel is None:
            self._channel = Channel(self._private(), name="commpress-group", workspace=self._workspace)
        return self._channel

    def _site(self, tensor: torch.Tensor) -> _Site:
        assert self.options is not None
        task = torch._C._current_graph_task_id()
        if task >= 0 and task != self._task:
            self._task, self._nth, self._backwards = task, 0, self._backwards + 1
            self._forget_old_sites()
        key = (self._nth if task >= 0 else -1, tensor.numel())
        self._nth += task >= 0
        site = self._sites.get(key)
        if site is None:
            name = f"call {key[0]} of {key[1]}"
            site = self._sites[key] = _Site(
                name, tensor, self.options, self._size, self._workspace, self._residuals, feedback=task >= 0
            )
        site.last_backward = self._backwards
        return site

    def _forget_old_sites(self) -> None:
        for key in [k for k, s in self._sites.items() if s.last_backward < self._backwards - KEPT_BACKWARDS]:
            self.counters.dropped_sites += 1
            site = self._sites.pop(key)
            self._dropped.append(site.exchange)
            self._residuals.take({site.name})

    def _reduce(
        self, channel: Channel, tensor: torch.Tensor, site: _Site, sequence: int, key: int, total: bool
    ) -> Steps[list[torch.Tensor]]:
        while self._dropped:
            self._dropped.pop().forget(self._workspace)
        buffer = tensor.detach().view(-1)
        if tensor.dtype != torch.float32:
            if site.scratch is None:
                site.scratch = torch.empty(tensor.numel(), dtype=torch.float32)
            buffer = site.scratch.copy_(buffer)
        outcomes = yield from site.exchange.steps(channel, buffer, sequence=sequence, key=key)
        finite = all(outcome.finite for outcome in outcomes)
        if finite and total:
            buffer *= self._size
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().view(-1).copy_(buffer)
        if not finite:
            tensor.detach().fill_(float("nan"))
        settle(outcomes, taken=finite)
        counters = self.counters
        counters.compressed_calls += 1
        counters.skipped_calls += not finite
        counters.compressed_elements += tensor.numel()
        counters.logical_bytes += 8 * (self._size - 1) * tensor.numel() // self._size
        counters.wire_bytes = self._sent_before + channel.sent_bytes
        return [tensor]

    def stop(self, reason: str) -> None:
        """End what is under way with an error that gives ``reason``."""
        if self._channel is not None:
            self._channel.stop(reason)

    def connect(self, rank: int, size: int, transport: Callable[[], Transport]) -> None:
        """Work among other ranks from here on. ``reform`` hands over what the old ones owed."""
        self._rank, self._size, self._private = rank, size, transport
        self._sent_before += 0 if self._channel is None else self._channel.sent_bytes
        self._channel = None

    def reform(self, change: Change) -> Callable[[], None] | None:
        """Hand over what call sites owe; collective. Call the result when all have come as far."""
        if self.options is None:
            return None
        channel = self._connected()
        if self._handover is None:
            self._handover = Handover(channel)
            self._handover.rank, self._handover.size = self._cut
        self._handover.channel = channel
        self.counters.lost_calls += self._workspace.proposed
        channel.run(self._handover.steps(change, {"": self._residuals}, self._workspace))
        return self._handover.with_it(self._follow)

    def hand_over(self, leaving: Sequence[int]) -> None:
        """Let the others take over what these ranks owe, which are about to leave; collective over all, between calls."""
        if self._handover is not None:
            self._handover.channel.run(self._handover.leaving(leaving, {"": self._residuals}))

    def _follow(self) -> None:
        """Sites are cut anew; each finds what it owes when it comes again."""
        assert self._handover is not None
        self._cut = self._handover.rank, self._handover.size
        self._sites, self._dropped, self._task, self._nth = {}, [], -1, 0
        self._sequence = self._connected().take(0)
        self._workspace.clear()
        self.counters.lost_ranks = self._handover.lost

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
