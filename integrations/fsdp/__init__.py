"""FSDP2 and hybrid sharding."""

from commpress.integrations.fsdp.fsdp2 import ShardedState, compress_fsdp
from commpress.integrations.fsdp.hsdp import ReplicatedState, compress_hsdp
from commpress.integrations.fsdp.shard_weights import Difference

__all__ = [
    "Difference",
    "ReplicatedState",
    "ShardedState",
    "compress_fsdp",
    "compress_hsdp",
]
