"""Train a small GPT on the source of Python's standard library, while processes die, leave or join.

Each process is started by hand, by a service manager, or by the benchmark `chaos`. The
first prints the contact for others:

    python examples/elastic_train.py  # prints: join with --join 127.0.0.1:40001:3f…
    python examples/elastic_train.py --join 127.0.0.1:40001:3f…

Kill any of them (`kill -9`), and start it again with the contact of a running one: it is healed and
continues with the others. With `--snapshots` all may be killed. Under torchrun the ranks start
together, and torchrun restarts them together.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import commpress.backend  # registers the backend "commpress"; torch 2.14 finds it by itself
from commpress.cli.gpt import GPT, standard_library


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text, each with the same window one byte later as targets."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = self.text[i * self.length : (i + 1) * self.length + 1].long()
        return part[:-1], part[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--join", help="the contact of a process that trains")
    parser.add_argument("--codec", default="sign")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="of each process")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minimum", type=int, default=1, help="ranks below which training waits")
    parser.add_argument("--snapshots", help="a folder")
    parser.add_argument(
        "--every", type=int, default=500, help="steps from one snapshot to the next"
    )
    options = parser.parse_args()

    commpress.init_process_group("commpress")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        GPT(width=options.width, layers=options.layers, length=options.length)
    )
    commpress.compress(model, options.codec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps + 1
    )

    data = Windows(standard_library(), options.length)
    sampler = commpress.ElasticSampler(data, options.batch)
    loader = DataLoader(
        data,
        options.batch,
        sampler=sampler,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(loss.detach())

    run = commpress.elastic(
        train_step,
        {"model": model, "optimizer": optimizer, "schedule": schedule},
        data=loader,
        steps=options.steps,
        join=options.join,
        minimum=options.minimum,
        snapshots=commpress.Snapshots(options.snapshots, every=options.every)
        if options.snapshots
        else None,
    )
    if options.join is None and dist.get_rank() == 0:
        print(f"join with --join {run.contact}", flush=True)
    for loss in run:
        if run.rank == 0 and run.step % 100 == 0:
            print(f"step {run.step}: loss {loss:.3f}, {run.size} ranks", flush=True)
    print(run.counters.summary(), flush=True)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
