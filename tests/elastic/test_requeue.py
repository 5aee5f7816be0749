"""The SLURM example without SLURM: signals make it save the same step on all ranks, end with 85,
and go on bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import sources
from chaos import free_port

EXAMPLES = sources.ROOT / "examples"
SRUN = """#!/bin/bash
trap 'echo warned >> {folder}/said; exit 85' USR1 TERM
echo "$@" >> {folder}/said
for _ in $(seq 300); do sleep 0.05; done
exit 3
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_batch_script_passes_the_warning_on_and_requeues(number, tmp_path):
    for name, text in {
        "srun": SRUN.format(folder=tmp_path),
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    job = subprocess.Popen(["bash", EXAMPLES / "slurm_requeue.sbatch", "--steps", "9"], env=env)
    said = tmp_path / "said"
    until = time.monotonic() + 30
    while not said.exists() and time.monotonic() < until:
        time.sleep(0.01)
    job.send_signal(number)
    assert job.wait(30) == 0
    first, *rest = said.read_text().splitlines()
    assert first.endswith("python examples/slurm_requeue.py --checkpoints checkpoints-77 --steps 9")
    assert rest == ["warned", "requeue 77"]


def ranks(size, folder, steps, warn=None):
    """Output of rank 0 and all exit statuses; rank 1 alone is warned once ``warn`` steps were
    printed."""
    port, running = str(free_port()), []
    for rank in range(size):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            EXAMPLES / "slurm_requeue.py",
            "--checkpoints",
            folder,
            "--steps",
            str(steps),
        ]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    lines = []
    for line in running[0].stdout:
        lines.append(line)
        if warn is not None and line.startswith(f"step {warn}:"):
            running[1].send_signal(signal.SIGUSR1)
    return lines, [process.wait(60) for process in running]


@pytest.mark.slow
def test_a_run_in_two_jobs_is_the_run_in_one(tmp_path):
    _, statuses = ranks(2, tmp_path / "a", 100_000, warn=10)
    assert statuses == [85, 85]
    (folder,) = (tmp_path / "a").iterdir()
    step = int(folder.name)
    more = 10 * (step // 10 + 2)
    again, statuses = ranks(2, tmp_path / "a", more)
    assert statuses == [0, 0]
    assert again[0] == f"goes on from step {step}\n"
    whole, statuses = ranks(2, tmp_path / "b", more)
    assert statuses == [0, 0]
    assert (
        re.findall(r"step.*loss.*", "".join(whole))[-2:]
        == re.findall(r"step.*loss.*", "".join(again))[-2:]
    )
    torch.load(folder / "model.pt", weights_only=True)
