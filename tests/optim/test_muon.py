"""Muon over the ranks: the bits of torch's where nothing is compressed, and where it is nothing
lost, no bit different between ranks, no byte uncounted."""

import math
import re

import pytest
import torch

import commpress
from commpress.codecs import codec_named
from commpress.collectives import owners
from commpress.collectives.frame import HEADER
from commpress.errors import InvalidArgument, Mismatch, StateMismatch
from commpress.kernels.pieces import aligned, width_of
from commpress.optim.newton_schulz import orthogonalised, owners_of
from optim_twin import Replicas, equal, mean, noise, start
from state_worlds import apart, stored
from variants import few

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
SHAPES = ((24, 40), (40, 24), (700,), (17, 5), (7,), (64, 64), (3, 5, 2), (1, 9), (1300,))
RATES = {"lr": 0.02, "adamw": {"lr": 3e-3}}
EXACT = {"codec": None, "update_codec": None}


def made(**options):
    return lambda p, transport: commpress.Muon(p, transport=transport, **RATES | options)


def world(size, shapes=SHAPES, **options):
    return Replicas(made(**options), size, shapes)


class Torch:
    """torch's two optimizers on the same weights."""

    def __init__(self, shapes=SHAPES, *, adamw=None, **options):
        self.parameters = [torch.nn.Parameter(p) for p in start(shapes)]
        matrices = [p for p in self.parameters if p.ndim == 2]
        rest = [p for p in self.parameters if p.ndim != 2]
        self.optimizers = [
            torch.optim.Muon(matrices, **{"lr": 0.02} | options),
            torch.optim.AdamW(rest, fused=True, **RATES["adamw"] | (adamw or {})),
        ]

    def step(self, gradients):
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        for optimizer in self.optimizers:
            optimizer.step()


def of_owners(optimizers):
    """Momentum of each matrix, and what its updates lack, from its owner."""
    found = {}
    for optimizer in optimizers:
        mine = optimizer.owned()
        assert not found.keys() & mine.keys(), "a matrix has one owner"
        found |= mine
    return found


def alike(replicas):
    """True if weights and the state that all ranks have are the same in every bit."""
    first, *others = replicas.optimizers
    return all(equal(replicas.parameters[0], mine) for mine in replicas.parameters[1:]) and all(
        torch.equal(tensor, other.copies()[name])
        for other in others
        for name, tensor in first.copies().items()
    )


def residual(replicas, name):
    """The mean over the ranks of what they still owe of a matrix, as a flat tensor."""
    places = (sorted(o.gradients.residuals.places()) for o in replicas.optimizers)
    every = ([sent.double() for (key, _), sent, _ in own if key == name] for own in places)
    return sum(map(torch.cat, every)) / replicas.size


def whole(size, step, shapes=SHAPES):
    """Gradients whose mean over ``size`` ranks is exact in any order of the sum."""
    return [[(size * 64 * g).round() / 64 for g in mine] for mine in noise(size, step, shapes)]


# ---------------------------------------------------------------- torch's bits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"adamw": {"betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.3}},
    ],
    ids=str,
)
def test_one_rank_has_the_bits_of_torch(options):
    """Also where codecs are given, since nothing travels, and where a parameter has no gradient in
    some steps."""
    adamw = {"adamw": RATES["adamw"] | options.get("adamw", {})}
    for codecs in (EXACT, {}):
        group, twin = world(1, **options | codecs | adamw), Torch(**options)
        for step in range(6):
            gradients = noise(1, step, SHAPES)[0]
            gradients[step] = None
            assert group.step([gradients]) == [True]
            twin.step(gradients)
            assert equal(group.parameters[0], twin.parameters), step


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_exact_ranks_have_the_bits_of_one(size):
    group, alone = world(size, **EXACT), world(1, **EXACT)
    for step in range(5):
        gradients = whole(size, step)
        average = mean(gradients)
        assert all(torch.equal(sum(g) / size, a) for *g, a in zip(*gradients, average, strict=True))
        group.step(gradients)
        alone.step([average])
        assert equal(group.parameters[0], alone.parameters[0]), step
        assert alike(group)
    assert set(of_owners(group.optimizers)) == set(of_owners(alone.optimizers))


@pytest.mark.parametrize("shapes", [((24, 40),), ((700,), (7,)), ((8, 8), (8, 8), (8, 8))])
def test_matrices_alone_others_alone_and_ranks_that_own_nothing(shapes):
    group, alone = world(5, shapes, **EXACT), world(1, shapes, **EXACT)
    coded = world(5, shapes)
    for step in range(3):
        gradients = whole(5, step, shapes)
        for each in (group, coded):
            assert each.step(gradients) == [True] * 5
            assert alike(each)
        alone.step([mean(gradients)])
        assert equal(group.parameters[0], alone.parameters[0])
    assert not equal(coded.parameters[0], start(shapes))


