"""Ranks that share a machine: how many cores it has for all of them, and how to keep these busy."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def computing() -> Iterator[None]:
    """One more thread of this process that computes, as backward does while gradients travel."""
    ended, factor = threading.Event(), torch.ones(384, 384)

    def multiply() -> None:
        while not ended.is_set():
            factor @ factor

    thread = threading.Thread(target=multiply, name="commpress-computing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def machine_cores() -> int:
    """Of the machine that all ranks run on, 0 if they run on several; collective."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    mine = int.from_bytes(sha256(boot.encode()).digest()[:7])
    ends = torch.tensor([mine, -mine])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return (os.cpu_count() or 1) if ends[0] == -ends[1] else 0
