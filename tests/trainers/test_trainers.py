"""Hugging Face, Accelerate, Lightning and the examples on two ranks and more."""

import re

import pytest

import sources

FOREIGN = sources.ROOT / "tests" / "foreign"
EXAMPLES = sources.ROOT / "examples"
TINY = ["--steps", "10", "--width", "32", "--layers", "1", "--length", "16"]


def test_hugging_face(scripts, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "all is well" in scripts.run(FOREIGN / "hf_script.py", tmp_path, folder=tmp_path)


def test_local_updates_in_trainers_of_others(scripts, tmp_path):
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package)
    assert "all is well" in scripts.run(FOREIGN / "local_script.py", tmp_path, folder=tmp_path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_trainer_takes_longer_steps_in_hidden_rounds_on_several_ranks(scripts, tmp_path, ranks):
    """A launcher's only rank has DistributedDataParallel around its model, too."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = FOREIGN / "local_trainer_script.py"
    assert "all is well" in scripts.run(script, tmp_path, folder=tmp_path, ranks=ranks)


def test_accelerate(scripts, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "all is well" in scripts.run(sources.SUPPORT / "accelerate_script.py", folder=tmp_path)


def test_lightning(scripts, tmp_path):
    pytest.importorskip("lightning")
    assert "all is well" in scripts.run(
        sources.SUPPORT / "lightning_script.py", tmp_path, folder=tmp_path
    )


@pytest.mark.parametrize(
    "optimizer",
    ["onebit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero-one", "lamb"))],
)
def test_the_gpt_example(scripts, tmp_path, optimizer):
    assert "times fewer" in scripts.run(
        EXAMPLES / "ddp_gpt.py", *TINY, "--optimizer", optimizer, folder=tmp_path
    )


NOISE = "Warning|unrecognized|deprecated"  # of other packages, about how an example calls them


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_example_of_experts_trains_on_any_number_of_ranks(scripts, tmp_path, ranks):
    said = scripts.run(
        EXAMPLES / "moe_gpt.py",
        *TINY,
        "--steps",
        "30",
        "--codec",
        "int8",
        folder=tmp_path,
        ranks=ranks,
    )
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 1
    assert float(re.search(r"held-out loss ([\d.]+)", said)[1]) < losses[0]


def test_the_example_of_two_machines(scripts, tmp_path):
    """A run that goes on from a checkpoint ends as one that was never interrupted, in every bit."""
    options = [*TINY[2:], "--every", "4", "--save-every", "5", "--batch", "2"]
    script = EXAMPLES / "two_machines.py"
    first = scripts.run(script, "--steps", "9", *options, "--checkpoints", "once", folder=tmp_path)
    assert "DDP: 1.07 MB" in first, first
    scripts.run(script, "--steps", "6", *options, "--checkpoints", "twice", folder=tmp_path)
    again = scripts.run(script, "--steps", "9", *options, "--checkpoints", "twice", folder=tmp_path)
    assert "machine 1 goes on from step 5" in again
    assert (
        re.search(r"shared weights (\w+)", first)[1] == re.search(r"shared weights (\w+)", again)[1]
    )
    hidden = scripts.run(
        script,
        "--steps",
        "9",
        *TINY[2:],
        "--batch",
        "2",
        "--checkpoints",
        "hidden",
        folder=tmp_path,
    )
    assert re.search(r"9 steps, .* now of \d+ steps, \d+ of them beside an exchange", hidden), (
        hidden
    )


@pytest.mark.parametrize(
    ("example", "says"), [("fsdp2_gpt.py", "gradients"), ("lora.py", "times fewer")]
)
def test_examples_that_shard_and_adapt(scripts, tmp_path, example, says):
    pytest.importorskip("peft")
    said = scripts.run(EXAMPLES / example, *TINY, folder=tmp_path)
    assert says in said
    assert not re.search(NOISE, said), said
    assert len(re.findall(r"step \d+: loss \d", said)) == 10


def test_the_trainer_example(scripts, tmp_path):
    pytest.importorskip("transformers")
    said = scripts.run(EXAMPLES / "hf_trainer.py", *TINY, folder=tmp_path)
    assert "commpress/ratio" in said
    assert not re.search(NOISE, said), said


def test_the_trainer_takes_each_optimizer_on_our_backend(scripts, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "all is well" in scripts.run(
        FOREIGN / "every_optimizer_script.py", tmp_path, folder=tmp_path
    )


def test_hugging_face_with_a_store(scripts, tmp_path):
    """In one process, which is no rank."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "all is well" in scripts.run(
        FOREIGN / "hf_offloaded_script.py", tmp_path, folder=tmp_path, ranks=0
    )
