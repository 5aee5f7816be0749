"""Hugging Face, Accelerate, Lightning and the examples, each launched by torchrun on two ranks."""

import os
import re
import subprocess
import sys

import pytest

import sources

HERE = sources.ROOT / "tests"
EXAMPLES = sources.ROOT / "examples"
TINY = ["--steps", "10", "--width", "32", "--layers", "1", "--length", "16"]


def launch(script, *arguments, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        [*command, str(script), *map(str, arguments)], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout


def test_hugging_face(compiled, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "all is well" in launch(HERE / "foreign" / "hf_script.py", tmp_path, folder=tmp_path)


def test_local_updates_in_trainers_of_others(compiled, tmp_path):
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package)
    assert "all is well" in launch(HERE / "foreign" / "local_script.py", tmp_path, folder=tmp_path)


def test_accelerate(compiled, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "all is well" in launch(HERE / "accelerate_script.py", folder=tmp_path)


def test_lightning(compiled, tmp_path):
    pytest.importorskip("lightning")
    assert "all is well" in launch(HERE / "lightning_script.py", tmp_path, folder=tmp_path)


@pytest.mark.parametrize(
    "optimizer", ["onebit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero-one", "lamb"))]
)
def test_the_gpt_example(compiled, tmp_path, optimizer):
    assert "times fewer" in launch(EXAMPLES / "ddp_gpt.py", *TINY, "--optimizer", optimizer, folder=tmp_path)


def test_the_example_of_two_machines(compiled, tmp_path):
    """A run that goes on from a checkpoint ends as one that was never interrupted, in every bit."""
    options = [*TINY[2:], "--every", "4", "--save-every", "5", "--batch", "2"]
    script = EXAMPLES / "two_machines.py"
    first = launch(script, "--steps", "9", *options, "--checkpoints", "once", folder=tmp_path)
    assert "DDP: 1.07 MB" in first, first
    launch(script, "--steps", "6", *options, "--checkpoints", "twice", folder=tmp_path)
    again = launch(script, "--steps", "9", *options, "--checkpoints", "twice", folder=tmp_path)
    assert "machine 1 goes on from step 5" in again
    assert re.search(r"shared weights (\w+)", first)[1] == re.search(r"shared weights (\w+)", again)[1]


def test_the_trainer_example(compiled, tmp_path):
    pytest.importorskip("transformers")
    assert "commpress/ratio" in launch(EXAMPLES / "hf_trainer.py", *TINY, folder=tmp_path)


def test_hugging_face_with_a_store(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    command = [sys.executable, str(HERE / "foreign" / "hf_offloaded_script.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
    )
    assert result.returncode == 0, result.stdout[-6000:]
    assert "all is well" in result.stdout
