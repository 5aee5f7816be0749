"""Copies of busy experts on further ranks, over which tokens are spread. All have the weights of
the expert's home rank.

A copy has no parameters of its own. In each forward its weights come from the home, and in backward
its gradients are sent there and summed in the order of ranks. So copies are equal bit for bit, and
optimizers, clipping and ``state_dict`` see an expert once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from commpress.collectives.all_to_all.all_to_all import all_to_all
from commpress.collectives.all_to_all.routes import Nodes
from commpress.collectives.all_to_all.tokens import Placement
from commpress.errors import InvalidArgument
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.integrations.experts.expert_exchange import ExpertExchange


class ExpertCopies:
    """Place copies of experts on ranks, and choose a copy for each choice of this rank's tokens.

    ``ranks``: number of ranks that have an expert, including its home. A copy is placed on a node
    without the expert, on the rank with the lowest load. Tokens stay on their rank if it has the
    expert, else on their node; copies at equal distance get equal shares, according to ``load``
    (choices of each expert). Without ``load`` an expert on n ranks is assumed to have n times the
    choices of others. Everything follows from arguments that are equal on all ranks, so that
    backward and checkpointing find the same copies.

    Copies are numbered after the experts: by expert, then in the order of placement.
    """

    def __init__(
        self,
        home: Placement,
        nodes: Nodes,
        rank: int,
        ranks: Mapping[int, int] | None = None,
        load: Sequence[float] = (),
    ) -> None:
        self.ranks = _checked(ranks or {}, home)
        experts, size = home.experts, home.size
        amount = np.array(load or [self.ranks.get(e, 1) for e in range(experts)], float)
        if len(amount) != experts or not np.isfinite(amount).all() or amount.min() < 0:
            raise InvalidArgument(
                f"load is {load!r}, expected the choices of each of the {experts} experts, 0 or "
                "more"
            )
        each = amount / np.array([self.ranks.get(e, 1) for e in range(experts)])
        level = _by_rank(home, each)
        hot = sorted(self.ranks, key=lambda e: (-each[e], e))
        holders = {e: [int(home.owner[e])] for e in hot}
        for e in hot:
            while len(holders[e]) < self.ranks[e]:
                taken = {nodes.home[r] for r in holders[e]}
                free = [r for r in range(size) if r not in holders[e]]
                holders[e].append(min(free, key=lambda r: (nodes.home[r] in taken, level[r], r)))
                level[holders[e][-1]] += each[e]
        self.holders = {e: tuple(holders[e]) for e in sorted(hot)}
        first = {
            e: experts + sum(len(self.holders[h]) - 1 for h in self.holders if h < e)
            for e in self.holders
        }
        self.numbers = {
            e: np.array([e, *range(first[e], first[e] + len(on) - 1)])
            for e, on in self.holders.items()
        }
        self.placement = (
            home if not hot else Placement([*home.owner[:-1].tolist(), *self._copied(1)], size)
        )
        self.expert = np.array([*range(experts), *self._copied(0)])  # expert of every number
        self.shares = self._shared(
            hot,
            nodes,
            amount / size,
            np.where(np.isin(np.arange(experts), hot), 0, amount),
            home,
            rank,
        )

    def _copied(self, field: int) -> list[int]:
        """Return the expert, or the rank, of every copy."""
        return [(e, rank)[field] for e, on in self.holders.items() for rank in on[1:]]

    def _shared(
        self,
        hot: Sequence[int],
        nodes: Nodes,
        demand: np.ndarray,
        rest: np.ndarray,
        home: Placement,
        rank: int,
    ) -> dict[int, np.ndarray]:
        """Return, for each expert with copies, the share of this rank's choices for each of its
        holders."""
        level, found = _by_rank(home, rest), {}
        for e in hot:
            on = np.array(self.holders[e])
            level[on] += demand[e]  # choices of the holders' own tokens
            found[e] = (on == rank).astype(float)
            here = [
                [r for r in node if r not in on] for node in nodes.members if set(node) & set(on)
            ]
            sources = [
                *here,
                [r for node in nodes.members if not set(node) & set(on) for r in node],
            ]
            near = [
                np.flatnonzero([nodes.home[h] == nodes.home[s[0]] for h in on]) if s else on[:0]
                for s in here
            ]
            for asking, at in zip(sources, [*near, np.arange(len(on))], strict=True):
                amounts = (
                    filled(level[on[at]], demand[e] * len(asking)) if asking else np.zeros(len(at))
                )
                level[on[at]] += amounts
                if rank in asking:
                    found[e][at] = amounts / amounts.sum() if amounts.sum() else 1 / len(at)
        return found

    def spread(self, wanted: np.ndarray) -> np.ndarray:
        """Return ``wanted`` int64[tokens, k] with numbers of copies in place of experts."""
        if not self.shares:
            return wanted
        flat = wanted.reshape(-1).copy()
        for e, share in self.shares.items():
            at = np.flatnonzero(flat == e)
            bounds = np.rint(share.cumsum() * len(at)).astype(int)
            flat[at] = self.numbers[e][np.searchsorted(bounds, np.arange(len(at)), side="right")]
        return flat.reshape(wanted.shape)


def _by_rank(home: Placement, amounts: np.ndarray) -> np.ndarray:
    """Sum the amounts of experts by rank, without lost experts."""
    there = home.owner[:-1] >= 0
    return np.bincount(home.owner[:-1][there], amounts[there], home.size)


def filled(level: np.ndarray, amount: float) -> np.ndarray:
    """Return the parts of ``amount`` that raise the lowest levels to an equal height."""
    order = np.sort(level)
    heights = (amount + order.cumsum()) / np.arange(1, len(level) + 1)  # if this many share it
    height = heights[np.flatnonzero(heights > order)[-1]] if amount > 0 else order[0]
    return np.maximum(height - level, 0)


def _checked(ranks: Mapping[int, int], home: Placement) -> dict[int, int]:
    for e, n in ranks.items():
        whole = isinstance(e, int) and isinstance(n, int)
        if not whole or not 0 <= e < home.experts or not 1 <= n <= home.size:
            raise InvalidArgument(
                f"copies has expert {e!r} on {n!r} ranks, expected experts 0 to "
                f"{home.experts - 1} on 1 to {home.size} ranks each, including its home, such as "
                f"{{0: {min(2, home.size)}}}"
            )
    return {e: n for e, n in ranks.items() if n > 1}


def hottest(load: Sequence[float], copies: int, size: int) -> dict[int, int]:
    """Return the number of ranks for each expert when ``copies`` are made one by one, always for
    the expert with the most choices per rank."""
    ranks = np.ones(len(load), int)
    for _ in range(copies):
        each = np.where(ranks < size, np.asarray(load, float) / ranks, -1)
        if each.max() <= 0:
            break
        ranks[each.argmax()] += 1
    return {e: int(n) for e, n in enumerate(ranks) if n > 1}


# arguments of an expert besides its rows
Arguments = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class CopiedExperts:
    """Send weights of one layer from the homes of experts to their copies, and gradients back.

    ``every``: all experts of the layer, or one batched module with the experts along the first
    dimension of its parameters.
    """

    def __init__(
        self,
        exchange: "ExpertExchange",
        every: Sequence[nn.Module],
        *,
        batched: bool,
        arguments: Arguments,
    ) -> None:
        self.exchange, self.batched, self.arguments = exchange, batched, arguments
        self.templates = [_emptied(module) for module in every]  # of all experts; batched: one

    def check(self) -> None:
        """Raise ``InvalidArgument`` if these experts cannot have copies, even if there are none
        now."""
        kinds = {p.dtype for template in self.templates for p in template.parameters()}
        buffers = [name for template in self.templates for name, _ in template.named_buffers()]
        if len(kinds) != 1 or buffers:
            raise InvalidArgument(
                f"copies are given for experts with parameters of {sorted(map(str, kinds))} and "
                f"buffers {buffers[:1]}, expected one dtype and no buffers, since only parameters "
                "are sent to copies: leave copies out"
            )

    @property
    def copies(self) -> ExpertCopies:
        return self.exchange.copies

    @property
    def here(self) -> list[int]:
        """Experts with a copy on this rank, in the order of their rows."""
        return self._between(None, self.exchange.channel.rank)

    def _between(self, home: int | None, rank: int) -> list[int]:
        """Return the experts of ``home`` (None: of all ranks) with a copy on ``rank``."""
        return [
            e for e, on in self.copies.holders.items() if rank in on[1:] and home in (None, on[0])
        ]

    def numel(self, expert: int) -> int:
        return sum(shape.numel() for shape in self._shapes(expert).values())

    def _shapes(self, expert: int) -> dict[str, torch.Size]:
        template = self.templates[0 if self.batched else expert]
        return {
            name: p.shape[1:] if self.batched else p.shape
            for name, p in template.named_parameters()
        }

    def fetch(
        self, tokens: torch.Tensor, experts: nn.Module, own: Sequence[int]
    ) -> tuple[torch.Tensor, "FetchedWeights"]:
        """Return ``tokens``, with a node behind them that sends gradients home in backward, and the
        weights of this rank's copies; collective."""
        hot = [e for e in own if e in self.copies.holders]
        probe = next(experts.parameters())
        # so that ranks without a copied expert take part in backward
        ticket = torch.zeros((), requires_grad=torch.is_grad_enabled())
        fetched = FetchedWeights(self, hot)
        tokens, *flat = _Fetch.apply(
            tokens, ticket, fetched, probe, *self.home_weights(experts, own, hot).values()
        )
        fetched.weights = dict(zip(self.here, flat, strict=True))
        return tokens, fetched

    def home_weights(
        self, experts: nn.Module, own: Sequence[int], hot: Sequence[int] | None = None
    ) -> dict[int, torch.Tensor]:
        """Return the concatenated parameters of each of these experts of this rank (default:
        all)."""
        hot = own if hot is None else hot
        at = [list(own).index(e) for e in hot]
        if self.batched:
            index = torch.tensor(at, dtype=torch.int64, device=next(experts.parameters()).device)
            rows = {name: p.index_select(0, index) for name, p in experts.named_parameters()}
            every = [{name: of[i] for name, of in rows.items()} for i in range(len(at))]
        else:
            modules = list(experts.children())
            every = [dict(modules[i].named_parameters()) for i in at]
        for expert, parameters in zip(hot, every, strict=True):
            if {name: p.shape for name, p in parameters.items()} != self._shapes(expert):
                raise InvalidArgument(
                    f"expert {expert} has parameters {sorted(parameters)}, expected "
                    f"{sorted(self._shapes(expert))} as when it was copied: change experts, for "
                    "example by LoRA, before parallelise, or leave copies out"
                )
        return {
            e: torch.cat([p.reshape(-1) for p in of.values()])
            for e, of in zip(hot, every, strict=True)
        }


