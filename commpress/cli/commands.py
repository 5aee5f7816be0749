"""The commands: the words, the help and the options of each, and the function that runs it.

An option is a line: name, kind, default and what it is, as ``option_groups.declare`` reads them.
``run(options)`` of the module of a command's name runs it and returns the exit status. It is loaded
when the command runs: help loads no torch.
"""

from dataclasses import dataclass
from inspect import cleandoc

SEE, LOOK, PREDICT, MEASURE = "See it", "Look at machines", "Predict", "Measure"
TRY, COME, WEIGHTS = "Try your own script", "Come from elsewhere", "Weights at their readers"


@dataclass(frozen=True)
class Command:
    """Two words are a command below a command: ``bench io``."""

    words: str
    group: str
    about: str
    options: str
    module: str = ""  # and the function, where they have other names

    @property
    def name(self) -> str:
        return self.words.replace(" ", "_").replace("-", "_")

    @property
    def runs(self) -> str:
        return self.module or f"{self.name}.run"

    @property
    def help(self) -> str:
        return cleandoc(self.about)

    @property
    def summary(self) -> str:
        return self.help.partition("\n")[0]


COMMANDS = (  # in the order in which help shows them
    Command(
        "demo",
        SEE,
        """train a GPT over a slow network in ten ways, each for the same time

    Two hosts (network namespaces with links of 100 Mbit/s; root is not needed where users may have
    namespaces) train a GPT of 5.5 M parameters on the source of Python's standard library. The ways
    take turns, each from the same start and on the same data, and each for the same time:
      no-network       DistributedDataParallel with links that have no limit: the floor
      plain            DistributedDataParallel as it is
      bf16             torch's bf16_compress_hook
      torch-powersgd4  torch's powerSGD_hook, rank 4; also torch-powersgd1 and 2
      diloco           30 steps alone, then one exchange in float32
      fp8              commpress.compress(ddp), eight bits
      sign             commpress.compress(ddp, "sign"), fp8 for the output layer
      zero-one         commpress.ZeroOneAdam
      powersgd-8+fp8   commpress.compress(ddp, "powersgd-8+fp8")
      local            commpress.LocalUpdates(optimizer): exchanges hide behind computing
    and ends with a table, the lowest loss first, and a picture: loss against seconds. Each way has
    the best of the learning rates that were tried for it. Kernels are compiled before a clock
    starts.

      commpress demo                                  about 10 minutes on 2 cores
      commpress demo --quick                          3 minutes
      commpress demo --rate 1gbit --ways plain,bf16,fp8,zero-one --out gigabit.svg
      commpress demo --ways plain,sign --steps 500 --network loopback --error-feedback none
                                                      what is lost if what a bit leaves out is
                                                      thrown away
    """,
        """
    --ways A,B | refused by contenders |
        no-network,plain,bf16,torch-powersgd4,diloco,fp8,sign,zero-one,powersgd-8+fp8,local |
        these, or any codec of commpress
    --quick | | | 10 seconds for each way
    --seconds S | positive | | for each way (default 50)
    --steps N | 0.. | 0 | of each way, instead of seconds (default: seconds count)
    --rate RATE | rate | 100mbit | of each link
    --network | {auto,hosts,paced,loopback} | auto | hosts; paced: connections that the
        kernel slows down; loopback: no slow network (default hosts, else paced)
    --ranks N | 2.. | 2 | hosts, a process of one thread on each
    --lr X | positive | | peak learning rate of all ways (default: what was searched for each)
    --seed N | int | 0 | of weights and batches
    --seeds N | 1.. | 1 | repeat with so many seeds
    --out FILE | | '' | the picture: .svg, .png or .pdf; needs matplotlib (default demo.svg)
    --json FILE | | | everything measured
    [model and data]
    --width N | width | 384 | of the model
    --layers N | 1..1024 | 3 | of the model
    --length N | 1..65536 | 64 | bytes of text in a window
    --batch N | 1..65536 | 8 | windows per rank and step
    --error-feedback | {kept,none} | kept | what codecs leave out: kept and sent later
        (default), or none
    """,
    ),
    Command(
        "doctor",
        LOOK,
        """what works on this machine, and what to do about what does not

    One line for each finding, with a cure where there is one. "note": works without it, or more
    slowly; "bad": something commpress needs does not work. Exit status 1 if anything is bad, for
    scripts.

      commpress doctor                          everything, with the current directory's disk
      commpress doctor --directory /nvme/run1   another disk
      commpress doctor --only torch,network     some sections: torch, backends, MPI, GPU, NUMA,
                                                memory, disks, network
      commpress doctor --report                 to paste into a bug report: versions, builds,
                                                devices, no addresses
    """,
        """
    --directory D | path | . | on the disk to look at
    --only A,B | sections | | sections; default all
    --report | | | print what a bug report needs instead
    """,
    ),
    Command(
        "probe",
        LOOK,
        """how fast ranks reach each other, in pairs and all at once

    Runs the exchanges that collectives are made of: of two ranks alone while the others wait, and
    of all at once; and all-reduces of growing size, flat and by way of nodes. Which ranks share a
    node is what the launcher says, or --topology. The file tells collectives whether the
    hierarchical all-reduce pays at a size; docs/hierarchy.md describes it.

      commpress probe --ranks 4 --topology 2x2            4 local processes, as if on two nodes
      commpress probe --ranks 4 --pairs                   every pair of ranks, as a matrix
      torchrun --nnodes 2 --nproc-per-node 8 ... --no-python commpress probe --out links.json
    """,
        """
    @topology
    --bytes SIZE | large | 4MiB | of a large row
    --rounds N | 1.. | 5 | of each measurement, the median counts
    @ranks
    --pairs | | | every pair of ranks, as a matrix; without it a few of each kind
    --out FILE | | links.json | where to save it
    --json FILE | | | every pair (takes --pairs with it)
    """,
    ),
    Command(
        "plan",
        PREDICT,
        """what to use on given machines and links and what it gains

    Simulates a training step for each candidate (docs/simulator.md), counts its bytes and its
    memory on every tier, and ranks them. Candidates: no compression, torch's bf16 hook, codecs
    under DDP in one or two levels, 1-bit and 0/1 Adam, local updates, ZeRO stages, optimizer states
    on the host or on disk. It advises no compression, fp8 or int4; --allow sign,powersgd-4,local
    lets it choose what may change the loss, too. Local updates must save a quarter of a step to be
    advised. Of the ways that a file can name it writes the best one:

      state = commpress.compress(ddp, plan="plan.json")  DDP; "plain" in the file means: torch's
                                                         own all-reduce
      Trainer(..., callbacks=[commpress.hf.Compress(plan="plan.json")])
      dist.init_process_group("commpress")               with COMMPRESS_GROUP_OPTIONS=plan.json

    --compute-ms is the step of one rank without communication, as "compute" of commpress bench
    train says it.

      commpress plan --parameters 110M --nodes 4x1 --link 1gbit,100us --compute-ms 300
      commpress plan --model mymodels:make_gpt --nodes 8x8 --link 25gbit,10us \\
          --device 900GB/s --compute-ms 250
      commpress plan --config config.json --links links.json --compute-ms 800 --out plan.json
      commpress plan --parameters 1.5B --nodes 4x1 --compute-ms 900 \\
          --memory device=24GiB,host=64GiB

    A coarser way must be 3 % faster than a finer one to be chosen. Predictions are as good as the
    description of the machines: docs/planning.md compares them with measurements.
    """,
        """
    @cluster
    @model
    --allow A,B | names | '' | choose these, too: codecs such as sign, local
    --memory T=SIZE,… | memory | '' | of one rank, as device=24GiB,host=64GiB (default: any)
    --out FILE | | plan.json | where to write the plan
    @json
    """,
    ),
    Command(
        "simulate",
        PREDICT,
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
      commpress simulate --nodes 512x8 --link 100gbit,5us --device 2TB/s --scaling 1,8,64,512

    A row: seconds of the call or step; exposed is what a step takes longer than computing alone; MB
    that one rank sends, and of them those that leave its node (of the rank that sends most);
    against plain.
    """,
        """
    --ways A,B | | plain,bf16-ring,int8,int4,sign |
    --layered | | | also every codec in two levels
    --bytes SIZE | size | 32MiB | of float32 in one all-reduce
    --scaling A,B | counts | | numbers of nodes, one after the other
    @cluster
    @model
    @json
    """,
    ),
    Command(
        "hosts",
        TRY,
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
    """,
        """
    count N | 1..250 | | hosts
    command | | | what is run
    @links
    --json FILE | | | seconds, bytes and exit status of each host
    """,
        "on_hosts.run",
    ),
    Command(
        "compare",
        TRY,
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
    """,
        """
    command | | | what is run
    --methods A,B | | none,int8 | words that replace {method}
    --seed N | 0.. | 0 | the first seed
    --seeds N | 1..1000 | 1 | so many
    --pattern REGEX | | '' | of a line with a loss, whose number is the group (?P<loss>...)
    --hosts N | 2..250 | | run on so many hosts, as commpress hosts does (default: here)
    @links
    --out FILE | | compare.svg | the picture; needs matplotlib
    --json FILE | | | all losses with their times
    """,
    ),
    Command(
        "bench allreduce",
        MEASURE,
        """one compressed all-reduce against torch's

    Averages of float32. The columns of nccl-tests come first. Both all-reduces run alternately, so
    that other traffic slows both.
      us, algbw, busbw   of the compressed one: microseconds, and GB/s as if it were an all-reduce
                         of float32: algbw = size / time, busbw = algbw * 2(n-1)/n
      #wrong             elements whose bits differ between ranks
      wire               bytes one rank sent, headers included; ratio: against a float32 ring
      error              of one all-reduce against the exact mean, relative
      fp32 us, faster    time of torch's all_reduce, and how many times longer it takes
    It runs what the DDP hook runs: the same messages, kernels, transport and error feedback.

      commpress bench allreduce                                      4 local processes
      commpress bench allreduce --codec int8 --min-bytes 64KiB
      torchrun --nproc-per-node 2 --no-python commpress bench allreduce --check
    """,
        """
    --codec NAME | refused by row_codec | sign |
    --min-bytes SIZE | bytes | 1MiB |
    --max-bytes SIZE | bytes | 32MiB |
    --factor N | 2.. | 2 | from one size to the next
    --iterations N | 1.. | 10 | timed, of each size
    --warmup N | 0.. | 2 | not timed, of each size
    @ranks
    --check | | | exit status 1 unless ranks agree bit for bit
    @json
    """,
    ),
    Command(
        "bench io",
        MEASURE,
        """speed of the tiered store, reading and writing here

    Through the store's own calls, checksums on, with a depth of 4 unless said otherwise, for chunks
    of several sizes:
      write   flush: tensors that are newer in memory go to disk
      read    prefetch: tensors on disk come back and are verified
    All take turns; medians. Ends with the chunk size and the engine to take here.

      commpress bench io                                    in the current directory, one minute
      commpress bench io --directory /nvme/tmp --size 2GiB  elsewhere, more bytes
    """,
        """
    @io
    @json
    """,
    ),
    Command(
        "bench train",
        MEASURE,
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
          commpress bench train
      commpress bench train --ways compute,plain,int8,sign --bucket-mb 4
    """,
        """
    @train
    @json
    """,
    ),
    Command(
        "weights serve",
        WEIGHTS,
        """let readers have published versions over HTTP, or relay them

    SOURCE is a folder that a commpress.weights.Publisher writes to, a copy of one, or another
    server: of that one each byte is fetched once for all readers here. Readers take
    Receiver("http://HOST:PORT"). Except on this machine, both sides need the same
    COMMPRESS_RUN_KEY: it is never sent, and nothing is encrypted.

      commpress weights serve /shared/run1        to this machine, port 9500
      COMMPRESS_RUN_KEY_FILE=key commpress weights serve /shared/run1 --host 0.0.0.0
      COMMPRESS_RUN_KEY_FILE=key commpress weights serve http://trainer:9500 --host 0.0.0.0
    """,
        """
    source SOURCE | | | a folder, or http://HOST:PORT
    --port N | 0.. | 9500 | 0 takes a free one
    --host H | | 127.0.0.1 | address to listen on
    """,
        "weight_copies.serve",
    ),
    Command(
        "weights pull",
        WEIGHTS,
        """copy new versions into a folder

    The copy is published weights itself: readers, servers and further copies may take it as their
    source. It may be interrupted at any byte and goes on when it is called again.

      commpress weights pull http://trainer:9500 /data/run1             once
      commpress weights pull http://trainer:9500 /data/run1 --follow    every new version
      commpress weights pull http://trainer:9500 /data/run1 --safetensors model.safetensors
    """,
        """
    source SOURCE | | | a folder, http://HOST:PORT or a URL of fsspec
    folder FOLDER | | | of the copy
    --follow | | | go on with every new version, also when the server was away
    --safetensors FILE | | | write the newest version as one file, too
    --limit SIZE | size | 64GiB | of its weights in memory
    """,
        "weight_copies.pull",
    ),
    Command(
        "weights verify",
        WEIGHTS,
        """read every byte of every version, and rebuild its weights

    Ends with exit status 2 and a sentence where anything is missing, changed or does not follow.

      commpress weights verify /shared/run1
      commpress weights verify http://trainer:9500
    """,
        """
    source SOURCE | | | a folder, http://HOST:PORT or a URL of fsspec
    --json FILE | | | what was found, for programs
    """,
        "weight_copies.verify",
    ),
    Command(
        "weights stat",
        WEIGHTS,
        """bytes and density of every version

    "changed" is the share of numbers in which any bit differs from the version before, "anchor" the
    bytes of all weights, where readers can begin.

      commpress weights stat /shared/run1
      commpress weights stat http://trainer:9500 --json versions.json
    """,
        """
    source SOURCE | | | a folder, http://HOST:PORT or a URL of fsspec
    --json FILE | | | the same for programs
    """,
        "weight_copies.stat",
    ),
    Command(
        "from-deepspeed",
        COME,
        """a ds_config.json as calls of torch and commpress

    Reads DeepSpeed's configuration and prints a program's lines: the optimizer, how gradients or
    shards travel, clipping, precision and schedule; then names what has no equivalent. "auto",
    which Hugging Face's Trainer fills in, is left to you. Nothing of the file is executed.

      commpress from-deepspeed ds_config.json
      commpress from-deepspeed ds_config.json > setup.py

    docs/start_other_libraries.md has the whole table.
    """,
        """
    config ds_config.json | path | | DeepSpeed's configuration
    """,
    ),
)
