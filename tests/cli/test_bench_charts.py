"""Pictures: axes have names, legends where there is more than one series, nothing is left out."""

import re
from dataclasses import replace

import pytest

import loss as bench_loss
import plan as bench_plan
import simulate as bench_simulate
from commpress.cli import bench_codec, bench_train, charts, plan, simulate
from commpress.plan.candidates import Candidate

pytest.importorskip("matplotlib")

SIZES = (1 << 16, 1 << 20)


def of_table(path):
    """Columns beside each other; a cell without a number leaves a gap."""
    cells = {"codec": "sign", "us": "12", "fp32 us": "1.5e+02 of it", "faster": "12.50x"}
    panels = {"one call, us": ("us", "fp32 us"), "times faster": ("faster",)}
    rows = [cells, cells | {"codec": "int8", "us": "-", "faster": "7.00x"}]
    charts.of_table(path, "All-reduces", rows, panels)
    named = ["All-reduces", "sign", "int8", "one call, us", "times faster", "us", "fp32 us"]
    return [*named, "150", "12.5", "–"]


def planned(path):
    rows = [
        bench_plan.Row("plain", seconds=1.0, predicted_seconds=0.9),
        bench_plan.Row("sign", seconds=0.5, predicted_seconds=0.6, chosen=True),
    ]
    assert bench_plan.judge(rows)[0][1]
    rows.append(bench_plan.Row("int8", seconds=0.45, predicted_seconds=0.7))
    assert not bench_plan.judge(rows)[0][1], "more than a tenth slower than the fastest"
    charts.of_table(path, "A step", list(map(bench_plan.cells, rows)), bench_plan.PANELS)
    return ["A step", "measured ms", "predicted ms", "one step, ms"]


def simulated(path):
    rows = [
        bench_simulate.Row(2, way, n, 1e-3, 3, 1.05e-3) for n in SIZES for way in ("plain", "sign")
    ]
    assert [holds for _, holds in bench_simulate.judge(rows)] == [True, True]
    assert not bench_simulate.judge([*rows, bench_simulate.Row(2, "sign", 64, 1e-3, 3, 2e-3)])[1][1]
    charts.of_table(path, "Calls", list(map(bench_simulate.cells, rows)), bench_simulate.PANELS)
    return ["Calls", "measured ms", "simulated ms", "one call, ms"]


def scaling(path):
    rows = [
        simulate.Row(n, n, way, 0.3, 0.1, 1e6, 1e6, 0.6)
        for n in (2, 4, 8)
        for way in ("plain", "sign", "sign/2")
    ]
    simulate.draw(path, rows, title="An all-reduce")
    return ["An all-reduce", "ranks", "times faster than plain", "sign, two levels"]


def candidates(path):
    found = [
        Candidate(name, "", seconds, 1e6, {"device": 1e9}, codec, fits=name != "int8")
        for name, seconds, codec in (
            ("plain", 12.0, "plain"),
            ("bf16-ring", 6.0, ""),
            ("int8", 3.0, "int8"),
        )
    ]
    plan.draw(path, found, chosen=found[0], title="two ranks")
    return [
        "Predicted: two ranks",
        "chosen",
        "otherwise",
        "int8 (does not fit)",
        "GB on a rank",
        " 12000",
    ]


@pytest.mark.parametrize(
    "draw",
    [of_table, planned, simulated, scaling, candidates],
    ids=lambda draw: draw.__name__,
)
def test_pictures_say_what_they_show(draw, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    words = draw(str(tmp_path / "picture.svg"))
    said = " ".join(
        re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "picture.svg").read_text())
    )
    for phrase in words:
        assert phrase in said, said


def holding(bars):
    return [holds for _, holds in bars]


def test_bars_of_training_steps():
    def measured(name, step, exposed=0.0):
        return bench_train.TrainedVariant(name, step, exposed, None, 2.0, 1)

    rows = [measured(name, step) for name, step in (("plain", 1.0), ("sign", 0.9), ("auto", 0.93))]
    assert holding(bench_train.judge(rows)) == [True, True]
    rows[-1].step_seconds = 1.01
    assert holding(bench_train.judge(rows)) == [True, False]
    rows = [measured("compute", 1.0), measured("powersgd1", 2.0, 1.0), measured("sign", 1.4, 0.4)]
    assert holding(bench_train.judge(rows)) == [True, False]


def test_bars_of_codecs():
    figures = [
        bench_codec.Figure("sign", threads, operation, 0.1, 3.0, 9.0, 0.7)
        for threads in (1, 2)
        for operation in bench_codec.OPERATIONS
    ]
    assert holding(bench_codec.judge(figures)) == [True, True, True]
    slow = [
        replace(f, seconds=0.2, of_copy=0.4) if f.operation in ("encode in place", "mean") else f
        for f in figures
    ]
    assert holding(bench_codec.judge(slow)) == [False, True, False]
    late = [replace(f, of_copy=0.7 / f.threads) for f in figures]
    assert holding(bench_codec.judge(late)) == [True, False, True]


def test_bars_and_steps_to_a_loss():
    kinds = ("plain", 10.0), ("powersgd1", 1.1), ("onebit", 1.0), ("zero-one-int8", None)
    rows = [
        bench_loss.Measured(name, 1e-3, seconds, [seconds], [100], {"plain": 100}, 2.6)
        for name, seconds in kinds
    ]
    assert holding(bench_loss.judge(rows)) == [True, False]
    assert not bench_loss.judge(rows[3:])[0][1]
    curve = bench_loss.Curve("plain", 1e-3, 0, [3.0] * 10 + [2.0] * 10, ["plain"] * 20)
    assert curve.steps_to(2.5) == 15
    assert curve.steps_to(1.5) is None
    later = bench_loss.Curve("plain", 1e-3, 1, [3.0] * 14 + [2.0] * 6, ["plain"] * 20)
    both = bench_loss.reached([curve, later], {"plain": 2.0}, 2.5)
    assert (both.seconds, both.every, both.steps) == (34.0, [30.0, 38.0], [15, 19])
    slower = bench_loss.Curve("plain", 1e-4, 0, [3.0] * 20, ["plain"] * 20)
    assert bench_loss.reached([curve, slower], {"plain": 2.0}, 2.5).seconds is None
    for target in (2.5, 1.5):
        assert bench_loss.best([[slower, curve], [curve, later]], target) == [curve, later]
