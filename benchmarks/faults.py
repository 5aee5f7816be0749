"""errors that survivors see: every call of a process group against every fault

Three local processes form a group over the backend "commpress". The last one is killed or stopped,
or calls with another shape, dtype, codec, or another operation. The other two report the exception,
whom it names, and after how many seconds; then both destroy the group, and build another one of the
two of them, to show that they can go on.

  python benchmarks faults                        all of it, about three minutes
  python benchmarks faults --calls all_reduce     one row
  python benchmarks faults --docs docs/backend.md its table in the page
"""

import argparse
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from commpress.cli import harness, terminal
from commpress.cli.option_groups import option
from commpress.errors import CommunicationError, InvalidArgument
from commpress.integrations.process_group.group_options import GroupOptions
from commpress.torch_private import all_gather_single, reduce_scatter_single

MARK = "<!-- python benchmarks faults enters its table below -->"
RANKS = 3
FAULTY = RANKS - 1
ANYBODY, COMPRESSED = "recv, any source", "all_reduce, compressed"
FAULTS = ("kill -9", "SIGSTOP", "wrong shape", "wrong dtype", "wrong op", "wrong codec")
NUMEL = 4096
TIMES = 40  # before the one that is wrong, where calls are repeated
PATIENCE = 60.0  # seconds beyond the timeout, until a survivor counts as hanging


@dataclass
class Seen:
    """By one survivor."""

    error: str  # name of the exception's type
    ranks: tuple[int, ...]
    seconds: float
    text: str
    went_on: bool  # a new group of the survivors works


@dataclass
class Case:
    call: str
    fault: str
    seen: list[Seen | None]  # None: it hung or died

    def holds(self, limit: float) -> bool:
        return all(
            s is not None and self._named(s) and s.seconds <= limit and s.went_on for s in self.seen
        )

    def _named(self, seen: Seen) -> bool:
        """A rank that receives from anybody may first hear that the other two disagree, and from
        which is chance."""
        one_of_two = self.call == ANYBODY and seen.error == "Mismatch" and len(seen.ranks) == 1
        return seen.error in ("Mismatch", "PeerFailure") and (one_of_two or seen.ranks == (FAULTY,))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument(
        "--faults", nargs="+", metavar="NAME", choices=FAULTS, help=f"of {', '.join(FAULTS)}"
    )
    option(parser, "--timeout S", float, 3.0, "of the group, in seconds")
    option(parser, "--docs FILE", says="enter the table into a page, such as docs/backend.md")
    option(parser, "--json FILE", says="everything seen, with the texts of the errors")


def run(options: argparse.Namespace) -> int:
    names = [*CALLS, COMPRESSED]
    for name in options.calls or ():
        if name not in names:
            raise InvalidArgument(
                f"call is {name!r}, expected one of {', '.join(map(repr, names))}"
            )
    import_module("commpress.backend")
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    calls, faults = options.calls or names, options.faults or list(FAULTS)
    cases = []
    print(terminal.line(["call", *faults], _widths(len(faults))), flush=True)
    for call in calls:
        row = [observe(call, fault, options.timeout) for fault in faults if applies(call, fault)]
        cases += row
        cells = {case.fault: cell(case) for case in row}
        print(
            terminal.line([call, *(cells.get(f, "-") for f in faults)], _widths(len(faults))),
            flush=True,
        )
    limit = options.timeout + 1
    if options.docs:
        page = Path(options.docs)
        page.write_text(entered(page.read_text(), table(cases, calls)))
    if options.json:
        terminal.write_json(options.json, [asdict(case) for case in cases])
    bad = [f"{case.call} / {case.fault}" for case in cases if not case.holds(limit)]
    what = (
        f"{len(cases)} cases: typed, the right rank named by all, within {limit:g} s, and a new "
        "group works"
    )
    return harness.verdict([(what + (f"; not: {', '.join(bad)}" if bad else ""), not bad)])


def cell(case: Case) -> str:
    if any(s is None for s in case.seen):
        return "hung or died"
    seen = [s for s in case.seen if s is not None]
    kinds = "/".join(dict.fromkeys(s.error for s in seen))
    named = "/".join(dict.fromkeys(",".join(map(str, s.ranks)) or "nobody" for s in seen))
    return f"{kinds} {named} {max(s.seconds for s in seen):.2f} s" + (
        "" if all(s.went_on for s in seen) else " stuck"
    )


