"""Train a small GPT in Ray Train with compressed gradients, compressed FSDP2 or local updates, and
resume from a checkpoint after a failure.

pip install 'ray[train]'
python examples/ray_train.py --method hook
python examples/ray_train.py --method fsdp --workers 4 --storage /shared/ray

Every worker saves its own part with its residuals, so that an interrupted run ends with the weights
of an uninterrupted one.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.gpt import GPT, batch, standard_library

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=["hook", "fsdp", "local"], default="hook")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--retries", type=int, default=1, help="new starts after a failure")
    parser.add_argument(
        "--fail-at", type=int, default=0, help="a step at which a worker dies, once"
    )
    parser.add_argument(
        "--storage", type=Path, default=Path("ray_train"), help="a folder that all nodes see"
    )
    options = parser.parse_args()
    storage = options.storage.resolve()
    storage.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options) | {"storage": str(storage)},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name=options.method,
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=options.retries),
        ),
    )
    result = trainer.fit()
    print(f"ended at step {result.metrics['step']}, loss {result.metrics['loss']:.6f}")


def train(config: dict[str, Any]) -> None:
    """Train on every worker; Ray has connected the ranks."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(width=config["width"], layers=2, length=LENGTH)
    state: Any
    if config["method"] == "hook":
        model = DistributedDataParallel(model)
        state = commpress.compress(model, "int8")
    elif config["method"] == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = commpress.compress_fsdp(model, codec="int8", weights="int8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if config["method"] == "local":  # every=5: the same bits in every run
        state = commpress.LocalUpdates(optimizer, every=5, codec="int4")
    begin = load(model, optimizer, state)
    text = standard_library(0.5)
    for step in range(begin, config["steps"]):
        draws = torch.Generator().manual_seed(step * 4096 + dist.get_rank())
        loss = model(*batch(text, 4, LENGTH, draws))
        loss.backward()
        optimizer.step()
        if config["method"] == "local":
            state.step()
        optimizer.zero_grad()
        if step + 1 == config["fail_at"]:
            fail_once(Path(config["storage"]) / "failed")
        if (step + 1) % config["save_every"] == 0 or step + 1 == config["steps"]:
            save(step + 1, loss.item(), model, optimizer, state)


def save(
    step: int, loss: float, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Any
) -> None:
    """Report a checkpoint to which every worker adds its files."""
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        own = {"step": step, "commpress": state.state_dict()}
        if isinstance(state, commpress.LocalUpdates):  # each rank has its own weights
            own |= {"model": model.state_dict()}
        else:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        torch.save(own, Path(folder, f"rank{rank}.pt"))
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step, "loss": loss}, checkpoint=checkpoint)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> int:
    """Load the latest checkpoint, if there is one; return its step."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        own = torch.load(Path(folder, f"rank{dist.get_rank()}.pt"), weights_only=True)
        if isinstance(state, commpress.LocalUpdates):
            model.load_state_dict(own["model"])
        else:
            weights, moments = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    state.load_state_dict(own["commpress"])
    return int(own["step"])


def fail_once(mark: Path) -> None:
    """Let one worker die at this step, the first time that a run reaches it."""
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        raise RuntimeError("a worker dies, as requested by --fail-at")


if __name__ == "__main__":
    main()
