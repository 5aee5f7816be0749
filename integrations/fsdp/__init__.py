"""FSDP2, hybrid sharding and the older FullyShardedDataParallel."""

from commpress.integrations.fsdp.fsdp1 import FlatShardState, compressed_reduce_scatter_hook
from commpress.integrations.fsdp.fsdp2 import ShardedState, compress_fsdp
from commpress.integrations.fsdp.hsdp import ReplicatedState, compress_hsdp
from commpress.integrations.fsdp.shard_weights import Difference

__all__ = [
    "Difference",
    "FlatShardState",
    "ReplicatedState",
    "ShardedState",
    "compress_fsdp",
    "compress_hsdp",
    "compressed_reduce_scatter_hook",
]
