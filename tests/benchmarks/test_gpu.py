"""The run for a GPU: every line of it on a twin, and what it makes of steps that fail, hang or
die."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gpu
import sources
from commpress.cli.option_groups import refuse_early
from commpress.errors import InvalidArgument
from gpu import runner
from gpu.runner import Figure, Result, Step

BENCHMARKS = sources.ROOT / "benchmarks"


def ran_to_the_end(folder: Path, names: list[str]) -> None:
    """The files that a twin has left in ``folder``."""
    about, results = gpu.read(folder / "results.jsonl")
    assert about["card"] == "CPU twin"
    assert [result.step for result in results] == names
    for result in results:
        assert result.status == "ok", result.why
        assert result.figures, result.step
        assert not any(figure.error for figure in result.figures)
        assert (folder / f"{result.step}.log").exists()


@pytest.mark.slow
def test_every_line_runs_on_a_twin_in_a_checkout_that_is_not_installed(compiled, tmp_path):
    """Without the links of site-packages, so that commpress is where the benchmarks lie, as on a
    machine that is lent."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(torch.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    names = [step.name for step in gpu.STEPS]
    command = [
        sys.executable,
        "-S",
        str(BENCHMARKS),
        "gpu",
        "--twin",
        "--check",
        "--out",
        "some/out",
    ]
    command += ["--steps", ",".join(names)]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "in place of CUDA: perf_counter for events" in ran.stdout
    ran_to_the_end(tmp_path / "some" / "out", names)
    _, results = gpu.read(tmp_path / "some" / "out" / "results.jsonl")
    assert sum(figure.limit is not None for result in results for figure in result.figures) > 40
    assert f"{len(names)} of {len(names)} steps ran to their end" in ran.stdout


@pytest.mark.skipif(not (sources.ROOT / ".git").exists(), reason="this is no checkout of git")
def test_make_gpu_is_the_first_command_in_a_fresh_clone_and_its_results_lie_in_build_gpu(
    compiled, tmp_path
):
    """With the changes that are not committed yet."""
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", str(sources.ROOT), str(clone)], check=True, timeout=60
    )
    changes = subprocess.run(
        ["git", "diff", "--binary", "HEAD"], cwd=sources.ROOT, check=True, capture_output=True
    ).stdout
    if changes:
        subprocess.run(["git", "apply"], cwd=clone, input=changes, check=True)
    command = ["make", "gpu", "ARGS=--twin", f"PYTHON={sys.executable}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=clone, env=environment, text=True, capture_output=True, timeout=240
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    ran_to_the_end(clone / "build" / "gpu", [step.name for step in gpu.STEPS if step.part == 1])


def test_the_folder_of_results_may_be_there_or_not(tmp_path):
    for folder in (tmp_path, tmp_path / "not" / "there"):
        refuse_early(options("--out", folder))


def test_the_first_part_ends_within_nine_minutes_and_the_second_within_twenty():
    assert sum(step.limit for step in gpu.STEPS if step.part == 1) <= 540
    assert sum(step.limit for step in gpu.STEPS if step.part == 2) <= 1200
    assert {step.part for step in gpu.STEPS} == {1, 2}


def good(machine, report):
    """Two figures."""
    report("speed", 0.9, "of copy", limit=0.8)
    report("waits", 2, limit=1, bound="most")


def failing(machine, report):
    """A line that fails and one that does not, and then all of it."""
    with report.line("first"):
        raise ValueError("no such thing")
    report("second", 1.0)
    raise RuntimeError("the device is gone")


def hanging(machine, report):
    """A figure, then nothing."""
    report("before", 1.0)
    time.sleep(60)


def dying(machine, report):
    """A process that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_step_that_fails_hangs_or_dies_is_told_with_the_reason_and_the_next_one_runs(tmp_path):
    steps = [
        Step("failing", failing, 20),
        Step("hanging", hanging, 1),
        Step("dying", dying, 20),
        Step("good", good, 20),
    ]
    failed, hung, died, fine = (runner.run(step, twin=True, folder=tmp_path) for step in steps)
    assert [(f.what, f.error, f.value) for f in failed.figures] == [
        ("first", "ValueError: no such thing", None),
        ("second", "", 1.0),
    ]
    assert failed.status == "failed"
    assert "the device is gone" in gpu.reason(failed)
    assert hung.status == "out of time"
    assert 1 <= hung.seconds < 10
    assert [f.what for f in hung.figures] == ["before"]
    assert re.search(r"test_gpu.py\", line \d+ in hanging", gpu.reason(hung)), (
        "it says where it was"
    )
    assert died.status == "failed"
    assert [f.holds for f in fine.figures] == [True, False]
    assert [f.ratio for f in fine.figures] == [pytest.approx(0.9 / 0.8), 2.0]
    assert fine.status == "ok"
    assert not fine.holds
    assert gpu.reason(fine) == "waits: 2, at most 1, 2.00 of it, MISSED"


def test_what_ran_is_entered_into_the_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# GPU\n\n{gpu.MARK}\n\nend\n")
    about = {
        "date": "2026-01-02",
        "card": "Some card",
        "torch": "2.11",
        "cuda": "13.0",
        "cupy": "14.2",
    }
    good, bad, absent = (
        Result("bits", 1, 60, figures=[Figure("x", 1.0)]),
        Result("ddp", 1, 60, "failed", 3.0, "CUDA error: a | b"),
        Result("nccl_ranks", 2, 60, figures=[Figure("y", note="not here: one card")]),
    )
    lines = [{"about": about, "part": 1}, *map(gpu.asdict, (good, bad, absent))]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    for _ in range(2):
        assert (
            gpu.run(options("--results", tmp_path / "results.jsonl", "--docs", page, "--check"))
            == 1
        )
    _, rows = page.read_text().split("| --- | --- | --- | --- | --- |\n")
    row = (
        "| 2026-01-02 | Some card | 2.11, 13.0, 14.2 | bits; not possible there: nccl_ranks | "
        "ddp: failed after 3 s of 60: CUDA error: a / b |\n"
    )
    assert rows == 2 * row + "\n\nend\n"
    assert "2 of 3 steps ran to their end" in capsys.readouterr().out
    page.write_text("nothing")
    with pytest.raises(InvalidArgument, match="has no line"):
        gpu.run(options("--results", tmp_path / "results.jsonl", "--docs", page))


def options(*arguments):
    from commands import parser

    return parser().parse_args(["gpu", *map(str, arguments)])


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InvalidArgument, match="leave --twin out"):
        gpu.run(options("--twin", "--docs", "page.md"))
    with pytest.raises(
        InvalidArgument, match="--steps has 'sing', expected some of compile, bits, kernels"
    ):
        gpu.run(options("--steps", "sing"))


def test_the_page_has_the_table_that_runs_fill():
    text = (sources.ROOT / "docs" / "gpu.md").read_text()
    assert text.count(gpu.MARK) == 1
    assert gpu.TABLE in text.partition(gpu.MARK)[2] + "\n"


def test_make_runs_it():
    command = ["make", "--dry-run", "--no-print-directory", "gpu", "PART=2", "ARGS=--twin"]
    ran = subprocess.run(command, cwd=sources.ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip().endswith(" benchmarks gpu --part 2 --twin")
