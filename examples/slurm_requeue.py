"""Train a small GPT with compressed gradients in jobs of limited time: save after a warning signal,
end, and resume in the next job.

    sbatch examples/slurm_requeue.sbatch --steps 100000

After SIGUSR1 or SIGTERM on any rank all ranks end the same step, save it, and exit with status 85,
on which the batch script requeues the job. The next job may have another number of ranks, among
which residuals are divided again.
"""

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.gpt import GPT, batch, standard_library

AGAIN = 85  # exit status: there is more to do
LENGTH, WIDTH, LAYERS = 64, 64, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("slurm_requeue"),
        help="a folder that all nodes see",
    )
    options = parser.parse_args()
    warned = Warned()
    commpress.init_process_group("gloo")
    ended = train(options.steps, options.checkpoints, warned)
    dist.destroy_process_group()
    sys.exit(0 if ended else AGAIN)


class Warned:
    """Flag that is set by a signal before the end of the job."""

    def __init__(self) -> None:
        self.here = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.here = True

    def anywhere(self) -> bool:
        """Return whether any rank was warned; collective."""
        here = torch.tensor(float(self.here))
        dist.all_reduce(here, dist.ReduceOp.MAX)
        return bool(here)


def train(steps: int, folder: Path, warned: Warned) -> bool:
    """Return True when all steps are done, False after a warning."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT(width=WIDTH, layers=LAYERS, length=LENGTH))
    state = commpress.compress(ddp, "int8")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    text = standard_library()
    begin = load(folder, ddp, optimizer, state)
    for step in range(begin, steps):
        # the position in the data is the step
        draws = torch.Generator().manual_seed(step * 4096 + dist.get_rank())
        loss = ddp(*batch(text, 8, LENGTH, draws))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        if warned.anywhere():
            save(folder, step + 1, ddp, optimizer, state)
            return False
    return True


# --------------------------------- checkpoints: a step's folder is complete when it contains DONE


def load(
    folder: Path,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    state: commpress.CompressedState,
) -> int:
    whole = [int(mark.parent.name) for mark in folder.glob("*/DONE")]
    if not whole:
        return 0
    step, place = max(whole), folder / str(max(whole))
    saved = torch.load(place / "model.pt", weights_only=True)
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(
        *(torch.load(file, weights_only=True) for file in sorted(place.glob("residuals-*.pt")))
    )
    if dist.get_rank() == 0:
        print(f"goes on from step {step}", flush=True)
    return step


def save(
    folder: Path,
    step: int,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    state: commpress.CompressedState,
) -> None:
    place = folder / str(step)
    place.mkdir(parents=True, exist_ok=True)
    torch.save(state.state_dict(), place / f"residuals-{dist.get_rank():05}.pt")
    if dist.get_rank() == 0:
        torch.save(
            {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()},
            place / "model.pt",
        )
    os.sync()
    dist.barrier()
    if dist.get_rank() == 0:
        (place / "DONE").touch()
        for older in folder.iterdir():
            if int(older.name) < step:
                shutil.rmtree(older)


if __name__ == "__main__":
    main()
