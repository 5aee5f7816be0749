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

  python benchmarks expert_dispatch --topology 2x2 --check
  torchrun --nproc-per-node 1 examples/moe_gpt.py --topology 1x1 --width 1024 --layers 1 \\
      --experts 16 --states states.pt
  python benchmarks expert_dispatch --topology 2x2 --states states.pt
  torchrun --nnodes 2 --nproc-per-node 2 ... benchmarks expert_dispatch --topology auto \\
      --slow --check
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import commpress
from commpress.cli import harness, option_groups, refusals
from commpress.errors import InvalidArgument
from commpress.kernels.pieces import aligned
from shared_options import add_output, add_ranks, add_topology, natural

WAYS = ("torch f32", "torch bf16", "flat", "nodes", "int8", "auto")
# times faster than torch's float32 copies, with 8 experts a token
BARS = {"nodes": 2.0, "int8": 2.5}
EXACT = ("torch f32", "flat", "nodes")
STATES = "what examples/moe_gpt.py --states FILE saved"
SLOWER = 0.95  # of the speed of the fastest of these: what "auto" may at most lose


@dataclass
class ExpertTimes:
    k: int
    tokens: int
    seconds: dict[str, float]
    node_bytes: int
    formula_bytes: int
    wrong: int
    took: str  # the codec that "auto" took

    def gain(self, way: str) -> float:
        return self.seconds["torch f32"] / self.seconds[way]


def options(parser: argparse.ArgumentParser) -> None:
    add = partial(option_groups.option, parser)
    add_topology(parser)
    add("--k A,B", option_groups.counts, "2,8", "experts of a token")
    add("--tokens N", natural, 1024, "of each rank")
    add("--width D", natural, 1024, "of a token")
    add("--experts E", natural, 16, "of all ranks")
    says = "tokens and a gate that examples/moe_gpt.py saved"
    add("--states FILE", option_groups.readable(STATES), None, says)
    add("--rounds N", natural, 5, "timed")
    add("--slow", says="links between nodes are slow: hold speeds to their bars, too")
    add_ranks(parser)
    check = (
        "results are torch's and bytes between nodes the formula within 1 %; with --slow speeds, "
        "too"
    )
    add_output(parser, check=check)


def run(options: argparse.Namespace) -> int:
    refusals.on_nodes(options, "topology")
    if max(options.k) > options.experts:
        raise InvalidArgument(
            f"--k is {max(options.k)} and --experts {options.experts}: a token has at most all"
        )
    if options.states:
        trained(options.states, max(options.k))
    bars = partial(judge, slow=options.slow)
    return harness.run(options, bench, cells, judge=bars)


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[ExpertTimes]:
    for k in options.k:
        yield _measure(rank, size, k, options)


