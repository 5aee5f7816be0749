"""Waiting: the order of starts and resumptions, the limit, where exceptions go, closing."""

import gc
import queue
import random
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import codec_named
from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import one_message
from commpress.collectives.transports.staged import Scratch
from commpress.errors import InvalidArgument
from commpress.work import Done, Worker, overlapped, run

SECONDS = 30  # until a thread that should have gone on counts as stuck


class Noted:
    """Work that writes down that somebody waited for it."""

    def __init__(self, log: list, name: object) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(("wait", self.name))


class Gate:
    """Work that is finished when the test says so."""

    def __init__(self) -> None:
        self.event, self.reached = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.event.wait(SECONDS), "the gate stayed shut"


def counting(log, name, waits):
    for i in range(waits):
        log.append(("step", name, i))
        yield Noted(log, (name, i))
    log.append(("end", name))
    return name


def wait(name, i):
    """The entry that ``Noted`` writes."""
    return "wait", (name, i)


def failing(error):
    yield Done()
    raise error


def test_run_waits_for_each_work_before_it_goes_on():
    log = []
    assert run(counting(log, "a", 2)) == "a"
    assert log == [("step", "a", 0), wait("a", 0), ("step", "a", 1), wait("a", 1), ("end", "a")]


def test_run_raises_what_the_work_raises():
    class Broken:
        def wait(self):
            raise OSError("wire cut")

    with pytest.raises(OSError, match="wire cut"):
        run(iter([Broken()]))


def test_overlapped_order_is_fixed():
    """Written out once: two at a time, the oldest wait next, a new job started when one ends."""
    log = []
    jobs = [counting(log, n, w) for n, w in (("a", 1), ("b", 2), ("c", 1))]
    assert run(overlapped(jobs, limit=2)) == ["a", "b", "c"]
    first = [("step", "a", 0), ("step", "b", 0), wait("a", 0), ("end", "a")]
    then = [("step", "c", 0), wait("b", 0), ("step", "b", 1), wait("c", 0), ("end", "c")]
    assert log == [*first, *then, wait("b", 1), ("end", "b")]


@given(waits=st.lists(st.integers(0, 5), max_size=12), limit=st.integers(1, 5))
def test_overlapped_returns_all_results_in_order_and_keeps_the_limit(waits, limit):
    log = []
    results = run(overlapped([counting(log, n, w) for n, w in enumerate(waits)], limit=limit))
    assert results == list(range(len(waits)))
    under_way, most = set(), 0
    for what, name, *_ in log:
        if what == "step":
            under_way.add(name)
        elif what == "end":
            under_way.discard(name)
        most = max(most, len(under_way))
    assert most <= limit
    assert [name for what, name, *i in log if what == "step" and i == [0]] == [
        n for n, w in enumerate(waits) if w
    ]
    assert sum(what == "wait" for what, *_ in log) == sum(waits)


def test_overlapped_raises_the_first_error_and_stops():
    log = []
    with pytest.raises(ValueError, match="third"):
        run(
            overlapped(
                [counting(log, "a", 9), failing(ValueError("third")), counting(log, "c", 1)],
                limit=2,
            )
        )
    assert ("step", "c", 0) not in log


# ---------------------------------------------------------------- Worker


@pytest.fixture
def worker(request):
    made = Worker("tested", limit=getattr(request, "param", 1))
    yield made
    if made._thread.is_alive():
        made.close()


def test_worker_runs_in_one_thread_of_its_name_without_gradients(worker):
    def where():
        yield Done()
        return threading.current_thread().name, torch.is_grad_enabled()

    assert worker.submit(where()).wait() == ("tested", False)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("worker", [1, 3], indirect=True)
def test_worker_starts_as_many_as_the_limit_in_order_of_submission(worker, request):
    """The first job holds the thread until all five are submitted, so the order below does not
    depend on timing. Results are in futures; closing lets jobs finish and ends the thread."""
    limit = request.node.callspec.params["worker"]
    started, doors, hold = [], [Gate() for _ in range(5)], threading.Event()

    def job(n):
        if n == 0:
            assert hold.wait(SECONDS)
        started.append(n)
        yield doors[n]
        return n

    futures = [worker.submit(job(n)) for n in range(5)]
    hold.set()
    for n in (0, 1):
        assert doors[n].reached.wait(SECONDS)
        assert started == list(range(limit + n))
        doors[n].event.set()
    closing = threading.Thread(target=worker.close)
    closing.start()
    for door in doors:
        door.event.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert not worker._thread.is_alive()
    assert [f.wait() for f in futures] == list(range(5))
    with pytest.raises(RuntimeError, match="closed"):  # it would never run
        worker.submit(counting([], "a", 0))


