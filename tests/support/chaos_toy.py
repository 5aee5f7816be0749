"""A training that is none: its ranks commit steps by the clock, and write events as an elastic loop
does. Needs no torch."""

import json
import os
import sys
import time

PACE = 0.02  # seconds a step


def main() -> None:
    """Arguments: a folder for what ranks share; faults of the toy's own as NAME=VALUE."""
    folder, *faults = sys.argv[1:]
    wrong = dict(fault.split("=") for fault in faults)
    start = begin(folder)
    newcomer = "COMMPRESS_JOIN" in os.environ
    name = os.path.basename(os.environ["COMMPRESS_EVENTS"])  # rank1.0.jsonl
    rank = int(name[4])
    events = os.open(os.environ["COMMPRESS_EVENTS"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    step = int((time.monotonic() - start) / PACE) if newcomer else 0
    while True:
        step += 1
        time.sleep(max(start + step * PACE - time.monotonic(), 0))
        if "hangs" in wrong and step == int(wrong["hangs"]):
            time.sleep(3600)
        if "ends" in wrong and step == int(wrong["ends"]) and rank == 0:
            sys.exit("commpress.errors.PeerFailure: rank 1 died")
        if "skips" in wrong and step == int(wrong["skips"]):
            continue
        odd = "unequal" in wrong and rank == 1 and step == int(wrong["unequal"])
        first = 8 * step + 2 * rank
        event = {
            "time": time.time(),
            "clock": time.monotonic(),
            "pid": os.getpid(),
            "rank": rank,
            "size": 4,
            "epoch": 0,
            "kind": "commit",
            "step": step,
            "hash": f"{step}{'!' if odd else ''}",
            "samples": [first, first + 2] if "samples" in wrong else None,
        }
        os.write(events, json.dumps(event).encode() + b"\n")
        if "twice" in wrong and step == int(wrong["twice"]):
            os.write(events, json.dumps(event).encode() + b"\n")


def begin(folder: str) -> float:
    """The clock when the first rank began."""
    path = os.path.join(folder, "begin")
    try:
        with open(path, "x") as file:
            file.write(repr(time.monotonic() + 0.5))
    except FileExistsError:
        time.sleep(0.1)
    with open(path) as file:
        return float(file.read())


if __name__ == "__main__":
    main()
