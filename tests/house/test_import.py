"""`import commpress` has no effect, and `kernels` goes on meaning other people's package."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import sources
from variants import few, first

OPTIONAL = {
    "accelerate",
    "aiofiles",
    "cupy",
    "deepspeed",
    "libaio",
    "matplotlib",
    "mpi4py",
    "numba",
    "transformers",
    "xxhash",
}

# torch comes first, so that what it loads and starts by itself is not held against us.
OBSERVE = """
import json, os, sys, threading, time
import torch, torch.distributed

def observe():
    threads = "/proc/self/task"
    tasks = len(os.listdir(threads)) if os.path.exists(threads) else threading.active_count()
    return {
        "modules": sorted({name.split(".")[0] for name in sys.modules}),
        "backends": list(torch.distributed.Backend.backend_list),
        "threads": tasks,
        "cuda": torch.cuda.is_initialized(),
    }

before, start = observe(), time.process_time()
import commpress
seconds, after = time.process_time() - start, observe()
found = {"before": before, "after": after, "seconds": seconds, "file": commpress.__file__}
print(json.dumps(found))
"""


def python(code: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_importing_loads_registers_and_starts_nothing(tmp_path):
    ran = python(OBSERVE, tmp_path)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    before, after = seen["before"], seen["after"]
    assert OPTIONAL & (set(after.pop("modules")) - set(before.pop("modules"))) == set()
    assert after == before
    assert seen["seconds"] < 0.5, "processor seconds of `import commpress`, torch not counted"


ROOMS = ["codecs", "collectives", "kernels", "optim", "tiered_mem"]
ROOMS += [
    f"integrations.{room}"
    for room in (
        "ddp",
        "experts",
        "fsdp",
        "observe",
        "process_group",
        "trainers",
        "weights",
        "zero",
    )
]


@pytest.mark.parametrize("room", ["commpress", *(f"commpress.{room}" for room in ROOMS)])
def test_every_public_name_of_a_room_is_there(room):
    package = importlib.import_module(room)
    assert len(package.__all__) == len(set(package.__all__)) > 0
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018


SHORT = {
    "hf": "commpress.integrations.trainers.hf",
    "lightning": "commpress.integrations.trainers.lightning",
    "moe": "commpress.integrations.experts.moe",
    "weights": "commpress.integrations.weights",
}


IMPORTED = "import commpress.{0} as short"
NAMED = "from commpress import {0} as short"
REACHED = "import commpress; short = commpress.{0}"


@pytest.mark.parametrize(("name", "statement"), few(SHORT, [IMPORTED, NAMED, REACHED]))
def test_short_names_are_imported_and_attributes(scripts, tmp_path, name, statement):
    """Run a process that has the packages loaded, and none of the names."""
    pytest.importorskip({"hf": "transformers", "lightning": "lightning"}.get(name, "torch"))
    script = tmp_path / "imports.py"
    script.write_text(
        f"import sys; assert 'commpress.{name}' not in sys.modules; {statement.format(name)}; "
        f"import {SHORT[name]} as home, commpress; print(short is home is commpress.{name})"
    )
    assert scripts.run(script, folder=tmp_path, ranks=0).split()[0] == "True"


@pytest.mark.parametrize(
    "statement",
    first(1, ["import commpress.hf", "from commpress import hf", "import commpress; commpress.hf"]),
)
def test_a_short_name_says_which_package_is_missing(tmp_path, statement):
    ran = python(f"import sys; sys.modules['transformers'] = None; {statement}", tmp_path)
    assert (
        "MissingPackage: commpress.hf needs transformers: pip install 'commpress[hf]'" in ran.stderr
    )


LIGHT = """
import sys
import commpress.collectives, commpress.kernels
import commpress.integrations.trainers, commpress.integrations.zero
heavy = ("torch", "numpy", "llvmlite")
print(*(name for name in sys.modules if name.startswith("commpress.") or name in heavy))
"""


def test_a_room_with_much_in_it_loads_nothing_before_a_name_is_asked_for(tmp_path):
    ran = python(LIGHT, tmp_path)
    assert ran.returncode == 0, ran.stderr
    rooms = {
        "collectives",
        "kernels",
        "integrations",
        "integrations.trainers",
        "integrations.zero",
        "lazy",
    }
    assert set(ran.stdout.split()) == {f"commpress.{room}" for room in rooms}


def spec_of_kernels_lies_outside(origin: str | None) -> bool:
    return origin is None or sources.ROOT not in Path(origin).resolve().parents


def test_kernels_is_not_ours_elsewhere(tmp_path):
    code = (
        "import importlib.util as u, commpress.kernels; s = u.find_spec('kernels'); print(s and "
        "s.origin or '')"
    )
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert spec_of_kernels_lies_outside(ran.stdout.strip() or None), ran.stdout


def test_kernels_is_not_ours_under_pytest():
    spec = importlib.util.find_spec("kernels")
    assert spec_of_kernels_lies_outside(spec and spec.origin), (
        "run `pytest`, not `python -m pytest`"
    )


def test_kernels_imported_from_the_repository_root_says_what_is_wrong():
    ran = python("import kernels", sources.ROOT)
    assert ran.returncode != 0
    assert "ImportError" in ran.stderr
    assert "commpress.kernels was imported as 'kernels'" in ran.stderr
