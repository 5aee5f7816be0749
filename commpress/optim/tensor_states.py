"""States of tensors, frozen or live, and the divisor s of momentum and messages.

    live    g travels, eight bits or more an element; m, v and the step are Adam's own
    frozen  v stands still, and in one bit travels
            p = (β1·m + (1 − β1)·g')/s      g' = g within ±κ·s      s = max(√v̂, low) + ε
            m ← s·mean p, where √v̂ < low within ±c·√v̂
            low² = φ·mean v̂ (of the tensor, or of all if that is 0)

Why: all that enters m in exact steps enters v too, so |m| ≤ c·√v with c² = (1 − β1)² / ((1 − β2)(1
− β1²/β2)), and no step of Adam is longer than some 7.3 learning rates at the usual betas. The noise
of one bit enters m alone. So every division has the floor ``low``; m stays within Adam's own bound
where it is noise (below the floor), so that exact steps and optimizers that load the state divide
by the true √v without harm; and no rank's gradient counts for more than κ times its expected size.
Each of P ranks has √P times the noise of their mean, so κ is 20, or 5·√P if that is more: steps
stay within about κ learning rates, whatever the gradients are.

Freezing: a tensor has been live long enough, nearly all of its elements (``UNSEEN``: units that are
always off) have had a gradient, and its variance is not concentrated in few elements (``SPIKY``:
embeddings, output layers), for which one bit is too coarse. Tensors of fewer than ``min_numel``
elements travel exactly and stay live.

Note: elements without gradients. One bit cannot encode zero. An element without variance has no
momentum, so the next step takes back the error of this one, and it oscillates by a fraction of a
learning rate. Its first gradients move it at the floor's rate.

Waking: gradients beyond κ·(√v̂ + ε), in more than ``FEW`` of a frozen tensor's elements, in
``PATIENCE`` more steps than not. The frozen variance then no longer fits the tensor. Ranks see
different gradients, so a rank that saw this asks in the header of its next message, all ranks see
the request, and after that step they exchange once which tensors they mean. So all ranks change the
state, and the layout of messages, between the same two steps.

Note: ``exp_avg_sq`` stays valid for AdamW. AdamW divides v by 1 − β2^step, and step grows while v
is frozen; so v is multiplied by (1 − β2^step)/(1 − β2^variance_steps) at intervals, and
``variance_steps`` is the step of the last time. v̂ does not change.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from commpress.codecs import Codec, Policy
from commpress.codecs.family import EXACT
from commpress.codecs.whole_tensors import travels_whole
from commpress.errors import InvalidArgument

if TYPE_CHECKING:
    from commpress.optim.flat import Flat

# (mean √v)² / mean v below this: few elements hold most of the variance (1 if all are equal)
SPIKY = 0.2
UNSEEN = 1 / 16  # largest share of elements without any gradient when a tensor freezes
REACH, DEVIATIONS = 20.0, 5.0  # κ is the first, or the second times √P
# larger ratio of the mean squares of gradients in two halves of the warm-up
UNSTABLE = 6.0
FEW = 1 / 64
PATIENCE = 3
# entries of each parameter, 0-dimensional tensors
STATE = ("frozen_at", "thawed_at", "variance_steps")


class TensorStates:
    """States of all tensors. ``floor``: φ. ``finer``: the codec of spiky tensors, if they have
    their own."""

    def __init__(
        self, codec: Policy, finer: Codec | None, exact: Codec, min_numel: int, floor: float
    ) -> None:
        if not floor >= 0:
            raise InvalidArgument(f"variance_floor is {floor!r}, expected a number of at least 0")
        self.codec, self.finer, self.exact, self.min_numel, self.floor = (
            codec,
            finer,
            exact,
            min_numel,
            floor,
        )
        # ``low`` of tensors without variance, if tensors on other ranks count too
        self.common: float | None = None
        self.frozen_at, self.thawed_at, self.variance_steps = (
            torch.zeros(0, dtype=torch.int64) for _ in STATE
        )
        self.lines, self.trips = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
        self._sums: dict[int, list[float]] = {}

    def lay_out(
        self, flat: "Flat", groups: Sequence[dict[str, Any]], variance: torch.Tensor, ranks: int
    ) -> None:
        """Set the parameters, each with its group: the first ones keep their state, the others are
        live."""
        self.flat, self._group, self.variance, self.ranks = flat, groups, variance, ranks
        new = len(flat.parameters) - len(self.trips)
        for name in STATE:
            setattr(
                self, name, torch.cat([getattr(self, name), torch.zeros(new, dtype=torch.int64)])
            )
        self.lines, self.trips = (
            np.pad(self.lines, ((0, new), (0, 0))),
            np.pad(self.trips, (0, new)),
        )
        self._numels = np.array([numel for _, numel in flat.places], np.int64)
        self._seen: dict[tuple[int, ...], torch.Tensor] = {}
        self._index = {name: i for i, name in enumerate(flat.names)}
        for sums in self._sums.values():
            sums += [0.0] * new

    def begin(self) -> None:
        """Start again with all tensors live, after steps of Adam that are counted elsewhere."""
        for name in STATE:
            getattr(self, name).zero_()
        self.trips[:] = 0

    def follow(self, steps: int, *, doubt: bool = False) -> None:
        """Continue after variance and ``STATE`` were loaded, at ``steps`` steps. ``doubt``: an
        optimizer that ignores ``STATE`` may have changed v since; then v counts as Adam's and the
        tensor is live."""
        for i in range(len(self._group)):
            done, own = int(self.variance_steps[i]), self.own_steps(i, steps)
            if doubt and not (
                0 < done <= own and self.correction(i, own) < 1.5 * self.correction(i, done)
            ):
                self.frozen_at[i] = self.thawed_at[i] = 0
                self.variance_steps[i] = own
            self.divide(i)

    def views(self, i: int) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name)[i] for name in STATE}

    # ------------------------------------------------------------ frozen or live

    @property
    def frozen(self) -> torch.Tensor:
        """Return for each parameter whether it is frozen."""
        return self.frozen_at > self.thawed_at

    def part(self, indices: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split ``indices`` into live and frozen ones."""
        frozen, every = self.frozen.tolist(), tuple(indices)
        return tuple(i for i in every if not frozen[i]), tuple(i for i in every if frozen[i])

    def choose(self, name: str, numel: int) -> Codec:
        """Choose the codec in compressed rounds, as a ``Policy``. Live vectors travel exactly: they
        are few elements with large effect."""
        codec, i = self.codec.choose(name, numel), self._index[name]
        if codec.lossless or self.frozen[i]:
            return codec
        return EXACT if len(self.flat.shapes[i]) < 2 else self.finer or self.exact

    def recut(self) -> None:
        """List the tensors that travel as a whole when they are frozen."""
        every = zip(self.flat.names, self.flat.shapes, strict=True)
        self.whole = {
            i
            for i, (name, shape) in enumerate(every)
            if travels_whole(self.codec.choose(name, shape.numel()), shape)
        }

    def may_freeze(self, i: int) -> bool:
        v = self.flat.view(self.variance, i)
        if v.numel() < max(self.min_numel, 1) or (self.finer and self.spiky(i)):
            return False
        return int((v > 0).sum()) >= (1 - UNSEEN) * v.numel()

    def spiky(self, i: int) -> bool:
        v = self.flat.view(self.variance, i)
        mean = float(v.mean(dtype=torch.float64)) if v.numel() else 0.0
        return (
            v.numel() > 1
            and mean > 0
            and float(v.sqrt().mean(dtype=torch.float64)) ** 2 / mean < SPIKY
        )

    def freeze(self, indices: Iterable[int], step: int) -> None:
        for i in indices:
            self.frozen_at[i] = step
            self.trips[i] = 0
            self.divide(i)

    def thaw(self, indices: Iterable[int], step: int) -> None:
        for i in indices:
            self.bring_up(i, step)
            self.thawed_at[i] = step
            self.trips[i] = 0

    def record(self, step: int, variances: Iterable[torch.Tensor]) -> None:
        """Record this rank's Σv of each tensor, at steps of the warm-up that are powers of two."""
        if step & (step - 1) == 0:
            self._sums[step] = [float(v.sum(dtype=torch.float64)) for v in variances]

    def unstable(
        self, indices: Iterable[int], step: int, variances: Iterable[torch.Tensor]
    ) -> list[tuple[int, float]]:
        """Return the tensors whose gradients changed in size during the warm-up, the worst first,
        with the ratio of mean squares in its two halves."""
        half, found = max((at for at in self._sums if 2 * at <= step), default=0), []
        sums = [float(v.sum(dtype=torch.float64)) for v in variances]
        for i in indices if half else ():
            beta2, first = self._group[i]["betas"][1], self._sums[half][i]
            decayed = beta2 ** (step - half)
            since, before = (
                max(sums[i] - decayed * first, 0.0) / (1 - decayed),
                first / (1 - beta2**half),
            )
            if before > 0 and not 1 / UNSTABLE <= since / before <= UNSTABLE:
                found.append((i, since / before))
        self._sums.clear()
        return sorted(found, key=lambda each: min(each[1], 1 / max(each[1], 1e-30)))

    def name(self, i: int) -> str:
        """Return a readable name and shape; unnamed parameters have numbers."""
        return f"{self.flat.names[i]} {tuple(self.flat.shapes[i])}"

    # ------------------------------------------------------------ divisors

    def group(self, i: int) -> dict[str, Any]:
        return self._group[i]

    def own_steps(self, i: int, step: int) -> int:
        """Return the number of the optimizer's ``step`` steps since the parameter was added."""
        return step - int(self._group[i]["added_at"])

    def correction(self, i: int, steps: int) -> float:
        """Return the bias correction after ``steps`` updates: v̂ = v / correction."""
        group = self._group[i]
        return (
            1 - group["betas"][1] ** steps if group.get("bias_correction", True) and steps else 1.0
        )

    def share_of_variance(self, i: int) -> float:
        """Return v̂ as a share of the gradients' mean square: 1 with bias correction."""
        steps = int(self.variance_steps[i])
        return (
            (1 - self._group[i]["betas"][1] ** steps) / self.correction(i, steps) if steps else 1.0
        )

    def divide(self, i: int, *, total: float | None = None) -> None:
        """Set the divisor from a parameter's present variance; ``total``: its sum, if the variance
        is on other ranks."""
        v = self.flat.view(self.variance, i)
        k, group = 1 / self.correction(i, int(self.variance_steps[i])), self._group[i]
        # the same in any order of summation
        total = float(v.sum(dtype=torch.float64)) if total is None else total
        mean = total / max(v.numel(), 1)
        reach = max(REACH, DEVIATIONS * math.sqrt(self.ranks)) / math.sqrt(
            self.share_of_variance(i)
        )
        self.lines[i] = k, math.sqrt(self.floor * mean * k), group["eps"], reach

    def divisors(self, indices: Sequence[int]) -> np.ndarray:
        """Return divisors in the kernels' form. A tensor without any variance has the floor of the
        others."""
        lines = self.lines[list(indices)]
        if not lines[:, 1].all():
            squares, numel = self.squares()
            lines[lines[:, 1] == 0, 1] = (
                math.sqrt(squares / max(numel, 1)) if self.common is None else self.common
            )
        return lines

    def squares(self) -> tuple[float, int]:
        """Return Σ low² over the elements of tensors with some variance, and the number of
        elements."""
        seen = self.lines[:, 1] > 0
        return float(np.square(self.lines[seen, 1], dtype=np.float64) @ self._numels[seen]), int(
            self._numels[seen].sum()
        )

    def divisor(self, i: int) -> torch.Tensor:
        """Return s of a whole parameter."""
        k, low, eps, _ = self.divisors([i])[0].tolist()
        return (self.flat.view(self.variance, i) * k).sqrt_().clamp_(min=low).add_(eps)

    def bound(self, i: int) -> float:
        """Return c, the largest |m|/√v of Adam."""
        beta1, beta2 = self._group[i]["betas"]
        rest = (1 - beta2) * (1 - beta1**2 / beta2) if beta2 else 0.0
        return (1 - beta1) / math.sqrt(rest) if rest > 0 else math.inf

    def count(self, indices: Iterable[int], step: int) -> None:
        """Record that these variances were updated as in Adam, in the step before ``step``."""
        every = list(indices)
        self.variance_steps[every] = torch.tensor(
            [self.own_steps(i, step) for i in every], dtype=torch.int64
        )

    def bring_up(self, i: int, step: int) -> None:
        """Rescale v for AdamW's correction after ``step`` steps of the optimizer."""
        own = self.own_steps(i, step)
        ratio = self.correction(i, own) / self.correction(i, int(self.variance_steps[i]))
        if abs(ratio - 1) > 1e-6:
            self.flat.view(self.variance, i).mul_(ratio)
            self.variance_steps[i] = own
            self.divide(i)

    def keep_up(self, indices: Iterable[int], step: int) -> None:
        """Call ``bring_up`` at 16 steps between each power of two and the next."""
        if step % (1 << max(step.bit_length() - 5, 0)) == 0:
            for i in indices:
                self.bring_up(i, step)

    # ------------------------------------------------------------ waking

    def see(self, indices: Sequence[int], beyond: torch.Tensor) -> None:
        """Record how many elements of each parameter had a gradient beyond κ·s."""
        self._seen[tuple(indices)] = beyond

    def remember(self, taken: bool) -> None:
        """End a step. Records of a step that was not taken do not count, nor do new elements of a
        live tensor that has seen others: new rows of an embedding appear all the time."""
        watched = self.frozen.numpy() | (self.lines[:, 1] == 0)
        seen, self._seen = self._seen, {}
        for indices, beyond in seen.items() if taken else ():
            for i, count in zip(indices, beyond.tolist(), strict=True):
                trip = count > FEW * self.flat.places[i][1] and watched[i]
                self.trips[i] = (
                    min(self.trips[i] + 1, PATIENCE) if trip else max(self.trips[i] - 1, 0)
                )

    def waking(self) -> np.ndarray:
        """Return for each tensor whether this rank wants it to wake."""
        return self.trips >= PATIENCE
