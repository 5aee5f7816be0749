"""The optimizers train as Adam does, and do not when error feedback is off: the short form of the
bench."""

import pytest

from convergence import Run, grouped, judge, train

pytest.importorskip("sklearn")
SEEDS = (1, 2, 3)
STEPS = {"digits": 250, "gpt": 300}


def runs(task, optimizer, **options):
    return [train(Run(task, optimizer, seed, STEPS[task], **options)) for seed in SEEDS]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("task", "optimizer"), [("digits", "onebit"), ("gpt", "zero-one")])
def test_the_final_loss_is_within_the_spread_of_adams_seeds(task, optimizer):
    finished = runs(task, optimizer)
    bars = judge(grouped(runs(task, "adam") + finished))
    assert [holds for _, holds in bars] == [True], bars
    assert finished[0].ratio > 2.5  # short runs are mostly exact steps


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_error_feedback_it_is_not():
    bars = judge(grouped(runs("digits", "adam") + runs("digits", "onebit", feedback=False)))
    assert [holds for _, holds in bars] == [False], bars
