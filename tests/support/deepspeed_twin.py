"""The meaning of a configuration to DeepSpeed, in plain torch: half-precision weights with float32
masters, gradients averaged over ranks and micro-batches, one norm for clipping, Adam with decoupled
weight decay."""

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from commpress.cli.from_deepspeed import converted
from commpress.cli.gpt import GPT

BATCHES = 8  # of a rank
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ADAM = {
    "type": "Adam",
    "params": {"lr": 0.3, "betas": [0.8, 0.99], "eps": 0.1, "weight_decay": 0.03},
}
LIMIT, POWER = 0.1, 10  # of the norm; of the loss scale


def config(stage: int, offload: str, precision: str, folder: Path, **more: Any) -> dict[str, Any]:
    """A configuration as people write them; ``offload``: "none", "optimizer", "parameters" or
    "both"."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    place = {
        "device": "nvme" if offload == "both" else "cpu",
        "nvme_path": str(folder),
        "pin_memory": True,
    }
    if offload in ("optimizer", "both"):
        zero["offload_optimizer"] = dict(place)
    if offload in ("parameters", "both"):
        zero["offload_param"] = dict(place)
    kinds = {
        "fp32": {},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": POWER}},
        "bf16": {"bf16": {"enabled": True}},
    }
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.3, "warmup_num_steps": 3},
    }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": LIMIT,
        "optimizer": deepcopy(ADAM),
        "scheduler": scheduler,
        "zero_optimization": zero,
        **kinds[precision],
        **more,
    }


def model_of() -> GPT:
    torch.manual_seed(0)
    return GPT(width=16, layers=2, heads=2, length=8, vocabulary=32)


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randint(32, (4, 9), generator=generator) for _ in range(BATCHES)]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch[:, :-1], batch[:, 1:])


def trained(given: dict[str, Any], *, small: bool = False) -> list[torch.Tensor]:
    """Weights, as a whole, after the program that a configuration becomes; ``small``: with little
    memory for stores."""
    program = "\n".join(converted(given)[0])
    if small:
        program = program.replace("2**29", "2**24").replace('"1GiB"', '"16MiB"')
    names = {"model": model_of(), "loader": batches(dist.get_rank()), "loss_of": loss_of}
    exec(program, names)
    try:
        return whole(names)
    finally:
        if "store" in names:
            names["store"].close()


def whole(names: dict[str, Any]) -> list[torch.Tensor]:
    if "streamed" in names:
        return [value.detach().clone() for value in names["streamed"].state_dict().values()]
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in names["model"].parameters()]
    return [p.detach().clone() for p in found]


class Uncorrected(torch.optim.Optimizer):
    """Adam without bias correction, as DeepSpeed's 1-bit Adam in its warm-up."""

    def __init__(self, params: list[torch.Tensor], **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            m, v = self.state.setdefault(
                p, {"moments": (torch.zeros_like(p), torch.zeros_like(p))}
            )["moments"]
            m.lerp_(p.grad, 1 - group["betas"][0])
            v.lerp_(p.grad.square(), 1 - group["betas"][1])
            p -= group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p)


def twin(
    precision: str, steps: int = BATCHES // 2, *, wrong: str = "", kind: Any = torch.optim.AdamW
) -> list[torch.Tensor]:
    """The same in plain torch; ``wrong``: what is left out of it, to show that a comparison would
    notice."""
    model = model_of()
    masters = [p.detach().clone() for p in model.parameters()]
    model.to(DTYPES[precision])
    scale = 2.0**POWER if precision == "fp16" else 1.0
    optimizer = kind(
        masters, **{k: tuple(v) if isinstance(v, list) else v for k, v in ADAM["params"].items()}
    )
    every, parts = batches(dist.get_rank()), 1 if "accumulation" in wrong else 2
    for step in range(steps):
        means = [torch.zeros_like(master) for master in masters]
        for batch in every[2 * step : 2 * step + parts]:
            (loss_of(model, batch).float() / (1 if "division" in wrong else 2) * scale).backward()
            for mean, p in zip(means, model.parameters(), strict=True):
                mean += (
                    p.grad.float() / scale / (1 if "average" in wrong else dist.get_world_size())
                )
                p.grad = None
        for mean, master in zip(means, masters, strict=True):
            if "average" not in wrong:
                dist.all_reduce(mean)
            master.grad = mean
        if "clipping" not in wrong:
            torch.nn.utils.clip_grad_norm_(masters, LIMIT)
        rate = 0.1 + (0.3 - 0.1) * (math.log(max(step, 1)) / math.log(3) if step <= 3 else 1.0)
        optimizer.param_groups[0]["lr"] = 0.3 if "schedule" in wrong else rate
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return masters


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Distance of two ends, over that of the second from the beginning."""
    # of half-precision weights the same
    theirs = [their.to(our.dtype) for our, their in zip(ours, theirs, strict=True)]
    begin = torch.cat([p.detach().flatten() for p in model_of().parameters()])
    a, b = (torch.cat([p.float().flatten() for p in each]) for each in (ours, theirs))
    return float((a - b).norm() / (b - begin).norm())


def alike(ours: list[torch.Tensor]) -> bool:
    """True if this rank has the weights of rank 0."""
    flat = torch.cat([p.flatten() for p in ours])
    first = flat.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, flat)


def computed(stage: int, offload: str, precision: str) -> str:
    """The precision of the program: bfloat16 where a loss scale does not reach the gradients."""
    return (
        "bf16"
        if stage == 3 and offload in ("parameters", "both") and precision == "fp16"
        else precision
    )


def compared(
    programs: Sequence[tuple[int, str, str]], folder: Path, small: bool = False
) -> list[tuple[float, bool]]:
    """For each program the distance from its twin, and True if all ranks have the same weights."""
    # in the same order on every rank: twins communicate
    precisions = dict.fromkeys(computed(*program) for program in programs)
    twins = {precision: twin(precision) for precision in precisions}
    found = []
    for program in programs:
        ours = trained(config(*program, folder / "-".join(map(str, program))), small=small)
        found.append((apart(ours, twins[computed(*program)]), alike(ours)))
    return found