def test_a_parameter_without_a_gradient_on_every_rank_is_left_alone():
    """One with a gradient on some rank counts as zero on the others."""
    group, alone = world(3, **EXACT), world(1, **EXACT)
    for step in range(6):
        gradients = whole(3, step)
        for rank, mine in enumerate(gradients):
            mine[step] = None
            mine[(step + 2) % 9] = mine[(step + 2) % 9] if rank == 1 else None
        zeros = [
            [torch.zeros(s) if g is None else g for s, g in zip(SHAPES, m, strict=True)]
            for m in gradients
        ]
        average = mean(zeros)
        average[step] = None
        before = [p.detach().clone() for p in group.parameters[0]]
        assert group.step(gradients) == [True] * 3
        alone.step([average])
        assert torch.equal(before[step], group.parameters[0][step])
        assert equal(group.parameters[0], alone.parameters[0]), step
        assert alike(group)


def test_half_precision_has_master_weights():
    group = Replicas(made(**EXACT), 2, SHAPES, dtype=torch.bfloat16)
    masters = Replicas(made(**EXACT), 2, SHAPES)
    for mine, theirs in zip(group.parameters, masters.parameters, strict=True):
        for p, q in zip(mine, theirs, strict=True):
            q.data.copy_(p)
    for step in range(5):
        gradients = [[g.bfloat16().float() for g in mine] for mine in noise(2, step, SHAPES)]
        group.step(gradients)
        masters.step(gradients)
    assert equal(group.parameters[0], [p.bfloat16() for p in masters.parameters[0]])
    assert not equal(group.parameters[0], [p.bfloat16() for p in start(SHAPES)])


def parts_of(tensor, split):
    """The matrices of a tensor, as torch's Muon takes them."""
    batch = tensor if tensor.ndim == 3 else [tensor]
    return [part.clone() for each in batch for part in each.split(split or each.shape[0])]


def in_parts(tensors):
    return [
        part
        for t, split in zip(tensors, FUSED.values(), strict=True)
        for part in parts_of(t, split)
    ]


# experts, wide and tall, also with fused halves; heads; query, key and value of unequal rows
FUSED = {
    (3, 24, 40): None,
    (2, 40, 24): None,
    (3, 32, 20): (16, 16),
    (2, 30, 20): (10, 20),
    (60, 41): (20, 20, 20),
    (56, 16): [40, 8, 8],
    (64, 16): (32, 32),
}


def fused(parameters):
    groups = [{"params": [p], "use_muon": True} for p in parameters]
    for group, split in zip(groups, FUSED.values(), strict=True):
        group |= {} if split is None else {"split": split}
    return groups


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_matrices_in_one_tensor_have_the_bits_of_torch_for_each(size, adjust_lr_fn):
    options = {"lr": 0.02, "adjust_lr_fn": adjust_lr_fn}
    group = Replicas(
        lambda p, t: commpress.Muon(fused(p), transport=t, **EXACT, **options), size, [*FUSED]
    )
    twins = [torch.nn.Parameter(p) for p in in_parts(start([*FUSED]))]
    muon = torch.optim.Muon(twins, **options)
    for step in range(4):
        gradients = whole(size, step, [*FUSED])
        group.step(gradients)
        for p, g in zip(twins, in_parts(mean(gradients)), strict=True):
            p.grad = g
        muon.step()
        assert equal(in_parts([p.detach() for p in group.parameters[0]]), twins), step
        assert alike(group)


def test_split_matrices_are_dealt_by_what_they_take():
    """Heads of 8 rows take less than a hundredth of their matrix."""
    assert owners_of([(512, 512)] * 2 + [(64, 512)] * 2, 2, [(8,) * 64, None]) == [1, 0, 1, 1]


# ---------------------------------------------------------------- compressed


