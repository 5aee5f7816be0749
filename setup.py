"""Steps of a build that pyproject.toml cannot say: LLVM bitcode of the CPU kernels
(``kernels/cpu/build.py``), and, if the environment asks with COMMPRESS_CUBINS="80 90 100", machine
code of the CUDA kernels (``kernels/cuda/machine_code.py``)."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CUBINS = os.environ.get("COMMPRESS_CUBINS", "").split()  # architectures, as 90 for sm_90


class BuildWithKernels(build_py):
    """Bitcode goes into the wheel; of an editable install into ``kernels/cpu/bitcode`` of the
    checkout, which git ignores."""

    def run(self) -> None:
        super().run()
        kernels = Path(
            ROOT if self.editable_mode else self.build_lib, "commpress", "kernels"
        ).resolve()
        # the folders lie where their imports say only once they are installed
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
                subprocess.run(
                    command, cwd=place, env=os.environ | {"PYTHONPATH": path}, check=True
                )


setup(
    cmdclass={"build_py": BuildWithKernels},
    setup_requires=["nvidia-cuda-nvrtc-cu12>=12.8"] if CUBINS else [],
)
