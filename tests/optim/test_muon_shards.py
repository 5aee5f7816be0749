"""Muon of parameters in rows, as under ``fully_shard``: the bits of torch's Muon on the whole
gradient where nothing is compressed, nothing lost where it is, and no more memory than two matrices
beside the state."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import commpress
from commpress.collectives import owned_rows, owners
from commpress.collectives.transports.loopback import Loopback
from commpress.optim import muon_shards
from commpress.optim.newton_schulz import orthogonalised
from fsdp_twin import Net
from optim_twin import equal, start
from ranks import caught
from test_muon import EXACT, FUSED, RATES, fused
from variants import few

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
# rows that no number of ranks divides, fewer rows than ranks, and others
SHAPES = ((24, 40), (41, 24), (700,), (17, 5), (2, 30), (7,), (64, 64), (3, 5, 2), (1, 9), (1,))
MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]


def cut(tensor, mesh):
    rows, rank = torch.chunk(tensor, mesh.size()), mesh.get_local_rank()
    mine = rows[rank] if rank < len(rows) else tensor[:0]
    return DTensor.from_local(
        mine.clone(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
    )


class Sharded:
    """Parameters in rows on this rank, and their Muon."""

    def __init__(self, *, dtype=torch.float32, shapes=SHAPES, **options):
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.parameters = [torch.nn.Parameter(cut(p.to(dtype), self.mesh)) for p in start(shapes)]
        self.optimizer = commpress.Muon(self.parameters, **RATES | options)

    def step(self, gradients):
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = None if g is None else cut(g.to(p.dtype), self.mesh)
        before = self.optimizer.counters.skipped_steps
        self.optimizer.step()
        return self.optimizer.counters.skipped_steps == before

    @property
    def momentum(self):
        """State of this rank's matrices, which the optimizer has first."""
        return {MATRICES[i]: m for i, m in self.optimizer.shards.momentum.items()}

    def residual(self, kind, i):
        """Return the residual of a matrix, of gradients or updates, on all ranks."""
        left = torch.zeros(SHAPES[i])
        name = self.optimizer.flat.names[MATRICES.index(i)]
        for (parameter, at), sent, _ in getattr(self.optimizer.shards, kind).residuals.places():
            if parameter == name:
                left.view(-1)[at : at + sent.numel()] = sent
        dist.all_reduce(left)
        return left

    def whole(self):
        return [p.detach().full_tensor() for p in self.parameters]


def drawn(step, shapes=SHAPES):
    return start(shapes, 1000 + step)


class Twin:
    """torch's Muon on whole matrices, and its AdamW on this rank's rows of other parameters, as
    under ``fully_shard``."""

    def __init__(self, parameters, matrices, *, adamw=None, **options):
        self.parameters = parameters
        self.twins = [
            torch.nn.Parameter((p.full_tensor() if i in matrices else p.to_local()).float().clone())
            for i, p in enumerate(p.detach() for p in parameters)
        ]
        rest = [twin for i, twin in enumerate(self.twins) if i not in matrices]
        self.optimizers = [
            torch.optim.Muon([self.twins[i] for i in matrices], **{"lr": 0.02} | options),
            torch.optim.AdamW(rest, fused=True, **RATES["adamw"] | (adamw or {})),
        ]
        self.matrices = matrices

    def step(self):
        for i, (p, twin) in enumerate(zip(self.parameters, self.twins, strict=True)):
            g = p.grad
            g = g if g is None else g.full_tensor() if i in self.matrices else g.to_local()
            twin.grad = g if g is None else g.float()
        for optimizer in self.optimizers:
            optimizer.step()

    def alike(self):
        return all(
            torch.equal(p.full_tensor() if i in self.matrices else p.to_local(), twin.to(p.dtype))
            for i, (p, twin) in enumerate(zip(self.parameters, self.twins, strict=True))
        )


# ---------------------------------------------------------------- torch's bits


