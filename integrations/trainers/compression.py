"""One rule for all trainers: replicas (DDP) use ``compress``, shards (FSDP2) ``compress_fsdp``.

    optimizer                  DistributedDataParallel           FSDP2
    of torch                   compresses gradients              compresses gradients, weights
    OneBitAdam and similar     averages nothing: ``overlap``     refused
    LocalUpdates               averages nothing: ``keep_local``  refused
    Partitioned                refused                           refused

Options are those of one of the two. For shards with a ``codec``, ``weights`` must be given, too, so
that no weights are compressed unasked. A combination that does not fit raises an error at
construction, or when the trainer has wrapped the model, before the first step.
"""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commpress.alarm import Alarm
from commpress.choice import PerLayer, methods_of
from commpress.codecs import Codec, Policy, codec_named
from commpress.codecs.planned import Planned
from commpress.collectives.measured_links import Links
from commpress.collectives.topology import Topology
from commpress.collectives.transports.factory import AgreeOver
from commpress.errors import InvalidArgument, refuse_unknown
from commpress.integrations.ddp.hook import CompressedState, compress
from commpress.integrations.ddp.local import keep_local
from commpress.integrations.ddp.overlap import averages, overlap
from commpress.integrations.fsdp.fsdp2 import ShardedState, compress_fsdp
from commpress.integrations.fsdp.shard_weights import Difference
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.optimizer import CompressedOptimizer

_OF_REPLICAS = {
    name for taker in (compress, CompressedState) for name in signature(taker).parameters
} - {"codec", "options"}
_OF_SHARDS = set(signature(compress_fsdp).parameters) - {"codec"}

CodecOption = str | Codec | Policy | PerLayer | None


class CompressionOptions(TypedDict, total=False):
    """Keyword options of trainers' callbacks: those of ``compress`` for replicas, or of
    ``compress_fsdp`` for shards."""

    weights: str | Codec | Policy | Difference | None
    plan: str | Path | Planned | None
    min_numel: int
    exclude: tuple[str, ...]
    topology: Topology | tuple[Topology, str | Codec | Policy] | str | Links | None
    error_feedback: bool | str | Codec
    on_nonfinite: Literal["skip", "propagate", "raise"]
    agree_over: AgreeOver | None
    grad_scaler: torch.amp.GradScaler | None
    exact_steps: int
    regather: bool
    overlap: bool
    alarm: Alarm | str | None
    wait: float | Literal["auto"] | None


SHARDED, REPLICATED = "FSDP2", "DistributedDataParallel"


def wrapper_of(model: nn.Module) -> str:
    """Return the name of the trainer's wrapper around ``model`` or in it: FSDP2,
    DistributedDataParallel, another one's name, or ""."""
    parts = list(model.modules())
    if any(isinstance(part, FSDPModule) for part in parts):
        return SHARDED
    if isinstance(model, DistributedDataParallel):
        return REPLICATED
    if any(isinstance(part, FullyShardedDataParallel) for part in parts):
        return "FullyShardedDataParallel (FSDP1)"
    return type(model).__name__ if type(model).__module__.startswith("deepspeed") else ""


