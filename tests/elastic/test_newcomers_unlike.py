"""Newcomers that are unlike the members are refused at the door, by name, and the members do not
notice."""

import itertools
import select
import socket
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import commpress
import commpress.backend
from commpress.collectives.transports.connection import Conversation
from commpress.collectives.transports.epochs import OTHER_VERSION, Terms
from commpress.collectives.transports.meeting import JOIN, STRANGERS, knock
from commpress.collectives.transports.membership import place_of
from commpress.errors import InvalidArgument
from commpress.integrations.elastic import description as descriptions
from test_epochs import alone, close, together

WITHIN = timedelta(seconds=60)
UNLIKE = {
    "batch_size": ("data.batch_size is 8, the members have 4", {"batch": 8}),
    "accumulation": ("data: batches in a step is 2, the members have 1", {"loaded": 2}),
    "samples": ("data.samples is 400, the members have 480", {"samples": 400}),
    "shuffle": ("data.shuffle is False, the members have True", {"sampler": {"shuffle": False}}),
    "drop_last": (
        "data.drop_last is True, the members have False",
        {"sampler": {"drop_last": True}},
    ),
    "seed": ("data.seed is 1, the members have 0", {"sampler": {"seed": 1}}),
    "sampler": ("data is Own, the members have ElasticSampler", {"kind": "Own"}),
    "hook": ("hook is none, the members have CompressedState", {"codec": None}),
    "codec": ("codec is 'int8', the members have 'sign'", {"codec": "int8"}),
    "option": ("min_numel is 1, the members have 256", {"options": {"min_numel": 1}}),
    "width": (
        "model.module.weight is float32[24, 16], the members have float32[16, 16]",
        {"width": 24},
    ),
    "optimizer": ("optimizer is AdamW, the members have SGD", {"optimizer": torch.optim.AdamW}),
    "steps": ("steps is 7, the members have 1000000", {"steps": 7}),
    "minimum": ("minimum is 2, the members have 1", {"minimum": 2}),
    "version": ("commpress is 9.9, the members have", {"version": "9.9"}),
}


class Own(commpress.ElasticSampler):
    """One of the user's."""


def loop(
    *,
    batch=4,
    loaded=None,
    samples=480,
    sampler=None,
    kind="",
    codec="sign",
    options=None,
    width=16,
    steps=1_000_000,
    optimizer=torch.optim.SGD,
    version=commpress.__version__,
    lr=1e-3,
    **more,
):
    torch.manual_seed(3)
    descriptions.version = lambda name: version
    data = TensorDataset(torch.randn(samples, 16))
    model = DistributedDataParallel(torch.nn.Linear(16, width))
    if codec is not None:
        commpress.compress(model, codec, **(options or {}))
    trained = optimizer(model.parameters(), lr=lr)
    order = (Own if kind else commpress.ElasticSampler)(data, batch, **(sampler or {}))

    def step(batch):
        for part in [batch] if loaded is None else batch:
            model(part[0]).square().mean().backward()
        trained.step()
        trained.zero_grad()

    loader = DataLoader(data, loaded or batch, sampler=order)
    return commpress.elastic(
        step, {"model": model, "optimizer": trained}, data=loader, steps=steps, **more
    )


def alone_or_with(rank, size, file):
    dist.destroy_process_group()
    store = dist.FileStore(file, size) if size > 1 else dist.HashStore()
    dist.init_process_group("commpress", store=store, rank=rank, world_size=size, timeout=WITHIN)


