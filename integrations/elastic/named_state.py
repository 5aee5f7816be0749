"""Names in a run's state, and what follows from them: the modules that optimizers train, and their
replicas."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import InvalidArgument


def replicas_of(modules: Iterable[torch.nn.Module], group: Any) -> list[DistributedDataParallel]:
    """Those inside of these modules, such as of one that torch.compile has made; and those of
    ``group`` around them, of which the program has named only the module inside."""
    named = list(modules)
    inside = [
        each
        for module in named
        for each in module.modules()
        if isinstance(each, DistributedDataParallel)
    ]
    level: list[Any] = [
        each for module in named for each in (*module.modules(), *module.parameters())
    ]
    seen, around = {id(each) for each in level}, []
    while level:
        level = [each for each in _owners(level) if id(each) not in seen]
        seen |= {id(each) for each in level}
        around += [each for each in level if _replicates(each, group)]
    return list({id(each): each for each in [*inside, *around]}.values())


def _replicates(module: torch.nn.Module, group: Any) -> bool:
    return (
        isinstance(module, DistributedDataParallel) and vars(module).get("process_group") is group
    )


def _owners(parts: Sequence[torch.nn.Module | torch.nn.Parameter]) -> list[torch.nn.Module]:
    """Modules that have some of these.

    Note: found by who refers to them. A list of all objects would hold those that other threads are
    making just then, and a tuple that somebody else holds cannot be finished (SystemError).
    """
    known = {id(part) for part in parts}

    def has_some(values: dict[str, Any]) -> bool:
        return not known.isdisjoint([id(each) for each in [*values.values()]])

    named = [each for each in gc.get_referrers(*parts) if type(each) is dict and has_some(each)]
    inside = gc.get_referrers(*named)
    every = [*inside, *gc.get_referrers(*[each for each in inside if type(each) is dict])]
    # asks no proxy for its class
    found = {id(each): each for each in every if issubclass(type(each), torch.nn.Module)}
    return [
        each
        for each in found.values()
        if any(has_some(vars(each).get(name, {})) for name in ("_modules", "_parameters"))
    ]


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


def check_ordered(ddp: DistributedDataParallel) -> None:
    """Raise ``InvalidArgument`` for one without a hook that also sends which parameters it has
    used: exact means are sent by a thread of their own, and ranks must make the calls of one group
    in the same order."""
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, name):
            raise InvalidArgument(
                f"DistributedDataParallel has {name}=True and no hook, whose calls come in another "
                "order on each rank: commpress.compress(ddp, 'none') sends the same means over a "
                f"channel of its own, or leave {name} out"
            )
