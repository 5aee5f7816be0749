"""The laws of state on real ranks: hooks of DDP, FSDP2, ZeRO and groups that compress."""

import pytest

import test_laws as laws
from real_worlds import REAL
from variants import every_second

LAWS = {
    "resumes": laws.test_resumes_in_every_bit,
    "goes on": laws.test_another_number_of_ranks_goes_on_with_all_that_is_owed,
    "grows": laws.test_who_is_new_trains_with_the_others,
    "dies": laws.test_a_death_in_a_step_is_one_before_it_or_after_it,
    "refuses": laws.test_what_does_not_fit_is_named_and_changes_nothing,
}
CASES = [(name, at) for name, kind in REAL.items() for at in kind.ats]
REFORM = [(name, at) for name, at in CASES if REAL[name].of.reforms]
REFUSE = [case for case in CASES if REAL[case[0]].refuses]
JOIN = [(name, at) for name, at in CASES if REAL[name].of.joins]
SIZES = [(*case, REAL[case[0]].sizes[i % len(REAL[case[0]].sizes)]) for i, case in enumerate(JOIN)]


def obey(law, *case):
    LAWS[law](*case)


@pytest.mark.parametrize(("name", "at"), CASES)
def test_as_many_ranks_go_on(pool, name, at):
    pool.run(obey, "resumes", name, at, size=REAL[name].size)


@pytest.mark.parametrize(("name", "at"), REFUSE)
def test_what_does_not_fit_is_named(pool, name, at):
    pool.run(obey, "refuses", name, at, size=2)


@pytest.mark.parametrize(("name", "at", "size"), SIZES)
def test_another_number_of_ranks_goes_on(pool, name, at, size):
    pool.run(obey, "goes on", name, at, size, size=max(size, REAL[name].size))


@pytest.mark.parametrize(("name", "at"), REFORM)
def test_who_is_new_trains_with_the_others(pool, name, at):
    pool.run(obey, "grows", name, at, size=4)


@pytest.mark.parametrize(("name", "at"), every_second(REFORM))
def test_a_death_is_before_a_step_or_after_it(pool, name, at):
    pool.run(obey, "dies", name, at, (), size=3)
