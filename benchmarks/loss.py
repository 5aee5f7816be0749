"""seconds to a target loss over a network, several ways of communicating side by side

What a step does to the loss does not depend on the network, and what it costs does not depend on
the loss. So both are measured where each is measured best, and multiplied:
  losses   each variant trains one GPT from equal weights on equal batches until the mean loss of
           its last 160 windows reaches --target, at most --train steps, once with each learning
           rate of --lr, which falls in a line to a tenth; the rate that needs the fewest steps
           counts, for each variant its own.
           --seeds N: as often, with other weights and batches; means count.
           --losses FILE keeps the curves: those that are in it are not trained again, whatever
           network is there
  times    steps of every kind that the curves have take turns over the network that is there;
           medians of the slowest rank's. A compressed step here sends as many bytes as in the run
           of the curve, or the bench stops.
           --times FILE: those of an earlier --json file instead, for another target or other curves
Seconds to the target are the sum of the times of the steps up to it, whatever their kinds.
  no-network               what plain does, timed without communication
  plain, bf16, powersgdN   torch's hooks with AdamW; PowerSGD's first two steps are plain ones
  powersgd-4, int8 …       commpress.compress with that codec, and AdamW; per-layer-powersgd-4:
                           PerLayer, every 25 steps
  local-K, local-K-CODEC   commpress.LocalUpdates: rounds of K steps that hide their exchange
  onebit, zero-one         commpress, overlapped with backward. onebit-int8-12: twelve exact rounds,
                           and these in int8 with error feedback; or bf16, int4, log3; if not named,
                           float32 and --warmup rounds. 0/1 Adam has more exact rounds later, and
                           local steps once the rate falls; zero-one-int8-12-every has none of these
  deepspeed-onebit-12,
  deepspeed-zero-one       of DeepSpeed 0.19.6 under DDP; on CPU with NumPy in place of CuPy

--device 60ms times steps of a device that takes so long, stood in as by local_speed.

  python benchmarks loss --losses curves.json --lr 5e-4,1e-3 --no-times
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks loss \\
      --losses curves.json
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
import deepspeed_peer
from commpress.cli import harness, ranks, terminal, training
from commpress.cli.connections import sent_bytes
from commpress.cli.contenders import torch_rank
from commpress.cli.gpt import batch
from commpress.cli.option_groups import option
from commpress.codecs import ByName, codec_named, policy_of
from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim.optimizer import CompressedOptimizer
from commpress.schedules import Facts
from local_loss import Whole
from local_speed import SleptGPT, seconds_of
from shared_options import add_measuring

VARIANTS = "plain,bf16,powersgd1,powersgd2,powersgd4,onebit-log3-20,zero-one-log3-8"
# untimed steps: DDP rebuilds its buckets after the first, PowerSGD and compressed rounds begin
# after two
WARM = 3
RATE = 5e-4
FASTER, THAN_HOOKS, WON_BACK = 8.0, 1.15, 0.8
FLOOR = "no-network"


# windows of text whose mean loss is compared with the target: fewer, and noise would reach it
SMOOTHED = 160
SHORTEST = 10  # steps, however many windows each has
RISING = 10  # steps over which the learning rate rises, to fall in a line from there
ENDS = 0.1  # of the peak, at the last step
# of 0/1 Adam at each interval: the published 16 are meant for runs of 100,000 steps
VARIANCE_UPDATES = 2
UNSET = 1e-4  # rate of an optimizer that is set before each step, or whose steps are only timed
PLAIN_FIRST = 2  # steps before PowerSGD compresses
_OURS = re.compile(r"(onebit|zero-one)(?:-(bf16|int8|int4|log3))?(?:-(\d+))?(-every)?")
_LOCAL = re.compile(r"local-(\d+)(?:-(\D.*))?")
_LAYERED = re.compile(r"per-layer-(.*)")
LAYERED = 25  # steps between two choices of codecs by layer
_DEEPSPEED = re.compile(r"(deepspeed-(?:onebit|zero-one))(?:-(\d+))?")
BETA1 = 0.9


@dataclass(frozen=True)
class Variant:
    """``onebit-int8-12``: 1-bit Adam whose twelve exact rounds travel in int8; ``-every``: 0/1 Adam
    without local steps."""

    name: str
    family: str
    exact_codec: str = "none"  # of local updates: the codec
    warmup: int = 0
    windows: bool = True
    every: int = 0  # steps of a round of local updates

    @property
    def ours(self) -> bool:
        return self.family in ("onebit", "zero-one")

    @property
    def deepspeed(self) -> bool:
        return self.family.startswith("deepspeed")

    @property
    def exact(self) -> str:
        return "exact" if self.exact_codec == "none" else f"exact-{self.exact_codec}"


def variant_of(name: str, warmup: int) -> Variant:
    if name in (FLOOR, "plain", "bf16") or torch_rank(name):
        return Variant(name, name)
    if rounds := _LOCAL.fullmatch(name):
        return Variant(name, "local", rounds[2] or "int4", every=int(rounds[1]))
    if layered := _LAYERED.fullmatch(name):
        return Variant(name, "per-layer", commpress.PerLayer(layered[1]).uniform)
    if peer := _DEEPSPEED.fullmatch(name):
        return Variant(name, peer[1], warmup=int(peer[2] or warmup))
    match = _OURS.fullmatch(name)
    if match is None:
        try:
            codec_named(name)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"variant is {name!r}, expected no-network, plain, bf16, powersgdN, local-K, "
                f"per-layer-CODEC, a codec ({error}), or onebit or zero-one, with or without the "
                "codec and number of its exact rounds: onebit-int8-12; or deepspeed-onebit-12 or "
                "deepspeed-zero-one"
            ) from None
        return Variant(name, "hook")
    return Variant(name, match[1], match[2] or "none", int(match[3] or warmup), not match[4])


@dataclass
class Curve:
    """A training run: the mean loss over the ranks and the kind of each step."""

    variant: str
    lr: float
    seed: int = 0
    losses: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    # of the last step of each kind, as the optimizer counts; ours only
    bytes: dict[str, int] = field(default_factory=dict)
    finer: list[str] = field(default_factory=list)  # parameters that travel in the spiky codec
    window: int = SHORTEST  # steps whose mean loss is compared with the target

    def smooth(self) -> list[float]:
        """Mean losses of the first ``window`` steps, and so on up to the last."""
        sums = [0.0, *accumulate(self.losses)]
        return [(b - a) / self.window for a, b in zip(sums, sums[self.window :], strict=False)]

    def steps_to(self, target: float) -> int | None:
        reached = next((i for i, loss in enumerate(self.smooth()) if loss <= target), None)
        return None if reached is None else reached + self.window

    def last(self) -> float:
        return self.smooth()[-1] if len(self.losses) >= self.window else inf


def window(batch: int, ranks: int) -> int:
    return max(SHORTEST, -(-SMOOTHED // (batch * ranks)))


def rate(peak: float, step: int, steps: int) -> float:
    if step < RISING:
        return peak * (step + 1) / RISING
    return peak * (1 - (1 - ENDS) * (step - RISING) / max(steps - RISING, 1))


@dataclass
class Measured:
    variant: str
    lr: float
    # to the target, mean over the seeds; None where one of them does not reach it
    seconds: float | None
    every: list[float | None]  # of each seed
    steps: list[int]
    kinds: dict[str, int]  # of the first seed's
    loss: float


@dataclass
class Results:
    curves: list[Sequence[Curve]]  # the best of each variant, one for each seed
    seconds: dict[str, float]  # of a step of each kind
    sent: dict[str, float | None]  # bytes per step of each kind, mean over the ranks


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--ways A,B", None, VARIANTS, f"default {VARIANTS}")
    option(parser, "--target LOSS", float, 2.8, "nats per byte")
    option(
        parser,
        "--losses FILE",
        says="curves: read if there, written with missing ones",
    )
    option(parser, "--no-times", says="train missing curves and measure no steps")
    option(
        parser,
        "--times FILE",
        says="step times of an earlier --json file instead of new ones",
    )
    option(parser, "--train N", int, 150, "steps of each curve at most")
    option(
        parser,
        "--lr R,R",
        says="peaks to try (default: those of the curves, else 5e-4)",
    )
    option(parser, "--seeds N", int, 1, "of each curve")
    option(parser, "--beta2 B", float, 0.999, "of Adam's variance")
    option(parser, "--device D", None, "cpu", "of steps that are timed: cpu, or 60ms stood in")
    option(parser, "--warmup N", int, 20, "exact steps of ours")
    option(parser, "--codec NAME", None, "sign", "of momentum")
    option(parser, "--spiky NAME", None, "log3", "of tensors with few large elements")
    option(parser, "--bucket-mb MB", float, 8, "DDP's buckets")
    check = (
        f"ours reaches the target {FASTER:g} times sooner than plain, {THAN_HOOKS} times sooner "
        f"than hooks, and wins back {WON_BACK} of what the network costs the best hook"
    )
    add_measuring(parser, rounds=3, steps=2, batch=2, check=check)


def run(options: argparse.Namespace) -> int:
    if min(options.train, options.warmup, options.seeds) < 1:
        raise InvalidArgument("--train, --warmup and --seeds must be at least 1")
    variants_of(options), rates_of(options.lr), training.load_of(options)
    results = ranks.on_ranks(bench, options, print)
    if results is None or options.no_times:  # None: not rank 0 of a launcher
        return 0
    if options.times:
        earlier = json.loads(Path(options.times).read_text())
        results.seconds, results.sent = earlier["step_seconds"], earlier["step_bytes"]
    measured = [reached(curve, results.seconds, options.target) for curve in results.curves]
    plain = next((m.seconds for m in measured if m.variant == "plain"), None)
    shown = partial(cells, plain=plain)
    print(step_table(results), terminal.table(list(map(shown, measured))), sep="\n\n")
    return harness.deliver(
        options,
        measured,
        judge=judge,
        step_seconds=results.seconds,
        step_bytes=results.sent,
    )


def variants_of(options: argparse.Namespace) -> tuple[Variant, ...]:
    return tuple(
        variant_of(name, options.warmup) for name in dict.fromkeys(options.ways.split(","))
    )


def rates_of(words: str | None) -> tuple[float, ...]:
    """Empty if not named."""
    if words is None:
        return ()
    try:
        rates = tuple(dict.fromkeys(float(word) for word in words.split(",")))
    except ValueError:
        rates = ()
    if not rates or min(rates) <= 0:
        raise InvalidArgument(f"--lr is {words!r}, expected rates above zero such as 5e-4,1e-3")
    return rates


# ---------------------------------------------------------------- on every rank


def bench(rank: int, size: int, options: argparse.Namespace, report: ranks.Report) -> Results:
    curves = {(curve.variant, curve.lr, curve.seed): curve for curve in load(options)}
    chosen, seeds = [], range(options.seeds)
    for variant in variants_of(options):
        rates = (
            rates_of(options.lr)
            or tuple(dict.fromkeys(lr for name, lr, _ in curves if name == variant.name))
            or (RATE,)
        )
        for at in ((variant.name, lr, seed) for lr in rates for seed in seeds):
            curve = curves.get(at)
            if variant.name == FLOOR and (same := curves.get(("plain", *at[1:]))):
                curve = curves[at] = replace(same, variant=FLOOR, kinds=[FLOOR] * len(same.kinds))
            if curve is None or (
                len(curve.losses) < options.train and curve.steps_to(options.target) is None
            ):
                curve = curves[at] = train(variant, *at[1:], options)
                report(
                    f"{at[0]}, rate {at[1]:g}, seed {at[2]}: loss {curve.last():.3f} after "
                    f"{len(curve.losses)} steps"
                )
                if rank == 0:
                    save(options, curves.values())
        chosen.append(
            best(
                [[curves[variant.name, lr, seed] for seed in seeds] for lr in rates], options.target
            )
        )
    return Results(chosen, {}, {}) if options.no_times or options.times else times(chosen, options)


def times(chosen: list[Sequence[Curve]], options: argparse.Namespace) -> Results:
    """Each kind of step, as the first variant and the first seed that have it do it."""
    trainees: dict[str, training.Trainee] = {}
    expected: dict[str, int] = {}
    for variant, curve in (
        (v, curve) for v, every in zip(variants_of(options), chosen, strict=True) for curve in every
    ):
        for kind in dict.fromkeys(curve.kinds[: curve.steps_to(options.target)]):
            if kind not in trainees:
                whose = Variant("plain", "plain") if kind == "plain" else variant
                trainees[kind] = repeater(kind, whose, curve, options)
                expected |= {kind: curve.bytes[kind]} if kind in curve.bytes else {}
    for one in trainees.values():
        one.train(WARM)
    for kind, count in expected.items():
        counters = trainees[kind].optimizer.counters  # type: ignore[attr-defined]
        before = counters.wire_bytes
        trainees[kind].train(1)
        if (now := counters.wire_bytes - before) != count:
            raise StateMismatch(
                f"a step {kind!r} sends {now} bytes here, but sent {count} when its curve was "
                "trained: remove that curve from the file of --losses"
            )
    for trainee in trainees.values():
        trainee.sent = 0
    load = training.load_of(options)
    calls = {kind: partial(one.train, load.steps) for kind, one in trainees.items()}
    steps = {kind: getattr(one, "every", 0) * 2 or load.steps for kind, one in trainees.items()}
    seconds: dict[str, float] = {}
    sent: dict[str, float | None] = {}
    for kind, figures in harness.interleaved(calls, load.rounds).items():
        took = harness.slowest({kind: figures})[kind]
        # only some steps of a round wait for its exchange
        seconds[kind] = float((took.mean(1) if steps[kind] != load.steps else took).median())
        bytes_ = torch.tensor(trainees[kind].sent / (load.rounds * steps[kind]))
        dist.all_reduce(bytes_)
        sent[kind] = None if sent_bytes() is None else float(bytes_) / dist.get_world_size()
    return Results(chosen, seconds, sent)


def train(variant: Variant, lr: float, seed: int, options: argparse.Namespace) -> Curve:
    """Up to the target, or for all the steps."""
    one = learner(variant, options, seed)
    curve = Curve(variant.name, lr, seed, window=window(options.batch, dist.get_world_size()))
    own = one.optimizer if isinstance(one.optimizer, CompressedOptimizer) else None
    while len(curve.losses) < options.train and curve.steps_to(options.target) is None:
        step = len(curve.losses)
        for group in one.optimizer.param_groups:
            group["lr"] = rate(lr, step, options.train)
        before = None if own is None else replace(own.counters)
        sends = deepspeed_peer.communicates(one.optimizer) if variant.deepspeed else ""
        one.step()
        mean = torch.tensor(one.loss)
        dist.all_reduce(mean)
        curve.losses.append(round(float(mean) / dist.get_world_size(), 5))
        if own is None or before is None:
            plain = torch_rank(variant.name) and step < PLAIN_FIRST
            curve.kinds.append(
                "plain" if plain else f"deepspeed, {sends}" if sends else variant.name
            )
            continue
        compressed = own.counters.compressed_rounds > before.compressed_rounds
        local = own.counters.local_steps > before.local_steps
        kind = (
            compressed_kind(variant)
            if compressed
            else local_kind(variant)
            if local
            else variant.exact
        )
        curve.kinds.append(kind)
        curve.bytes[kind] = own.counters.wire_bytes - before.wire_bytes
    if isinstance(one, Rounds):
        one.local.close()
    if own is not None and own.flat is not None:
        spiky = codec_named(options.spiky)
        sizes = zip(own.flat.names, own.flat.places, strict=True)
        curve.finer = [
            name for name, (_, numel) in sizes if own.quantized.policy.choose(name, numel) == spiky
        ]
    return curve


def compressed_kind(variant: Variant) -> str:
    return f"{variant.name}, compressed"


def local_kind(variant: Variant) -> str:
    return f"{variant.family}, local"


def learner(variant: Variant, options: argparse.Namespace, seed: int) -> training.Trainee:
    """As users would set it up."""
    if variant.every:
        return Rounds(variant, model_of(options, seed), options, seed)
    ddp = wrapped(variant, options, seed)
    if variant.deepspeed:
        return peers(variant.family.removeprefix("deepspeed-"), variant.warmup, ddp, options, seed)
    if not variant.ours:
        return theirs(variant, ddp, options, seed)
    more: dict[str, Any] = {}
    if variant.family == "zero-one":
        more = {"variance_updates": VARIANCE_UPDATES, "sync": "qsr" if variant.windows else "every"}
    more |= {"exact_steps": variant.warmup, "codec": options.codec, "spiky_codec": options.spiky}
    return ours(variant, ddp, options, seed, **more)


@dataclass(frozen=True)
class Always:
    """Windows of equal length, and a variance that is updated once."""

    steps: int

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        return self.steps

    def count(self, step: int) -> int:
        return 1


def repeater(
    kind: str, variant: Variant, curve: Curve, options: argparse.Namespace
) -> training.Trainee:
    """One that does steps of one kind only, after its first, with the codecs that the run of
    ``curve`` came to.

    Left to choose, it would find every tensor spiky whose first gradient is. A tensor that one step
    cannot freeze, such as an embedding of which it saw few rows, travels in ``exact_codec``: so
    that is the spiky codec here, as in the curve.
    """
    if variant.every:
        return Rounds(variant, model_of(options, timed=True), options)
    ddp = wrapped(variant, options, timed=True)
    if variant.deepspeed:
        return peers("onebit", 1 << 30 if kind.endswith("exact") else 0, ddp, options)
    if not variant.ours:
        return theirs(variant, ddp, options, timed=True)
    if kind == variant.exact:
        return ours(
            replace(variant, family="onebit"),
            ddp,
            options,
            exact_steps=1 << 30,
            codec=options.codec,
        )
    more: dict[str, Any] = {}
    if variant.family == "zero-one":
        always = Always(1 << 30 if kind == local_kind(variant) else 1)
        more = {"variance_updates": always, "sync": always}
    policy = ByName(
        {f"^{re.escape(name)}$": options.spiky for name in curve.finer},
        policy_of(options.codec, min_numel=256),
    )
    live = replace(variant, exact_codec=options.spiky)
    return ours(live, ddp, options, exact_steps=1, codec=policy, spiky_codec=None, **more)


class Rounds(training.Trainee):
    """Local updates, whose ranks do not wait for each other between two steps."""

    def __init__(
        self,
        variant: Variant,
        model: torch.nn.Module,
        options: argparse.Namespace,
        seed: int = 0,
    ) -> None:
        self.every = variant.every
        self.local = commpress.LocalUpdates(
            adamw(model, options),
            every=Whole(steps=self.every),
            outer=commpress.Average(),
            codec=variant.exact_codec,
        )
        super().__init__(variant.name, model, self.local, training.load_of(options, seed=seed))

    def step(self) -> float:
        windows = batch(
            self.corpus[: -training.HELD_OUT], self.load.batch, self.load.length, self.draws
        )
        start = perf_counter()
        loss = self.wrapped(*windows)
        loss.backward()
        self.local.step()
        self.local.zero_grad()
        took = perf_counter() - start
        self.loss = loss.item()
        return took

    def train(self, steps: int) -> list[float]:
        """Take two rounds, after one that brings an exchange under way; nothing stays under way."""
        for _ in range(self.every):
            self.step()
        took = super().train(2 * self.every)
        self.local.drain()
        return took


def model_of(options: argparse.Namespace, seed: int = 0, *, timed: bool = False) -> torch.nn.Module:
    load = training.load_of(options, seed=seed)
    seconds = seconds_of(options.device) if timed else 0
    return SleptGPT(load.model(), load, seconds) if seconds else load.model()


def wrapped(
    variant: Variant, options: argparse.Namespace, seed: int = 0, *, timed: bool = False
) -> DistributedDataParallel:
    size = training.ONE_BUCKET if torch_rank(variant.name) else options.bucket_mb
    # equal on all ranks, and a broadcast over a slow network takes long
    return DistributedDataParallel(
        model_of(options, seed, timed=timed),
        gradient_as_bucket_view=True,
        bucket_cap_mb=size,
        init_sync=False,
    )


def adamw(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    betas = (BETA1, options.beta2)
    return torch.optim.AdamW(model.parameters(), lr=UNSET, betas=betas, fused=True)


def theirs(
    variant: Variant,
    ddp: DistributedDataParallel,
    options: argparse.Namespace,
    seed: int = 0,
    *,
    timed: bool = False,
) -> training.Trainee:
    """AdamW under one of torch's hooks, or ours for a codec."""
    if variant.family == "per-layer":
        commpress.compress(ddp, commpress.PerLayer(variant.exact_codec, LAYERED))
    else:
        training.attach(ddp, "compute" if timed and variant.name == FLOOR else variant.name)
    optimizer = adamw(ddp, options)
    return training.Trainee(variant.name, ddp, optimizer, training.load_of(options, seed=seed))


