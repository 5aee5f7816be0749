"""Steps of our optimizers inside of what torch.compile has made: the same bits as without it, on
one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commpress
from small_store import open_store
from variants import seldom


def clipping(optimizer):
    optimizer.max_grad_norm = 0.1
    return optimizer


STEPS = 4
MAKERS = {
    "OneBitAdam": lambda p, _: commpress.OneBitAdam(p, lr=0.01, exact_steps=2),
    "ZeroOneAdam": lambda p, _: commpress.ZeroOneAdam(p, lr=0.01),
    "OneBitLamb": lambda p, _: commpress.OneBitLamb(p, lr=0.01, exact_steps=2),
    "ShardedOneBitAdam": lambda p, _: commpress.ShardedOneBitAdam(p, lr=0.01, exact_steps=2),
    "ShardedZeroOneAdam": lambda p, _: commpress.ShardedZeroOneAdam(p, lr=0.01),
    "LocalUpdates": lambda p, _: commpress.LocalUpdates(torch.optim.SGD(p, lr=0.01), every=2),
    "Partitioned": lambda p, _: clipping(commpress.Partitioned(p, torch.optim.AdamW, lr=0.01)),
    "Offloaded": lambda p, store: commpress.Offloaded(p, torch.optim.AdamW, store=store, lr=0.01),
}


def trained(name, what, folder):
    """Weights after steps of which nothing, ``optimizer.step`` or the whole training step is
    compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, draw = nn.Linear(16, 20), torch.Generator().manual_seed(dist.get_rank())
    with open_store(folder / f"{what} {dist.get_rank()}") as store:
        optimizer = MAKERS[name](list(model.parameters()), store)
        step = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step

        def loss_of(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def train(x):
            loss_of(x)
            return step()

        once = torch.compile(train, backend="eager") if what == "all" else train
        for _ in range(STEPS):
            with torch.enable_grad():
                once(torch.randn(4, 16, generator=draw))
    return model.weight.detach().clone()


def both(name, what, folder):
    return trained(name, "nothing", folder), trained(name, what, folder)


@pytest.mark.parametrize(
    ("name", "what", "size"),
    [
        ("OneBitAdam", "all", 2),
        ("LocalUpdates", "step", 1),
        ("Offloaded", "step", 1),
        seldom("Partitioned", "all", 2),
        *(seldom(name, "step", 1) for name in MAKERS if name not in ("LocalUpdates", "Offloaded")),
    ],
)
def test_a_compiled_step_takes_the_same_steps(pool, tmp_path, name, what, size):
    for plain, compiled in pool.run(both, name, what, tmp_path, size=size):
        torch.manual_seed(0)
        assert not torch.equal(plain, nn.Linear(16, 20).weight)
        assert torch.equal(plain, compiled)
