"""Hot experts on several ranks: the sums, gradients and weights of one copy, and less to do for who
has them."""

import runpy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
import sources
from commpress.collectives.all_to_all.routes import Nodes
from commpress.collectives.all_to_all.tokens import Placement
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.integrations.experts.expert_copies import ExpertCopies, filled, hottest
from commpress.integrations.observe.metrics import StepMetrics
from test_experts import Batch, made, same, simulated, through, walked
from test_moe import Batched, Net, batch_of
from variants import seldom

PAIRS = Nodes.of(((0, 1), (2, 3)), 4)


# ---------------------------------------------------------------- which copy


def test_copies_go_to_other_nodes_and_tokens_to_the_nearest():
    every = [ExpertCopies(Placement.even(8, 4), PAIRS, rank, {1: 2, 6: 4}) for rank in range(4)]
    assert all(each.holders == every[0].holders for each in every)
    first, second = every[0].holders[1]
    assert (first, PAIRS.home[second]) == (0, 1)  # where none of the expert was
    assert sorted(every[0].holders[6]) == [0, 1, 2, 3]
    for rank, each in enumerate(every):
        assert each.shares[6].tolist() == [float(on == rank) for on in each.holders[6]]
        assert each.shares[1].tolist() == [
            float(PAIRS.home[on] == PAIRS.home[rank]) for on in (first, second)
        ]
        assert each.expert.tolist() == [*range(8), 1, 6, 6, 6]
        wanted = np.array([[1, 6], [0, -1], [6, 1]])
        assert (each.expert[each.spread(wanted)][wanted >= 0] == wanted[wanted >= 0]).all()
        assert each.spread(wanted)[1, 1] == -1


def test_far_tokens_fill_up_who_has_least():
    """One node of four: ranks 1 and 3 have no copy, and give to ranks 0 and 2 so that both come to
    the same."""
    one = Nodes.of(((0, 1, 2, 3),), 4)
    # of experts 0, 1, 2, 3: rank 0 has its own 10 of expert 0, and rank 2 would have 10
    load = [40, 12, 0, 20]
    every = [ExpertCopies(Placement([0, 0, 2, 3], 4), one, rank, {0: 2}, load) for rank in range(4)]
    holders = every[0].holders[0]
    assert holders == (0, 1)  # rank 1 had nothing to do
    for rank in (2, 3):  # 10 + 12 there already at rank 0, 10 at rank 1, 20 more: 26 each
        np.testing.assert_allclose(every[rank].shares[0], [4 / 20, 16 / 20])
    assert filled(np.array([3.0, 1.0, 9.0]), 4).tolist() == [1, 3, 0]
    assert filled(np.array([3.0, 1.0]), 0).tolist() == [0, 0]


def test_the_hottest_get_copies():
    assert hottest([100, 10, 40, 0], 3, 4) == {0: 3, 2: 2}
    assert hottest([100, 0], 9, 4) == {0: 4}
    assert hottest([0, 0], 9, 4) == {}


def test_a_zipf_routing_is_more_even_with_copies():
    """Counted: the fullest of 8 ranks has over 3 times the mean, and with 8 copies, made of that
    load, less than half of it."""
    batch, weight = Batch(8, 16, 2, seed=4), 1 / np.arange(1, 17) ** 1.2
    for rank in range(8):
        draw, p = np.random.default_rng(rank), weight / weight.sum()
        chosen = np.stack([draw.choice(16, 2, replace=False, p=p) for _ in range(256)])
        batch.topk[rank], batch.gates[rank] = torch.from_numpy(chosen), torch.rand(256, 2)
        batch.tokens[rank] = torch.randn(256, 24)
    exchanges = made(16, Loopback(8).transports(), topology="2x4")

    def fullest():
        before = [e.counters.received for e in exchanges]
        simulate([through(e, batch, torch.ones(24)) for e in exchanges])
        received = [e.counters.received - b for e, b in zip(exchanges, before, strict=True)]
        assert sum(received) == 8 * 256 * 2
        return max(received) * 8 / sum(received)

    alone = fullest()
    load = np.bincount(torch.cat(batch.topk).flatten().numpy(), minlength=16).tolist()
    assert np.concatenate([e.counters.since for e in exchanges]).tolist() == load
    for exchange in exchanges:
        exchange.copy_experts(hottest(load, 8, 8), load)
        assert not exchange.counters.since.any()
    assert alone > 3
    assert fullest() < 1.4


