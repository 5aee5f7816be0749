"""The benchmarks, and the command line that they make."""

import argparse
from collections.abc import Sequence

import changing_link
import codec_table
import convergence
import encoders
import expert_tiers
import faults
import fsdp
import gpu
import grids
import guard
import hierarchical
import kills
import local_loss
import local_speed
import loss
import observe
import optimizer
import pipeline
import plan
import powersgd
import scaling
import simulate
import trainer_fsdp
import weight_bytes
from commpress import cli

DESCRIPTION = """\
What developers of commpress measure; `commpress bench` has what users measure on their machines.

  python benchmarks fsdp --help                  what it measures, its columns and its options
  python benchmarks guard --check                exit status 1 unless its bars hold
  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks fsdp

All take --check, --json FILE and --plot FILE but faults, which enters its table into a page.
"""
BENCHMARKS = {
    "changing_link": changing_link,
    "codec_table": codec_table,
    "convergence": convergence,
    "encoders": encoders,
    "expert_tiers": expert_tiers,
    "faults": faults,
    "fsdp": fsdp,
    "gpu": gpu,
    "grids": grids,
    "guard": guard,
    "hierarchical": hierarchical,
    "kills": kills,
    "local_loss": local_loss,
    "local_speed": local_speed,
    "loss": loss,
    "observe": observe,
    "optimizer": optimizer,
    "pipeline": pipeline,
    "plan": plan,
    "powersgd": powersgd,
    "scaling": scaling,
    "simulate": simulate,
    "trainer_fsdp": trainer_fsdp,
    "weight_bytes": weight_bytes,
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = top.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name, benchmark in BENCHMARKS.items():
        cli.add(names, name, benchmark)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(parser(), argv)