def peers(
    family: str,
    exact: int,
    ddp: DistributedDataParallel,
    options: argparse.Namespace,
    seed: int = 0,
) -> training.Trainee:
    optimizer = deepspeed_peer.optimizer(
        family, ddp, (BETA1, options.beta2), exact, VARIANCE_UPDATES
    )
    return training.Trainee(
        f"deepspeed-{family}", ddp, optimizer, training.load_of(options, seed=seed)
    )


def ours(
    variant: Variant,
    ddp: DistributedDataParallel,
    options: argparse.Namespace,
    seed: int = 0,
    **more: Any,
) -> training.Trainee:
    cls = commpress.OneBitAdam if variant.family == "onebit" else commpress.ZeroOneAdam
    optimizer = cls(
        list(getattr(ddp.module, "net", ddp.module).named_parameters()),
        lr=UNSET,
        betas=(BETA1, options.beta2),
        weight_decay=0.01,
        exact_codec=variant.exact_codec,
        **more,
    )
    return training.Trainee(
        variant.name, ddp, commpress.overlap(ddp, optimizer), training.load_of(options, seed=seed)
    )


# ---------------------------------------------------------------- curves in a file


def task(options: argparse.Namespace) -> dict[str, object]:
    """All that two curves must have in common to be comparable."""
    shared = {
        key: getattr(options, key)
        for key in ("width", "layers", "length", "batch", "codec", "beta2", "spiky")
    }
    return shared | {"steps": options.train}


