"""1-bit Adam: exact steps until the variance is known, then momentum in one bit under a frozen variance.

    exact       ḡ = mean g_i           m ← β1·m + (1 − β1)·ḡ        v ← β2·v + (1 − β2)·ḡ²       (torch's Adam)
                x ← (1 − γλ)·x − γ/(1 − β1ᵗ) · m·r          r = 1/(√v̂ + ε)
    freeze      p ← m·r
    compressed  p_i = β1·p + (1 − β1)·g_i·r      p ← mean of p_i, one bit both ways, error feedback both ways
                x ← (1 − γλ)·x − γ/(1 − β1ᵗ) · p

Note: what travels. Once r is frozen, momentum times r obeys the recursion of momentum. In p all elements are of one size,
so one scale fits a block; sent as m, an element with a small variance would get its neighbours' magnitude and move by
that times r. ``exp_avg`` in ``state`` is m before the freeze and p after it.

Note: the trajectory. With R the residuals' total and d the difference between p and what an exact mean would have
given, d_t = β1·d_{t−1} + R_{t−1} − R_t: compression delays momentum and never loses any.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from commpress.codecs import Codec, codec_named
from commpress.collectives.allreduce import Outcome
from commpress.errors import InvalidArgument
from commpress.kernels.adam import Segments
from commpress.optim.frozen import FrozenVariance
from commpress.optim.kept_mean import KeptMean
from commpress.optim.optimizer import CompressedOptimizer, Round
from commpress.schedules import AfterSteps, Freeze, WhenStable, pruned


class OneBitAdam(CompressedOptimizer):
    """AdamW that sends about one bit per parameter once the variance has settled.

    Construct it on every rank of ``process_group`` (default: all), in the same order as other groups: it makes a new one.
    Under DistributedDataParallel also call ``commpress.overlap(ddp, optimizer)``: gradients are then not reduced twice.

    - ``warmup_steps``: so many exact steps (15 to 25 % of a run is usual), "auto" (default) ends them when the variance
      is stable, or a ``schedules.Freeze``.
    - ``codec``, ``min_numel``: how momentum travels; smaller tensors travel exactly.
    - ``spiky_codec``: for tensors whose variance is concentrated in few elements or zero somewhere (embeddings, output
      layers); None treats them as all others.
    - ``exact_codec``: how gradients travel in exact steps: "none" (default), "bf16", "int8" on slow links, or "log3" on the
      slowest, which costs final loss
    - ``variance_floor``: no element's frozen variance is taken as less than this share of its tensor's mean.
    - ``error_feedback``: False forgets what compression leaves behind, which does not converge; to show just that.
    - ``max_grad_norm``: clips by one factor that all ranks agree on. Do not use ``clip_grad_norm_``: gradients are local.
    - ``on_nonfinite``: "skip" the step on all ranks (default) or "raise"; nothing is changed either way.
    - ``agree_over``: a process group or DeviceMesh of all ranks that must stay equal, where these are more than the ranks of
      ``process_group``: with tensor parallelism or pipelines the whole mesh. They take or skip a step together. Needs a
      number as ``warmup_steps`` and no ``max_grad_norm``.
    - ``check_every``: steps between comparisons of the replicas; 0 never.
    - ``grad_scaler``: AMP's GradScaler, if there is one: it is told what all ranks agreed on.

    On one rank it is Adam, in every bit.
    """

    lands = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        warmup_steps: int | Literal["auto"] | Freeze = "auto",
        spiky_codec: str | Codec | None = "int8",
        variance_floor: float = 1e-3,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
        }  # fmt: skip
        check_defaults(defaults)
        self.freeze: Freeze
        if warmup_steps == "auto":
            self.freeze = WhenStable(window=max(round(1 / (1 - betas[1])), 1))
        else:
            self.freeze = AfterSteps(warmup_steps) if isinstance(warmup_steps, int) else warmup_steps
        if options.get("agree_over") is not None and not isinstance(self.freeze, AfterSteps):
            raise InvalidArgument(
                f"warmup_steps is {warmup_steps!r} and agree_over is given: each group of ranks that communicate would freeze "
                "its variance at a step of its own. Pass a number of steps"
            )
        self.spiky_codec = None if spiky_codec is None else codec_named(spiky_codec)
        self.frozen_variance = FrozenVariance(variance_floor)
        self.frozen_at: int | None = None
        super().__init__(params, defaults, **options)

    @property
    def frozen(self) -> bool:
        return self.frozen_at is not None

    def round(self) -> Round:
        return Round.COMPRESSED if self.frozen and self.transport.size > 1 else Round.EXACT

    def prepare(self, group: dict[str, Any], segments: Segments, gain: float) -> None:
        said = self.kept.runs(segments.before or segments, self.momentum)
        self.kernels.aim(segments, self.momentum, self.reciprocal, self.work, beta=group["betas"][0], gain=gain, said=said)

    def apply(self, kind: Round, outcomes: Sequence[Outcome]) -> None:
        if kind is Round.EXACT:
            self.exact(self._works)
            return
        self.keep(outcomes, self.work)
        moves = [self._move(group) for group in self.param_groups]
        self.land(outcomes, self._empty, moves, stored=not self.keeps)
        self.exchange_momentum()

    def _move(self, group: dict[str, Any]) -> tuple[float, float]:
        lr, correction = float(group["lr"]), 1 - group["betas"][0] ** (self.steps_done + 1)
        return lr / (correction if group["bias_correction"] else 1.0), 1 - lr * group["weight_decay"]

    def exact(self, gradients: Sequence[torch.Tensor]) -> None:
        if self.frozen:
            self.thaw()
        super().exact(gradients)

    def after(self, kind: Round) -> None:
        if self.frozen or self.transport.size == 1:
            return
        if self.freeze.probes(self.steps_done):
            beta2 = self.param_groups[0]["betas"][1]
            norm = float(self.variance.sum()) / (1 - beta2**self.steps_done)
            window = getattr(self.freeze, "window", 0)
            self.facts.norms = pruned([*self.facts.norms, (self.steps_done, norm)], window)
        if self.freeze.freezes(self.steps_done, self.facts):
            self.frozen_at = self.steps_done
            self.thaw_or_freeze()
            self.momentum.mul_(self.reciprocal)

    def thaw(self) -> None:
        """A state of several ranks goes on with one, which has nothing to compress: m = p/r, and Adam from here on."""
        self.settle()
        self.momentum.div_(self.reciprocal)
        self.frozen_at = None
        self.thaw_or_freeze()

    def thaw_or_freeze(self) -> None:
        """What follows from ``frozen_at`` and the variance: reciprocals, codecs, dead elements."""
        self.kept = KeptMean(self.kernels.runs)
        self.quantized.relay(self._flat)
        self.quantized.policy = self.codec
        self.quantized.silence(None)
        if self.frozen_at is None:
            self.reciprocal = self._empty
            return
        self.reciprocal = self._flat.new()
        spiky = self.frozen_variance.freeze(self, self.reciprocal, self.frozen_at)
        policy = self.frozen_variance.policy(self.codec, self.spiky_codec, spiky)
        self.quantized.policy = policy
        self.quantized.silence(self.frozen_variance.dead(self, policy))

    def allocate(self) -> None:
        self.thaw_or_freeze()

    def schedule_state(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at}

    def resume(self, schedule: dict[str, Any] | None) -> None:
        self.frozen_at = None if schedule is None else schedule["frozen_at"]
        self.thaw_or_freeze()


def check_defaults(defaults: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not float(defaults[name]) >= 0:
            raise InvalidArgument(f"{name} is {defaults[name]!r}, expected a number of at least 0")
    if len(defaults["betas"]) != 2 or not all(0 <= beta < 1 for beta in defaults["betas"]):
        raise InvalidArgument(f"betas is {defaults['betas']!r}, expected two numbers of at least 0 and below 1")
