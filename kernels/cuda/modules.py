"""Modules of CUDA kernels: their source, one module for each family of kinds, and their machine
code if the package has it.

A package may include machine code (``machine_code.py``) for architectures requested at its build.
For other devices CuPy compiles the source and caches the result on disk, in one process of a user
at a time, so that the other processes of a node find the result of the first.
"""

import logging
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

from commpress.kernels.cpu import object_cache
from commpress.kernels.reference import BITS, LOG, SIGN_L1, SIGN_RMS

ADAM, HEADERS = LOG + 1, LOG + 2  # the optimizers' passes and headers have families of their own
FAMILIES = (*range(SIGN_L1, LOG + 1), ADAM, HEADERS)
FOLDER = Path(__file__).parent / "cubins"
log = logging.getLogger("commpress")


@cache
def source(family: int) -> str:
    """Return the CUDA source of the module of ``family``, to be compiled with ``options``."""
    meaning = "headers" if family >= BITS else "codes"
    names = [
        "arithmetic.cu",
        "codes.cu",
        "tiles.cu",
        f"read_{meaning}.cu",
        "decode.cu",
        "encode.cu",
        f"write_{meaning}.cu",
    ]
    if family in (SIGN_L1, SIGN_RMS):
        names.append("rows.cu")
    if family == ADAM:
        names = ["arithmetic.cu", "adam.cu"]
    if family == HEADERS:
        names = ["headers.cu"]
    here = files("commpress.kernels.cuda")
    return "\n".join(
        f'#line 1 "{name}"\n{here.joinpath(name).read_text("ascii")}' for name in names
    )


def options(family: int) -> tuple[str, ...]:
    return "-std=c++17", "--fmad=false", f"-DKIND={family}"


@cache
def digest(family: int) -> str:
    """Return a hash of everything on which the bits of a family's kernels depend."""
    return blake2b(
        "\n".join((source(family), *options(family))).encode(), digest_size=16
    ).hexdigest()


def cubin(family: int, architecture: int) -> Path:
    """Return the file with machine code of a family for an architecture, such as 90 for sm_90."""
    return FOLDER / f"sm_{architecture}" / f"{family}-{digest(family)}.cubin"


def shipped(family: int, architecture: int) -> Path | None:
    """Return the file with machine code of a family for an architecture, or for an older one of the
    same major version."""
    for older in range(architecture, architecture // 10 * 10 - 1, -1):
        if cubin(family, older).is_file():
            return cubin(family, older)
    return None


def load(cupy: Any, family: int) -> Any:
    """Return the module of a family for CuPy's current device, compiling it only if it was not
    compiled before."""
    architecture = int(cupy.cuda.Device().compute_capability)
    if (path := shipped(family, architecture)) is not None:
        ready = cupy.RawModule(path=str(path))
        try:
            ready.compile()
        except cupy.cuda.driver.CUDADriverError as error:
            log.warning(
                "commpress: the driver does not load %s, so it is compiled here: %s",
                path.name,
                error,
            )
        else:
            return ready
    module = cupy.RawModule(code=source(family), options=options(family))
    with object_cache.lock(f"{digest(family)}-sm_{architecture}"):
        module.compile()
    return module
