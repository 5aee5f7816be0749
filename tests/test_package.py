"""What a user installs: the wheel holds every file of the folders, below `commpress`, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the source distribution, from a copy: setuptools leaves a build/ folder behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(sources.ROOT / name, copy)
    for folder in sources.folders():
        shutil.copytree(sources.ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, cwd=out, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert built.returncode == 0, built.stdout + built.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_the_wheel_holds_the_folders_and_nothing_else(wheel):
    packed = {Path(name) for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    expected = {sources.installed(path) for path in sources.files()}
    assert sorted(expected - packed) == [], "not in the wheel: list the package or its data in pyproject.toml"
    assert sorted(packed - expected) == [], "in the wheel, but in none of the folders"


def test_the_wheel_says_what_it_is(wheel):
    project = sources.project()["project"]
    info = f"commpress-{project['version']}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "commpress = commpress.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")} == set(
        project["optional-dependencies"]
    )
