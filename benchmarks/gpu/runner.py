"""Steps, each in a process of its own with a limit of time: one that fails or hangs costs nobody
else anything.

Processes are forked from one that has torch loaded and has not touched CUDA, so that none of them
imports it again.
"""

import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu.machine import Card, Machine, Twin

TAIL = 1500  # characters of a log that say why


@dataclass(frozen=True)
class Figure:
    """One number, and what it must be."""

    what: str
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    bound: Literal["least", "most"] = "least"
    error: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """``value`` over ``limit``."""
        return None if self.value is None or not self.limit else self.value / self.limit

    @property
    def holds(self) -> bool | None:
        """None where nothing is required."""
        if self.error:
            return False
        if self.limit is None or self.value is None:
            return None
        return self.value >= self.limit if self.bound == "least" else self.value <= self.limit


class Report:
    """Lines to whoever runs a step: what it has measured, as soon as it has."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __call__(
        self,
        what: str,
        value: float,
        unit: str = "",
        *,
        limit: float | None = None,
        bound: Literal["least", "most"] = "least",
        note: str = "",
    ) -> None:
        self._send(what=what, value=float(value), unit=unit, limit=limit, bound=bound, note=note)

    @contextmanager
    def line(self, what: str, *, must: bool = True) -> Iterator[None]:
        """A part of the step: if it fails that is told, and the step goes on. ``must``: the step
        does not hold then."""
        try:
            yield
        except (Exception, SystemExit) as error:  # ranks of its own that failed end with the latter
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}"[:TAIL]
            self._send(what=what, **({"error": told} if must else {"note": f"not here: {told}"}))

    def _send(self, **figure: Any) -> None:
        os.write(self._pipe, json.dumps(figure).encode() + b"\n")


@dataclass(frozen=True)
class Step:
    name: str
    run: Callable[[Machine, Report], None]
    limit: int  # seconds
    part: int = 1

    @property
    def about(self) -> str:
        return (self.run.__doc__ or "").partition("\n")[0]


@dataclass
class Result:
    """Outcome of a step: one line of the file."""

    step: str
    part: int
    limit_seconds: int
    status: Literal["ok", "failed", "out of time"] = "ok"
    seconds: float = 0.0
    why: str = ""
    figures: list[Figure] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if it ran to its end and no figure missed its limit."""
        return self.status == "ok" and all(figure.holds is not False for figure in self.figures)


def run(step: Step, *, twin: bool, folder: Path) -> Result:
    """A process for ``step``, its log in ``folder``; what it said until it ended or its time was
    up."""
    result, log, start = (
        Result(step.name, step.part, step.limit),
        folder / f"{step.name}.log",
        time.monotonic(),
    )
    sys.stdout.flush()
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        os._exit(_act(step, twin, log, writing))
    os.close(writing)
    said, status = b"", None
    while status is None:
        heard, *_ = select.select([reading], [], [], 0.02)
        said += os.read(reading, 1 << 16) if heard else b""
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() - start > step.limit:
            status = _end(process)
            result.status = "out of time"
    while select.select([reading], [], [], 0)[0] and (more := os.read(reading, 1 << 16)):
        said += more
    os.close(reading)
    _kill(process)  # ranks that it left behind
    result.seconds = round(time.monotonic() - start, 2)
    result.figures = [Figure(**json.loads(line)) for line in said.splitlines()]
    if status != 0 and result.status == "ok":
        result.status = "failed"
    if result.status != "ok":
        before, here, where = log.read_text(errors="replace").partition("Current thread")
        result.why = (where[:TAIL] if here else before[-TAIL:]).strip()
    return result


def _end(process: int) -> int:
    """Let it and its ranks say where they are, then kill them."""
    os.killpg(process, signal.SIGUSR1)
    time.sleep(0.3)
    _kill(process)
    os.waitpid(process, 0)
    return -signal.SIGKILL


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _act(step: Step, twin: bool, log: Path, pipe: int) -> int:
    os.setsid()
    with open(log, "w", buffering=1) as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            step.run(Twin() if twin else Card(), Report(pipe))
            return 0
        except BaseException:
            traceback.print_exc()
            return 1
