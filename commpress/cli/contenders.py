"""Ways of training that ``commpress demo`` lets race: what each is, the rate that was searched for
it, how it is set up."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.gpt import GPT
from commpress.cli.training import bf16_hook
from commpress.codecs import LowRankCodec, codec_named
from commpress.errors import InvalidArgument

# MB. PowerSGD's hook chains collectives in callbacks: with several buckets ranks may order them
# differently.
ONE_BUCKET = 1 << 20
UNSEARCHED = 1e-3  # the rate of codecs that are asked for by name


@dataclass(frozen=True)
class Contender:
    """``lr`` is the peak of the learning rate: see ``commpress demo --search``."""

    name: str
    what: str
    lr: float
    ours: bool = True
    own: bool = False  # exchanges by itself: no DistributedDataParallel reduces gradients
    searched: bool = True  # the rate, for this very way
    limited: bool = True  # over the slow links; else these have no limit meanwhile


FLOOR = "no-network"
CONTENDERS = {
    one.name: one
    for one in (
        Contender(
            FLOOR,
            "DistributedDataParallel, float32, links without a limit",
            1e-3,
            ours=False,
            limited=False,
        ),
        Contender("plain", "DistributedDataParallel, float32", 2e-3, ours=False),
        Contender("bf16", "torch's bf16_compress_hook", 1e-3, ours=False),
        Contender(
            "torch-powersgd1", "torch's powerSGD_hook, rank 1", 2.5e-4, ours=False, searched=False
        ),
        Contender(
            "torch-powersgd2", "torch's powerSGD_hook, rank 2", 5e-4, ours=False, searched=False
        ),
        Contender("torch-powersgd4", "torch's powerSGD_hook, rank 4", 5e-4, ours=False),
        Contender(
            "diloco",
            "DiLoCo: 30 steps, float32, Nesterov(0.7, 0.9)",
            2.5e-4,
            ours=False,
            own=True,
            searched=False,
        ),
        Contender("powersgd-4", "commpress.compress, codec powersgd-4", 5e-4),
        Contender("int8", "commpress.compress, codec int8", 1e-3),
        Contender("sign", "commpress.compress, codec sign, int8 for the output layer", 1e-3),
        Contender("zero-one", "commpress.ZeroOneAdam", 5e-4),
        Contender(
            "local",
            "commpress.LocalUpdates as it is: exchanges hide behind computing",
            1e-3,
            own=True,
        ),
    )
}


@dataclass(frozen=True)
class Choices:
    """Options of the ways that compress gradients by a codec."""

    head_codec: str = "int8"  # of the output layer, whose gradients are the spikiest
    error_feedback: bool | Literal["ef21"] = True
    exact_steps: int = 0
    min_numel: int = 256


def contender(name: str) -> Contender:
    """One of the table, or any codec of commpress under AdamW."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    try:
        codec_named(name)
    except InvalidArgument as error:
        known = ", ".join(CONTENDERS)
        raise InvalidArgument(
            f"--ways has {name!r}, expected some of {known}, or codecs of commpress ({error})"
        ) from None
    return Contender(name, f"commpress.compress, codec {name}", UNSEARCHED)


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
        # the output layer is a matrix like others
        low_rank = isinstance(codec_named(who.name), LowRankCodec)
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


def torch_rank(name: str) -> int:
    """Rank of torch's PowerSGD; 0 of any other way."""
    match = re.fullmatch(r"torch-powersgd(\d+)", name)
    return int(match[1]) if match else 0


def names(text: str) -> list[str]:
    """Names of contenders, each once, from 'a,b'."""
    found = list(dict.fromkeys(re.split(r"\s*,\s*", text.strip())))
    for name in found:
        contender(name)
    return found
