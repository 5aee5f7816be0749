"""Optimizers whose state is partitioned over the ranks (ZeRO-1): master weights, variance and
momentum of 1/P each.

Each rank owns an equal part of every tensor (``Scatter``); messages to the owners and back are
compressed.

Note: no second residual. The error of the all-gather is w − x itself, the gap between master
weights and the parameters that all ranks hold; the next step sends it.

Note: sharing the variance. s is about √v̂, which only the owner has. Divided by it all elements are
of one size, as one bit for each and one scale for a block assume; else an element with a small
variance would get its neighbours' magnitude and move by that over its own √v. So owners send v to
all ranks, in bfloat16, whenever it has changed and is needed as a divisor.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from commpress.codecs import Policy, policy_of
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.allreduce import Outcome
from commpress.collectives.change import Change
from commpress.collectives.handover import Divided
from commpress.collectives.reduce_scatter import Scatter
from commpress.collectives.residual_state import Residuals, check_widths, residuals_of
from commpress.collectives.state import Checked
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ResidualStore
from commpress.optim import checkpoint
from commpress.optim.flat import Flat
from commpress.optim.optimizer import CompressedOptimizer, OptimizerOptions, RoundKind
from commpress.work import Steps


@dataclass(frozen=True)
class Owned:
    """This rank's part of a parameter: ``numel`` elements beginning at ``begin``, in row buffers at
    ``at``."""

    parameter: int
    begin: int
    numel: int
    at: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        return row[self.at : self.at + self.numel]

    def of_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[self.begin : self.begin + self.numel]


def grown(before: torch.Tensor, numel: int, device: torch.device) -> torch.Tensor:
    """Return a copy of ``before``, which is shorter, extended with zeros."""
    buffer = torch.zeros(numel, dtype=before.dtype, device=device)
    buffer[: before.numel()] = before
    return buffer


class ShardedOptimizer(Divided, CompressedOptimizer):
    """Optimizer whose ranks each have the state of an equal part of every tensor: rows go to their
    owners and back."""

    full: Scatter
    quantized: Scatter
    divided = True
    unknown = False  # whether ``known`` is out of date and about to be divided by
    missing = ""  # missing entry of an incomplete state

    def __init__(self, params: Any, *args: Any, **options: Unpack[OptimizerOptions]) -> None:
        self.known = torch.zeros(0, dtype=torch.bfloat16)  # v, as far as it is to be divided by
        self.parts: list[Owned] = []
        self.master, self.momentum, self.variance, self.mean = torch.zeros(4, 0)  # own rows
        super().__init__(params, *args, **options)

    def _check_codecs(self, flat: Flat) -> None:
        super()._check_codecs(flat)
        for name, (_, numel) in zip(flat.names, flat.places, strict=True):
            codec = self.codec.choose(name, numel)
            if isinstance(codec, WholeTensorCodec):
                raise InvalidArgument(
                    f"codec is {codec.spec!r} for parameter {name!r}, which compresses whole "
                    f"tensors: {type(self).__name__} sends rows to their owners, and changes of "
                    "weights back, which it cannot say. Choose a codec of rows such as 'int4', or "
                    "the optimizer that has its state on every rank"
                )

    def _place(self, flat: Flat) -> None:
        first, had = self.flat is None, len(self.parts)
        super()._place(flat)
        self.known = grown(self.known, flat.numel, flat.device)
        self._lay_out(self.known)
        spans = self.spans(range(len(flat.places)))
        if first:
            self.full = self._scatter(
                policy_of(self.exact_codec, min_numel=256), feedback=self.error_feedback
            )
            self.quantized = self._scatter(self.tensors, feedback=self.error_feedback)
            self.rounded = self._scatter(policy_of("bf16"), feedback=False)
        for scatter in (self.full, self.quantized, self.rounded):
            scatter.extend(spans[had:])
        self._count_shares()
        for i, (_, at, width, numel, _) in enumerate(self.full.parts[had:], had):
            begin = min(self.channel.rank * width, numel)
            self.parts.append(Owned(i, begin, min(width, numel - begin), at))
        for name in ("master", "momentum", "variance", "mean"):
            setattr(self, name, grown(getattr(self, name), self.full.numel, flat.device))
        self._show()
        self._adopt(range(had, len(self.parts)))

    def _adopt(self, indices: Iterable[int]) -> None:
        """Set master weights to the values of these parameters."""
        for i in indices:
            self._weights[i].copy_(self.own(self._flat.shard(i), i))
        self._flat.trust(indices)

    def _scatter(self, policy: Policy, *, feedback: bool) -> Scatter:
        return Scatter([], policy, self.channel, self._flat.device, feedback=feedback)

    def part_of(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        return self.parts[i].of(buffer)

    def own(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        return self.parts[i].of_whole(tensor)

    def owned(self, indices: Iterable[int]) -> list[int]:
        """Return those of these parameters of which this rank has a part."""
        return [i for i in indices if self.parts[i].numel]

    # ------------------------------------------------------------ one step

    def before(self, kind: RoundKind) -> Steps[None]:
        self._check_complete()
        self._adopt(self._flat.rewritten())
        if self.unknown and kind is not RoundKind.EXACT:  # a state was loaded
            yield from self.learn()

    def send(self, kind: RoundKind) -> Steps[list[Outcome]]:
        exact = kind is RoundKind.EXACT
        gain = yield from self.agree_on_gain(exact=exact)
        self.prepare(kind, gain)
        return (
            yield from (self.full if exact else self.quantized).reduce(
                self.work, self.mean, key=self.steps_done, asks=self.asks()
            )
        )

    def apply(self, kind: RoundKind) -> Steps[None]:
        exact = kind is RoundKind.EXACT
        yield from self.update(kind)
        yield from self._publish(
            self.full if exact else self.quantized, whole=exact and self.exact_codec.lossless
        )

    @abstractmethod
    def update(self, kind: RoundKind) -> Steps[None]:
        """Update momentum, variance and master weights of this rank's rows from ``mean``."""

    @abstractmethod
    def reschedule(self, kind: RoundKind) -> Steps[None]:
        """Update schedules and states of tensors after this step."""

    @abstractmethod
    def sort(self) -> Steps[None]:
        """Set divisors and codecs from the present ``known`` variance."""

    def _publish(self, scatter: Scatter, *, whole: bool) -> Steps[None]:
        """Set parameters to master weights (``whole``), or move them by the encoded w − x."""
        self.mean.zero_()
        trained = [(i, self._flat.shard(i)) for i in self.trained]
        for i, p in trained:
            w, change = self._weights[i], self._means[i]
            if whole:
                change.copy_(w)
            else:
                most = self.longest(i)
                torch.sub(w, self.own(p, i), out=change).clamp_(-most, most)
        yield from scatter.gather(self.mean, self.work, key=self.steps_done)
        for i, p in trained:
            (p.copy_ if whole else p.add_)(self._flat.view(self.work, i))
        self._flat.trust(self.numbers)

    def longest(self, i: int) -> float:
        """Return the longest move of a parameter in one step: Adam's own bound. The rest of w − x
        follows in the next."""
        group = self.tensors.group(i)
        rate = float(group["lr"]) or self.facts.peak_lr
        return (
            self.tensors.bound(i)
            * rate
            / self.correction(group)
            / math.sqrt(self.tensors.share_of_variance(i))
        )

    def correction(self, group: dict[str, Any]) -> float:
        """Return the bias correction: m̂ = m / correction in this step."""
        return (
            1 - group["betas"][0] ** (self.steps_done + 1 - group["added_at"])
            if group["bias_correction"]
            else 1.0
        )

    def norm_of_mean(self) -> Steps[float | None]:
        squares = sum(float(mean.square().sum(dtype=torch.float64)) for mean in self._means)
        return float((yield from self.gathered([squares])).sum()) ** 0.5

    # ---------------------------------------------------------- messages and their use

    def prepare(self, kind: RoundKind, gain: float) -> None:
        """Write the messages to the owners into ``work``."""
        live, frozen = self.tensors.part(self.numbers)
        for i in self.numbers if kind is RoundKind.EXACT else live:
            g, into = self._flat.gradient(i), self._flat.view(self.work, i)
            into.zero_() if g is None else torch.mul(g, gain, out=into)
        if kind is RoundKind.COMPRESSED:
            self.cut(frozen, gain, self.work)
            for i in frozen:
                self._flat.view(self.work, i).div_(self.tensors.divisor(i)).mul_(
                    1 - self.tensors.group(i)["betas"][0]
                )

    def cut(self, indices: Sequence[int], gain: float, out: torch.Tensor) -> None:
        """Write gain·g, clamped to ±κ·s, to ``out``. Non-finite values stay, so that all ranks see
        them."""
        counts = torch.zeros(len(indices), dtype=torch.int64)
        for number, i in enumerate(indices):
            g, into = self._flat.gradient(i), self._flat.view(out, i)
            if g is None:
                into.zero_()
                continue
            torch.mul(g, gain, out=into)
            k, low, eps, reach = self.tensors.divisors([i])[0].tolist()
            root = (self._flat.view(self.known, i).float() * k).sqrt_()
            counts[number] = (into.abs() > reach * (root + eps)).sum()
            most = root.clamp_(min=low).add_(eps).mul_(reach)
            into.copy_(
                torch.where(into.isfinite(), torch.minimum(torch.maximum(into, -most), most), into)
            )
        self.tensors.see(indices, counts)

    def apply_step(self, i: int, *, step: float, decay: float) -> None:
        """w ← decay·w − step·m/s."""
        _, low, eps, _ = self.tensors.divisors([i])[0].tolist()
        divisor = self.root(i).clamp_(min=low).add_(eps)
        self._weights[i].mul_(decay).addcdiv_(self._momenta[i], divisor, value=-step)

    def bound_momentum(self, i: int) -> None:
        """Clamp m to Adam's own bound where it is noise, so that dividing it by the true √v does no
        harm."""
        low, root = float(self.tensors.divisors([i])[0, 1]), self.root(i)
        self._bound(i, torch.where(root < low, root * self.tensors.bound(i), torch.inf))

    # ------------------------------------------------------------ freezing and thawing

    def after(self, kind: RoundKind) -> Steps[None]:
        yield from self.reschedule(kind)
        if self.unknown and self.round() is not RoundKind.EXACT:
            yield from self.learn()

    def learn(self) -> Steps[None]:
        """Gather the variance of all owners into ``known`` and update what depends on it."""
        yield from self.rounded.gather(self.variance, self.work, key=0)
        self.known.copy_(self.work)
        self.unknown = False
        yield from self.sort()
        yield from self.agree_on_floor()

    # ------------------------------------------------------------ checkpoints

    def _check_complete(self) -> None:
        if self.missing:
            raise StateMismatch(self.missing)

    def part(self) -> dict[str, Any]:
        self._check_complete()
        return super().part() | checkpoint.rows(self)

    def elastic_part(self) -> Steps[dict[str, Any]]:
        self._check_complete()
        return (yield from super().elastic_part()) | checkpoint.rows(self)

    def shared_state(self) -> dict[str, Any]:
        """Return all of this rank's state: no other has its rows."""
        return self.state_dict()

    def load_shared_state(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)

    def stores(self) -> dict[str, ResidualStore]:
        """Return nothing to hand over, because ``reform`` raises."""
        return {}

    def residuals_in(self, exchanges: Any, states: Sequence[dict[str, Any]]) -> Residuals:
        _, residuals = residuals_of(states, self.channel)
        exchanges.check(residuals)
        check_widths(residuals, self.channel.size)
        return residuals

    def joined(self, states: Sequence[dict[str, Any]], missing: str) -> dict[str, Any]:
        found = super().joined(states, missing)
        return found | {"rows": checkpoint.joined_rows(self, states, partial=bool(missing))}

    def check(self, schedule: Mapping[str, Any]) -> None:
        super().check(schedule)
        checkpoint.check_shapes(self, schedule)

    def take_over(self, saved: Checked) -> None:
        self.missing = saved.missing and (
            f"{saved.missing}, which owns other parts: load each rank's own state_dict(), or all "
            "ranks' to change the world size. With a Trainer use the callback "
            "commpress.hf.Compress, with Lightning commpress.lightning.Compress, with Accelerate "
            "commpress.hf.RankFiles: they save and load every rank's part"
        )
        super().take_over(saved._replace(missing=""))

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        super().follow(schedule, change)
        checkpoint.take_rows(self, schedule)
        self._flat.trust(self.numbers)
        self.unknown = True
