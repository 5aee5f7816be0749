"""A small model trained by FSDP2, plain or compressed, on ranks that tests compare."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import commpress

WIDTH = 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Sizes that no number of ranks divides: 13 tokens, 7 outputs."""

    def __init__(self, blocks: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x):
        h = self.tokens(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return self.head(h)


@dataclass(frozen=True)
class Plan:
    codec: Any = "int8"
    weights: Any = "int8"
    compressed: bool = True
    steps: int = 4
    first: int = 0
    model_dtype: torch.dtype = torch.float32
    dtype: torch.dtype | None = None  # of parameters in forward and backward
    reduce_dtype: torch.dtype | None = None
    reshard: bool | int = True
    recompute: bool = False
    accumulate: int = 1
    sync_last: bool = False  # accumulate without communication
    clip: float = 0.0
    same_data: bool = False
    divide: float = 0.0
    force_sum: bool = False
    columns: bool = False  # matrices are cut along dimension 1
    scale: float = 0.0  # of a GradScaler
    lr: float = 0.1
    momentum: float = 0.9
    backend: str = "gloo"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    losses: list[float]
    parameters: dict[str, torch.Tensor]  # whole ones
    gradients: dict[str, torch.Tensor]  # of the last step, whole
    norms: list[float]
    sent: tuple[int, int, int, int]  # wire and logical bytes of gradients, of weights
    compressed: tuple[int, int]


def shard(plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    model = Net(recompute=plan.recompute).to(plan.model_dtype)
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=plan.dtype, reduce_dtype=plan.reduce_dtype)
    }
    if plan.backend != "gloo":
        import_module("commpress.backend")
        options["mesh"] = DeviceMesh.from_group(dist.new_group(backend=plan.backend), "cpu")
    if plan.columns:
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 else Shard(0)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=plan.reshard, **options)
    fully_shard(model, **options)
    for module in (*model.blocks, model):
        if plan.divide:
            module.set_gradient_divide_factor(plan.divide)
        module.set_force_sum_reduction_for_comms(plan.force_sum)
    return model


class Session:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.model = plan, shard(plan)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=plan.scale or 1.0, enabled=plan.scale > 0
        )
        options = {
            "min_numel": 0,
            **({"grad_scaler": self.scaler} if plan.scale else {}),
            **plan.options,
        }
        self.state = (
            commpress.compress_fsdp(self.model, plan.codec, plan.weights, **options)
            if plan.compressed
            else None
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=plan.lr, momentum=plan.momentum
        )
        self.losses, self.norms = [], []

    def backward(self, step: int) -> None:
        plan = self.plan
        for part in range(plan.accumulate):
            if plan.sync_last:
                self.model.set_requires_gradient_sync(part == plan.accumulate - 1)
            seed = (step * 10 + part) * 10 + (0 if plan.same_data else dist.get_rank())
            generator = torch.Generator().manual_seed(seed)
            x, y = (
                torch.randint(13, (6,), generator=generator),
                torch.randint(7, (6,), generator=generator),
            )
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
            self.scaler.scale(loss).backward()
            self.losses.append(loss.item())

    def step(self, step: int) -> None:
        self.backward(step)
        if self.plan.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
            self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.gradients = {n: p.grad.full_tensor().clone() for n, p in self.model.named_parameters()}
        self.optimizer.zero_grad()

    def run(self) -> "Session":
        for step in range(self.plan.first, self.plan.first + self.plan.steps):
            self.step(step)
        return self

    def trained(self) -> Trained:
        sent, compressed = (0, 0, 0, 0), (0, 0)
        if s := self.state:
            sent = (
                s.gradients.wire_bytes,
                s.gradients.logical_bytes,
                s.weights.wire_bytes,
                s.weights.logical_bytes,
            )
            compressed = (s.gradients.compressed_elements, s.weights.compressed_elements)
        whole = {n: p.full_tensor().detach().clone() for n, p in self.model.named_parameters()}
        return Trained(self.losses, whole, self.gradients, self.norms, sent, compressed)


def train(plan: Plan) -> Trained:
    torch.set_num_threads(1)
    return Session(plan).run().trained()


def both(plan: Plan) -> tuple[Trained, Trained]:
    """Plain and compressed, in one call. Gloo cannot divide by a factor while it adds, so plain
    FSDP2 divides afterwards."""
    plain = {**plan.__dict__, "compressed": False, "force_sum": plan.force_sum or plan.divide > 0}
    return train(Plan(**plain)), train(plan)


def equal(one: Trained, two: Trained) -> None:
    assert one.losses == two.losses
    for name in one.parameters:
        assert torch.equal(one.parameters[name], two.parameters[name]), name


def carried(plan: Plan, folder: str, load: bool) -> dict[str, Any]:
    """Elastic state, residuals whole: saved after a run, or loaded from what another number of
    ranks saved."""
    torch.set_num_threads(1)
    session = Session(plan)
    if load:
        state = session.state.elastic_state_dict()
        dcp.load({"owed": state}, checkpoint_id=folder)
        session.state.load_state_dict(state)
    else:
        session.run()
        dcp.save({"owed": session.state.elastic_state_dict()}, checkpoint_id=folder)
    again = session.state.elastic_state_dict()
    again["residuals"] = {name: shard.full_tensor() for name, shard in again["residuals"].items()}
    return again
