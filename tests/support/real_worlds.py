"""Objects on real ranks, with the verbs of the simulated worlds: every process takes a law as a
whole, has a rank of its own in each world, and knows what all ranks have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import commpress
import commpress.backend
from commpress.codecs import ByName, SignCodec
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import own_transport
from commpress.errors import CommunicationError
from commpress.integrations.process_group.group_options import GroupOptions
from new_ranks import changes
from ranks import caught
from state_worlds import Kind, Rank, World, apart, copied, stored

WIDTH = 24


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a part without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.frozen = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.norm = nn.Linear(WIDTH, 50), nn.LayerNorm(50)
        self.down, self.head = nn.Linear(50, WIDTH), nn.Linear(WIDTH, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.tokens(x))
        return self.head(h + self.down(self.norm(self.up(h)).relu()))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module, number: int, rank: int, part: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed((number * 10 + part) * 10 + rank)
    x, y = torch.randint(13, (6,), generator=draw), torch.randint(7, (6,), generator=draw)
    return nn.functional.cross_entropy(model(x), y)


class Process(Rank):
    """One rank's object on this process; ``make(model, group)`` compresses."""

    reforms = joins = elastic = False

    def __init__(self, make: Callable[..., Any], group: Any) -> None:
        self.group, self.model = group, self.wrapped(net(), group)
        self.owner = make(self.model, self.among())
        self.optimizer = self.trained_by()

    def wrapped(self, model: nn.Module, group: Any) -> nn.Module:
        return model

    def among(self) -> Any:
        """The ranks that average gradients."""
        return self.group

    def trained_by(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, number: int, rank: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number, rank)
        self.optimizer.step()

    def backward(self, number: int, rank: int) -> None:
        loss_of(self.model, number, rank).backward()

    def common(self) -> list[torch.Tensor]:
        """Weights, whole."""
        every = (p.detach() for p in self.model.parameters())
        return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in every]

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        for p, value in zip(self.model.parameters(), values, strict=False):
            own = p.detach()
            if isinstance(own, DTensor):
                value = distribute_tensor(value, own.device_mesh, own.placements).to_local()
                own = own.to_local()
            own.copy_(value)

    def save(self) -> Any:
        return self.owner.state_dict()

    def save_elastically(self) -> Any:
        return self.owner.elastic_state_dict()

    def kept(self) -> Any:
        return [self.common(), self.save()]

    def count(self) -> int:
        return self.owner.step

    def alike(self) -> Mapping[str, Any]:
        return {"step": self.owner.step}