@pytest.mark.parametrize(
    ("size", "options"),
    few(
        [2, 3, 5],
        [{}, {"codec": "bf16"}, {"update_codec": "sign"}, {"update_codec": None}],
    ),
)
def test_ranks_have_the_same_bits_and_nothing_is_lost(size, options):
    """Without momentum the owner's momentum is the mean gradient that came."""
    group = world(size, momentum=0.0, weight_decay=0.0, lr=1.0, **options)
    names = [f"#{i:05d}" for i, shape in enumerate(s for s in SHAPES if len(s) == 2)]
    matrices = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]
    given, came, wanted = ({name: 0.0 for name in names} for _ in range(3))
    for step in range(12):
        gradients = noise(size, step, SHAPES)
        group.step(gradients)
        assert alike(group)
        owned = of_owners(group.optimizers)
        for name, i in zip(names, matrices, strict=True):
            arrived = owned[name]["momentum_buffer"]
            given[name] += sum(mine[i].double() for mine in gradients) / size
            came[name] += arrived.double()
            o = group.optimizers[0].param_groups[0]
            u = orthogonalised(arrived, o["ns_coefficients"], o["ns_steps"], o["eps"])
            wanted[name] += u.double()
    for name, i in zip(names, matrices, strict=True):
        owed = residual(group, name).view(SHAPES[i])
        torch.testing.assert_close(came[name] + owed, given[name], rtol=0, atol=2e-5)
        assert owed.any()
        lacking = of_owners(group.optimizers)[name].get("lacking", torch.zeros(()))
        assert bool(lacking.any()) == (options.get("update_codec", "int4") is not None)
        s = math.sqrt(max(1, SHAPES[i][0] / SHAPES[i][1]))
        moved = (start(SHAPES)[i] - group.parameters[0][i].detach()).double() / s
        torch.testing.assert_close(moved + lacking, wanted[name], rtol=0, atol=5e-5)