# ---------------------------------------------------------------- sums and weights


@pytest.mark.parametrize(("topology", "k"), [(None, 2), ("2x2", 5), ("1,3", 1)])
def test_identity_experts_with_copies(topology, k):
    """With one or two choices no bit changes; with more, those of a rank come first, and copies are
    of their ranks."""
    batch, copies, ones = Batch(4, 8, k, seed=k), {0: 3, 3: 2, 7: 4}, torch.ones(8 + 6)
    with_copies, exchanges = simulated(batch, ones, topology=topology, copies=copies)
    without, _ = simulated(batch, ones, topology=topology)
    if k <= 2:
        assert same(with_copies, without)
    nodes = exchanges[0].carrier.nodes.members
    spread = Batch(4, 8, k, seed=k)
    spread.topk = [
        torch.from_numpy(e.copies.spread(t.numpy()))
        for e, t in zip(exchanges, batch.topk, strict=True)
    ]
    assert same(with_copies, walked(spread, ones, nodes, exchanges[0].placement.owner.tolist()))
    choices = sum(int((t >= 0).sum()) for t in batch.topk)
    assert sum(e.counters.received for e in exchanges) == choices


class Listed(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(5)
        )

    def forward(self, x):
        hidden = self.inner(x)
        gates, chosen = self.gate(hidden).softmax(-1).topk(2)
        return x + self.experts(hidden, chosen, gates)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
    "onebit": lambda p: commpress.OneBitAdam(p, lr=1e-2, eps=1e-3, exact_steps=30),
}


def trained(kind, optimizer, copies, options):
    torch.set_num_threads(1)
    model = Listed() if kind == "list" else Net()
    if kind == "list":
        model.experts = commpress.moe.Experts(model.experts, copies=copies, **options)
    commpress.moe.parallelise(model, **({} if kind == "list" else {"copies": copies} | options))
    ddp, layer = DistributedDataParallel(model), commpress.moe.experts_of(model)[0]
    made = OPTIMIZERS[optimizer](model.parameters())
    if optimizer == "onebit":
        commpress.overlap(ddp, made)
    norms = []
    for step in range(10):
        for part in (0, 1):  # micro-batches, the second of tokens that few have
            rows = batch_of(dist.get_rank(), 2 * step + part)[: 9 - 8 * part]
            ddp(rows).square().mean().backward()
        if optimizer != "onebit":
            norms.append(float(commpress.moe.clip_grad_norm_(model.parameters(), 0.05)))
        made.step()
        made.zero_grad()
        if copies and step == 4:
            commpress.moe.copy_experts(model, 3)
            assert sum(len(on) - 1 for on in layer.exchange.copies.holders.values()) == 3
    own = layer.copied.home_weights(layer.experts, layer.own)
    seen = layer.copied.fetch(torch.zeros(0, 6), layer.experts, layer.own)[1].weights
    return (
        {name: p.detach().numpy() for name, p in model.named_parameters()},
        norms,
        {e: w.detach().numpy() for e, w in own.items()},
        {e: w.detach().numpy() for e, w in seen.items()},
        sorted(layer.state_dict()),
    )


@pytest.mark.parametrize(
    ("kind", "optimizer", "options"),
    [
        ("list", "adamw", {"chunks": 2}),
        ("batched", "onebit", {"separate": True}),
        seldom("batched", "momentum", {}),
        seldom("batched", "adamw", {"topology": "2,1"}),
    ],
    ids=str,
)
def test_copies_train_as_one_and_stay_equal(pool, kind, optimizer, options):
    """Ten steps of three ranks, clipped, with other copies from the fifth on; sums in another order
    make the difference."""
    ours = pool.run(trained, kind, optimizer, {0: 3, 2: 2}, options, size=3)
    plain = pool.run(trained, kind, optimizer, None, options, size=3)
    homes = {e: weights for _, _, own, *_ in ours for e, weights in own.items()}
    assert sorted(homes) == list(range(5))
    assert sum(len(seen) for *_, seen, _ in ours) == 3
    for one, twin in zip(ours, plain, strict=True):
        (weights, norms, _, seen, state), (others, expected, _, _, names) = one, twin
        assert state == names
        np.testing.assert_allclose(norms, expected, rtol=1e-4)
        assert weights.keys() == others.keys()
        for name, value in weights.items():
            np.testing.assert_allclose(value, others[name], rtol=0, atol=3e-5)
        for e, copied in seen.items():
            assert (copied == homes[e]).all()


