"""replan_every: a codec for every layer from fresh gradients, alike on all ranks, kept by
checkpoints."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument
from commpress.integrations.ddp.replanning import Ruled
from commpress.plan.choice import OPTIONS, assign_by, errors_of

QUIET, LOUD = "0.weight", "1.weight"


class Session:
    """Two layers; gradients of one are a thousand times larger from step ``swap`` on those of the
    other."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.ddp = DistributedDataParallel(self.model)
        self.state = commpress.compress(self.ddp, "int4", measure_every=0, **options)
        self.draws = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, count, loud=LOUD, bad=-1):
        for i in range(count):
            self.model.zero_grad()
            x = torch.randn(8, 64, generator=self.draws)
            loss = self.ddp(x).square().mean()
            loud_one = dict(self.model.named_parameters())[loud]
            handle = loud_one.register_hook(lambda g: 1000 * g)
            (loss * (float("nan") if i == bad else 1.0)).backward()
            handle.remove()

    def rules(self):
        return dict(self.state._replanning.rules)


def replanned(topology):
    session, seen = Session(replan_every=3, topology=topology), []
    assert session.state._replanning.rules == {}
    for count, loud in ((1, LOUD), (1, LOUD), (2, QUIET), (1, QUIET)):
        session.steps(count, loud)
        seen.append(session.rules())
    policy = session.state.policy
    return (
        seen,
        session.state.counters.choice,
        [policy.choose(name, 4096).row_bytes(4096) for name in (QUIET, LOUD)],
    )


@pytest.mark.parametrize(("size", "topology"), [(2, None), (4, "2x2")])
def test_codecs_follow_the_gradients(pool, size, topology):
    results = pool.run(replanned, topology, size=size)
    assert all(result == results[0] for result in results)
    (first, second, third, fourth), why, (quiet, loud) = results[0]
    assert first == {}, "decided between two steps"
    assert set(second) == {QUIET, LOUD}, "biases are exact"
    assert third == second
    assert fourth != second
    assert quiet > loud, "the layer that is called quiet has become the loud one"
    assert why.startswith("of step 3: ")


def unchanged_by_nan():
    session = Session(replan_every=2)
    session.steps(2)
    before = session.rules()
    session.steps(2, QUIET, bad=0)  # step 2 is due
    return before, session.rules()


def test_gradients_that_are_not_finite_change_nothing(pool):
    for before, after in pool.run(unchanged_by_nan, size=2):
        assert before
        assert after == before


def resumed():
    session = Session(replan_every=100)
    session.steps(3)
    saved = session.state.state_dict()
    again = Session(replan_every=100)
    again.state.load_state_dict(saved)
    again.draws.set_state(session.draws.get_state())
    same = again.rules() == session.rules() != {} and isinstance(again.state.policy, Ruled)
    for one in (session, again):
        one.steps(2)
    equal = all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(session.model.parameters(), again.model.parameters(), strict=True)
    )
    return same, equal


def test_a_resumed_run_goes_on_with_the_same_codecs(pool):
    assert all(same and equal for same, equal in pool.run(resumed, size=2))


def test_errors_of_all_ranks_bound_the_choice(compiled):
    draws = torch.Generator().manual_seed(0)
    gradients = {
        name: scale * torch.randn(5000, generator=draws)
        for name, scale in (("a", 1.0), ("b", 1e-3))
    }
    errors = {name: errors_of(g, OPTIONS) for name, g in gradients.items()}
    found = assign_by(errors, dict.fromkeys(gradients, 5000), OPTIONS, ranks=2, uniform="int4")
    assert found.error <= found.uniform_error
    assert found.gain > 1.1


@pytest.mark.parametrize("options", [{"codec": "auto"}, {"codec": "int4", "replan_every": -1}])
def test_what_cannot_be_planned_is_refused(pool, options):
    with pytest.raises(InvalidArgument):
        pool.run(refused, {"replan_every": 5} | options, size=2)


def refused(options):
    commpress.compress(DistributedDataParallel(torch.nn.Linear(4, 4)), **options)
