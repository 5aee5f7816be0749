"""Pictures: axes have names, legends where there is more than one series, nothing is left out."""

import re

import pytest

from commpress.cli import bench_train, plan, simulate
from commpress.plan.candidates import Candidate

pytest.importorskip("matplotlib")


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
    [scaling, candidates],
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
