"""Timelines: the spans of a process, saved in the format of Perfetto and chrome://tracing.

Objects that record spans have an attribute ``timeline``, which is None until ``watch`` sets it.
Recording appends to a list, which needs no lock.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

LIMIT = 1_000_000  # spans, of some 200 bytes each


class Timeline:
    """Record spans by ``time.perf_counter``; ``save`` converts to wall-clock time, so that files of
    several ranks can be merged.

    A ``span`` appears on the track of the thread that recorded it, and spans of one thread nest. A
    ``flight`` goes on while its thread does other things, and flights may overlap.

    - ``rank``: rank of this process among merged files.
    - ``limit``: most spans to keep; ``dropped`` counts the others.
    """

    def __init__(self, rank: int = 0, *, limit: int = LIMIT) -> None:
        self.rank, self.limit, self.dropped = rank, limit, 0
        self._spans: list[tuple[str, str, float, float, int, dict[str, Any] | None]] = []
        self._threads: dict[int, str] = {}
        self._epoch = time.time() - time.perf_counter()

    def span(
        self, name: str, start: float, end: float | None = None, what: dict[str, Any] | None = None
    ) -> None:
        self._add("X", name, start, time.perf_counter() if end is None else end, what)

    def flight(
        self, name: str, start: float, end: float | None = None, what: dict[str, Any] | None = None
    ) -> None:
        self._add("b", name, start, time.perf_counter() if end is None else end, what)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record a span around the ``with`` block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.span(name, start)

    def _add(
        self, kind: str, name: str, start: float, end: float, what: dict[str, Any] | None
    ) -> None:
        if len(self._spans) >= self.limit:
            self.dropped += 1
            return
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self._spans.append((kind, name, start, end, thread, what))

    def __len__(self) -> int:
        return len(self._spans)

    # ------------------------------------------------------------ files

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the trace format, in microseconds: a span is one "X", a flight a
        pair of "b" and "e"."""
        tracks = {thread: i for i, thread in enumerate(self._threads)}
        found = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": self.rank,
                "tid": 0,
                "args": {"name": f"rank {self.rank}"},
            },
            *(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": self.rank,
                    "tid": i,
                    "args": {"name": self._threads[thread]},
                }
                for thread, i in tracks.items()
            ),
        ]
        numbers = count()
        for kind, name, start, end, thread, what in list(self._spans):
            at, until = 1e6 * (self._epoch + start), 1e6 * (self._epoch + end)
            event = {
                "ph": kind,
                "name": name,
                "cat": name.split()[0],
                "pid": self.rank,
                "tid": tracks[thread],
                "ts": at,
            }
            if what:
                event["args"] = what
            if kind == "X":
                found.append(event | {"dur": until - at})
            else:
                number = f"{self.rank}.{next(numbers)}"  # unique in a merged file
                found += [event | {"id": number}, event | {"ph": "e", "ts": until, "id": number}]
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file for Perfetto or chrome://tracing."""
        write_events(path, self.events(), {"rank": self.rank, "dropped": self.dropped})


def merge_timelines(files: Iterable[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Merge the files of all ranks into one. Ranks of several machines are aligned as well as their
    wall clocks are."""
    events: list[dict[str, Any]] = []
    dropped = 0
    for file in files:
        content = json.loads(Path(file).read_text())
        events += content["traceEvents"]
        dropped += content["otherData"]["dropped"]
    write_events(path, events, {"dropped": dropped})


def write_events(
    path: str | os.PathLike[str], events: list[dict[str, Any]], other: dict[str, Any]
) -> None:
    events = sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    content = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    Path(path).write_text(json.dumps(content, separators=(",", ":")) + "\n")
