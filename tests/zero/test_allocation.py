"""Freed blocks leave the process, however many have come and gone."""

import os
import platform
import subprocess
import sys

import pytest

from variants import first

CODE = """
import torch
from pathlib import Path
from commpress.integrations.zero.streamed_group import return_large_blocks

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) >> 10

assert return_large_blocks() is {fixed}
# mapped, and unmapped here: from now on glibc would take its like from the heap
torch.ones(30 << 18)
begin, kept = anonymous(), []
for _ in range(20):
    one = torch.ones(20 << 18)  # 20 MiB
    kept.append(torch.ones(1 << 15))  # lives on behind it
    del one
    torch.ones(24 << 18)  # does not fit where that was
print(anonymous() - begin)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("chosen", first(1, [True, False]))
def test_freed_blocks_go_back(chosen):
    """Unless the user has tuned the allocator: then nothing is changed, and what heaps keep depends
    on their addresses."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    }
    if chosen:
        own["MALLOC_MMAP_THRESHOLD_"] = str(1 << 30)
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(fixed=not chosen)],
        env=own,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert chosen or int(result.stdout) < 8  # 380 and more where the threshold is left alone