def row(codec, numel):
    return aligned(codec_named(codec).row_bytes(-(-numel // 8) * 8))


@pytest.mark.parametrize(("size", "codecs"), few([2, 3, 4], [("int8", "int4"), (None, None)]))
def test_every_byte_is_counted(size, codecs):
    """(P − 1)·(48 + the longest row of an owner) each way, and an all-reduce of the rest."""
    group = world(size, codec=codecs[0], update_codec=codecs[1], check_every=0)
    group.step(noise(size, 0, SHAPES))
    there, back = codecs[0] or "none", codecs[1] or "bf16"
    matrices = [shape for shape in SHAPES if len(shape) == 2]
    owner = owners_of(matrices, size)
    longest = {
        codec: max(
            sum(row(codec, math.prod(s)) for s, o in zip(matrices, owner, strict=True) if o == r)
            for r in range(size)
        )
        for codec in (there, back)
    }
    others = [math.prod(shape) for shape in SHAPES if len(shape) != 2]
    rest = [
        aligned(codec_named(there if n >= 1024 else "none").row_bytes(width_of(n, size)))
        for n in others
    ]
    wanted = (size - 1) * (4 * HEADER + longest[there] + longest[back] + 2 * sum(rest))
    for optimizer in group.optimizers:
        assert optimizer.channel.sent_bytes == wanted
        assert optimizer.step_bytes() == wanted == optimizer.counters.wire_bytes


def test_long_matrices_travel_in_pieces(monkeypatch):
    """Their numbers do not depend on where they are cut, except for a code's blocks."""
    group = world(3, **EXACT)
    monkeypatch.setattr(owners, "PIECE", 512)
    monkeypatch.setattr(owners, "MESSAGE", 3 * 1024)
    cut, coded = world(3, **EXACT), world(3, momentum=0.0)
    assert len(cut.optimizers[0].gradients.plan) > 3 > len(group.optimizers[0].gradients.plan)
    total = 0.0
    for step in range(4):
        gradients = noise(3, step, SHAPES)
        for each in (group, cut, coded):
            each.step(gradients)
            assert alike(each)
        assert equal(group.parameters[0], cut.parameters[0])
        total = total + sum(mine[5].double() for mine in gradients) / 3
        total = total - of_owners(coded.optimizers)["#00003"]["momentum_buffer"]
    left = residual(coded, "#00003")
    torch.testing.assert_close(left.view(64, 64), total, rtol=0, atol=1e-5)


def test_owners_have_about_as_much_to_do():
    layers = [(768, 768)] * 24 + [(2304, 768)] * 12 + [(3072, 768)] * 12 + [(768, 3072)] * 12
    for size in (2, 4, 7):
        owner = owners_of(layers, size)
        work = [min(s) ** 2 * (2 * max(s) + min(s)) for s in layers]
        loads = [sum(w for w, o in zip(work, owner, strict=True) if o == r) for r in range(size)]
        assert max(loads) < 1.1 * sum(work) / size
    assert owners_of([(8, 8)] * 3, 5) == [0, 1, 2]


def test_only_the_owner_has_momentum():
    group = world(4)
    shard = [
        sum(t.numel() for t in o.state_dict()["owned"].values() for t in t.values())
        for o in group.optimizers
    ]
    matrices = [shape for shape in SHAPES if len(shape) == 2]
    assert sum(shard) == 2 * sum(map(math.prod, matrices))
    for o in group.optimizers:
        buffers = [s["momentum_buffer"] for s in o.state.values() if "momentum_buffer" in s]
        assert sum(b.numel() for b in buffers) <= o.momentum.numel()
        assert o.momentum.numel() <= max(8, sum(b.numel() + 7 for b in buffers))


def test_no_weight_jumps_and_none_stands_still():
    """Beside torch's Muon on the mean gradient."""
    group, twin = world(4, weight_decay=0.0), Torch(weight_decay=0.0)
    begin = start(SHAPES)
    for step in range(40):
        gradients = noise(4, step, SHAPES)
        before = [p.detach().clone() for p in group.parameters[0]]
        group.step(gradients)
        twin.step(mean(gradients))
        for p, q, shape in zip(before, group.parameters[0], SHAPES, strict=True):
            assert (p - q).abs().max() < 20 * (0.02 if len(shape) == 2 else 3e-3)
    for p, q, r in zip(begin, group.parameters[0], twin.parameters, strict=True):
        assert not bool(((p == q) & (p != r)).any())


# ---------------------------------------------------------------- state


def resumed(group, states, size, **options):
    """A world of ``size`` ranks that has loaded these states and the weights of ``group``."""
    other = world(size, **options)
    for step in range(50, 53):
        other.step(noise(size, step, SHAPES))
    for r, optimizer in enumerate(other.optimizers):
        for p, q in zip(other.parameters[r], group.parameters[0], strict=True):
            p.data.copy_(q)
        optimizer.load_state_dict(*([states[r]] if size == len(states) else states))
    return other


def test_exact_runs_go_on_as_one_on_any_number_of_ranks():
    """A rate that somebody has changed is saved, too."""
    group, alone = world(4, **EXACT), world(1, **EXACT)
    for optimizer in (*group.optimizers, *alone.optimizers):
        optimizer.param_groups[0]["lr"] = 0.01
    for size, begin in ((4, 0), (2, 3), (3, 6)):
        if begin:
            group = resumed(group, [o.state_dict() for o in group.optimizers], size, **EXACT)
        for step in range(begin, begin + 3):
            gradients = whole(size, step)
            group.step(gradients)
            alone.step([mean(gradients)])
            assert equal(group.parameters[0], alone.parameters[0]), (size, step)


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    group, other = world(2), world(3)
    for each in (group, other):
        each.step(noise(each.size, 0, SHAPES))
    state, before = group.optimizers[0].state_dict(), stored(other.optimizers[0].state_dict())
    bad = {key: value for key, value in group.optimizers[1].state_dict().items() if key != "owned"}
    less = {**before, "owned": {}}
    groups = {**before, "groups": before["groups"][:1]}
    long = stored(before)
    for kept in long["owned"].values():
        kept["momentum_buffer"] = kept["momentum_buffer"].view(-1)
    for states, word in (
        ([state], "saved by rank 0 of 2"),
        ([state, bad], "owned"),
        ([less], "has no '#0000"),
        ([long], "has shapes"),
        ([groups], "construct it with the same groups"),
    ):
        with pytest.raises(StateMismatch, match=word):
            other.optimizers[0].load_state_dict(*states)
        assert not apart(stored(other.optimizers[0].state_dict()), before)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p, t: commpress.Muon(p, lr=0.1 + t.rank, transport=t), "codecs or options"),
        (lambda p, t: commpress.Muon(p, update_codec=["int4", "int8"][t.rank], transport=t), "opt"),
        (lambda p, t: commpress.Muon(p[: 3 + t.rank], transport=t), "parameters, codecs"),
        (made(), "have other weights than rank 0"),
    ],
)
def test_ranks_that_are_not_alike_are_named(make, word):
    group = Replicas(make, 2, SHAPES[:4])
    with torch.no_grad():
        group.parameters[1][0][0, 0] += "weights" in word
    with pytest.raises(Mismatch, match=rf"ranks \[1\] .*{word}"):
        group.step(noise(2, 0, SHAPES[:4]))


def test_groups_that_a_framework_has_replaced_count():
    """Lightning assigns ``param_groups`` when it resumes."""
    group, twin = world(2), world(2)
    for optimizer in twin.optimizers:
        optimizer.param_groups[0]["lr"] = 0.5
    for optimizer in group.optimizers:
        optimizer.param_groups = [{**each} for each in optimizer.param_groups]
        optimizer.param_groups[0]["lr"] = 0.5
    for each in (group, twin):
        each.step(noise(2, 0, SHAPES))
    assert equal(group.parameters, twin.parameters)


