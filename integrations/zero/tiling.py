"""Large linear layers divided into tiles of rows, so that a streamed model needs one tile in memory
at a time (memory-centric tiling).

    y = [ x·W₀ᵀ + b₀ | x·W₁ᵀ + b₁ | … ]          Wᵢ: consecutive rows of W, a module and a group
                                                 each

Note: views. Each tile gets its own view of x and of the bias: the gradient of a view is complete
after the backward of its tile, that of x only after all tiles. Note: the layer has one whole bias,
so that first values are drawn in the order of a plain layer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commpress.errors import InvalidArgument
from commpress.integrations.zero.streamed_group import is_streamed

# modules that read parameters of their children
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Tile(nn.Module):
    """Rows of a weight from ``first`` on."""

    def __init__(self, weight: torch.Tensor, first: int, requires_grad: bool) -> None:
        super().__init__()
        self.first, self.weight = first, nn.Parameter(weight, requires_grad)

    def reset_parameters(self) -> None:
        # the bound depends on columns only: the same as for the whole weight
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)


class Bias(nn.Module):
    """The bias, as a module registered after the tiles."""

    def __init__(self, value: nn.Parameter, columns: int) -> None:
        super().__init__()
        self.value, self._bound = value, 1 / math.sqrt(columns)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.value, -self._bound, self._bound)


class TiledLinear(nn.Module):
    """Replacement of ``linear``. Its ``state_dict`` is that of the plain layer, and either can load
    the other's."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, grad = linear.weight.detach(), linear.weight.requires_grad
        starts = range(0, self.out_features, rows)
        self.tiles = nn.ModuleList(Tile(weight[at : at + rows].clone(), at, grad) for at in starts)
        self.bias = Bias(linear.bias, linear.in_features) if linear.bias is not None else None
        self.register_load_state_dict_pre_hook(_cut)

    @property
    def names(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Map each own parameter's name to (name, shape and first element in the plain layer)."""
        shape = (self.out_features, self.in_features)
        found = {
            f"tiles.{i}.weight": ("weight", shape, tile.first * shape[1])
            for i, tile in enumerate(self._every())
        }
        return found | ({"bias.value": ("bias", shape[:1], 0)} if self.bias is not None else {})

    def _every(self) -> Iterator[Tile]:
        for tile in self.tiles:
            assert isinstance(tile, Tile)
            yield tile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for tile in self._every():
            bias = (
                None
                if self.bias is None
                else self.bias.value[tile.first : tile.first + len(tile.weight)]
            )
            parts.append(tile(x.view_as(x), bias))
        return torch.cat(parts, -1)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the plain layer's state; under ``keep_vars`` the parameters themselves, by their
        names here."""
        state = super().state_dict(
            *args, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if not keep_vars:
            wholes: dict[str, list[torch.Tensor]] = {}
            for name, (whole, _, _) in self.names.items():
                wholes.setdefault(prefix + whole, []).append(state.pop(prefix + name))
            state |= {name: torch.cat(parts) for name, parts in wholes.items()}
        return state

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"tiles={len(self.tiles)}"
        )


def _cut(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Divide the plain layer's tensors into those of the tiles, before ``load_state_dict``."""
    assert isinstance(layer, TiledLinear)
    wholes = {
        whole: state.pop(prefix + whole) for whole in ("weight", "bias") if prefix + whole in state
    }
    for name, (whole, shape, start) in layer.names.items():
        if whole in wholes and tuple(wholes[whole].shape) == shape:
            own = layer.get_parameter(name)
            state[prefix + name] = (
                wholes[whole].reshape(-1)[start : start + own.numel()].view(own.shape)
            )
        elif whole in wholes:
            state[prefix + name] = wholes[whole]  # load_state_dict refuses it and names both shapes


def tile(model: nn.Module, *, tile_mb: float = 64.0) -> nn.Module:
    """Divide each ``nn.Linear`` of more than ``tile_mb`` megabytes of weights into tiles of at most
    that size; call it before ``stream``.

    Layers are replaced inside ``model``, which is returned (itself replaced if it is such a layer).
    Subclasses of ``nn.Linear``, layers with a weight tied to another module's, and layers that
    torch's own transformer layers read stay whole.
    """
    if not tile_mb > 0:
        raise InvalidArgument(f"tile_mb is {tile_mb!r}, expected a positive number")
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    read = {
        id(below)
        for module in model.modules()
        if isinstance(module, WHOLE)
        for below in module.modules()
    }
    made: dict[nn.Module, TiledLinear] = {}
    for module in model.modules():
        if (
            type(module) is nn.Linear
            and id(module) not in read
            and all(users[id(p)] == 1 for p in module.parameters())
        ):
            rows = max(int(tile_mb * 1e6 / module.weight.element_size() / module.in_features), 1)
            if rows < module.out_features:
                _check(module)
                made[module] = TiledLinear(module, rows)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in made:
                setattr(parent, name, made[child])
    return made.get(model, model)


def _check(linear: nn.Linear) -> None:
    if is_streamed(linear.weight):
        raise InvalidArgument("the model is streamed already: call tile before stream")
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks:
        raise InvalidArgument(
            f"{linear} has hooks, which its tiles would not call: register them after tile"
        )


@dataclass(frozen=True)
class PlainName:
    """A tensor of the model, with its name, shape and first element in the plain model: a whole
    tensor there, except for tiles."""

    value: torch.Tensor
    name: str
    shape: tuple[int, ...]
    start: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(-1)[self.start : self.start + self.value.numel()].view(self.value.shape)


def plain_names(model: nn.Module) -> list[PlainName]:
    """Return the entries of the plain model's ``state_dict``."""
    tiles: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TiledLinear):
            prefix = f"{path}." if path else ""
            for name, (whole, shape, start) in module.names.items():
                tiles[prefix + name] = prefix + whole, shape, start
    kept = model.state_dict(keep_vars=True)
    return [
        PlainName(value, *tiles.get(name, (name, tuple(value.shape), 0)))
        for name, value in kept.items()
    ]