class Compression:
    """Options of ``compress`` or of ``compress_fsdp`` for a trainer's callback, named
    ``caller``."""

    def __init__(
        self, caller: str, codec: CodecOption, given: CompressionOptions | dict[str, Any]
    ) -> None:
        options: dict[str, Any] = {**given}
        refuse_unknown(caller, options, compress, CompressedState, compress_fsdp)
        for named in (codec, options.get("weights")):
            if isinstance(named, str) and not methods_of(named):
                codec_named(named)
        self.caller, self.codec, self.options = caller, codec, options
        of_replicas = [name for name in options if name not in _OF_SHARDS]
        of_shards = [name for name in options if name not in _OF_REPLICAS]
        if of_replicas and of_shards:
            raise InvalidArgument(
                f"{caller} got {of_replicas[0]}=, for replicas (DistributedDataParallel), and "
                f"{of_shards[0]}=, for shards (FSDP2): pass codec= and options of "
                "commpress.compress, or codec=, weights= and options of commpress.compress_fsdp"
            )
        self.for_replicas, self.for_shards = next(iter(of_replicas), ""), next(iter(of_shards), "")

    def check(self, wrapper: str) -> None:
        """Raise ``InvalidArgument`` if the options do not fit the trainer's wrapper; see
        ``wrapper_of``."""
        if wrapper == SHARDED and self.for_replicas:
            raise InvalidArgument(
                f"{self.caller} got {self.for_replicas}=, an option for replicas, but the model is "
                f"sharded by FSDP2: pass {self.caller}(codec='int8', weights='int8') and "
                "options of commpress.compress_fsdp"
            )
        if wrapper == SHARDED and self.codec is not None and "weights" not in self.options:
            raise InvalidArgument(
                f"{self.caller} got codec={self.codec!r} alone, but the model is sharded by FSDP2, "
                f"which also sends weights: pass {self.caller}(codec={self.codec!r}, "
                "weights='int8'), or weights=None to send them exactly"
            )
        if wrapper == REPLICATED and self.for_shards:
            raise InvalidArgument(
                f"{self.caller} got {self.for_shards}=, an option for shards of FSDP2, but the "
                f"model runs under DistributedDataParallel: pass {self.caller}(codec='int8') and "
                "options of commpress.compress, or let the trainer shard. Accelerate shards only "
                "on GPUs: on CPUs it ignores fsdp= and trains replicas"
            )
        if wrapper not in (SHARDED, REPLICATED):
            ran = f"by {wrapper}" if wrapper else "without DistributedDataParallel or FSDP2"
            raise InvalidArgument(
                f"the model runs {ran}, where {self.caller} can compress nothing: use FSDP2 "
                f"(fsdp_config={{'version': 2}} of TrainingArguments, fsdp_version: 2 of "
                "accelerate launch, ModelParallelStrategy of Lightning) or "
                "DistributedDataParallel, or leave it out"
            )

    def one_of(self, optimizers: Sequence[Any]) -> Any:
        """Return the first optimizer, which decides who averages; refuse another one that averages,
        because whoever has the first one's parameters averages them already."""
        for other in optimizers[1:]:
            if averages(other) or isinstance(other, LocalUpdates):
                raise InvalidArgument(
                    f"optimizer {list(optimizers).index(other)} is {type(other).__name__}, which "
                    f"averages over the ranks itself, beside a {type(optimizers[0]).__name__}: "
                    "give one optimizer all parameters"
                )
        return optimizers[0]

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise ``InvalidArgument`` if the optimizer does not suit replicas, or compresses itself
        and there are options for compression, too."""
        if not averages(optimizer) and not isinstance(optimizer, LocalUpdates):
            return
        name = type(optimizer).__name__
        if not isinstance(optimizer, CompressedOptimizer | LocalUpdates):
            raise InvalidArgument(
                f"the optimizer is {name}, which averages over the ranks itself and has a state "
                "that a trainer's checkpoint does not save: use it in your own loop without "
                "DistributedDataParallel, or take another optimizer"
            )
        given = "codec" if self.codec is not None else next(iter(self.options), "")
        if given:
            raise InvalidArgument(
                f"{self.caller} got {given}=, but the optimizer is {name}, which compresses its "
                f"messages itself: pass such options to {name}, and none to {self.caller}"
            )

    def join(
        self, ddp: DistributedDataParallel, optimizer: Any, scaler: torch.amp.GradScaler | None
    ) -> CompressedState | CompressedOptimizer | LocalUpdates:
        """Let either DDP average, with compression, or the optimizer, and DDP not; return the
        object that compresses."""
        self.check(wrapper_of(ddp))
        self.check_optimizer(optimizer)
        if isinstance(optimizer, LocalUpdates):
            keep_local(ddp)
            return optimizer
        if isinstance(optimizer, CompressedOptimizer):
            return overlap(ddp, optimizer, grad_scaler=scaler)
        codec = "fp8" if self.codec is None else self.codec
        return compress(ddp, codec, **{"grad_scaler": scaler} | self.options)

    def shard(
        self,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> ShardedState:
        """Compress gradients and weights of a sharded model."""
        self.check(wrapper_of(model))
        if optimizer is not None and (averages(optimizer) or isinstance(optimizer, LocalUpdates)):
            raise InvalidArgument(
                f"the optimizer is {type(optimizer).__name__}, which averages over the ranks "
                "itself, but the model is sharded by FSDP2, which averages already: take another "
                "optimizer, such as AdamW, or train replicas"
            )
        given: dict[str, Any] = {"codec": "fp8" if self.codec is None else self.codec}
        return compress_fsdp(model, **given | {"grad_scaler": scaler} | self.options)


def refuse_shards(caller: str, model: nn.Module) -> None:
    """Raise ``InvalidArgument`` if the model is sharded, for a ``caller`` that trains replicas
    independently."""
    if wrapper_of(model) == SHARDED:
        raise InvalidArgument(
            f"{caller} trains replicas independently, but the model is sharded by FSDP2: train "
            "replicas (DistributedDataParallel), or compress by Compress(codec='int8', "
            "weights='int8')"
        )