def table(cases: list[Case], calls: list[str]) -> str:
    """Seconds until the expected error that names rank 2, of wrong calls the longest; all that was
    seen where it was another."""
    columns = {"kill -9": "PeerFailure", "SIGSTOP": "PeerFailure", "wrong": "Mismatch"}
    lines = ["| call | kill -9 | SIGSTOP | a wrong call |", "| --- | --- | --- | --- |"]
    for call in calls:
        row = [call]
        for fault, error in columns.items():
            seen = [cell(c) for c in cases if c.call == call and c.fault.startswith(fault)]
            good = [re.fullmatch(rf"{error} {FAULTY} (\d+\.\d+ s)", each) for each in seen]
            row.append(
                max((m[1] for m in good if m), key=lambda s: float(s[:-2]), default="–")
                if all(good)
                else "; ".join(each for each, m in zip(seen, good, strict=True) if not m)
            )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def entered(page: str, table: str) -> str:
    """The page, its table behind the mark replaced by this one."""
    before, mark, after = page.partition(f"{MARK}\n\n")
    if not mark:
        raise InvalidArgument(
            f"the page of --docs has no line {MARK!r}: put it where the table goes"
        )
    return before + mark + table + re.sub(r"\A(\|.*\n)*", "", after)


def _widths(faults: int) -> list[int]:
    return [33] + [22] * faults


# ---------------------------------------------------------------- one case


