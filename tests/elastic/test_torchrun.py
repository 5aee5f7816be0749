"""`torchrun --nnodes 2:3`: agents come and go, workers start again at another size from their
checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sources
from chaos import free_port

SCRIPT = sources.SUPPORT / "torchrun_script.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")
QUICK = "last_call_timeout=3"  # seconds that a round stays open when there are enough

# With a store that agents share with workers, torch 2.13 lets a node that joins later wait for an
# address that nobody writes.
NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def kill(agent):
    """The agent, and its worker, which leads a session of its own."""
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, workers)):
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def until(what, agents, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "the workers have not come so far"
        assert all(agent.poll() is None for agent in agents), "an agent has ended"
        time.sleep(0.1)


@pytest.mark.slow
def test_nodes_join_and_leave_between_two_and_three(tmp_path):
    def lives():
        file = tmp_path / "lives"
        return (
            [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )

    def agent(number):
        command = [
            TORCHRUN,
            "--nnodes",
            "2:3",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "9",
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "9",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-conf",
            QUICK,
            "--local-addr",
            "127.0.0.1",
            SCRIPT,
            tmp_path,
        ]
        with open(tmp_path / f"agent{number}.log", "w") as log:
            return subprocess.Popen(
                command, env=os.environ | NETWORK, stdout=log, stderr=log, start_new_session=True
            )

    port = free_port()
    agents = [agent(0), agent(1)]
    try:
        until(lambda: [size for size, _ in lives()] == [2], agents)
        time.sleep(0.5)  # some steps
        agents.append(agent(2))
        until(lambda: [size for size, _ in lives()] == [2, 3], agents)
        time.sleep(0.5)
        kill(agents.pop())
        until(lambda: lives()[-1][0] == 2, agents)
        (tmp_path / "stop").touch()
        assert [agent.wait(60) for agent in agents] == [0, 0]
    finally:
        for process in agents:
            if process.poll() is None:
                kill(process)
    steps = [step for _, step in lives()]
    assert steps[0] == 0
    assert steps == sorted(steps)
    assert steps[-1] > steps[1] > 0
