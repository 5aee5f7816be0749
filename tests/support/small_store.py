"""A tiered store so small that a few tensors fill it."""

import torch

from commpress.tiered_mem import Options, TieredStore

SMALL = Options(
    chunk_bytes=64 << 10, pack_below=8 << 10, pack_bytes=32 << 10, segment_bytes=4 << 20
)


def open_store(folder, **options) -> TieredStore:
    options = {"host": "1MiB", "engine": "threads", "options": SMALL} | options
    return TieredStore.open(folder, **options)


def read(store: TieredStore, name: str) -> torch.Tensor:
    with store.borrow(name, write=False) as tensor:
        return tensor.clone()