@pytest.mark.parametrize("worker", [1, 2], indirect=True)
def test_after_an_exception_every_job_gets_it(worker):
    """Under way, queued or submitted later: the ranks are out of step, nothing may run on."""
    error, hold, log = ValueError("cause"), threading.Event(), []

    def bad():
        assert hold.wait(SECONDS)
        yield from failing(error)

    jobs = [bad(), counting(log, "under way", 5), counting(log, "c", 1)]
    futures = [worker.submit(job) for job in jobs]
    hold.set()
    for future in futures:
        with pytest.raises(ValueError, match="cause"):
            future.wait()
    with pytest.raises(ValueError, match="cause"):
        worker.submit(counting(log, "later", 1)).wait()
    assert not {("end", "under way"), ("step", "c", 0), ("step", "later", 0)} & set(log)


# --------------------------------------------------------- ranks whose jobs come at different times


class Meeting:
    """A message of everybody to everybody: ``wait`` returns when all ranks have posted it."""

    def __init__(self, posts: dict, name: object, size: int) -> None:
        self.posted, self.all_posted = posts.setdefault(
            name, (queue.SimpleQueue(), threading.Event())
        )
        self.posted.put(None)
        if self.posted.qsize() == size:
            self.all_posted.set()

    def wait(self) -> None:
        assert self.all_posted.wait(SECONDS), "the ranks wait for each other"


def meetings(posts, size, job, waits, log):
    for i in range(waits):
        yield Meeting(posts, (job, i), size)
    log.append(job)
    return job


