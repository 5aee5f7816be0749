"""Parameters that are cut over ranks already, as FSDP2 leaves them: each rank treats what it has of them (DTensors)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from commpress.errors import InvalidArgument


def is_cut(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank has of it: the same memory."""
    cut: Any = tensor
    return cut.to_local() if is_cut(cut) else cut


def alike(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``values`` of this rank, cut as ``parameter`` is."""
    if not is_cut(parameter):
        return values
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        values, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class Cut:
    """Over which ranks ``parameters`` are cut. For a norm they must all be so in the same way."""

    def __init__(self, parameters: Iterable[Any], *, clipped: bool) -> None:
        found = dict.fromkeys((p.device_mesh, p.placements) if is_cut(p) else None for p in parameters)
        if clipped and len(found) > 1:
            raise InvalidArgument(
                "max_grad_norm with parameters that are cut over ranks in different ways, or only some of them: leave it out "
                "and clip with torch.nn.utils.clip_grad_norm_"
            )
        self._meshes = [one for one in found if one is not None]

    def every(self, value: float) -> list[float]:
        """Each rank's ``value`` that has other elements; collective."""
        values = [value]
        for mesh, placements in self._meshes:
            for number, placement in enumerate(placements):
                if placement.is_shard():
                    values = [v for own in values for v in _gathered(own, mesh.get_group(number), mesh.device_type)]
        return values


def _gathered(value: float, group: Any, device: str) -> list[float]:
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [float(one) for one in every]
