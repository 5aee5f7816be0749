"""Whole states of what is divided among ranks: the same on every rank, whatever each of them has,
for snapshots of such runs.

    a module with DTensors, FSDP1     torch's full state dict
    an optimizer over DTensors        likewise, by the names of the module's parameters
    Partitioned                       its state_dict, which is whole
    what has elastic_state_dict       the parts of all ranks, side by side

Taking one apart is collective. Loading is, where torch's is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from commpress.collectives.channel import Channel
from commpress.collectives.handover import Divided
from commpress.errors import InvalidArgument
from commpress.integrations.elastic.healing import share
from commpress.integrations.elastic.shared_state import SharedState, packed, unpacked
from commpress.integrations.zero.offloaded import Offloaded
from commpress.integrations.zero.partitioned import Partitioned
from commpress.optim.sharded import ShardedOptimizer

_WHOLE = StateDictOptions(full_state_dict=True)
_CURE = "pass build=, which constructs it for the ranks that there are, and snapshots="


def is_divided(each: Any) -> bool:
    """True if ranks have different parts of it."""
    if isinstance(each, torch.nn.Module):
        divided = any(isinstance(p, DTensor) for p in each.parameters())
        return divided or any(
            isinstance(module, FullyShardedDataParallel) for module in each.modules()
        )
    if isinstance(each, torch.optim.Optimizer):
        return isinstance(each, Partitioned | Offloaded | ShardedOptimizer) or _over_parts(each)
    return False


def _over_parts(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def check_reformable(state: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for what cannot go on among other ranks as it is."""
    for name, each in state.items():
        if is_divided(each):
            raise InvalidArgument(
                f"state[{name!r}] is a {type(each).__name__} of which every rank has a part: "
                f"{_CURE}"
            )
        if isinstance(each, Divided) or (
            isinstance(getattr(each, "channel", None), Channel) and not hasattr(each, "reform")
        ):
            raise InvalidArgument(
                f"state[{name!r}] is a {type(each).__name__}, which cannot go on among other "
                f"ranks: {_CURE}"
            )


class WholeState(SharedState):
    """State that is divided among the ranks of ``channel``, made whole."""

    def __init__(self, objects: Mapping[str, Any], channel: Channel) -> None:
        super().__init__(objects)
        self.channel = channel
        for name, each in objects.items():
            if isinstance(each, Offloaded):
                raise InvalidArgument(
                    f"state[{name!r}] is an Offloaded, whose state is in a store of each rank, and "
                    "cannot be made whole in memory: train without commpress.elastic, from "
                    "checkpoints by torch.distributed.checkpoint"
                )

    def taken_apart(self) -> tuple[bytes, list[torch.Tensor]]:
        """On every rank the same; collective."""
        tensors: list[torch.Tensor] = []
        return packed(
            {name: self._whole(each) for name, each in self.objects.items()}, tensors
        ), tensors

    def _whole(self, each: Any) -> Any:
        if isinstance(each, torch.nn.Module) and is_divided(each):
            return get_model_state_dict(each, options=_WHOLE)
        if (
            isinstance(each, torch.optim.Optimizer)
            and _over_parts(each)
            and not hasattr(each, "elastic_state_dict")
        ):
            return get_optimizer_state_dict(self._module_of(each), each, options=_WHOLE)
        if hasattr(each, "elastic_state_dict"):
            return {"parts": self._parts(each.elastic_state_dict())}
        return each.state_dict()

    def _parts(self, own: dict[str, Any]) -> list[Any]:
        """Every rank's part, on every rank."""
        channel, parts = self.channel, []
        for rank in range(channel.size):
            tensors: list[torch.Tensor] = []
            document = packed(own, tensors) if rank == channel.rank else b""
            others = [r for r in range(channel.size) if r != rank]
            if others:
                document, tensors, _ = channel.run(
                    share(document, tensors, channel, donors=[rank], needy=others)
                )
            parts.append(unpacked(document, tensors))
        return parts

    def _take(self, each: Any, content: Any) -> None:
        if isinstance(each, torch.nn.Module) and is_divided(each):
            set_model_state_dict(each, content, options=_WHOLE)
        elif (
            isinstance(each, torch.optim.Optimizer)
            and _over_parts(each)
            and not hasattr(each, "elastic_state_dict")
        ):
            set_optimizer_state_dict(self._module_of(each), each, content, options=_WHOLE)
        elif hasattr(each, "elastic_state_dict"):
            each.load_state_dict(*content["parts"])
        else:
            each.load_state_dict(content)

    def _module_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """The module whose parameters it trains."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for each in self.objects.values():
            if isinstance(each, torch.nn.Module) and wanted <= {id(p) for p in each.parameters()}:
                return each
        raise InvalidArgument(
            "state has an optimizer over sharded parameters, but not their module, expected both"
        )
