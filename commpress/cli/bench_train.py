"""Training steps under several gradient hooks: which share of them waits for the network."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from commpress.choice import AUTO, METHODS, steps_of_trial
from commpress.cli import harness, training
from commpress.cli.refusals import variants_of

WARM = 4  # untimed steps: DDP rebuilds its buckets after the first, PowerSGD begins with the third


@dataclass
class TrainedVariant:
    variant: str
    step_seconds: float  # median of the slowest rank's
    exposed_seconds: float  # median over rounds of this variant's median step minus that of compute
    sent_bytes: float | None  # per step, mean over the ranks; None where the kernel does not tell
    loss: float
    parameters: int
    compute_seconds: float = 0.0  # a step of compute
    plain_seconds: float | None = None  # a step of plain, where that runs


def run(options: argparse.Namespace) -> int:
    return harness.run(options, bench, cells)


def trainee(name: str, bucket_mb: float, load: training.Load) -> training.Trainee:
    made = training.under_ddp(name, load, 3e-4, bucket_mb)
    if made.hook is not None:
        made.hook.measure_every = 0
    return made


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[TrainedVariant | str]:
    load, variants = training.load_of(options), variants_of(options.ways)
    trainees = {name: trainee(name, options.bucket_mb, load) for name in variants}
    for one in trainees.values():
        one.train(WARM + (steps_of_trial(METHODS) if one.name == AUTO else 0))
    parameters = sum(p.numel() for p in trainees["compute"].wrapped.parameters())
    yield (
        f"{size} ranks, {parameters / 1e6:.1f} M parameters, {load.rounds} rounds of {load.steps} "
        "steps each"
    )
    seconds, sent = training.timed(trainees, load)
    compute = seconds["compute"].median(1).values  # of each round
    plain = float(seconds["plain"].median()) if "plain" in seconds else None
    for name, one in trainees.items():
        yield TrainedVariant(
            name,
            float(seconds[name].median()),
            float((seconds[name].median(1).values - compute).median()),
            sent[name],
            one.loss,
            parameters,
            float(seconds["compute"].median()),
            plain,
        )


def cells(m: TrainedVariant) -> dict[str, str]:
    plain = m.plain_seconds
    return {
        "variant": m.variant,
        "step ms": f"{1e3 * m.step_seconds:.1f}",
        "of compute": f"{m.step_seconds / m.compute_seconds:.2f}x",
        "exposed ms": f"{1e3 * m.exposed_seconds:.1f}",
        "MB sent/rank": "-" if m.sent_bytes is None else f"{m.sent_bytes / 1e6:.3f}",
        "against plain": "-" if plain is None else f"{plain / m.step_seconds:.2f}x",
        "loss": f"{m.loss:.2f}",
    }
