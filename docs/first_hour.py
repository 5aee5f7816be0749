"""Run a stranger's first hour literally: clone, install, two hosts, the Trainer, a DeepSpeed
configuration, a bug report.

    python docs/first_hour.py --folder /tmp/first_hour

Scripts are taken from the pages as they stand, and every command is printed with its seconds. The
two machines are hosts on this one (network namespaces) with a link of 1 Gbit/s between them. The
folder must not exist; outside of it only caches are written.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from commpress.cli.hosts import Hosts

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- run: .*? -->\n```python\n(.*?)```", re.S)
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 1000}},
}  # fmt: skip
ADDRESS = (
    "--nnodes 2 --nproc-per-node 1 --node-rank {rank} --master-addr {master} --master-port 29500"
)


def block(page: str, containing: str) -> str:
    """The first example of a page that runs and has these words."""
    return next(
        code for code in BLOCK.findall((ROOT / "docs" / page).read_text()) if containing in code
    )


def step(typed: str, folder: Path, *, wait: bool = True) -> "subprocess.Popen[str]":
    """Run what a stranger types; a line of its time where it is waited for."""
    begin = perf_counter()
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(
            typed, shell=True, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    if wait:
        ended(process, typed, begin, folder)
    return process


def ended(process: "subprocess.Popen[str]", typed: str, begin: float, folder: Path) -> None:
    if process.wait():
        sys.exit(f"failed: {typed}\n{(folder / 'log.txt').read_text()[-4000:]}")
    print(f"{perf_counter() - begin:7.1f} s  {typed}", flush=True)


def two_machines(folder: Path) -> None:
    """Both commands of the page, each on a host of its own."""
    train = block("index.md", "torch.nn.functional.cross_entropy")
    (folder / "train.py").write_text(
        train.replace('dist.init_process_group("gloo")', 'commpress.init_process_group("gloo")')
    )
    with Hosts(2, rate=1e9) as hosts:
        begin, there = perf_counter(), [hosts.addresses[0]] * 2
        typed = [
            f".venv/bin/torchrun {ADDRESS.format(rank=i, master=m)} train.py"
            for i, m in enumerate(there)
        ]
        with (folder / "log.txt").open("a") as log:
            ranks = [
                subprocess.Popen(
                    hosts.command(i, ["env", "-C", str(folder), *line.split()]),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for i, line in enumerate(typed)
            ]
        for rank, line in zip(ranks, typed, strict=True):
            ended(rank, line, begin, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True)
    begin = perf_counter()
    step(f"git clone --quiet {ROOT} commpress", folder)
    step("python3 -m venv .venv && .venv/bin/pip install --quiet torch==2.13.0", folder)
    step(".venv/bin/pip install --quiet './commpress[hf]'", folder)
    step(".venv/bin/commpress doctor", folder)
    (folder / "first.py").write_text(block("index.md", "torch.nn.functional.cross_entropy"))
    step(".venv/bin/torchrun --standalone --nproc-per-node 2 first.py", folder)
    two_machines(folder)
    (folder / "trainer.py").write_text(block("trainer.md", "hf.Compress"))
    step(".venv/bin/torchrun --standalone --nproc-per-node 2 trainer.py", folder)
    (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    step(".venv/bin/commpress from-deepspeed ds_config.json", folder)
    step(".venv/bin/commpress doctor --report", folder)
    print(
        f"{perf_counter() - begin:7.1f} s  in all; what the commands said is in "
        f"{folder / 'log.txt'}"
    )


if __name__ == "__main__":
    main()
