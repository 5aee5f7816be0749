"""Every ```python block of README.md runs as it stands, and every block of docs/ that says so.

A comment on the line before a block says how: `<!-- run: 2 ranks -->` on that many CPU processes,
`<!-- skip: reason -->` not at all. In docs/ a block without a comment is a fragment. Warnings are
errors, and one line of one rank says that it worked. The README's first block runs as a user runs
it, by torchrun; the others in the test ranks, with a rendezvous of their own in place of a
launcher's.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import sources

README = sources.ROOT / "README.md"
BLOCK = re.compile(
    r"(?:<!--\s*(?P<verb>\w+):\s*(?P<what>.*?)\s*-->\s*\n)?^```python\n(?P<code>.*?)^```",
    re.M | re.S,
)
SECONDS = 120
# torch's, of a watched model: docs/observe.md tells of it
HARMLESS = "Full backward hook is firing"


@dataclass(frozen=True)
class Example:
    line: int
    code: str
    ranks: int = 0
    skip: str = ""


def examples(text: str) -> list[Example]:
    """The Python blocks of a Markdown text, with the line on which each begins."""
    found = []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code")) + 1
        code, verb, what = block["code"], block["verb"], block["what"]
        if verb == "run" and (ranks := re.fullmatch(r"(\d+) ranks?", what)):
            found.append(Example(line, code, ranks=int(ranks[1])))
        elif verb == "skip" and what:
            found.append(Example(line, code, skip=what))
        elif verb is None:
            found.append(Example(line, code))
        else:
            raise ValueError(
                f"line {line}: '{verb}: {what}', expected 'run: 2 ranks' or 'skip: reason'"
            )
    return found


def run(example: Example, folder: Path) -> str:
    """Run an example in `folder` and return what it prints; fail with that if it fails or takes too
    long."""
    script = folder / "example.py"
    # a traceback names the README's line
    script.write_text("\n" * (example.line - 1) + example.code)
    command = [sys.executable, str(script)]
    if example.ranks:
        launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command[1:1] = [*launch, f"--nproc-per-node={example.ranks}"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if "transformers" not in example.code:  # which warns of its own
        environment["PYTHONWARNINGS"] = "error"
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: torchrun must end its ranks
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"README.md line {example.line}: still running after {SECONDS} s\n{output}")
    assert process.returncode == 0, f"README.md line {example.line}:\n{output}"
    return output


def execute(page: str, example: Example, folder: str) -> str:
    """The work of torchrun without its processes: every group of the example meets in a file.
    Returns what this rank prints."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # nobody leaves while another still connects: that one would fail, and we would wait for it
    dist.barrier()
    dist.destroy_process_group()
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ |= told if example.ranks else {}
    torchs, place = dist.init_process_group, f"file://{folder}/rendezvous"
    dist.init_process_group = partial(torchs, init_method=place, rank=rank, world_size=size)
    before = os.getcwd()
    os.chdir(folder)
    names = {"__name__": "__main__"}
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", HARMLESS)
            exec(compile("\n" * (example.line - 1) + example.code, f"docs/{page}", "exec"), names)
    finally:
        # DDP's reducer, freed with the example's names, takes Gloo's group along and waits for the
        # group's threads without letting go of the interpreter; one of them may need it to free the
        # last collective's tensors. Let that one go first.
        time.sleep(0.05)
        names.clear()
        os.chdir(before)
        dist.init_process_group = torchs
        for name in told:
            os.environ.pop(name, None)
    return printed.getvalue()


def check_one_line(pool, page: str, example: Example, folder: Path) -> None:
    """Run it on as many ranks as it says; together they print one line."""
    if example is FIRST or "transformers" in example.code:
        # as a user does; the Trainer makes the group itself and leaves much behind. Its own logs,
        # progress and warnings may stand beside ours, which begins as the block's last print does
        printed = run(example, folder)
        last = re.findall(r'print\(f?"([^{"]+)', example.code)[-1]
        lines = [line for line in printed.splitlines() if line.startswith(last)]
    else:
        said = pool.run(execute, page, example, str(folder), size=example.ranks or 1)
        lines = "".join(said).splitlines()
    assert [bool(line.strip()) for line in lines] == [True], lines


EXAMPLES = examples(README.read_text()) if README.exists() else []
FIRST = next(e for e in EXAMPLES if e.ranks)


def test_the_readme_shows_python():
    assert README.exists(), "README.md is missing"
    assert EXAMPLES, "README.md has no ```python block"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line{example.line}")
def test_example(example, pool, tmp_path):
    if example.skip:
        pytest.skip(example.skip)
    check_one_line(pool, "../README.md", example, tmp_path)


# ---------------------------------------------------------------- docs/

PAGES = {
    path.name: examples(path.read_text()) for path in sorted((sources.ROOT / "docs").glob("*.md"))
}
RUN = [
    pytest.param(
        page,
        example,
        id=f"{page}-{example.line}",
        marks=[pytest.mark.slow] if "transformers" in example.code else [],
    )
    for page in PAGES
    for example in PAGES[page]
    if example.ranks
]


def test_every_integration_has_a_page_that_runs():
    running = {page for page, found in PAGES.items() if any(example.ranks for example in found)}
    assert running >= {
        "index.md",
        "ddp.md",
        "fsdp.md",
        "trainer.md",
        "backend.md",
        "store.md",
        "offload.md",
        "observe.md",
    }


@pytest.mark.parametrize(("page", "example"), RUN)
def test_page(page, example, pool, tmp_path):
    if "transformers" in example.code:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    check_one_line(pool, page, example, tmp_path)


def test_a_warning_and_an_error_of_an_example_are_its_failure(pool, tmp_path):
    warns = "import warnings\nwarnings.warn('torch will remove this', FutureWarning)\n"
    with pytest.raises(FutureWarning, match="torch will remove this"):
        pool.run(execute, "page.md", Example(3, warns, ranks=1), str(tmp_path), size=1)
    for code, said in ((warns, "FutureWarning"), ("1 / 0\n", "line 5")):
        with pytest.raises(AssertionError, match=said):
            run(Example(5, code), tmp_path)


TEXT = """
```python
a = 1
```
<!-- run: 2 ranks -->
```python
b = 2
```
text <!-- a remark -->

<!-- skip: needs a GPU -->

```python
c = 3
```
"""


def test_blocks_are_found_with_their_comments():
    assert examples(TEXT) == [
        Example(3, "a = 1\n"),
        Example(7, "b = 2\n", ranks=2),
        Example(14, "c = 3\n", skip="needs a GPU"),
    ]


def test_a_misspelt_comment_is_not_ignored():
    with pytest.raises(ValueError, match="expected 'run: 2 ranks'"):
        examples(TEXT.replace("2 ranks", "two"))