def refused_one_after_the_other(folder):
    """Rank 2 comes as each kind of newcomer; ranks 0 and 1 train meanwhile, until one that is alike
    is in."""
    rank, contact, done = dist.get_rank(), Path(folder, "contact"), Path(folder, "done")
    dist.barrier()
    if rank < 2:
        alone_or_with(rank, 2, f"{folder}/store")
        run = loop()
        if rank == 0:
            Path(folder, "draft").write_text(run.contact)
            Path(folder, "draft").rename(contact)
        reforms = []
        for _ in run:
            if run.size == 3:
                break
            reforms.append(run.counters.reforms)
        done.touch()
        return set(reforms)
    while not contact.exists():
        time.sleep(0.01)
    found = {}
    for name, (_, options) in UNLIKE.items():
        alone_or_with(0, 1, "")
        with pytest.raises(InvalidArgument) as error:
            next(iter(loop(join=contact.read_text(), **options)))
        found[name] = str(error.value)
    alone_or_with(0, 1, "")
    for _ in loop(join=contact.read_text(), lr=5.0):  # which healing takes over
        break
    return found


def test_who_is_unlike_is_refused_by_name_and_members_do_not_reform(mortal, tmp_path):
    one, two, found = mortal.run(refused_one_after_the_other, str(tmp_path), size=3)
    assert one == two == {0}
    for name, (text, _) in UNLIKE.items():
        assert text in found[name], found[name]


def start_unlike(folder):
    rank = dist.get_rank()
    dist.barrier()
    alone_or_with(rank, 2, f"{folder}/store")
    with pytest.raises(InvalidArgument) as error:
        next(iter(loop(batch=4 + 4 * rank)))
    return str(error.value)


def test_ranks_that_start_together_and_read_otherwise_are_refused_on_all(mortal, tmp_path):
    first, other = mortal.run(start_unlike, str(tmp_path), size=2)
    assert "ranks [1] were started with other settings than rank 0" in first
    assert "data.batch_size is 8, rank 0 has 4" in other


BLOCKS, SECONDS = 16, 3.0


def greeted_in_half_of_the_blocks(folder, width):
    """Rank 2 greets ten times a second as a newcomer would, and never reports; seconds of rank 0's
    processor a step by block, and of its door in the whole block."""
    rank, store = dist.get_rank(), f"{folder}/store"
    contact, on, done = (Path(folder, name) for name in ("contact", "on", "done"))
    dist.barrier()
    if rank == 2:
        while not contact.exists():
            time.sleep(0.01)
        links, greeted = [], 0
        while not done.exists():
            if on.exists():
                links.append(knock(place_of(contact.read_text()), JOIN, 0, (0, 0), 5.0))
                greeted += 1
            while links and (not on.exists() or len(links) > 50):
                links.pop(0).close()
            time.sleep(0.1)
        return greeted
    alone_or_with(rank, 2, store)
    run = loop(batch=64, width=width)
    if rank == 0:
        Path(folder, "draft").write_text(run.contact)
        Path(folder, "draft").rename(contact)
    (door,) = [each for each in threading.enumerate() if each.name == "commpress-door"]
    clock = time.pthread_getcpuclockid(door.ident)
    ends, since = [], time.monotonic()
    for number, _ in enumerate(run):
        if rank == 0 and time.monotonic() > since + SECONDS:
            ends.append((number, time.process_time(), time.clock_gettime(clock)))
            on.touch() if len(ends) % 4 < 2 else on.unlink(missing_ok=True)
            since = time.monotonic()
            if len(ends) > BLOCKS:
                done.touch()
        if done.exists():
            break
    blocks = [
        ((all_then - all_now) / (then - now), door_then - door_now)
        for (now, all_now, door_now), (then, all_then, door_then) in itertools.pairwise(ends)
    ]
    return blocks, run.counters.reforms


@pytest.mark.slow
@pytest.mark.parametrize("width", [1024, 8192])
def test_greetings_alone_slow_no_step(mortal, tmp_path, width):
    """The door takes less than 2 ms for each of ten greetings a second, 2 % at most. The time of
    all threads is printed, as the median of pairs of blocks with greetings and without, every other
    pair turned round: a machine that others use adds more to it than greetings do."""
    (blocks, reforms), _, greeted = mortal.run(
        greeted_in_half_of_the_blocks, str(tmp_path), width, size=3, seconds=600
    )
    assert reforms == 0
    pairs = [blocks[at : at + 2][:: -1 if at % 4 else 1] for at in range(0, BLOCKS, 2)]
    ratio = statistics.median(with_them[0] / without[0] for with_them, without in pairs)
    door = 1e3 * sum(with_them[1] for with_them, _ in pairs) / greeted
    step = statistics.median(1e3 * without[0] for _, without in pairs)
    print(
        f"{greeted} greetings of {door:.2f} ms; of {step:.2f} ms of processor time a step takes "
        f"{ratio:.3f} times as much"
    )
    assert greeted > 100
    assert 0 < door < 2


