"""One command tests on another torch, beside the environment of the pinned one."""

import subprocess
import sys

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


@pytest.mark.parametrize(("target", "tool"), [("docs", "mkdocs"), ("demo", "commpress")])
def test_pages_and_the_demo_need_no_more_than_their_own_packages(target, tool, tmp_path):
    """The environment of the tests where it is, else a small one; the result is named."""
    log = '#!/bin/sh\necho "$0 $@"\n'
    for folder in (tmp_path / "whole", tmp_path / f".venv-{target}"):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / tool).write_text(log)
        (folder / "bin" / tool).chmod(0o755)
    (tmp_path / "Makefile").write_text((sources.ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").write_text((sources.ROOT / "pyproject.toml").read_text())

    def made(*asked):
        command = ["make", "--no-print-directory", target, f"PYTHON={sys.executable}", *asked]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return ran.stdout

    (tmp_path / f".venv-{target}/installed").touch()
    assert f".venv-{target}/bin/{tool}" in made("VENV=gone")
    (tmp_path / "whole/installed").touch()
    said = made("VENV=whole")
    assert f"whole/bin/{tool}" in said
    assert target == "demo" or f"{tmp_path}/build/site/index.html" in said
