"""FSDP2, hybrid sharding and the older FullyShardedDataParallel."""
