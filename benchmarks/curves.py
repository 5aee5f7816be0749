"""Loss curves of one GPT under several ways of communicating, as ``python benchmarks loss`` compares them."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
import deepspeed_peer
from commpress.cli import training
from commpress.cli.bench_train import ONE_BUCKET, attach
from commpress.codecs import ByName, codec_named, policy_of
from commpress.errors import InvalidArgument
from commpress.optim.optimizer import CompressedOptimizer
from commpress.schedules import Facts

SMOOTHED = 160  # windows of text whose mean loss is compared with the target: fewer, and noise would reach it
SHORTEST = 10  # steps, however many windows each has
RISING = 10  # steps over which the learning rate rises, to fall in a line from there
ENDS = 0.1  # of the peak, at the last step
VARIANCE_UPDATES = 2  # of 0/1 Adam at each interval: the published 16 are meant for runs of 100,000 steps
UNSET = 1e-4  # rate of an optimizer that is set before each step, or whose steps are only timed
PLAIN_FIRST = 2  # steps before PowerSGD compresses
_OURS = re.compile(r"(onebit|zero-one)(?:-(bf16|int8|int4|log3))?(?:-(\d+))?(-every)?")
_DEEPSPEED = re.compile(r"(deepspeed-(?:onebit|zero-one))(?:-(\d+))?")


@dataclass(frozen=True)
class Variant:
    """``onebit-int8-12``: 1-bit Adam whose twelve exact rounds travel in int8; ``-every``: 0/1 Adam without local steps."""

    name: str
    family: str
    exact_codec: str = "none"
    warmup: int = 0
    windows: bool = True

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
    if name in ("plain", "bf16") or re.fullmatch(r"powersgd\d+", name):
        return Variant(name, name)
    if peer := _DEEPSPEED.fullmatch(name):
        return Variant(name, peer[1], warmup=int(peer[2] or warmup))
    match = _OURS.fullmatch(name)
    if match is None:
        raise InvalidArgument(
            f"variant is {name!r}, expected plain, bf16, powersgdN or onebit or zero-one, with or without the codec and "
            "number of its exact rounds: onebit-int8-12; or deepspeed-onebit-12 or deepspeed-zero-one"
        )
    return Variant(name, match[1], match[2] or "none", int(match[3] or warmup), not match[4])


@dataclass
class Curve:
    """A training run: the mean loss over the ranks and the kind of each step."""

    variant: str
    lr: float
    seed: int = 0
    losses: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)  # of the last step of each kind, as the optimizer counts; ours only
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


@dataclass(frozen=True)
class Settings:
    variants: tuple[Variant, ...]
    rates: tuple[float, ...]
    file: str | None
    target: float
    times: bool
    steps: int
    codec: str
    bucket_mb: float
    beta2: float
    spiky: str
    load: training.Load
    seeds: int = 1

    def with_seed(self, seed: int) -> "Settings":
        return replace(self, load=replace(self.load, seed=seed))

    @property
    def betas(self) -> tuple[float, float]:
        return 0.9, self.beta2


def task(settings: Settings) -> dict[str, object]:
    """What two curves must have in common to be comparable."""
    load = asdict(settings.load)  # the seed is a curve's own
    shared = {key: load[key] for key in ("width", "layers", "length", "batch")}
    return shared | {"codec": settings.codec, "steps": settings.steps, "beta2": settings.beta2, "spiky": settings.spiky}


def load(settings: Settings) -> list[Curve]:
    if settings.file is None or not Path(settings.file).exists():
        return []
    content = json.loads(Path(settings.file).read_text())
    if content["task"] != task(settings):
        raise InvalidArgument(
            f"the curves in {settings.file} are of {content['task']}, expected {task(settings)}: name another file"
        )
    return [Curve(**entry) for entry in content["curves"]]


def save(settings: Settings, curves: Sequence[Curve]) -> None:
    lines = ",\n".join(json.dumps(asdict(curve)) for curve in curves)
    if settings.file is not None:
        Path(settings.file).write_text(f'{{"task": {json.dumps(task(settings))}, "curves": [\n{lines}\n]}}\n')


def best(rates: Sequence[Sequence[Curve]], target: float) -> Sequence[Curve]:
    """Curves of all seeds at the rate that needs the fewest steps, or, where none gets there, ends lowest."""
    return min(rates, key=lambda every: (sum(c.steps_to(target) or inf for c in every), sum(c.last() for c in every)))


# ---------------------------------------------------------------- on every rank


def train(variant: Variant, lr: float, seed: int, settings: Settings) -> Curve:
    """Up to the target, or for all the steps."""
    one = learner(variant, settings.with_seed(seed))
    curve = Curve(variant.name, lr, seed, window=window(settings.load.batch, dist.get_world_size()))
    own = one.optimizer if isinstance(one.optimizer, CompressedOptimizer) else None
    while len(curve.losses) < settings.steps and curve.steps_to(settings.target) is None:
        step = len(curve.losses)
        for group in one.optimizer.param_groups:
            group["lr"] = rate(lr, step, settings.steps)
        before = None if own is None else replace(own.counters)
        sends = deepspeed_peer.communicates(one.optimizer) if variant.deepspeed else ""
        one.step()
        mean = torch.tensor(one.loss)
        dist.all_reduce(mean)
        curve.losses.append(round(float(mean) / dist.get_world_size(), 5))
        if own is None or before is None:
            plain = variant.family.startswith("powersgd") and step < PLAIN_FIRST
            curve.kinds.append("plain" if plain else f"deepspeed, {sends}" if sends else variant.name)
            continue
        compressed = own.counters.compressed_rounds > before.compressed_rounds
        local = own.counters.local_steps > before.local_steps
        kind = compressed_kind(variant) if compressed else local_kind(variant) if local else variant.exact
        curve.kinds.append(kind)
        curve.bytes[kind] = own.counters.wire_bytes - before.wire_bytes
    if own is not None and own.flat is not None:
        spiky = codec_named(settings.spiky)
        sizes = zip(own.flat.names, own.flat.places, strict=True)
        curve.finer = [name for name, (_, numel) in sizes if own.quantized.policy.choose(name, numel) == spiky]
    return curve


def compressed_kind(variant: Variant) -> str:
    return f"{variant.name}, compressed"


def local_kind(variant: Variant) -> str:
    return f"{variant.family}, local"


def learner(variant: Variant, settings: Settings) -> training.Trainee:
    """As users would set it up."""
    ddp = wrapped(variant, settings)
    if variant.deepspeed:
        return peers(variant.family.removeprefix("deepspeed-"), variant.warmup, ddp, settings)
    if not variant.ours:
        return theirs(variant, ddp, settings)
    more: dict[str, object] = {}
    if variant.family == "zero-one":
        more = {"variance_updates": VARIANCE_UPDATES, "sync": "qsr" if variant.windows else "every"}
    return ours(variant, ddp, settings, warmup_steps=variant.warmup, codec=settings.codec, spiky_codec=settings.spiky, **more)


@dataclass(frozen=True)
class Always:
    """Windows of equal length, and a variance that is updated once."""

    steps: int

    def interval(self, step: int, lr: float, facts: Facts) -> int:
        return self.steps

    def count(self, step: int) -> int:
        return 1


def repeater(kind: str, variant: Variant, curve: Curve, settings: Settings) -> training.Trainee:
    """One that does steps of one kind only, after its first, with the codecs that the run of ``curve`` came to.

    Left to choose, it would find every tensor spiky whose first gradient is.
    """
    ddp = wrapped(variant, settings)
    if variant.deepspeed:
        return peers("onebit", 1 << 30 if kind.endswith("exact") else 0, ddp, settings)
    if not variant.ours:
        return theirs(variant, ddp, settings)
    if kind == variant.exact:
        return ours(replace(variant, family="onebit"), ddp, settings, warmup_steps=1 << 30, codec=settings.codec)
    more: dict[str, object] = {}
    if variant.family == "zero-one":
        always = Always(1 << 30 if kind == local_kind(variant) else 1)
        more = {"variance_updates": always, "sync": always}
    policy = ByName({f"^{re.escape(name)}$": settings.spiky for name in curve.finer}, policy_of(settings.codec, min_numel=256))
    return ours(variant, ddp, settings, warmup_steps=1, codec=policy, spiky_codec=None, **more)


def wrapped(variant: Variant, settings: Settings) -> DistributedDataParallel:
    size = ONE_BUCKET if variant.family.startswith("powersgd") else settings.bucket_mb
    model = settings.load.model()  # equal on all ranks, and a broadcast over a slow network takes long
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=size, init_sync=False)


def theirs(variant: Variant, ddp: DistributedDataParallel, settings: Settings) -> training.Trainee:
    attach(ddp, variant.name)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=UNSET, betas=settings.betas, fused=True)
    return training.Trainee(variant.name, ddp, optimizer, settings.load)


def peers(family: str, exact: int, ddp: DistributedDataParallel, settings: Settings) -> training.Trainee:
    optimizer = deepspeed_peer.optimizer(family, ddp, settings.betas, exact, VARIANCE_UPDATES)
    return training.Trainee(f"deepspeed-{family}", ddp, optimizer, settings.load)


def ours(variant: Variant, ddp: DistributedDataParallel, settings: Settings, **more: object) -> training.Trainee:
    cls = commpress.OneBitAdam if variant.family == "onebit" else commpress.ZeroOneAdam
    optimizer = cls(
        list(ddp.module.named_parameters()), lr=UNSET, betas=settings.betas, weight_decay=0.01,
        exact_codec=variant.exact_codec, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return training.Trainee(variant.name, ddp, commpress.overlap(ddp, optimizer), settings.load)
