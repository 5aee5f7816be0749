"""Sharded optimizers, and loss scales, in other people's trainers, on two ranks."""

from pathlib import Path

import pytest


def test_trainer_accelerate_and_lightning(scripts, tmp_path):
    for package in ("transformers", "accelerate", "lightning", "peft"):
        pytest.importorskip(package)
    assert "all is well" in scripts.run(
        Path(__file__).with_name("sharded_script.py"), tmp_path, folder=tmp_path
    )
