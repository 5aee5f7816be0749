"""Dispatch to experts and back, against torch's all_to_all_single of sorted copies."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import commpress
from commpress.cli import harness, ranks

HEAD = [
    "k",
    "tokens",
    "torch f32",
    "torch bf16",
    "flat",
    "nodes",
    "int8",
    "auto",
    "x nodes",
    "x int8",
    "x auto",
    "took",
    "node B",
    "formula",
    "wrong",
]
WIDTHS = [3, 7, 10, 11, 8, 8, 8, 8, 8, 7, 7, 13, 10, 8, 6]
WAYS = ("torch f32", "torch bf16", "flat", "nodes", "int8", "auto")
# times faster than torch's float32 copies, with 8 experts a token
BARS = {"nodes": 2.0, "int8": 2.5}
EXACT = ("torch f32", "flat", "nodes")
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


def run(options: argparse.Namespace) -> int:
    bars, table = partial(judge, slow=options.slow), harness.Table(HEAD, WIDTHS, cells)
    return harness.run(options, bench, judge=bars, draw=draw, report=table)


# ---------------------------------------------------------------- on every rank


def bench(
    rank: int, size: int, options: argparse.Namespace, report: ranks.Report
) -> list[ExpertTimes]:
    measured = []
    for k in options.k:
        measured.append(_measure(rank, size, k, options))
        report(measured[-1])
    return measured


def drawn(
    rank: int, k: int, options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, choices and gates of a rank: of a trained model, or drawn around centres."""
    generator = torch.Generator().manual_seed(rank)
    if options.states is not None:
        saved = torch.load(options.states, weights_only=True)
        tokens = saved["tokens"][
            torch.randint(len(saved["tokens"]), (options.tokens,), generator=generator)
        ].float()
        gates, chosen = (tokens @ saved["gate"].float().T).softmax(1).topk(k)
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
    formula = int(met.sum()) * (8 * width + 8 * k + 8)
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


# ---------------------------------------------------------------- on paper


def cells(m: ExpertTimes) -> list[str]:
    times = [f"{1e3 * m.seconds[way]:.1f}" for way in WAYS]
    gains = [f"{m.gain(way):.2f}" for way in ("nodes", "int8", "auto")]
    share = f"{m.node_bytes / m.formula_bytes:.4f}" if m.formula_bytes else "-"
    return [
        str(m.k),
        str(m.tokens),
        *times,
        *gains,
        m.took,
        str(m.node_bytes),
        share,
        str(m.wrong),
    ]


def draw(path: str, measured: list[ExpertTimes]) -> None:
    from commpress.cli import charts

    with charts.chart(path, "Dispatch to experts and back", panels=1) as panels:
        ways = list(measured[0].seconds)
        for i, m in enumerate(measured):
            places = [j + 0.8 * i / len(measured) for j in range(len(ways))]
            panels[0].bar(
                places,
                [1e3 * m.seconds[way] for way in ways],
                0.8 / len(measured),
                label=f"{m.k} experts a token",
            )
        panels[0].set_xticks(range(len(ways)), ways)
        panels[0].set_ylabel("milliseconds")
        panels[0].legend()


def judge(measured: list[ExpertTimes], *, slow: bool = False) -> list[tuple[str, bool]]:
    bars = [(f"k = {m.k}: results are torch's ({m.wrong} differ)", m.wrong == 0) for m in measured]
    bars += [
        (
            f"k = {m.k}: {m.node_bytes} bytes between nodes, {m.formula_bytes} by the formula",
            abs(m.node_bytes - m.formula_bytes) <= 0.01 * m.formula_bytes,
        )
        for m in measured
    ]
    for m in measured if slow else ():
        share = min(m.seconds[way] for way in EXACT) / m.seconds["auto"]
        says = f"auto has {share:.2f} of the speed of the fastest exact way"
        bars.append((f"k = {m.k}: {says}, expected {SLOWER}", share >= SLOWER))
        bars += [
            (
                (
                    f"k = {m.k}: {way} is {m.gain(way):.2f} times faster than torch's copies, "
                    f"expected {least}"
                ),
                m.gain(way) >= least,
            )
            for way, least in BARS.items()
            if m.k >= 8
        ]
    return bars
