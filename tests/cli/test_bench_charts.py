"""Every bench draws what it measured: axes have names, legends where there is more than one series,
nothing is left out."""

import re
from argparse import Namespace
from dataclasses import replace

import pytest

import codec_table
import encoders
import fsdp as bench_fsdp
import guard as bench_guard
import hierarchical as bench_hierarchical
import loss as bench_loss
import observe as bench_observe
import optimizer as bench_optimizer
import plan as bench_plan
import powersgd as bench_powersgd
import simulate as bench_simulate
from commpress.cli import (
    bench_allreduce,
    bench_alltoall,
    bench_codec,
    bench_io,
    bench_train,
    plan,
    simulate,
)
from commpress.cli.training import Load
from commpress.plan.candidates import Candidate

pytest.importorskip("matplotlib")

SIZES = (1 << 16, 1 << 20)
LOAD = Load(1, 1, 32, 1, 16, 2)


def allreduce(path):
    rows = [
        bench_allreduce.ReducedSize(4, n, "sign", 2e-3, 4e-3, 0, n // 31, 0.9, 1.0, 0.0)
        for n in SIZES
    ]
    bench_allreduce.draw(path, rows)
    return [
        "One all-reduce among 4 ranks",
        "size of the buffer",
        "time of one call, ms",
        "times faster than torch",
        "64 KiB",
    ]


def alltoall(path):
    rows = [
        bench_alltoall.DispatchedSize(4, n, "int8", 2e-3, 3e-3, 1e-3, 4e-3, [2, 1], 0, 0.01)
        for n in SIZES
    ]
    bench_alltoall.draw(path, rows)
    return ["int8 on the way", "torch, float32", "nodes, inside first", "nodes, between first"]


def hierarchical(path):
    rows = [
        bench_hierarchical.Measured(n, codec, 3e-3, 2e-3, 1e-3, 0, n, float(n), None)
        for n in SIZES
        for codec in ("none", "sign")
    ]
    bench_hierarchical.draw(path, rows)
    return ["between nodes: none", "between nodes: sign", "two levels, sign", "flat, none"]


def guard(path):
    bench_guard.draw(path, [bench_guard.Measured(n, 1e-3, 2e-3, 0) for n in SIZES])
    return ["What agreement costs", "Gloo", "time of one call, ms"]


def train(path):
    steps = {"compute": 0.0, "sign": 0.05}
    rows = [
        bench_train.TrainedVariant(name, 0.1 + exposed, exposed, 1e6, 2.0, 10**7)
        for name, exposed in steps.items()
    ]
    bench_train.draw(path, rows)
    took = {"plain": 1.0, "sign": 0.9, "auto": 0.93}
    rows = [
        bench_train.TrainedVariant(name, seconds, 0.0, None, 2.0, 10**7)
        for name, seconds in took.items()
    ]
    assert [holds for _, holds in bench_train.judge(rows)] == [True, True]
    rows[-1].step_seconds = 1.01
    assert [holds for _, holds in bench_train.judge(rows)] == [True, False]
    return ["compute", "exposed communication", "one step, ms", "MB sent per rank and step"]


def fsdp(path):
    bench_fsdp.draw(path, [bench_fsdp.Measured("plain", 0.1, None, 1.0, 1.0, 1.0, 2.0, 10**7)])
    return ["under FSDP2", "bytes sent, % of plain collectives", "gradients", "weights"]


def codec(path):
    figures = [
        bench_codec.Figure(name, threads, operation, 0.1, 3.0, 9.0, 0.7)
        for name in ("sign", "int8")
        for threads in (1, 2)
        for operation in bench_codec.OPERATIONS
    ]
    bench_codec.draw(path, figures)
    assert [holds for _, holds in bench_codec.judge(figures)] == [True, True, True]
    slow = [
        replace(f, seconds=0.2, of_copy=0.4) if f.operation in ("encode in place", "mean") else f
        for f in figures
    ]
    assert [holds for _, holds in bench_codec.judge(slow)] == [False, True, False]
    return ["one thread", "2 threads", "GB of float32 per second", "decode", "int8"]


def raced(path):
    ours = {"candidate": "Numba (commpress)", "threads": 1, "numel": 1 << 20, "seconds": 0.1}
    rows = [ours, {"candidate": "torch.compile", "threads": 1, "failed": "no compiler"}]
    assert encoders.judge(rows)[0][1]
    encoders.draw(path, rows)
    return ["Numba", "torch.compile", "GB of float32 per second"]


def table(path):
    codec_table.draw(
        path,
        [
            codec_table.Line(n, b, e, e, 1.0, 1.0, r, False, True)
            for n, b, e, r in (("sign", 1.0, 0.6, True), ("none", 32.0, 0.0, False))
        ],
    )
    return ["bits per element", "relative error of one encoding", "with error feedback", "sign"]


def powersgd(path):
    rows = [bench_powersgd.Measured(hook, 0.1, 0.2, 1.0, 1.1, 0.1) for hook in bench_powersgd.HOOKS]
    bench_powersgd.draw(path, rows, options=Namespace(rank=4, count=100, shape="256x512", walk=400))
    return ["100 matrices of 256×512", "norm of the residual", "after 400 steps", "torch batched"]


def optimizer(path):
    bench_optimizer.draw(path, [bench_optimizer.Measured("AdamW(fused=True)", 0.01, 10**7)])
    return ["AdamW(fused=True)", "one step, ms"]


def loss(path):
    kinds = ("plain", 10.0), ("powersgd1", 1.1), ("onebit", 1.0), ("zero-one-int8", None)
    rows = [
        bench_loss.Measured(name, 1e-3, seconds, [seconds], [100], {"plain": 100}, 2.6)
        for name, seconds in kinds
    ]
    assert [holds for _, holds in bench_loss.judge(rows)] == [True, False]
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
    bench_loss.draw(path, rows, target=2.6)
    return ["To a training loss of 2.6", "seconds", "zero-one-int8"]


def observe(path):
    bench_observe.draw(path, [bench_observe.Measured(0.4, 0.402, 30.0, 1e-6, 1e-4, 10**7)])
    return ["Watching a step of 400 ms", "reading counters", "% of an unwatched step"]


def planned(path):
    rows = [
        bench_plan.Row("plain", seconds=1.0, predicted_seconds=0.9),
        bench_plan.Row("sign", seconds=0.5, predicted_seconds=0.6, chosen=True),
    ]
    assert bench_plan.judge(rows)[0][1]
    rows.append(bench_plan.Row("int8", seconds=0.45, predicted_seconds=0.7))
    assert not bench_plan.judge(rows)[0][1], "more than a tenth slower than the fastest"
    bench_plan.draw(path, rows)
    return ["the plan takes sign", "measured", "predicted", "one step, ms"]


def simulated(path):
    rows = [
        bench_simulate.Row(2, way, n, 1e-3, 3, 1.05e-3) for n in SIZES for way in ("plain", "sign")
    ]
    assert [holds for _, holds in bench_simulate.judge(rows)] == [True, True]
    assert not bench_simulate.judge([*rows, bench_simulate.Row(2, "sign", 64, 1e-3, 3, 2e-3)])[1][1]
    bench_simulate.draw(path, rows)
    return ["among 2 ranks", "measured", "simulated", "time of one call, ms"]


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
        Candidate(name, "", seconds, 1e6, 1e6, {"device": 1e9}, codec, fits=name != "int8")
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
        "done otherwise",
        "int8 (does not fit)",
        "GB on a rank",
        " 12000",
    ]


def io(path):
    same = {"chunk": 1 << 20, "store": 1e9, "engine": 2e9, "low": 1e9, "high": 1e9}
    rows = [same | {"verb": verb} for verb in ("write", "read")]
    bench_io.draw(path, rows, engine="threads")
    return ["engine threads", "GB per second", "1 MiB", "write", "read"]


@pytest.mark.parametrize(
    "draw",
    [
        allreduce,
        alltoall,
        hierarchical,
        guard,
        train,
        fsdp,
        codec,
        raced,
        table,
        powersgd,
        optimizer,
        loss,
        observe,
        io,
        planned,
        simulated,
        scaling,
        candidates,
    ],
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