def trained(path: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and gate of a trained model, for ``k`` experts of a token at most."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        tokens, gate = saved["tokens"].float(), saved["gate"].float()
    except Exception as error:
        raise InvalidArgument(f"--states is {path!r} ({error!r}), expected {STATES}") from error
    if {tokens.dim(), gate.dim()} != {2} or tokens.shape[1] != gate.shape[1] or not len(tokens):
        raise InvalidArgument(
            f"--states is {path!r} with tokens of {tuple(tokens.shape)} and gate of "
            f"{tuple(gate.shape)}, expected tokens [n, width] and gate [experts, width], {STATES}"
        )
    if k > len(gate):
        raise InvalidArgument(f"--k is {k}, and the gate of --states has {len(gate)} experts")
    return tokens, gate


def drawn(
    rank: int, k: int, options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, choices and gates of a rank: of a trained model, or drawn around centres."""
    generator = torch.Generator().manual_seed(rank)
    if options.states is not None:
        tokens, gate = trained(options.states, k)
        picked = torch.randint(len(tokens), (options.tokens,), generator=generator)
        tokens = tokens[picked].float()
        gates, chosen = (tokens @ gate.float().T).softmax(1).topk(k)
        return tokens, chosen, gates / gates.sum(1, keepdim=True)
    centres = torch.randn(64, options.width, generator=torch.Generator().manual_seed(0))
    near = torch.randint(64, (options.tokens,), generator=generator)
    tokens = centres[near] + 0.3 * torch.randn(options.tokens, options.width, generator=generator)
    chosen = torch.rand(options.tokens, options.experts, generator=generator).topk(k).indices
    return tokens, chosen, torch.rand(options.tokens, k, generator=generator)


def _measure(rank: int, size: int, k: int, options: argparse.Namespace) -> ExpertTimes:
    tokens, chosen, gates = drawn(rank, k, options)
    width = tokens.shape[1]
    exchange = partial(commpress.ExpertExchange, options.experts, topology=options.topology)
    exchanges = {
        "flat": exchange(topology=None),
        "nodes": exchange(),
        "int8": exchange(codec=("int8", "int8")),
        "auto": exchange(codec=("auto", "auto")),
    }
    owner = exchanges["flat"].placement.owner
    ranks_of = torch.from_numpy(owner)[chosen]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(_there_and_back, each, tokens, chosen, gates)
        for name, each in exchanges.items()
    }
    for name, dtype in (("torch f32", torch.float32), ("torch bf16", torch.bfloat16)):
        calls[name] = partial(_by_torch, tokens, ranks_of, gates, dtype, size)
    found = {name: call() for name, call in calls.items()}
    before = exchanges["nodes"].counters.between_bytes
    calls["nodes"]()
    sent = exchanges["nodes"].counters.between_bytes - before
    median = harness.medians(
        {name: partial(harness.together, call) for name, call in calls.items()}, options.rounds
    )
    home = torch.tensor([exchanges["nodes"].carrier.nodes.home[r] for r in range(size)])
    met = torch.zeros(options.tokens, int(home.max()) + 1).scatter_(1, home[ranks_of], 1)
    met[:, home[rank]] = 0
    # out with gates, back, and the list of experts
    each_met = aligned(4 * width + 4 * k) + aligned(4 * width) + 4 * k + 8
    formula = int(met.sum()) * each_met
    close = [
        torch.isclose(found[name], found["torch f32"], rtol=1e-4, atol=1e-5)
        for name in ("flat", "nodes")
    ]
    totals = torch.tensor([sent, formula, sum(int((~each).sum()) for each in close)])
    dist.all_reduce(totals)
    node_bytes, formula_bytes, wrong = totals.tolist()
    measurement = exchanges["auto"].measurement
    took = "" if measurement is None else measurement.chosen
    return ExpertTimes(k, options.tokens, median, node_bytes, formula_bytes, wrong, took)


def _there_and_back(
    exchange: commpress.ExpertExchange,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    gates: torch.Tensor,
) -> torch.Tensor:
    """A row for each token that comes to a rank: as torch's copies are here, not yet in the order
    of experts."""
    routing = exchange.create_routing(chosen, layout="flat")
    rows, weights, _ = exchange.dispatch(routing, tokens, gates)
    assert weights is not None
    return exchange.combine(routing, rows * weights.sum(1, keepdim=True))


def _by_torch(
    tokens: torch.Tensor, ranks_of: torch.Tensor, gates: torch.Tensor, dtype: torch.dtype, size: int
) -> torch.Tensor:
    """A copy of a token for each of its experts, sorted by rank, there and back."""
    count, k = ranks_of.shape
    order = ranks_of.flatten().argsort(stable=True)
    sent = torch.bincount(ranks_of.flatten(), minlength=size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    outbox = tokens.to(dtype)[order // k]
    inbox = outbox.new_empty(int(received.sum()), tokens.shape[1])
    dist.all_to_all_single(inbox, outbox, received.tolist(), sent.tolist())
    back = torch.empty_like(outbox)
    dist.all_to_all_single(back, inbox, sent.tolist(), received.tolist())
    copies = torch.empty_like(back)
    copies[order] = back
    return torch.einsum("tk,tkd->td", gates, copies.view(count, k, -1).float())


def cells(m: ExpertTimes) -> dict[str, str]:
    return {
        "k": str(m.k),
        "tokens": str(m.tokens),
        **{way: f"{1e3 * m.seconds[way]:.1f}" for way in WAYS},
        **{f"x {way}": f"{m.gain(way):.2f}" for way in ("nodes", "int8", "auto")},
        "took": m.took,
        "node B": str(m.node_bytes),
        "formula": f"{m.node_bytes / m.formula_bytes:.4f}" if m.formula_bytes else "-",
        "wrong": str(m.wrong),
    }


def judge(measured: list[ExpertTimes], *, slow: bool = False) -> list[tuple[str, bool]]:
    bars = []
    for m in measured:
        said = f"k = {m.k}: {m.node_bytes} bytes between nodes, {m.formula_bytes} by the formula"
        close = abs(m.node_bytes - m.formula_bytes) <= 0.01 * m.formula_bytes
        bars += [
            (f"k = {m.k}: results are torch's ({m.wrong} differ)", m.wrong == 0),
            (said, close),
        ]
    for m in measured if slow else ():
        share = min(m.seconds[way] for way in EXACT) / m.seconds["auto"]
        said = f"k = {m.k}: auto has {share:.2f} of the speed of the fastest exact way"
        bars.append((f"{said}, expected {SLOWER}", share >= SLOWER))
        for way, least in BARS.items() if m.k >= 8 else ():
            said = f"k = {m.k}: {way} is {m.gain(way):.2f} times faster than torch's copies"
            bars.append((f"{said}, expected {least}", m.gain(way) >= least))
    return bars
