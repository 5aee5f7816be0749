"""Files of ``examples/gallery``, which are scripts and no package."""

import runpy
from types import SimpleNamespace

import torch
import torch.distributed as dist

import sources

FOLDER = sources.ROOT / "examples" / "gallery"


def gallery(name: str) -> SimpleNamespace:
    """The names that a file of the gallery defines; each call executes it anew."""
    if dist.is_initialized():  # on a rank
        torch.set_num_threads(1)
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def alike(tensor: torch.Tensor) -> bool:
    """Every rank has these bits."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return all(torch.equal(every[0], other) for other in every)


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters of a model side by side."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
