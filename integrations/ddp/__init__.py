"""Compressed communication for DistributedDataParallel."""

from commpress.integrations.ddp.hook import CompressedState, compress, compressed_allreduce_hook
from commpress.integrations.ddp.overlap import overlap

__all__ = ["CompressedState", "compress", "compressed_allreduce_hook", "overlap"]
