"""Ray Train: every method in its TorchTrainer, with a worker that dies between two checkpoints."""

import re
import subprocess
import sys

import pytest

import sources

pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
pytestmark = pytest.mark.slow


def ended(folder, method, fail_at):
    """The last line of the example."""
    asked = ["--method", method, "--steps", "30", "--save-every", "10", "--storage", str(folder)]
    ran = subprocess.run(
        [sys.executable, sources.ROOT / "examples" / "ray_train.py", *asked, "--fail-at", fail_at],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=600,
    )
    found = re.search(r"^ended at step 30, loss .*$", ran.stdout, re.MULTILINE)
    assert found is not None, ran.stdout + ran.stderr
    return found[0]


@pytest.mark.parametrize("method", ["hook", "fsdp", "local"])
def test_a_run_whose_worker_dies_ends_as_one_without_a_failure(tmp_path, method):
    whole, harmed = tmp_path / "whole", tmp_path / "harmed"
    whole.mkdir(), harmed.mkdir()
    assert ended(harmed, method, "15") == ended(whole, method, "0")
    assert (harmed / "failed").exists()
