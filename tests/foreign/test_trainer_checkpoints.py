"""Trainer and Accelerate as people use them: trained twice, compiled, saved, and gone on with on
another number of ranks."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trainer_script.py")


OTHERS = ["lamb", "zero-one", "sharded-onebit"]


@pytest.mark.parametrize(
    "kinds",
    [["onebit", "sharded-zero-one", "gradients"], pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_trained_twice_compiled_saved_and_gone_on_with(scripts, tmp_path, kinds):
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package)
    for ranks, what in ((3, "save"), (2, "resume"), (1, "alone")):
        assert "all is well" in scripts.run(
            SCRIPT, what, tmp_path, *kinds, folder=tmp_path, ranks=ranks
        )
