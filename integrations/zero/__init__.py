"""Optimizers with a state that is divided over ranks or kept in a store, and models streamed from a
store."""

from typing import TYPE_CHECKING

from commpress.lazy import lazily

if TYPE_CHECKING:
    from commpress.integrations.zero.activation_tier import Activations, activations
    from commpress.integrations.zero.offloaded import Offloaded
    from commpress.integrations.zero.parking import Parked, load_parked, parked
    from commpress.integrations.zero.partitioned import Partitioned
    from commpress.integrations.zero.safetensors_file import load_safetensors, save_safetensors
    from commpress.integrations.zero.streamed import Streamed, stream
    from commpress.integrations.zero.tiling import tile

__all__ = [
    "Activations",
    "Offloaded",
    "Parked",
    "Partitioned",
    "Streamed",
    "activations",
    "load_parked",
    "load_safetensors",
    "parked",
    "save_safetensors",
    "stream",
    "tile",
]
__getattr__ = lazily(
    __name__,
    {
        "activation_tier": ("Activations", "activations"),
        "offloaded": ("Offloaded",),
        "parking": ("Parked", "load_parked", "parked"),
        "partitioned": ("Partitioned",),
        "safetensors_file": ("load_safetensors", "save_safetensors"),
        "streamed": ("Streamed", "stream"),
        "tiling": ("tile",),
    },
)
