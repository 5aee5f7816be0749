"""Bars of the benchmarks: what holds them, and what does not."""

import json
from dataclasses import replace

import codec as bench_codec
import exposed
import late_rank
import loss as bench_loss
import plan as bench_plan
import simulate as bench_simulate
from commands import main
from commpress.cli import bench_train


def holding(bars):
    return [holds for _, holds in bars]


def test_a_plan_is_at_most_a_tenth_slower_than_the_fastest():
    rows = [
        bench_plan.Row("plain", seconds=1.0, predicted_seconds=0.9),
        bench_plan.Row("sign", seconds=0.5, predicted_seconds=0.6, chosen=True),
    ]
    assert bench_plan.judge(rows)[0][1]
    rows.append(bench_plan.Row("int8", seconds=0.45, predicted_seconds=0.7))
    assert not bench_plan.judge(rows)[0][1]


def test_a_late_rank_holds_nobody_up():
    every = late_rank.Measured("for all", 0.3, 0.6, 0.6, 9, 0, 2.0)
    bounded = late_rank.Measured("auto", 0.3, 0.38, 0.4, 9, 30, 2.01)
    assert holding(late_rank.judge([every, bounded])) == [True, True]
    slower = replace(bounded, p99=0.4, loss=2.03)
    assert holding(late_rank.judge([every, slower])) == [False, False]


def test_simulated_calls_are_near_the_measured_ones():
    rows = [
        bench_simulate.Row(2, way, n, 1e-3, 3, 1.05e-3)
        for n in (1 << 16, 1 << 20)
        for way in ("plain", "sign")
    ]
    assert holding(bench_simulate.judge(rows)) == [True, True]
    assert not bench_simulate.judge([*rows, bench_simulate.Row(2, "sign", 64, 1e-3, 3, 2e-3)])[1][1]


def test_codecs_are_checked_and_timed(tmp_path, capsys):
    codecs, file = "sign,sign/row,int8,none", tmp_path / "rows.json"
    assert main(["codec", "--numel", "65536", "--codec", codecs, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["rows"]
    assert len(figures) == 4 * 2 * 5
    assert all(f["seconds"] > 0 and f["of_copy"] > 0 for f in figures)
    assert f"bytes equal the reference for {codecs.replace(',', ', ')}" in capsys.readouterr().out
    assert main(["codec", "--check", "--threads", "1"]) == 2
    assert "--check needs the codec sign on 1 and 2 threads" in capsys.readouterr().err


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


def test_bars_of_training_steps():
    def measured(name, step, exposed=0.0):
        return bench_train.TrainedVariant(name, step, exposed, None, 2.0, 1)

    rows = [measured(name, step) for name, step in (("plain", 1.0), ("sign", 0.9), ("auto", 0.93))]
    assert holding(exposed.judge(rows)) == [True, True]
    rows[-1].step_seconds = 1.01
    assert holding(exposed.judge(rows)) == [True, False]
    rows = [measured("compute", 1.0), measured("powersgd1", 2.0, 1.0), measured("sign", 1.4, 0.4)]
    assert holding(exposed.judge(rows)) == [True, False]
