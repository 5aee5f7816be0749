"""Names and imports of the package as a whole: each class has a name of its own, nobody imports in
a circle."""

import ast
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sources

MODULES = {
    sources.module(path): sources.ROOT / path for path in sources.files() if path.suffix == ".py"
}
ROOMS = (
    "commpress.collectives",
    "commpress.integrations",
    "commpress.kernels",
    "commpress.tiered_mem",
    "commpress.codecs",
    "commpress.optim",
    "commpress.plan",
    "commpress.cli",
    "commpress",
)
# files of one noun in two rooms: the same functions with the same arguments, for another device
TWINS = {
    # torch's operations, loops of our own, and launches
    "adam.py": {"kernels", "kernels/cpu", "kernels/cuda"},
    "lamb.py": {"kernels", "kernels/cpu"},
    "low_rank.py": {"kernels", "kernels/cpu"},
    "row_codec.py": {"kernels/cpu", "kernels/cuda"},
}
SHORT = (  # ``commpress.lazy.short_name``
    "commpress/hf.py", "commpress/lightning.py", "commpress/moe.py", "commpress/weights.py",
)  # fmt: skip
LATE = {  # (importer, what it imports inside a function): why not at the top of the file
    ("commpress.lazy", "commpress.errors"): "a room loads nothing before a name is asked for",
    (
        "commpress.cli",
        "commpress.*",
    ): "the commands' modules import this room, so it cannot import them back",
    ("commpress.cli.*", "commpress.cli.charts"): "matplotlib is optional",
    (
        "commpress.cli.option_groups",
        "commpress.cli.refusals",
    ): "it loads numpy, which help does not need",
    (
        "commpress.codecs.sparse",
        "commpress.kernels.sparse_blocks",
    ): "names of codecs are known without torch",
    (
        "commpress.cli.doctor",
        "commpress.cli.kernel_check",
    ): "kernels that cannot be imported are a finding",
    ("commpress.cli.doctor", "commpress.codecs"): "likewise",
    ("commpress.cli.doctor", "commpress.kernels.cpu.*"): "likewise",
    (
        "commpress.integrations.ddp.hook",
        "commpress.integrations.ddp.mesh",
    ): "compress takes both, and a mesh is made of hooks",
    ("commpress.kernels.cpu.compiled", "commpress.kernels.cpu.build"): "Numba is optional",
}
# module: what it wants to know the time of day for; it jumps, so nobody may wait or measure by it
WALL_CLOCK = {
    "commpress.timeline": "traces of several ranks are laid beside each other",
    "commpress.tiered_mem.disk": "bytes written to a drive are counted by day",
    "commpress.integrations.elastic.events": (
        "people read them; programs read the monotonic clock beside it"
    ),
}
# hf.Compress, weights.Receiver, …: names that users expect
CALLBACKS = {"Compress", "LocalTraining", "Receiver"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def trees() -> dict[str, ast.Module]:
    return {module: tree_of(path) for module, path in MODULES.items()}


def imports(module: str) -> set[tuple[str, str]]:
    """(module, name) of everything that is imported from the package when ``module`` is."""
    found, waiting = set(), list(tree_of(MODULES[module]).body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                waiting += node.orelse
            case ast.ImportFrom(module=str(package)) if package.split(".")[0] == "commpress":
                found |= {(package, alias.name) for alias in node.names}
            case ast.If() | ast.Try() | ast.With():
                waiting += node.body
    return found


def needed(module: str) -> set[str]:
    names = {
        f"{package}.{name}" if f"{package}.{name}" in MODULES else package
        for package, name in imports(module)
    }
    rooms = {outer for name in names for outer in packages_of(name)} - {
        module,
        *packages_of(module),
    }
    return (names | rooms) & MODULES.keys()


def packages_of(name: str) -> set[str]:
    """Packages that are imported before a module of theirs."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def late(module: str) -> set[str]:
    """Modules of the package that functions of ``module`` import."""
    functions = [
        node
        for node in ast.walk(tree_of(MODULES[module]))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = set()
    for node in (inner for function in functions for inner in ast.walk(function)):
        match node:
            case ast.ImportFrom(module=str(package)) if package.split(".")[0] == "commpress":
                names = [f"{package}.{alias.name}" for alias in node.names]
                found |= {name if name in MODULES else package for name in names}
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.split(".")[0] == "commpress"}
    return found


def room(module: str) -> str:
    return next(name for name in ROOMS if module == name or module.startswith(name + "."))


def circle(needs: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, or nothing."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def not_cpu(room: str) -> bool:
    return room != "kernels/cpu"


def signatures(module: str) -> dict[str, str]:
    """Names of a module's public functions → their parameters, each with its default."""
    found = {}
    for node in tree_of(MODULES[module]).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def test_no_class_name_stands_twice():
    homes = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in CALLBACKS:
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_file_name_stands_twice():
    """But for ``TWINS``; ``__init__.py`` is the room itself, and ``SHORT`` are other names of
    files."""
    rooms = defaultdict(set)
    for path in sources.files():
        if str(path) not in SHORT:
            rooms[path.name].add(str(path.parent))
    assert {
        name: found for name, found in rooms.items() if len(found) > 1 and name != "__init__.py"
    } == TWINS


@pytest.mark.parametrize("name", sorted(TWINS))
def test_files_of_one_name_have_the_same_functions(name):
    """All of the CPU's, with the same parameters and defaults."""
    ours, *others = (
        signatures(f"commpress.{room.replace('/', '.')}.{name[:-3]}")
        for room in sorted(TWINS[name], key=not_cpu)
    )
    assert ours
    for other in others:
        assert {name: other.get(name) for name in ours} == ours


def test_nobody_imports_in_a_circle():
    assert circle({module: needed(module) for module in MODULES}) == []


def test_modules_of_ours_are_imported_at_the_top_of_a_file():
    """But for ``LATE``: an import inside a function hides a circle."""
    found = [(module, name) for module in sorted(MODULES) for name in late(module)]
    assert [pair for pair in found if not allowed(*pair)] == []


def test_what_may_be_imported_late_is():
    found = [(module, name) for module in MODULES for name in late(module)]
    assert [entry for entry in LATE if not any(fits(entry, *pair) for pair in found)] == []


def allowed(module: str, name: str) -> bool:
    return any(fits(entry, module, name) for entry in LATE)


def fits(entry: tuple[str, str], module: str, name: str) -> bool:
    return fnmatch(module, entry[0]) and fnmatch(name, entry[1])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_no_private_name_leaves_its_room():
    private = {
        (module, package, name)
        for module in MODULES
        for package, name in imports(module)
        if name.startswith("_") and not name.startswith("__")
    }
    assert [each for each in sorted(private) if room(each[1]) != room(each[0])] == []


def test_nobody_waits_or_measures_by_the_wall_clock():
    """A clock that is set right while a run goes on must not end a wait, nor prolong it."""
    asks = {
        "time.time",
        "time.time_ns",
        "time.gmtime",
        "time.localtime",
        "datetime.now",
        "datetime.datetime.now",
    }
    found = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in asks
    }
    named = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and {"time", "time_ns"} & {n.name for n in node.names}
    }
    assert found | named == WALL_CLOCK.keys()


def test_docstrings_begin_with_what_they_name():
    """Not with a question word."""
    begins = ("What ", "Who ", "How ", "Where ", "Whether ", "Why ", "Which ", "Whose ")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    folders = ("tests", "benchmarks", "examples", *sources.folders())
    paths = [path for folder in folders for path in (sources.ROOT / folder).rglob("*.py")]
    nodes = [
        (path, node)
        for path in paths
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented)
    ]
    texts = [(path, ast.get_docstring(node) or "") for path, node in nodes]
    assert nodes
    assert [
        f"{path}: {text.splitlines()[0]}" for path, text in texts if text.startswith(begins)
    ] == []
