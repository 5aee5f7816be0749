"""Versions of models on several ranks arrive bit for bit: FSDP2, hybrid shards, tensor parallelism,
replicas, ties."""

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from commpress.errors import InvalidArgument, StateMismatch
from commpress.weights import Publisher, Receiver, WeightServer, pull, stat, verify
from ranks import caught


class Tied(nn.Module):
    """An embedding that is the head too, a normalisation whose rows are fewer than ranks, and a
    buffer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.middle, self.small = (
            nn.Embedding(50, 24),
            nn.Linear(24, 36),
            nn.Linear(36, 3),
        )
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def step(tensors, seed, rank=None, share=0.05):
    """Move some of what this rank holds, as an optimizer with a small rate does."""
    draws = torch.Generator().manual_seed(seed * 100 + (dist.get_rank() if rank is None else rank))
    with torch.no_grad():
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if own.is_floating_point():
                moves = torch.rand(own.shape, generator=draws) < share
                own += moves * own * 2.0**-7
            else:
                own += 1


def whole(tensors):
    """Every tensor in full; collective."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def differing(found, expected):
    """Names of tensors that differ in any bit."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in found.items()
        if not torch.equal(
            value.reshape(-1).view(torch.uint8),
            expected[name].reshape(-1).contiguous().view(torch.uint8),
        )
    ]


def many_versions(folder, versions):
    torch.manual_seed(0)
    model = Tied().bfloat16()
    for layer in (model.middle, model.small):
        fully_shard(layer)
    fully_shard(model)
    publisher = Publisher(model, folder)
    readers, server, other = [], None, Tied().bfloat16()
    wrong, steps = [], []
    for version in range(1, versions + 1):
        steps.append(publisher.publish(wait=version % 3 == 0))
        publisher.wait()
        state = whole(model.state_dict())
        if dist.get_rank() == 0:
            if version == 1:
                server = WeightServer(folder)
                readers = [Receiver(folder), Receiver(server.url)]
            if version % 50 == 0:
                readers.append(Receiver(server.url))  # comes late
            if (
                version % 2 or version == versions
            ):  # and at every second one two steps are made at once
                for reader in readers:
                    assert reader.prepare() == version
                    reader.install(other)
                    wrong += differing(dict(reader.weights), state) + differing(
                        other.state_dict(), state
                    )
                pull(server.url, folder + "-copy")
        step(model.parameters(), version)
        model.seen += 1
    publisher.close()
    if dist.get_rank() == 0:
        server.close()
        assert len(verify(folder + "-copy")) == len(verify(folder)) > 0
        copied = Receiver(folder + "-copy")
        copied.prepare()
        copied.install()
        assert not differing(dict(copied.weights), state)
    return wrong


@pytest.mark.parametrize(
    "versions", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_versions_of_fsdp2_on_four_ranks_arrive_in_every_bit(pool, tmp_path, versions):
    """In a module, from a folder, over HTTP, in a copy, and with readers that come late."""
    assert pool.run(many_versions, str(tmp_path / "run"), versions, size=4, seconds=800) == [[]] * 4


def placed(folder, kind):
    """A reader's weights are those of ranks that hold them in every other way."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    draw = lambda *shape: torch.randn(*shape).bfloat16()  # noqa: E731
    if kind == "hybrid":
        model = Tied()
        fully_shard(model, mesh=mesh)
        tensors = dict(model.named_parameters())
    elif kind == "two dimensions":
        model = nn.Sequential(nn.Linear(20, 12), nn.Linear(12, 20))
        for number, layer in enumerate(model):
            for name, parameter in layer.named_parameters():
                cut = (
                    Replicate()
                    if name == "bias" and number
                    else Shard(0)
                    if not number
                    else Shard(1)
                )
                setattr(
                    layer, name, nn.Parameter(distribute_tensor(parameter, mesh["inner"], [cut]))
                )
        fully_shard(model, mesh=mesh["outer"])
        tensors = dict(model.named_parameters())
    elif kind == "columns":
        cuts = [
            (Shard(1), Replicate()),
            (Shard(2), Shard(0)),
            (Shard(1), Shard(2)),
            (Replicate(), Replicate()),
        ]
        tensors = {
            str(i): distribute_tensor(draw(7, 5, 9), mesh, cut) for i, cut in enumerate(cuts)
        }
    else:
        tensors = {
            "weight": draw(400, 500),
            "scale": draw(4),
            "count": torch.tensor(3),
            "none": draw(0, 4),
        }
    state, moved = None, list(tensors.values())
    with Publisher(tensors, folder) as publisher:
        for version in range(3):
            publisher.publish()
            if version < 2:
                if kind == "replicas":
                    step([tensors["weight"], tensors["count"]], version, rank=0)
                elif kind == "columns":
                    for name in ("1", "2"):
                        step([tensors[name]], version)
                else:
                    step(
                        [
                            p
                            for p in moved
                            if kind == "two dimensions" and all(c.is_shard() for c in p.placements)
                        ],
                        version,
                    )
        state = whole(tensors)
    reader = Receiver(folder)
    reader.prepare()
    reader.install()
    pieces = [piece for part in reader._held.layout.parts for piece in part]
    rows = [max(prod(piece.size[1:]), 1) for piece in pieces]
    assert not any(piece.first % row for piece, row in zip(pieces, rows, strict=True)), (
        "readers write parts at once, so none may share a row with another"
    )
    parts = [sum(piece.numel for piece in part) for part in reader._held.layout.parts]
    assert sum(parts) == sum(value.numel() for value in state.values())
    return differing(dict(reader.weights), state), parts


