"""The command line: ``commpress demo``, ``doctor``, ``probe``, ``plan``, ``simulate`` and ``bench``."""

import argparse
import sys
from collections.abc import Sequence

DESCRIPTION = """\
Train over slow networks: gradients cross the wire in one bit instead of thirty-two.

  commpress demo                   see it: a small GPT trained three ways on 4 local processes (about 3 minutes)
  commpress doctor                 what works on this machine, and what to do about what does not
  commpress bench codec            how fast codecs are on this processor
  commpress bench allreduce        one compressed all-reduce against torch's own
  commpress bench alltoall         one all-to-all, flat and by way of nodes
  commpress bench io               how fast the tiered store reads and writes here, beside fio
  commpress bench train            a training step: which share of it waits for the network
  commpress plan                   what to use here and what it gains, or that nothing should be compressed
  commpress simulate               how long it would take on a cluster of up to thousands of ranks
  commpress probe                  how fast ranks reach each other inside a node and between nodes

'commpress probe' and all benchmarks but that of codecs start local processes, or run on several machines under a launcher:

  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commpress bench train
"""


def parser() -> argparse.ArgumentParser:
    from commpress.cli import (
        bench_allreduce,
        bench_alltoall,
        bench_codec,
        bench_io,
        bench_train,
        demo,
        doctor,
        plan,
        probe,
        simulate,
    )

    top = argparse.ArgumentParser(
        prog="commpress", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in {"demo": demo, "doctor": doctor, "probe": probe, "plan": plan, "simulate": simulate}.items():
        add(commands, name, command)
    about = "Measure; --check for CI, --json for programs, --plot for people."
    bench = commands.add_parser("bench", help="measure", description=about)
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    for module in (bench_codec, bench_allreduce, bench_alltoall, bench_io, bench_train):
        add(benches, module.__name__.rpartition("bench_")[2], module)
    return top


def add(commands, name: str, module) -> None:  # type: ignore[no-untyped-def]
    """A command is a module: its docstring is the help, ``options`` adds its options, ``run`` returns the exit status."""
    summary, _, rest = module.__doc__.partition("\n")
    command = commands.add_parser(
        name, help=summary, description=f"{summary}\n{rest}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.options(command)
    command.set_defaults(run=module.run)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(), argv)


def run(commands: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """The exit status of what ``argv`` asks for; errors of ours in one line."""
    from commpress.cli import harness
    from commpress.errors import CommpressError

    options = commands.parse_args(argv)
    try:
        harness.refuse_early(options)
        return options.run(options)
    except CommpressError as error:
        print(f"commpress: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
