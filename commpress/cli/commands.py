"""The commands: the words, the help and the options of each, and the function that runs it.

A command is a function here: its docstring is the help, its body adds the options. What runs it is
``run(options)`` of the module of that name, which returns the exit status. It is loaded when the
command runs: help loads no torch.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path

from commpress.cli import option_groups
from commpress.cli.fault_schedule import KINDS
from commpress.cli.hosts import MOST, parse_rate
from commpress.cli.option_groups import (
    GRADIENTS,
    SECTIONS,
    at_least,
    byte_counts,
    checked,
    counts,
    folder,
    from_,
    from_zero,
    large,
    natural,
    option,
    positive,
    saved,
    several,
    shared_width,
    some_of,
    told,
    word,
)
from commpress.units import parse_bytes, parse_memory, parse_time

SEE, LOOK, PREDICT, MEASURE, BREAK = "See it", "Look at machines", "Predict", "Measure", "Break it"
TRY = "Try your own script"
COME = "Come from elsewhere"
WEIGHTS = "Weights at their readers"
Options = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """Two words are a command below a command: ``bench codec``."""

    words: str
    group: str
    options: Options
    runs: str  # module.function of this folder

    @property
    def name(self) -> str:
        return self.words.replace(" ", "_").replace("-", "_")

    @property
    def help(self) -> str:
        return cleandoc(self.options.__doc__ or "")

    @property
    def summary(self) -> str:
        return self.help.partition("\n")[0]


COMMANDS: list[Command] = []  # in the order in which help shows them


def command(words: str, group: str, runs: str = "") -> Callable[[Options], Options]:
    """Register the decorated function as a command."""

    def register(options: Options) -> Options:
        made = Command(words, group, options, runs)
        COMMANDS.append(made if runs else Command(words, group, options, f"{made.name}.run"))
        return options

    return register


# ---------------------------------------------------------------- see it


@command("demo", SEE)
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
    and ends with a table, the lowest loss first, and a picture: loss against seconds. Each way has
    the best of the learning rates that were tried for it. Kernels are compiled before a clock
    starts.

      commpress demo                                  about 10 minutes on 2 cores
      commpress demo --quick                          3 minutes
      commpress demo --rate 1gbit --ways plain,bf16,int8,zero-one --out gigabit.svg
      commpress demo --ways plain,sign --steps 500 --network loopback --error-feedback none
                                                      what is lost if what a bit leaves out is
                                                      thrown away
    """
    add = partial(option, parser)
    ways = "no-network,plain,bf16,torch-powersgd4,diloco,int8,sign,zero-one,powersgd-4,local"
    add("--ways A,B", word("contenders"), ways, "these, or any codec of commpress")
    add("--quick", says="10 seconds for each way")
    add("--seconds S", positive, None, "for each way (default 50)")
    add("--steps N", from_zero, 0, "of each way, instead of seconds (default: seconds count)")
    add("--rate RATE", parse_rate, "100mbit", "of each link")
    says = (
        "hosts; paced: connections that the kernel slows down; loopback: no slow network (default "
        "hosts, else paced)"
    )
    networks = ("auto", "hosts", "paced", "loopback")
    parser.add_argument("--network", choices=networks, default="auto", help=says)
    add("--ranks N", several, 2, "hosts, a process of one thread on each")
    says = "peak learning rate of all ways (default: what was searched for each)"
    add("--lr X", positive, None, says)
    add("--seed N", int, 0, "of weights and batches")
    add("--seeds N", natural, 1, "repeat with so many seeds")
    says = "the picture: .svg, .png or .pdf; needs matplotlib (default demo.svg)"
    add("--out FILE", None, "", says)
    add("--json FILE", says="everything measured")
    add = partial(option, parser.add_argument_group("model and data"))
    add("--width N", shared_width, 384, "of the model")
    add("--layers N", at_least(1, 1 << 10), 3, "of the model")
    add("--length N", at_least(1, 1 << 16), 64, "bytes of text in a window")
    add("--batch N", at_least(1, 1 << 16), 8, "windows per rank and step")
    says = "what codecs leave out: kept and sent later (default), or none"
    parser.add_argument("--error-feedback", choices=("kept", "none"), default="kept", help=says)


