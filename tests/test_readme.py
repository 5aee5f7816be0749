"""Every ```python block of README.md runs as it stands, each in a process of its own.

A comment on the line before a block changes that: `<!-- run: 2 ranks -->` launches it with torchrun on that many CPU
processes, `<!-- skip: reason -->` skips it.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import sources

README = sources.ROOT / "README.md"
BLOCK = re.compile(r"(?:<!--\s*(?P<verb>\w+):\s*(?P<what>.*?)\s*-->\s*\n)?^```python\n(?P<code>.*?)^```", re.M | re.S)
SECONDS = 120


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
            raise ValueError(f"line {line}: '{verb}: {what}', expected 'run: 2 ranks' or 'skip: reason'")
    return found


def run(example: Example, folder: Path) -> None:
    """Run an example in `folder`; fail with its output if it fails or takes too long."""
    script = folder / "example.py"
    script.write_text("\n" * (example.line - 1) + example.code)  # a traceback names the README's line
    command = [sys.executable, str(script)]
    if example.ranks:
        launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command[1:1] = [*launch, f"--nproc-per-node={example.ranks}"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
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


EXAMPLES = examples(README.read_text()) if README.exists() else []


def test_the_readme_shows_python():
    assert README.exists(), "README.md is missing"
    assert EXAMPLES, "README.md has no ```python block"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line{example.line}")
def test_example(example, tmp_path):
    if example.skip:
        pytest.skip(example.skip)
    run(example, tmp_path)


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


def test_a_failing_example_fails(tmp_path):
    with pytest.raises(AssertionError, match="line 5"):
        run(Example(5, "1 / 0\n"), tmp_path)


def test_ranks_run_together(tmp_path):
    code = "import torch.distributed as d\nd.init_process_group('gloo')\nassert d.get_world_size() == 2\nd.barrier()\n"
    run(Example(1, code + "d.destroy_process_group()\n", ranks=2), tmp_path)
