"""Accelerate's FSDP2 on CPUs, to rehearse and to measure it.

Accelerate shards models on accelerators only: on CPUs it ignores ``fsdp=`` without a word and
trains replicas. Sharding itself needs none, so this tells an Accelerator that has been made to
shard all the same, as ``Accelerator.__init__`` would on GPUs.
"""

from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def shard_on_cpus(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None = None
) -> None:
    """Before ``prepare``; the plugin of ``accelerate launch`` is made from the environment."""
    plugin = plugin or FullyShardedDataParallelPlugin()
    state = accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState().distributed_type = (
        DistributedType.FSDP
    )  # which every later AcceleratorState() copies
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)


def shard_trainer_on_cpus(trainer: Any) -> None:
    """Before ``train``, a Trainer of transformers whose arguments have ``fsdp=True``."""
    shard_on_cpus(
        trainer.accelerator, FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    )
    trainer.is_fsdp_enabled = True
