"""Dispatch tokens to the experts that gates chose, on any rank, and combine their results."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commpress.codecs import BlockCodec, Codec, codec_named
from commpress.collectives.all_to_all.all_to_all import check_codec
from commpress.collectives.all_to_all.routes import Nodes
from commpress.collectives.all_to_all.tokens import (
    NUMBERS,
    Carrier,
    PacketForm,
    Placement,
    TokenRoutes,
    TokenShare,
    route_tokens,
)
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.handover import Divided, cannot_follow
from commpress.collectives.topology import Topology, agree
from commpress.collectives.transports.factory import can_reform, on_reform
from commpress.collectives.transports.loopback import Loopback
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, check_counts
from commpress.integrations.experts.codec_measurement import AUTO, CANDIDATES, CodecMeasurement
from commpress.integrations.experts.dispatch import channel_over
from commpress.integrations.experts.expert_copies import ExpertCopies
from commpress.integrations.experts.expert_counters import ExpertCounters
from commpress.integrations.experts.expert_rows import ExpertRows, within_capacity
from commpress.integrations.experts.trips import Experts, Trip, in_chunks
from commpress.torch_private import Routing, TokenSwitch
from commpress.work import Steps

T = TypeVar("T")

BLOCK = 128  # elements of a token that share a scale, for a codec given by name
Codecs = (
    str | Codec | tuple[str | Codec, str | Codec]
)  # for tokens, or a pair for tokens and results


@dataclass(frozen=True, eq=False)
class ExpertPlan:
    """Routes of the tokens of one batch, and the rows that this rank's experts get."""

    routes: TokenRoutes
    rows: ExpertRows
    k: int
    share: TokenShare
    # bool[tokens, k]: choices of lost experts; None: no expert is lost
    lost: torch.Tensor | None = None

    def to(self, device: torch.device) -> "ExpertPlan":
        lost = None if self.lost is None else self.lost.to(device)
        return replace(self, routes=self.routes.to(device), rows=self.rows.to(device), lost=lost)


