"""Small faults put into a copy of the package one after the other: some test must notice each. ``make mutants`` runs them.

A mutant that no longer applies, because its line has changed, counts as a failure: write it anew.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("collectives", "integrations", "kernels", "tiered_mem")  # below commpress, as imports say
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "site")


class Mutant(NamedTuple):
    fault: str
    file: str
    line: str  # part of a line, or some lines, that the file holds once
    becomes: str
    tests: str  # that notice


MUTANTS = [
    Mutant(
        "the residual keeps what was sent", "commpress/feedback.py",
        "            setattr(self, name, theirs)\n            setattr(other, name, mine)",
        "            setattr(self, name, mine)\n            setattr(other, name, theirs)",
        "tests/test_allreduce.py",
    ),
    Mutant(
        "a mean that is not finite is committed", "collectives/allreduce.py",
        "    if outcome.finite:\n        outcome.commit()\n    return outcome.finite",
        "    outcome.commit()\n    return outcome.finite",
        "tests/test_allreduce.py",
    ),
    Mutant(
        "both directions draw the same noise", "collectives/allreduce.py",
        "direction * 0xC2B2AE35", "0 * direction", "tests/test_allreduce.py",
    ),
    Mutant(
        "all ranks draw the same noise", "collectives/allreduce.py", "rank * 0x85EBCA6B", "0 * rank", "tests/test_allreduce.py",
    ),
    Mutant(
        "what is owed is paid twice", "commpress/feedback.py",
        "                sent.zero_()\n                reduced.zero_()", "                sent.zero_()",
        "tests/test_feedback.py",
    ),
]  # fmt: skip


def copy(folder: Path) -> Path:
    """A checkout of its own whose imports resolve inside it; returns what goes on PYTHONPATH."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True)
    for name in FOLDERS:
        if not (folder / "commpress" / name).exists():
            (folder / "commpress" / name).symlink_to(Path("..", name))
    site = folder / "site"
    site.mkdir()
    (site / "commpress").symlink_to(Path("..", "commpress"))
    return site


def outcome(mutant: Mutant, folder: Path) -> str:
    """``killed``, or a word about why not. The file is as it was afterwards."""
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.line) != 1:
        return f"DOES NOT APPLY: {mutant.file} holds its line {text.count(mutant.line)} times"
    file.write_text(text.replace(mutant.line, mutant.becomes))
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable.replace("python3", "python"), "-c", "import pytest; raise SystemExit(pytest.console_main())"]
    try:
        done = subprocess.run(
            [*command, "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "killed, by a hang"
    finally:
        file.write_text(text)
    if done.returncode == 1:
        return "killed"
    if done.returncode == 0:
        return "SURVIVES"
    return f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-1000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", metavar="WORD", help="only mutants whose fault or file holds this word")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout, each with a mutant at a time (default 2)")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.k in m.fault or options.k in m.file]
    survivors = 0
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(options.jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            folders.put(copy(Path(top, str(number))).parent)

        def one(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return outcome(mutant, folder)
            finally:
                folders.put(folder)

        for mutant, verdict in zip(chosen, pool.map(one, chosen), strict=True):
            survivors += not verdict.startswith("killed")
            print(f"{verdict:10} {mutant.file}: {mutant.fault}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