def beside_torch(options, adamw, dtype):
    group = Sharded(**EXACT, **options, adamw=RATES["adamw"] | adamw, dtype=dtype)
    twin = Twin(group.parameters, MATRICES, adamw=adamw, **options)
    for step in range(6):
        gradients = drawn(step)
        gradients[step] = None
        assert group.step(gradients)
        twin.step()
        assert twin.alike(), step
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_have_the_bits_of_torch_on_the_whole_gradient(pool, size):
    """Also where a parameter has no gradient in some steps."""
    options = {} if size % 2 else {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    assert all(pool.run(beside_torch, options, {"betas": (0.8, 0.9)}, torch.float32, size=size))


def test_half_precision_has_master_weights(pool):
    assert all(pool.run(beside_torch, {}, {}, torch.bfloat16, size=3))


def short_messages():
    """Turns, messages and pieces as of matrices a thousand times as large."""
    owners.PIECE, owners.MESSAGE, owned_rows.MESSAGE = 256, 512, 512
    try:
        group = Sharded(**EXACT)
        twin, shards = Twin(group.parameters, MATRICES), group.optimizer.shards
        for step in range(3):
            group.step(drawn(step))
            twin.step()
        return twin.alike(), len(shards.turns), len(shards.gradients.plan)
    finally:
        owners.PIECE, owners.MESSAGE, owned_rows.MESSAGE = 1 << 22, 1 << 23, 1 << 23


def test_long_matrices_take_turns_and_travel_in_pieces(pool):
    for alike, turns, messages in pool.run(short_messages, size=2):
        assert alike
        assert messages > turns > 2


def with_parts():
    """Beside a run on one rank that has all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [torch.nn.Parameter(cut(p, mesh)) for p in start([*FUSED])]
    whole = [torch.nn.Parameter(p) for p in start([*FUSED])]
    one = Loopback(1).transport(0)
    group = commpress.Muon(fused(rows), lr=0.02, **EXACT)
    alone = commpress.Muon(fused(whole), lr=0.02, **EXACT, transport=one)
    for step in range(3):
        for p, q, g in zip(rows, whole, drawn(step, [*FUSED]), strict=True):
            p.grad, q.grad = cut(g, mesh), g
        group.step()
        alone.step()
    state = group.state_dict()
    for _ in range(2):  # the second time from what the first began with
        for p, q in zip(rows, whole, strict=True):
            p.data.copy_(cut(q.detach(), mesh))
            p.grad = cut(q.grad, mesh)
        group.load_state_dict(state)
        group.step()
    alone.step()
    experts = [p.to_local().numel() for p in rows if p.ndim == 3]
    kept = sum(p.numel() for p in group.shards.batches.values())
    return equal([p.detach().full_tensor() for p in rows], whole), kept == sum(experts)


@pytest.mark.parametrize("size", [2, 3])
def test_matrices_in_one_tensor_have_the_bits_of_one_rank(pool, size):
    """Experts stay where they are."""
    assert pool.run(with_parts, size=size) == [(True, True)] * size


def under_fully_shard(codec):
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if codec:
        commpress.compress_fsdp(model, codec, weights=None)
    named = list(model.named_parameters())
    matrices = [i for i, (name, p) in enumerate(named) if p.ndim == 2 and "blocks" in name]
    hidden = [named[i][1] for i in matrices]
    rest = [p for i, (_, p) in enumerate(named) if i not in matrices]
    optimizer = commpress.Muon(
        [{"params": hidden}, {"params": rest, "use_muon": False}], **RATES, **EXACT
    )
    twin = Twin([p for _, p in named], matrices)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        words = torch.randint(13, (6,), generator=draw)
        torch.nn.functional.cross_entropy(model(words), words % 7).backward()
        twin.step()
        optimizer.step()
    return twin.alike(), optimizer.averages_gradients


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_model_under_fully_shard_has_the_bits_of_torch(pool, codec):
    """Also where ``compress_fsdp`` has averaged the gradients."""
    assert pool.run(under_fully_shard, codec, size=3) == [(True, False)] * 3


# ---------------------------------------------------------------- compressed


def ledger(options):
    """Largest elements of what came and is owed less what was given, of gradients and updates;
    without momentum the owner's momentum is the gradient that came."""
    group = Sharded(momentum=0.0, weight_decay=0.0, lr=1.0, **options)
    zeros = {i: torch.zeros(SHAPES[i], dtype=torch.double) for i in MATRICES}
    given, came, wanted = ({i: z.clone() for i, z in zeros.items()} for _ in range(3))
    for step in range(12):
        gradients, before = drawn(step), {i: m.clone() for i, m in group.momentum.items()}
        still = MATRICES[step % len(MATRICES)]
        gradients[still] = None
        weights = group.whole()[still]
        group.step(gradients)
        assert torch.equal(weights, group.whole()[still])
        for i, momentum in group.momentum.items():
            arrived = momentum - before[i] if i == still else momentum
            came[i] += arrived.double()
            if i != still:
                o = group.optimizer.param_groups[0]
                u = orthogonalised(arrived, o["ns_coefficients"], o["ns_steps"], o["eps"])
                wanted[i] += u.double()
        for i in MATRICES:
            given[i] += 0.0 if i == still else gradients[i].double()
    off, owed = [], []
    moved = [begin - now.double() for begin, now in zip(start(SHAPES), group.whole(), strict=True)]
    for i in MATRICES:
        kept = [group.residual(kind, i) for kind in ("gradients", "updates")]
        for total in (came[i], wanted[i]):
            dist.all_reduce(total)
        rate = max(1, SHAPES[i][0] / SHAPES[i][1]) ** 0.5
        off.append((came[i] + kept[0] - given[i]).abs().max().item())
        off.append((moved[i] / rate + kept[1] - wanted[i]).abs().max().item())
        owed.append([bool(left.any()) for left in kept])
    return max(off), owed


@pytest.mark.parametrize(
    ("options", "size"),
    few([{}, {"update_codec": "sign"}, {"update_codec": None}], [3, 2]),
    ids=str,
)
def test_nothing_is_lost_and_a_matrix_without_a_gradient_stands_still(pool, size, options):
    for off, owed in pool.run(ledger, options, size=size):
        assert off < 1e-4
        assert owed == [[True, options.get("update_codec", "int4") is not None]] * len(MATRICES)


def counted():
    group = Sharded(check_every=0)
    group.step(drawn(0))
    optimizer = group.optimizer
    return optimizer.step_bytes(), optimizer.channel.sent_bytes, optimizer.counters.wire_bytes


def test_every_byte_is_counted(pool):
    for wanted, sent, told in pool.run(counted, size=3):
        assert wanted == sent == told


def not_finite(value, number):
    group = Sharded()
    group.step(drawn(0))
    before, weights = group.optimizer.state_dict(), group.whole()
    bad = drawn(1)
    bad[number].view(-1)[-1] = value  # a row of the last rank
    taken = group.step(bad)
    after = group.optimizer.state_dict()
    kept = [("owned", "momentum_buffer"), ("rows", "exp_avg"), ("matrices", "sent")]
    same = all(
        torch.equal(tensors[kind], after[entry][name][kind])
        for entry, kind in kept[:2]
        for name, tensors in before[entry].items()
    )
    residuals = before["matrices"]["residuals"]
    same &= all(
        torch.equal(kept["sent"], after["matrices"]["residuals"][key]["sent"])
        for key, kept in residuals.items()
    )
    return taken, same and equal(weights, group.whole()), group.step(drawn(2))


@pytest.mark.parametrize(("value", "number"), [(float("nan"), 1), (float("inf"), 2)])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(pool, value, number):
    assert pool.run(not_finite, value, number, size=2) == [(False, True, True)] * 2


# ---------------------------------------------------------------- state


def begun(folder, options):
    group = Sharded(**options)
    for step in range(3):
        group.step(drawn(step))
    commpress.save_distributed(group.optimizer, f"{folder}/optimizer", elastic=True)
    whole = group.whole()
    torch.save(whole, f"{folder}/model.pt")
    for step in range(3, 6):
        group.step(drawn(step))
    return group.whole()


def resumed(folder, options):
    group = Sharded(**options)
    group.step(drawn(50))
    for p, q in zip(group.parameters, torch.load(f"{folder}/model.pt"), strict=True):
        p.data.copy_(cut(q, group.mesh))
    commpress.load_distributed(group.optimizer, f"{folder}/optimizer")
    for step in range(3, 6):
        group.step(drawn(step))
    return group.whole()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_bit_for_bit(pool, tmp_path, dtype):
    options = {"dtype": dtype}
    first = pool.run(begun, str(tmp_path), options, size=2)
    for whole in pool.run(resumed, str(tmp_path), options, size=2):
        assert equal(first[0], whole)


@pytest.mark.parametrize("size", [1, 2])
def test_an_exact_run_goes_on_on_another_number_of_ranks(pool, tmp_path, size):
    first = pool.run(begun, str(tmp_path), EXACT, size=3)[0]
    for whole in pool.run(resumed, str(tmp_path), EXACT, size=size):
        assert equal([first[i] for i in MATRICES], [whole[i] for i in MATRICES])
        # where AdamW's kernel rounds depends on where rows begin
        torch.testing.assert_close(first, whole, rtol=1e-6, atol=1e-7)


def owed_after(folder, load):
    """Residuals of gradients and updates, summed over the ranks."""
    group = Sharded()
    if load:
        commpress.load_distributed(group.optimizer, f"{folder}/optimizer")
    else:
        for step in range(3):
            group.step(drawn(step))
        commpress.save_distributed(group.optimizer, f"{folder}/optimizer", elastic=True)
    kinds = ("gradients", "updates")
    return {(kind, i): group.residual(kind, i) for kind in kinds for i in MATRICES}


def test_residuals_follow_their_rows_to_other_ranks(pool, tmp_path):
    before = pool.run(owed_after, str(tmp_path), False, size=3)[0]
    for after in pool.run(owed_after, str(tmp_path), True, size=2):
        assert all(left.any() and torch.equal(left, after[key]) for key, left in before.items())


def refusals():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    rows, square = mesh["shards"], torch.zeros(8, 8)

    def muon(*parameters, **options):
        return caught(commpress.Muon, [*map(torch.nn.Parameter, parameters)], **options)

    sharded = cut(square, rows)
    part = Sharded().optimizer.state_dict()
    return [
        str(error)
        for error in (
            muon(distribute_tensor(square, mesh, [Replicate(), Shard(0)])),
            muon(distribute_tensor(square, rows, [Shard(1)])),
            muon(distribute_tensor(square, rows, [Replicate()])),
            muon(sharded, square),
            muon(sharded, cut(square, mesh["replicas"])),
            muon(sharded, process_group=dist.group.WORLD),
            caught(commpress.Muon([torch.nn.Parameter(sharded)]).load_state_dict, part),
        )
    ]


def test_what_is_not_in_rows_is_refused(pool):
    words = [
        *["Muon takes rows over a mesh of one dimension"] * 3,
        "is a plain tensor and others are DTensors",
        "make one Muon for each mesh",
        "process_group is given and parameters are rows",
        "of 4",
    ]
    for said in pool.run(refusals, size=4):
        assert all(word in text for word, text in zip(words, said, strict=True)), said


# ---------------------------------------------------------------- memory


def live():
    """Bytes of all tensors."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        own = isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, torch.nn.Parameter)
        if own and each.layout is torch.strided:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def most_memory(options):
    """Most bytes while an owner orthogonalises, beside what that takes by itself."""
    owners.PIECE = owners.MESSAGE = owned_rows.MESSAGE = 1 << 10
    peaks, real = [], muon_shards.direction

    def measured(*args):
        peaks.append(live())
        return real(*args)

    muon_shards.direction = measured
    try:
        before = live()
        group = Sharded(shapes=LARGE, **options)
        for step in range(2):
            for p, g in zip(group.parameters, drawn(step, LARGE), strict=True):
                p.grad = cut(g, group.mesh)
            del p, g
            group.optimizer.step()
        return max(peaks) - before
    finally:
        muon_shards.direction = real
        owners.PIECE, owners.MESSAGE, owned_rows.MESSAGE = 1 << 22, 1 << 23, 1 << 23


LARGE = ((256, 256),) * 8


@pytest.mark.parametrize(("options", "shards"), [(EXACT, 3), ({}, 7)])
def test_a_step_takes_two_matrices_beside_what_is_kept(pool, options, shards):
    """Kept are parameters, gradients, momentum, and with codecs two residuals and their spares."""
    matrix, messages = 4 * 256 * 256, 4 * 2 * (64 + 4 * 1024) + (1 << 12)
    for most in pool.run(most_memory, options, size=2):
        assert most <= shards * len(LARGE) * matrix // 2 + 2 * matrix + messages
