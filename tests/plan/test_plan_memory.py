"""Memory that plans say sharded candidates keep, against what ranks really have."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.plan.candidates import SCRATCH, candidates, sharded_bytes
from commpress.plan.cluster import Cluster, Node
from commpress.plan.costs import device_costs
from commpress.plan.model import transformer
from commpress.plan.ways import Scenario
from variants import few
from zero_twin import tensor_bytes, without_older_objects

WIDTH, LAYERS, BUCKET_MB = 192, 24, 0.15


@without_older_objects()
def kept(stage, codec):
    """Bytes of all new tensors between backward and step; and of the parameters of the plain
    model."""
    torch.set_num_threads(1)
    tail = {} if codec == "none" else {"codec": codec, "weights": codec}
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    n = sum(p.nbytes for p in model.parameters())
    if stage == 3:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        state = commpress.compress_fsdp(model, codec, codec) if tail else None
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        state, optimizer = (
            None,
            commpress.Partitioned(
                model.parameters(), torch.optim.AdamW, stage=stage, bucket_mb=BUCKET_MB, **tail
            ),
        )
    most = 0
    for _ in range(2):
        loss = model(torch.ones(1, WIDTH)).square().mean()
        most = max(most, tensor_bytes())
        loss.backward()
        most = max(most, tensor_bytes())
        optimizer.step()
    del state
    return n, most, dist.get_world_size()


@pytest.mark.parametrize(("codec", "stage"), few(["none", "fp8"], [1, 2, 3]), ids=str)
def test_sharded_candidates_keep_what_ranks_have(pool, stage, codec):
    for n, most, ranks in pool.run(kept, stage, codec, size=2):
        told = sharded_bytes(stage, n, ranks, codec)
        assert 0.97 * told < most < told + SCRATCH * 1e6 * BUCKET_MB


def test_on_64_ranks_compression_keeps_as_much_as_the_whole_model():
    cluster, model = Cluster(Node(1, 1e9, inside=1e11), 64, latency=1e-4), transformer(350_000_000)
    scenario = Scenario(cluster, device_costs(2e10), model, 1.0)
    found = {c.name: c for c in candidates(scenario, ("sign",))}
    numel, scratch = model.numel, SCRATCH * 1e6 * scenario.bucket_mb
    assert found["ZeRO-3 none"].memory["device"] == pytest.approx(
        16 * numel / 64 + scratch, rel=0.02
    )
    assert found["ZeRO-3 fp8"].memory["device"] == pytest.approx(
        24 * numel / 64 + 5 * numel + scratch, rel=0.02
    )
    assert not any("no_sync" in c.call for c in found.values())
    assert all("LocalUpdates" in c.call for c in found.values() if c.local)
