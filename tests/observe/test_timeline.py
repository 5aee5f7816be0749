"""The timeline: its file, and what parts of a run draw on it."""

import json
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument
from commpress.timeline import Timeline, merge_timelines


def read(path):
    return json.loads(path.read_text())["traceEvents"]


def complete(events, name=""):
    return [e for e in events if e["ph"] == "X" and e["name"].startswith(name)]


def flights(events, name=""):
    """(begin, end) of every flight, matched by id."""
    begun = {e["id"]: e for e in events if e["ph"] == "b" and e["name"].startswith(name)}
    ended = {e["id"]: e for e in events if e["ph"] == "e"}
    assert begun.keys() <= ended.keys(), "a flight without an end"
    return [(b, ended[number]) for number, b in begun.items()]


def check_format(events):
    """The format's demands hold: spans of one track nest or follow each other; events are in order
    of time."""
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in "MXbe"
        assert event.get("dur", 0) >= 0
    tracks = {}
    for event in complete(events):
        tracks.setdefault((event["pid"], event["tid"]), []).append(
            (event["ts"], event["ts"] + event["dur"])
        )
    for spans in tracks.values():
        open_until = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, "spans of one thread cross"
            open_until.append(end)
    for begin, end in flights(events):
        assert begin["ts"] <= end["ts"]
        assert begin["name"] == end["name"]


def test_spans_nest_and_flights_overlap(tmp_path):
    timeline = Timeline(rank=3)
    with timeline.during("outer"):
        first = time.perf_counter()
        with timeline.during("inner"):
            second = time.perf_counter()
        timeline.flight("wire", first, what={"bytes": 7})
    timeline.flight("wire", second)
    other = threading.Thread(
        target=lambda: timeline.span("elsewhere", time.perf_counter()), name="other"
    )
    other.start()
    other.join()
    timeline.save(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    check_format(events)
    (outer,), (inner,), (elsewhere,) = (
        complete(events, name) for name in ("outer", "inner", "elsewhere")
    )
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert elsewhere["tid"] != outer["tid"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"rank 3", "other"}
    a, b = flights(events)
    assert b[0]["ts"] < a[1]["ts"] < b[1]["ts"], "they overlap"
    assert a[0]["args"] == {"bytes": 7}
    assert abs(outer["ts"] / 1e6 - time.time()) < 60, "wall-clock time"


def test_a_full_timeline_drops_and_says_so(tmp_path):
    timeline = Timeline(limit=2)
    for _ in range(5):
        timeline.span("x", 0.0, 1.0)
    timeline.save(tmp_path / "full.json")
    assert len(timeline) == 2
    assert json.loads((tmp_path / "full.json").read_text())["otherData"]["dropped"] == 3


def test_ranks_in_one_file(tmp_path):
    for rank in range(2):
        timeline = Timeline(rank)
        timeline.flight("wire", 1.0, 2.0)
        timeline.save(tmp_path / f"{rank}.json")
    merge_timelines([tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json")
    events = read(tmp_path / "all.json")
    check_format(events)
    assert len({e["id"] for e in events if e["ph"] == "b"}) == 2


# ---------------------------------------------------------------- parts of a run


def train(folder, rank_file):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    )
    state = commpress.compress(model, codec="sign", min_numel=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timeline = Timeline(dist.get_rank())
    store = commpress.TieredStore.open(
        f"{folder}/store{dist.get_rank()}", host="1MiB", engine="threads"
    )
    for i in range(2):
        store.put(f"t{i}", torch.zeros(150_000))  # one of them fits into memory
    with store, commpress.watch(timeline, state, store=store, model=model, optimizer=optimizer):
        with pytest.raises(InvalidArgument, match="watched already"):
            commpress.watch(timeline, state)
        for step in range(3):
            with timeline.during("step"):
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with store.borrow(f"t{step % 2}") as tensor:
                    tensor.add_(1)
        read_bytes, written_bytes = store.traffic()
    seen = len(timeline)
    model(torch.randn(4, 64)).square().mean().backward()
    assert len(timeline) == seen, "the watch has ended"
    timeline.save(f"{folder}/{rank_file.format(dist.get_rank())}")
    return read_bytes, written_bytes


def test_encode_wire_decode_disk_and_compute_on_one_timeline(pool, tmp_path):
    traffic = pool.run(train, str(tmp_path), "{}.json", size=2)
    events = read(tmp_path / "0.json")
    check_format(events)
    for name in (
        "encode",
        "decode",
        "compute: forward",
        "compute: backward",
        "compute: optimizer",
        "stall",
    ):
        assert complete(events, name), name
    assert (
        len(complete(events, "compute: forward")) == len(complete(events, "compute: backward")) == 3
    )
    gathers, scatters = flights(events, "wire: all-gather"), flights(events, "wire: all-to-all")
    assert len(gathers) == len(scatters) >= 3
    assert all(begin["args"]["bytes"] > 0 for begin, _ in gathers)
    scattered = {begin["args"]["sequence"]: end["ts"] for begin, end in scatters}
    assert all(scattered[begin["args"]["sequence"]] <= begin["ts"] for begin, _ in gathers), (
        "phase two after phase one"
    )
    encode, step = (
        min(complete(events, "encode"), key=lambda e: e["ts"]),
        complete(events, "step")[0],
    )
    assert step["ts"] <= encode["ts"] <= step["ts"] + step["dur"]
    assert encode["tid"] != step["tid"], "in the background"
    backward = complete(events, "compute: backward")[0]
    assert step["ts"] <= backward["ts"]
    assert backward["ts"] + backward["dur"] <= step["ts"] + step["dur"]
    for verb, total in zip(("read", "write"), traffic[0], strict=True):
        moved = sum(begin["args"]["bytes"] for begin, _ in flights(events, f"disk: {verb}"))
        assert 0 < moved <= total


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(InvalidArgument, match="state is a int"):
        commpress.watch(Timeline(), 7)
