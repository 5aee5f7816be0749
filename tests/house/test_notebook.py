"""The notebook runs from top to bottom, without Jupyter, and is kept without outputs."""

import json
import subprocess
import sys

import sources

NOTEBOOK = json.loads((sources.ROOT / "examples" / "first_steps.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
RUN = """import json, sys
names = {}
for i, code in enumerate(json.load(sys.stdin)):
    exec(compile(code, f"cell {i}", "exec"), names)"""


def test_its_cells_run(tmp_path):
    command = [sys.executable, "-W", "error", "-c", RUN]
    ran = subprocess.run(
        command, input=json.dumps(CODE), capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "squared error" in ran.stdout


def test_it_is_short_and_has_no_outputs():
    assert len(NOTEBOOK["cells"]) <= 12
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK["cells"])
