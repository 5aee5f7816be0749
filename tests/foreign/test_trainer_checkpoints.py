"""Trainer and Accelerate as people use them: trained twice, compiled, saved, and gone on with on another number of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trainer_script.py")


def launch(ranks, *arguments, folder):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}",
        str(SCRIPT), *map(str, arguments),
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
    assert "all is well" in result.stdout


def test_trained_twice_compiled_saved_and_gone_on_with(compiled, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    for ranks, what in ((3, "save"), (2, "resume"), (1, "alone")):
        launch(ranks, what, tmp_path, folder=tmp_path)
