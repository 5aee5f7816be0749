"""The commands: the words, the help and the options of each, and the module that runs it.

A command is a function here: its docstring is the help, its body adds the options, and ``runs``
names a module whose function ``run(options)`` returns the exit status. That module is loaded when
the command runs: help loads no torch.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

from commpress.cli import option_groups
from commpress.cli.fault_schedule import check_kinds
from commpress.cli.hosts import parse_delay, parse_rate
from commpress.cli.option_groups import (
    at_least,
    byte_counts,
    checked,
    counts,
    folder,
    from_,
    positive,
    readable,
    shared_width,
    told,
    word,
)
from commpress.units import parse_bytes, parse_link, parse_memory, parse_rates

SEE, LOOK, PREDICT, MEASURE, BREAK = "See it", "Look at machines", "Predict", "Measure", "Break it"
COME = "Come from elsewhere"
WEIGHTS = "Weights at their readers"
Options = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """Two words are a command below a command: ``bench codec``."""

    words: str
    group: str
    runs: str
    options: Options
    # a sign of life is shown while it runs; False: it shows how far it is itself
    spins: bool = True

    @property
    def help(self) -> str:
        return cleandoc(self.options.__doc__ or "")

    @property
    def summary(self) -> str:
        return self.help.partition("\n")[0]


COMMANDS: list[Command] = []  # in the order in which help shows them


def command(
    words: str, group: str, *, runs: str, spins: bool = True
) -> Callable[[Options], Options]:
    """Register the decorated function as a command."""

    def register(options: Options) -> Options:
        COMMANDS.append(Command(words, group, runs, options, spins))
        return options

    return register


# ---------------------------------------------------------------- see it


@command("demo", SEE, runs="commpress.cli.demo", spins=False)
def demo(parser: argparse.ArgumentParser) -> None:
    """train a GPT over a slow network in ten ways, each for the same time

    Two hosts (network namespaces with links of 100 Mbit/s; root is not needed where users may have
    namespaces) train a GPT of 5.5 M parameters on the source of Python's standard library. The ways
    take turns, each from the same start and on the same data, and each for the same time:
      no-network       DistributedDataParallel with links that have no limit: the floor
      plain            DistributedDataParallel as it is
      bf16             torch's bf16_compress_hook
      torch-powersgd4  torch's powerSGD_hook, rank 4; also torch-powersgd1 and 2
      diloco           30 steps alone, then one exchange in float32
      int8             commpress.compress(ddp, "int8")
      sign             commpress.compress(ddp, "sign"), int8 for the output layer
      zero-one         commpress.ZeroOneAdam
      powersgd-4       commpress.compress(ddp, "powersgd-4")
      local            commpress.LocalUpdates(optimizer): exchanges hide behind computing
    and ends with a table, the lowest loss first, and a picture: loss against seconds. Learning
    rates were searched for each way (--search). Kernels are compiled before a clock starts.

      commpress demo                                  about 10 minutes on 2 cores
      commpress demo --quick                          3 minutes
      commpress demo --rate 1gbit --ways plain,bf16,int8,zero-one --out gigabit.svg
      commpress demo --ways plain,sign --steps 500 --network loopback --error-feedback none
                                                      what is lost if what a bit leaves out is
                                                      thrown away
      commpress demo --search                         how learning rates were found: half an hour
    """
    add = parser.add_argument
    ways = "no-network,plain,bf16,torch-powersgd4,diloco,int8,sign,zero-one,powersgd-4,local"
    add(
        "--ways",
        type=word("contenders"),
        default=ways,
        metavar="A,B",
        help=f"these, or any codec of commpress (default {ways})",
    )
    add("--quick", action="store_true", help="10 seconds for each way")
    add("--seconds", type=positive, default=0.0, metavar="S", help="for each way (default 50)")
    add("--steps", type=at_least(0), default=0, metavar="N", help="of each way, instead of seconds")
    add(
        "--rate",
        type=told(parse_rate),
        default=1e8,
        metavar="RATE",
        help="of each link, as 100mbit (default 100mbit)",
    )
    add(
        "--network",
        choices=("auto", "hosts", "paced", "loopback"),
        default="auto",
        help=(
            "hosts; paced: connections that the kernel slows down; loopback: no slow network "
            "(default hosts, else paced)"
        ),
    )
    add(
        "--ranks",
        type=at_least(2),
        default=2,
        metavar="N",
        help="hosts, a process of one thread on each (default 2)",
    )
    add(
        "--lr",
        type=checked(parse_rates),
        metavar="X",
        help="peak learning rate of all ways (default: what was searched for each)",
    )
    add(
        "--search",
        action="store_true",
        help="try several rates for each way, over the steps that it does in the time",
    )
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches (default 0)")
    add(
        "--seeds",
        type=at_least(1),
        default=1,
        metavar="N",
        help="repeat with so many seeds (default 1)",
    )
    add(
        "--out",
        default="",
        metavar="FILE",
        help="the picture: .svg, or .png and .pdf with matplotlib (default demo.svg)",
    )
    add("--json", metavar="FILE", help="everything measured")
    group = parser.add_argument_group("model and data")
    group.add_argument(
        "--width", type=shared_width, default=384, metavar="N", help="of the model (default 384)"
    )
    group.add_argument(
        "--layers",
        type=at_least(1, 1 << 10),
        default=3,
        metavar="N",
        help="of the model (default 3)",
    )
    group.add_argument(
        "--length",
        type=at_least(1, 1 << 16),
        default=64,
        metavar="N",
        help="bytes of text in a window (default 64)",
    )
    group.add_argument(
        "--batch",
        type=at_least(1, 1 << 16),
        default=8,
        metavar="N",
        help="windows per rank and step (default 8)",
    )
    group = parser.add_argument_group("ways that are a codec")
    group.add_argument(
        "--head-codec",
        type=word("codec"),
        default="int8",
        metavar="NAME",
        help="of the output layer (default int8)",
    )
    group.add_argument(
        "--error-feedback",
        choices=("kept", "none"),
        default="kept",
        help="what compression leaves out: kept and sent later (default), or none",
    )
    group.add_argument(
        "--min-numel",
        type=at_least(0),
        default=256,
        metavar="N",
        help="smaller tensors travel exactly (default 256)",
    )
    group.add_argument(
        "--exact-steps",
        type=at_least(0),
        default=0,
        metavar="N",
        help="first steps that travel exactly (default 0)",
    )


# ---------------------------------------------------------------- look at machines


@command("doctor", LOOK, runs="commpress.cli.doctor", spins=False)
def doctor(parser: argparse.ArgumentParser) -> None:
    """what works on this machine, and what to do about what does not

    One line for each finding, with a cure where there is one. "note": works without it, or more
    slowly; "bad": something commpress needs does not work. Exit status 1 if anything is bad, for
    scripts.

      commpress doctor                          everything, with the current directory's disk
      commpress doctor --directory /nvme/run1   another disk
      commpress doctor --only torch,network     some sections: torch, backends, MPI, GPU, NUMA,
                                                memory, disks, network, clocks
      commpress doctor --json findings.json     for programs
      commpress doctor --report                 to paste into a bug report: versions, builds,
                                                devices, no addresses
    """
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="D",
        help="on the disk to look at (default .)",
    )
    parser.add_argument(
        "--only", type=option_groups.sections, metavar="A,B", help="sections; default all"
    )
    parser.add_argument(
        "--report", action="store_true", help="print what a bug report needs instead"
    )
    parser.add_argument("--json", metavar="FILE", help="all findings")


@command("probe", LOOK, runs="commpress.cli.probe", spins=False)
def probe(parser: argparse.ArgumentParser) -> None:
    """how fast ranks reach each other, in pairs and all at once

    Runs the exchanges that collectives are made of: of two ranks alone while the others wait, and
    of all at once; and all-reduces of growing size, flat and by way of nodes. Which ranks share a
    node is what the launcher says, or --topology. The file tells collectives whether the
    hierarchical all-reduce pays at a size; docs/hierarchy.md describes it.

      commpress probe --ranks 4 --topology 2x2            4 local processes, as if on two nodes
      commpress probe --ranks 4 --pairs --plot pairs.svg  every pair, and a picture of it
      torchrun --nnodes 2 --nproc-per-node 8 ... --no-python commpress probe --out links.json
    """
    option_groups.add_topology(parser)
    add = parser.add_argument
    add(
        "--bytes",
        type=option_groups.large,
        default="4MiB",
        metavar="SIZE",
        help="of a large row (default 4MiB)",
    )
    add(
        "--rounds",
        type=at_least(1),
        default=5,
        metavar="N",
        help="of each measurement, the median counts (default 5)",
    )
    option_groups.add_ranks(parser)
    add(
        "--pairs",
        action="store_true",
        help="every pair of ranks, as a matrix; without it a few of each kind",
    )
    add("--out", default="links.json", metavar="FILE", help="where to save it (default links.json)")
    add("--plot", metavar="FILE", help="the matrix as a picture, .svg (takes --pairs with it)")
    add("--json", metavar="FILE", help="every pair (takes --pairs with it)")
    parser.set_defaults(draws_itself=True)  # without matplotlib


# ---------------------------------------------------------------- predict


@command("plan", PREDICT, runs="commpress.cli.plan")
def plan(parser: argparse.ArgumentParser) -> None:
    """what to use on given machines and links and what it gains

    Simulates a training step for each candidate (docs/simulator.md), counts its bytes and its
    memory on every tier, and ranks them. Candidates: no compression, torch's bf16 hook, codecs
    under DDP in one or two levels, 1-bit and 0/1 Adam, local updates, ZeRO stages, optimizer states
    on the host or on disk. It advises no compression, int8 or int4; --allow sign,powersgd-4,local
    lets it choose what may change the loss, too. Local updates must save a quarter of a step to be
    advised. Of the ways that a file can name it writes the best one:

      state = commpress.compress(ddp, plan="plan.json")  DDP; "plain" in the file means: torch's
                                                         own all-reduce
      Trainer(..., callbacks=[commpress.hf.Compress(plan="plan.json")])
      dist.init_process_group("commpress")               with COMMPRESS_GROUP_OPTIONS=plan.json

    --compute-ms is the step of one rank without communication, as "compute" of commpress bench
    train says it. With --gradients (a file that torch.save made of {parameter name: gradient})
    every layer gets a codec of its own: the fewest bytes at an error no larger than --uniform would
    make on these gradients.

      commpress plan --parameters 110M --nodes 4x1 --link 1gbit,100us --compute-ms 300
      commpress plan --model mymodels:make_gpt --nodes 8x8 --link 25gbit,10us \\
          --device 900GB/s --compute-ms 250
      commpress plan --config config.json --links links.json --compute-ms 800 \\
          --out plan.json --plot plan.png
      commpress plan --parameters 1.5B --nodes 4x1 --compute-ms 900 \\
          --memory device=24GiB,host=64GiB
      commpress plan --model mymodels:make_gpt --gradients grads.pt --nodes 4x1 --compute-ms 300

    A coarser way must be 3 % faster than a finer one to be chosen. Predictions are as good as the
    description of the machines: docs/planning.md compares them with measurements.

    With --mesh it lists every grid of data, tensor, pipeline, sequence and expert parallelism
    instead, with the order of ranks that keeps the heaviest traffic on the fastest links, and
    prints the mesh to copy (docs/planning.md). --pairs takes what commpress probe --pairs --json
    measured.

      commpress plan --mesh --parameters 1.5B --nodes 4x2 --link 10gbit,20us \\
          --compute-ms 900 --memory device=24GiB
      commpress plan --mesh --config config.json --pairs pairs.json \\
          --compute-ms 300 --dims dp=int4,pp=int8
    """
    option_groups.add_cluster(parser)
    option_groups.add_model(parser)
    option_groups.add_mesh(parser)
    ways = "plain,bf16-ring,int8,int4,sign,powersgd-4"
    parser.add_argument(
        "--ways", metavar="A,B", help=f"codecs to choose from (default {ways}; see --allow)"
    )
    parser.add_argument(
        "--allow", default="", metavar="A,B", help="choose these, too: codecs such as sign, local"
    )
    parser.add_argument(
        "--memory",
        type=told(parse_memory),
        default="",
        metavar="T=SIZE,…",
        help="of one rank, as device=24GiB,host=64GiB (default: any)",
    )
    parser.add_argument(
        "--host-rate",
        type=checked(parse_link),
        default="12GB/s",
        metavar="RATE",
        help="between device and host (default 12GB/s)",
    )
    parser.add_argument(
        "--disk-rate",
        type=checked(parse_link),
        default="2GB/s",
        metavar="RATE",
        help="between host and disk (default 2GB/s)",
    )
    parser.add_argument(
        "--gradients",
        type=readable("what torch.save wrote"),
        metavar="FILE",
        help="measured ones, for a codec of its own for every layer",
    )
    parser.add_argument(
        "--uniform",
        default="int4",
        metavar="CODEC",
        help="whose error bounds that choice (default int4)",
    )
    parser.add_argument(
        "--calls",
        action="store_true",
        help="the call of every candidate, not only of the advised one",
    )
    parser.add_argument(
        "--out",
        default="plan.json",
        metavar="FILE",
        help="where to write the plan (default plan.json)",
    )
    option_groups.add_output(parser)


@command("simulate", PREDICT, runs="commpress.cli.simulate")
def simulate(parser: argparse.ArgumentParser) -> None:
    """time of training steps on a cluster that you describe

    Runs the same generators that production runs, on simulated time: links with a rate and a
    latency, kernels with the seconds per element that this processor takes (or a device of a memory
    bandwidth), cores that ranks share. Messages and bytes are counted, not computed from a formula.
    docs/simulator.md says what is modelled, what is not, and how far off it was.

    One all-reduce, or with --parameters, --model or --config a training step under DDP. Ways to
    reduce:
      plain, bf16-ring   the ring of a library, float32 and bfloat16
      sign, int8, ...    commpress with that codec; powersgd-4 in a training step
      local:CODEC:H:N    local updates in rounds of H steps (default 30), N of them under way
                         (default 0): means of a step
    With --layered every codec is also run in two levels: exact sums inside a node, compressed
    between nodes ("sign/2").

      commpress simulate --nodes 4x1 --link 1gbit,100us --bytes 32MiB
      commpress simulate --nodes 8x8 --link 25gbit,10us --device 900GB/s --parameters 340M \\
          --compute-ms 250 --layered
      commpress simulate --nodes 512x8 --link 100gbit,5us --device 2TB/s \\
          --scaling 1,8,64,512 --plot scaling.png
      commpress simulate --nodes 4x8,4x8 --link 200gbit,3us --link 25gbit,10us \\
          --foreign 25gbit --device 2TB/s
      commpress simulate --nodes 4x1 --link 100mbit,20ms --parameters 11M --compute-ms 60 \\
          --ways plain,sign,local:bits2:30:10
      commpress simulate --nodes 8x1 --straggler 1.5 --rack 4 --oversubscription 4 \\
          --parameters 110M --compute-ms 300
      commpress simulate --nodes 4x8 --link 25gbit,5us --device 2TB/s --config config.json \\
          --compute-ms 900 --grid pp2,dp4,tp4

    With --grid: a step under data, tensor, pipeline, sequence and expert parallelism, gradients
    averaged by each of the ways; exposed is that averaging.

    A row: seconds of the call or step; exposed is what a step takes longer than computing alone; MB
    that one rank sends, and of them those that leave its node (of the rank that sends most);
    against plain.
    """
    parser.add_argument(
        "--ways",
        default="plain,bf16-ring,int8,int4,sign",
        metavar="A,B",
        help="default %(default)s",
    )
    parser.add_argument("--layered", action="store_true", help="also every codec in two levels")
    parser.add_argument(
        "--bytes",
        type=checked(parse_bytes),
        default="32MiB",
        metavar="SIZE",
        help="of float32 in one all-reduce (default 32MiB)",
    )
    parser.add_argument(
        "--scaling",
        type=counts,
        metavar="A,B",
        help="numbers of nodes of the first kind, one after the other",
    )
    parser.add_argument(
        "--grid",
        type=word("grid"),
        metavar="P",
        help="of parallelism, as pp2,dp4,tp4: ranks of each kind",
    )
    option_groups.add_batch(parser.add_argument_group("grids"))
    option_groups.add_cluster(parser)
    option_groups.add_model(parser)
    option_groups.add_output(parser)


# ---------------------------------------------------------------- break it


@command("chaos", BREAK, runs="commpress.cli.chaos", spins=False)
def chaos(parser: argparse.ArgumentParser) -> None:
    """kill, stop, slow and cut off ranks of a run: what it costs

    Starts COMMAND as several processes with torchrun's variables, does harm to them, and starts
    again what has ended. COMMAND is a loop under commpress.elastic, which writes what it commits to
    the file named in COMMPRESS_EVENTS. Without a COMMAND it is a small model whose computing is
    slept, so that starting Python again does not take the survivors' cores into the figures.

      commpress chaos
          two minutes of the small model
      commpress chaos --seconds 3600 --faults kill,stop -- python train.py
          an hour, 125 faults
      commpress chaos --hosts --rate 1gbit --faults kill,cut -- python train.py
          each rank on a host of its own
      commpress chaos --schedule faults.txt --check -- python train.py
          the same faults each time, for CI

    A line of a schedule: SECONDS kill|stop|slow|cut RANK|launcher [for SECONDS] [all|half|bulk]

      20 kill 1            # SIGKILL; started again --restart-after seconds later, to join others
      40 stop 0 for 5      # SIGSTOP, then SIGCONT
      60 slow 2 for 10     # runs a fifth of the time
      80 cut 3 for 8 bulk  # with --hosts: packets over 600 bytes are lost; half: every second one;
                             all
      99 kill launcher     # the process that holds the store, as torchrun's agent does

    Goodput: committed steps per second, as a share of those before the first fault. Participation:
    ranks that took part in a step. Pause: what survivors waited longer than usual for the next
    committed step. Nothing that was started stays, however this ends.
    """
    add = parser.add_argument
    add(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="what each process runs (default: a small model that sleeps)",
    )
    add("--ranks", type=at_least(2), default=4, metavar="N", help="processes (default 4)")
    add(
        "--seconds",
        type=positive,
        default=120.0,
        metavar="S",
        help="of training in which faults are made (default 120)",
    )
    add(
        "--faults-per-hour",
        type=from_(0),
        default=125.0,
        metavar="N",
        help="on average, at random times (default 125)",
    )
    add(
        "--faults",
        type=checked(check_kinds),
        default="kill",
        metavar="KINDS",
        help="some of kill,stop,slow,cut (default kill); cut needs --hosts",
    )
    add("--schedule", metavar="FILE", help="faults of a file instead of random ones")
    add("--seed", type=int, default=0, metavar="N", help="of the random ones (default 0)")
    add(
        "--calm",
        type=from_(0),
        default=10.0,
        metavar="S",
        help="before faults: what goodput is compared with (default 10)",
    )
    add(
        "--restart-after",
        type=from_(0),
        default=1.0,
        metavar="S",
        help="until an ended process starts again (default 1)",
    )
    add("--no-restart", action="store_true", help="what has ended stays away")
    add(
        "--patience",
        type=positive,
        default=60.0,
        metavar="S",
        help="without a committed step: the run hangs (default 60)",
    )
    add(
        "--hosts",
        action="store_true",
        help="each rank on a host of its own: network namespaces (root or user namespaces)",
    )
    add(
        "--rate",
        type=told(parse_rate),
        metavar="RATE",
        help="of each host's link, as 100mbit (default: unshaped)",
    )
    add(
        "--delay",
        type=told(parse_delay),
        default=0.0,
        metavar="TIME",
        help="of each host's link, as 5ms (default none)",
    )
    add(
        "--step-seconds",
        type=positive,
        default=0.25,
        metavar="S",
        help="that a step of the small model sleeps (default 0.25)",
    )
    add(
        "--hash-every",
        type=at_least(0),
        default=1,
        metavar="N",
        help="steps from one comparison of weights to the next (default 1)",
    )
    add("--logs", metavar="FOLDER", help="keep output and events of the processes here")
    add("--json", metavar="FILE", help="figures, faults and pauses, with settings and versions")
    add("--check", action="store_true", help="exit status 1 unless the bars below hold as well")
    bar = parser.add_argument_group("bars")
    bar.add_argument(
        "--min-goodput", type=from_(0), default=90.0, metavar="PERCENT", help="default 90"
    )
    bar.add_argument(
        "--min-participation", type=from_(0), default=80.0, metavar="PERCENT", help="default 80"
    )
    bar.add_argument("--median-pause", type=from_(0), default=2.5, metavar="S", help="default 2.5")
    bar.add_argument("--longest-pause", type=from_(0), default=30.0, metavar="S", help="default 30")
    bar.add_argument(
        "--longest-healing",
        type=from_(0),
        default=20.0,
        metavar="S",
        help="new start to first step (default 20)",
    )


# ---------------------------------------------------------------- measure


@command("bench codec", MEASURE, runs="commpress.cli.bench_codec")
def bench_codec(parser: argparse.ArgumentParser) -> None:
    """speed of codecs on this processor, and a check of their bytes

    Every codec at every number of threads:
      encode     x + residual to bytes and a new residual: into a second buffer as the DDP hook
                 does, and in place
      decode     bytes to float32
      mean       the mean of 4 ranks' rows
      serve      the same mean, plus residual, encoded again: what an owner does with the rows it
                 received
    in GB/s of float32. A copy of the same floats is timed between the repetitions; "of copy"
    compares bytes moved per second: encode moves 12 + bits/8 bytes per element, a copy 8.

      commpress bench codec                            all codecs on 1 and 2 threads, about a minute
      commpress bench codec --codec sign --check       exit status 1 if the sign codec misses a bar
    """
    parser.add_argument("--codec", type=word("timed"), metavar="A,B", help="default all")
    parser.add_argument(
        "--numel",
        type=at_least(64),
        default=1 << 25,
        metavar="N",
        help="floats in the buffer (default 33554432)",
    )
    parser.add_argument(
        "--threads",
        type=counts,
        default="1,2",
        metavar="A,B",
        help="numbers of threads (default 1,2)",
    )
    option_groups.add_output(parser, check="the sign codec holds its bars")


@command("bench allreduce", MEASURE, runs="commpress.cli.bench_allreduce")
def bench_allreduce(parser: argparse.ArgumentParser) -> None:
    """one compressed all-reduce against torch's

    Averages of float32. The columns of nccl-tests come first. Both all-reduces run alternately, so
    that other traffic slows both.
      us, algbw, busbw   of the compressed one: microseconds, and GB/s as if it were an all-reduce
                         of float32: algbw = size / time, busbw = algbw * 2(n-1)/n
      #wrong             elements whose bits differ between ranks
      wire               bytes one rank sent, headers included; ratio: against a float32 ring
      error              of one all-reduce against the exact mean, relative; kept: the
                         residuals after all
      fp32 us, faster    time of torch's all_reduce, and how many times longer it takes
    It runs what the DDP hook runs: the same messages, kernels, transport and error feedback.

      commpress bench allreduce                                      4 local processes
      commpress bench allreduce --codec int8 --min-bytes 64KiB
      torchrun --nproc-per-node 2 --no-python commpress bench allreduce --check
    """
    parser.add_argument(
        "--codec", type=word("row_codec"), default="sign", metavar="NAME", help="default sign"
    )
    option_groups.add_sizes(parser, "1MiB", "32MiB")
    parser.add_argument(
        "--iterations",
        type=at_least(1),
        default=10,
        metavar="N",
        help="timed, of each size (default 10)",
    )
    parser.add_argument(
        "--warmup",
        type=at_least(0),
        default=2,
        metavar="N",
        help="not timed, of each size (default 2)",
    )
    option_groups.add_ranks(parser)
    check = (
        "ranks agree bit for bit, error feedback loses nothing and codecs err in the right order"
    )
    option_groups.add_output(parser, check=check)


@command("bench alltoall", MEASURE, runs="commpress.cli.bench_alltoall")
def bench_alltoall(parser: argparse.ArgumentParser) -> None:
    """one all-to-all, flat and by way of nodes, against torch's or MPI's

    All run interleaved, so that a network's moods hit them alike; times are medians over rounds of
    the slowest rank's.
      size, block          bytes that one rank sends in all, and to each rank
      flat, inside-first,
      between-first        time of each route; the last two need --nodes. With --codec, encoding and
                           decoding included
      rival                time of torch's all_to_all_single on float32; with --mpi of MPI's
                           blocking Alltoall on the same bytes
      flat x               how many times longer the rival takes than flat
      nodes x              how many times longer flat takes than the faster route by way of nodes:
                           above 1 they pay
      messages             that leave rank 0 for other nodes, flat and by the first way of nodes
    Every result is compared with the rival's, bit for bit if nothing is compressed.

      commpress bench alltoall                                              4 local processes
      commpress bench alltoall --ranks 8 --nodes 2x4 --min-bytes 8KiB --max-bytes 8MiB
      mpirun -n 4 commpress bench alltoall --mpi --check                    over MPI
    """
    parser.add_argument(
        "--codec",
        type=word("exchanged_codec"),
        default="none",
        metavar="NAME",
        help="none, bf16, fp8, int8, int4 (default none)",
    )
    parser.add_argument(
        "--nodes",
        type=word("nodes"),
        metavar="NxM",
        help="which ranks share a node: 2x4, 4,4,3 or '0 2|1 3'",
    )
    option_groups.add_sizes(parser, "256KiB", "16MiB", factor=4)
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, metavar="N", help="of 3 calls of each (default 5)"
    )
    parser.add_argument("--mpi", action="store_true", help="over MPI instead of Gloo; needs mpirun")
    option_groups.add_ranks(parser)
    check = (
        "all routes deliver what the rival delivers: in every bit, or within the codec's error; "
        "over MPI at 9/10 its speed"
    )
    option_groups.add_output(parser, check=check)


@command("bench experts", MEASURE, runs="commpress.cli.bench_experts")
def bench_experts(parser: argparse.ArgumentParser) -> None:
    """dispatch to experts and back, against torch's all_to_all_single

    Tokens go to k experts each and come back as sums, experts doing nothing; all ways run
    interleaved. One line per k:
      torch f32, torch bf16   milliseconds, medians of the slowest rank's: copies sorted by rank,
                              all_to_all_single of counts, there and back, gates and sums
      flat, nodes             ExpertExchange with routing, dispatch and combine; once to every rank,
                              once to every node
      int8, auto              by way of nodes: int8 out and back; the codec that it measured
      x nodes, x int8, ...    how many times longer torch takes in float32
      took                    the codec that auto took
      node B, formula         bytes that left nodes in one call, by way of nodes; as a share of
                              Σ tokens · other nodes
      wrong                   elements that differ from torch's beyond rounding
    Tokens lie around 64 centres and choose at random, or are those that a trained layer saw
    (--states).

      commpress bench experts --topology 2x2 --check
      torchrun --nproc-per-node 1 examples/moe_gpt.py --topology 1x1 --width 1024 --layers 1 \\
          --experts 16 --states states.pt
      commpress bench experts --topology 2x2 --states states.pt
      torchrun --nnodes 2 --nproc-per-node 2 ... -m commpress bench experts --topology auto \\
          --slow --check
    """
    option_groups.add_topology(parser)
    parser.add_argument(
        "--k", type=counts, default="2,8", metavar="A,B", help="experts of a token (default 2,8)"
    )
    parser.add_argument(
        "--tokens", type=at_least(1), default=1024, metavar="N", help="of each rank (default 1024)"
    )
    parser.add_argument(
        "--width", type=at_least(1), default=1024, metavar="D", help="of a token (default 1024)"
    )
    parser.add_argument(
        "--experts", type=at_least(1), default=16, metavar="E", help="of all ranks (default 16)"
    )
    parser.add_argument(
        "--states",
        type=readable("what examples/moe_gpt.py --states FILE saved"),
        metavar="FILE",
        help="tokens and a gate that examples/moe_gpt.py saved",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, metavar="N", help="timed (default 5)"
    )
    parser.add_argument(
        "--slow",
        action="store_true",
        help="links between nodes are slow: hold speeds to their bars, too",
    )
    option_groups.add_ranks(parser)
    check = (
        "results are torch's and bytes between nodes the formula within 1 %; with --slow speeds, "
        "too"
    )
    option_groups.add_output(parser, check=check)


@command("bench io", MEASURE, runs="commpress.cli.bench_io", spins=False)
def bench_io(parser: argparse.ArgumentParser) -> None:
    """speed of the tiered store, reading and writing here, beside fio

    Through the store's own calls, checksums on, with a depth of 4 unless said otherwise, for chunks
    of several sizes:
      write   flush: tensors that are newer in memory go to disk
      read    prefetch: tensors on disk come back and are verified
    "engine" is the same transfers without the store, from as few buffers as fio has: one for each
    transfer at once, which stay in the processor's cache while they are small; "bare" is the engine
    without checksums from as much memory as the tensors have: what memory and disk allow. "fio" is
    the best of its engines io_uring, libaio and psync, at the same depth, if fio is installed;
    "huge" is its io_uring with buffers in huge pages, as the store's memory is (where
    vm.nr_hugepages sets some aside); "cold" is its io_uring with a buffer for every chunk, as
    tensors have, and so at a greater depth. All use the same stretch of a file, interleaved;
    medians.

      commpress bench io                                    in the current directory, one minute
      commpress bench io --directory /nvme/tmp --size 2GiB  elsewhere, more bytes
      commpress bench io --engine io_uring --check          exit status 1 if the store is below
                                                            95 % of fio
      commpress bench io --deepspeed                        DeepSpeed's aio handle interleaved with
                                                            all this, as it comes
    """
    parser.add_argument(
        "--directory",
        type=folder,
        default=Path(),
        metavar="D",
        help="on the disk to measure (default .)",
    )
    parser.add_argument(
        "--chunks",
        type=byte_counts,
        default="1MiB,4MiB,16MiB,64MiB",
        metavar="A,B",
        help="default 1MiB,4MiB,16MiB,64MiB",
    )
    parser.add_argument(
        "--size",
        type=checked(parse_bytes),
        default="512MiB",
        help="bytes written and read per figure (default 512MiB)",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, metavar="N", help="of everything (default 5)"
    )
    parser.add_argument(
        "--depth", type=at_least(1), default=4, metavar="N", help="transfers at once (default 4)"
    )
    parser.add_argument(
        "--engine",
        type=word("engine"),
        default="auto",
        help="auto (default), threads, io_uring, libaio or aiofiles",
    )
    parser.add_argument("--no-fio", action="store_true", help="do not run fio")
    parser.add_argument(
        "--deepspeed",
        action="store_true",
        help="run DeepSpeed's aio handle too, which must be installed",
    )
    option_groups.add_output(parser, check="the store reaches 95 % of fio")


@command("bench train", MEASURE, runs="commpress.cli.bench_train")
def bench_train(parser: argparse.ArgumentParser) -> None:
    """which share of a training step waits for the network

    Trains a GPT of 10.9 M parameters under DistributedDataParallel, once in each way, in rounds of
    a few steps, so that moods of machine and network hit all alike.
      compute     no communication: what the others would take on an infinitely fast network
      plain       torch's all-reduce of float32
      hook        the same, by a hook of torch in Python
      bf16        torch's bf16_compress_hook
      powersgdN   torch's PowerSGD hook of rank N
      sign, ...   commpress with that codec
      auto        commpress, after the trial has chosen one
    "exposed" is what a step takes longer than compute: communication and compression that backward
    does not hide.

      commpress bench train                 4 local processes: loopback, faster than networks
      torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --no-python \\
          commpress bench train --check
      commpress bench train --ways compute,plain,int8,sign --bucket-mb 25 sign=4
    """
    usual = "compute,plain,bf16,powersgd1,sign"
    parser.add_argument(
        "--ways",
        type=word("variants_of"),
        default=usual,
        metavar="A,B",
        help=f"default {usual}; compute is always measured",
    )
    says = "DDP's buckets: MB for all, way=MB for one (default 25)"
    parser.add_argument("--bucket-mb", nargs="+", default=["25"], metavar="MB", help=says)
    option_groups.add_measuring(
        parser,
        rounds=5,
        steps=4,
        batch=4,
        check="sign exposes at most half of what powersgd1 does and its step is at most 1.3 of "
        "compute, if both run; "
        "auto is as fast as plain within 2 % and as the fastest within 5 %",
    )


# ---------------------------------------------------------------- weights at their readers


@command("weights serve", WEIGHTS, runs="commpress.cli.weight_copies", spins=False)
def weights_serve(parser: argparse.ArgumentParser) -> None:
    """let readers have the versions in a folder over HTTP

    The folder is one that a commpress.weights.Publisher writes to, or a copy of one. Readers take
    Receiver("http://HOST:PORT"). Except on this machine, both sides need the same
    COMMPRESS_RUN_KEY: it is never sent, and nothing is encrypted.

      commpress weights serve /shared/run1        to this machine, port 9500
      COMMPRESS_RUN_KEY_FILE=key commpress weights serve /shared/run1 --host 0.0.0.0
    """
    parser.set_defaults(action="serve")
    parser.add_argument("folder", metavar="FOLDER", help="of published versions")
    parser.add_argument(
        "--port",
        type=at_least(0),
        default=9500,
        metavar="N",
        help="default 9500; 0 takes a free one",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on (default 127.0.0.1)"
    )


@command("weights pull", WEIGHTS, runs="commpress.cli.weight_copies", spins=False)
def weights_pull(parser: argparse.ArgumentParser) -> None:
    """copy new versions into a folder

    The copy is published weights itself: readers and further copies may take it as their source, so
    a slow link is crossed once for all of them. It may be interrupted at any byte and goes on when
    it is called again.

      commpress weights pull http://trainer:9500 /data/run1                once
      commpress weights pull http://trainer:9500 /data/run1 --serve 9500   and for others, on and on
      commpress weights pull http://trainer:9500 /data/run1 --safetensors model.safetensors
    """
    parser.set_defaults(action="pull")
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder, http://HOST:PORT or a URL of fsspec"
    )
    parser.add_argument("folder", metavar="FOLDER", help="of the copy")
    parser.add_argument("--follow", action="store_true", help="go on with every new version")
    parser.add_argument(
        "--serve", type=at_least(0), metavar="N", help="follow, and serve the copy at this port"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to serve on (default 127.0.0.1)"
    )
    parser.add_argument(
        "--safetensors", metavar="FILE", help="write the newest version as one file, too"
    )
    parser.add_argument(
        "--limit",
        type=checked(parse_bytes),
        default="64GiB",
        metavar="SIZE",
        help="of its weights in memory (default 64GiB)",
    )


@command("weights verify", WEIGHTS, runs="commpress.cli.weight_copies", spins=False)
def weights_verify(parser: argparse.ArgumentParser) -> None:
    """read every byte of every version, and rebuild its weights

    Ends with exit status 2 and a sentence where anything is missing, changed or does not follow.

      commpress weights verify /shared/run1
      commpress weights verify http://trainer:9500
    """
    parser.set_defaults(action="verify")
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder, http://HOST:PORT or a URL of fsspec"
    )
    parser.add_argument(
        "--json",
        type=checked(option_groups.check_json),
        metavar="FILE",
        help="what was found, for programs",
    )


@command("weights stat", WEIGHTS, runs="commpress.cli.weight_copies", spins=False)
def weights_stat(parser: argparse.ArgumentParser) -> None:
    """bytes and density of every version

    "changed" is the share of numbers in which any bit differs from the version before, "anchor" the
    bytes of all weights, where readers can begin.

      commpress weights stat /shared/run1
      commpress weights stat http://trainer:9500 --json versions.json
    """
    parser.set_defaults(action="stat")
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder, http://HOST:PORT or a URL of fsspec"
    )
    parser.add_argument(
        "--json",
        type=checked(option_groups.check_json),
        metavar="FILE",
        help="the same for programs",
    )


# ---------------------------------------------------------------- come from elsewhere


@command("from-deepspeed", COME, runs="commpress.cli.from_deepspeed", spins=False)
def from_deepspeed(parser: argparse.ArgumentParser) -> None:
    """a ds_config.json as calls of torch and commpress

    Reads DeepSpeed's configuration and prints a program's lines: the optimizer, how gradients or
    shards travel, clipping, precision and schedule; then names what has no equivalent. "auto",
    which Hugging Face's Trainer fills in, is left to you. Nothing of the file is executed.

      commpress from-deepspeed ds_config.json
      commpress from-deepspeed ds_config.json > setup.py

    docs/start_other_libraries.md has the whole table.
    """
    parser.add_argument(
        "config", type=Path, metavar="ds_config.json", help="DeepSpeed's configuration"
    )
