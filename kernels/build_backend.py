"""Build backend of the package: setuptools, plus kernels.

It makes LLVM bitcode of the CPU kernels (``cpu/build.py``) and, if the environment has
COMMPRESS_CUBINS="80 90 100", machine code of the CUDA kernels (``cuda/machine_code.py``).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the functions of a build backend
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.parent.parent  # reached as commpress/kernels/build_backend.py
CUBINS = os.environ.get("COMMPRESS_CUBINS", "").split()  # architectures, as 90 for sm_90


class BuildWithKernels(build_py):
    """Put bitcode into the wheel; into ``kernels/cpu/bitcode`` of a checkout installed editable."""

    def run(self) -> None:
        super().run()
        built = Path(ROOT if self.editable_mode else self.build_lib, "commpress", "kernels")
        kernels = built.resolve()
        # A wheel's folder has the layout of imports; make the same one for this build.
        with tempfile.TemporaryDirectory() as place:
            package = Path(place, "commpress")
            left_out = shutil.ignore_patterns("__pycache__", "bitcode", "cubins")
            shutil.copytree(ROOT / "commpress" / "kernels", package / "kernels", ignore=left_out)
            package.joinpath("__init__.py").touch()
            steps = [["cpu.build", str(kernels / "cpu" / "bitcode")]]
            if CUBINS:
                steps.append(["cuda.machine_code", str(kernels / "cuda" / "cubins"), *CUBINS])
            path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
            for module, *arguments in steps:
                command = [sys.executable, "-m", f"commpress.kernels.{module}", *arguments]
                environment = os.environ | {"PYTHONPATH": path}
                subprocess.run(command, cwd=place, env=environment, check=True)


def get_requires_for_build_wheel(settings: Mapping[str, object] | None = None) -> list[str]:
    """Return the requirements of a build, including NVRTC if machine code is requested."""
    more = ["nvidia-cuda-nvrtc-cu12>=12.8"] if CUBINS else []
    return [*build_meta.get_requires_for_build_wheel(settings), *more]
