"""The optimizers' benches at tiny size: they run, and what they write is what they measured."""

import json

import pytest

from commpress.cli import main

TINY = ["--width", "32", "--layers", "1"]


def test_bench_optimizer(compiled, tmp_path):
    file = tmp_path / "rows.json"
    assert main(["bench", "optimizer", *TINY, "--steps", "3", "--json", str(file)]) == 0
    names = [row["name"] for row in json.loads(file.read_text())["rows"]]
    assert names[0] == "AdamW(fused=True)"
    assert len(names) == 9


@pytest.mark.slow
def test_bench_loss(compiled, tmp_path):
    file = tmp_path / "rows.json"
    options = ["--ranks", "2", "--length", "16", "--steps", "12", "--warmup", "4", "--variants", "plain,onebit,zero-one"]
    assert main(["bench", "loss", *TINY, *options, "--target", "1", "--json", str(file)]) == 0
    rows = {row["variant"]: row for row in json.loads(file.read_text())["rows"]}
    assert not any(row["reached"] for row in rows.values())
    if rows["plain"]["sent_bytes"] is not None:
        assert rows["onebit"]["sent_bytes"] < rows["plain"]["sent_bytes"]


def test_bench_convergence(compiled, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "part.json", tmp_path / "plot.png"
    options = ["--tasks", "gpt", "--optimizers", "adam", "onebit", "--seeds", "1", "--steps", "20"]
    assert main(["bench", "convergence", *options, "--json", str(file)]) == 0
    first = file.read_bytes()
    assert main(["bench", "convergence", *options, "--json", str(file)]) == 0
    assert file.read_bytes() == first
    assert main(["bench", "convergence", "--merge", str(file), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    assert capsys.readouterr().out.count("onebit") == 3
