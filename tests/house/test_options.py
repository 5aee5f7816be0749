"""Options of public calls: typed where they are passed on, one word for one idea."""

import importlib.util
import inspect
from typing import get_type_hints

import pytest

import commpress
import sources
from commpress.integrations.ddp.hook import CompressedState, HookOptions
from commpress.integrations.elastic.loop import Elastic, ElasticOptions
from commpress.optim.onebit_adam import FreezingOptimizer, FreezingOptions
from commpress.optim.optimizer import CompressedOptimizer, OptimizerOptions
from commpress.optim.zero_one_adam import WindowedOptimizer, WindowOptions

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


def test_the_table_of_options_is_that_of_the_signatures():
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    spec = importlib.util.spec_from_file_location("options", sources.ROOT / "docs" / "options.py")
    options = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(options)
    calls = options.calls()
    assert len(calls) > 60
    silent = {
        f"{call}({name}=)"
        for call, taker in calls.items()
        for name in options.options(taker)
        if not options.words(name, taker)
    }
    assert silent == set(), "no docstring says what they are for"
    assert options.PAGE.read_text() == options.page(), "run python docs/options.py"
    taken = inspect.signature(CompressedState).parameters["exact_steps"].default
    assert f"| `exact_steps` | `{taken!r}` | the number of first steps" in options.page()
