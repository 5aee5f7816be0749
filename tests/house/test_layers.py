"""Layers of the package, read from the source. The tables below are the rule; docs/architecture.md
explains it.

An import counts wherever it stands: inside a function, under TYPE_CHECKING, or as
`import_module("name")`.
"""

import ast
import sys
from fnmatch import fnmatch

import pytest

import sources

LEAVES = (
    "commpress.work",
    "commpress.errors",
    "commpress.lazy",
    "commpress.timeline",
    "commpress.torch_private",
    "commpress.checksum",
    "commpress.documents",
    "commpress.totals",
    "commpress.units",
    "commpress.logs",
)
MEANING = ("commpress.codecs", "commpress.feedback", "commpress.schedules")
USES = ("commpress.optim", "commpress.plan")
CHOICE = ("commpress.alarm", "commpress.choice")
BELOW_USES = ("commpress.collectives", *MEANING, "commpress.kernels", *LEAVES)

# A module belongs to the longest entry that begins its name; modules of one entry may import each
# other.
MAY_IMPORT = {
    "commpress.work": LEAVES,
    "commpress.errors": LEAVES,
    "commpress.lazy": LEAVES,
    "commpress.timeline": LEAVES,
    "commpress.torch_private": LEAVES,
    "commpress.checksum": LEAVES,
    "commpress.documents": LEAVES,
    "commpress.totals": LEAVES,
    "commpress.units": LEAVES,
    "commpress.logs": LEAVES,
    "commpress.kernels": LEAVES,
    "commpress.codecs": (*MEANING, "commpress.kernels", *LEAVES),
    "commpress.feedback": (*MEANING, "commpress.kernels", *LEAVES),
    "commpress.schedules": (*MEANING, "commpress.kernels", *LEAVES),
    "commpress.collectives": (*MEANING, "commpress.kernels", *LEAVES),
    "commpress.tiered_mem": LEAVES,
    "commpress.optim": ("commpress.tiered_mem", *CHOICE, *USES, *BELOW_USES),
    "commpress.plan": (*USES, *BELOW_USES),
    "commpress.alarm": BELOW_USES,
    "commpress.choice": ("commpress.alarm", "commpress.plan", *BELOW_USES),
    "commpress.integrations": ("commpress.tiered_mem", *CHOICE, *USES, *BELOW_USES),
    # importing it has an effect: nothing else may
    "commpress.backend": ("commpress.integrations", *LEAVES),
    "commpress.hf": ("commpress.integrations", *LEAVES),
    "commpress.lightning": ("commpress.integrations", *LEAVES),
    "commpress.moe": ("commpress.integrations", *LEAVES),
    "commpress.weights": ("commpress.integrations", *LEAVES),
    "commpress.cli": ("commpress",),
    "commpress.__main__": ("commpress.cli",),
}
# commpress/__init__.py: may import everything, and only the command line imports it
FACE = "commpress"

# The modules that may import a package from outside. Not listed: nobody may. The leaves have torch
# only.
ANYWHERE = ("torch", "numpy", "msgpack")
HOMES = {
    "torch.distributed": (
        "commpress.collectives.transports.factory",
        "commpress.collectives.transports.torch",
        "commpress.collectives.topology",
        "commpress.torch_private",
        "commpress.integrations*",
        "commpress.backend",
        "commpress.cli*",
    ),
    "setuptools": ("commpress.kernels.build_backend",),
    "cupy": ("commpress.kernels.cuda.row_codec",),
    "numba": ("commpress.kernels.cpu.sources*", "commpress.kernels.cpu.build"),
    "llvmlite": (
        "commpress.kernels.cpu.sources*",
        "commpress.kernels.cpu.build",
        "commpress.kernels.cpu.compiled",
        "commpress.kernels.cpu.digest",
    ),
    "mpi4py": ("commpress.collectives.transports.mpi",),
    "libaio": ("commpress.tiered_mem.engines*",),
    "xxhash": ("commpress.checksum",),
    "fsspec": ("commpress.integrations.weights.places",),
    "vllm": (
        "commpress.integrations.weights.vllm_engine",
        "commpress.integrations.weights.vllm_plugin",
    ),
    "prometheus_client": ("commpress.integrations.observe.endpoint",),
    "aiofiles": ("commpress.tiered_mem.engines*",),
    "transformers": (
        "commpress.integrations.trainers.hf",
        "commpress.integrations.trainers.hf_model",
    ),
    "accelerate": ("commpress.integrations.trainers.hf",),
    "lightning": ("commpress.integrations.trainers.lightning",),
    "matplotlib": ("commpress.cli*",),
}
SHAPELESS = {"utils.py", "common.py", "helpers.py", "base.py"}

