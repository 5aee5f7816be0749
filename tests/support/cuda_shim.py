"""Runs the launches of ``commpress.kernels.cuda.row_codec`` on the CPU, from the same CUDA source,
through ``cuda_shim.h``."""

import ctypes
import fcntl
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commpress.kernels.cuda import modules
from commpress.kernels.cuda.row_codec import Launch

HEADER = Path(__file__).with_name("cuda_shim.h")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-Wno-unknown-pragmas",
)
# numpy's type to that of cuda_shim.h
LETTERS = {"u8": b"P", "f4": b"f", "i4": b"i", "u4": b"I", "i8": b"q"}


def compiler() -> str | None:
    return shutil.which("g++")


def kernel_names(family: int) -> list[str]:
    return re.findall(
        r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(', modules.source(family)
    )


class Shim:
    """One shared library per family, built by whichever process comes to ``folder`` first;
    ``execute`` takes the place of ``cuda.execute``."""

    def __init__(self, folder: Path, families: Iterable[int]) -> None:
        self.folder = folder
        with ThreadPoolExecutor(2) as pool:
            self.libraries = dict(zip(families, pool.map(self._build, families), strict=True))
        self.reverse = False

    def _build(self, family: int) -> ctypes.CDLL:
        parts = modules.source(family).split("#line 1 ")
        kernels = "#line 1 ".join(part for part in parts if not part.startswith('"arithmetic.cu"'))
        launchers = "\n".join(f"LAUNCHER({name})" for name in kernel_names(family))
        path = self.folder / f"family{family}.cpp"
        library = path.with_suffix(".so")
        command = [compiler(), *FLAGS, f"-DKIND={family}", str(path), "-o", str(library)]
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                path.write_text(f'#include "{HEADER}"\n{kernels}\n{launchers}\n')
                result = subprocess.run(command, capture_output=True, text=True)
                assert result.returncode == 0, result.stderr
        return ctypes.CDLL(str(library))

    def execute(self, launch: Launch) -> None:
        """All of the launch, before this returns. ``reverse`` turns the order of threads and blocks
        around."""
        function = getattr(self.libraries[launch.family], f"launch_{launch.kernel}")
        function.restype = ctypes.c_char_p
        values = [ctypes.create_string_buffer(value.tobytes()) for value in launch.args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        letters = b"".join(LETTERS[value.dtype.str[1:]] for value in launch.args)
        fault = function(launch.grid, launch.threads, letters, addresses, int(self.reverse))
        assert fault is None, f"{launch.kernel}: {fault.decode()}"
