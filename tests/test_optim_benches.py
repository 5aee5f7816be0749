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
    assert len(names) == 11


@pytest.mark.slow
def test_bench_loss(compiled, tmp_path):
    file, curves = tmp_path / "rows.json", tmp_path / "curves.json"
    options = ["--ranks", "2", "--length", "16", "--train", "14", "--batch", "8", "--losses", str(curves), "--rounds", "1"]
    options += ["--steps", "2"]
    options += ["--variants", "plain,powersgd1,onebit-4,onebit-int4-4,zero-one-int8-4", "--target", "1"]
    assert main(["bench", "loss", *TINY, *options, "--lr", "1e-3,4e-3", "--no-times"]) == 0
    first = json.loads(curves.read_text())["curves"]
    assert [(curve["variant"], curve["lr"]) for curve in first[:3]] == [("plain", 1e-3), ("plain", 4e-3), ("powersgd1", 1e-3)]
    assert all(len(curve["losses"]) == len(curve["kinds"]) == 14 for curve in first)
    assert all(curve["finer"] for curve in first if curve["bytes"])
    more = ["--variants", "plain", "--seeds", "2", "--no-times"]
    assert main(["bench", "loss", *TINY, *options, "--lr", "1e-3", *more]) == 0
    second = json.loads(curves.read_text())["curves"]
    assert second[:-1] == first
    assert second[-1]["seed"] == 1
    assert second[-1]["losses"] != first[0]["losses"]
    first = second
    options[-1] = "5.6"
    assert main(["bench", "loss", *TINY, *options, "--json", str(file)]) == 0
    assert json.loads(curves.read_text())["curves"] == first
    content = json.loads(file.read_text())
    took, rows = content["step_seconds"], {row["variant"]: row for row in content["rows"]}
    assert set(took) >= {"plain", "powersgd1", "exact", "exact-int4", "onebit-int4-4, compressed"}
    for row in rows.values():
        if row["seconds"] is not None:
            assert row["seconds"] == pytest.approx(sum(took[kind] * count for kind, count in row["kinds"].items()))
    if content["step_bytes"]["plain"] is not None:
        assert content["step_bytes"]["onebit-4, compressed"] < content["step_bytes"]["plain"]
    again = tmp_path / "again.json"
    assert main(["bench", "loss", *TINY, *options, "--times", str(file), "--json", str(again)]) == 0
    assert json.loads(again.read_text())["rows"] == content["rows"]
    content = json.loads(curves.read_text())
    for curve in content["curves"]:
        curve["finer"] = []
    curves.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="bytes here, but sent"):
        main(["bench", "loss", *TINY, *options, "--lr", "1e-3"])


def test_bench_convergence(compiled, tmp_path, capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    file, plot = tmp_path / "part.json", tmp_path / "plot.png"
    options = ["--tasks", "gpt", "--optimizers", "adam", "onebit", "--seeds", "1", "--steps", "20"]
    assert main(["bench", "convergence", *options, "--json", str(file)]) == 0
    first = file.read_bytes()
    assert main(["bench", "convergence", *options, "--json", str(file)]) == 0
    assert file.read_bytes() == first
    assert main(["bench", "convergence", "--merge", str(file), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    assert capsys.readouterr().out.count("onebit") == 3
    every = ["--tasks", "gpt", "--optimizers", "adam", "zero-one", "--seeds", "1", "--steps", "20", "--sync", "every"]
    every += ["--exact-codec", "log3", "--plot", str(tmp_path / "every.svg")]
    assert main(["bench", "convergence", *every]) == 0
    assert "zero-one, every, log3" in capsys.readouterr().out
    assert "zero-one, every, log3: " in (tmp_path / "every.svg").read_text()