def observe(call: str, fault: str, timeout: float) -> Case:
    """Forked processes: they start in milliseconds, and this one runs no threads yet that a fork
    would lose."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="commpress-") as folder:
        pipes: list[Connection] = []
        processes: list[Any] = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, folder, call, fault, timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for pipe in pipes:
                pipe.recv()  # all have met
            if fault in ("kill -9", "SIGSTOP"):
                os.kill(
                    processes[FAULTY].pid, signal.SIGKILL if fault == "kill -9" else signal.SIGSTOP
                )
            for pipe in pipes[:FAULTY] if fault in ("kill -9", "SIGSTOP") else pipes:
                pipe.send("go")
            return Case(call, fault, [_answer(pipe, timeout + PATIENCE) for pipe in pipes[:FAULTY]])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(pipe: Connection, seconds: float) -> Seen | None:
    if not wait([pipe], seconds):
        return None
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(rank: int, folder: str, call: str, fault: str, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    options = None
    if call == COMPRESSED:
        codec = "int8" if rank == FAULTY and fault == "wrong codec" else "bf16"
        options = GroupOptions(codec, min_numel=1, only="everything")
    _join(folder, "first", rank, RANKS, timeout, options)
    make("barrier" if fault == "wrong codec" else call, None)
    pipe.send("ready")
    pipe.recv()
    start = time.monotonic()
    try:
        make(call, fault if rank == FAULTY else None)
        error: Exception = RuntimeError("no error")
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - start
    if rank == FAULTY:
        time.sleep(timeout)
        return
    dist.destroy_process_group()
    ranks = error.ranks if isinstance(error, CommunicationError) else ()
    pipe.send(Seen(type(error).__name__, ranks, seconds, str(error), _goes_on(folder, rank)))


def _goes_on(folder: str, rank: int) -> bool:
    _join(folder, "second", rank, FAULTY, 30.0, None)
    tensor = torch.full((8,), rank + 1.0)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist() == [3.0] * 8


def _join(folder: str, name: str, rank: int, size: int, timeout: float, options: Any) -> None:
    where = f"file://{Path(folder) / name}"
    dist.init_process_group(
        "commpress",
        init_method=where,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        pg_options=options,
    )


# --------------------------------------- every call as it is made right, and made wrong by one rank


Call = Callable[[int, torch.dtype], object]


def _ones(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


def _rows(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [_ones(numel, dtype) for _ in range(dist.get_world_size())]


def _all(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(_rows(numel, dtype))


def _on_first(numel: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
    return _rows(numel, dtype) if dist.get_rank() == 0 else None


def _all_reduce(n: int, d: torch.dtype) -> None:
    dist.all_reduce(_ones(n, d))


def _async(n: int, d: torch.dtype) -> None:
    dist.all_reduce(_ones(n, d), async_op=True).wait()


def _broadcast(n: int, d: torch.dtype) -> None:
    dist.broadcast(_ones(n, d), 0)


def _reduce(n: int, d: torch.dtype) -> None:
    dist.reduce(_ones(n, d), 0)


def _gather_single(n: int, d: torch.dtype) -> None:
    all_gather_single(_all(n, d), _ones(n, d))


def _scatter_single(n: int, d: torch.dtype) -> None:
    reduce_scatter_single(_ones(n, d), _all(n, d))


def _with_the_last(
    mine: Callable[..., object], its: Callable[..., Any], n: int, dtype: torch.dtype
) -> None:
    """Everybody with the last rank."""
    last = dist.get_world_size() - 1
    if dist.get_rank() < last:
        mine(_ones(n, dtype), last)
        return
    for work in [its(_ones(n, dtype), r) for r in range(last)]:
        work.wait()


def _recv_any(n: int, dtype: torch.dtype) -> None:
    _with_the_last(lambda tensor, _: dist.recv(tensor), dist.isend, n, dtype)


def _repeated(call: Call, n: int, dtype: torch.dtype) -> None:
    for _ in range(TIMES):
        call(n, dtype)


def _coalesced(call: Call, second: int, n: int, dtype: torch.dtype) -> None:
    """Two calls at once, of which the second has so many times the elements."""
    with _coalescing_manager():
        call(n, dtype)
        call(second * n, dtype)


CALLS: dict[str, Call] = {
    "all_reduce": _all_reduce,
    "all_reduce, async": _async,
    "all_reduce, repeated": partial(_repeated, _all_reduce),
    "all_reduce, async, repeated": partial(_repeated, _async),
    "all_reduce, coalesced": partial(_coalesced, _all_reduce, 2),
    "broadcast": _broadcast,
    "broadcast, repeated": partial(_repeated, _broadcast),
    "reduce": _reduce,
    "all_gather": lambda n, d: dist.all_gather(_rows(n, d), _ones(n, d)),
    "all_gather_single": _gather_single,
    "all_gather_single, coalesced": partial(_coalesced, _gather_single, 1),
    "gather": lambda n, d: dist.gather(_ones(n, d), _on_first(n, d), dst=0),
    "scatter": lambda n, d: dist.scatter(_ones(n, d), _on_first(n, d), src=0),
    "reduce_scatter": lambda n, d: dist.reduce_scatter(_ones(n, d), _rows(n, d)),
    "reduce_scatter_single": _scatter_single,
    "reduce_scatter_single, coalesced": partial(_coalesced, _scatter_single, 1),
    # over the group itself: torch's function refuses lists of tensors on anything but NCCL and MPI
    # by its name
    "all_to_all": lambda n, d: dist.group.WORLD.alltoall(_rows(n, d), _rows(n, d)).wait(),  # type: ignore[union-attr]
    "all_to_all_single": lambda n, d: dist.all_to_all_single(_all(n, d), _all(n, d)),
    "barrier": lambda n, d: dist.barrier(),
    "send": partial(_with_the_last, dist.send, dist.irecv),
    "recv": partial(_with_the_last, dist.recv, dist.isend),
    ANYBODY: _recv_any,
}


def applies(call: str, fault: str) -> bool:
    """A barrier has no shape, and only a compressed call has a codec."""
    if fault == "wrong codec":
        return call == COMPRESSED
    return call != "barrier" or fault not in ("wrong shape", "wrong dtype")


def make(call: str, fault: str | None) -> None:
    """The call, or what a rank does that gets it wrong in this way. Signals come from outside."""
    name = "all_reduce" if call == COMPRESSED else call
    right = CALLS[name]
    if fault == "wrong shape":
        right(2 * NUMEL, torch.float32)
    elif fault == "wrong dtype":
        right(NUMEL, torch.float64 if call != COMPRESSED else torch.bfloat16)
    elif fault == "wrong op":
        (_reduce if name.startswith(("broadcast", "barrier")) else _broadcast)(NUMEL, torch.float32)
    else:
        right(NUMEL, torch.float32)
