"""Training steps under several gradient hooks: which share of them waits for the network."""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.choice import AUTO, METHODS, steps_of_trial
from commpress.cli import harness, ranks, training
from commpress.cli.refusals import bucket_sizes, variants_of

# MB. PowerSGD chains collectives in callbacks: with several buckets ranks may issue them in
# different orders.
ONE_BUCKET = 1 << 20
WARM = 4  # untimed steps: DDP rebuilds its buckets after the first, PowerSGD begins with the third
HEAD = ["variant", "step ms", "of compute", "exposed ms", "MB sent/rank", "against plain", "loss"]


@dataclass
class TrainedVariant:
    variant: str
    step_seconds: float  # median of the slowest rank's
    exposed_seconds: float  # median over rounds of this variant's median step minus that of compute
    sent_bytes: float | None  # per step, mean over the ranks; None where the kernel does not tell
    loss: float
    parameters: int


def run(options: argparse.Namespace) -> int:
    return harness.run(options, bench, judge=judge, draw=draw, summary=summary)


# ---------------------------------------------------------------- on every rank


def trainee(name: str, bucket_mb: float, load: training.Load) -> training.Trainee:
    bucket_mb = ONE_BUCKET if name.startswith("powersgd") else bucket_mb
    ddp = DistributedDataParallel(
        load.model(), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)
    attach(ddp, name)
    return training.Trainee(name, ddp, optimizer, load)


def attach(ddp: DistributedDataParallel, name: str) -> None:
    if name == "compute":
        ddp.register_comm_hook(None, no_communication_hook)
    elif name == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "bf16":
        ddp.register_comm_hook(None, training.bf16_hook)
    elif name.startswith("powersgd"):
        state = powerSGD_hook.PowerSGDState(
            ddp.process_group, matrix_approximation_rank=int(name[8:]), start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name != "plain":
        commpress.compress(ddp, name).measure_every = 0


def no_communication_hook(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> list[TrainedVariant]:
    load, variants = training.load_of(options), variants_of(options.ways)
    sizes = bucket_sizes(variants, options.bucket_mb)
    trainees = {name: trainee(name, sizes.get(name, sizes[""]), load) for name in variants}
    for one in trainees.values():
        one.train(WARM + (steps_of_trial(METHODS) if one.name == AUTO else 0))
    parameters = sum(p.numel() for p in trainees["compute"].wrapped.parameters())
    report(
        f"{size} ranks, {parameters / 1e6:.1f} M parameters, {load.rounds} rounds of {load.steps} "
        "steps each"
    )
    seconds, sent = training.timed(trainees, load)
    compute = seconds["compute"].median(1).values  # of each round
    return [
        TrainedVariant(
            name,
            float(seconds[name].median()),
            float((seconds[name].median(1).values - compute).median()),
            sent[name],
            one.loss,
            parameters,
        )
        for name, one in trainees.items()
    ]


# ---------------------------------------------------------------- on paper


def summary(measured: list[TrainedVariant]) -> str:
    of: dict[str, TrainedVariant] = {m.variant: m for m in measured}
    compute, plain = of["compute"], of.get("plain")
    rows = []
    for m in measured:
        against = f"{plain.step_seconds / m.step_seconds:.2f}x" if plain else "-"
        rows.append(
            [
                m.variant,
                f"{1e3 * m.step_seconds:.1f}",
                f"{m.step_seconds / compute.step_seconds:.2f}x",
                f"{1e3 * m.exposed_seconds:.1f}",
                "-" if m.sent_bytes is None else f"{m.sent_bytes / 1e6:.3f}",
                against,
                f"{m.loss:.2f}",
            ]
        )
    return harness.render(HEAD, rows)


def judge(measured: list[TrainedVariant]) -> list[tuple[str, bool]]:
    of, bars = {m.variant: m for m in measured}, []
    if {"powersgd1", "sign"} <= of.keys():
        sign, powersgd, compute = of["sign"], of["powersgd1"], of["compute"]
        exposed, of_compute = 1e3 * sign.exposed_seconds, sign.step_seconds / compute.step_seconds
        bars += [
            (
                (
                    f"sign exposes {exposed:.1f} ms, powersgd1 "
                    f"{1e3 * powersgd.exposed_seconds:.1f}: at most half"
                ),
                sign.exposed_seconds <= 0.5 * powersgd.exposed_seconds,
            ),
            (f"a sign step takes {of_compute:.2f} of compute, at most 1.3", of_compute <= 1.3),
        ]
    if {"plain", AUTO} <= of.keys():
        best = min(
            (m for m in of.values() if m.variant not in ("compute", AUTO)),
            key=lambda m: m.step_seconds,
        )
        for other, least in ((of["plain"], 0.98), (best, 0.95)):
            speed = other.step_seconds / of[AUTO].step_seconds
            bars.append(
                (
                    f"auto runs at {speed:.3f} of the speed of {other.variant}, at least {least}",
                    speed >= least,
                )
            )
    return bars


def draw(path: str, measured: list[TrainedVariant]) -> None:
    from commpress.cli import charts

    names, compute = [m.variant for m in measured], measured[0]
    title = f"A training step of {compute.parameters / 1e6:.1f} M parameters under DDP"
    with charts.chart(path, title, panels=2) as (time, sent):
        hidden = [min(m.step_seconds, compute.step_seconds) * 1e3 for m in measured]
        exposed = [max(m.step_seconds - compute.step_seconds, 0) * 1e3 for m in measured]
        charts.stacked(
            time, names, {"compute": hidden, "exposed communication": exposed}, "one step, ms"
        )
        charts.bars(
            sent,
            names,
            {"": [None if m.sent_bytes is None else m.sent_bytes / 1e6 for m in measured]},
            "MB sent per rank and step",
            show="{:.3g}",
        )
