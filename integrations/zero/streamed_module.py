"""Modules of a streamed model: the units that are fetched and released, the parameters of each, and
hooks that let ``state_dict`` and ``load_state_dict`` use the values in the store instead of the NaN
that parameters have outside of their module.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import Member, Numbered
from commpress.integrations.zero.streamed_group import StreamedGroup
from commpress.integrations.zero.tiling import WHOLE, Tile, TiledLinear
from commpress.tiered_mem import TieredStore

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONTAINERS = (*LISTS, nn.ParameterList, nn.ParameterDict)
INSTEAD = (
    "streamed.state_dict() or streamed.save(path), where streamed is what commpress.stream returned"
)


class NotCopied:
    """Refuse deepcopy and pickle of a model with this object: copies would contain NaN."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgument(
            "a streamed model cannot be copied or pickled, because its values are in a store: save "
            f"{INSTEAD}, and load that into a second model"
        )


@dataclass(eq=False)
class StreamedForward:
    """One forward of a module, with the number of inputs that still wait for their gradient."""

    inputs: int


class StreamedModule(NotCopied):
    """A module and its groups, which it holds during its forward, and in backward from the gradient
    of its outputs to that of its inputs.

    ``fetch`` reads a group into memory, ``backward`` returns the number of the running backward.
    """

    def __init__(
        self, module: nn.Module, fetch: Callable[[StreamedGroup], None], backward: Callable[[], int]
    ) -> None:
        self.module, self.groups, self._fetch, self._backward = (
            module,
            list[StreamedGroup](),
            fetch,
            backward,
        )
        self.block = False  # whether it is a block: a unit with all its submodules
        self._forwards = 0
        self._graph: int | None = None  # number of the backward inside this module
        self._calls: set[StreamedForward] = set()
        self._missing: set[int] = set()  # own parameters without a gradient so far
        self._held = False

    def watch(self) -> list[RemovableHandle]:
        """Register and return hooks of the module and its parameters."""
        hooks: list[RemovableHandle] = [
            self.module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(self._leave, always_call=True, with_kwargs=True),
        ]
        for group in self.groups:
            for member in group.members:
                if member.parameter.requires_grad:
                    hooks.append(member.parameter.register_post_accumulate_grad_hook(self._came))
        return hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._forwards += 1
        self._update()

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._forwards -= 1
        if torch.is_grad_enabled() and result is not None:
            self._expect((args, kwargs), result)
        self._update()

    def _expect(self, arguments: Any, result: Any) -> None:
        """Register hooks at both ends of this forward's part of the graph."""
        results = [t for t in tensors_in(result) if t.requires_grad]
        if not results:
            return
        ids = {id(t) for t in results}
        inputs = [t for t in tensors_in(arguments) if t.requires_grad and id(t) not in ids]
        call = StreamedForward(len(inputs))

        def arrived(gradient: torch.Tensor) -> None:
            call.inputs -= 1
            if call.inputs == 0:
                self._calls.discard(call)
                self._update()

        def needed(gradient: torch.Tensor) -> None:
            self._enter_backward(call)

        for tensor in inputs:
            tensor.register_hook(arrived)
        for tensor in results:
            tensor.register_hook(needed)

    def _enter_backward(self, call: StreamedForward) -> None:
        graph = self._backward()
        if self._graph is None:
            self._graph = graph
            self._missing = {
                id(m.parameter)
                for u in self.groups
                if not u.shared
                for m in u.members
                if m.parameter.requires_grad
            }
        if call.inputs > 0 or (not self._missing and self._trains_others()):
            self._calls.add(call)
        self._update()

    def _trains_others(self) -> bool:
        """Return whether the module has trained parameters that are not streamed, as adapters
        are: the end of their backward is not seen."""
        own = {id(m.parameter) for group in self.groups for m in group.members}
        return any(p.requires_grad and id(p) not in own for p in self.module.parameters())

    def _came(self, parameter: torch.Tensor) -> None:
        self._missing.discard(id(parameter))
        self._update()

    def reset(self) -> None:
        """Release the groups after a forward that was interrupted."""
        self._forwards = 0
        self._update()

    def end_backward(self, graph: int) -> None:
        """End the wait for parameters without a gradient, and for inputs whose gradient was not
        requested."""
        if self._graph == graph:
            self._graph = None
            self._calls.clear()
            self._missing.clear()
            self._update()

    def _update(self) -> None:
        """Fetch or release the groups according to the present state."""
        if self._graph is not None and not self._calls and not self._missing:
            self._graph = None
        wants = self._forwards > 0 or self._graph is not None
        if wants and not self._held:
            self._held = True
            for group in self.groups:
                group.holders += 1
                if not group.present:
                    self._fetch(group)
        elif self._held and not wants:
            self._held = False
            for group in self.groups:
                group.release()


