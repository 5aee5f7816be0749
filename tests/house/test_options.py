"""Options of public calls: typed where they are passed on, one word for one idea."""

import inspect
from typing import get_type_hints

import pytest

import commpress
from commpress.integrations.ddp.hook import CompressedState, HookOptions
from commpress.integrations.elastic.loop import Elastic, ElasticOptions
from commpress.optim.onebit_adam import FreezingOptimizer, FreezingOptions
from commpress.optim.optimizer import CompressedOptimizer, OptimizerOptions
from commpress.optim.windows import WindowedOptimizer, WindowOptions

PASSED_ON = [
    (OptimizerOptions, [CompressedOptimizer], set()),
    (FreezingOptions, [FreezingOptimizer, CompressedOptimizer], set()),
    (WindowOptions, [WindowedOptimizer, CompressedOptimizer], {"sync"}),
    (
        HookOptions,
        [CompressedState],
        {*inspect.signature(commpress.compress).parameters, "named_parameters", "process_group"},
    ),
    (ElasticOptions, [Elastic], set(inspect.signature(commpress.elastic).parameters)),
]
OF_TORCH = {"group": "process_group", "warmup": "exact_steps", "warmup_steps": "exact_steps"}


def keywords(taker):
    parameters = inspect.signature(taker.__init__).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("typed", "takers", "apart"), PASSED_ON, ids=[typed.__name__ for typed, *_ in PASSED_ON]
)
def test_typed_options_are_those_that_are_taken(typed, takers, apart):
    taken = set().union(*map(keywords, takers))
    assert set(typed.__annotations__) | set(get_type_hints(typed)) == taken - apart


def test_one_idea_has_one_word():
    for name in commpress.__all__:
        taker = getattr(commpress, name)
        if not callable(taker) or (isinstance(taker, type) and issubclass(taker, Exception)):
            continue
        for option in inspect.signature(taker).parameters:
            assert option not in OF_TORCH, f"{name}({option}=): say {OF_TORCH[option]}"
