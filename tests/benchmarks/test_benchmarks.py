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
from time import perf_counter

import pytest
import torch

import commpress
import encoders
import hierarchical
import slower_disk
import sources
from commands import main, parser
from commpress import cli

TINY = "--width 32 --layers 1"
SMALL = f"{TINY} --batch 2 --length 16"


def benchmarks() -> dict[str, argparse.ArgumentParser]:
    (names,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return names.choices


# ---------------------------------------------------------------- help and refusals


@pytest.mark.parametrize("name", benchmarks())
def test_help_teaches(name):
    said = benchmarks()[name].format_help()
    assert len(re.findall(rf"^  .*benchmarks {name}\b.*$", said, re.M)) >= 2, said
    wanted = ("--json FILE",) if name == "faults" else ("--check", "--json FILE", "exit status 1")
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
        code = main(arguments)
    except SystemExit as left:  # argparse's way
        code = left.code
    assert code == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------- figures


def run(line: str, folder: Path) -> dict:
    """The file of a benchmark."""
    file = folder / "rows.json"
    assert main([*line.split(), "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_guard_on_spawned_ranks(compiled, tmp_path):
    """Ranks of their own processes find the benchmark's module."""
    sizes = "--min-bytes 4KiB --max-bytes 16KiB"
    rows = run(f"guard --ranks 2 {sizes} --rounds 1 --check", tmp_path)["rows"]
    assert [(row["size"], row["wrong"]) for row in rows] == [(4096, 0), (16384, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "count"), [("", 11), ("--tokens 64", 6)])
def test_optimizers(compiled, tmp_path, more, count):
    rows = run(f"optimizer {TINY} --steps 3 {more}", tmp_path)["rows"]
    assert rows[0]["name"] == "AdamW(fused=True)"
    assert len(rows) == count


@pytest.mark.slow
def test_all_to_all_and_experts(tmp_path):
    """Flat and by way of two nodes of one rank each, in the bits of torch or by the formula."""
    sizes = "--nodes 2x1 --min-bytes 4KiB --max-bytes 4KiB --rounds 1"
    (row,) = run(f"alltoall --ranks 2 {sizes} --check", tmp_path)["rows"]
    assert row["wrong"] == 0
    assert row["nodes"] > 0
    sizes = "--connections 1,2 --min-bytes 512KiB --max-bytes 512KiB --rounds 1"
    (row,) = run(f"alltoall --ranks 2 {sizes} --check", tmp_path)["rows"]
    assert row["wrong"] == 0
    assert all(row["over"][n] > 0 for n in "12")
    sizes = "--topology 2x1 --k 2 --tokens 256 --width 64 --experts 4 --rounds 1"
    (row,) = run(f"expert_dispatch --ranks 2 {sizes} --check", tmp_path)["rows"]
    assert row["wrong"] == 0 < row["node_bytes"]


@pytest.mark.slow
def test_low_rank_beside_torch(tmp_path):
    rows = run("powersgd --count 4 --shape 32x64 --steps 3 --walk 8", tmp_path)["rows"]
    assert [row["hook"] for row in rows] == ["commpress", "torch", "torch batched"]
    assert rows[0]["error"] == pytest.approx(rows[1]["error"], rel=0.2)


@pytest.mark.slow
def test_steps_while_a_rank_pauses(tmp_path):
    small = f"{TINY} --batch 2 --steps 24 --compute 40 --pause 60 --share 0.2 --wait 0.01"
    every, bounded = run(f"late_rank --ranks 2 {small}", tmp_path)["rows"]
    assert every["late_steps"] == 0 < bounded["pauses"] <= bounded["late_steps"]
    assert every["p99"] > 1.5 * every["p50"]
    assert every["loss"] == pytest.approx(bounded["loss"], rel=0.1)


@pytest.mark.slow
def test_local_updates_while_a_rank_pauses(tmp_path):
    small = f"{TINY} --batch 2 --steps 40 --compute 40 --pause 120 --share 0.2 --local 0.5"
    every, bounded = run(f"late_rank --ranks 2 {small} --codec int4", tmp_path)["rows"]
    assert [every["wait"], bounded["wait"]] == ["for all", "0.5 s"]
    assert every["p99"] > 1.5 * every["p50"]
    assert every["loss"] == pytest.approx(bounded["loss"], rel=0.1)


@pytest.mark.slow
def test_a_step_of_muon_beside_torch(tmp_path):
    rows = run(f"muon_step --ranks 2 --rounds 1 --steps 1 {SMALL}", tmp_path)["rows"]
    assert [row["variant"] for row in rows] == ["torch", "compute", "none", "coded"]
    torchs, _, exact, coded = rows
    assert exact["loss"] == pytest.approx(torchs["loss"], abs=1e-5)
    assert coded["loss"] == pytest.approx(torchs["loss"], abs=0.05)
    if coded["sent_bytes"] is not None:
        assert coded["sent_bytes"] < exact["sent_bytes"]


@pytest.mark.slow
def test_sharded_steps_send_fewer_bytes(tmp_path):
    rows = run(f"fsdp --ranks 2 --rounds 1 --steps 1 {SMALL} --ways plain,int8", tmp_path)["rows"]
    assert [row["variant"] for row in rows] == ["plain", "int8"]
    assert rows[1]["of_plain"] < 1 == rows[0]["of_plain"]


@pytest.mark.slow
def test_seconds_to_a_loss(compiled, tmp_path, capsys):
    curves = tmp_path / "curves.json"
    shared = f"loss {TINY} --ranks 2 --length 16 --train 14 --batch 8 --losses {curves} --rounds 1"
    shared += " --steps 2 --ways plain,powersgd1,onebit-4,onebit-int4-4,zero-one-int8-4 --target"

    def kept() -> list[dict]:
        return json.loads(curves.read_text())["curves"]

    assert main(f"{shared} 1 --lr 1e-3,4e-3 --no-times".split()) == 0
    first = kept()
    tried = [(curve["variant"], curve["lr"]) for curve in first[:3]]
    assert tried == [("plain", 1e-3), ("plain", 4e-3), ("powersgd1", 1e-3)]
    assert all(len(curve["losses"]) == len(curve["kinds"]) == 14 for curve in first)
    assert all(curve["finer"] for curve in first if curve["bytes"])
    assert main(f"{shared} 1 --lr 1e-3 --ways plain --seeds 2 --no-times".split()) == 0
    second = kept()
    assert second[:-1] == first
    assert second[-1]["seed"] == 1
    assert second[-1]["losses"] != first[0]["losses"]
    content = run(f"{shared} 5.6", tmp_path)
    assert kept() == second
    took, sent = content["step_seconds"], content["step_bytes"]
    assert set(took) >= {"plain", "powersgd1", "exact", "exact-int4", "onebit-int4-4, compressed"}
    for row in content["rows"]:
        if row["seconds"] is not None:
            total = sum(took[kind] * count for kind, count in row["kinds"].items())
            assert row["seconds"] == pytest.approx(total)
    if sent["plain"] is not None:
        assert sent["onebit-4, compressed"] < sent["plain"]
    earlier = (tmp_path / "rows.json").rename(tmp_path / "earlier.json")
    assert run(f"{shared} 5.6 --times {earlier}", tmp_path)["rows"] == content["rows"]
    changed = json.loads(curves.read_text())
    for curve in changed["curves"]:
        curve["finer"] = []
    curves.write_text(json.dumps(changed))
    capsys.readouterr()
    assert main(f"{shared} 5.6 --lr 1e-3".split()) == 2
    assert "bytes here, but sent" in capsys.readouterr().err


@pytest.mark.slow
def test_losses_of_optimizers_are_kept_and_merged(compiled, tmp_path, capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    file, drawn = tmp_path / "part.json", tmp_path / "every.svg"
    shared = "convergence --tasks gpt --seeds 1 --steps 20 --optimizers adam"
    assert main(f"{shared} onebit --json {file}".split()) == 0
    first = file.read_bytes()
    assert main(f"{shared} onebit --json {file}".split()) == 0
    assert file.read_bytes() == first
    assert main(f"convergence --merge {file}".split()) == 0
    assert capsys.readouterr().out.count("onebit") == 3
    every = f"{shared} zero-one --sync every --exact-codec log3 --plot {drawn}"
    assert main(every.split()) == 0
    assert "zero-one, every, log3" in capsys.readouterr().out
    assert "zero-one, every, log3: " in drawn.read_text()


@pytest.mark.slow
def test_losses_of_rounds_and_of_optimizers_that_average(tmp_path, capsys):
    short = "--ranks 2 --windows 4 --steps 4 --rates 1e-3 --seeds 1 --codecs int4"
    runs = run(
        "local_loss --every 2 --hidden 1 --by-spread --start 0 --optimizers Muon Muon-none "
        + short,
        tmp_path,
    )["runs"]
    sent = {(one["run"]["optimizer"], one["run"]["codec"]): one["sent"] for one in runs}
    assert sent["Muon", "none"] < sent["Muon-none", "none"] / 3
    every = {one["run"]["every"] for one in runs}
    assert {0, 1, 2} <= every
    assert {one["run"]["every"] for one in runs if one["run"]["by_spread"]} == {1}
    assert all(0 < one["loss"] < 8 for one in runs)


@pytest.mark.slow
def test_encoders_agree(monkeypatch, capsys, tmp_path):
    slow = encoders.candidates
    quick = lambda numel: {k: v for k, v in slow(numel).items() if k != "torch.compile"}  # noqa: E731
    monkeypatch.setattr(encoders, "candidates", quick)
    before = torch.get_num_threads()
    assert len(run("encoders --numel 262144 --threads 1", tmp_path)["rows"]) == 3
    assert torch.get_num_threads() == before
    assert "failed" not in capsys.readouterr().out


@pytest.mark.slow
def test_saved_tensors_in_a_store_train_the_same_bits(tmp_path):
    small = "--width 64 --layers 1 --length 1024 --steps 1 --threads 1 --host 4MiB"
    rows = run(f"activations {small}", tmp_path)["rows"]
    assert [row["name"] for row in rows] == ["in memory", "disk", "RAM"]
    assert len({row["bits"] for row in rows}) == 1
    assert rows[0]["saved"] == 0 < min(rows[1]["saved"], rows[2]["saved"])


@pytest.mark.slow
def test_micro_batches_together_train_the_same_bits(tmp_path):
    small = "--width 64 --layers 2 --micro-batches 3 --steps 1 --threads 1 --host 600"
    rows = run(f"micro_batches {small} --folder {tmp_path}", tmp_path)["rows"]
    assert len({row["bits"] for row in rows}) == 1
    assert all(0.8 < share < 1.01 for row in rows for share in row["of_formula"])
    small += f" --in-ram 1 --rate 0.1 --folder {tmp_path}"
    rows = run(f"micro_batches {small}", tmp_path)["rows"]
    assert [row["layers"] for row in rows] == [2, 2, 1, 1]
    assert rows[0]["bits"] == rows[1]["bits"] != rows[2]["bits"] == rows[3]["bits"]


def test_a_disk_held_to_a_rate_takes_the_time_and_keeps_the_bytes(tmp_path):
    rate, nbytes = 0.05, 8 << 20
    wanted = torch.randn(nbytes // 4)
    with commpress.TieredStore.open(tmp_path / "store", host="16MiB") as store:
        slower_disk.hold(store, rate)
        store.put("x", wanted)
        begin = perf_counter()
        store.commit()
        took = perf_counter() - begin
        assert nbytes / rate / 1e9 <= took < 3
    with commpress.TieredStore.open(tmp_path / "store", host="16MiB") as store:
        slower_disk.hold(store, rate)
        begin = perf_counter()
        with store.borrow("x", write=False) as held:
            assert torch.equal(held, wanted)
        assert perf_counter() - begin >= nbytes / rate / 1e9


@pytest.mark.parametrize(
    ("words", "says"), [("--in-ram 9", "expected 1 to 8"), ("--rate 0", "above zero")]
)
def test_settings_of_micro_batches_that_do_not_fit(words, says, capsys):
    assert main(f"micro_batches {words}".split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_parking_is_held_against_moving_the_bytes_alone(tmp_path):
    rows = run("parking --state 64MiB --width 512 --rounds 1 --threads 1", tmp_path)["rows"]
    assert [row["place"] for row in rows] == ["RAM", "disk"]
    assert all(row["equal"] and row["park"] > 0 < row["alone"] for row in rows)


@pytest.mark.slow
def test_a_plan_is_held_against_measurements(tmp_path, capsys):
    content = run(f"plan --ranks 2 --rounds 1 --steps 1 {SMALL} --ways bf16,sign", tmp_path)
    assert [row["way"] for row in content["rows"]] == ["plain", "bf16", "sign"]
    assert sum(row["chosen"] for row in content["rows"]) == 1
    assert all(row["predicted_seconds"] > 0 for row in content["rows"])
    assert content["machines"]["links"]["stack"]["cores"] == os.cpu_count()
    assert "fastest: " in capsys.readouterr().out


@pytest.mark.slow
def test_simulated_calls_are_held_against_measurements(tmp_path):
    rows = run("simulate --ranks 2 --rounds 1 --calls 1 --sizes 64KiB", tmp_path)["rows"]
    assert [row["way"] for row in rows] == ["plain", "int8", "sign"]
    assert all(row["seconds"] > 0 < row["simulated_seconds"] for row in rows)


@pytest.mark.slow
def test_watching_is_accounted_for(tmp_path):
    content = run(f"observe --ranks 2 --rounds 2 --steps 2 {SMALL}", tmp_path)
    (row,) = content["rows"]
    assert row["spans"] >= 7, "forward, backward, optimizer, encode twice, decode, wire twice"
    assert 0 < row["span_seconds"] < 1e-3
    assert row["accounted"] > 0
    assert content["settings"]["ranks"] == 2


@pytest.mark.slow
def test_probe_and_hierarchical(tmp_path, capsys):
    """The one reads what the other measures."""
    links, nodes = tmp_path / "links.json", "--ranks 3 --topology 2,1"
    probe = f"probe {nodes} --bytes 64KiB --rounds 2 --out {links}"
    assert cli.main(probe.split()) == 0
    said = capsys.readouterr()
    assert "probe 8/8: all-reduces with codec sign" in said.err
    assert re.search(r"^between nodes +\d+ +\d+\.\d +\d+\.\d$", said.out, re.M), said.out
    content = json.loads(links.read_text())
    assert content["nodes"] == [[0, 1], [2]]
    assert all(content[name]["together"] > 0 for name in ("inside", "between"))
    assert content["stack"]["cores"] == os.cpu_count(), "all ranks run on this machine"
    assert content["stack"]["exchange"] > 0 < content["stack"]["ring"]
    for codec in ("none", "sign"):
        sizes = [numel for numel, *_ in content["trials"][codec]]
        assert sizes[:3] == [1024, 4096, 16384]
        assert all(flat > 0 and levels > 0 for _, flat, levels in content["trials"][codec])
    sizes = "--min-bytes 64KiB --max-bytes 1MiB --factor 16 --iterations 1"
    rows = run(f"hierarchical {nodes} {sizes} --links {links}", tmp_path)["rows"]
    every = [(size, codec) for size in (65536, 1 << 20) for codec in ("none", "sign")]
    assert [(row["size"], row["codec"]) for row in rows] == every
    for row in rows:
        assert row["wrong"] == 0 <= row["loss"]
        assert row["choice"] in ("flat", "hierarchical")
    assert all(0.98 <= row["node_bytes"] / row["formula_bytes"] <= 1.02 for row in rows[2:])
    capsys.readouterr()
    assert main(f"hierarchical --ranks 2 --topology 2x1 --links {links}".split()) == 2
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
            if word.endswith(".json") and "/" not in word:
                Path(word).write_text('{"model_type": "gpt2"}')
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        (cli.parser() if program == "commpress" else parser()).parse_args(own)


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


# ---------------------------------------------------------------- the store beside fio

FIO = """#!/bin/sh
for word in "$@"; do case $word in --rw=*) verb=${word#--rw=};; esac; done
case "$*" in *--ioengine=psync*) exit 1;; *--ioengine=libaio*) took=200.5;; *) took=100.5;; esac
echo "warning"
echo "{\\"jobs\\": [{\\"$verb\\": {\\"io_bytes\\": 32000000, \\"runtime\\": $took}}]}"
"""


def test_the_store_is_held_against_the_fastest_engine_of_fio(tmp_path, monkeypatch, capsys):
    """A program in place of fio says 320 MB/s, half of it with libaio, and has no
    psync."""
    fio, folder = tmp_path / "bin" / "fio", tmp_path / "store"
    for made in (fio.parent, folder):
        made.mkdir()
    fio.write_text(FIO)
    fio.chmod(0o700)
    monkeypatch.setenv("PATH", str(fio.parent), prepend=os.pathsep)
    line = f"--directory {folder} --size 32MiB --chunks 4MiB --rounds 1 --engine threads"
    out = tmp_path / "rows.json"
    status = main(["store_io", *line.split(), "--check", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(r["verb"], r["fio_engine"]) for r in rows] == [
        ("write", "io_uring"),
        ("read", "io_uring"),
    ]
    assert [r["fio"] for r in rows] == pytest.approx([320e6, 320e6])
    assert [r["of_fio"] for r in rows] == pytest.approx([r["store"] / 320e6 for r in rows])
    assert status == any(r["of_fio"] < 0.95 for r in rows)
    assert [*folder.iterdir()] == []
    fio.write_text("#!/bin/sh\nexit 1\n")
    assert main(["store_io", *line.split()]) == 2
    assert "fio has none of the engines" in capsys.readouterr().err
