"""Train a GPT of 10.8 M parameters on two machines over a slow link: each trains by itself, and
changes are sent over the link during the computation, in two bits per parameter. One command per
machine:

    python examples/two_machines.py --address HOST0:29500 --rank 0      on the first, which is HOST0
    python examples/two_machines.py --address HOST0:29500 --rank 1      on the second

or on both `torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST0:29500
examples/two_machines.py`. A second call resumes from the checkpoint, each machine from its own
file, even in the middle of a round.
"""

import argparse
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import commpress
from commpress.cli.gpt import GPT, batch, standard_library


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="host and port of rank 0; leave it out under torchrun")
    parser.add_argument("--rank", type=int, help="rank of this machine, from 0 on")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--every",
        type=round_length,
        default="auto",
        help="steps of a round; auto: the fewest that overlap an exchange",
    )
    parser.add_argument("--codec", default="bits2")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="windows of a machine and step")
    says = "a folder; the machines need not share it"
    parser.add_argument("--checkpoints", type=Path, default=Path("two_machines"), help=says)
    parser.add_argument("--save-every", type=int, default=60)
    options = parser.parse_args()
    if options.address:
        host, _, port = options.address.rpartition(":")
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "RANK": str(options.rank),
            "WORLD_SIZE": str(options.machines),
        }
    commpress.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


def round_length(text: str) -> int | str:
    """Parse the steps of a round."""
    return text if text == "auto" else int(text)


def train(options: argparse.Namespace) -> None:
    rank, machines = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all machines start from the same weights
    model = GPT(width=options.width, layers=options.layers, length=options.length)
    inner = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    local = commpress.LocalUpdates(inner, every=options.every, codec=options.codec)
    warm = max(options.steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: min((step + 1) / warm, 1.0))
    text, draws = standard_library(), torch.Generator().manual_seed(1 + rank)

    begin = newest(options.checkpoints, rank)
    if begin:
        saved = torch.load(file_of(options.checkpoints, rank, begin), weights_only=True)
        model.load_state_dict(saved["model"])
        local.load_state_dict(saved["local"])
        schedule.load_state_dict(saved["schedule"])
        draws.set_state(saved["draws"])
        print(f"machine {rank} goes on from step {begin}")

    numel = sum(p.numel() for p in model.parameters())
    # bytes of an all-reduce in float32 in each step
    ddp = 8 * numel * (machines - 1) / machines
    start, say_every = perf_counter(), max(min(30, options.steps // 3), 1)
    for step in range(begin, options.steps):
        loss = model(*batch(text, options.batch, options.length, draws))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        local.step()
        schedule.step()
        local.zero_grad()
        done = step + 1
        if rank == 0 and (done % say_every == 0 or done == options.steps):
            tokens = (
                machines
                * options.batch
                * options.length
                * (done - begin)
                / (perf_counter() - start)
            )
            sent, instead = local.counters.sent_bytes / 1e6, ddp * (done - begin) / 1e6
            print(
                f"step {done}: loss {loss.item():.3f}, {tokens:.0f} tokens/s, {sent:.2f} MB sent, "
                f"DDP: {instead:.2f} MB"
            )
        if done % options.save_every == 0 and done < options.steps:
            save(
                options.checkpoints,
                rank,
                done,
                {
                    "model": model.state_dict(),
                    "local": local.state_dict(),
                    "schedule": schedule.state_dict(),
                    "draws": draws.get_state(),
                },
            )
    local.drain()  # afterwards all machines have the same weights
    if rank == 0:
        torch.save(model.state_dict(), options.checkpoints.with_suffix(".pt"))
        print(local.report())
    local.close()


# ---------------------------------------------------------------- checkpoints


def file_of(folder: Path, rank: int, step: int) -> Path:
    return folder / f"{rank}-{step}.pt"


def newest(folder: Path, rank: int) -> int:
    """Return the last step that every machine has saved, 0 if there is none."""
    mine = sorted(int(file.stem.partition("-")[2]) for file in folder.glob(f"{rank}-*.pt"))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return max(set(mine).intersection(*every), default=0)


def save(folder: Path, rank: int, step: int, state: dict[str, Any]) -> None:
    """Save a state and keep the last two, because another machine may be behind this one."""
    folder.mkdir(parents=True, exist_ok=True)
    older = sorted(folder.glob(f"{rank}-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
    torch.save(state, folder / f"{rank}.part")
    (folder / f"{rank}.part").replace(file_of(folder, rank, step))
    for file in older[:-1]:
        file.unlink()


if __name__ == "__main__":
    main()