MODULES = {sources.module(path): path for path in sources.files() if path.suffix == ".py"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer(module: str) -> str | None:
    """The entry of MAY_IMPORT that `module` belongs to, FACE, or None."""
    if module == FACE:
        return FACE
    return max((entry for entry in MAY_IMPORT if within(module, entry)), key=len, default=None)


def imported(source: str, modules: set[str]) -> set[str]:
    """The modules that a source text imports. `modules` tells `from package import module` from a
    plain name."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(level=0, module=str(package)):
                for alias in node.names:
                    full = f"{package}.{alias.name}"
                    names.add(full if full in modules | HOMES.keys() else package)
            case ast.ImportFrom():
                names.add("." * node.level + (node.module or ""))
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                names.add("torch.distributed")
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names.add(name)
    return names


def complaints(module: str, source: str, modules: set[str]) -> list[str]:
    """Every import of `source` that the tables forbid to `module`, as a sentence."""
    own = layer(module)
    if own is None:
        return [f"{module} belongs to no layer; give it one in MAY_IMPORT"]
    allowed = (FACE,) if own == FACE else (own, *MAY_IMPORT[own])
    found = []
    for name in sorted(imported(source, modules)):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(
                f"{module} imports {name!r}; imports are absolute: from commpress... import ..."
            )
        elif top == FACE:
            if FACE not in allowed and layer(name) not in allowed:
                found.append(f"{module} imports {name}; {own} may import only {', '.join(allowed)}")
        elif home := next((entry for entry in HOMES if within(name, entry)), None):
            if not any(fnmatch(module, pattern) for pattern in HOMES[home]):
                found.append(f"{module} imports {name}; only {', '.join(HOMES[home])} may")
        elif own in LEAVES and top != "torch" and top not in sys.stdlib_module_names:
            found.append(f"{module} imports {name}; the leaves import only torch")
        elif top not in ANYWHERE and top not in sys.stdlib_module_names:
            found.append(
                f"{module} imports {name}, which no table lists; name the one module that may in "
                "HOMES"
            )
    return found


def test_imports_only_what_lies_below():
    found = []
    for module, path in sorted(MODULES.items()):
        found += complaints(module, (sources.ROOT / path).read_text(), set(MODULES))
    assert found == []


def test_every_file_is_named_after_what_it_holds():
    assert [path for path in sources.files() if path.name in SHAPELESS] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("commpress.kernels.cpu.row_codec", "from commpress.collectives import allreduce"),
        ("commpress.collectives.buckets", "from commpress import CompressedState"),
        (
            "commpress.tiered_mem.store",
            "def borrow():\n    from commpress.collectives.frame import Header",
        ),
        ("commpress.optim.adam", "from commpress.integrations.ddp.hook import CompressedState"),
        ("commpress.optim.adam", "from . import schedules"),
        ("commpress.codecs.sign", "import torch.distributed as dist"),
        ("commpress.codecs.sign", "import torch\n\nrank = torch.distributed.get_rank()"),
        ("commpress.codecs.sign", "import importlib\n\nimportlib.import_module('cupy')"),
        ("commpress.kernels.cuda.row_codec", "import numba"),
        (
            "commpress.integrations.ddp.hook",
            "if TYPE_CHECKING:\n    from transformers import Trainer",
        ),
        ("commpress.collectives.buckets", "import pandas"),
        ("commpress.work", "import numpy"),
        ("commpress.work", "from commpress.kernels import reference"),
        ("commpress.tools", ""),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert (
        len(complaints(module, source, {"commpress.tiered_mem", "commpress.kernels.reference"}))
        == 1
    )


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "commpress.cli.demo",
            "import commpress\nimport matplotlib.pyplot\nfrom torch import distributed",
        ),
        (
            "commpress.integrations.ddp.hook",
            "import torch.distributed as dist\nfrom commpress import errors, tiered_mem",
        ),
        (
            "commpress.collectives.transports.torch",
            "import torch\n\nrank = torch.distributed.get_rank()",
        ),
        (
            "commpress.kernels.cpu.sources.row_loops",
            "import math\nimport numba\nimport numpy as np",
        ),
        ("commpress.work", "import torch\nfrom commpress.errors import Fault"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert (
        complaints(
            module,
            source,
            {"commpress.errors", "commpress.tiered_mem", "commpress.collectives.frame"},
        )
        == []
    )
