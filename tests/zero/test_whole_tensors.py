"""Optimizers that take whole tensors, as Muon, in a store: the bits of the optimizer in memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.errors import InvalidArgument
from small_store import open_store
from zero_twin import clip, equal, equal_states, values

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
WIDTH, LR = 64, 2e-2


class Deep(nn.Module):
    """Matrices of which some steps leave one out, and vectors beside them."""

    def __init__(self, layers=6):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x, without=None):
        for number, layer in enumerate(self.layers):
            x = x if number == without else torch.tanh(layer(x)) + x
        return x

    def matrices(self):
        return [layer.weight for layer in self.layers]

    def vectors(self):
        return [layer.bias for layer in self.layers]


def train(net, optimizers, steps, first=0, micro_batches=1):
    """Train; layer 4 has no gradient in the first two steps."""
    for step in range(first, first + steps):
        for part in range(micro_batches):
            draw = torch.Generator().manual_seed(10 * step + part)
            net(
                torch.randn(4, WIDTH, generator=draw), 4 if step < 2 else None
            ).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def trained(parameters):
    return [p for p in parameters if p.grad is not None]


@pytest.mark.parametrize(
    ("gradients", "clipped"), [("parameters", None), ("parameters", 0.05), ("store", 0.05)]
)
def test_muon_in_a_store_has_the_bits_of_torchs(tmp_path, gradients, clipped):
    nets = [Deep(20), Deep(20)]
    twin = torch.optim.Muon(nets[0].matrices(), lr=LR)
    if clipped:
        twin.register_step_pre_hook(lambda *_: clip(trained(nets[0].matrices()), clipped))
    with open_store(tmp_path / "store", host="256KiB") as store:
        options = {"gradients": gradients, "max_grad_norm": clipped, "lr": LR}
        muon = commpress.Offloaded(nets[1].matrices(), torch.optim.Muon, store=store, **options)
        assert {chunk.tier for chunk in muon.chunks} >= {"disk"}
        for net, optimizer in zip(nets, (twin, muon), strict=True):
            train(net, [optimizer], 5, micro_batches=2)
        assert equal(values(nets[1]), values(nets[0]))
        equal_states(muon.state_dict()["state"], twin.state_dict()["state"])


@pytest.mark.parametrize("gradients", ["store", "backward"])
def test_blocks_of_a_streamed_model_are_trained_by_muon_and_adamw(tmp_path, gradients):
    nets = [Deep(), Deep()]
    twins = [
        torch.optim.Muon(nets[0].matrices(), lr=LR),
        torch.optim.AdamW(nets[0].vectors(), lr=1e-3),
    ]
    with open_store(tmp_path / "store", host="2MiB") as store:
        streamed = commpress.stream(nets[1], store=store)
        options = {"store": store, "gradients": gradients}
        both = [
            commpress.Offloaded(
                nets[1].matrices(), torch.optim.Muon, prefix="muon", lr=LR, **options
            ),
            commpress.Offloaded(
                nets[1].vectors(), torch.optim.AdamW, prefix="adamw", lr=1e-3, **options
            ),
        ]
        train(nets[0], twins, 4, first=2)
        train(nets[1], both, 4, first=2)
        found = streamed.state_dict()
        for name, wanted in nets[0].state_dict().items():
            assert torch.equal(found[name], wanted), name


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.later = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x, without):
        x = torch.tanh(self.always(x))
        return x if without else self.later(x) + x


class TwoBlocks(Deep):
    def __init__(self):
        super().__init__(layers=0)
        self.layers = nn.ModuleList(Branches() for _ in range(2))

    def forward(self, x, without=None):
        for layer in self.layers:
            x = layer(x, without is not None)
        return x


def test_a_tensor_without_a_gradient_is_left_alone_beside_others_of_its_block(tmp_path):
    nets = [TwoBlocks(), TwoBlocks()]
    twin = torch.optim.Muon(nets[0].parameters(), lr=LR)
    train(nets[0], [twin], 4)
    with open_store(tmp_path / "store", host="2MiB") as store:
        streamed = commpress.stream(nets[1], store=store, blocks=[Branches])
        muon = commpress.Offloaded(nets[1].parameters(), torch.optim.Muon, store=store, lr=LR)
        assert len(muon.chunks) == 2
        train(nets[1], [muon], 4)
        found = streamed.state_dict()
        for name, wanted in nets[0].state_dict().items():
            assert torch.equal(found[name], wanted), name


def test_what_has_only_parts_of_a_tensor_is_refused(tmp_path):
    net = Deep()
    with open_store(tmp_path / "store") as store:
        commpress.stream(net, store=store, chunk_mb=0.01)
        with pytest.raises(InvalidArgument, match="in several chunks: pass a chunk_mb="):
            commpress.Offloaded(net.matrices(), torch.optim.Muon, store=store)


def parts(folder):
    said = []
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    sharded, streamed = Deep(2), Deep(2)
    fully_shard(sharded, mesh=mesh)
    with open_store(f"{folder}/{dist.get_rank()}", host="4MiB") as store:
        commpress.stream(streamed, store=store)
        for net in (sharded, streamed):
            with pytest.raises(InvalidArgument) as error:
                commpress.Offloaded(net.matrices(), torch.optim.Muon, store=store, prefix="o")
            said.append(str(error.value))
    return said


def test_tensors_divided_over_ranks_are_refused(pool, tmp_path):
    for said in pool.run(parts, str(tmp_path), size=2):
        assert len(said) == 2
        assert all("divided over ranks: use an element-wise one" in one for one in said)