# ---------------------------------------------------------------- look at machines


@command("doctor", LOOK)
def doctor(parser: argparse.ArgumentParser) -> None:
    """what works on this machine, and what to do about what does not

    One line for each finding, with a cure where there is one. "note": works without it, or more
    slowly; "bad": something commpress needs does not work. Exit status 1 if anything is bad, for
    scripts.

      commpress doctor                          everything, with the current directory's disk
      commpress doctor --directory /nvme/run1   another disk
      commpress doctor --only torch,network     some sections: torch, backends, MPI, GPU, NUMA,
                                                memory, disks, network, clocks
      commpress doctor --report                 to paste into a bug report: versions, builds,
                                                devices, no addresses
    """
    add = partial(option, parser)
    add("--directory D", Path, Path(), "on the disk to look at")
    add("--only A,B", some_of(SECTIONS), None, "sections; default all")
    add("--report", says="print what a bug report needs instead")


@command("probe", LOOK)
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
    add = partial(option, parser)
    option_groups.add_topology(parser)
    add("--bytes SIZE", large, "4MiB", "of a large row")
    add("--rounds N", natural, 5, "of each measurement, the median counts")
    option_groups.add_ranks(parser)
    add("--pairs", says="every pair of ranks, as a matrix; without it a few of each kind")
    add("--out FILE", None, "links.json", "where to save it")
    says = "the matrix as a picture (takes --pairs with it; needs matplotlib)"
    add("--plot FILE", says=says)
    add("--json FILE", says="every pair (takes --pairs with it)")


# ---------------------------------------------------------------- predict


@command("plan", PREDICT)
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
    every layer gets a codec of its own: the fewest bytes at an error no larger than int4 would make
    on these gradients.

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
    add = partial(option, parser)
    option_groups.add_cluster(parser)
    option_groups.add_model(parser)
    option_groups.add_mesh(parser)
    add("--allow A,B", None, "", "choose these, too: codecs such as sign, local")
    says = "of one rank, as device=24GiB,host=64GiB (default: any)"
    add("--memory T=SIZE,…", parse_memory, "", says)
    says = "measured ones, for a codec of its own for every layer"
    add("--gradients FILE", saved(GRADIENTS), None, says)
    add("--out FILE", None, "plan.json", "where to write the plan")
    option_groups.add_output(parser)


