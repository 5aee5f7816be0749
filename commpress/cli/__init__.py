"""The command line: ``commpress demo`` and ``commpress bench``."""

import argparse
import sys
from collections.abc import Sequence

DESCRIPTION = """\
Train over slow networks: gradients cross the wire in one bit instead of thirty-two.

  commpress demo                   see it: a small GPT trained three ways on 4 local processes (about 3 minutes)
  commpress bench codec            how fast codecs are on this processor
  commpress bench allreduce        one compressed all-reduce against torch's own
  commpress bench train            a training step: which share of it waits for the network

'commpress bench allreduce' and 'commpress bench train' start local processes, or run on several machines under a launcher:

  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commpress bench train
"""


def parser() -> argparse.ArgumentParser:
    from commpress.cli import bench_allreduce, bench_codec, bench_train, demo

    top = argparse.ArgumentParser(
        prog="commpress", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(commands, "demo", demo)
    bench = commands.add_parser("bench", help="measure", description="Measure; --json for programs, --check for CI.")
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    _add(benches, "codec", bench_codec)
    _add(benches, "allreduce", bench_allreduce)
    _add(benches, "train", bench_train)
    return top


def _add(commands, name: str, module) -> None:  # type: ignore[no-untyped-def]
    """A command is a module: its docstring is the help, ``options`` adds its options, ``run`` returns the exit status."""
    summary, _, rest = module.__doc__.partition("\n")
    command = commands.add_parser(
        name, help=summary, description=f"{summary}\n{rest}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.options(command)
    command.set_defaults(run=module.run)


def main(argv: Sequence[str] | None = None) -> int:
    from commpress.errors import CommpressError

    options = parser().parse_args(argv)
    try:
        return options.run(options)
    except CommpressError as error:
        print(f"commpress: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
