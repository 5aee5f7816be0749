"""The command line at toy size: that commands run, say what they measured, and fail when they
should."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

import sources
from commpress import __version__ as version
from commpress.cli import (
    charts,
    connections,
    harness,
    main,
    parser,
    plan,
    ranks,
    terminal,
)
from commpress.cli.commands import COMMANDS as REGISTERED
from commpress.cli.commands import MEASURE
from commpress.cli.ranks import LocalRanks
from commpress.errors import InvalidArgument
from commpress.plan.candidates import Candidate
from commpress.tiered_mem import parse_bytes

TINY = "--width 32 --layers 1 --batch 2 --length 16"


def commpress(*arguments: str) -> int:
    return main([str(a) for a in arguments])


def status(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as left:  # what the parser refuses
        return left.code


@pytest.fixture(scope="module")
def two():
    """Two ranks for all commands of this file: starting a process takes longer than what most of
    them do."""
    with LocalRanks(2) as pool:
        yield pool


@pytest.fixture
def on_two(two, monkeypatch):
    """Commands that want two ranks have these."""

    def given(size, *, threads=1):
        assert (size, threads) == (2, 1)
        return nullcontext(two)

    monkeypatch.setattr(ranks, "LocalRanks", given)


# ---------------------------------------------------------------- help and refusals


@pytest.mark.parametrize("command", REGISTERED, ids=lambda command: command.words)
def test_help_teaches(command, capsys):
    """Help of the whole command, with examples; each bench writes its rows."""
    assert status([*command.words.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: commpress {command.words} [-h]")
    assert len(re.findall(rf"^  .*commpress {command.words}.*$", said, re.M)) >= 2, said
    if command.group == MEASURE:
        assert "--json FILE" in said


def test_help_and_version_load_no_torch():
    """All help texts in one fresh process, and no module that a command runs."""
    code = """
import contextlib, io, sys
from commpress.cli import main
from commpress.cli.commands import COMMANDS
every = [["--version"], ["--help"], ["bench", "--help"]]
every += [[*c.words.split(), "--help"] for c in COMMANDS]
for words in every:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main(words)
    assert said.getvalue(), words
heavy = {"torch", "numpy", "rich", "matplotlib", "numba", "llvmlite"}
loaded = {name.split(".")[0] for name in sys.modules} & heavy
ours = {name for name in sys.modules if name.startswith("commpress.")}
runs = {"commpress.cli." + c.runs.partition(".")[0] for c in COMMANDS}
print(sorted(loaded), sorted(ours & runs))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[] []\n", "")


def test_each_command_is_shown_once_in_a_group_and_fits_100_columns(capsys):
    with pytest.raises(SystemExit):
        commpress("--help")
    said = capsys.readouterr().out
    for one in REGISTERED:
        line = rf"^  commpress {one.words} +{re.escape(one.summary)}$"
        assert len(re.findall(line, said, re.M)) == 1
        module, function = one.runs.split(".")
        assert hasattr(import_module(f"commpress.cli.{module}"), function)
    assert max(map(len, said.splitlines())) <= 100


