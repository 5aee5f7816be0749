"""Hash of everything on which the bits of kernels depend."""

from functools import cache
from hashlib import blake2b
from pathlib import Path

import llvmlite
import llvmlite.binding

_HERE = Path(__file__).parent
FOLDER = _HERE / "bitcode"
LLVM = f"{llvmlite.__version__}-{'.'.join(map(str, llvmlite.binding.llvm_version_info))}"
FAMILIES = (
    "row_loops",
    "adam_loops",
    "lamb_loops",
    "low_rank_loops",
    "openmp_loops",
    "exact_loops",
)
# Modules that ``sources`` import, and the compiler.
_BESIDE = (
    "build.py",
    "compiled.py",
    "kinds.py",
    "../exact_format.py",
    "../matrices.py",
    "../pieces.py",
    "../reference.py",
    "../registered.py",
)


@cache
def digest() -> str:
    """Return a hash of the source files, independent of their folder."""
    found = blake2b(digest_size=16)
    for path in sorted((_HERE / "sources").glob("*.py")) + [_HERE / name for name in _BESIDE]:
        text = path.read_bytes()
        found.update(f"{path.name} {len(text)}\n".encode() + text)
    return found.hexdigest()


def cached_name(family: str) -> str:
    """Return the name in a cache of a family's bitcode."""
    return f"{digest()}-{LLVM}-{family}.bc"
