"""ElasticSampler: whoever comes and goes, each sample of an epoch is read once by committed
steps."""

from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from commpress import ElasticSampler
from commpress.collectives.change import Change
from commpress.errors import InvalidArgument, StateMismatch


def ranks(samples, batch, size, **options):
    return [
        ElasticSampler(range(samples), batch, rank=r, size=size, **options) for r in range(size)
    ]


def changed(samplers, size, **options):
    """The samplers of a group of ``size`` that goes on; newcomers load a survivor's state, which is
    all they get."""
    survivors = samplers[:size]
    sources = tuple(s.rank for s in survivors) + (None,) * (size - len(survivors))
    old = samplers[0]
    fresh = [
        ElasticSampler(range(old.samples), old.batch_size, rank=0, size=1, **options)
        for _ in sources[len(survivors) :]
    ]
    for newcomer in fresh:
        newcomer.load_state_dict(survivors[0].state_dict())
    every = survivors + fresh
    for rank, sampler in enumerate(every):
        sampler.reform(Change(1, rank, len(samplers), sources, (b"",) * size))
    return every


plans = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=6
)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.booleans(), st.integers(0, 5), plans)
def test_every_sample_of_an_epoch_is_read_once_whoever_comes_and_goes(
    samples, batch, shuffle, seed, plan
):
    """``plan``: ranks, steps they commit, steps they read ahead and do not."""
    options = {"shuffle": shuffle, "seed": seed}
    group, read = ranks(samples, batch, 1, **options), []
    for size, steps, ahead in plan:
        group = changed(group, size, **options)
        assert len({(s.epoch, s.position) for s in group}) == 1
        iterators = [iter(s) for s in group]
        for step in range(steps + ahead):
            shares = [list(islice(iterator, batch)) for iterator in iterators]
            if not shares[0]:  # the end of an epoch
                iterators = [iter(s) for s in group]
                continue
            if step < steps:
                for sampler in group:
                    sampler.commit()
                read += [index for share in shares for index in share]
    stream = group[0].position
    assert len(read) == stream
    for epoch in range(stream // samples):
        assert Counter(read[epoch * samples : (epoch + 1) * samples]) == Counter(range(samples))
    assert max(Counter(read[stream // samples * samples :]).values(), default=1) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 40), st.integers(1, 2), plans)
def test_with_drop_last_an_epoch_ends_where_a_step_of_all_does_not_fit(samples, batch, plan):
    options = {"drop_last": True}
    group, read = ranks(samples, batch, 1, **options), Counter()
    for size, steps, _ in plan:
        if batch * size > samples:
            continue
        group = changed(group, size, **options)
        for _ in range(steps):
            epoch = group[0].epoch
            read.update((epoch, index) for s in group for index in islice(s, batch))
            for sampler in group:
                sampler.commit()
    assert max(read.values(), default=1) == 1
    assert read.total() + group[0].dropped == group[0].position


def test_a_permutation_is_that_of_its_seed_and_epoch():
    def order(**options):
        return list(ElasticSampler(range(50), 5, rank=0, size=1, **options))

    assert order(seed=1) == order(seed=1) != order(seed=2)
    sampler = ElasticSampler(range(50), 5, rank=0, size=1, seed=1)
    sampler.commit(10)
    assert sampler.epoch == 1
    assert list(sampler) != order(seed=1)
    assert sorted(sampler) == list(range(50))
    assert order(shuffle=False) == list(range(50))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_read_ahead_reads_again_what_was_not_committed(workers):
    data = TensorDataset(torch.arange(40))
    sampler = ElasticSampler(data, 4, rank=0, size=1, seed=3)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=workers)
    seen = []
    for _ in range(3):  # each time four batches are read, two committed
        for step, (batch,) in enumerate(loader):
            if step == 4:
                break
            if step < 2:
                seen += batch.tolist()
        sampler.commit(2)
    seen += [index for (batch,) in loader for index in batch.tolist()]
    assert sorted(seen) == list(range(40))


def test_a_run_that_resumes_goes_on_in_the_middle_of_its_epoch():
    sampler = ElasticSampler(range(30), 3, rank=1, size=2, seed=1)
    sampler.commit(3)
    other = ElasticSampler(range(30), 3, rank=1, size=2, seed=1)
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(0)
    assert list(other) == list(sampler)
    assert len(other) == 6
    other.set_epoch(4)
    assert (other.position, len(other)) == (120, 15)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data": iter([])}, "data"),
        ({"data": []}, "data"),
        ({"batch_size": 0}, "batch_size"),
        ({"rank": 0}, "size"),
        ({"rank": 2, "size": 2}, "rank"),
        ({"seed": -1}, "seed"),
        ({"drop_last": True, "batch_size": 11}, "drop_last"),
    ],
)
def test_what_cannot_work_is_refused(arguments, named):
    with pytest.raises(InvalidArgument, match=named):
        ElasticSampler(**{"data": range(10), "batch_size": 2} | arguments)


def test_more_steps_than_an_epoch_has_cannot_be_committed():
    sampler = ElasticSampler(range(10), 2, rank=0, size=1)
    with pytest.raises(InvalidArgument, match="5 steps left"):
        sampler.commit(6)


@pytest.mark.parametrize(
    ("count", "options", "named"),
    [(11, {}, "samples=10"), (10, {"seed": 1}, "seed=0"), (10, {"shuffle": False}, "shuffle=True")],
)
def test_a_position_in_data_of_another_order_is_refused(count, options, named):
    sampler = ElasticSampler(range(10), 2, rank=0, size=1)
    sampler.commit(2)
    other = ElasticSampler(range(count), 2, rank=0, size=1, **options)
    with pytest.raises(StateMismatch, match=named):
        other.load_state_dict(sampler.state_dict())
    assert (other.epoch, other.position) == (0, 0)