def test_an_expert_without_tokens_has_no_gradient_whether_or_not_it_has_copies(pool):
    for gradients in pool.run(untouched, size=3):
        assert gradients in ([(0, True), (1, False)], [(2, False), (3, False)], [(4, True)])


def untouched():
    rank = dist.get_rank()
    torch.manual_seed(1)
    layer = commpress.moe.Experts(
        [torch.nn.Linear(6, 6) for _ in range(5)], placement=[0, 0, 1, 1, 2], copies={0: 3, 2: 2}
    )
    tokens = torch.randn(4, 6)
    chosen = torch.tensor([[0, 4]] * 4) if rank else torch.full((4, 2), 4)
    layer(tokens, chosen, torch.ones(4, 2)).sum().backward()
    return [
        (e, m.weight.grad is not None)
        for e, m in zip(layer.own, layer.experts.children(), strict=True)
    ]


def test_what_cannot_have_copies_is_refused(tmp_path):
    one, two = Loopback(1).transport(0), Loopback(2).transport(0)
    store = commpress.TieredStore.open(tmp_path, host="1MiB")
    linear, normal = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
    mixed = [linear, torch.nn.Linear(6, 6).to(torch.bfloat16)]
    for experts, transport, copies, options, says in [
        (Batched(5), two, {9: 2}, {}, "expert 9 on 2 ranks, expected experts 0 to 4"),
        (Batched(5), one, {0: 2}, {}, "expert 0 on 2 ranks, expected .* on 1 to 1 ranks"),
        (Batched(5), one, {0: 0}, {}, "on 0 ranks"),
        (Batched(5), one, {"a": 1}, {}, "expert 'a'"),
        (Batched(4), two, {0: 2}, {"store": store, "resident": 2}, "copies and store are given"),
        (mixed, two, {0: 2}, {}, r"parameters of .*bfloat16.*, expected one dtype"),
        ([torch.nn.Sequential(linear, normal)] * 2, two, {0: 2}, {}, "no buffers"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            commpress.moe.Experts(experts, process_group=transport, copies=copies, **options)
    with pytest.raises(InvalidArgument, match=r"load is .*, expected the choices of each of the 5"):
        ExpertCopies(Placement.even(5, 4), PAIRS, 0, {0: 2}, [1.0])


# ---------------------------------------------------------------- a picture


def sampled(tokens, dropped=0):
    """Three samples of a rank that has experts ``tokens``."""
    each = [{f"layer 0/{e}": float(n * step) for e, n in tokens.items()} for step in (1, 2, 3)]
    fixed = {"expert_choices": 100, "expert_dropped": dropped}
    return [
        StepMetrics(5 * i, 5, 0.1, expert_tokens=tokens, **fixed)
        for i, tokens in enumerate(each, 1)
    ]


def test_a_picture_of_load_has_every_expert_once(tmp_path):
    pytest.importorskip("matplotlib")
    ranks = [sampled({0: 10, 10: 3}), sampled({2: 4, 0: 6}, dropped=25)]
    example = runpy.run_path(str(sources.ROOT / "examples/expert_load.py"))
    draw, (names, table) = example["draw"], example["expert_table"](ranks)
    assert names == ["layer 0/0", "layer 0/2", "layer 0/10"]
    # a copy's tokens are its expert's
    assert table.tolist() == [[16, 32, 48], [4, 8, 12], [3, 6, 9]]
    draw(str(tmp_path / "load.svg"), ranks)
    drawn = (tmp_path / "load.svg").read_text()
    for text in ("fullest", "rank 1", "layer 0/10", "of all choices, %"):
        assert f"<!-- {text} -->" in drawn
    with pytest.raises(InvalidArgument, match=r"samples of \[3, 2\] steps"):
        draw(str(tmp_path / "load.svg"), [ranks[0], ranks[1][:2]])
