"""The benchmarks at tiny size: they run, what they write is what they measured, and they fail when
they should."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import changing_link
import encoders
import hierarchical
import sources
from commands import main, parser
from commpress import cli

TINY = ["--width", "32", "--layers", "1"]
SMALL = [*TINY, "--batch", "2", "--length", "16"]


def benchmark(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def benchmarks() -> dict[str, argparse.ArgumentParser]:
    (names,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return names.choices


# ---------------------------------------------------------------- help and refusals


@pytest.mark.parametrize("name", benchmarks())
def test_help_teaches(name):
    said = benchmarks()[name].format_help()
    assert len(re.findall(rf"^  .*benchmarks {name}\b.*$", said, re.M)) >= 2, said
    wanted = (
        ("--json FILE",)
        if name == "faults"
        else ("--check", "--json FILE", "--plot FILE", "exit status 1 unless")
    )
    assert all(option in said for option in wanted)
    assert [a.dest for a in benchmarks()[name]._actions if not a.help] == []


def test_every_file_with_a_run_is_listed():
    folder = sources.ROOT / "benchmarks"
    files = {p.stem: p for p in folder.glob("*.py")} | {
        p.parent.name: p for p in folder.glob("*/__init__.py")
    }
    assert sorted(benchmarks()) == sorted(
        name for name, p in files.items() if "\ndef run(options" in p.read_text()
    )


def test_the_folder_is_a_command_from_anywhere(tmp_path):
    """And keeps the root of the repository off sys.path, where `kernels` and `collectives` would be
    packages."""
    command = [sys.executable, str(sources.ROOT / "benchmarks"), "guard", "--rounds", "0"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (2, "commpress: error: --rounds must be at least 1\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hierarchical", "--codec", "none,sing"], "did you mean 'sign'?"),
        (["hierarchical", "--topology", "two"], "expected nodes x ranks"),
        (["hierarchical", "--links", os.devnull], "no JSON"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(arguments, says, capsys):
    try:
        code = benchmark(*arguments)
    except SystemExit as left:  # argparse's way
        code = left.code
    assert code == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------- figures


@pytest.mark.slow
def test_guard_on_spawned_ranks(compiled, tmp_path):
    """Ranks of their own processes find the benchmark's module."""
    file = tmp_path / "guard.json"
    sizes = ["--min-bytes", "4KiB", "--max-bytes", "16KiB"]
    assert benchmark("guard", "--ranks", 2, *sizes, "--rounds", 1, "--check", "--json", file) == 0
    assert [(row["size"], row["wrong"]) for row in json.loads(file.read_text())["rows"]] == [
        (4096, 0),
        (16384, 0),
    ]