class ReadCheck(TorchDispatchMode):
    """Refuse a forward in which a module reads another module's parameter while it is not in
    memory.

    ``specs`` and ``groups`` correspond to each other. Every operation between ``begin`` and ``end``
    is checked.
    """

    def __init__(
        self, model: nn.Module, specs: "Sequence[GroupSpec]", groups: Sequence[StreamedGroup]
    ) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._homes = {
            id(member.parameter): (group, member.name, spec.modules[0])
            for spec, group in zip(specs, groups, strict=True)
            for member in group.members
        }
        self._model, self._inside = model, list[nn.Module]()
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        self._inside = [self._model]
        for module in self._names.keys() - {self._model}:
            self._hooks.append(module.register_forward_pre_hook(self._push, prepend=True))
            self._hooks.append(module.register_forward_hook(self._pop, always_call=True))
        self.__enter__()

    def end(self) -> None:
        if self._inside:  # it has begun
            self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._inside.clear()

    def _push(self, module: nn.Module, *_: Any) -> None:
        self._inside.append(module)

    def _pop(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            group, name, owner = self._homes.get(id(tensor), (None, "", None))
            if group is not None and owner is not None and not group.present and tensor.numel():
                reader = self._named(self._inside[-1])
                raise InvalidArgument(
                    f"parameter {name!r} of {self._named(owner)} is read by {reader} while it is "
                    "not in memory: a streamed parameter is there while its own module computes. "
                    f"Call that module instead of reading its parameter, or pass keep={[name]!r} "
                    "to commpress.stream"
                )
        return func(*args, **(kwargs or {}))

    def _named(self, module: nn.Module) -> str:
        return f"{self._names.get(module) or 'the model'} ({type(module).__name__})"


@dataclass(frozen=True)
class GroupSpec:
    """Parameters to fetch and release together, and the modules that need them in forward and
    backward."""

    name: str
    modules: tuple[nn.Module, ...]
    members: tuple[Numbered, ...]
    blocks: set[nn.Module]  # those of the modules that are blocks
    kept: bool = False


def _together(
    model: nn.Module, chosen: Iterable[type[nn.Module]] = ()
) -> tuple[list[tuple[nn.Module, list[nn.Parameter]]], set[nn.Module]]:
    """Return units with their parameters, and which of them are blocks: the elements of the
    outermost lists of modules, or modules of the ``chosen`` classes, with all their parameters;
    outside of these each module with its own. A tile of a linear layer is always a unit by
    itself."""
    chosen = tuple(chosen)
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    blocks = set[nn.Module]()
    whole = 0

    def walk(module: nn.Module, listed: bool) -> None:
        nonlocal whole
        together = isinstance(module, (*(chosen or WHOLE), TiledLinear))
        if together or (listed and not chosen and not isinstance(module, CONTAINERS)):
            whole += isinstance(module, chosen)
            tiles = [
                tile for tile in module.modules() if isinstance(tile, Tile) and tile is not module
            ]
            apart = {id(tile.weight) for tile in tiles}
            if not isinstance(module, TiledLinear):
                blocks.add(module)
            found.append((module, [p for p in module.parameters() if id(p) not in apart]))
            found.extend((tile, [tile.weight]) for tile in tiles)
            return
        if own := _direct(module):
            found.append((module, own))
        for child in module.children():
            if not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                walk(child, isinstance(module, LISTS))

    walk(model, False)
    if chosen and not whole:
        raise InvalidArgument(
            f"blocks is {[t.__name__ for t in chosen]}, but the model has no such module"
        )
    return [(module, own) for module, own in found if own], blocks


def _direct(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters and those of its parameter lists, which are never called
    themselves."""
    own = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            own += list(child.parameters())
    return own


def group_specs(
    model: nn.Module, chosen: Iterable[type[nn.Module]], keep: Sequence[str]
) -> list[GroupSpec]:
    """Assign every parameter to a group: those of one module with equal dtype, device and ``keep``
    together, shared ones by themselves."""
    users: dict[int, list[nn.Module]] = {}
    units, blocks = _together(model, chosen)
    for module, own in units:
        for parameter in own:
            users.setdefault(id(parameter), []).append(module)
    rows: dict[tuple[object, ...], list[Numbered]] = {}
    for index, (name, p) in enumerate(model.named_parameters()):
        kept = any(name == one or name.startswith(one + ".") for one in keep)
        alone = index if len(users[id(p)]) > 1 else None
        key = (kept, alone, id(users[id(p)][0]), p.dtype, p.device, p.requires_grad)
        rows.setdefault(key, []).append((p, name, index))
    return [
        GroupSpec(
            row[0][1],
            tuple(modules := users[id(row[0][0])]),
            tuple(row),
            blocks.intersection(modules),
            bool(key[0]),
        )
        for key, row in rows.items()
    ]


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """Yield every tensor in the arguments or results of a forward."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


# ---------------------------------------------------------------- state_dict


class ModuleState(NotCopied):
    """Hooks of ``state_dict`` and ``load_state_dict`` of every module with own streamed parameters.
    They stay after streaming has ended, as the values in the store do.

    ``groups``: groups by the id of a parameter; ``loaded`` is called with each group that gets new
    values.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[int, StreamedGroup],
        store: TieredStore,
        loaded: Callable[[StreamedGroup], None],
    ) -> None:
        self._store, self._loaded = store, loaded
        self._homes = {
            id(m.parameter): (group, m) for group in set(groups.values()) for m in group.members
        }
        # values of tied parameters
        self._given: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._coming: list[tuple[StreamedGroup, Member]] = []  # being loaded
        for module in model.modules():
            if any(id(p) in self._homes for p in module.parameters(recurse=False)):
                module.register_state_dict_post_hook(partial(self.give))
                module.register_load_state_dict_pre_hook(self.receive)
                module.register_load_state_dict_post_hook(self.keep)

    def _own(self, module: nn.Module) -> list[tuple[str, StreamedGroup, Member]]:
        pairs = module.named_parameters(recurse=False, remove_duplicate=False)
        return [(name, *self._homes[id(p)]) for name, p in pairs if id(p) in self._homes]

    def give(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace NaN by the module's stored values, except under ``keep_vars``, which requests the
        parameters themselves."""
        for name, group, member in self._own(module):
            if (key := prefix + name) not in state or state[key] is member.parameter:
                continue
            if group.ranks > 1:
                raise InvalidArgument(
                    f"state_dict was called for a model that is streamed over {group.ranks} ranks, "
                    f"each of which has only a part: call {INSTEAD}, on every rank"
                )
            state[key] = self._shared(group, member, state)

    def _shared(self, group: StreamedGroup, member: Member, state: dict[str, Any]) -> torch.Tensor:
        """Return the values of a parameter, the same tensor for tied parameters, as in a plain
        model's ``state_dict``."""
        given = self._given.get(id(member.parameter))
        if given is None or not any(value is given for value in state.values()):
            given = group.read(self._store, member)
        if group.shared:
            self._given[id(member.parameter)] = given
        return given

    def receive(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Allocate memory for the parameters, into which torch copies next."""
        if metadata.get("assign_to_params_buffers"):
            raise InvalidArgument(
                "load_state_dict(assign=True) would replace streamed parameters: leave assign= out"
            )
        for name, group, member in self._own(module):
            group.appear()
            group.holders += 1
            if getattr(state.get(prefix + name), "shape", None) == member.parameter.shape:
                self._coming.append((group, member))

    @torch.no_grad()
    def keep(self, module: nn.Module, *ignored: Any) -> None:
        """Write the values that torch has copied to the store."""
        own = self._own(module)
        ids = {id(member) for _, _, member in own}
        for group, member in self._coming:
            if id(member) in ids:
                group.write(self._store, member)
                self._loaded(group)
        self._coming = [(group, member) for group, member in self._coming if id(member) not in ids]
        for _, group, _ in own:
            group.release()