@command("simulate", PREDICT)
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
    With --layered every codec is also run in two levels: exact sums inside a node, compressed
    between nodes ("sign/2").

      commpress simulate --nodes 4x1 --link 1gbit,100us --bytes 32MiB
      commpress simulate --nodes 8x8 --link 25gbit,10us --device 900GB/s --parameters 340M \\
          --compute-ms 250 --layered
      commpress simulate --nodes 512x8 --link 100gbit,5us --device 2TB/s \\
          --scaling 1,8,64,512 --plot scaling.png

    A row: seconds of the call or step; exposed is what a step takes longer than computing alone; MB
    that one rank sends, and of them those that leave its node (of the rank that sends most);
    against plain.
    """
    add = partial(option, parser)
    add("--ways A,B", None, "plain,bf16-ring,int8,int4,sign")
    add("--layered", says="also every codec in two levels")
    add("--bytes SIZE", checked(parse_bytes), "32MiB", "of float32 in one all-reduce")
    says = "numbers of nodes, one after the other"
    add("--scaling A,B", counts, None, says)
    option_groups.add_cluster(parser)
    option_groups.add_model(parser)
    option_groups.add_output(parser)


# ---------------------------------------------------------------- try your own script


@command("hosts", TRY, runs="on_hosts.run")
def hosts(parser: argparse.ArgumentParser) -> None:
    """run a command on several hosts with slow links, all on this machine

    Makes N hosts (network namespaces of Linux; root is not needed where users may have namespaces),
    joins them by links of the given rate and delay, and runs COMMAND on each of them at once:
    several machines rehearsed on one. torchrun and accelerate launch are told how many machines
    there are; any other command is one rank, and gets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT.

      commpress hosts 2 --rate 100mbit -- torchrun --nproc-per-node 1 train.py
      commpress hosts 4 --rate 1gbit --delay 20ms -- accelerate launch --cpu train.py
      commpress hosts 2 --rate 25mbit -- python train.py

    Prints what each host prints, and at the end the seconds and bytes of each. The exit status is
    that of the first host that failed. The hosts share this machine's cores and files.
    """
    add = partial(option, parser)
    parser.add_argument("count", type=told(at_least(1, MOST)), metavar="N", help="hosts")
    _command(parser)
    _links(parser)
    add("--json FILE", says="seconds, bytes and exit status of each host")


@command("compare", TRY)
def compare(parser: argparse.ArgumentParser) -> None:
    """run a script with several methods in turns: loss, seconds, bytes

    COMMAND contains {method} where the script takes a codec, and may contain {seed}; both are
    replaced for each run, and the runs take turns. The first method is what the others are compared
    with. Losses are read from what the command prints: the Trainer's lines, JSON, 'loss 2.31'.

      commpress compare -- torchrun --nproc-per-node 2 train.py --codec {method}
      commpress compare --methods none,int8,powersgd-4 --seeds 3 -- \\
          torchrun --nproc-per-node 2 train.py --codec {method} --seed {seed}
      commpress compare --hosts 2 --rate 100mbit -- env CODEC={method} torchrun train.py
                                                      on two hosts with a slow link

    Ends with a table, a verdict for each method, and a picture. The exit status is 1 if a method
    changes nothing, as where a script does not look at {method}.
    """
    add = partial(option, parser)
    _command(parser)
    add("--methods A,B", str, "none,int8", "words that replace {method}")
    add("--seed N", at_least(0), 0, "the first seed")
    add("--seeds N", at_least(1, 1000), 1, "so many")
    add(
        "--pattern REGEX",
        str,
        "",
        says="of a line with a loss, whose number is the group (?P<loss>...)",
    )
    says = "run on so many hosts, as commpress hosts does (default: here)"
    add("--hosts N", at_least(2, MOST), 0, says, dest="count")
    _links(parser)
    add("--out FILE", str, "compare.svg", "the picture; needs matplotlib")
    add("--json FILE", says="all losses with their times")


def _command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what is run")


def _links(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    says = "of each host's link, as 100mbit (default: as fast as this machine)"
    add("--rate RATE", parse_rate, None, says)
    add("--delay TIME", parse_time, 0.0, "of each link, one way, as 20ms (default none)")


# ---------------------------------------------------------------- break it


@command("chaos", BREAK)
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

      20 kill 1            # SIGKILL; started again a second later, to join the others
      40 stop 0 for 5      # SIGSTOP, then SIGCONT
      60 slow 2 for 10     # runs a fifth of the time
      80 cut 3 for 8 bulk  # with --hosts: packets over 600 bytes are lost; half: every second one;
                             all
      99 kill launcher     # the process that holds the store, as torchrun's agent does

    Goodput: committed steps per second, as a share of those before the first fault. Participation:
    ranks that took part in a step. Pause: what survivors waited longer than usual for the next
    committed step. Nothing that was started stays, however this ends.
    """
    add = partial(option, parser)
    says = "what each process runs (default: a small model that sleeps)"
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help=says)
    add("--ranks N", several, 4, "processes")
    add("--seconds S", positive, 120.0, "of training in which faults are made")
    add("--faults-per-hour N", from_(0), 125.0, "on average, at random times")
    kinds = f"some of {','.join(KINDS)} (default kill); cut needs --hosts"
    add("--faults KINDS", some_of(KINDS), "kill", kinds)
    add("--schedule FILE", says="faults of a file instead of random ones")
    add("--seed N", int, 0, "of the random ones")
    add("--patience S", positive, 60.0, "without a committed step: the run hangs")
    says = "each rank on a host of its own: network namespaces (root or user namespaces)"
    add("--hosts", says=says)
    _links(parser)
    add("--logs FOLDER", says="keep output and events of the processes here")
    add("--json FILE", says="figures, faults and pauses, with settings and versions")
    says = (
        "exit status 1 also unless goodput is 90 %, participation 80 %, the median pause 2.5 s, "
        "the longest 30 s, and healing takes 20 s at most"
    )
    add("--check", says=says)


