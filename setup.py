"""The step of a build that pyproject.toml cannot say: the LLVM bitcode of the CPU kernels (``kernels/cpu/build.py``)."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithKernels(build_py):
    """Bitcode goes into the wheel; of an editable install into ``kernels/cpu/bitcode`` of the checkout, which git ignores."""

    def run(self) -> None:
        super().run()
        folder = Path(ROOT if self.editable_mode else self.build_lib, "commpress", "kernels", "cpu")
        with tempfile.TemporaryDirectory() as place:  # the folders lie where their imports say only once they are installed
            package = Path(place, "commpress")
            left_out = shutil.ignore_patterns("__pycache__", "bitcode")
            shutil.copytree(ROOT / "commpress" / "kernels", package / "kernels", ignore=left_out)
            package.joinpath("__init__.py").touch()
            command = [sys.executable, "-m", "commpress.kernels.cpu.build", str((folder / "bitcode").resolve())]
            path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
            subprocess.run(command, cwd=place, env=os.environ | {"PYTHONPATH": path}, check=True)


setup(cmdclass={"build_py": BuildWithKernels})
