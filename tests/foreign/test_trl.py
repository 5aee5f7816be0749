"""TRL's trainer publishes its policy, and a plain loop around ``generate`` follows it."""

import re
import subprocess
import sys

import pytest

import sources

pytest.importorskip("trl", reason="pip install trl")
pytestmark = pytest.mark.slow


def test_a_worker_generates_with_versions_of_a_policy_in_training(tmp_path):
    asked = [sys.executable, sources.ROOT / "examples" / "trl_rollouts.py", "--steps", "12"]
    ran = subprocess.run(asked, cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert "worker, version 13:" in ran.stdout, ran.stdout + ran.stderr
    found = re.search(r"^version 13: .* ([\d.]+) times fewer", ran.stdout, re.MULTILINE)
    assert float(found[1]) > 5
