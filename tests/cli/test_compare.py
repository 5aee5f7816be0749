"""``commpress hosts`` and ``commpress compare``: commands of users, on hosts of their own and in
turns."""

import json
import sys

import pytest

from commpress.cli import compare, launchers, main, on_hosts
from commpress.cli.compare import TrainedRun
from commpress.cli.hosts import Hosts, HostsUnavailable
from commpress.errors import InvalidArgument, MissingPackage
from commpress.units import parse_rate

RANK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
MEAN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((250_000,), float(dist.get_rank()))
dist.all_reduce(total)
print("total", total[0].item())
dist.barrier()
dist.destroy_process_group()
"""
# losses that depend on the method and on the seed
TRAINS = """
import sys
method, seed = sys.argv[1], int(sys.argv[2])
for step in range(20):
    loss = 3 - step / 20 + seed + 0.1 * (method == "lossy")
    print(f"{{'loss': {loss}, 'epoch': 0.1}}")
"""


@pytest.fixture(scope="module")
def available():
    try:
        Hosts(2, rate=1e8).close()
    except (HostsUnavailable, MissingPackage) as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------- hosts


def test_a_launcher_is_told_which_machine_it_is_on_and_another_command_is_a_rank():
    words, variables = launchers.placed(["torchrun", "--nproc-per-node", "2", "a.py"], 1, 3, "host")
    assert words[0] == "torchrun"
    assert words[-3:] == ["--nproc-per-node", "2", "a.py"]
    assert {"--nnodes=3", "--node-rank=1", "--master-addr=host"} <= set(words)
    assert not variables

    words, _ = launchers.placed(["env", "A=b", "accelerate", "launch", "a.py"], 2, 4, "host")
    assert words[:4] == ["env", "A=b", "accelerate", "launch"]
    assert words[-1] == "a.py"
    assert {"--num_machines=4", "--machine_rank=2", "--num_processes=4"} <= set(words)
    words, _ = launchers.placed(["accelerate", "launch", "--num_processes=8", "a.py"], 0, 4, "host")
    assert "--num_processes=4" not in words

    words, _ = launchers.placed(["python3", "-m", "torch.distributed.run", "a.py"], 0, 2, "host")
    assert words[3] == "--nnodes=2"
    words, variables = launchers.placed(["python", "a.py", "--nnodes", "9"], 1, 2, "host")
    assert words == ["python", "a.py", "--nnodes", "9"]
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("1", "2")


@pytest.mark.parametrize("option", ["--nnodes=2", "--standalone", "--rdzv-endpoint=a:1"])
def test_a_launcher_that_was_told_already_is_refused(option):
    with pytest.raises(InvalidArgument, match=f"{option.partition('=')[0]}.*leave it out"):
        launchers.check(["torchrun", option, "a.py"])
    launchers.check(["torchrun", "a.py", option])  # of the script


def test_ranks_on_hosts_average_over_links_whose_bytes_are_counted(available, tmp_path, capfd):
    script, file = tmp_path / "mean.py", tmp_path / "hosts.json"
    script.write_text(MEAN)
    status = main(
        ["hosts", "2", "--rate", "50mbit", "--json", str(file), "--", sys.executable, str(script)]
    )
    assert status == 0
    said = capfd.readouterr().out
    assert "host0 | total 1.0" in said
    assert "host1 | total 1.0" in said
    for host in json.loads(file.read_text())["hosts"]:
        assert host["status"] == 0
        assert 1.0 <= host["sent_bytes"] / 1e6 < 1.6  # a float32 all-reduce of two sends it once
        assert host["seconds"] > 8e6 / 50e6


def test_once_a_host_has_failed_the_others_are_ended_and_its_status_is_told(
    available, monkeypatch, capfd
):
    monkeypatch.setattr(on_hosts, "GRACE", 0.3)
    fails = "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '1' else 600); sys.exit(7)"
    assert main(["hosts", "2", "--", sys.executable, "-c", fails]) == 7
    rows = capfd.readouterr().out.splitlines()[-2:]
    assert [row.split()[2] for row in rows] == ["143", "7"]


# ---------------------------------------------------------------- compare


@pytest.mark.parametrize(
    ("line", "training", "held_out"),
    [
        ("{'loss': '2.5', 'grad_norm': '1.1', 'learning_rate': '1e-3'}", [2.5], []),
        ('{"step": 3, "loss": 2.5e0}', [2.5], []),
        ("{'eval_loss': 1.25, 'eval_runtime': 3.0}", [], [1.25]),
        ("step 10/20 loss 2.5 (3.1 s)", [2.5], []),
        ("epoch 1: train_loss=2.5, val loss: 9", [2.5], []),
        ("validation loss: 1.25", [], [1.25]),
        ("held-out loss 1.25", [], [1.25]),
        (" 10%|#  | 1/10\r{'loss': 2.5}", [2.5], []),
        ("{'train_runtime': 3.2, 'train_loss': 2.5}", [], []),
        ("loss went up", [], []),
        ("glossy 3", [], []),
    ],
)
def test_losses_are_read_from_what_people_print(line, training, held_out):
    found = TrainedRun("none", 0)
    found.read(line, 1.0)
    assert (found.losses, found.held_out) == (training, held_out)


def test_a_pattern_takes_the_place_of_what_is_known():
    found = TrainedRun("none", 0)
    found.read("loss 9.0 nats=2.5", 1.0, r"nats=(?P<loss>[\d.]+)")
    assert found.losses == [2.5]
    assert found.times == [1.0]


def test_methods_take_turns_and_a_worse_one_is_told_beside_its_spread(tmp_path, capsys):
    script, file = tmp_path / "train.py", tmp_path / "runs.json"
    script.write_text(TRAINS)
    line = [sys.executable, str(script), "{method}", "{seed}"]
    asked = ["compare", "--methods", "none,lossy,same", "--seeds", "2", "--json", str(file)]
    status = main([*asked, "--out", str(tmp_path / "c.svg"), "--", *line])
    said = " ".join(capsys.readouterr().out.split())
    assert status == 1  # "same" changes nothing
    assert "lossy: worse than none (+4.04 ± 1.11 %" in said
    assert "same: its losses are those of none in every digit" in said
    runs = json.loads(file.read_text())["runs"]
    order = [(run["method"], run["seed"]) for run in runs]
    first = [(name, 0) for name in ("none", "lossy", "same")]
    assert order == first + [(name, 1) for name in ("same", "lossy", "none")]
    finals = {at: run["final"] for at, run in zip(order, runs, strict=True)}
    assert finals["none", 0] == pytest.approx((2.1 + 2.05) / 2)
    assert finals["lossy", 1] - finals["none", 1] == pytest.approx(0.1)
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_a_gap_within_the_spread_of_its_seeds_is_no_worse():
    losses = {"none": [2.0, 3.0, 4.0], "wide": [2.1, 2.9, 4.1], "worse": [2.1, 3.15, 4.2]}
    groups = {
        method: [
            TrainedRun(method, seed, [loss] * 2, [0.0, 1.0]) for seed, loss in enumerate(finals)
        ]
        for method, finals in losses.items()
    }
    said = compare.verdicts(groups)
    assert said[0].startswith("wide: no worse than none")
    assert said[1].startswith("worse: worse than none (+5.00 ± 0.00 %")


def test_a_command_that_fails_ends_with_its_last_words(tmp_path, capsys):
    asked = ["compare", "--out", str(tmp_path / "c.svg"), "--", "env", "A={method}", sys.executable]
    assert main([*asked, "-c", "print('loss 1'); raise SystemExit('no such codec')"]) == 2
    said = capsys.readouterr().err
    assert "none, seed 0: the command ended with status 1" in said
    assert "no such codec" in said
    assert main([*asked, "-c", "print('hello')"]) == 2
    assert "printed fewer than two losses; --pattern says" in capsys.readouterr().err


def test_a_run_that_fails_once_is_done_again(tmp_path, capsys):
    mark = tmp_path / "failed"
    code = f"import pathlib; m = pathlib.Path({str(mark)!r}); b = m.exists(); m.touch(); "
    code += "print('loss 2'); print('loss 1'); raise SystemExit(0 if b else 134)"
    asked = ["compare", "--out", str(tmp_path / "c.svg"), "--", "env", "A={method}", sys.executable]
    assert main([*asked, "-c", code]) == 1  # both methods are the same
    said = capsys.readouterr().out
    assert said.count("none, seed 0: failed, runs once more") == 1
    assert said.count("2 losses, final 1") == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--", "python3", "a.py"], "has no {method}"),
        (["--methods", "int8", "--", "env", "A={method}", "python3"], "at least two"),
        (["--methods", "a,a", "--", "env", "A={method}", "python3"], "at least two"),
        (["--seeds", "2", "--", "env", "A={method}", "python3"], "has no {seed}"),
        (["--rate", "1gbit", "--", "env", "A={method}", "python3"], "add --hosts"),
        (["--pattern", "(", "--", "env", "A={method}", "python3"], "--pattern"),
        (["--pattern", "a", "--", "env", "A={method}", "python3"], r"(?P<loss>"),
        (["--out", "a.txt", "--", "env", "A={method}", "python3"], ".svg"),
        (["--", "not-there", "{method}"], "no command 'not-there'"),
        ([], "which command?"),
    ],
)
def test_wrong_lines_are_refused_before_anything_runs(line, says, capsys):
    assert main(["compare", *line]) == 2
    assert says in capsys.readouterr().err


def test_rates_are_read():
    for text, rate in (("100mbit", 1e8), ("2.5Gbit", 2.5e9), ("9600", 9600.0)):
        assert parse_rate(text) == rate
    for text in ("fast", "0"):
        with pytest.raises(InvalidArgument, match="expected"):
            parse_rate(text)
