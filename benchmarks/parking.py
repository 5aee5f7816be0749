"""training state parked and woken: seconds beside those of moving the same bytes alone

A model and AdamW's moments, --state in all, are parked and return, --rounds times, in a process of
its own for each place; other rounds move as many bytes alone, in turns with them.
  RAM    the way of store="host", with the processor in place of a GPU: bytes are copied to buffers
         in host memory, and back. Beside it: two memcpy of the bytes. Nothing is freed in between,
         as an allocator on a GPU has its memory again without the kernel, which would zero it
  disk   a folder, under --folder. Beside it: the bytes written past the page cache to one file, in
         order, --depth requests of 16 MiB at once, synced, and read again
Medians. "resident" is what the process has in memory while its state is parked, less what it had
before it had a state, as a share of the state. "weights back" is the time until a forward may run.
"bits" compares all tensors with their checksums from before.

  python benchmarks parking
  python benchmarks parking --state 1GiB --check
"""

import argparse
import mmap
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

import commpress
from commpress.cli import harness, terminal
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from commpress.integrations.zero.parked_state import digest_of
from commpress.integrations.zero.parking import Parked
from commpress.units import parse_bytes, show_bytes
from shared_options import add_output

SLOWER, RESIDENT = 1.15, 0.05
PLACES = ("RAM", "disk")
PIECE = 16 << 20


@dataclass(frozen=True)
class Measured:
    place: str
    state: int
    park: float  # seconds
    weights: float
    wake: float
    alone: float
    resident: float  # share of the state
    equal: bool

    @property
    def ratio(self) -> float:
        return (self.park + self.wake) / self.alone


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--state SIZE", str, "4GiB", "parameters and moments")
    option(parser, "--width N", int, 2048, "matrices have N x 4N elements")
    option(parser, "--rounds N", int, 3, "of each, after one that does not count")
    option(parser, "--threads N", int, 2)
    option(parser, "--depth N", int, 4, "requests at once of the disk alone")
    option(parser, "--folder DIR", str, None, "on the disk (default: a temporary one)")
    add_output(
        parser,
        check=f"parking and waking take at most {SLOWER} times the bytes alone, at most "
        f"{RESIDENT:.0%} stay in memory with the disk, and bits are equal",
    )


def run(options: argparse.Namespace) -> int:
    if min(options.rounds, options.threads, options.depth, options.width) < 1:
        raise InvalidArgument("--rounds, --threads, --depth and --width must be at least 1")
    if parse_bytes(options.state) < (least := 48 * options.width**2):
        raise InvalidArgument(
            f"--state is {options.state}, expected at least one matrix: {show_bytes(least)}"
        )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = [apart(place, options, folder) for place in PLACES]
    title = f"{show_bytes(measured[0].state)} of training state, {options.threads} thread(s)"
    print(title, terminal.table(list(map(cells_of, measured))), sep="\n")
    return harness.deliver(options, measured, judge=judge)


def cells_of(m: Measured) -> dict[str, str]:
    return {
        "place": m.place,
        "park, s": f"{m.park:.2f}",
        "weights back, s": f"{m.weights:.2f}",
        "wake, s": f"{m.wake:.2f}",
        "alone, s": f"{m.alone:.2f}",
        "against": f"{m.ratio:.3f}x",
        "resident": f"{m.resident:.1%}" if m.place == "disk" else "",
        "bits": "equal" if m.equal else "differ",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    found = [
        (
            f"{m.place}: {m.ratio:.3f} times the bytes alone, at most {SLOWER}",
            m.ratio <= SLOWER,
        )
        for m in measured
    ]
    disk = measured[-1]
    stays = f"resident {disk.resident:.1%} with the disk, at most {RESIDENT:.0%}"
    return [
        *found,
        (stays, disk.resident <= RESIDENT),
        ("bits are equal", all(m.equal for m in measured)),
    ]


def apart(place: str, options: argparse.Namespace, folder: str) -> Measured:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=measure, args=(place, options, folder, theirs), daemon=True)
    process.start()
    found: Measured = ours.recv()
    process.join()
    return found


def measure(place: str, options: argparse.Namespace, folder: str, parent: Connection) -> None:
    torch.set_num_threads(options.threads)
    warm_up(f"{folder}/first")
    empty = resident()
    model, optimizer = made(parse_bytes(options.state), options.width)
    tensors = [p.data for p in model.parameters()]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    nbytes = sum(t.nbytes for t in tensors)
    before = [digest(t) for t in tensors]
    if place == "RAM":
        park: Parked = Copied(model, [optimizer], "host", ("cpu",))
        alone: Callable[[], None] = partial(
            copy_alone, torch.ones(2, 1 << 30, dtype=torch.uint8), nbytes
        )
    else:
        park = commpress.parked(model, optimizer, store=f"{folder}/store")
        alone = partial(file_alone, f"{folder}/alone", nbytes, options.depth)
    took: list[list[float]] = []
    share = 0.0
    for number in range(options.rounds + 1):
        change(tensors, number + 1)
        begin = perf_counter()
        park.park()
        parked = perf_counter()
        if not number:
            share = (resident() - empty) / nbytes
        again = perf_counter()
        park.wake()
        weights = perf_counter()
        park.settle()
        end = perf_counter()
        alone()
        took.append([parked - begin, weights - again, end - again, perf_counter() - end])
        change(tensors, number + 1)
    equal = [digest(t) for t in tensors] == before
    gone, weights, wake, floor = (median(each) for each in zip(*took[1:], strict=True))
    parent.send(Measured(place, nbytes, gone, weights, wake, floor, share, equal))


def warm_up(folder: str) -> None:
    """Load the code that training and parking need."""
    with commpress.parked(*made(48 * 64**2, 64), store=folder) as park:
        pass
    park.settle()


def made(nbytes: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and AdamW after a step: 12 bytes a parameter."""
    layers = nbytes // (48 * width**2)
    model = nn.Sequential(*(nn.Linear(width, 4 * width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def change(tensors: list[torch.Tensor], number: int) -> None:
    """Change bits everywhere, so that all is written; twice is no change."""
    for tensor in tensors:
        tensor.view(torch.int32).bitwise_xor_(number)


def digest(tensor: torch.Tensor) -> int | None:
    return digest_of(tensor.view(-1).view(torch.uint8)) if tensor.dim() else int(tensor)


class Copied(Parked):
    """Parking that frees nothing."""

    def _free(self) -> None:
        pass


def copy_alone(memory: torch.Tensor, nbytes: int) -> None:
    """Copy the bytes twice."""
    one, other = memory
    for _ in range(2):
        for at in range(0, nbytes, one.numel()):
            some = min(nbytes - at, one.numel())
            other[:some].copy_(one[:some])


def file_alone(path: str, nbytes: int, depth: int) -> None:
    """Write a file past the page cache, sync it and read it."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    file = os.open(path, flags, 0o600)
    buffers = [mmap.mmap(-1, PIECE) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = os.urandom(PIECE)

    def move(call: Callable[..., int], first: int) -> None:
        for at in range(first * PIECE, nbytes, depth * PIECE):
            if call(file, [buffers[first]], at) != PIECE:
                raise OSError(f"{path}: a short transfer")

    with ThreadPoolExecutor(depth) as threads:
        list(threads.map(partial(move, os.pwritev), range(depth)))
        os.fdatasync(file)
        list(threads.map(partial(move, os.preadv), range(depth)))
    os.close(file)


def resident() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) << 10