@pytest.mark.parametrize("told", [True, False])
@given(
    waits=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    limit=st.integers(1, 4),
    size=st.integers(2, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_ranks_never_wait_for_each_other_in_a_circle(told, waits, limit, size, seed):
    """Whatever the number of waits and whenever the jobs arrive on each rank."""
    posts, lock_step = {}, random.Random(seed)
    workers = [Worker(f"rank {r}", limit=limit) for r in range(size)]
    delays = [[lock_step.choice((0.0, 0.0, 0.002)) for _ in waits] for _ in workers]
    logs = [[] for _ in workers]

    def rank(r):
        futures = []
        for job, count in enumerate(waits):
            time.sleep(delays[r][job])
            futures.append(
                workers[r].submit(
                    meetings(posts, size, job, count, logs[r]), waits=count if told else None
                )
            )
        logs[r].append([future.wait() for future in futures])

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.close()
    assert all(log[-1] == list(range(len(waits))) for log in logs)


@pytest.mark.parametrize("worker", [2], indirect=True)
def test_a_job_at_its_last_wait_is_overtaken(worker):
    """It has sent everything, so the next may encode while the wire works."""
    log, gate = [], Gate()

    def hold():
        assert gate.event.wait(SECONDS)
        return (yield from counting(log, "a", 2))

    futures = [worker.submit(hold(), waits=2), worker.submit(counting(log, "b", 2), waits=2)]
    gate.event.set()
    for future in futures:
        future.wait()
    seen = [entry for entry in log if entry[0] != "step"]
    assert seen == [*map(wait, "aba", (0, 0, 1)), ("end", "a"), wait("b", 1), ("end", "b")]


def test_a_job_that_waits_more_often_than_it_said_fails(worker):
    with pytest.raises(RuntimeError, match="more often"):
        worker.submit(counting([], "a", 3), waits=2).wait()


def test_a_worker_that_has_failed_holds_nothing_of_its_jobs(worker):
    """It keeps the error, for jobs that come later; who let go of what the job worked on must be
    rid of it."""

    class Held:
        pass

    def fails(held):
        yield Done()
        raise ValueError("mine")

    held = Held()
    gone = weakref.ref(held)
    with pytest.raises(ValueError, match="mine"):
        worker.submit(fails(held)).wait()
    del held
    gc.collect()
    assert gone() is None


# --------------------------------------------------------- on a GPU, with stand-ins for its streams


class Card:
    """Stand-in for ``torch.cuda``: streams that note what is asked of them."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.callers, self.captures = Note(self, "caller"), False

    def Stream(self, device):
        return Note(self, f"side {device.index}")

    def current_stream(self, device):
        return self.callers

    def is_current_stream_capturing(self):
        return self.captures

    def set_stream(self, stream):
        self.log.append((threading.current_thread().name, "goes to", stream.name))


class Note:
    def __init__(self, card, name) -> None:
        self.card, self.name = card, name

    def wait_stream(self, other):
        self.card.log.append((self.name, "waits for", other.name))

    def record_event(self):
        return f"end of {self.name}"

    def wait_event(self, event):
        self.card.log.append((self.name, "waits for", event))


class OnCard:
    """Stand-in for a tensor."""

    def __init__(self, card, index=0) -> None:
        self.card, self.device = card, torch.device("cuda", index)

    def record_stream(self, stream):
        self.card.log.append(("memory", "is in use by", stream.name))


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr("commpress.work.torch.cuda", card)
    return card


def test_a_job_on_a_card_runs_between_what_its_caller_queued_before_and_after(
    card, worker, monkeypatch
):
    """Its tensors stay until its stream has used them, and what it made until the caller's has,
    where that is on the same card. The host waits for nothing."""
    monkeypatch.setattr("commpress.work.torch.Tensor", OnCard)
    made = [OnCard(card), (OnCard(card, 1), "no tensor")]

    def making():
        yield Done()
        return made

    assert worker.submit(making(), OnCard(card)).wait() is made
    side = ("tested", "goes to", "side 0")
    assert card.log == [
        ("side 0", "waits for", "caller"),
        ("memory", "is in use by", "side 0"),
        side,
        side,
        ("caller", "waits for", "end of side 0"),
        ("memory", "is in use by", "caller"),
    ]


def test_each_card_has_a_stream_of_its_own_and_the_processor_none(card, worker):
    for tensor in (OnCard(card, 0), OnCard(card, 1), OnCard(card, 0), torch.ones(1)):
        worker.submit(counting([], "a", 0), tensor).wait()
    found = [stream for who, what, stream in card.log if what == "goes to"]
    assert found == ["side 0", "side 1", "side 0"]
    card.captures = True
    with pytest.raises(InvalidArgument, match="CUDA graph"):
        worker.submit(counting([], "a", 0), OnCard(card))


MESSAGE = one_message(100, codec_named("sign"), 2)
POOLS = {
    "borrow": (
        lambda w: w.borrow(10, torch.float32, torch.device("cpu")),
        lambda w, got: w.give_back(got),
    ),
    "lend": (
        lambda w: w.lend(10, torch.float32, torch.device("cpu")),
        lambda w, got: w.take_back(got),
    ),
    "rows": (lambda w: w.rows(80, 2, torch.device("cpu")), lambda w, got: w.give_rows(got)),
    "residual": (
        lambda w: w.residual(MESSAGE, torch.device("cpu")),
        lambda w, got: w.give_residual(MESSAGE, got),
    ),
    "scratch": (lambda w: w.take(80, torch.device("cpu")), lambda w, got: w.give(got)),
}


@pytest.mark.parametrize("kind", POOLS)
def test_who_gets_a_buffer_waits_for_the_stream_of_who_gave_it_back(monkeypatch, kind):
    """A worker gives back what its side stream still writes; another thread gets it at once."""
    log: list[tuple[str, str]] = []

    class Event:
        def __init__(self) -> None:
            self.of = threading.current_thread().name

        def synchronize(self):
            log.append((threading.current_thread().name, self.of))

    class Stream:
        def record_event(self):
            return Event()

        def wait_event(self, event):
            event.synchronize()

    monkeypatch.setattr("commpress.work.stream_of", lambda device: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    take, give = POOLS[kind]
    pool = Scratch() if kind == "scratch" else Workspace()

    def there_and_back(name):
        def go():
            got = take(pool)
            seen.append(id(got) if kind == "residual" else got.data_ptr())
            give(pool, got)

        thread = threading.Thread(target=go, name=name)
        thread.start()
        thread.join()

    seen: list[int] = []
    there_and_back("worker")
    assert log == [], "a new one is nobody's"
    there_and_back("autograd")
    assert seen[0] == seen[1]
    assert log == [("autograd", "worker")]