@dataclass(eq=False)
class FetchedWeights:
    """Weights of the copies on one rank in one forward, and which of them were used."""

    owner: CopiedExperts
    hot: Sequence[int]
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # experts whose copy here had tokens

    def parameters(self, expert: int) -> dict[str, torch.Tensor]:
        shapes = self.owner._shapes(expert)
        parts = self.weights[expert].split([shape.numel() for shape in shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def apply(self, rows: torch.Tensor, counts: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Compute the results of this rank's copies for ``rows``, sorted by copy."""
        experts = list(self.weights)
        self.used |= {e for e, count in zip(experts, counts.tolist(), strict=True) if count}
        # so that backward runs through the fetch
        nothing = sum((w[:0].sum() for w in self.weights.values()), rows.new_zeros(()))
        if not len(rows):
            return rows + nothing.to(rows.dtype)
        made = []
        if self.owner.batched:
            template = self.owner.templates[0].train(training)
            each = [self.parameters(e) for e in experts]
            together = {name: torch.stack([p[name] for p in each]) for name in each[0]}
            template.num_experts = len(experts)
            made = [functional_call(template, together, (rows, *choices_of(rows, counts)))]
        else:
            for expert, part in zip(experts, rows.split(counts.tolist()), strict=True):
                if len(part):
                    template = self.owner.templates[expert].train(training)
                    made.append(
                        functional_call(
                            template, self.parameters(expert), (part, *self.owner.arguments(part))
                        )
                    )
        return torch.cat(made) + nothing.to(rows.dtype)

    def there(
        self, hot: Sequence[torch.Tensor], probe: torch.Tensor, sequence: int
    ) -> Steps[list[torch.Tensor]]:
        """Send the weights of this rank's copied experts; return those of its copies, in the order
        of experts."""
        flat = dict(zip(self.hot, hot, strict=True))
        outgoing, incoming = self._lists()
        found = yield from self._travel(
            [[flat[e] for e in there] for there in outgoing],
            [[self.owner.numel(e) for e in there] for there in incoming],
            probe,
            sequence,
        )
        came = {
            e: part
            for there, parts in zip(incoming, found, strict=True)
            for e, part in zip(there, parts, strict=True)
        }
        return [came[e] for e in self.owner.here]

    def back(
        self, gradients: Sequence[torch.Tensor], probe: torch.Tensor, sequence: int
    ) -> Steps[list[torch.Tensor | None]]:
        """Return the sums of the gradients of copies for this rank's copied experts; None if no
        copy had tokens."""
        outgoing, incoming = self._lists()
        marked = {
            e: torch.cat([g, g.new_full((1,), float(e in self.used))])
            for e, g in zip(self.owner.here, gradients, strict=True)
        }
        found = yield from self._travel(
            [[marked[e] for e in there] for there in incoming],
            [[self.owner.numel(e) + 1 for e in there] for there in outgoing],
            probe,
            sequence,
        )
        sums: dict[int, torch.Tensor] = {}
        for there, parts in zip(outgoing, found, strict=True):
            for e, part in zip(there, parts, strict=True):
                if part[-1]:
                    part = part[:-1].float() if part.dtype.itemsize < 4 else part[:-1]
                    sums[e] = sums[e] + part if e in sums else part
        return [sums[e].to(probe.dtype) if e in sums else None for e in self.hot]

    def _lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return for every rank the experts of this rank with a copy there, and those of that rank
        with a copy here."""
        rank, size = self.owner.exchange.channel.rank, self.owner.exchange.channel.size
        between = self.owner._between
        return [between(rank, r) for r in range(size)], [between(r, rank) for r in range(size)]

    def _travel(
        self,
        parts: list[list[torch.Tensor]],
        numels: list[list[int]],
        probe: torch.Tensor,
        sequence: int,
    ) -> Steps[list[list[torch.Tensor]]]:
        """Send ``parts`` to every rank; return the received ones, ``numels`` long."""
        outbox = torch.cat([probe.new_empty(0), *(part for there in parts for part in there)])
        out_splits = [sum(there) for there in numels]
        inbox = probe.new_empty(sum(out_splits))
        yield from all_to_all(
            inbox,
            outbox,
            transport=self.owner.exchange.channel.transport,
            out_splits=out_splits,
            in_splits=[sum(map(len, there)) for there in parts],
            sequence=sequence,
        )
        return [
            list(part.split(there))
            for part, there in zip(inbox.split(out_splits), numels, strict=True)
        ]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        _: torch.Tensor,
        fetched: FetchedWeights,
        probe: torch.Tensor,
        *hot: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        exchange = fetched.owner.exchange
        ctx.fetched, ctx.sequence = fetched, exchange.channel.take(2)
        ctx.like = probe.detach().new_empty(0)
        steps = fetched.there([h.detach() for h in hot], ctx.like, ctx.sequence)
        return tokens.view_as(tokens), *exchange.finish(steps, *hot)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        fetched: FetchedWeights = ctx.fetched
        steps = fetched.back(gradients[1:], ctx.like, ctx.sequence + 1)
        sums = fetched.owner.exchange.finish(steps, *gradients[1:])
        return (gradients[0], None, None, None, *sums)


def choices_of(rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the further arguments of batched experts for rows sorted by expert, ``counts`` of
    each: its number, and a gate of 1."""
    number = torch.repeat_interleave(torch.arange(len(counts)), counts).to(rows.device)
    return number[:, None], rows.new_ones(len(rows), 1)


def _emptied(module: nn.Module) -> Any:
    """Return a copy of the module with parameters on the meta device."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()}
    return copy.deepcopy(module, dict(empty))
