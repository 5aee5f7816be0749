"""Tag a release, if the tree, the changelog and what was built say the same: the last part of
``make release``.

Refuses a tree with changes, a version that CHANGELOG.md does not date, a tag that exists, a project
without a public address, and archives that lack files or hold others than git knows. Prints the two
commands that publish it.
"""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# of the package as it is installed → of the repository
HOMES = {
    "commpress/collectives/": "collectives/",
    "commpress/integrations/": "integrations/",
    "commpress/kernels/": "kernels/",
    "commpress/tiered_mem/": "tiered_mem/",
    "commpress/": "commpress/",
}


def git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "commpress/__init__.py").read_text(), re.M)
    assert found is not None
    return found[1]


def dated(changelog: str, name: str) -> bool:
    """True if the changelog has a section of this version with a date."""
    return (
        re.search(rf"^## \[{re.escape(name)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M) is not None
    )


def missing_in(wheel: Path, tracked: list[str]) -> list[str]:
    """Python files of the product that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    product = tuple(dict.fromkeys(HOMES.values()))
    wanted = [path for path in tracked if path.endswith(".py") and path.startswith(product)]
    return [
        path
        for path in wanted
        if not any(
            path.startswith(home) and top + path[len(home) :] in names
            for top, home in HOMES.items()
        )
    ]


def unknown_in(sdist: Path, tracked: list[str]) -> list[str]:
    """Python files of the source archive that git does not know."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    return [name for name in names if name.endswith(".py") and name not in tracked]


def address(pyproject: str) -> str:
    """The project's public address, "" while there is none."""
    urls = tomllib.loads(pyproject).get("project", {}).get("urls", {})
    return next((url for name, url in urls.items() if name.lower() == "repository"), "")


def problems(name: str) -> list[str]:
    tracked = git("ls-files").splitlines()
    found = []
    if git("status", "--porcelain"):
        found.append("the tree has changes: commit them first")
    if not dated((ROOT / "CHANGELOG.md").read_text(), name):
        found.append(f"CHANGELOG.md does not date {name}: '## [{name}] - 2027-01-31'")
    if f"v{name}" in git("tag").splitlines():
        found.append(f"the tag v{name} exists: raise __version__ in commpress/__init__.py")
    if not address((ROOT / "pyproject.toml").read_text()).startswith("https://"):
        found.append(
            "the project has no public address: set Repository in [project.urls] of pyproject.toml"
        )
    for pattern, wrong, what in (
        (f"commpress-{name}-*.whl", missing_in, "lacks"),
        (f"commpress-{name}.tar.gz", unknown_in, "has, and git has not,"),
    ):
        built = sorted((ROOT / "dist").glob(pattern))
        if not built:
            found.append(f"dist/ has no {pattern}: run make wheel")
        elif names := wrong(built[0], tracked):
            found.append(f"{built[0].name} {what} {', '.join(names[:5])} ({len(names)} files)")
    return found


def main() -> int:
    name = version()
    if found := problems(name):
        print("\n".join(f"release: {problem}" for problem in found), file=sys.stderr)
        return 1
    git("tag", "--annotate", f"v{name}", "--message", f"commpress {name}")
    print(f"tagged v{name}; publish it:\n  git push origin v{name}\n  twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
