"""DeepSpeed's optimizers as a peer of ours: what stands in for CuPy and for its engine, and, where
it is installed, they."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

import deepspeed_peer as peer
from commpress.cli import ranks, training
from commpress.errors import InvalidArgument, MissingPackage
from loss import variant_of


def test_names():
    one = variant_of("deepspeed-onebit-12", 20)
    assert (one.family, one.warmup, one.deepspeed, one.ours) == (
        "deepspeed-onebit",
        12,
        True,
        False,
    )
    assert variant_of("deepspeed-zero-one", 20).deepspeed
    assert not variant_of("zero-one-log3-8", 20).deepspeed
    with pytest.raises(InvalidArgument, match="deepspeed-onebit-12"):
        variant_of("deepspeed-lamb", 20)


def test_the_stand_in_packs_the_signs_of_torch_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    peer._stand_in()
    try:
        import cupy

        signs = torch.tensor([1, 0, 0, 1, 1, 1, 0, 0] * 4, dtype=torch.uint8)
        packed = cupy.packbits(cupy.from_dlpack(torch.utils.dlpack.to_dlpack(signs)))
        assert packed.tolist() == [0b10011100] * 4
        assert [part.tolist() for part in cupy.split(packed, 2)] == [[0b10011100] * 2] * 2
        back = torch.utils.dlpack.from_dlpack(cupy.unpackbits(packed))
        assert torch.equal(back, signs)
        cupy.cuda.Device(0).use()
        cupy.cuda.get_current_stream().synchronize()
    finally:
        sys.modules.pop("cupy", None)


def test_the_engine_is_ddp_s_flag():
    ddp = SimpleNamespace(require_backward_grad_sync=True)
    made = SimpleNamespace(deepspeed=peer.Engine(ddp))
    assert peer.communicates(made) == "exact"
    made.deepspeed.enable_backward_allreduce = False
    assert not ddp.require_backward_grad_sync
    assert peer.communicates(made) == "compressed"


def test_scales_are_gathered_as_tensors_of_one_element():
    seen = []
    comm = SimpleNamespace(
        all_gather=lambda into, tensor, group: seen.append(tensor.shape), get_rank=lambda: 3
    )
    gathers = peer._Gathers(comm)
    gathers.all_gather([torch.zeros(1)], torch.tensor(2.0))
    gathers.all_gather([torch.zeros(5)], torch.zeros(5))
    assert seen == [(1,), (5,)]
    assert gathers.get_rank() == 3


def test_without_deepspeed_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    with pytest.raises(MissingPackage, match=r"pip install deepspeed==0\.19\.6"):
        peer.optimizer("onebit", SimpleNamespace(), (0.9, 0.999), 4, 2)


def steps(
    rank: int, size: int, options: Namespace, report: ranks.Report
) -> list[tuple[str, float, int]]:
    load = training.Load(1, 1, width=32, layers=1, length=16, batch=2)
    ddp = torch.nn.parallel.DistributedDataParallel(load.model())
    family = options.family
    made = peer.optimizer(family, ddp, (0.9, 0.999), 3, 1)
    one, seen = training.Trainee(family, ddp, made, load), []
    for _ in range(6):
        sends, before = peer.communicates(made), one.sent
        one.train(1)
        seen.append((sends, one.loss, one.sent - before))
    return seen


@pytest.mark.parametrize(("family", "exact"), [("onebit", [0, 1, 2]), ("zero-one", [0, 2])])
def test_theirs_on_two_ranks(family, exact):
    pytest.importorskip("deepspeed.runtime.fp16.onebit.adam")
    seen = ranks.on_ranks(steps, Namespace(family=family, ranks=2, threads=1), print)
    assert [i for i, (sends, _, _) in enumerate(seen) if sends == "exact"] == exact
    assert len({loss for _, loss, _ in seen}) == 6
    if seen[0][2]:
        assert max(count for sends, _, count in seen if sends == "compressed") < 0.5 * seen[0][2]
