"""A model on this rank in the way that a contender names."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.contenders import FLOOR, Choices, Contender, torch_rank
from commpress.cli.gpt import GPT
from commpress.cli.training import bf16_hook
from commpress.codecs import LowRankCodec, codec_named

# MB. PowerSGD's hook chains collectives in callbacks: with several buckets ranks may order them
# differently.
ONE_BUCKET = 1 << 20


class Racer:
    """A model on this rank with the way in which it is trained."""

    def __init__(self, who: Contender, model: GPT, lr: float, choices: Choices, seed: int) -> None:
        self.model = model
        self.wrapped: torch.nn.Module = model
        self.state: commpress.CompressedState | None = None
        self._finish: Callable[[], object] | None = None
        if who.own:
            diloco: dict[str, Any] = {
                "every": 30,
                "outer": commpress.Nesterov(0.7, 0.9),
                "codec": None,
            }
            local = commpress.LocalUpdates(
                adamw(model.parameters(), lr), seed=seed, **(diloco if who.name == "diloco" else {})
            )
            self.optimizer: torch.optim.Optimizer = local
            self._finish = local.drain
            return
        size = ONE_BUCKET if torch_rank(who.name) else None
        ddp = DistributedDataParallel(
            model, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=size
        )
        self.wrapped = ddp
        if who.name == "zero-one":
            zero_one = commpress.ZeroOneAdam(
                list(model.named_parameters()),
                lr=lr,
                weight_decay=0.01,
                exact_codec="log3",
                spiky_codec="log3",
                exact_steps=8,
                variance_updates=2,
            )
            self.optimizer = commpress.overlap(ddp, zero_one)
            self._finish = zero_one.synchronize
            return
        self.optimizer = adamw(model.parameters(), lr)
        self.state = attach(ddp, who, choices, seed)

    def step(self, windows: tuple[torch.Tensor, torch.Tensor], lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.wrapped(*windows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def finish(self) -> None:
        """Bring all ranks to the same weights."""
        if self._finish is not None:
            self._finish()


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=True)


def attach(
    ddp: DistributedDataParallel, who: Contender, choices: Choices, seed: int
) -> "commpress.CompressedState | None":
    """The state of commpress's hook, where it is one of ours."""
    if who.name == "bf16":
        ddp.register_comm_hook(None, bf16_hook)
    elif rank := torch_rank(who.name):
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif who.name not in (FLOOR, "plain"):
        low_rank = isinstance(
            codec_named(who.name), LowRankCodec
        )  # the output layer is a matrix like others
        codec = who.name if low_rank else commpress.ByName({"^head": choices.head_codec}, who.name)
        return commpress.compress(
            ddp,
            codec,
            min_numel=choices.min_numel,
            error_feedback=choices.error_feedback,
            exact_steps=choices.exact_steps,
            seed=seed,
        )
    return None
