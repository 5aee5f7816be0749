"""Integrations of trainers, launchers and checkpoints. ``hf`` and ``lightning`` need the packages
of these names."""

from typing import TYPE_CHECKING

from commpress.lazy import lazily

if TYPE_CHECKING:
    from commpress.integrations.trainers.distributed_checkpoint import (
        load_distributed,
        save_distributed,
    )
    from commpress.integrations.trainers.launch import init_process_group

__all__ = ["init_process_group", "load_distributed", "save_distributed"]
__getattr__ = lazily(
    __name__,
    {
        "distributed_checkpoint": ("load_distributed", "save_distributed"),
        "launch": ("init_process_group",),
    },
)