class RealWorld(World):
    """A world of the first ``size`` processes. All call its verbs, those without a rank too."""

    stay = (0, 1)  # processes keep their order

    def __init__(self, kind: Kind, size: int, begins: int = 0) -> None:
        self.kind, self.number = kind, begins
        self.meet(range(size))
        self.rank = kind.of(kind.make, self.group) if self.place is not None else None

    def meet(self, processes: Iterable[int]) -> None:
        """Form a group of these processes."""
        self.processes = list(processes)
        self.size = len(self.processes)
        self.group = self.kind.grouped(self.processes)
        here = dist.get_rank()
        self.place = self.processes.index(here) if here in self.processes else None

    def told(self, call: Callable[[Any], Any]) -> list[Any]:
        """Results of every rank."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, call(self.rank) if self.rank is not None else None)
        return [every[process] for process in self.processes]

    def step(self, number: int) -> list[Any]:
        self.number = number + 1
        if self.rank is not None:
            self.rank.train(number, self.place)
        return []

    def end(self) -> None:
        """Weights are equal after each step."""

    def numbers(self) -> list[Any]:
        return self.told(lambda rank: [rank.common(), copied(rank.save())])

    def kept(self) -> list[Any]:
        return self.told(lambda rank: copied(rank.kept()))

    def parts(self) -> list[dict[str, torch.Tensor]]:
        return self.told(lambda rank: rank.share(rank.save(), self.place, self.size))

    def alike(self) -> dict[str, Any]:
        first, *others = self.told(lambda rank: dict(rank.alike()))
        assert not any(apart(first, other) for other in others)
        return first

    def agree(self) -> bool:
        self.alike()
        first, *others = self.told(lambda rank: rank.common())
        return not any(apart(first, other) for other in others)

    def counts(self) -> list[int]:
        return self.told(lambda rank: rank.count())

    def lost(self) -> list[int]:
        return self.told(lambda rank: rank.lost())

    def refused(self, state: Any) -> Exception | None:
        return self.told(lambda rank: None if self.place else caught(rank.load, state))[0]

    # ---- files

    def saved(self, *, elastic: bool = False) -> tuple[list[Any], list[Any]]:
        how = "save_elastically" if elastic else "save"
        states = self.told(lambda rank: stored(getattr(rank, how)()))
        return states, self.told(lambda rank: rank.common())

    def load(self, saved: tuple[list[Any], list[Any]], how: str) -> None:
        (states, weights), r = saved, self.place
        if self.rank is not None:
            own = weights[r] if len(weights) == self.size else weights[0] if weights else []
            self.rank.fill(own)
            self.rank.load(*copied([states[r]] if how == "own" else states[r:] + states[:r]))

    # ---- other ranks

    def reform(self, stay: Iterable[int], new: int = 0) -> None:
        stay = sorted(stay)
        change, before = changes(set(stay), new, self.size), self.rank
        self.meet(range(len(stay) + new))
        if self.place is None:
            self.rank = None
        elif self.place >= len(stay):
            alone = self.kind.alone()
            self.rank = self.kind.of(self.kind.make, alone)
            for _ in range(2):  # DDP forms its buckets anew, among who was there
                loss_of(self.rank.model, 0, 0).backward()
        else:
            self.rank = before
        self.kind.alone()
        if self.rank is not None:
            self.rank.owner.channel.reform(own_transport(self.group))
            self.rank.owner.process_group = self.group  # torch's own all-reduces of a hook
            self.rank.owner.reform(change[self.place])()

    def die(self, number: int, victim: int, after: int, reached: Any) -> tuple[list[Any], bool]:
        self.before = self.kept()
        cut = None
        if self.place == victim:
            channel = self.rank.owner.channel
            cut = Cut(channel.transport.inner, after)
            channel.transport.stand_for(cut)
        error = caught(self.step, number)
        assert error is None or isinstance(error, CommunicationError), error
        results = self.told(lambda rank: None if error else True)
        return results, any(self.told(lambda rank: cut is not None and cut.left < 0))

    def heal(self, source: int, needy: Iterable[int]) -> None:
        weights = self.told(lambda rank: rank.common())
        if self.place in needy:
            self.rank.fill(weights[source])


class Cut:
    """Sends ``left`` messages, tells the peers that it sends no more, and fails."""

    def __init__(self, inner: Any, left: int) -> None:
        self.inner, self.left = inner, left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self.cut(found) if name in ("all_to_all", "all_gather", "exchange") else found

    def cut(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                self.inner.abandon("the plug was pulled")
                raise CommunicationError("the plug was pulled")
            return call(*args)

        return one


class RealKind(Kind):
    """``size``: ranks of the laws; ``options`` of a group that compresses."""

    size = 3
    sizes = 1, 2, 4  # other numbers of ranks
    options: Any = None
    refuses = False  # whatever a state lacks

    def world(self, size: int, begins: int = 0) -> Any:
        return RealWorld(self, size, begins)

    def grouped(self, processes: Sequence[int]) -> Any:
        backend = None if self.options is None else "commpress"
        return dist.new_group(processes, backend=backend, pg_options=self.options)

    def alone(self) -> Any:
        """A group of this process."""
        every = [dist.new_group([process]) for process in range(dist.get_world_size())]
        return every[dist.get_rank()]


# ---------------------------------------------------------------- DistributedDataParallel


class Hooked(Process):
    reforms = joins = elastic = True
    parts = 1  # backward passes of a step
    ddp: Mapping[str, Any] = MappingProxyType({})

    def wrapped(self, model: nn.Module, group: Any) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=0.004, process_group=group, **self.ddp)

    def backward(self, number: int, rank: int) -> None:
        with self.model.no_sync():
            for part in range(1, self.parts):
                loss_of(self.model, number, rank, part).backward()
        super().backward(number, rank)

    def residuals(self, state: Any) -> dict[str, Any]:
        return dict(state["residuals"])

    def kept(self) -> Any:
        return [self.common(), self.save()["residuals"]]

    def alike(self) -> Mapping[str, Any]:
        return {"step": self.owner.step, **self.owner.exchanges.choices()}


class Accumulated(Hooked):
    parts = 2
    ddp: Mapping[str, Any] = MappingProxyType({"gradient_as_bucket_view": True})


class Static(Hooked):
    ddp: Mapping[str, Any] = MappingProxyType({"static_graph": True})


class InNodes(Hooked):
    reforms = joins = False


def hook(codec: Any, of: type[Process] = Hooked, ats: Any = (3,), **options: Any) -> RealKind:
    def make(model: nn.Module, group: Any) -> Any:
        return commpress.compress(model, codec, **{"min_numel": 1, "topology": None} | options)

    return RealKind(of, make, ats, dies=ats[-1:], refuses=of is not InNodes)


# ---------------------------------------------------------------- FSDP2


class Sharding(Process):
    joins = elastic = True
    exactly = ("own",)  # states of all ranks are averaged
    dim = 0  # along which matrices are cut whose width any number of ranks divides

    def wrapped(self, model: nn.Module, group: Any) -> nn.Module:
        return self.cut(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))

    def cut(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for each in (model.up, model.down, model):
            fully_shard(each, mesh=mesh, shard_placement_fn=self.placed)
        return model

    def placed(self, p: torch.Tensor) -> Shard:
        return Shard(self.dim if p.shape[1:] == (WIDTH,) else 0)

    def save_elastically(self) -> Any:
        """Residuals as whole tensors, as a checkpoint joins them."""
        state = self.owner.elastic_state_dict()
        whole = {name: each.full_tensor() for name, each in state["residuals"].items()}
        return state | {"residuals": whole}

    def share(self, state: Any, rank: int, size: int) -> dict[str, torch.Tensor]:
        whole = self.save_elastically()["residuals"]
        return {} if rank else {name: each.double().view(-1) for name, each in whole.items()}

    def alike(self) -> Mapping[str, Any]:
        return {name: self.save_elastically()[name] for name in ("step", "bases", "rules")}


class InColumns(Sharding):
    dim = 1


class BetweenNodes(Sharding):
    joins = elastic = False

    def alike(self) -> Mapping[str, Any]:
        return {"step": self.owner.step}


class Hybrid(Sharding):
    """Two shards of each replica, whose states fit other numbers of replicas."""

    def wrapped(self, model: nn.Module, group: Any) -> nn.Module:
        return self.cut(model, group["shard"])

    def among(self) -> Any:
        return self.group["replicate"]

    def save(self) -> Any:
        return super().save() | {"shard": self.group.get_local_rank("shard")}

    def save_elastically(self) -> Any:
        return self.owner.elastic_state_dict() | {"shard": self.group.get_local_rank("shard")}

    def load(self, *states: Any) -> None:
        own = self.group.get_local_rank("shard")
        super().load(*(state for state in states if state["shard"] == own))

    def share(self, state: Any, rank: int, size: int) -> dict[str, torch.Tensor]:
        found = Rank.share(self, state, rank // 2, size // 2)
        return {f"{name} {state['shard']}": part for name, part in found.items()}

    def alike(self) -> Mapping[str, Any]:
        return {"step": self.owner.steps_done}


class HybridKind(RealKind):
    size, sizes = 4, (2,)

    def grouped(self, processes: Sequence[int]) -> Any:
        ranks = torch.tensor(processes).view(-1, 2)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def shards(
    codec: Any,
    weights: Any = None,
    of: type[Process] = Sharding,
    size: int = 3,
    refuses: bool = False,
    **options: Any,
) -> RealKind:
    def make(model: nn.Module, group: Any) -> Any:
        return commpress.compress_fsdp(model, codec, weights, **{"min_numel": 1} | options)

    return RealKind(of, make, (3,), refuses=refuses, size=size)


def hybrid(codec: Any, ats: Any = (3,)) -> RealKind:
    def make(model: nn.Module, mesh: Any) -> Any:
        return commpress.compress_hsdp(model, mesh, codec, min_numel=1)

    return HybridKind(Hybrid, make, ats)


# ---------------------------------------------------------------- ZeRO


class Zero(Process):
    """``Partitioned``, whose residuals fit only the ranks that saved them."""

    joins = True

    def trained_by(self) -> Any:
        return self.owner

    def save(self) -> Any:
        return {"whole": self.owner.state_dict(), "owed": self.owner.feedback_state_dict()}

    def load(self, *states: Any) -> None:
        self.owner.load_state_dict(states[0]["whole"])
        same = [s["owed"] for s in states if s["owed"]["size"] == dist.get_world_size(self.group)]
        if same:
            rank = dist.get_rank(self.group)
            self.owner.load_feedback_state_dict(next(s for s in same if s["rank"] == rank))

    def residuals(self, state: Any) -> dict[str, Any]:
        return {}

    def alike(self) -> Mapping[str, Any]:
        return dict(self.owner.state_dict()["state"])

    def count(self) -> int:
        return self.owner.steps_done


def zero(of: type[Process] = Zero, **options: Any) -> RealKind:
    def make(model: nn.Module, group: Any) -> Any:
        options_ = {"lr": 1e-2, "bucket_mb": 0.004, "min_numel": 1} | options
        named = list(model.named_parameters())
        return commpress.Partitioned(named, torch.optim.AdamW, process_group=group, **options_)

    return RealKind(of, make, (3,))


class Coded(Zero):
    joins, loads = False, ("own",)


# ---------------------------------------------------------------- a process group


class Grouped(Process):
    """Calls of torch.distributed in a backward, over a group that compresses them."""

    joins = True

    def wrapped(self, model: nn.Module, group: Any) -> nn.Module:
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)
        return model

    def reduce(self, p: torch.Tensor) -> None:
        dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.group)

    def residuals(self, state: Any) -> dict[str, Any]:
        return dict(state["residuals"])

    def count(self) -> int:
        return self.owner.state_dict()["step"]

    def alike(self) -> Mapping[str, Any]:
        return {"step": self.count(), "calls": self.owner.state_dict()["calls"]}


def grouped(**options: Any) -> RealKind:
    given = GroupOptions(min_numel=1, **options)
    return RealKind(Grouped, lambda model, group: group, (3,), options=given)


PAIRS = Topology(((0, 1), (2, 3)))
MIXED = ByName({"tokens": SignCodec(block=0), "up.weight": "powersgd-2", "norm": "int8"}, "sign")
WHOLE = ByName({"up.weight": "powersgd-1", "norm|bias": "none"}, "powersgd-2")
HALF_WHOLE = ByName({"up.weight": "int4", "norm|bias": "none"}, "powersgd-2")

REAL = {
    "hook": hook(MIXED),
    "hook, exact steps": hook("int4", ats=(2, 4), exact_steps=3),
    "hook, accumulation": hook("int8", Accumulated),
    "hook, static graph": hook("sign", Static),
    "hook, nodes": hook(MIXED, InNodes, topology="2,1"),
    "hook, ranks of layers": hook(commpress.PerLayer("powersgd-4+fp8", 2)),
    "FSDP2": shards("int4", "int8", refuses=True),
    "FSDP2, matrices": shards(WHOLE, refuses=True),
    "FSDP2, differences": shards("int4", commpress.Difference("int4")),
    "FSDP2, columns": shards(HALF_WHOLE, of=InColumns),
    "FSDP2, nodes": shards(HALF_WHOLE, of=BetweenNodes, size=4, topology=PAIRS),
    "FSDP2, codecs of layers": shards(commpress.PerLayer("int4", 2)),
    "FSDP2, ranks of layers": shards(commpress.PerLayer("powersgd-3+fp8", 2)),
    "HSDP": hybrid("int4"),
    # also after a look, before the choice
    "HSDP, ranks of layers": hybrid(commpress.PerLayer("powersgd-2+fp8", 2), (3, 4)),
    "Partitioned": zero(),
    "Partitioned, int8": zero(Coded, codec="int8", weights="int8"),
    "Partitioned, matrices": zero(Coded, codec="powersgd-2"),
    "group": grouped(codec="int4"),
}
