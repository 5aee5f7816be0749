"""`import commpress` has no effect, and `kernels` goes on meaning other people's package."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import sources

OPTIONAL = {
    "accelerate", "aiofiles", "cupy", "deepspeed", "libaio", "matplotlib", "mpi4py", "numba", "transformers", "xxhash",
}  # fmt: skip

# torch comes first, so that what it loads and starts by itself is not held against us.
OBSERVE = """
import json, os, sys, threading, time
import torch, torch.distributed

def observe():
    tasks = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else threading.active_count()
    return {
        "modules": sorted({name.split(".")[0] for name in sys.modules}),
        "backends": list(torch.distributed.Backend.backend_list),
        "threads": tasks,
        "cuda": torch.cuda.is_initialized(),
    }

before, start = observe(), time.process_time()
import commpress
seconds, after = time.process_time() - start, observe()
print(json.dumps({"before": before, "after": after, "seconds": seconds, "file": commpress.__file__}))
"""


def python(code: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_importing_loads_registers_and_starts_nothing(tmp_path):
    ran = python(OBSERVE, tmp_path)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    before, after = seen["before"], seen["after"]
    assert OPTIONAL & (set(after.pop("modules")) - set(before.pop("modules"))) == set()
    assert after == before
    assert seen["seconds"] < 0.5, "processor seconds of `import commpress`, torch not counted"


def spec_of_kernels_lies_outside(origin: str | None) -> bool:
    return origin is None or sources.ROOT not in Path(origin).resolve().parents


def test_kernels_is_not_ours_elsewhere(tmp_path):
    code = "import importlib.util as u, commpress.kernels; s = u.find_spec('kernels'); print(s and s.origin or '')"
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert spec_of_kernels_lies_outside(ran.stdout.strip() or None), ran.stdout


def test_kernels_is_not_ours_under_pytest():
    spec = importlib.util.find_spec("kernels")
    assert spec_of_kernels_lies_outside(spec and spec.origin), "run `pytest`, not `python -m pytest`"


def test_kernels_imported_from_the_repository_root_says_what_is_wrong():
    ran = python("import kernels", sources.ROOT)
    assert ran.returncode != 0
    assert "ImportError" in ran.stderr
    assert "commpress.kernels was imported as 'kernels'" in ran.stderr
