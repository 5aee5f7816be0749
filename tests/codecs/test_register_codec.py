"""Codecs of users in plain torch: under every integration that takes a codec, with feedback and
real bytes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
import my_codec
from commpress.errors import InvalidArgument

NAME = "two-bits"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def losses(model, optimizer, rounds=60):
    draws = torch.Generator().manual_seed(dist.get_rank())
    target = torch.randn(32, 16, generator=torch.Generator().manual_seed(7))
    found = []
    for _ in range(rounds):
        x = torch.randn(64, 32, generator=draws)
        optimizer.zero_grad()
        loss = (model(x) - (x @ target).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return sum(found[-5:]) / sum(found[:5])


def under_ddp(**options):
    ddp = DistributedDataParallel(net())
    counters = commpress.compress(ddp, NAME, **options).counters
    fell = losses(ddp, torch.optim.Adam(ddp.parameters(), 1e-2))
    return fell, counters.ratio, counters.compressed_elements


def under_fsdp():
    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    state = commpress.compress_fsdp(model, NAME, NAME, min_numel=0)
    fell = losses(model, torch.optim.Adam(model.parameters(), 1e-2))
    return fell, state.gradients.ratio, state.gradients.compressed_elements


def under(kind, **options):
    model = net()
    optimizer = getattr(commpress, kind)(
        model.parameters(), lr=1e-2, codec=NAME, min_numel=0, **options
    )
    fell = losses(model, optimizer)
    return fell, optimizer.counters.ratio, optimizer.counters.compressed_rounds


WAYS = {
    "ddp": under_ddp,
    "two levels": partial(under_ddp, topology="2,1"),
    "fsdp": under_fsdp,
    "OneBitAdam": partial(under, "OneBitAdam", exact_steps=15),
    "ZeroOneAdam": partial(under, "ZeroOneAdam"),
}


def trained(way):
    return WAYS[way]()


@pytest.mark.parametrize("way", WAYS)
def test_training_under_every_integration(pool, way):
    for fell, ratio, elements in pool.run(trained, way, size=3 if way == "two levels" else 2):
        assert fell < 0.6
        assert ratio > 1.5
        assert elements > 0


def exchanged():
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = commpress.AllToAll(NAME)
    rows = torch.randn(2 * size, 64, generator=torch.Generator().manual_seed(rank))
    came = exchange(rows)
    everybody = [torch.empty_like(rows) for _ in range(size)]
    dist.all_gather(everybody, rows)
    due = torch.cat([each[2 * rank : 2 * rank + 2] for each in everybody])
    rows[0, 0] = torch.nan
    spoilt = exchange(rows).isnan().any(1)
    return float((came - due).norm() / due.norm()), spoilt.tolist()


def test_all_to_all(pool):
    for rank, (error, spoilt) in enumerate(pool.run(exchanged)):
        assert 0 < error < 0.8
        assert any(spoilt) == (rank == 0), "a NaN spoils the block that it is in, and no other"


class Broken(my_codec.TwoBits):
    def __init__(self, **wrong):
        self.wrong = wrong

    def row_bytes(self, width):
        return self.wrong.get("size") or super().row_bytes(width)

    def encode(self, values):
        return self.wrong.get("codes", super().encode(values))

    def decode(self, row, numel):
        return self.wrong.get("values", super().decode(row, numel))


@pytest.mark.parametrize(
    ("name", "codec", "words"),
    [
        ("int8", my_codec.TwoBits(), "already"),
        ("topk-9", my_codec.TwoBits(), "already"),
        (NAME, my_codec.TwoBits(), "already"),
        ("Capital", my_codec.TwoBits(), "small letters"),
        ("a" * 25, my_codec.TwoBits(), "small letters"),
        ("one", object(), "without row_bytes"),
        ("one", Broken(size=3), "expected up to row_bytes"),
        ("one", Broken(codes=torch.zeros(4)), "expected up to row_bytes"),
        ("one", Broken(values=torch.full((1,), torch.nan)), "expected finite"),
        ("one", Broken(values=torch.zeros(3)), "expected finite"),
    ],
)
def test_mistakes_are_found_when_it_is_registered(name, codec, words):
    with pytest.raises(InvalidArgument, match=words):
        commpress.register_codec(name, codec)
