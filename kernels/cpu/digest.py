"""Digest of everything that the bits of kernels depend on."""

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
# What ``sources`` import, and who compiles.
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
    """Of the source files, whatever folder they lie in."""
    found = blake2b(digest_size=16)
    for path in sorted((_HERE / "sources").glob("*.py")) + [_HERE / name for name in _BESIDE]:
        text = path.read_bytes()
        found.update(f"{path.name} {len(text)}\n".encode() + text)
    return found.hexdigest()


def cached_name(family: str) -> str:
    """Of a family's bitcode in a cache."""
    return f"{digest()}-{LLVM}-{family}.bc"
