"""the all-reduce in two levels, against the flat one and torch's float32 all-reduce

All three run interleaved, some calls back to back, so that a network's moods hit them alike. Which
ranks share a node is what the launcher says, or --topology. One line per size and codec:
  torch, flat, levels   milliseconds, medians of the slowest rank's: torch's float32 all_reduce, our
                        flat one with the codec, and the hierarchical one, which compresses between
                        nodes only
  speed-up              torch / levels
  #wrong                elements whose bits differ between ranks after the hierarchical one
  node B, formula       bytes that left the busiest node in one hierarchical all-reduce, headers
                        included, against 2(m-1)/m * size of the codec's rows for m nodes
  choice, loss          which of flat and levels the file of --links makes collectives take, and
                        what that costs against the faster of the two

  python benchmarks hierarchical --topology 2x2 --codec none,sign   4 processes, as if on two nodes
  torchrun --nnodes 2 --nproc-per-node 8 ... benchmarks hierarchical --links links.json --check
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commpress.cli import harness
from commpress.cli.option_groups import option
from commpress.cli.probe import on_nodes
from commpress.cli.reduced import LADDER, TwoLevel, trials
from commpress.codecs import codec_named
from commpress.collectives.levels import choose
from commpress.collectives.measured_links import Links, load_links
from commpress.errors import InvalidArgument
from commpress.kernels.pieces import width_of
from shared_options import add_output, add_ranks, add_sizes, add_topology, sizes_of

# bytes of a buffer from which headers are below 2 % of the formula, also with one bit
HEADERS_FROM = 1 << 20


@dataclass
class Measured:
    size: int
    codec: str
    torch_seconds: float
    flat_seconds: float
    levels_seconds: float
    wrong: int
    node_bytes: int
    formula_bytes: float
    choice: str | None

    @property
    def speed_up(self) -> float:
        return self.torch_seconds / self.levels_seconds

    @property
    def loss(self) -> float | None:
        """Cost of the choice against the faster of the two, as a share of it."""
        if self.choice is None:
            return None
        chosen = self.flat_seconds if self.choice == "flat" else self.levels_seconds
        return chosen / min(self.flat_seconds, self.levels_seconds) - 1


def options(parser: argparse.ArgumentParser) -> None:
    add_topology(parser)
    option(parser, "--codec A,B", None, "none,sign", "between nodes")
    option(
        parser,
        "--links FILE",
        says="of commpress probe: show what it makes collectives take",
    )
    add_sizes(parser, "1MiB", "32MiB")
    option(parser, "--iterations N", int, 5, "timed, of each line; more if short")
    add_ranks(parser)
    add_output(
        parser,
        check="ranks agree bit for bit, bytes fit the formula and the choice loses at most 5 %",
    )


def run(options: argparse.Namespace) -> int:
    if options.iterations < 1:
        raise InvalidArgument("--iterations must be at least 1")
    links_of(options), sizes_of(options)
    for codec in options.codec.split(","):
        codec_named(codec)
    return harness.run(options, bench, cells, judge=judge)


def links_of(options: argparse.Namespace) -> Links | None:
    return load_links(options.links) if options.links else None


# ---------------------------------------------------------------- on every rank


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured | str]:
    channel, hierarchy = on_nodes(options.topology)
    topology, links = hierarchy.topology, links_of(options)
    if links is not None and links.topology != topology:
        raise InvalidArgument(
            f"--links was measured on nodes {str(links.topology)!r}, these are {str(topology)!r}: "
            "run commpress probe here"
        )
    yield f"# nodes {topology}"
    # a cold process is slow
    trials("none", channel, hierarchy, options.iterations, ladder=LADDER[:1])
    for nbytes in sizes_of(options):
        for codec in options.codec.split(","):
            buffer = TwoLevel(nbytes // 4, codec, channel, hierarchy)
            yield _measure(buffer, options.iterations, links)


def _measure(buffer: TwoLevel, iterations: int, links: Links | None) -> Measured:
    levels = buffer.hierarchy
    took = buffer.run(iterations, torch=lambda: dist.all_reduce(buffer.buffer))
    before, topology = levels.between_bytes, levels.hierarchy.topology
    buffer.fill()
    buffer.levels()  # whose result is checked
    nodes, numel = topology.nodes, buffer.input.numel()
    sent = torch.zeros(len(nodes), dtype=torch.int64)
    sent[topology.node(buffer.channel.rank)] = levels.between_bytes - before
    dist.all_reduce(sent)
    formula = (
        2 * (len(nodes) - 1) / len(nodes) * codec_named(buffer.codec).row_bytes(width_of(numel, 1))
    )
    choice = choose(numel, buffer.codec, links) if links else None
    return Measured(
        4 * numel,
        buffer.codec,
        took["torch"],
        took["flat"],
        took["levels"],
        buffer.wrong(),
        int(sent.max()),
        formula,
        choice,
    )


# ---------------------------------------------------------------- on paper


def cells(m: Measured) -> dict[str, str]:
    times = {"torch": m.torch_seconds, "flat": m.flat_seconds, "levels": m.levels_seconds}
    return {
        "size B": str(m.size),
        "codec": m.codec,
        **{f"{name} ms": f"{1e3 * seconds:.2f}" for name, seconds in times.items()},
        "speed-up": f"{m.speed_up:.2f}",
        "#wrong": str(m.wrong),
        "node B": str(m.node_bytes),
        "formula": f"{m.node_bytes / max(m.formula_bytes, 1):.3f}",
        "choice": m.choice or "-",
        "loss": "-" if m.loss is None else f"{100 * m.loss:.0f}%",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    large = [m for m in measured if m.size >= HEADERS_FROM]
    off = max(
        (abs(m.node_bytes / m.formula_bytes - 1) for m in large if m.formula_bytes), default=0.0
    )
    bars = [
        ("every element has the same bits on every rank", all(m.wrong == 0 for m in measured)),
        (
            (
                f"bytes between nodes are the formula's within {100 * off:.1f} %, 2 % allowed "
                "(from 1 MiB on)"
            ),
            off <= 0.02,
        ),
    ]
    losses = [m.loss for m in measured if m.loss is not None]
    if losses:
        worst = max(losses)
        bars.append((f"the choice costs at most {100 * worst:.0f} %, 5 % allowed", worst <= 0.05))
    return bars
