"""a training step under FSDP2: time and bytes of plain and compressed sharding

Trains a GPT with each block and the rest under fully_shard, bf16 parameters and gradients on the
wire (--dtype float32: as FSDP2 sends them unless told otherwise), float32 arithmetic (many
processors have no other that is fast), once per variant, in rounds of a few steps each, so that
moods of machine and network hit all alike.
  compute FSDP2 without a network: every rank copies its own part (not among the default variants)
  plain   torch's own collectives
  bf16    commpress with bf16 both ways: the same bytes in theory, point to point, one rounding
  int8    int8 gradients with error feedback, int8 weights
  int4    int4 gradients, int8 weights
  diff    int4 gradients, weights as int4 differences
  exact   weights lossless, sent for forward and for backward as plain does; gradients by torch
          (not among the default variants)
  kept    as exact, weights kept as they came from forward to backward (likewise)
  half    as int4, residuals in bf16 (not among the default variants)
  byte    as int4, residuals in a byte (not among the default variants)
"of plain" compares the bytes that commpress counts with what collectives of that dtype send in
theory, (P−1)/P of each buffer; "MB sent" is what the kernel counted, of everything. --train N
--seeds K trains N steps instead and compares held-out losses over K seeds: a variant's mean must
lie within the spread of plain.

  python benchmarks fsdp                                                  4 local processes
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks fsdp --check
  python benchmarks fsdp --train 300 --seeds 5 --width 64 --layers 2
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import commpress
from commpress.cli import harness, training
from commpress.cli.gpt import batch
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from commpress.torch_private import fsdp_communication
from shared_options import add_output, add_ranks, add_training

_AllGather, _ReduceScatter = fsdp_communication()

VARIANTS: dict[str, tuple[Any, Any]] = {  # gradients, weights
    "compute": (None, None),
    "plain": (None, None),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
    "diff": ("int4", commpress.Difference("int4")),
    "exact": (None, "exact"),
    "kept": (None, "exact"),
    "half": ("int4", "int8"),
    "byte": ("int4", "int8"),
}
RESIDUALS = {"half": "bf16", "byte": "shift8"}
LOSSLESS = ("exact", "kept")
UNASKED = ",".join(name for name in VARIANTS if name not in ("compute", *LOSSLESS, *RESIDUALS))
DTYPES = {"bfloat16": torch.bfloat16, "float32": None}  # None: no mixed precision
# of the bytes of bf16 collectives; of the lossless ones, of those that gather weights
BARS = {"int8": 0.52, "int4": 0.44, "diff": 0.30, "exact": 0.74, "kept": 0.37}
FASTER, LOSSLESS_FASTER = 1.8, 1.15  # than plain, with --check
WARM = 2


@dataclass
class Measured:
    variant: str
    step_seconds: float  # median of the slowest rank's
    sent_bytes: float | None  # per step, mean over the ranks; None where the kernel does not tell
    of_plain: float  # counted bytes over those of collectives of the same dtype
    gradients: float
    weights: float
    loss: float
    parameters: int
    losses: list[float] = field(default_factory=list)  # held out, of each seed
    against: float = 1.0  # times as fast as plain


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--ways A,B", None, UNASKED, f"default {UNASKED}")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=list(DTYPES),
        help="of what plain sends (default bfloat16)",
    )
    add_training(parser, rounds=3, steps=3, batch=1)
    option(parser, "--train N", int, 0, "compare losses after N steps instead of times")
    option(parser, "--seeds K", int, 5, "of each variant with --train")
    add_ranks(parser)
    shares = ", ".join(f"{100 * b:.0f} % ({v})" for v, b in BARS.items())
    add_output(
        parser,
        check=f"bytes are at most {shares} of bf16 and the fastest is {FASTER} times faster than "
        f"plain, the fastest lossless one {LOSSLESS_FASTER} times (with --train: losses within "
        "the spread of plain)",
    )


def run(options: argparse.Namespace) -> int:
    variants_of(options), training.load_of(options)
    if options.train < 0 or options.seeds < 1:
        raise InvalidArgument("--train must be at least 0 and --seeds at least 1")
    bars = partial(judge, trained=bool(options.train))
    bench = _train if options.train else _time
    return harness.run(options, bench, cells, judge=bars)


def variants_of(options: argparse.Namespace) -> tuple[str, ...]:
    variants = tuple(dict.fromkeys(["plain", *options.ways.split(",")]))
    for name in variants:
        if name not in VARIANTS:
            raise InvalidArgument(f"variant is {name!r}, expected one of {', '.join(VARIANTS)}")
    return variants


# ---------------------------------------------------------------- on every rank


class WideLinear(nn.Linear):
    """Computes in float32 whatever its parameters are gathered in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(
            x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
        )


class WideNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


WIDE = {nn.Linear: WideLinear, nn.LayerNorm: WideNorm}


class OwnRows(_AllGather):  # type: ignore[misc,valid-type]
    """Every row is this rank's."""

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())


