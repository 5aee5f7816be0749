"""Three deaths of the benchmark ``chaos`` beside all other tests: its ranks sleep most of the time,
and no test should."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import sources

SECONDS = 280  # until a soak that has not ended hangs
COMMAND = [sys.executable, str(sources.ROOT / "benchmarks"), "chaos", "--seconds", "48"]
FAULTS = "12 kill 1\n22 kill 3\n32 kill 0\n"
# Nobody's child: a test that runs chaos itself ends all descendants that have come meanwhile.
ALONE = (
    '("$@" >"$0-said" 2>&1 & echo $! >"$0-pid"; wait $!; echo $? >"$0-draft"; mv "$0-draft" '
    '"$0-status") &'
)


class Soak:
    """One for all workers, of which one begins it: the others read in ``folder`` how it ended."""

    def __init__(self, folder: Path) -> None:
        self._begun, self._place = False, folder / "soak"

    def begin_for(self, items: Iterable[pytest.Item]) -> None:
        """If one of these tests waits for its end."""
        self._begun = any(
            "soak" in item.fixturenames for item in items if isinstance(item, pytest.Function)
        )
        if self._begun:
            faults, report = self._file("faults"), self._file("report")
            faults.write_text(FAULTS)
            files = ["--schedule", str(faults), "--json", str(report)]
            subprocess.run(["sh", "-c", ALONE, str(self._place), *COMMAND, *files], check=True)

    def result(self) -> tuple[int, dict[str, Any], str]:
        """Exit status, report, and what was printed."""
        self._wait()
        status, report, said = (
            self._file(name).read_text() for name in ("status", "report", "said")
        )
        return int(status), json.loads(report), said

    def end(self, *, early: bool) -> None:
        """Another worker may wait for it, unless the tests end ``early``."""
        if self._begun:
            if early:
                with suppress(ProcessLookupError):
                    os.kill(int(self._file("pid").read_text()), signal.SIGTERM)
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + SECONDS
        while not self._file("status").exists():
            assert time.monotonic() < until, self._file("said").read_text()
            time.sleep(0.05)

    def _file(self, name: str) -> Path:
        return self._place.with_name(f"soak-{name}")
