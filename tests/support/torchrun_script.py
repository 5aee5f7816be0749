"""Run by `torchrun --nnodes 2:3`: DDP with the hook over the backend "commpress", from its last
checkpoint on. Gets a folder.

Every life of a worker writes a line `SIZE STEP` when it begins; who finds a file `stop` after a
step ends.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress.backend

folder = Path(sys.argv[1])
checkpoint = folder / "checkpoint.pt"
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("commpress")
rank, size = dist.get_rank(), dist.get_world_size()
ddp = DistributedDataParallel(nn.Linear(16, 4))
state = commpress.compress(ddp, "int8", min_numel=1)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    ddp.module.load_state_dict(saved["model"])
    step = saved["step"]
dist.barrier()
if rank == 0:
    with open(folder / "lives", "a") as file:
        file.write(f"{size} {step}\n")
while True:
    ddp(torch.full((2, 16), float(rank + step))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "step": step}, folder / "part")
        (folder / "part").replace(checkpoint)
    over = torch.tensor(float((folder / "stop").exists()))
    dist.all_reduce(over, dist.ReduceOp.MAX)
    if over:
        break
    time.sleep(0.05)
weights = [torch.empty(4, 16) for _ in range(size)]
dist.all_gather(weights, ddp.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)
dist.destroy_process_group()
