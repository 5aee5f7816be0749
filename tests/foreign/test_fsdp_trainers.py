"""FSDP2 in the Trainer of transformers, in Accelerate and in Lightning, compressed by one line, on
ranks."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fsdp_script.py")


@pytest.fixture
def ran(scripts, tmp_path):
    def run(what, ranks=2):
        for package in ("transformers", "accelerate", "lightning", "peft"):
            pytest.importorskip(package)
        return scripts.run(SCRIPT, what, tmp_path, folder=tmp_path, ranks=ranks)

    return run


def test_a_trainer_trains_to_the_bits_of_a_loop_of_ones_own_and_resumes_in_them(ran):
    assert "all is well" in ran("trainer")


def test_so_it_does_in_bf16_accumulating_recomputing_loaded_by_one_rank_and_compiled(ran):
    assert "all is well" in ran("kinds")


def test_adapters_a_second_train_and_the_best_model(ran):
    assert "all is well" in ran("again")


def test_a_model_that_transformers_has_sharded(ran):
    assert "all is well" in ran("native")


def test_accelerate_trains_to_the_same_bits_and_resumes_in_them(ran):
    assert "all is well" in ran("accelerate")


def test_lightning_trains_to_the_same_bits_and_resumes_in_them(ran):
    assert "all is well" in ran("lightning")


def test_fabric_trains_to_the_same_bits_and_resumes_in_them(ran):
    assert "all is well" in ran("fabric")


def test_another_number_of_ranks_goes_on_with_the_mean_of_what_compression_owes(ran):
    assert "all is well" in ran("save", ranks=3)
    assert "all is well" in ran("resume")


def test_pairs_that_do_not_fit_are_refused_before_the_first_step(ran):
    assert "all is well" in ran("refusals")
