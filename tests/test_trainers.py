"""Hugging Face, Accelerate, Lightning and the examples, each launched by torchrun on two ranks."""

import os
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


def test_hugging_face_with_local_updates(compiled, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
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
