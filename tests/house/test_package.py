"""The package as a user installs it: the wheel holds every file of the folders, below `commpress`,
and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import commpress
import sources
from commpress.kernels.cpu.digest import FAMILIES


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the source distribution, from a copy: setuptools leaves a build/ folder
    behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(sources.ROOT / name, copy)
    for folder in (*sources.folders(), "benchmarks"):
        shutil.copytree(
            sources.ROOT / folder,
            copy / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
            symlinks=True,
        )
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(
        command, cwd=out, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert built.returncode == 0, built.stdout + built.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_the_wheel_holds_the_folders_and_nothing_else(wheel):
    packed = {
        Path(name) for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")
    }
    made = {Path("commpress/kernels/cpu/bitcode", f"{family}.bc") for family in FAMILIES}
    expected = {sources.installed(path) for path in sources.files()} | made
    assert sorted(expected - packed) == [], (
        "not in the wheel: list the package or its data in pyproject.toml"
    )
    assert sorted(packed - expected) == [], "in the wheel, but in none of the folders"


def test_the_wheel_says_what_it_is(wheel):
    project = sources.project()["project"]
    assert project["dynamic"] == ["version"], "commpress.__version__ alone says it"
    info = f"commpress-{commpress.__version__}.dist-info"
    assert f"version: {commpress.__version__}\n" in (sources.ROOT / "CITATION.cff").read_text()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "commpress = commpress.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert {
        line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")
    } == set(project["optional-dependencies"])


WITHOUT_NUMBA = """
import sys
optional = ("numba", "prometheus_client", "matplotlib", "transformers", "accelerate", "lightning",
            "peft", "sklearn", "mpi4py", "cupy", "libaio", "aiofiles", "safetensors")
for name in optional:
    sys.modules[name] = None  # importing it is an error
import torch, commpress
from commpress import cli
cli.parser()
needs = {"MetricsEndpoint"}
assert all(getattr(commpress, name) for name in set(commpress.__all__) - needs)
from commpress.cli.kernel_check import check_bytes
from commpress.codecs import SignCodec
from commpress.codecs.family import NAMES
from commpress.kernels import adam
from commpress.kernels.cpu import adam as cpu_adam
for codec in (SignCodec(), SignCodec(block=0), NAMES["int8"], NAMES["log3"]):
    check_bytes(codec)
x, g, ours, theirs = torch.randn(4, 1000)
segments = adam.Segments([x], [g], [(0, 1000)])
cpu_adam.scaled(segments, ours, gain=0.5)
adam.scaled(segments, theirs, gain=0.5)
torch.testing.assert_close(ours, theirs)
print(commpress.__file__)
"""


def test_an_installed_wheel_needs_no_optional_package(wheel, tmp_path):
    """Nor may it write: its kernels are made from the bitcode alone."""
    wheel.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COMMPRESS_CACHE_DIR": "/proc/nowhere"}
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    ran = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(tmp_path / "commpress" / "__init__.py")
    assert ran.stderr.count("COMMPRESS_CACHE_DIR") == 1