def load(options: argparse.Namespace) -> list[Curve]:
    if options.losses is None or not Path(options.losses).exists():
        return []
    content = json.loads(Path(options.losses).read_text())
    if content["task"] != task(options):
        raise InvalidArgument(
            f"the curves in {options.losses} are of {content['task']}, expected {task(options)}: "
            "name another file"
        )
    return [Curve(**entry) for entry in content["curves"]]


def save(options: argparse.Namespace, curves: Iterable[Curve]) -> None:
    lines = ",\n".join(json.dumps(asdict(curve)) for curve in curves)
    if options.losses is not None:
        Path(options.losses).write_text(
            f'{{"task": {json.dumps(task(options))}, "curves": [\n{lines}\n]}}\n'
        )


def best(rates: Sequence[Sequence[Curve]], target: float) -> Sequence[Curve]:
    """Curves of all seeds at the rate that needs the fewest steps, or, where none gets there, ends
    lowest."""
    return min(
        rates,
        key=lambda every: (
            sum(c.steps_to(target) or inf for c in every),
            sum(c.last() for c in every),
        ),
    )


# ---------------------------------------------------------------- on paper


def reached(curves: Sequence[Curve], seconds: dict[str, float], target: float) -> Measured:
    first, every, taken, losses = curves[0], [], [], []
    for curve in curves:
        steps = curve.steps_to(target)
        kinds = curve.kinds[:steps]
        if unknown := [kind for kind in kinds if kind not in seconds]:
            raise InvalidArgument(
                f"no step {unknown[0]!r} was timed: measure this variant, without --times"
            )
        every.append(None if steps is None else sum(seconds[kind] for kind in kinds))
        taken.append(len(kinds))
        losses.append(curve.last() if steps is None else curve.smooth()[steps - curve.window])
    total = sum(took for took in every if took is not None)
    kinds = first.kinds[: taken[0]]
    return Measured(
        first.variant,
        first.lr,
        None if None in every else total / len(every),
        every,
        taken,
        {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        sum(losses) / len(losses),
    )


def step_table(results: Results) -> str:
    rows = []
    for kind, took in results.seconds.items():
        sent = results.sent[kind]
        megabytes = "-" if sent is None else f"{sent / 1e6:.2f}"
        rows.append({"kind of step": kind, "s": f"{took:.3f}", "MB sent/rank": megabytes})
    return terminal.table(rows)


def cells(m: Measured, plain: float | None) -> dict[str, str]:
    words = ("exact", "compressed", "local")
    return {
        "variant": m.variant,
        "rate": f"{m.lr:g}",
        "seconds": "not reached" if m.seconds is None else f"{m.seconds:.1f}",
        "steps": " ".join(map(str, m.steps)),
        **{word: str(sum(n for kind, n in m.kinds.items() if word in kind)) for word in words},
        "loss": f"{m.loss:.3f}",
        "against plain": f"{plain / m.seconds:.2f}x" if plain and m.seconds else "-",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    """Compare the soonest of ours with the soonest of torch's."""
    found: dict[str, list[Measured]] = {"ours": [], "hooks": [], "plain": [], FLOOR: []}
    for m in measured:
        theirs = "hooks" if m.variant == "bf16" or torch_rank(m.variant) else "ours"
        if m.seconds and not m.variant.startswith("deepspeed"):
            found[m.variant if m.variant in found else theirs].append(m)
    soonest = {name: min(every, key=seconds_to, default=None) for name, every in found.items()}
    best, hook, floor = soonest["ours"], soonest["hooks"], soonest[FLOOR]
    if best is None:
        return [("one of ours reaches the target", False)]
    bars = []
    for name, bar in (("plain", FASTER), ("hooks", THAN_HOOKS)):
        other = soonest[name]
        if other is None:
            bars.append((f"nothing of {name} reached the target, or it was not run", False))
        else:
            ratio = seconds_to(other) / seconds_to(best)
            says = f"{best.variant} {ratio:.2f} times sooner than {other.variant}, at least {bar:g}"
            bars.append((says, ratio >= bar))
    if hook is not None and floor is not None:
        cost = seconds_to(hook) - seconds_to(floor)
        share = (seconds_to(hook) - seconds_to(best)) / cost
        says = f"{best.variant} wins back {share:.2f} of what the network costs {hook.variant}"
        bars.append((f"{says}, at least {WON_BACK}", share >= WON_BACK))
    return bars


def seconds_to(measured: Measured) -> float:
    """Seconds to the target; infinite if it is not reached."""
    return measured.seconds or inf
