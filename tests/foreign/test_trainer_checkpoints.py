"""Trainer and Accelerate as people use them: trained twice, compiled, saved, and gone on with on another number of ranks."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trainer_script.py")


def test_trained_twice_compiled_saved_and_gone_on_with(scripts, tmp_path):
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package)
    for ranks, what in ((3, "save"), (2, "resume"), (1, "alone")):
        assert "all is well" in scripts.run(SCRIPT, what, tmp_path, folder=tmp_path, ranks=ranks)
