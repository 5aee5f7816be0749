"""several micro-batches of a streamed model: one after the other, or together through each block

Each variant is a process of its own that trains the same GPT by AdamW on the same text. They take
turns, medians after three that do not count. A turn is the update by the gradients of the turn
before, and a forward and backward: what of the update is not over when the forward begins runs
beside it. The first turn has no update, the second no moments to read, and the third forward is the
first one to know its order.
  one by one    a forward and backward for each micro-batch
  together      streamed.accumulate: parameters are read twice a step, gradients leave once
"on disk" is a store with --host of memory under --folder, "in RAM" one with room for everything:
computing alone. "of the formula" compares what model and store have exchanged with 8 bytes read and
4 written for each parameter, and with as many for each micro-batch one by one; what host memory
holds is not read from the disk. "resident" is the most memory that the process had (VmHWM); "bits"
compares losses and all that the store has with those of the first variant of as many layers.
  --in-ram N      layers of the variants in RAM, where there is no room for all: their seconds count
                  for as many layers as the others have
  --rate GB/s     hold the disk to so much, reads and writes together, as if it were a slower one
  --in-backward   together with gradients="backward": parameters are updated under the backward of
                  the blocks before, which training without clipping can do, and gradients hardly
                  reach the disk; one by one has many gradients a step, which this refuses

  python benchmarks micro_batches
  python benchmarks micro_batches --layers 22 --in-ram 4 --steps 1 --check  1109 million parameters
  python benchmarks micro_batches --rate 1 --in-backward --steps 1 --check
"""

import argparse
import tempfile
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

import commpress
import slower_disk
from commpress.checksum import checksum_of
from commpress.cli import harness, terminal
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from shared_options import add_output
from turns import Steps, in_turns, resident

FASTER, EXACT, POSSIBLE = 1.8, 0.02, 0.9
VARIANTS = ("one by one, on disk", "together, on disk", "one by one, in RAM", "together, in RAM")
WARM = 3


@dataclass(frozen=True)
class Measured:
    name: str
    passes: float  # seconds of forward and backward
    update: float
    tokens: int  # of a step
    read: float  # bytes of files a step
    written: float
    of_formula: tuple[float, float]
    resident: int
    bits: str
    parameters: int
    layers: int

    @property
    def seconds(self) -> float:
        return self.passes + self.update


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--width N", int, 2048, "of the model")
    option(parser, "--layers N", int, 8, "of the model")
    option(parser, "--in-ram N", int, None, "layers of the variants in RAM (default: all)")
    option(parser, "--rate GB/s", float, None, "of the disk (default: what it has)")
    parser.add_argument("--in-backward", action="store_true", help="update there, if together")
    option(parser, "--micro-batches N", int, 8, "of a step")
    option(parser, "--batch N", int, 2, "sequences of a micro-batch")
    option(parser, "--length N", int, 32, "tokens of a sequence")
    option(parser, "--steps N", int, 2, "that count")
    option(parser, "--threads N", int, 2)
    option(parser, "--host MiB", int, 960, "memory of the stores on disk")
    option(parser, "--folder DIR", str, None, "on the disk (default: a temporary one)")
    add_output(
        parser,
        check=f"together on disk is at least {FASTER} times as fast, and {POSSIBLE} of what "
        f"computing and bytes allow, bytes are those of the formula within {EXACT:.0%}, and bits "
        "are equal",
    )


def run(options: argparse.Namespace) -> int:
    counts = ("width", "layers", "micro_batches", "batch", "length", "steps", "threads", "host")
    if min(getattr(options, name) for name in counts) < 1:
        raise InvalidArgument(f"--{', --'.join(counts).replace('_', '-')} must be at least 1")
    if options.in_ram is None:
        options.in_ram = options.layers
    if not 1 <= options.in_ram <= options.layers:
        raise InvalidArgument(f"--in-ram is {options.in_ram}, expected 1 to {options.layers}")
    if options.rate is not None and not options.rate > 0:
        raise InvalidArgument(f"--rate is {options.rate:g}, expected GB/s above zero")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = in_turns(VARIANTS, train, WARM + options.steps, options, folder)
    title = (
        f"GPT of {measured[0].parameters / 1e6:.0f} M parameters, {options.micro_batches} "
        f"micro-batches of {measured[0].tokens // options.micro_batches} tokens"
    )

    def cells(m: Measured) -> dict[str, str]:
        return cells_of(m, measured)

    print(title, terminal.table(list(map(cells, measured))), sep="\n")
    return harness.deliver(options, measured, judge=judge)