def test_wrong_uses_are_refused_at_construction():
    p = [torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.zeros(8))]
    cut = torch.nn.Parameter(torch.zeros(8, 8))
    cut.to_local = None
    made_one = commpress.Muon(p)

    def scaled():
        made_one.found_inf = torch.zeros(())
        made_one.step()

    for words, call in (
        ("codec is 'int4/256', which is 12.9 % off", lambda: commpress.Muon(p, codec="int4")),
        ("codec is 'fp8", lambda: commpress.Muon(p, codec="fp8")),
        ("Choose 'int8'", lambda: commpress.Muon(p, codec="bits7")),
        ("% off on Gaussian numbers", lambda: commpress.Muon(p, codec="topk-64")),
        ("codec is 'powersgd-4', which has no rows", lambda: commpress.Muon(p, codec="powersgd-4")),
        ("update_codec is 'powersgd-4'", lambda: commpress.Muon(p, update_codec="powersgd-4")),
        ("lr is -1.0", lambda: commpress.Muon(p, lr=-1.0)),
        ("ns_steps is 100, expected less than 100", lambda: commpress.Muon(p, ns_steps=100)),
        ("expected three numbers", lambda: commpress.Muon(p, ns_coefficients=(1.0, 2.0))),
        ("adjust_lr_fn is 'mine'", lambda: commpress.Muon(p, adjust_lr_fn="mine")),
        ("adamw got beta=0.9", lambda: commpress.Muon(p, adamw={"beta": 0.9})),
        ("use_muon of group 0 is 'no'", lambda: commpress.Muon([{"params": p, "use_muon": "no"}])),
        (
            "a tensor of shape (8,), which is no matrix",
            lambda: commpress.Muon([{"params": p, "use_muon": True}]),
        ),
        (
            "no batch of matrices",
            lambda: commpress.Muon([{"params": [torch.zeros(2, 2, 2, 2)], "use_muon": True}]),
        ),
        (
            "split is (4, 5) and a tensor of its group has shape (8, 8): expected numbers",
            lambda: commpress.Muon([{"params": p, "split": (4, 5)}]),
        ),
        ("split is (9, -1)", lambda: commpress.Muon([{"params": p, "split": (9, -1)}])),
        (
            "group 0 has lr=0.1 and both matrices and other",
            lambda: commpress.Muon([{"params": p, "lr": 0.1}]),
        ),
        ("params is a Linear", lambda: commpress.Muon(torch.nn.Linear(8, 8))),
        ("is a plain tensor and others are DTensors", lambda: commpress.Muon([p[0], cut])),
        (
            "construct Muon with all parameters",
            lambda: made_one.add_param_group({"params": [torch.zeros(4, 4)]}),
        ),
        ("called by a GradScaler", scaled),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(words)):
            call()


def test_groups_say_who_is_trained_how():
    """A matrix whose group says ``use_muon=False`` has AdamW's steps."""
    hidden, words = (torch.nn.Parameter(p) for p in start(((8, 12), (50, 8))))
    twins = [torch.nn.Parameter(p) for p in start(((8, 12), (50, 8)))]
    rest = {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.2}
    named = {"params": [("words", words)], "use_muon": False, **rest}
    optimizer = commpress.Muon([{"params": [("hidden", hidden)], "lr": 0.1}, named])
    torchs = torch.optim.Muon(twins[:1], lr=0.1), torch.optim.AdamW(twins[1:], fused=True, **rest)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, *torchs)
    ]
    for step in range(4):
        for p, q, g in zip((hidden, words), twins, start(((8, 12), (50, 8)), step), strict=True):
            p.grad, q.grad = g, g.clone()
        for each in (optimizer, *torchs, *schedulers):
            each.step()
    assert equal([hidden, words], twins)
    assert optimizer.numels() == {"hidden": 96, "words": 400}


# ---------------------------------------------------------------- real ranks


def under_ddp(wrapped):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 8))
    model = net
    if wrapped:
        model = torch.nn.parallel.DistributedDataParallel(net)
        commpress.keep_local(model)
    optimizer = commpress.Muon(net.parameters(), **RATES)
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 40, generator=draw)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def test_a_model_under_ddp_keeps_its_gradients(pool):
    wrapped, plain = pool.run(under_ddp, True), pool.run(under_ddp, False)
    assert equal(wrapped, plain)
    assert equal(wrapped[0], wrapped[1])