class OwnGradients(OwnRows, _ReduceScatter):  # type: ignore[misc,valid-type]
    """The mean is this rank's part."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class Sharded(training.Trainee):
    """One sharded model, and what its state has counted."""

    def __init__(self, name: str, load: training.Load, dtype: str) -> None:
        model = load.model()
        for module in model.modules():
            module.__class__ = WIDE.get(type(module), type(module))
        self.parameters = sum(p.numel() for p in model.parameters())
        policy = MixedPrecisionPolicy(DTYPES[dtype], DTYPES[dtype], cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        gradients, weights = VARIANTS[name]
        self.state = None
        if weights is not None:
            kept, again = RESIDUALS.get(name, True), name in ("bf16", "exact")
            self.state = commpress.compress_fsdp(
                model, gradients, weights, regather=again, error_feedback=kept
            )
        if name == "compute":
            for module in (*model.blocks, model):
                module.set_custom_all_gather(OwnRows())
                module.set_custom_reduce_scatter(OwnGradients())
        super().__init__(
            name, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), load
        )
        self.before = self.counted()

    def counted(self) -> list[int]:
        """Sent and plain bytes of gradients, of weights, since the start."""
        if self.state is None:
            return [0] * 4
        sides = (self.state.gradients, self.state.weights)
        return [b for side in sides for b in (side.wire_bytes, side.logical_bytes)]

    def held_out(self) -> float:
        """The mean over all ranks' held-out windows, the same for every seed and variant."""
        draws = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            loss = self.wrapped(
                *batch(self.corpus[-training.HELD_OUT :], 64, self.load.length, draws)
            ).float()
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def measured(self, seconds: float, sent: float | None, plain: float) -> Measured:
        both = gradients = weights = 1.0
        if self.state is not None:
            a, b, c, d = (now - then for now, then in zip(self.counted(), self.before, strict=True))
            both, gradients, weights = (a + c) / (b + d), a / b if b else 1.0, c / d
        shares, against = (both, gradients, weights), plain / seconds
        return Measured(
            self.name, seconds, sent, *shares, self.loss, self.parameters, against=against
        )


def _time(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured | str]:
    load = training.load_of(options)
    every = {name: Sharded(name, load, options.dtype) for name in variants_of(options)}
    parameters = every["plain"].parameters / 1e6
    yield (
        f"{size} ranks, {parameters:.1f} M parameters in {options.dtype}, {load.rounds} rounds of "
        f"{load.steps}"
    )
    for one in every.values():
        one.train(WARM)  # differences begin with an exact gather
        one.before = one.counted()
    seconds, sent = training.timed(every, load)
    plain = float(seconds["plain"].median())
    for name, one in every.items():
        yield one.measured(float(seconds[name].median()), sent[name], plain)


def _train(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured | str]:
    plain = 0.0
    for name in variants_of(options):
        losses, took = [], []
        for seed in range(options.seeds):
            one = Sharded(name, training.load_of(options, seed=seed), options.dtype)
            took += [one.step() for _ in range(options.train)]
            losses.append(one.held_out())
            yield f"{name}, seed {seed}: held-out loss {losses[-1]:.4f}"
        step = sorted(took)[len(took) // 2]
        plain = plain or step  # which is trained first
        measured = one.measured(step, None, plain)
        measured.losses, measured.loss = losses, sum(losses) / len(losses)
        yield measured


# ---------------------------------------------------------------- on paper


def cells(m: Measured) -> dict[str, str]:
    exact = m.variant in ("compute", "plain")
    shares = {"of plain": m.of_plain, "gradients": m.gradients, "weights": m.weights}
    return {
        "variant": m.variant,
        "step ms": f"{1e3 * m.step_seconds:.1f}",
        "against plain": f"{m.against:.2f}x",
        "MB sent/rank": "-" if m.sent_bytes is None else f"{m.sent_bytes / 1e6:.3f}",
        **{name: "-" if exact else f"{100 * share:.1f} %" for name, share in shares.items()},
        "loss": f"{m.loss:.3f}",
    }


def judge(measured: list[Measured], *, trained: bool) -> list[tuple[str, bool]]:
    plain, others = measured[0], [m for m in measured[1:] if m.variant != "compute"]
    bars = [
        (
            (
                f"{m.variant} sends {100 * m.of_plain:.1f} % of plain, at most "
                f"{100 * BARS[m.variant]:.0f} %"
            ),
            m.of_plain <= BARS[m.variant],
        )
        for m in others
        if m.variant in BARS
    ]
    if trained:
        low, high, seeds = min(plain.losses), max(plain.losses), len(plain.losses)
        return bars + [
            (
                f"{m.variant} ends at {m.loss:.4f} on average over {seeds} seeds "
                f"({m.loss - plain.loss:+.4f} against plain), plain at {low:.4f} to {high:.4f}",
                m.loss <= high,
            )
            for m in others
        ]
    for names, bar in ((LOSSLESS, LOSSLESS_FASTER), (set(VARIANTS) - {*LOSSLESS}, FASTER)):
        if measured_ones := [m for m in others if m.variant in names]:
            best = min(measured_ones, key=lambda m: m.step_seconds)
            factor = plain.step_seconds / best.step_seconds
            text = f"{best.variant} is {factor:.2f} times faster than plain, at least {bar}"
            bars.append((text, factor >= bar))
    return bars