class ExpertExchange(Divided, TokenSwitch):
    """Dispatch tokens to experts on other ranks and combine their results, differentiably.

        exchange = commpress.ExpertExchange(num_experts=8)
        routing = exchange.create_routing(topk_idx, layout="expert_major")  # int64[tokens, k]
        rows, gates, _ = exchange.dispatch(routing, tokens, topk_weights)   # of this rank's experts
        results = gates[:, None] * experts(rows, routing.handle.rows.counts)
        tokens = exchange.combine(routing, results)

    Construct it on every rank of ``process_group`` (default: all), in the same order as other
    groups, because it makes a new one. All ranks must make the same calls in the same order, even
    those without tokens. It is a ``TokenSwitch`` if torch has that class.

    - ``num_experts``: number of experts of all ranks together, in contiguous blocks.
      ``placement``: the rank of each expert instead.
    - ``codec``: int8, int4, fp8, bf16, fp16 or none for tokens, or a pair: for tokens and for
      results. ``gradient_codec``: the same for gradients (default: as for tokens). With a codec by
      name 128 elements of one token share a scale, never elements of different tokens. "auto", for
      one or both: the first batch is sent in float32, bf16 and int8 a few times, and all ranks take
      the fastest, float32 unless another saves 5 % (``exchange.measurement``).
    - ``topology``: nodes as ``Topology`` takes them, or "auto": a token crosses to a node once, and
      its results are summed inside the node before they return.
    - ``capacity``: most rows of an expert, as a multiple of its even share of a rank's choices;
      others are dropped.
    - ``copies``: ``{expert: n}`` for experts on n ranks; see ``ExpertCopies``. ``experts`` get rows
      of copies after their own, and must keep copies equal, as ``commpress.moe.Experts`` does.
    - ``pad``: each expert's rows are padded with zeros to a multiple of it ("expert_major").
    - ``tensor_group``: ranks with the same tokens, as under tensor parallelism. Each sends its
      share of them, and results are gathered among them, so that every token is sent once.
    - ``on_lost``: handling of a dead rank's experts when the group reforms. "refuse": the exchange
      ends. "mask": tokens go to their remaining choices, with gates scaled to the same sum.
    - ``process_group``, ``tensor_group``: process groups or transports, such as an
      ``MpiTransport``.

    Sums are formed in a fixed order (``collectives/all_to_all/tokens.py``): nodes, in them ranks,
    in them a token's choices.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        codec: Codecs = "none",
        gradient_codec: Codecs | None = None,
        topology: Topology | str | None = None,
        placement: Sequence[int] | None = None,
        copies: Mapping[int, int] | None = None,
        capacity: float | None = None,
        pad: int = 1,
        tensor_group: dist.ProcessGroup | Transport | None = None,
        on_lost: Literal["refuse", "mask"] = "refuse",
        process_group: dist.ProcessGroup | Transport | None = None,
    ) -> None:
        check_counts(1, num_experts=num_experts, pad=pad)
        if capacity is not None and not capacity > 0:
            raise InvalidArgument(
                f"capacity is {capacity!r}, expected a factor above 0, such as 1.25, or None for "
                "no limit"
            )
        if placement is not None and len(placement) != num_experts:
            raise InvalidArgument(
                f"placement has {len(placement)} ranks, expected one for each of {num_experts} "
                "experts"
            )
        self._gradient_codec = gradient_codec
        self.measurement: CodecMeasurement | None = None  # with "auto"
        there, back = both_ways(codec, "codec", "none")
        if AUTO in (there, back):
            self.measurement = CodecMeasurement(candidates(there), candidates(back))
            there, back = (CANDIDATES[0] if each == AUTO else each for each in (there, back))
        self._take(per_token(there, "codec"), per_token(back, "codec"))
        _check_on_lost(on_lost, process_group, tensor_group)
        self.num_experts, self.capacity, self.pad = num_experts, capacity, pad
        self.on_lost = on_lost
        self.channel = channel_over(process_group, "ExpertExchange")
        if self.channel.members:
            on_reform(self.channel.group, self)
        size = self.channel.size
        self.home = (
            Placement.even(num_experts, size) if placement is None else Placement(placement, size)
        )
        self.carrier = Carrier(self.channel.transport, self._nodes(topology))
        self.counters = ExpertCounters(self._copied(copies))
        self._tensor = (
            Channel(Loopback(1).transport(0))
            if tensor_group is None
            else channel_over(tensor_group, "ExpertExchange")
        )
        self._overlaps = False
        self._tensor_carrier = Carrier(
            self._tensor.transport,
            Nodes.of((tuple(range(self._tensor.size)),), self._tensor.size),
        )

    def __call__(
        self,
        tokens: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Experts,
        *,
        chunks: int = 1,
        routed: Callable[[list[int]], None] | None = None,
    ) -> torch.Tensor:
        """Compute the whole layer: Σ gates · expert(token) over each token's choices, [tokens,
        width], in the dtype of the tokens.

        ``experts(rows, counts)`` computes the results of this rank's experts for ``rows``, which
        are sorted by expert, ``counts`` (int64) of each, with the zeros of ``pad``; it must use the
        rows even if there are none, so that backward reaches every rank. ``chunks``: number of
        parts in which tokens are sent, equal on every rank; some are sent while experts compute
        another. Without chunks, ``routed`` is called with the number of rows of each expert on this
        rank before they are sent.
        """
        check_counts(1, chunks=chunks)
        self._check(tokens, topk_weights, topk_idx.shape)
        if (lost := self._lost(topk_idx)) is not None:
            topk_idx = topk_idx.masked_fill(lost, -1)
            topk_weights = redistributed(topk_weights, lost)
        if chunks > 1 and not self._measures:
            self._overlaps = True
            return in_chunks(self, tokens, topk_idx, topk_weights, experts, chunks)
        routing = self.create_routing(topk_idx, layout="expert_major")
        if routed is not None:
            routed(routing.handle.rows.heights.tolist())
        rows, gates, _ = self.dispatch(routing, tokens, topk_weights)
        assert gates is not None
        made = gates[:, None] * experts(rows, torch.from_numpy(routing.handle.rows.heights))
        return self.combine(routing, made.to(rows.dtype))

    @property
    def _measures(self) -> bool:
        """True if the codec is still to be chosen."""
        return self.measurement is not None and not self.measurement.chosen

    def _measure(self, plan: ExpertPlan, tokens: torch.Tensor, gates: torch.Tensor | None) -> None:
        found = self.measurement
        assert found is not None
        if self.channel.size == 1:
            found.chosen = CANDIDATES[0]
        elif self.finish(found.steps(self, plan, tokens, gates)):
            self._take(found.out[found.chosen], found.back[found.chosen])

    def _take(self, codec: Codec, combine_codec: Codec) -> None:
        """Set the codecs of both directions, and of gradients if no others were given."""
        self.codec, self.combine_codec = codec, combine_codec
        self.gradient_codec, self.combine_gradient_codec = codec, combine_codec
        if self._gradient_codec is not None:
            there, back = both_ways(self._gradient_codec, "gradient_codec", combine_codec)
            self.gradient_codec = per_token(there, "gradient_codec")
            self.combine_gradient_codec = per_token(back, "gradient_codec")

    @property
    def tensor_size(self) -> int:
        """Number of ranks with the same tokens."""
        return self._tensor.size

    def finish(self, steps: Steps[T], *tensors: torch.Tensor | None) -> T:
        """Return the result of steps that use ``tensors``; they run on the worker if it may have
        chunks."""
        used = [tensor for tensor in tensors if tensor is not None]
        return (
            self.channel.submit(steps, *used).wait() if self._overlaps else self.channel.run(steps)
        )

    def create_routing(
        self,
        topk_idx: torch.Tensor,
        per_expert_token_counts: torch.Tensor | None = None,
        *,
        layout: str = "flat",
    ) -> Any:
        """Find the routes of tokens to the experts ``topk_idx`` int64[tokens, k], -1 for none; for
        any number of dispatches.

        ``per_expert_token_counts`` (int32, one for each expert of this rank): filled with the rows
        that each gets, with padding. ``layout``: "flat", a row for each token that this rank
        receives, or "expert_major", one for each token and expert, sorted by expert.
        """
        steps = self.routing_steps(topk_idx, per_expert_token_counts, layout=layout)
        return self.finish(steps, topk_idx)

    def dispatch(
        self,
        routing: Any,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        max_recv_tokens: int | None = None,
        *,
        out: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Send tokens to their experts; return (rows for the experts here, gates, expert numbers):
        flat [r, width], [r, k], [r, k]; by expert [r, width], [r], None.

        Expert numbers are those among this rank's experts; choices of other ranks' experts have -1
        and a gate of 0. Tokens and gates get gradients. ``max_recv_tokens``: number of rows to
        return, with zeros after the received ones. All ranks must pass it, or none: they check
        together whether it is enough, and raise together. ``out``: tensors to write to, without
        autograd; their number of rows acts as ``max_recv_tokens``.
        """
        plan = self._plan(routing, tokens, topk_weights)
        if self._measures:
            self._measure(
                plan, tokens.detach(), None if topk_weights is None else topk_weights.detach()
            )
        if plan.lost is not None and topk_weights is not None:
            topk_weights = redistributed(topk_weights, plan.lost)
        if out is not None:
            with torch.no_grad():
                self._dispatch(routing, tokens, topk_weights, *out)
            return out
        count = plan.rows.count if max_recv_tokens is None else max_recv_tokens
        if max_recv_tokens is not None:
            self._check_room(count, plan.rows.count)
        rows, gates = self._trip(plan, count, out=True).of(tokens, topk_weights)
        if plan.rows.layout != "flat":
            return rows, gates, None
        numbers = plan.rows.local.new_full((count, plan.k), -1)
        numbers[: plan.rows.count] = plan.rows.local
        return rows, gates, numbers

    def combine(
        self, routing: Any, expert_tokens: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return for each token, [tokens, width], the sum over its experts of their results, in the
        order of ``dispatch``'s rows and already multiplied by gates."""
        plan: ExpertPlan = routing.handle
        if expert_tokens.dim() != 2 or len(expert_tokens) < plan.rows.count:
            raise InvalidArgument(
                f"expert_tokens are {tuple(expert_tokens.shape)}, expected the {plan.rows.count} "
                "rows of dispatch, with or without zeros after them"
            )
        if out is not None:
            with torch.no_grad():
                self._combine(routing, expert_tokens, out)
            return out
        trip = self._trip(plan.to(expert_tokens.device), len(expert_tokens), out=False)
        found: torch.Tensor = trip.of(expert_tokens)[0]
        return found

    def _trip(self, plan: ExpertPlan, count: int, *, out: bool) -> Trip:
        return Trip(exchange=self, plan=plan, sequence=self.channel.take(2), out=out, count=count)

    # ------------------------------------------------------------ steps

    def routing_steps(
        self,
        topk_idx: torch.Tensor,
        per_expert_token_counts: torch.Tensor | None = None,
        *,
        layout: str,
        note: str = "",
        sequence: int | None = None,
    ) -> Steps[Any]:
        """Do ``create_routing`` as steps. ``note``: values that must be equal on all ranks;
        ``sequence``: sequence numbers taken earlier."""
        if topk_idx.dim() != 2 or topk_idx.is_floating_point() or not topk_idx.shape[1]:
            raise InvalidArgument(
                f"topk_idx is {topk_idx.dtype} {tuple(topk_idx.shape)}, expected integers "
                "[tokens, k]"
            )
        asked = topk_idx.detach().cpu().numpy().astype(np.int64)
        if asked.size and (asked.min() < -1 or asked.max() >= self.num_experts):
            raise InvalidArgument(
                f"topk_idx has numbers from {asked.min()} to {asked.max()}, expected experts 0 to "
                f"{self.num_experts - 1}, or -1"
            )
        lost = self._lost(topk_idx)
        if lost is not None:
            asked = np.where(lost.cpu().numpy(), -1, asked)
        wanted = (
            asked
            if self.capacity is None
            else within_capacity(asked, self.num_experts, self.capacity)
        )
        wanted = self.copies.spread(wanted)
        share = TokenShare(
            len(asked), self._tensor.rank, self._tensor.size, zlib.crc32(asked.tobytes())
        )
        self.carrier.label = self._label()
        routes = yield from route_tokens(
            wanted[share.own],
            self.placement,
            self.carrier,
            said=[self.counters.load],
            note=note,
            sequence=self.channel.take(NUMBERS) if sequence is None else sequence,
        )
        rows = ExpertRows.of(routes, self.placement, self.channel.rank, layout, self.pad)
        if per_expert_token_counts is not None:
            if per_expert_token_counts.dim() != 1 or len(per_expert_token_counts) < len(
                rows.counts
            ):
                raise InvalidArgument(
                    f"per_expert_token_counts has shape {tuple(per_expert_token_counts.shape)}, "
                    f"expected at least [{len(rows.counts)}]: one for each expert of this rank"
                )
            per_expert_token_counts[: len(rows.counts)] = torch.from_numpy(rows.heights)
        self.counters.routed(
            asked[share.own], wanted[share.own], routes, rows, self.placement, self.carrier
        )
        plan = ExpertPlan(routes, rows, asked.shape[1], share, lost)
        return Routing(plan.to(topk_idx.device), topk_idx, layout)

    def out_steps(
        self,
        plan: ExpertPlan,
        tokens: torch.Tensor,
        gates: torch.Tensor | None,
        count: int,
        codec: Codec,
        sequence: int,
    ) -> Steps[tuple[torch.Tensor, torch.Tensor | None]]:
        """Send rows and gates to the experts, or gradients of combined tokens."""
        form = PacketForm(codec, tokens.shape[1], tokens.dtype, 0 if gates is None else plan.k)
        pool = self.carrier.rows(
            plan.routes.count + plan.routes.relayed, form.row_bytes, tokens.device
        )
        own = plan.share.own
        form.pack(tokens[own], None if gates is None else gates[own], pool[: plan.routes.count])
        arrived = yield from plan.routes.spread(pool, form, self.carrier, sequence)
        held = [pool, arrived]
        rows = plan.rows.rows(form.tokens(arrived, self.carrier.scratch, held), count, tokens.dtype)
        found = (
            None if gates is None else plan.rows.gates(form.extras(arrived), count).to(gates.dtype)
        )
        self.carrier.scratch.give(*held)
        self.counters.bytes_of(self.carrier)
        return rows, found

    def back_steps(
        self,
        plan: ExpertPlan,
        rows: torch.Tensor,
        gates: torch.Tensor | None,
        codec: Codec,
        sequence: int,
    ) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
        """Return to each token the sum of its results, or the gradients of dispatched tokens and
        gates."""
        form = PacketForm(codec, rows.shape[1], rows.dtype, 0 if gates is None else plan.k)
        packets = self.carrier.rows(plan.routes.received, form.row_bytes, rows.device)
        held = [packets]
        extra = None
        if gates is not None:
            extra = torch.empty(plan.routes.received, plan.k, device=rows.device)
            plan.rows.gates_back(gates, extra)
        form.pack(plan.rows.sums_of(rows, self.carrier.scratch, held), extra, packets)
        tokens, found = yield from plan.routes.collect(packets, form, self.carrier, sequence)
        self.carrier.scratch.give(*held)
        self.counters.bytes_of(self.carrier)
        tokens = tokens.to(rows.dtype)
        if plan.share.size > 1:
            tokens, found = yield from plan.share.gather(
                tokens, found, self._tensor_carrier, sequence
            )
        return tokens, found

    # ------------------------------------------------------------ copies

    def copy_experts(self, copies: Mapping[int, int], load: Sequence[float] = ()) -> None:
        """Replace the copies, from the next routing on; call it between two steps, with the same
        arguments on all ranks."""
        self.counters.copied(self._copied(copies, load))

    def _copied(self, copies: Mapping[int, int] | None, load: Sequence[float] = ()) -> np.ndarray:
        """Place copies of experts; return the numbers of this rank's experts, then of its
        copies."""
        if copies and self.on_lost == "mask":
            raise InvalidArgument(
                "copies are given, whose homes may be lost, and on_lost is 'mask': leave one out"
            )
        rank = self.channel.rank
        self.copies = ExpertCopies(self.home, self.carrier.nodes, rank, copies, load)
        self.placement = self.copies.placement
        found: np.ndarray = self.copies.expert[self.placement.on(rank)]
        return found

    def expert_load(self) -> list[int]:
        """Return the choices of each expert by tokens of all ranks since copies were last made;
        collective."""
        mine = np.bincount(self.counters.experts, self.counters.since, self.num_experts)
        every = self.finish(self.channel.gathered(mine.tolist()))
        found: list[int] = every.sum(axis=0).astype(int).tolist()
        return found

    # ------------------------------------------------------------ other ranks

    def reform(self, change: Change) -> Callable[[], None]:
        """Continue among the remaining ranks, without the experts of the others: for
        ``group.reform``, on all ranks."""
        if self.on_lost == "refuse":
            return super().reform(change)
        if change.new:
            raise cannot_follow(
                self, f"ranks {list(change.new)} are new and have no experts of this exchange"
            )
        placement = self.placement.among(change.sources)
        nodes = self.carrier.nodes.among(change.sources)
        if placement.masked[:-1].all():
            raise cannot_follow(self, "all experts are lost")

        def follow() -> None:
            self.home = self.placement = placement
            self.carrier.nodes = nodes
            self.copies = ExpertCopies(placement, nodes, self.channel.rank)

        return follow

    @property
    def lost_experts(self) -> list[int]:
        """Experts lost with their ranks; a gate may leave them out."""
        found: list[int] = np.flatnonzero(self.placement.masked).tolist()
        return found

    def _lost(self, topk_idx: torch.Tensor) -> torch.Tensor | None:
        """Return bool[tokens, k], the choices of lost experts, and count them; None if no expert is
        lost."""
        if self.placement.size != self.channel.size:
            raise cannot_follow(self, "its experts were divided among others")
        masked = self.placement.masked
        if not masked.any():
            return None
        lost = torch.from_numpy(masked).to(topk_idx.device)[topk_idx.long()]
        self.counters.masked += int(lost.sum())
        return lost

    def _label(self) -> int:
        """Return a hash of the options that must be equal on all ranks."""
        options = (
            self.placement.owner.tolist(),
            self.carrier.nodes.members,
            self.codec.spec,
            self.combine_codec.spec,
            self.gradient_codec.spec,
            self.combine_gradient_codec.spec,
            self.on_lost,
            self._measures,
            self.copies.holders,
        )
        return zlib.crc32(repr(options).encode())

    # ------------------------------------------------------------ torch's TokenSwitch

    def _alloc_dispatch_outputs(
        self,
        routing: Any,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        max_recv_tokens: int,
        H: int,
        K: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        rows = tokens.new_zeros(max_recv_tokens, H)
        if routing.layout != "flat":
            return rows, topk_weights.new_zeros(max_recv_tokens), None
        numbers = torch.full((max_recv_tokens, K), -1, dtype=torch.int64, device=tokens.device)
        return rows, topk_weights.new_zeros(max_recv_tokens, K), numbers

    def _dispatch(
        self,
        routing: Any,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor | None,
        out_tokens: torch.Tensor,
        out_topk_weights: torch.Tensor | None,
        out_topk_idx: torch.Tensor | None,
    ) -> None:
        found = self.dispatch(routing, tokens, topk_weights, len(out_tokens))
        for given, each in zip((out_tokens, out_topk_weights, out_topk_idx), found, strict=True):
            if given is not None and each is not None:
                given.copy_(each)

    def _combine(self, routing: Any, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
        out_tokens.copy_(self.combine(routing, expert_tokens))

    # ------------------------------------------------------------ checks

    def _check_room(self, room: int, coming: int) -> None:
        """Raise on all ranks if some rank receives more rows than it has room for; collective."""
        every = self.finish(self.channel.gathered([room, coming])).astype(int)
        short = np.flatnonzero(every[:, 0] < every[:, 1]).tolist()
        if short:
            rows, more = every[short[0]]
            raise InvalidArgument(
                f"max_recv_tokens is {rows}, but rank {short[0]} receives {more} rows (too few on "
                f"ranks {short}): leave it out, raise it, or pass a capacity to ExpertExchange"
            )

    def _plan(self, routing: Any, tokens: torch.Tensor, gates: torch.Tensor | None) -> ExpertPlan:
        plan: ExpertPlan = routing.handle
        self._check(tokens, gates, (plan.share.count, plan.k))
        return plan.to(tokens.device)

    def _check(
        self, tokens: torch.Tensor, gates: torch.Tensor | None, shape: Sequence[int]
    ) -> None:
        if tokens.dim() != 2 or len(tokens) != shape[0]:
            raise InvalidArgument(
                f"tokens are {tuple(tokens.shape)}, expected [{shape[0]}, width], as in the routing"
            )
        if gates is not None and gates.shape != tuple(shape):
            raise InvalidArgument(f"topk_weights are {tuple(gates.shape)}, expected {tuple(shape)}")

    def _nodes(self, topology: Topology | str | None) -> Nodes:
        """Return the nodes: one of all ranks by default. "auto" asks every rank's launcher;
        collective."""
        size = self.channel.size
        if topology is None:
            return Nodes.of((tuple(range(size)),), size)
        if topology == "auto":
            topology = self.channel.run(agree(self.channel.transport, sequence=self.channel.take()))
        return Nodes.of(
            (Topology.parse(topology) if isinstance(topology, str) else topology).nodes, size
        )


def _check_on_lost(on_lost: str, group: object, tensor_group: object) -> None:
    if on_lost not in ("refuse", "mask"):
        raise InvalidArgument(f"on_lost is {on_lost!r}, expected 'refuse' or 'mask'")
    ours = (group is None or isinstance(group, dist.ProcessGroup)) and can_reform(group)
    if on_lost == "mask" and (not ours or tensor_group is not None):
        raise InvalidArgument(
            "on_lost is 'mask', but remaining ranks can continue only by group.reform(): use the "
            "backend 'commpress', init_process_group('commpress'), without a transport and without "
            "tensor_group="
        )


def redistributed(gates: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Scale the gates of a token's other choices to the sum of all; set those of ``lost`` choices
    to 0."""
    left = gates.masked_fill(lost, 0)
    rest = left.sum(1, keepdim=True)
    return left * torch.where(
        rest == 0, 0, gates.sum(1, keepdim=True) / torch.where(rest == 0, 1, rest)
    )


def both_ways(codec: Codecs, name: str, back: str | Codec) -> tuple[str | Codec, str | Codec]:
    """Return the codecs for tokens and for results; ``back`` is the second if only one is given."""
    if not isinstance(codec, tuple):
        return codec, back
    if len(codec) != 2:
        raise InvalidArgument(
            f"{name} is {codec!r}, expected one codec or a pair of them, out and back"
        )
    return codec


def candidates(codec: str | Codec) -> dict[str, Codec]:
    """Return the codec of one direction for each candidate of "auto"."""
    return {each: per_token(each if codec == AUTO else codec, "codec") for each in CANDIDATES}


def per_token(codec: str | Codec, name: str) -> Codec:
    """Return the codec, with a scale for every 128 elements if it is given by name."""
    found = BlockCodec(codec, BLOCK) if codec in ("int8", "int4", "fp8") else codec_named(codec)  # type: ignore[arg-type]
    check_codec(found, name)
    return found