@pytest.mark.parametrize("kind", ["hybrid", "two dimensions", "columns", "replicas"])
def test_every_way_to_hold_weights_is_published_once(pool, tmp_path, kind):
    outcomes = pool.run(placed, str(tmp_path / "run"), kind, size=4)
    assert [wrong for wrong, _ in outcomes] == [[]] * 4
    assert min(outcomes[0][1]) > 0, "every rank compares a part"


def restarted(folder, first):
    """Publish what the last version was, moved a little, from as many ranks as there are now."""
    torch.manual_seed(0)
    model = Tied().bfloat16()
    fully_shard(model)
    with Publisher(model, folder) as publisher:
        assert publisher.version == first
        step(model.parameters(), 1 + first)
        report = publisher.publish()
    return report.version, report.density, whole(model.state_dict())


def test_a_publisher_restarts_at_other_world_sizes_and_goes_on(pool, tmp_path):
    """Its first version is a difference from the last one, so readers need no anchor."""
    folder, version, reader = str(tmp_path / "run"), 0, Receiver(tmp_path)
    for size in (4, 2, 3, 1, 4):
        outcomes = pool.run(restarted, folder, version, size=size)
        version, density, state = outcomes[0]
        reader = reader if version > 1 else Receiver(folder)
        anchored = stat(folder)[-1]
        assert reader.prepare() == version
        reader.install()
        assert not differing(dict(reader.weights), state)
        assert anchored.parts == size
        assert version == 1 or density < 0.3
    late = Receiver(folder)
    assert late.prepare() == version == 5
    assert [found.epoch for found in verify(folder)] == [1, 2, 3, 4, 5][-len(verify(folder)) :]


def refusals(folder):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    said = {
        "replicas": caught(Publisher, {"a": torch.full((4,), float(rank))}, folder),
        "shapes": caught(Publisher, {"a": torch.zeros(3 + rank)}, folder),
        "sums": caught(
            Publisher, {"a": DTensor.from_local(torch.zeros(4), mesh, [Partial()])}, folder
        ),
        "types": caught(Publisher, {"a": torch.zeros(2, dtype=torch.complex64)}, folder),
        "folders": caught(Publisher, {"a": torch.zeros(2)}, f"{folder}-{rank}"),
    }
    with Publisher({"a": torch.zeros(8)}, folder) as publisher:
        publisher.publish()
        said["versions"] = caught(publisher.publish, 5 + rank)
        said["after"] = caught(publisher.publish)
    with Publisher({"a": torch.zeros(8)}, folder) as publisher:
        said["earlier"] = caught(publisher.publish, 1)
    said["model"] = caught(Publisher, {"b": torch.zeros(8)}, folder)
    return {name: (type(error), str(error)) for name, error in said.items()}


def test_what_cannot_be_published_is_refused_on_every_rank(pool, tmp_path):
    for said in pool.run(refusals, str(tmp_path / "run"), size=2):
        assert "has other values on rank 1 than on rank 0" in said["replicas"][1]
        assert "tensors that differ by rank need names of their own" in said["shapes"][1]
        assert "sums that are still open" in said["sums"][1]
        assert "one of bool" in said["types"][1]
        assert "does not see there what rank 0 writes" in said["folders"][1]
        assert "ranks publish versions [5, 6]" in said["versions"][1]
        assert said["after"][0] is StateMismatch
        assert "above 1" in said["earlier"][1]
        assert "another model, 'a' is float32 of [8] there and absent here" in said["model"][1]
        assert {kind for kind, _ in said.values()} <= {InvalidArgument, StateMismatch}


def stuck(folder):
    """The copy of one rank cannot advance, as on a disk that failed."""
    with Publisher({"a": torch.zeros(1 << 17)}, folder) as publisher:
        publisher.publish()
        if dist.get_rank() == 1:

            def advance(_):
                raise OSError("no disk")

            publisher._part.advance = advance
        return [(type(e), str(e)) for e in (caught(publisher.publish), caught(publisher.publish))]


def test_a_rank_that_fails_after_the_commit_keeps_no_other_waiting(pool, tmp_path):
    """The version can be had; another publisher goes on with it."""
    first, second = pool.run(stuck, str(tmp_path), size=2)
    assert "rank 1 could not publish: OSError" in first[0][1]
    assert second[0][0] is OSError
    for _, (kind, says) in (first, second):
        assert kind is StateMismatch
        assert "this publisher has ended" in says
    with Publisher({"a": torch.zeros(1 << 17)}, tmp_path) as publisher:
        assert publisher.version == 2


def apart(folder):
    """Experts with names of their own."""
    rank = dist.get_rank()
    with Publisher(
        {f"expert.{rank}": torch.full((5,), rank + 1.0), "shared": torch.ones(3)}, folder
    ) as publisher:
        publisher.publish()


def test_experts_of_each_rank_are_published_under_names_of_their_own(pool, tmp_path):
    pool.run(apart, str(tmp_path / "run"), size=3)
    reader = Receiver(tmp_path / "run")
    reader.prepare()
    reader.install()
    assert {name: float(value[0]) for name, value in reader.weights.items()} == {
        "expert.0": 1,
        "expert.1": 2,
        "expert.2": 3,
        "shared": 1,
    }
