"""Places of the package's source: the folders to which symbolic links below `commpress` lead."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
ROOMS = sorted(path for path in SUPPORT.parent.iterdir() if path.is_dir())  # of tests


def project() -> dict:
    """pyproject.toml as a dictionary."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders() -> dict[str, str]:
    """Package name by folder, for the folders at the top of the repository."""
    links = sorted(path for path in (ROOT / "commpress").iterdir() if path.is_symlink())
    return {"commpress": "commpress"} | {
        link.readlink().name: f"commpress.{link.name}" for link in links
    }


def files() -> list[Path]:
    """Every file of the package, relative to ROOT; not what is made from them."""
    found = (
        path.relative_to(ROOT)
        for folder in folders()
        for path in sorted((ROOT / folder).rglob("*"))
    )
    return [
        path
        for path in found
        if (ROOT / path).is_file() and not {"__pycache__", "bitcode", "cubins"} & set(path.parts)
    ]


def installed(path: Path) -> Path:
    """The place of a file of the package in site-packages."""
    return Path(*folders()[path.parts[0]].split("."), *path.parts[1:])


def module(path: Path) -> str:
    """The name under which a Python file of the package is imported."""
    parts = installed(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
