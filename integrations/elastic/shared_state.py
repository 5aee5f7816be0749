"""State of a run, by name: what a newcomer needs to be like the others, and what a snapshot holds.

A state is taken apart into its tensors and a document (msgpack) of all else: numbers, text, and
where each tensor belongs. Nothing in a document is ever evaluated. What is divided among ranks is
made whole, the same on every rank:

    a module with DTensors, FSDP1     torch's full state dict
    an optimizer over DTensors        likewise, by the names of the module's parameters
    Partitioned                       its state_dict, which is whole
    what has elastic_state_dict       the parts of all ranks, side by side
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
_CURE = "pass build=, which constructs it for the ranks that there are, and snapshots="


class SharedState:
    """Objects that hold it: modules, optimizers, schedulers, scalers, samplers, or whatever has
    ``state_dict`` and ``load_state_dict``. Where compression leaves something behind on each rank,
    that is no part of it: ``shared_state`` and ``load_shared_state`` take precedence.

    - ``objects``: by name, the same names on every rank. Modules are loaded first, the others in
      the order given.
    - ``channel``: of the ranks among which some of these are divided. Then taking the state apart
      is collective, and loading it where torch's is.
    """

    def __init__(self, objects: Mapping[str, Any], channel: Channel | None = None) -> None:
        self.channel = channel
        for name, each in objects.items():
            if not _methods(each):
                raise InvalidArgument(
                    f"state[{name!r}] is a {type(each).__name__}, expected what has state_dict and "
                    "load_state_dict: newcomers would not be like the others in it"
                )
            if isinstance(each, torch.nn.Module):
                cure = (
                    "train them in a loop of your own, from checkpoints of each rank "
                    "(docs/experts.md)"
                )
                refuse_held(
                    "commpress.elastic", each.named_parameters(), "heals all ranks alike", cure=cure
                )
            if channel is not None and isinstance(each, Offloaded):
                raise InvalidArgument(
                    f"state[{name!r}] is an Offloaded, whose state is in a store of each rank, and "
                    "cannot be made whole in memory: train without commpress.elastic, from "
                    "checkpoints by torch.distributed.checkpoint"
                )
        self.objects = dict(
            sorted(objects.items(), key=lambda item: not isinstance(item[1], torch.nn.Module))
        )

    def taken_apart(self) -> tuple[bytes, list[torch.Tensor]]:
        """A document, and the tensors themselves: read them before anybody changes them, and never
        write."""
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
                f"{', '.join(map(repr, self.objects))}: give the same names on every rank"
            )
        for name, each in self.objects.items():
            self._both_ways(each)[1](content[name])

    def _both_ways(self, each: Any) -> tuple[Any, Any]:
        """Functions that give the state of an object, whole, and take it."""
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
    """Those that give and take the shared state of an object; none if it has no such thing."""
    for give, take in (("shared_state", "load_shared_state"), ("state_dict", "load_state_dict")):
        if callable(getattr(each, give, None)) and callable(getattr(each, take, None)):
            return getattr(each, give), getattr(each, take)
    return ()


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


def heal(
    state: SharedState,
    channel: Channel,
    *,
    donors: Sequence[int],
    needy: Sequence[int],
    **options: Any,
) -> Steps[Healed | None]:
    """Make the ranks in ``needy`` like the ``donors``; all ranks of the channel call it alike. None
    where nobody needs it."""
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
    """Raise ``InvalidArgument`` for an optimizer of weights that no module in ``state`` has:
    newcomers would not get them."""
    modules = [each for each in state.values() if isinstance(each, torch.nn.Module)]
    held = {id(p) for module in modules for p in module.parameters()}
    for name, each in state.items():
        if isinstance(each, torch.optim.Optimizer) and any(
            id(p) not in held for g in each.param_groups for p in g["params"]
        ):
            raise InvalidArgument(
                f"state[{name!r}] trains parameters of no module in state: newcomers would not be "
                "like the others in them; name that module as well"
            )