# ---------------------------------------------------------------- measure


@command("bench codec", MEASURE)
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
    add = partial(option, parser)
    add("--codec A,B", word("timed"), None, "default all")
    add("--numel N", at_least(64), 1 << 25, "floats in the buffer")
    add("--threads A,B", counts, "1,2", "numbers of threads")
    option_groups.add_output(parser, check="the sign codec holds its bars")


@command("bench allreduce", MEASURE)
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
    add = partial(option, parser)
    add("--codec NAME", word("row_codec"), "sign")
    option_groups.add_sizes(parser, "1MiB", "32MiB")
    add("--iterations N", natural, 10, "timed, of each size")
    add("--warmup N", from_zero, 2, "not timed, of each size")
    option_groups.add_ranks(parser)
    check = (
        "ranks agree bit for bit, error feedback loses nothing and codecs err in the right order"
    )
    option_groups.add_output(parser, check=check)


@command("bench io", MEASURE)
def bench_io(parser: argparse.ArgumentParser) -> None:
    """speed of the tiered store, reading and writing here, beside fio

    Through the store's own calls, checksums on, with a depth of 4 unless said otherwise, for chunks
    of several sizes:
      write   flush: tensors that are newer in memory go to disk
      read    prefetch: tensors on disk come back and are verified
    "fio" is the best of its engines io_uring, libaio and psync, at the same depth, if fio is
    installed. All take turns; medians.

      commpress bench io                                    in the current directory, one minute
      commpress bench io --directory /nvme/tmp --size 2GiB  elsewhere, more bytes
      commpress bench io --engine io_uring --check          exit status 1 if the store is below
                                                            95 % of fio
    """
    add = partial(option, parser)
    add("--directory D", folder, Path(), "on the disk to measure")
    add("--chunks A,B", byte_counts, "1MiB,4MiB,16MiB,64MiB")
    add("--size SIZE", checked(parse_bytes), "512MiB", "bytes written and read per figure")
    add("--rounds N", natural, 5, "of everything")
    add("--depth N", natural, 4, "transfers at once")
    says = "auto (default), threads, io_uring, libaio or aiofiles"
    add("--engine NAME", word("engine"), "auto", says)
    add("--no-fio", says="do not run fio")
    option_groups.add_output(parser, check="the store reaches 95 % of fio")


