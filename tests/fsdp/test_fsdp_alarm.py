"""The alarm under FSDP2: all ranks change codecs alike, no part of a gradient is lost, and a run
resumes while it lasts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commpress
from commpress import Alarm
from commpress.errors import InvalidArgument
from variants import first, seldom


class Session:
    """Regression by three layers; gradients are a thousandth as large from step ``small`` on: what
    is owed then is huge."""

    def __init__(self, alarm=None, codec="bits2", **options):
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(61, 67),
            torch.nn.Tanh(),
            torch.nn.Linear(67, 64),
            torch.nn.Linear(64, 61),
        ]
        self.model = torch.nn.Sequential(*layers)
        for layer in (layers[0], layers[2], self.model):
            fully_shard(layer)
        self.state = commpress.compress_fsdp(
            self.model, codec, None, min_numel=0, alarm=alarm, **options
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.outputs, self.means = self.zeros(), self.zeros()
        self.ways, self.sent = [], []

    def zeros(self):
        return [torch.zeros(p.shape, dtype=torch.float64) for p in self.model.parameters()]

    def steps(self, count, small=10**9):
        for _ in range(count):
            step = self.state.step
            draw = torch.Generator().manual_seed(step * 7 + dist.get_rank())
            x, y = torch.randn(16, 61, generator=draw), torch.randn(16, 61, generator=draw)
            scale = 1e-3 if step >= small else 1.0
            self._true(x, y, scale)
            loss = (self.model(x) - y).square().mean() * scale
            before = self.state.wire_bytes
            loss.backward()
            self.sent.append(self.state.wire_bytes - before)
            if self.state.alarm is not None:
                self.state.alarm.tell(loss / scale)
                self.ways.append(self.state.alarm.way)
            for total, p in zip(self.outputs, self.model.parameters(), strict=True):
                total += p.grad.full_tensor()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _true(self, x, y, scale):
        plain = torch.nn.Sequential(
            torch.nn.Linear(61, 67),
            torch.nn.Tanh(),
            torch.nn.Linear(67, 64),
            torch.nn.Linear(64, 61),
        )
        with torch.no_grad():
            for p, q in zip(plain.parameters(), self.model.parameters(), strict=True):
                p.copy_(q.full_tensor())
        ((plain(x) - y).square().mean() * scale).backward()
        for total, p in zip(self.means, plain.parameters(), strict=True):
            dist.all_reduce(p.grad)
            total += p.grad.double() / dist.get_world_size()

    def lost(self):
        """The most by which outputs and what is owed differ from the true means, relative to
        these."""
        owed = self.state.elastic_state_dict()["residuals"]
        worst = 0.0
        for name, out, mean in zip(
            dict(self.model.named_parameters()), self.outputs, self.means, strict=True
        ):
            worst = max(worst, float((out + owed[name].full_tensor() - mean).norm() / mean.norm()))
        return worst

    def weights(self):
        return [p.full_tensor().detach().clone() for p in self.model.parameters()]


def quiet(codec):
    watched, alone = Session(Alarm("warn", every=5), codec), Session(None, codec)
    watched.steps(60)
    alone.steps(60)
    same = all(torch.equal(a, b) for a, b in zip(watched.weights(), alone.weights(), strict=True))
    return watched.state.alarm.sounded, watched.lost(), same


@pytest.mark.parametrize("codec", first(1, ["bits2", "int4"]))
def test_a_run_that_goes_well_is_not_disturbed(pool, codec):
    for sounded, lost, same in pool.run(quiet, codec, size=2):
        assert sounded == 0
        assert lost < 1e-5
        assert same


def harmed(then, options):
    session = Session(Alarm(then, every=4, pause=2), **options)
    session.steps(44, small=21)
    alarm = session.state.alarm
    return session.ways, alarm.sounded, alarm.why, session.lost(), session.weights(), session.sent


@pytest.mark.parametrize(
    ("then", "size", "options"),
    [
        ("warn", 2, {}),
        seldom("int8", 2, {}),
        ("int8", 3, {"overlap": False}),
        ("int8", 2, {"residuals": "shift8"}),
    ],
)
def test_residuals_that_have_grown_sound_it_on_all_ranks_alike(pool, then, size, options):
    results = pool.run(harmed, then, options, size=size)
    ways, sounded, why, lost, _, sent = results[0]
    assert all(other[:3] == results[0][:3] for other in results)
    assert all(
        torch.equal(a, b) for other in results for a, b in zip(results[0][4], other[4], strict=True)
    )
    assert sounded >= 1
    assert "times as large as the gradient" in why
    assert lost < (1e-1 if "residuals" in options else 1e-4), (
        "what one codec left out, another sends"
    )
    assert ways[:24] == [""] * 24, "step 23 is looked at when the next one reduces"
    assert ways[24:32] == ["" if then == "warn" else then] * 8, "two looks"
    assert (sent[24] > 1.5 * sent[23]) == (then == "int8"), "bytes of the other codec"
    assert sent[32] == sent[23]


def resumed():
    whole, first, again = (Session(Alarm("int8", every=4, pause=2)) for _ in range(3))
    whole.steps(44, small=21)
    first.steps(27, small=21)
    assert first.state.alarm.way == "int8"
    again.model.load_state_dict(first.model.state_dict())
    again.state.load_state_dict(first.state.state_dict())
    again.steps(17, small=21)
    same = all(torch.equal(a, b) for a, b in zip(whole.weights(), again.weights(), strict=True))
    return (
        same,
        again.ways == whole.ways[27:],
        again.state.alarm.state_dict() == whole.state.alarm.state_dict(),
    )


def test_a_run_resumed_while_it_lasts_goes_on_alike(pool):
    assert pool.run(resumed, size=2) == [(True, True, True)] * 2


def counted():
    session = Session(Alarm("int8", every=4))
    metrics, samples = commpress.Metrics(session.state), []
    while session.state.step < 30:
        session.steps(1, small=21)
        samples.append(metrics.step())
    return sum(sample.alarms for sample in samples)


def test_metrics_count_it(pool):
    assert pool.run(counted, size=2) == [1] * 2


REFUSED = [
    ({"codec": None, "weights": "int8", "alarm": "warn"}, "there is nothing to look at"),
    ({"inside": "int8", "topology": "1x2", "alarm": "warn"}, "it looks at one hop"),
    ({"error_feedback": False, "alarm": "warn"}, "it looks at residuals"),
    ({"codec": "powersgd-2", "alarm": "warn"}, "compresses whole tensors"),
    ({"alarm": "none"}, "use Alarm\\('int8'\\) or Alarm\\('warn'\\)"),
    ({"alarm": "powersgd-2"}, "use Alarm\\('int8'\\) or Alarm\\('warn'\\)"),
    ({"alarm": "loud"}, "loud"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
@pytest.mark.parametrize("size", [1, 2])
def test_what_it_cannot_watch_is_refused(pool, options, words, size):
    if size == 1 and "topology" in options:
        options = options | {"topology": "1x1"}
    with pytest.raises(InvalidArgument, match=words):
        pool.run(refused, options, size=size)


def refused(options):
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    if "topology" in options:
        options = options | {"topology": commpress.Topology.parse(options["topology"])}
    commpress.compress_fsdp(model, **({"min_numel": 0} | options))


def across_columns(then):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=mesh["dp"])
    state = commpress.compress_fsdp(model, "int4", None, agree_over=mesh, alarm=then)
    model(torch.randn(2, 64)).sum().backward()
    return state.alarm.then


def test_ranks_that_agree_with_more_than_look_are_only_warned(pool):
    assert pool.run(across_columns, "warn", size=4) == ["warn"] * 4
    with pytest.raises(InvalidArgument, match="which do not look together"):
        pool.run(across_columns, "int8", size=4)
