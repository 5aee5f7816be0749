"""``state_dict`` and ``load_state_dict`` of a streamed model and of all modules in it: the values in the store, not the NaN
that parameters show outside of their block.

Copies and pickles of the model would hold NaN as well: they are refused.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import Member
from commpress.integrations.zero.unit import Unit

INSTEAD = "streamed.state_dict() or streamed.save(path), where streamed is what commpress.stream returned"


class NotCopied:
    """Where deepcopy and pickle find it, they learn why the model cannot be copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgument(
            f"a streamed model cannot be copied or pickled, its values are in a store: save {INSTEAD}, and load that into a "
            "second model"
        )


class ModuleState:
    """Hooks of every module that has streamed parameters of its own; they stay when streaming ends, and so do the values."""

    def __init__(self, streamed: Any) -> None:
        self._streamed = streamed
        self._homes: dict[int, tuple[Unit, Member]] = {id(m.parameter): (u, m) for u in streamed.units for m in u.members}
        self._given: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # values of tied parameters
        self._coming: list[tuple[Unit, Member]] = []  # being loaded
        for module in streamed.model.modules():
            if any(id(p) in self._homes for p in module.parameters(recurse=False)):
                module.register_state_dict_post_hook(_Values(self))
                module.register_load_state_dict_pre_hook(_Loads(self))
                module.register_load_state_dict_post_hook(_Loaded(self))

    def _own(self, module: nn.Module) -> list[tuple[str, Unit, Member]]:
        pairs = module.named_parameters(recurse=False, remove_duplicate=False)
        return [(name, *self._homes[id(p)]) for name, p in pairs if id(p) in self._homes]

    def give(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """The module's own values in place of NaN, but for ``keep_vars``, which asks for the parameters themselves."""
        for name, unit, member in self._own(module):
            if (key := prefix + name) not in state or state[key] is member.parameter:
                continue
            if unit.ranks > 1:
                raise InvalidArgument(
                    f"state_dict of a model that is streamed over {unit.ranks} ranks, of which each has a part: call "
                    f"{INSTEAD}, on every rank"
                )
            state[key] = self._shared(unit, member, state)

    def _shared(self, unit: Unit, member: Member, state: dict[str, Any]) -> torch.Tensor:
        """Tied parameters have one value, as in a plain model's ``state_dict``."""
        given = self._given.get(id(member.parameter))
        if given is None or not any(value is given for value in state.values()):
            given = unit.read(self._streamed.store, member)
        if unit.shared:
            self._given[id(member.parameter)] = given
        return given

    def receive(self, module: nn.Module, state: dict[str, Any], prefix: str, *, assign: bool) -> None:
        """Torch copies into the parameters next: they need memory."""
        if assign:
            raise InvalidArgument("load_state_dict(assign=True) would replace streamed parameters: leave assign= out")
        for name, unit, member in self._own(module):
            unit.holders += 1
            unit.appear()
            if getattr(state.get(prefix + name), "shape", None) == member.parameter.shape:
                self._coming.append((unit, member))

    @torch.no_grad()
    def keep(self, module: nn.Module) -> None:
        """What torch has copied goes to the store."""
        own = self._own(module)
        ids = {id(member) for _, _, member in own}
        for unit, member in self._coming:
            if id(member) in ids:
                unit.write(self._streamed.store, member)
                self._streamed.loaded(unit)
        self._coming = [(unit, member) for unit, member in self._coming if id(member) not in ids]
        for _, unit, _ in own:
            unit.holders -= 1
            if not unit.holders and not unit.kept:
                unit.vanish()


@dataclass(eq=False)
class _Values(NotCopied):
    state: ModuleState

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.state.give(module, state, prefix)


@dataclass(eq=False)
class _Loads(NotCopied):
    state: ModuleState

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        self.state.receive(module, state, prefix, assign=bool(metadata.get("assign_to_params_buffers")))


@dataclass(eq=False)
class _Loaded(NotCopied):
    state: ModuleState

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.state.keep(module)