# ---------------------------------------------------------------- at the door


def at_the_door(process, **fields):
    """A newcomer that has been welcomed and has reported."""
    stop = threading.Event()

    def attend():
        while not stop.is_set():
            process.membership.listen()
            time.sleep(0.001)

    attendant = threading.Thread(target=attend)
    attendant.start()
    call = knock(process.door.here, JOIN, 0, (0, 0), 5.0)
    call.look()
    link = Conversation(call.socket, process.door.here, JOIN)
    if fields:
        link.tell("report", **fields)
    stop.set()
    attendant.join()
    return link


def answered(link):
    link.socket.settimeout(20)
    link.socket.recv(1, socket.MSG_PEEK)
    link.socket.setblocking(False)
    return link.receive()


def test_greetings_alone_and_those_who_are_unlike_do_not_count_as_waiting():
    member = alone()
    member.membership.description = lambda: {"codec": "sign"}
    silent = at_the_door(member)
    assert member.membership.waiting == 0
    other = at_the_door(member, describes={"codec": "int8"})
    assert member.membership.waiting == 0
    (refusal,) = answered(other)
    assert refusal["is"] == "refused"
    assert "codec is int8, the members have sign" in refusal["text"]
    alike = at_the_door(member, describes={"codec": "sign"})
    assert member.membership.waiting == 1
    for link in (silent, other, alike):
        link.close()
    close([member])


def test_those_who_have_only_greeted_are_not_asked_in_every_step(monkeypatch):
    """The kernel tells who has reported or gone; nobody listens to each of them."""
    member = alone()
    silent = [at_the_door(member) for _ in range(20)]
    asked = []
    monkeypatch.setattr(Conversation, "look", lambda link: asked.append(link) or [])
    assert member.membership.waiting == 0
    assert asked == []
    monkeypatch.undo()
    silent[7].tell("report", describes={})
    silent[3].close()
    assert member.membership.waiting == 1
    for link in silent:
        link.close()
    assert member.membership.waiting == 0
    close([member])


def test_no_more_newcomers_than_strangers_may_wait_without_a_report():
    """The oldest of them go; who has reported stays."""
    member = alone()
    reported = at_the_door(member, describes={})
    silent = [at_the_door(member) for _ in range(STRANGERS + 3)]
    gone = select.poll()
    for link in silent:
        gone.register(link, select.POLLIN)
    wanted = {link.fileno() for link in silent[:3]}
    assert {file for file, _ in gone.poll(1000)} == wanted
    assert member.membership.waiting == 1
    for link in (reported, *silent):
        link.close()
    close([member])


def test_who_comes_to_an_agreement_and_is_unlike_is_refused_there_too():
    member, newcomer = alone(), alone()
    member.membership.description, newcomer.membership.description = (
        (lambda: {"x": "1"}),
        (lambda: {"x": "2"}),
    )
    outcomes = together(
        [member, newcomer], [Terms(minimum=1), Terms(contacts=lambda: [member.door.here])], 5.0
    )
    while not isinstance(outcomes[1], InvalidArgument):
        outcomes = together(
            [member, newcomer], [Terms(), Terms(contacts=lambda: [member.door.here])], 5.0
        )
    assert outcomes[0].size == 1
    assert "x is 2, the members have 1" in str(outcomes[1])
    close([member, newcomer])


def test_a_report_of_another_version_is_answered():
    member = alone()
    link = at_the_door(member, place="nobody")
    together([member])
    assert [message["text"] for message in answered(link)] == [OTHER_VERSION]
    link.close()
    close([member])
