"""Small model whose computing is slept, under ``commpress.elastic``: what ``chaos`` runs without a
COMMAND.

Most of a step is a sleep, so that a process which starts again, importing torch, does not take the
survivors' cores. All else is real: DDP with a compressed hook, the backend "commpress", positions
in data, weights hashed after every step.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import commpress
import commpress.backend

SAMPLES, FEATURES, BATCH = 1 << 22, 64, 8
STEP = 0.25  # seconds
TIMEOUT = timedelta(seconds=10)


class Noise(Dataset[torch.Tensor]):
    """Samples made from their numbers: nothing is kept."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commpress", timeout=TIMEOUT)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, FEATURES),
    )
    ddp = DistributedDataParallel(model)
    commpress.compress(ddp, "int8", min_numel=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    def train_step(batch: torch.Tensor) -> float:
        time.sleep(STEP)
        loss = nn.functional.mse_loss(ddp(batch), batch.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    data = Noise()
    loader = DataLoader(data, BATCH, sampler=commpress.ElasticSampler(data, BATCH, shuffle=False))
    state = {"model": ddp, "optimizer": optimizer}
    for _ in commpress.elastic(train_step, state, data=loader, steps=1 << 30):
        pass


if __name__ == "__main__":
    main()
