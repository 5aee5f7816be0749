"""The command line: ``commpress demo``, ``commpress faults``, ``commpress probe`` and ``commpress bench``."""

import argparse
import sys
from collections.abc import Sequence

DESCRIPTION = """\
Train over slow networks: gradients cross the wire in one bit instead of thirty-two.

  commpress demo                   see it: a small GPT trained three ways on 4 local processes (about 3 minutes)
  commpress doctor                 what works on this machine, and what to do about what does not
  commpress faults                 what survivors see when a rank dies, stalls or disagrees
  commpress bench codec            how fast codecs are on this processor
  commpress bench allreduce        one compressed all-reduce against torch's own
  commpress bench guard            what agreement costs on the backend "commpress"
  commpress bench hierarchical     the all-reduce in two levels against the flat one
  commpress bench io               how fast the tiered store reads and writes here, beside fio
  commpress bench train            a training step: which share of it waits for the network
  commpress bench powersgd         our PowerSGD against torch's
  commpress bench plan             whether a plan picks what is fastest here
  commpress bench simulate         how far off the simulator is here
  commpress plan                   what to use here and what it gains, or that nothing should be compressed
  commpress simulate               how long it would take on a cluster of up to thousands of ranks
  commpress probe                  how fast ranks reach each other inside a node and between nodes
  commpress bench optimizer        the arithmetic of the optimizers against torch's fused AdamW
  commpress bench convergence      final losses of the optimizers against Adam and LAMB, several seeds
  commpress bench loss             seconds to a target loss: plain, bf16, PowerSGD, 1-bit Adam, 0/1 Adam
  commpress bench observe          what watching a run costs
  commpress bench fsdp             a training step of a sharded model: time and bytes, plain and compressed

'commpress probe' and all benchmarks but that of codecs start local processes, or run on several machines under a launcher:

  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commpress bench train
"""


def parser() -> argparse.ArgumentParser:
    from commpress.cli import (
        bench_allreduce,
        bench_alltoall,
        bench_codec,
        bench_convergence,
        bench_fsdp,
        bench_guard,
        bench_hierarchical,
        bench_io,
        bench_loss,
        bench_observe,
        bench_optimizer,
        bench_plan,
        bench_powersgd,
        bench_simulate,
        bench_train,
        demo,
        doctor,
        faults,
        plan,
        probe,
        simulate,
    )

    top = argparse.ArgumentParser(
        prog="commpress", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(commands, "demo", demo)
    _add(commands, "doctor", doctor)
    _add(commands, "faults", faults)
    _add(commands, "probe", probe)
    _add(commands, "plan", plan)
    _add(commands, "simulate", simulate)
    about = "Measure; --check for CI, --json for programs, --plot for people."
    bench = commands.add_parser("bench", help="measure", description=about)
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    _add(benches, "codec", bench_codec)
    _add(benches, "allreduce", bench_allreduce)
    _add(benches, "alltoall", bench_alltoall)
    _add(benches, "guard", bench_guard)
    _add(benches, "hierarchical", bench_hierarchical)
    _add(benches, "io", bench_io)
    _add(benches, "train", bench_train)
    _add(benches, "powersgd", bench_powersgd)
    _add(benches, "plan", bench_plan)
    _add(benches, "simulate", bench_simulate)
    _add(benches, "optimizer", bench_optimizer)
    _add(benches, "convergence", bench_convergence)
    _add(benches, "loss", bench_loss)
    _add(benches, "fsdp", bench_fsdp)
    _add(benches, "observe", bench_observe)
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
    from commpress.cli import outputs
    from commpress.errors import CommpressError

    options = parser().parse_args(argv)
    try:
        outputs.refuse_early(options)
        return options.run(options)
    except CommpressError as error:
        print(f"commpress: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
