"""Parameters that are cut over a mesh, and the same ones whole: values and gradients are drawn
alike for every mesh."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# One shard's row on two ranks is a whole number of blocks, so whole parameters are cut into the
# same blocks.
SHAPES = {"tall": (64, 128), "wide": (48, 64), "odd": (5, 64), "same": (16, 16), "norm": (64,)}
PLACED = {
    "tall": Shard(0),
    "wide": Shard(1),
    "odd": Shard(0),
    "same": Replicate(),
    "norm": None,
    "one": Shard(0),
}
ONE = {"one": (1, 64)}  # of which the second of two ranks has nothing


def columns(shape):
    if shape == "turned":  # replicas are not numbered by their first ranks
        return DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def values(name, seed):
    generator = torch.Generator().manual_seed(1000 * seed + list(PLACED).index(name))
    return torch.randn((SHAPES | ONE)[name], generator=generator)


def placed(name, tensor, mesh):
    """As tensor parallelism leaves it; whole where there is no mesh."""
    if mesh is None or PLACED[name] is None:
        return tensor
    return distribute_tensor(tensor, mesh["tp"], [PLACED[name]], src_data_rank=None)


def parameters(mesh, names):
    return {name: nn.Parameter(placed(name, values(name, 0), mesh)) for name in names}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def own(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def apart(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)