@pytest.mark.slow
def test_bench_optimizer(compiled, tmp_path):
    file = tmp_path / "rows.json"
    assert main(["optimizer", *TINY, "--steps", "3", "--json", str(file)]) == 0
    names = [row["name"] for row in json.loads(file.read_text())["rows"]]
    assert names[0] == "AdamW(fused=True)"
    assert len(names) == 11
    assert main(["optimizer", *TINY, "--steps", "3", "--tokens", "64", "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())["rows"]) == 6


@pytest.mark.slow
def test_bench_loss(compiled, tmp_path):
    file, curves = tmp_path / "rows.json", tmp_path / "curves.json"
    options = [
        "--ranks",
        "2",
        "--length",
        "16",
        "--train",
        "14",
        "--batch",
        "8",
        "--losses",
        str(curves),
        "--rounds",
        "1",
    ]
    options += ["--steps", "2"]
    options += ["--ways", "plain,powersgd1,onebit-4,onebit-int4-4,zero-one-int8-4", "--target", "1"]
    assert main(["loss", *TINY, *options, "--lr", "1e-3,4e-3", "--no-times"]) == 0
    first = json.loads(curves.read_text())["curves"]
    assert [(curve["variant"], curve["lr"]) for curve in first[:3]] == [
        ("plain", 1e-3),
        ("plain", 4e-3),
        ("powersgd1", 1e-3),
    ]
    assert all(len(curve["losses"]) == len(curve["kinds"]) == 14 for curve in first)
    assert all(curve["finer"] for curve in first if curve["bytes"])
    more = ["--ways", "plain", "--seeds", "2", "--no-times"]
    assert main(["loss", *TINY, *options, "--lr", "1e-3", *more]) == 0
    second = json.loads(curves.read_text())["curves"]
    assert second[:-1] == first
    assert second[-1]["seed"] == 1
    assert second[-1]["losses"] != first[0]["losses"]
    first = second
    options[-1] = "5.6"
    assert main(["loss", *TINY, *options, "--json", str(file)]) == 0
    assert json.loads(curves.read_text())["curves"] == first
    content = json.loads(file.read_text())
    took, rows = content["step_seconds"], {row["variant"]: row for row in content["rows"]}
    assert set(took) >= {"plain", "powersgd1", "exact", "exact-int4", "onebit-int4-4, compressed"}
    for row in rows.values():
        if row["seconds"] is not None:
            assert row["seconds"] == pytest.approx(
                sum(took[kind] * count for kind, count in row["kinds"].items())
            )
    if content["step_bytes"]["plain"] is not None:
        assert content["step_bytes"]["onebit-4, compressed"] < content["step_bytes"]["plain"]
    again = tmp_path / "again.json"
    assert main(["loss", *TINY, *options, "--times", str(file), "--json", str(again)]) == 0
    assert json.loads(again.read_text())["rows"] == content["rows"]
    content = json.loads(curves.read_text())
    for curve in content["curves"]:
        curve["finer"] = []
    curves.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="bytes here, but sent"):
        main(["loss", *TINY, *options, "--lr", "1e-3"])


@pytest.mark.slow
def test_bench_convergence(compiled, tmp_path, capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    file, plot = tmp_path / "part.json", tmp_path / "plot.png"
    options = ["--tasks", "gpt", "--optimizers", "adam", "onebit", "--seeds", "1", "--steps", "20"]
    assert main(["convergence", *options, "--json", str(file)]) == 0
    first = file.read_bytes()
    assert main(["convergence", *options, "--json", str(file)]) == 0
    assert file.read_bytes() == first
    assert main(["convergence", "--merge", str(file), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    assert capsys.readouterr().out.count("onebit") == 3
    every = [
        "--tasks",
        "gpt",
        "--optimizers",
        "adam",
        "zero-one",
        "--seeds",
        "1",
        "--steps",
        "20",
        "--sync",
        "every",
    ]
    every += ["--exact-codec", "log3", "--plot", str(tmp_path / "every.svg")]
    assert main(["convergence", *every]) == 0
    assert "zero-one, every, log3" in capsys.readouterr().out
    assert "zero-one, every, log3: " in (tmp_path / "every.svg").read_text()


@pytest.mark.slow
def test_encoders_agree(monkeypatch, capsys):
    slow = encoders.candidates
    monkeypatch.setattr(
        encoders,
        "candidates",
        lambda numel: {k: v for k, v in slow(numel).items() if k != "torch.compile"},
    )
    before = torch.get_num_threads()
    assert benchmark("encoders", "--numel", 1 << 18, "--threads", 1) == 0
    assert torch.get_num_threads() == before
    said = capsys.readouterr().out
    assert "Numba (commpress)" in said
    assert "failed" not in said


@pytest.mark.slow
def test_bench_plan(tmp_path, capsys):
    out = tmp_path / "plan.json"
    command = [
        "plan",
        "--ranks",
        2,
        "--rounds",
        1,
        "--steps",
        1,
        *SMALL,
        "--ways",
        "bf16,sign",
        "--json",
        out,
    ]
    assert benchmark(*command) == 0
    content = json.loads(out.read_text())
    assert [row["way"] for row in content["rows"]] == ["plain", "bf16", "sign"]
    assert sum(row["chosen"] for row in content["rows"]) == 1
    assert all(row["predicted_seconds"] > 0 for row in content["rows"])
    assert content["machines"]["links"]["stack"]["cores"] == os.cpu_count()
    assert "fastest: " in capsys.readouterr().out


@pytest.mark.slow
def test_bench_simulate(tmp_path):
    out = tmp_path / "simulate.json"
    assert (
        benchmark(
            "simulate", "--ranks", 2, "--rounds", 1, "--calls", 1, "--sizes", "64KiB", "--json", out
        )
        == 0
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["plain", "int8", "sign"]
    assert all(row["seconds"] > 0 < row["simulated_seconds"] for row in rows)


@pytest.mark.slow
def test_bench_observe(tmp_path, capsys):
    out, picture = tmp_path / "observe.json", tmp_path / "observe.png"
    command = [
        "observe",
        "--ranks",
        2,
        "--rounds",
        2,
        "--steps",
        2,
        *SMALL,
        "--json",
        out,
        "--plot",
        picture,
    ]
    assert benchmark(*command) == 0
    content = json.loads(out.read_text())
    (row,) = content["rows"]
    assert row["spans"] >= 7, "forward, backward, optimizer, encode twice, decode, wire twice"
    assert 0 < row["span_seconds"] < 1e-3
    assert row["accounted"] > 0
    assert content["settings"]["ranks"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rounds_follow_links_that_change(tmp_path, capsys):
    out = tmp_path / "link.json"
    command = [
        "changing_link",
        *TINY,
        "--rates",
        "1gbit,500kbit",
        "--steps",
        "10",
        "--after",
        "4",
        "--json",
        out,
    ]
    if benchmark(*command) == 2:
        pytest.skip(f"no hosts here: {capsys.readouterr().err}")
    rows = json.loads(out.read_text())["rows"]
    changes = [row for row in rows if row["run"] == "changes"]
    assert [row["rate"] for row in changes] == ["1gbit", "500kbit", "1gbit"]
    assert changes[1]["length"] > changes[0]["length"] or rows[-1]["length"] > rows[-2]["length"], (
        "longer where links are slow"
    )
    assert all(row["fresh"] > 0 for row in rows)
    for steps, bar in ((1.0, True), (2.0, False)):
        phase = changing_link.Phase("changes", 1, "1gbit", 2, 3, steps, 1.0)
        assert changing_link.judge([phase])[0][1] is bar


@pytest.mark.slow
def test_probe_and_hierarchical(tmp_path, capsys):
    """The one reads what the other measures."""
    links, out = tmp_path / "links.json", tmp_path / "out.json"
    nodes = ["--ranks", "3", "--topology", "2,1"]
    assert (
        cli.main(["probe", *nodes, "--bytes", "64KiB", "--rounds", "2", "--out", str(links)]) == 0
    )
    said = capsys.readouterr()
    assert "probe 13/13: all-reduces with codec sign" in said.err
    assert re.search(r"^between nodes +\d+ +\d+\.\d +\d+\.\d$", said.out, re.M), said.out
    content = json.loads(links.read_text())
    assert content["nodes"] == [[0, 1], [2]]
    assert all(content[name]["together"] > 0 for name in ("inside", "between"))
    assert content["stack"]["cores"] == os.cpu_count(), "all ranks run on this machine"
    assert content["stack"]["exchange"] > 0
    assert content["stack"]["ring"] > 0
    for codec in ("none", "sign"):
        sizes = [numel for numel, *_ in content["trials"][codec]]
        assert sizes[:3] == [1024, 4096, 16384]
        assert all(flat > 0 and levels > 0 for _, flat, levels in content["trials"][codec])
    sizes = ["--min-bytes", "64KiB", "--max-bytes", "1MiB", "--factor", 16, "--iterations", 1]
    assert benchmark("hierarchical", *nodes, *sizes, "--links", links, "--json", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["size"], row["codec"]) for row in rows] == [
        (65536, "none"),
        (65536, "sign"),
        (1 << 20, "none"),
        (1 << 20, "sign"),
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert row["choice"] in ("flat", "hierarchical")
        assert row["loss"] >= 0
    assert all(0.98 <= row["node_bytes"] / row["formula_bytes"] <= 1.02 for row in rows[2:])
    capsys.readouterr()
    assert benchmark("hierarchical", "--ranks", 2, "--topology", "2x1", "--links", links) == 2
    assert "--links was measured on nodes '0 1|2', these are '0|1'" in capsys.readouterr().err


def test_bars_of_the_hierarchical_benchmark(capsys):
    good = hierarchical.Measured(1 << 20, "none", 3.0, 2.0, 1.0, 0, 1010, 1000.0, "hierarchical")
    for changed, holds in [
        ({}, [True, True, True]),
        ({"wrong": 1}, [False, True, True]),
        ({"node_bytes": 1030}, [True, False, True]),
        ({"choice": "flat"}, [True, True, False]),
        ({"choice": None}, [True, True]),
    ]:
        assert [bar for _, bar in hierarchical.judge([replace(good, **changed)])] == holds


# ---------------------------------------------------------------- what the pages show

PAGES = [sources.ROOT / "README.md", *sorted((sources.ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^|\s)(python benchmarks|benchmarks|commpress) (?=[a-z])(.*)")


def commands_shown(text: str) -> list[tuple[str, list[str]]]:
    """Program and arguments of every whole command in a page, in blocks and between words."""
    shown = []
    for i, part in enumerate(text.split("```")):
        lines, words = part.replace("\\\n", " ").splitlines(), re.findall(r"`([^`]+)`", part)
        spans = lines if i % 2 else words + [line for line in lines if line.startswith("    ")]
        for span in spans:
            found = COMMAND.search(" ".join(span.split()))
            if found and not re.search(r"…|\.\.\.|[|{]", found[2]):
                shown.append((found[1], shlex.split(found[2], comments=True)))
    return shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_one(page, monkeypatch, tmp_path):
    """With files of the names that it shows: the command line looks whether they can be read."""
    monkeypatch.chdir(tmp_path)
    for program, arguments in commands_shown(page.read_text()):
        for word in arguments:
            if word.endswith((".json", ".pt")) and "/" not in word:
                Path(word).write_text('{"model_type": "gpt2"}')
        (cli.parser() if program == "commpress" else parser()).parse_args(arguments)


def test_commands_are_found_in_blocks_and_between_words():
    text = (
        "Try `python benchmarks guard\n--rounds 1` or\n\n    torchrun x benchmarks fsdp  # "
        "all\n\n`commpress bench …`\n\n"
    )
    assert commands_shown(text + "```\ncommpress plan \\\n  --nodes 2x1\n```\n") == [
        ("python benchmarks", ["guard", "--rounds", "1"]),
        ("benchmarks", ["fsdp"]),
        ("commpress", ["plan", "--nodes", "2x1"]),
    ]