def cells_of(m: Measured, every: list[Measured]) -> dict[str, str]:
    base = every[0]
    like = next(other for other in every if other.layers == m.layers)
    return {
        "way": m.name,
        "forward and backward, s": f"{m.passes:.2f}",
        "update, s": f"{m.update:.2f}",
        "tokens/s": f"{m.tokens / m.seconds:.1f}",
        "faster": f"{base.seconds / m.seconds:.2f}x",
        "read, GiB": f"{m.read / 2**30:.2f}",
        "written, GiB": f"{m.written / 2**30:.2f}",
        "of the formula": " ".join(f"{share:.3f}" for share in m.of_formula),
        "resident, GiB": f"{m.resident / 2**30:.2f}",
        "bits": "equal" if m.bits == like.bits else "differ",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    one, together, computing, less = measured
    faster = one.seconds / together.seconds
    # the disk's rate is what one by one gets from it: computing hides none of it, or all
    rate = (one.read + one.written) / one.seconds
    most = max(one.seconds, computing.seconds) / max(
        less.seconds, (together.read + together.written) / rate
    )
    close = all(abs(share - 1) <= EXACT for m in measured for share in m.of_formula)
    return [
        (f"together {faster:.2f} times as fast, at least {FASTER}", faster >= FASTER),
        (
            f"{faster / most:.2f} of the {most:.2f} that computing and bytes allow",
            faster >= POSSIBLE * most,
        ),
        (f"bytes are those of the formula within {EXACT:.0%}", close),
        (
            "bits are equal",
            len({m.bits for m in measured}) == len({m.layers for m in measured}),
        ),
    ]


def train(name: str, options: argparse.Namespace, folder: str) -> Steps:
    """One variant of ``in_turns``."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    on_disk = name.endswith("disk")
    layers = options.layers if on_disk else options.in_ram
    with torch.device("meta"):
        net = GPT(
            width=options.width,
            layers=layers,
            heads=max(1, options.width // 64),
            length=options.length,
        )
    count = sum(p.numel() for p in net.parameters())
    together = name.startswith("together")
    whole = 16 * count + (2 << 30)
    host = options.host << 20 if on_disk else whole
    text, data = standard_library(), torch.Generator().manual_seed(1)
    passes, updates, losses = list[float](), list[float](), list[float]()
    moved = [0, 0, 0, 0]
    with commpress.TieredStore.open(f"{folder}/{name}", host=host) as store:
        if options.rate is not None:
            slower_disk.hold(store, options.rate)
        streamed = commpress.stream(net, store=store, chunk_mb=16)
        optimizer = commpress.Offloaded(
            net.parameters(),
            torch.optim.AdamW,
            store=store,
            chunk_mb=16,
            gradients="backward" if together and options.in_backward else "store",
            resident={"host": 0} if on_disk else None,
            lr=1e-5,
            fused=True,
        )

        def loss_of(given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return net(*given) / options.micro_batches

        while (yield):
            batches = [
                batch(text, options.batch, options.length, data)
                for _ in range(options.micro_batches)
            ]
            before, begin = bytes_of(store), perf_counter()
            if losses:
                optimizer.step()
            updated = perf_counter()
            if together:
                found = streamed.accumulate(loss_of, batches)
            else:
                found = []
                for given in batches:
                    loss = loss_of(given)
                    loss.backward()
                    found.append(loss.detach())
            optimizer.finish()
            updates.append(updated - begin)
            passes.append(perf_counter() - updated)
            losses += [loss.item() for loss in found]
            if len(passes) > WARM:
                now = bytes_of(store)
                moved = [a + b - c for a, b, c in zip(moved, now, before, strict=True)]
        optimizer.step()
        optimizer.finish()
        bits = [f"{losses}"] + [checksum_of(store_bytes(store, name)) for name in sorted(store)]
    steps = len(passes) - WARM
    read, written, up, down = (each / steps for each in moved)
    times = 1 if together else options.micro_batches
    return Measured(
        name,
        median(passes[WARM:]) * options.layers / layers,
        median(updates[WARM:]) * options.layers / layers,
        options.micro_batches * options.batch * options.length,
        read,
        written,
        (up / (8 * count * times), down / (4 * count * times)),
        resident(),
        " ".join(map(str, bits)),
        count,
        layers,
    )


def bytes_of(store: commpress.TieredStore) -> tuple[int, ...]:
    """Return bytes so far: read from files, written to them, given to the model, taken from it."""
    return *store.traffic(), store.crossing.up, store.crossing.down


def store_bytes(store: commpress.TieredStore, name: str) -> memoryview:
    with store.borrow(name, write=False) as held:
        return held.clone().view(torch.uint8).numpy().data
