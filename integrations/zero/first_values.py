"""The first values of a streamed model: what its parameters hold, or, on the meta device, what ``reset_parameters`` gives.

Modules are initialised in the order in which a constructor registers them, so a seed gives the values of a model that was
built in memory. A unit is in memory until all its modules have been there.
"""

from collections import Counter

import torch
from torch import nn

from commpress.errors import InvalidArgument
from commpress.integrations.zero.unit import Unit
from commpress.tiered_mem import TieredStore


def on_memory(model: nn.Module) -> set[int]:
    """Bring parameters (without their bytes) and buffers from the meta device to memory; the ids of modules that had any."""
    made: dict[int, nn.Parameter] = {}
    fresh = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                fresh.add(id(module))
                if id(parameter) not in made:
                    nothing = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
                    made[id(parameter)] = nn.Parameter(nothing, parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                fresh.add(id(module))
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return fresh


class FirstValues:
    def __init__(self, units: list[Unit], fresh: set[int]) -> None:
        self._units = {id(m.parameter): unit for unit in units for m in unit.members}
        self._fresh = fresh

    @torch.no_grad()
    def write(self, model: nn.Module, store: TieredStore) -> None:
        """All units into the store, and out of memory."""
        visits = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        left = {unit: sum(visits[id(m.parameter)] for m in unit.members) for unit in self._units.values()}
        done: set[int] = set()
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            for unit in dict.fromkeys(self._units[id(p)] for p in own):
                if not unit.present:
                    unit.fill()
            if id(module) in self._fresh:
                self._reset(name, module, {id(p) for p in own} & done)
            done |= {id(p) for p in own}
            for p in own:
                unit = self._units[id(p)]
                left[unit] -= 1
                if not left[unit]:
                    unit.save(store)
                    unit.vanish()

    @staticmethod
    def _reset(name: str, module: nn.Module, done: set[int]) -> None:
        """A parameter that another module has initialised keeps that value."""
        if not callable(reset := getattr(module, "reset_parameters", None)):
            raise InvalidArgument(
                f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters: give it one, or "
                "build it in memory"
            )
        before = {p: p.clone() for p in module.parameters(recurse=False) if id(p) in done}
        reset()
        for parameter, value in before.items():
            parameter.copy_(value)
