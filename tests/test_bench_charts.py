"""Every bench draws what it measured: axes have names, legends where there is more than one series, nothing is left out."""

import re

import pytest

from commpress.cli import (
    bench_allreduce,
    bench_alltoall,
    bench_codec,
    bench_fsdp,
    bench_guard,
    bench_hierarchical,
    bench_io,
    bench_loss,
    bench_observe,
    bench_optimizer,
    bench_powersgd,
    bench_train,
    codec_table,
    race,
)
from commpress.cli.training import Load

pytest.importorskip("matplotlib")

SIZES = (1 << 16, 1 << 20)
LOAD = Load(1, 1, 32, 1, 16, 2)


def allreduce(path):
    rows = [bench_allreduce.Measured(4, n, "sign", 2e-3, 4e-3, 0, n // 31, 0.9, 1.0, 0.0) for n in SIZES]
    bench_allreduce.draw(path, rows)
    return ["One all-reduce among 4 ranks", "size of the buffer", "time of one call, ms", "times faster than torch", "64 KiB"]


def alltoall(path):
    bench_alltoall.draw(path, [bench_alltoall.Measured(4, n, "int8", 2e-3, 3e-3, 1e-3, 4e-3, [2, 1], 0, 0.01) for n in SIZES])
    return ["int8 on the way", "torch or MPI", "nodes, inside first", "nodes, between first"]


def hierarchical(path):
    rows = [
        bench_hierarchical.Measured(n, codec, 3e-3, 2e-3, 1e-3, 0, n, float(n), None)
        for n in SIZES for codec in ("none", "sign")
    ]  # fmt: skip
    bench_hierarchical.draw(path, rows)
    return ["between nodes: none", "between nodes: sign", "two levels, sign", "flat, none"]


def guard(path):
    bench_guard.draw(path, [bench_guard.Measured(n, 1e-3, 2e-3, 0) for n in SIZES])
    return ["What agreement costs", "Gloo", "time of one call, ms"]


def train(path):
    rows = [bench_train.Measured(name, 0.1 + 0.05 * i, 0.05 * i, 1e6, 2.0, 10**7) for i, name in enumerate(("compute", "sign"))]
    bench_train.draw(path, rows)
    return ["compute", "exposed communication", "one step, ms", "MB sent per rank and step"]


def fsdp(path):
    bench_fsdp.draw(path, [bench_fsdp.Measured("plain", 0.1, None, 1.0, 1.0, 1.0, 2.0, 10**7)])
    return ["under FSDP2", "bytes sent, % of plain collectives", "gradients", "weights"]


def codec(path):
    figures = [
        bench_codec.Figure(name, threads, operation, 0.1, 3.0, 9.0, 0.7)
        for name in ("sign", "int8") for threads in (1, 2) for operation in bench_codec.OPERATIONS
    ]  # fmt: skip
    bench_codec.draw(path, figures)
    return ["one thread", "2 threads", "GB of float32 per second", "decode", "int8"]


def raced(path):
    ours = {"candidate": "Numba (commpress)", "threads": 1, "numel": 1 << 20, "seconds": 0.1}
    rows = [ours, {"candidate": "torch.compile", "threads": 1, "failed": "no compiler"}]
    assert race.judge(rows)[0][1]
    race.draw(path, rows)
    return ["Numba", "torch.compile", "GB of float32 per second"]


def table(path):
    codec_table.draw(path, [codec_table.Line(n, b, e, e, 1.0, 1.0, r, False, True) for n, b, e, r in
                            (("sign", 1.0, 0.6, True), ("none", 32.0, 0.0, False))])  # fmt: skip
    return ["bits per element", "relative error of one encoding", "with error feedback", "sign"]


def powersgd(path):
    figures = {"seconds": 0.1, "error": 0.2, "early": 1.0, "late": 1.1, "walk_error": 0.1}
    result = dict.fromkeys(bench_powersgd.HOOKS, figures)
    bench_powersgd.draw(path, result, bench_powersgd.Settings(100, 256, 512, 4, 10, 400))
    return ["100 matrices of 256×512", "norm of the residual", "after 400 steps", "torch batched"]


def optimizer(path):
    bench_optimizer.draw(path, [bench_optimizer.Measured("AdamW(fused=True)", 0.01, 10**7)])
    return ["AdamW(fused=True)", "one step, ms"]


def loss(path):
    rows = [bench_loss.Measured("plain", True, 10.0, 100, 2.6, 1e8), bench_loss.Measured("onebit", False, 9.0, 100, 2.9, None)]
    assert [holds for _, holds in bench_loss.judge(rows)] == [True, False, False]
    bench_loss.draw(path, rows, bench_loss.Settings(("plain",), 2.6, 1, 1, 1, 1, 1, 1.0, 1, "sign", "int8", 8.0))
    return ["To a training loss of 2.6", "seconds", "MB sent per rank", "onebit"]


def observe(path):
    bench_observe.draw(path, bench_observe.Measured(0.4, 0.402, 30.0, 1e-6, 1e-4, 10**7))
    return ["Watching a step of 400 ms", "reading counters", "% of an unwatched step"]


def io(path):
    same = {"chunk": 1 << 20, "store": 1e9, "engine": 2e9, "low": 1e9, "high": 1e9}
    rows = [same | {"verb": verb} for verb in ("write", "read")]
    bench_io.draw(path, rows, "threads")
    return ["engine threads", "GB per second", "1 MiB", "write", "read"]


@pytest.mark.parametrize(
    "draw",
    [allreduce, alltoall, hierarchical, guard, train, fsdp, codec, raced, table, powersgd, optimizer, loss, observe, io],
    ids=lambda draw: draw.__name__,
)
def test_pictures_say_what_they_show(draw, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    words = draw(str(tmp_path / "picture.svg"))
    said = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "picture.svg").read_text()))
    for phrase in words:
        assert phrase in said, said
