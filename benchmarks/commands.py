"""The benchmarks, and the command line that they make."""

import argparse
from collections.abc import Sequence

import activations
import alltoall
import changing_link
import chaos
import codec
import codec_table
import convergence
import encoders
import expert_dispatch
import expert_tiers
import exposed
import faults
import fsdp
import gpu
import guard
import hierarchical
import kills
import late_rank
import local_loss
import local_speed
import loss
import micro_batches
import muon_step
import observe
import optimizer
import parking
import pipeline
import plan
import powersgd
import simulate
import store_io
import traces
import trainer_fsdp
import weight_bytes
import weight_speed
import weight_sync
from commpress import cli

DESCRIPTION = """\
What developers of commpress measure; `commpress bench` has what users measure on their machines.

  python benchmarks fsdp --help                  what it measures, its columns and its options
  python benchmarks guard --check                exit status 1 unless its bars hold
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks fsdp

All take --check and --json FILE but faults, which enters its table into a page.
"""
BENCHMARKS = (
    activations,
    alltoall,
    changing_link,
    chaos,
    codec,
    codec_table,
    convergence,
    encoders,
    expert_dispatch,
    expert_tiers,
    exposed,
    faults,
    fsdp,
    gpu,
    guard,
    hierarchical,
    kills,
    late_rank,
    local_loss,
    local_speed,
    loss,
    micro_batches,
    muon_step,
    observe,
    optimizer,
    parking,
    pipeline,
    plan,
    powersgd,
    simulate,
    store_io,
    traces,
    trainer_fsdp,
    weight_bytes,
    weight_speed,
    weight_sync,
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="benchmarks",
        description=DESCRIPTION,
        **cli.WHOLE,
    )
    names = top.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for benchmark in BENCHMARKS:
        name, about = benchmark.__name__, benchmark.__doc__ or ""
        summary = " ".join(about.partition("\n\n")[0].split())
        command = names.add_parser(name, help=summary, description=about, **cli.WHOLE)
        benchmark.options(command)
        command.set_defaults(run=benchmark.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(parser(), argv)
