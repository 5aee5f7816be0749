"""Trainer of transformers, Accelerate, Lightning and Fabric, compressed by one line, on ranks: what
each script says at its top."""

from pathlib import Path

import pytest

from variants import seldom

PACKAGES = ("transformers", "accelerate", "lightning", "peft")
# the others: states of FSDP2 in tests/state/test_real_ranks.py
FSDP = ("trainer", "accelerate", "lightning", "refusals")
FSDP_SELDOM = ("kinds", "again", "native", "fabric")
OFTEN = ["sharded-zero-one", "gradients"]
SELDOM = ["onebit", "lamb", "zero-one", "sharded-onebit"]


@pytest.fixture
def ran(scripts, tmp_path):
    def run(script, *arguments, ranks=2):
        for package in PACKAGES:
            pytest.importorskip(package)
        path = Path(__file__).with_name(f"{script}_script.py")
        said = scripts.run(path, *arguments, folder=tmp_path, ranks=ranks)
        assert "all is well" in said

    return run


@pytest.mark.parametrize("what", [*FSDP, *map(seldom, FSDP_SELDOM)])
def test_fsdp2_trains_to_the_bits_of_a_loop_of_ones_own_and_resumes_in_them(ran, tmp_path, what):
    ran("fsdp", what, tmp_path)


@pytest.mark.slow  # tests/state/test_real_ranks.py, FSDP2
def test_another_number_of_ranks_goes_on_with_the_mean_of_what_compression_owes(ran, tmp_path):
    ran("fsdp", "save", tmp_path, ranks=3)
    ran("fsdp", "resume", tmp_path)


def test_sharded_optimizers_and_loss_scales(ran, tmp_path):
    ran("sharded", tmp_path)


@pytest.mark.parametrize(
    "kinds", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.slow)], ids=" ".join
)
def test_trained_twice_compiled_saved_and_gone_on_with(ran, tmp_path, kinds):
    for ranks, what in ((3, "save"), (2, "resume"), (1, "alone")):
        ran("trainer", what, tmp_path, *kinds, ranks=ranks)


def test_trainers_save_and_find_the_experts_of_every_rank(ran, tmp_path):
    ran("expert", tmp_path)
