"""Every example is short, and some test runs it; here those that have no file of their own."""

import os
import re
import subprocess
import sys

import pytest

import sources
from scripts import SETTINGS

EXAMPLES = sources.ROOT / "examples"
LINES = 220


def start(name, *arguments, folder, launch=()):
    """The example as a user starts it; what it logs beside its output is in ``folder``/log.txt."""
    command = [sys.executable, "-u", *(launch or ["-W", "error"]), str(EXAMPLES / name), *arguments]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | SETTINGS,
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
        )


def test_every_example_is_short_and_run_by_a_test_and_on_a_page():
    tests = "".join(path.read_text() for path in sorted((sources.ROOT / "tests").rglob("*.py")))
    pages = "".join(path.read_text() for path in sorted((sources.ROOT / "docs").glob("*.md")))
    for path in sorted(EXAMPLES.iterdir()):
        if path.suffix == ".py":
            assert len(path.read_text().splitlines()) <= LINES, (
                f"{path.name} is longer than {LINES} lines"
            )
        if path.is_file():
            assert re.search(rf'"{path.stem}(\.\w+)?"|examples/{path.name}', tests), (
                f"no test runs {path.name}"
            )
            assert path.name in pages, f"no page names {path.name}"


@pytest.mark.parametrize("waiting", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_joins_those_that_wait_for_it(tmp_path, waiting):
    """DDP lays out its buckets in these before the newcomer comes, which has done so alone: their
    first step must agree."""
    script, tiny = (
        "elastic_train.py",
        ["--steps", "6", "--width", "32", "--layers", "1", "--length", "16", "--batch", "2"],
    )
    tiny += ["--minimum", str(waiting + 1)]
    launch = (
        []
        if waiting == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(waiting)]
    )
    processes = [start(script, *tiny, folder=tmp_path, launch=launch)]
    try:
        contact = re.search(r"join with --join (\S+)", processes[0].stdout.readline())
        assert contact, (tmp_path / "log.txt").read_text()
        processes.append(start(script, *tiny, "--join", contact[1], folder=tmp_path))
        processes[1].communicate(timeout=120)
        said, _ = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], (
        tmp_path / "log.txt"
    ).read_text()
    assert "1 joined" in said, said


def test_the_example_of_an_optimizers_speed(tmp_path):
    options = [
        "--folder",
        str(tmp_path / "store"),
        "--million",
        "16",
        "--steps",
        "1",
        "--host",
        "0.1",
        "--chunk-mb",
        "4",
    ]
    said = start("offloaded_speed.py", *options, folder=tmp_path).communicate(timeout=120)[0]
    assert re.search(r"a step is \d+\.\d\d times its reads and writes alone", said), said
    assert int(re.search(r"(\d+) million parameters pass through", said)[1]) > 8