def test_python_m_and_version():
    ran = subprocess.run(
        [sys.executable, "-m", "commpress", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, f"commpress {version}\n")


def leaves(top: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [top]
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found += leaves(below)
    return found


def test_the_page_of_the_command_line_names_every_command():
    page = (sources.ROOT / "docs" / "command_line.md").read_text()
    assert [c.words for c in REGISTERED if f"`{c.words.split()[-1]}`" not in page] == []


def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(capsys, monkeypatch):
    assert commpress("demo", "--out", "picture.doc") == 2
    assert "expected a name that ends in .png, .svg, .pdf" in capsys.readouterr().err
    monkeypatch.setattr("commpress.cli.option_groups.find_spec", lambda name: None)
    assert commpress("demo", "--out", "picture.png") == 2
    assert "--out needs matplotlib: pip install 'commpress[demo]'" in capsys.readouterr().err


def test_every_option_has_a_help_text():
    for command in leaves(parser()):
        assert [
            a.dest
            for a in command._actions
            if not a.help and not isinstance(a, argparse._SubParsersAction)
        ] == []


WITHOUT_TORCH = """
import contextlib, io, json, sys
for name in sys.argv[2:]:
    sys.modules[name] = None  # importing it fails
from commpress.cli import main
said = {}
for line in json.loads(sys.argv[1]):
    heard, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(out):
        try:
            code = main(line.split())
        except SystemExit as left:
            code = left.code
        except ImportError as error:
            code = str(error)
    said[line] = [code, heard.getvalue() or "-"]
print(json.dumps(said))
"""


LINKS = '{"format": "commpress links", "version": 1, "nodes": %s}'


EARLY = [
    (
        "demo --lr x",
        ("commpress demo: error: argument --lr: got 'x', expected a number above 0"),
    ),
    (
        "demo --seconds -1",
        "commpress demo: error: argument --seconds: got '-1', expected a number above 0",
    ),
    (
        "demo --rte 1gbit",
        "commpress demo: error: there is no option '--rte': did you mean '--rate'?",
    ),
    (
        "demo --second 5",
        "commpress demo: error: there is no option '--second': did you mean '--seconds'?",
    ),
    (
        "bench train --variants sign",
        "commpress bench train: error: there is no option '--variants'",
    ),
    ("bench --quick", "commpress bench: error: the following arguments are required: COMMAND"),
    ("doctor now", "commpress doctor: error: 'now' is one word too many"),
    (
        "probe --bytes 1",
        "commpress probe: error: argument --bytes: got '1', expected at least 1KiB",
    ),
    (
        "plan",
        (
            "commpress: error: expected one of --parameters, --model and --config: what is to be "
            "trained?"
        ),
    ),
    ("demo --ways plain,sing", "argument --ways: got 'sing', expected some of no-network, plain"),
    ("demo --ways plain,sing", "did you mean 'sign'?"),
    ("demo --width 30", "argument --width: got '30', expected a width that 4 heads share"),
    (
        "demo --layers 5000",
        "argument --layers: got '5000', expected a whole number of at least 1 and at most 1024",
    ),
    (
        "demo --out demo.txt",
        "--out is 'demo.txt', expected a name that ends in .png, .svg, .pdf",
    ),
    ("demo --ranks 251", "--ranks is 251, expected at most 250 where each has a host of its own"),
    ("doctor --only netwrk", "argument --only: got 'netwrk', expected some of torch, backends"),
    ("doctor --only netwrk", "did you mean 'network'?"),
    (
        "probe --topology 2x",
        "argument --topology: topology is '2x', expected nodes x ranks ('2x4')",
    ),
    (
        "probe --topology 2x2 --ranks 3",
        "--topology '2x2' has 4 ranks and --ranks is 3: they must be as many",
    ),
    ("probe --ranks 1", "argument --ranks: got '1', expected a whole number of at least 2"),
    ("bench allreduce --codec sing", "did you mean 'sign'?"),
    (
        "bench allreduce --codec powersgd-4",
        "argument --codec: codec 'powersgd/4/2' compresses whole tensors",
    ),
    (
        "bench allreduce --min-bytes 1MiB --max-bytes 1KiB",
        "expected 4 <= --min-bytes <= --max-bytes",
    ),
    ("bench io --chunks 3MiB", "--chunks must be at least 1MiB and divide --size"),
    ("bench io --chunks many", "argument --chunks: size is 'many', expected a number with KiB"),
    ("bench io --size 0", "--chunks must be at least 1MiB and divide --size"),
    ("bench io --engine spdk", "argument --engine: invalid choice: 'spdk' (choose from"),
    ("weights serve run --port -1", "argument --port: got '-1', expected a whole number"),
    ("weights pull a b --limit many", "argument --limit: size is 'many', expected a number"),
    ("weights verify run --json /nowhere/all.json", "--json is '/nowhere/all.json', expected"),
    ("weights stat run --json /nowhere/all.json", "--json is '/nowhere/all.json', expected"),
    (
        "bench train --ways powersgd",
        "argument --ways: got 'powersgd', expected powersgdN or one of compute",
    ),
    ("bench train --width 30", "argument --width: got '30', expected a width that 4 heads share"),
    ("plan --parameters 1M --compute-ms 1 --allow sing", "--allow has 'sing': codec is 'sing'"),
    (
        "plan --parameters 1M --compute-ms 1 --memory gpu=1GiB",
        "argument --memory: memory is 'gpu=1GiB', expected a list such as device=24GiB",
    ),
    (
        "plan --parameters 1M --compute-ms 1 --model os:getcwd",
        "expected one of --parameters, --model and --config",
    ),
    (
        "plan --config /nowhere.json --compute-ms 1",
        "argument --config: '/nowhere.json' cannot be read",
    ),
    ("plan --config /dev/null --compute-ms 1", "argument --config: /dev/null is no JSON"),
    (
        "plan --model mymodels --compute-ms 1",
        "argument --model: got 'mymodels', expected module:function",
    ),
    ("plan --parameters 1M", "--compute-ms is missing"),
    ("plan --parameters 0", "argument --parameters: got '0', expected at least 1000 parameters"),
    (
        "plan --parameters 1M --compute-ms 1 --nodes 1x1",
        "a cluster of one rank sends nothing: give --nodes with at least two",
    ),
    ("simulate --nodes 9000000000x8", "a topology have more ranks than 1048576"),
    (
        "plan --parameters 1M --compute-ms 1 --links /nowhere.json",
        "argument --links: '/nowhere.json' cannot be read, expected what commpress probe wrote",
    ),
    (
        "plan --parameters 1M --compute-ms 1 --cores -1",
        "argument --cores: got '-1', expected a number of at least 0",
    ),
    (
        "simulate --ways powersgd-4",
        "powersgd-4 needs shapes: give --parameters, --model or --config",
    ),
    ("simulate --parameters 1M", "--compute-ms is missing"),
    ("simulate --scaling 0", "argument --scaling: got '0', expected positive numbers"),
    ("simulate --bytes 0", "--bytes is '0', expected at least 4"),
    ("hosts 2", "which command? write it behind --"),
    ("hosts 2 -- torchrun --nnodes 2 a.py", "the command has --nnodes, which commpress hosts"),
    ("compare -- python3 a.py", "the command has no {method}"),
    (
        "from-deepspeed /nowhere.json",
        "'/nowhere.json' cannot be read (No such file or directory), expected a ds",
    ),
    ("bench train --bucket-mb 0", "argument --bucket-mb: got '0', expected a number above 0"),
]


def without_torch(lines, *others):
    """The exit status and what is said of each of these lines, in a process of its own where torch
    and others cannot be imported."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines), "torch", *others],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_wrong_lines_are_refused_before_torch_is_imported():
    """Each in a sentence; a wrong word after the usage of its command. Of every command some."""
    found, commands = without_torch([typed for typed, _ in EARLY]), set()
    for typed, says in EARLY:
        code, said = found[typed]
        assert code == 2, typed
        assert says in said.splitlines()[-1], typed
        words = [c.words for c in REGISTERED if f"{typed} ".startswith(f"{c.words} ")]
        commands.update(words)
        if "argument --" in says:
            assert said.startswith(f"usage: commpress {words[0]} [-h]"), said
    assert commands == {command.words for command in REGISTERED}


CONTENTS = [  # of a file, the line that names it, and what is said
    ("no JSON", "plan {} --links FILE", "--links has 'FILE': FILE is no JSON"),
    ("{}", "simulate --links FILE", "FILE is None, version None, expected 'commpress links'"),
    (LINKS % "[[0], [0]]", "plan {} --links FILE", "expected every rank from 0 on exactly once"),
    (LINKS % "[[0]]", "simulate --links FILE", "a cluster of one rank sends nothing"),
    (LINKS % '"all"', "plan {} --links FILE", "FILE has nodes 'all', expected lists"),
    ('{"model_type": "gpt2"}', "plan --config FILE --compute-ms 1", "pip install 'commpress[hf]'"),
]


def test_contents_of_files_are_refused_before_torch_is_imported(tmp_path):
    lines = {}
    for number, (content, typed, says) in enumerate(CONTENTS):
        path = tmp_path / f"{number}"
        path.write_text(content)
        typed = typed.replace("{}", "--parameters 1M --compute-ms 1").replace("FILE", str(path))
        lines[typed] = says.replace("FILE", str(path))
    found = without_torch([*lines], "transformers")
    for typed, says in lines.items():
        code, said = found[typed]
        assert code == 2, (typed, said)
        assert says in said.splitlines()[-1], said


def test_codecs_of_users_are_known_before_torch_and_after_their_module(
    tmp_path, monkeypatch, capsys
):
    """Without --model nobody can have registered one; with it names are looked up when its module
    is imported."""
    module = (
        "import commpress, my_codec, torch\ncommpress.register_codec('cli-own', "
        "my_codec.TwoBits())\n"
    )
    module += (
        "make = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))\n"
        "dear = lambda: 1 / 0\n"
    )
    (tmp_path / "registers.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    for command, option in (("plan", "--allow"), ("simulate", "--ways")):
        given = [command, "--compute-ms", "1", "--device", "900GB/s", option]
        assert status([*given, "cli-mine", "--parameters", "1M"]) == 2
        assert status([*given, "cli-own", "--model", "registers:make"]) == 0
        assert "cli-own" in capsys.readouterr().out
        # a name that nobody can register needs no module, and a wrong one no model
        for model, word in (("make", "cli-other"), ("dear", "cli-other"), ("make", "Sign")):
            module = "nowhere" if word == "Sign" else "registers"
            assert status([*given, word, "--model", f"{module}:{model}"]) == 2
            assert f"{option} has '{word}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["bnch", "io"], "invalid choice: 'bnch' (choose from "),
        (["bench", "trian"], "invalid choice: 'trian' (choose from "),
        (["bench"], "the following arguments are required: COMMAND"),
        (
            ["plan", "--compute-ms", "-3"],
            "argument --compute-ms: got '-3', expected a number above 0",
        ),
        (
            ["plan", "--model", "os:getcwd", "--compute-ms", "5"],
            "returns a str, expected a torch.nn.Module",
        ),
        (["plan", "--model", "operator:add", "--compute-ms", "5"], "add() raises TypeError"),
    ],
)
def test_what_is_meant_is_named(typed, says, capsys):
    assert status(typed) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_half_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert commpress("bench", "allreduce") == 2
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not" in capsys.readouterr().err


# ---------------------------------------------------------------- measurements


def test_a_line_is_the_mean_of_the_last_fiftieth():
    assert charts.smooth([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert charts.smooth([float(i) for i in range(100)])[-2:] == [97.5, 98.5]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells what a socket sent"
)
def test_sent_bytes_are_those_of_the_sockets(connected):
    sender, receiver = connected
    before = connections.sent_bytes()
    sender.sendall(bytes(100_000))
    assert len(receiver.recv(100_000, socket.MSG_WAITALL)) == 100_000
    assert 100_000 < connections.sent_bytes() - before < 110_000


# ---------------------------------------------------------------- benchmarks


def benched(line, folder):
    """The rows of a bench."""
    out = folder / "rows.json"
    assert main([*f"bench {line}".split(), "--json", str(out)]) == 0
    return json.loads(out.read_text())["rows"]


def test_bench_io(tmp_path, capsys):
    line = f"io --directory {tmp_path} --size 32MiB --chunks 1MiB,4MiB --rounds 1"
    rows = benched(f"{line} --engine threads", tmp_path)
    verbs = [(chunk, verb) for chunk in (1, 4) for verb in ("write", "read")]
    assert [(r["chunk"] >> 20, r["verb"]) for r in rows] == verbs
    assert all(0 < r["low"] <= r["store"] <= r["high"] for r in rows)
    assert 'suggested: TieredStore.open(..., engine="threads"' in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"], "nothing stays behind"


def test_the_table_of_a_plan_fits_100_columns():
    memory = {"device": 123.4e9, "host": 12.3e9, "disk": 12.3e9}
    long = Candidate("local topk-64+bits2, 19 steps, hidden", "", 12.3456, 1234.56e6, memory)
    said = terminal.table([plan.cells(long, long, [""] * 10 + ["exact"])])
    assert max(map(len, said.splitlines())) <= 100


def test_bench_allreduce(on_two, tmp_path, capsys):
    sizes = "--ranks 2 --min-bytes 40KB --max-bytes 400KB --factor 10"
    rows = benched(f"allreduce {sizes} --iterations 3 --warmup 0 --check", tmp_path)
    said = capsys.readouterr().out
    assert said.count("\nok ") == 1
    assert "busbw" in said
    assert max(map(len, said.splitlines()[:4])) <= 100, "it fits a terminal"
    assert [(r["size"], r["codec"]) for r in rows[:2]] == [(40_000, "sign"), (400_000, "sign")]
    assert rows[1]["ratio"] > 28
    assert all(r["wrong"] == 0 for r in rows)


@pytest.mark.slow
def test_bench_allreduce_under_torchrun(tmp_path):
    launch = [sys.executable, *["-m", "torch.distributed.run", "--standalone"]]
    launch += ["--local-addr=127.0.0.1", "--nproc-per-node=2", "--no-python"]
    bench = "bench allreduce --iterations 2 --min-bytes=8KB --max-bytes=8KB --codec=int8"
    command = [*launch, str(Path(sys.executable).with_name("commpress")), *bench.split()]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("# 2 ranks") == 1, "one rank prints"
    assert re.search(r"^8000 +int8 ", ran.stdout, re.M), ran.stdout


def test_bench_train(on_two, tmp_path, capsys):
    rounds = f"train --ranks 2 --rounds 2 --steps 2 {TINY} --bucket-mb 0.05"
    rows = {row["variant"]: row for row in benched(rounds, tmp_path)}
    assert list(rows) == ["compute", "plain", "bf16", "powersgd1", "sign"]
    assert rows.keys() <= {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["compute"]["exposed_seconds"] == 0
    if rows["plain"]["sent_bytes"] is not None:
        assert rows["compute"]["sent_bytes"] < 1000, "no communication but the barrier"
        assert rows["plain"]["sent_bytes"] > rows["bf16"]["sent_bytes"] > rows["sign"]["sent_bytes"]


def test_calls_take_turns_and_each_begins_once():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    took = harness.interleaved(calls, 2, warm=1)
    assert "".join(order) == "abcacbcab"
    assert took == {"a": [4, 8], "b": [6, 9], "c": [5, 7]}


def test_progress_is_a_few_lines_where_there_is_no_terminal(capsys):
    with terminal.ProgressBar("probe", lines=4) as progress:
        for i in range(1, 11):
            progress(i / 10, f"{i}/10")
    assert capsys.readouterr().err == "probe 3/10\nprobe 5/10\nprobe 8/10\nprobe 10/10\n"


@dataclass
class Row:
    loss: float

    @property
    def twice(self):
        return 2 * self.loss


def test_what_is_measured_is_written_with_settings_and_judged(tmp_path, capsys):
    options = argparse.Namespace(check=True, json=str(tmp_path / "rows.json"), rounds=3, run=print)
    rows = [Row(2.0)]
    status = harness.deliver(options, rows, judge=lambda rows: [("fast", rows[0].loss < 1)], more=7)
    assert status == 1
    assert capsys.readouterr().out == "\nFAIL  fast\n"
    content = json.loads(Path(options.json).read_text())
    assert content["settings"] == {"check": True, "json": options.json, "rounds": 3}
    assert content["rows"] == [{"loss": 2.0, "twice": 4.0}]
    assert (content["bars"], content["more"]) == ([["fast", False]], 7)


def test_sizes():
    sizes = {"32MiB": 1 << 25, "1 kb": 1000, "1.5GB": 1_500_000_000, "7": 7}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    with pytest.raises(InvalidArgument, match="expected a number with KiB"):
        parse_bytes("many")
