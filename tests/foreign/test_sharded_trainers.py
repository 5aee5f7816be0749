"""Sharded optimizers, and loss scales, in other people's trainers, launched by torchrun on two ranks."""

import pytest

from test_trainers import HERE, launch


def test_trainer_accelerate_and_lightning(compiled, tmp_path):
    for package in ("transformers", "accelerate", "lightning", "peft"):
        pytest.importorskip(package)
    assert "all is well" in launch(HERE / "foreign" / "sharded_script.py", tmp_path, folder=tmp_path)
