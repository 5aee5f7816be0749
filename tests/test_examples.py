"""Every example is short, and some test runs it; here those that have no file of their own."""

import os
import re
import subprocess
import sys

import sources
from scripts import SETTINGS

EXAMPLES = sources.ROOT / "examples"
LINES = 150


def start(name, *arguments, folder):
    """The example as a user starts it; what it logs beside its output is in ``folder``/log.txt."""
    command = [sys.executable, "-W", "error", "-u", str(EXAMPLES / name), *arguments]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(command, cwd=folder, env=os.environ | SETTINGS, text=True, stdout=subprocess.PIPE, stderr=log)


def test_every_example_is_short_and_run_by_a_test_and_on_a_page():
    tests = "".join(path.read_text() for path in sorted((sources.ROOT / "tests").rglob("*.py")))
    pages = "".join(path.read_text() for path in sorted((sources.ROOT / "docs").glob("*.md")))
    for path in sorted(EXAMPLES.iterdir()):
        if path.suffix == ".py":
            assert len(path.read_text().splitlines()) <= LINES, f"{path.name} is longer than {LINES} lines"
        if path.is_file():
            assert re.search(rf'"{path.stem}(\.\w+)?"|examples/{path.name}', tests), f"no test runs {path.name}"
            assert path.name in pages, f"no page names {path.name}"


def test_a_process_joins_the_elastic_example(tmp_path):
    """The first waits for a second one; both end after the same step, and the first has seen one join."""
    tiny = ["--steps", "6", "--width", "32", "--layers", "1", "--length", "16", "--batch", "2", "--minimum", "2"]
    first = start("elastic_train.py", *tiny, folder=tmp_path)
    second = None
    try:
        contact = re.match(r"join with --join (\S+)", first.stdout.readline())
        assert contact, (tmp_path / "log.txt").read_text()
        second = start("elastic_train.py", *tiny, "--join", contact[1], folder=tmp_path)
        second.communicate(timeout=120)
        ours, _ = first.communicate(timeout=120)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
    assert (first.returncode, second.returncode) == (0, 0), (tmp_path / "log.txt").read_text()
    assert "1 joined" in ours, ours


def test_a_process_joins_two_that_wait_for_a_third(tmp_path):
    """DDP lays out its buckets in the two before the third comes, which has done so alone: their first step must agree."""
    tiny = ["--steps", "6", "--width", "32", "--layers", "1", "--length", "16", "--batch", "2", "--minimum", "3"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "elastic_train.py"), *tiny]
    with (tmp_path / "log.txt").open("a") as log:
        how = {"cwd": tmp_path, "env": os.environ | SETTINGS, "text": True, "stdout": subprocess.PIPE, "stderr": log}
        two = subprocess.Popen([sys.executable, "-u", *launch], **how)
    third = None
    try:
        contact = re.search(r"join with --join (\S+)", two.stdout.readline())
        assert contact, (tmp_path / "log.txt").read_text()
        third = start("elastic_train.py", *tiny, "--join", contact[1], folder=tmp_path)
        third.communicate(timeout=120)
        ours, _ = two.communicate(timeout=120)
    finally:
        for process in filter(None, (two, third)):
            process.terminate()
            process.wait()
    assert (two.returncode, third.returncode) == (0, 0), (tmp_path / "log.txt").read_text()
    assert "1 joined" in ours, ours


def test_the_example_of_an_optimizers_speed(tmp_path):
    options = ["--folder", str(tmp_path / "store"), "--million", "16", "--steps", "1", "--host", "0.1", "--chunk-mb", "4"]
    said = start("offloaded_speed.py", *options, folder=tmp_path).communicate(timeout=120)[0]
    assert re.search(r"a step is \d+\.\d\d times its reads and writes alone", said), said
    assert int(re.search(r"(\d+) million parameters pass through", said)[1]) > 8
