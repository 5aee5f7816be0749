"""Names in a run's state, and what follows from them: the modules that optimizers train, and their replicas."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import InvalidArgument


def replicas_of(modules: Iterable[torch.nn.Module], group: Any) -> list[DistributedDataParallel]:
    """Those inside of these modules, such as of one that torch.compile has made; and those of ``group`` around them, of which
    the program has named only the module inside."""
    named = list(modules)
    inside = [each for module in named for each in module.modules() if isinstance(each, DistributedDataParallel)]
    trained = {id(p) for module in named for p in module.parameters()}
    around = [
        each for each in gc.get_objects()
        if issubclass(type(each), DistributedDataParallel) and vars(each).get("process_group") is group
        and any(id(p) in trained for p in each.parameters())
    ]  # fmt: skip
    return list({id(each): each for each in [*inside, *around]}.values())


def check_named(state: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for an optimizer of weights that no module in ``state`` has: newcomers would not get them."""
    modules = [each for each in state.values() if isinstance(each, torch.nn.Module)]
    held = {id(p) for module in modules for p in module.parameters()}
    for name, each in state.items():
        if isinstance(each, torch.optim.Optimizer) and any(id(p) not in held for g in each.param_groups for p in g["params"]):
            raise InvalidArgument(
                f"state[{name!r}] trains parameters of no module in state: newcomers would not be like the others in them; "
                "name that module as well"
            )


def check_ordered(ddp: DistributedDataParallel) -> None:
    """Raise ``InvalidArgument`` for one without a hook that also sends which parameters it has used: exact means are sent by a
    thread of their own, and ranks must make the calls of one group in the same order."""
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, name):
            raise InvalidArgument(
                f"DistributedDataParallel has {name}=True and no hook, whose calls come in another order on each rank: "
                f"commpress.compress(ddp, 'none') sends the same means over a channel of its own, or leave {name} out"
            )
