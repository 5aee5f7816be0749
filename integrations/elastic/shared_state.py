"""Shared state of a run, by name: for newcomers and for snapshots.

A state is taken apart into its tensors and a document (msgpack) of all else: numbers, text, and the
places of tensors. Nothing in a document is ever evaluated. State that is divided among ranks is
made whole, the same on every rank:

    a module with DTensors, FSDP1        torch's full state dict
    an optimizer over DTensors           likewise, by the names of the module's parameters
    Partitioned                          its state_dict, which is whole
    an object with elastic_state_dict    the parts of all ranks
"""

from collections.abc import Mapping, Sequence
from functools import partial
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
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.elastic.healing import Healed, packed, share, unpacked
from commpress.integrations.zero.offloaded import Offloaded
from commpress.integrations.zero.partitioned import Partitioned
from commpress.optim.layout import refuse_held
from commpress.optim.sharded import ShardedOptimizer
from commpress.work import Steps

_WHOLE = StateDictOptions(full_state_dict=True)
_CURE = "pass build=, which constructs it for the present ranks, and snapshots="


class SharedState:
    """Objects with a shared state: modules, optimizers, schedulers, scalers, samplers, or others
    with ``state_dict`` and ``load_state_dict``. Residuals, which differ between ranks, are not part
    of it: ``shared_state`` and ``load_shared_state`` take precedence.

    - ``objects``: objects by name, the same names on every rank. Modules are loaded first, the
      others in the given order.
    - ``channel``: channel of the ranks among which some objects are divided. Then taking the state
      apart is collective, and loading is, too, if torch's is.
    """

    def __init__(self, objects: Mapping[str, Any], channel: Channel | None = None) -> None:
        self.channel = channel
        for name, each in objects.items():
            if not _methods(each):
                raise InvalidArgument(
                    f"state[{name!r}] is a {type(each).__name__}, expected an object with "
                    "state_dict and load_state_dict, to give newcomers its state"
                )
            if isinstance(each, torch.nn.Module):
                cure = (
                    "train them in your own loop, from checkpoints of each rank (docs/experts.md)"
                )
                refuse_held(
                    "commpress.elastic", each.named_parameters(), "heals all ranks alike", cure=cure
                )
            if channel is not None and isinstance(each, Offloaded):
                raise InvalidArgument(
                    f"state[{name!r}] is an Offloaded, with its state in a store of each rank, "
                    "which cannot be made whole in memory: train without commpress.elastic, from "
                    "checkpoints by torch.distributed.checkpoint"
                )
        self.objects = dict(
            sorted(objects.items(), key=lambda item: not isinstance(item[1], torch.nn.Module))
        )

    def taken_apart(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return a document, and the tensors themselves: read them before they change, and never
        write to them."""
        tensors: list[torch.Tensor] = []
        with torch.no_grad():
            content = {name: self._both_ways(each)[0]() for name, each in self.objects.items()}
        return packed(content, tensors), tensors

    def load(self, document: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Load a document and tensors from ``taken_apart``."""
        content = unpacked(document, tensors)
        if content.keys() != self.objects.keys():
            raise StateMismatch(
                f"the state has {', '.join(map(repr, content))}, expected "
                f"{', '.join(map(repr, self.objects))}: pass the same names on every rank"
            )
        for name, each in self.objects.items():
            self._both_ways(each)[1](content[name])

    def _both_ways(self, each: Any) -> tuple[Any, Any]:
        """Return functions that return an object's whole state and load it."""
        if self.channel is None:
            give, take = _methods(each)
            return give, take
        if isinstance(each, torch.nn.Module) and is_divided(each):
            return (
                partial(get_model_state_dict, each, options=_WHOLE),
                partial(set_model_state_dict, each, options=_WHOLE),
            )
        if hasattr(each, "elastic_state_dict"):
            return (
                lambda: {"parts": self._parts(each.elastic_state_dict())},
                lambda content: each.load_state_dict(*content["parts"]),
            )
        if isinstance(each, torch.optim.Optimizer) and _over_parts(each):
            module = self._module_of(each)
            return (
                partial(get_optimizer_state_dict, module, each, options=_WHOLE),
                partial(set_optimizer_state_dict, module, each, options=_WHOLE),
            )
        return each.state_dict, each.load_state_dict

    def _parts(self, own: dict[str, Any]) -> list[Any]:
        """Gather the parts of all ranks on every rank."""
        channel, parts = self.channel, []
        assert channel is not None
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

    def _module_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """Return the module whose parameters the optimizer trains."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for each in self.objects.values():
            if isinstance(each, torch.nn.Module) and wanted <= {id(p) for p in each.parameters()}:
                return each
        raise InvalidArgument(
            "state has an optimizer over sharded parameters, but not their module, expected both"
        )


def _methods(each: Any) -> tuple[Any, ...]:
    """Return the methods that return and load an object's shared state; none if it has no such
    methods."""
    for give, take in (("shared_state", "load_shared_state"), ("state_dict", "load_state_dict")):
        if callable(getattr(each, give, None)) and callable(getattr(each, take, None)):
            return getattr(each, give), getattr(each, take)
    return ()


def is_divided(each: Any) -> bool:
    """Return whether ranks have different parts of an object."""
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
    """Raise ``InvalidArgument`` for objects that cannot continue among other ranks unchanged."""
    for name, each in state.items():
        if is_divided(each):
            raise InvalidArgument(
                f"state[{name!r}] is a {type(each).__name__} that is divided among the ranks: "
                f"{_CURE}"
            )
        if isinstance(each, Divided) or (
            isinstance(getattr(each, "channel", None), Channel) and not hasattr(each, "reform")
        ):
            raise InvalidArgument(
                f"state[{name!r}] is a {type(each).__name__}, which cannot continue among other "
                f"ranks: {_CURE}"
            )


def heal(
    state: SharedState,
    channel: Channel,
    *,
    donors: Sequence[int],
    needy: Sequence[int],
    **options: Any,
) -> Steps[Healed | None]:
    """Give the ranks in ``needy`` the state of the ``donors``; all ranks of the channel must call
    it with the same arguments. None if no rank needs it."""
    if not needy:
        return None
    document, tensors = state.taken_apart() if channel.rank in donors else (b"", [])
    document, tensors, healed = yield from share(
        document, tensors, channel, donors=donors, needy=needy, **options
    )
    if channel.rank in needy:
        state.load(document, tensors)
    return healed


def check_named(state: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for an optimizer of parameters that no module in ``state`` has,
    because newcomers would not get them."""
    modules = [each for each in state.values() if isinstance(each, torch.nn.Module)]
    held = {id(p) for module in modules for p in module.parameters()}
    for name, each in state.items():
        if isinstance(each, torch.optim.Optimizer) and any(
            id(p) not in held for g in each.param_groups for p in g["params"]
        ):
            raise InvalidArgument(
                f"state[{name!r}] trains parameters of no module in state, which newcomers would "
                "not get: add their module to state"
            )
