"""One command tests on another torch, beside the environment of the pinned one."""

import subprocess

import pytest

import sources


@pytest.mark.parametrize(
    ("asked", "folder", "torch"),
    [
        ([], ".venv", "torch==2.13.0"),
        (["TORCH=torch==2.13.0"], ".venv", "torch==2.13.0"),
        (["TORCH=2.15.0"], ".venv-torch-2.15.0", "torch==2.15.0"),
        (["TORCH=torch==2.8.0"], ".venv-torch-2.8.0", "torch==2.8.0"),
        (["PYTHON=python3.14", "VENV=.venv-3.14"], ".venv-3.14", "torch==2.13.0"),
    ],
)
def test_every_torch_has_an_environment_of_its_own(asked, folder, torch):
    command = [
        "make",
        "--dry-run",
        "--no-print-directory",
        "--what-if=pyproject.toml",
        "test",
        *asked,
    ]
    ran = subprocess.run(command, cwd=sources.ROOT, capture_output=True, text=True, check=True)
    assert f"-m venv {folder}\n" in ran.stdout
    assert f"'{torch}' --editable '.[dev]'" in ran.stdout
    assert f"\n{folder}/bin/pytest" in ran.stdout