@command("bench train", MEASURE)
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
      commpress bench train --ways compute,plain,int8,sign --bucket-mb 4
    """
    usual = "compute,plain,bf16,powersgd1,sign"
    says = f"default {usual}; compute is always measured"
    option(parser, "--ways A,B", word("variants_of"), usual, says)
    option(parser, "--bucket-mb MB", positive, 25.0, "of DDP; PowerSGD's hook has one bucket")
    check = (
        "sign exposes at most half of what powersgd1 does and its step is at most 1.3 of compute, "
        "if both run; auto is as fast as plain within 2 % and as the fastest within 5 %"
    )
    option_groups.add_measuring(parser, rounds=5, steps=4, batch=4, check=check)


# ---------------------------------------------------------------- weights at their readers


def _source(parser: argparse.ArgumentParser) -> None:
    says = "a folder, http://HOST:PORT or a URL of fsspec"
    parser.add_argument("source", metavar="SOURCE", help=says)


@command("weights serve", WEIGHTS, "weight_copies.serve")
def weights_serve(parser: argparse.ArgumentParser) -> None:
    """let readers have published versions over HTTP, or relay them

    SOURCE is a folder that a commpress.weights.Publisher writes to, a copy of one, or another
    server: of that one each byte is fetched once for all readers here. Readers take
    Receiver("http://HOST:PORT"). Except on this machine, both sides need the same
    COMMPRESS_RUN_KEY: it is never sent, and nothing is encrypted.

      commpress weights serve /shared/run1        to this machine, port 9500
      COMMPRESS_RUN_KEY_FILE=key commpress weights serve /shared/run1 --host 0.0.0.0
      COMMPRESS_RUN_KEY_FILE=key commpress weights serve http://trainer:9500 --host 0.0.0.0
    """
    parser.add_argument("source", metavar="SOURCE", help="a folder, or http://HOST:PORT")
    option(parser, "--port N", from_zero, 9500, "0 takes a free one")
    option(parser, "--host H", None, "127.0.0.1", "address to listen on")


@command("weights pull", WEIGHTS, "weight_copies.pull")
def weights_pull(parser: argparse.ArgumentParser) -> None:
    """copy new versions into a folder

    The copy is published weights itself: readers, servers and further copies may take it as their
    source. It may be interrupted at any byte and goes on when it is called again.

      commpress weights pull http://trainer:9500 /data/run1             once
      commpress weights pull http://trainer:9500 /data/run1 --follow    every new version
      commpress weights pull http://trainer:9500 /data/run1 --safetensors model.safetensors
    """
    add = partial(option, parser)
    _source(parser)
    parser.add_argument("folder", metavar="FOLDER", help="of the copy")
    add("--follow", says="go on with every new version")
    add("--safetensors FILE", says="write the newest version as one file, too")
    add("--limit SIZE", checked(parse_bytes), "64GiB", "of its weights in memory")


@command("weights verify", WEIGHTS, "weight_copies.verify")
def weights_verify(parser: argparse.ArgumentParser) -> None:
    """read every byte of every version, and rebuild its weights

    Ends with exit status 2 and a sentence where anything is missing, changed or does not follow.

      commpress weights verify /shared/run1
      commpress weights verify http://trainer:9500
    """
    _source(parser)
    option(parser, "--json FILE", says="what was found, for programs")


@command("weights stat", WEIGHTS, "weight_copies.stat")
def weights_stat(parser: argparse.ArgumentParser) -> None:
    """bytes and density of every version

    "changed" is the share of numbers in which any bit differs from the version before, "anchor" the
    bytes of all weights, where readers can begin.

      commpress weights stat /shared/run1
      commpress weights stat http://trainer:9500 --json versions.json
    """
    _source(parser)
    option(parser, "--json FILE", says="the same for programs")


# ---------------------------------------------------------------- come from elsewhere


@command("from-deepspeed", COME)
def from_deepspeed(parser: argparse.ArgumentParser) -> None:
    """a ds_config.json as calls of torch and commpress

    Reads DeepSpeed's configuration and prints a program's lines: the optimizer, how gradients or
    shards travel, clipping, precision and schedule; then names what has no equivalent. "auto",
    which Hugging Face's Trainer fills in, is left to you. Nothing of the file is executed.

      commpress from-deepspeed ds_config.json
      commpress from-deepspeed ds_config.json > setup.py

    docs/start_other_libraries.md has the whole table.
    """
    says = "DeepSpeed's configuration"
    parser.add_argument("config", type=Path, metavar="ds_config.json", help=says)
