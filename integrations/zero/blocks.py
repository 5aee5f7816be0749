"""Which modules of a model are fetched and released as one, and which parameters each of them needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from commpress.errors import InvalidArgument
from commpress.integrations.zero.options import Place
from commpress.integrations.zero.tiling import WHOLE, Tile, TiledLinear

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONTAINERS = (*LISTS, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Part:
    """Parameters that come and go together, and the modules in whose forward and backward they are needed."""

    name: str
    modules: tuple[nn.Module, ...]
    places: tuple[Place, ...]
    kept: bool = False


def blocks_of(model: nn.Module, chosen: Iterable[type[nn.Module]] = ()) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The elements of the outermost lists of modules, or modules of the ``chosen`` classes, with all their parameters;
    whatever owns parameters outside of these, with its own. A tile of a linear layer is one by itself wherever it lies."""
    chosen = tuple(chosen)
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    whole = 0

    def walk(module: nn.Module, listed: bool) -> None:
        nonlocal whole
        together = isinstance(module, (*(chosen or WHOLE), TiledLinear))
        if together or (listed and not chosen and not isinstance(module, CONTAINERS)):
            whole += isinstance(module, chosen)
            tiles = [tile for tile in module.modules() if isinstance(tile, Tile) and tile is not module]
            apart = {id(tile.weight) for tile in tiles}
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
        raise InvalidArgument(f"blocks is {[t.__name__ for t in chosen]}, but the model has no such module")
    return [(module, own) for module, own in found if own]


def _direct(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that no module below owns; lists of parameters are never called and belong to what they lie in."""
    own = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            own += list(child.parameters())
    return own


def parts_of(model: nn.Module, chosen: Iterable[type[nn.Module]], keep: Sequence[str]) -> list[Part]:
    """Every parameter in one part: those of one block, dtype, device and fate together, shared ones by themselves."""
    users: dict[int, list[nn.Module]] = {}
    for module, own in blocks_of(model, chosen):
        for parameter in own:
            users.setdefault(id(parameter), []).append(module)
    rows: dict[tuple[object, ...], list[Place]] = {}
    for index, (name, p) in enumerate(model.named_parameters()):
        kept = any(name == one or name.startswith(one + ".") for one in keep)
        alone = index if len(users[id(p)]) > 1 else None
        key = (kept, alone, id(users[id(p)][0]), p.dtype, p.device, p.requires_grad)
        rows.setdefault(key, []).append((p, name, index))
    return [Part(row[0][1], tuple(users[id(row[0][0])]), tuple(row), bool(key[0])) for key, row in rows.items()]


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """Every tensor in the arguments or results of a forward."""
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
