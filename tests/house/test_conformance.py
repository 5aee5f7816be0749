"""The command that runs torch's own tests of groups that change, on folders laid out as torch's
sources."""

import subprocess
import sys

import pytest

import sources
from commpress.torch_private import RECONFIGURES

SCRIPT = sources.ROOT / "tests" / "conformance.py"
LIKE_TORCHS = """
import unittest


def _make_fault_tolerance_test_class(backend, device):
    class Test(unittest.TestCase):
        def test_name(self):
            self.assertEqual((backend, device), ("commpress", "cpu"))

        def test_other(self):
            {other}

    return Test
"""


def ran(folder, *options):
    command = [sys.executable, str(SCRIPT), str(folder), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def laid_out(folder, other):
    tests = folder / "test" / "distributed"
    tests.mkdir(parents=True)
    (tests / "test_c10d_fault_tolerance.py").write_text(LIKE_TORCHS.format(other=other))
    return folder


def test_another_folder_is_refused(tmp_path):
    code, said = ran(tmp_path)
    assert code == 1
    assert f"TORCH_SRC is '{tmp_path}'" in said
    assert "git clone" in said


@pytest.mark.skipif(RECONFIGURES, reason="this torch has such groups")
def test_an_older_torch_is_refused(tmp_path):
    code, said = ran(laid_out(tmp_path, "pass"))
    assert code == 1
    assert "expected 2.14 or later" in said


@pytest.mark.skipif(not RECONFIGURES, reason="torch can give a group other ranks from 2.14 on")
@pytest.mark.parametrize(
    ("other", "code", "count"),
    [("pass", 0, 2), ("self.fail('no')", 1, 2), ("self.skipTest('no')", 0, 1)],
)
def test_the_tests_run_over_our_backend(other, code, count, tmp_path):
    found, said = ran(laid_out(tmp_path, other))
    assert found == code, said
    assert f"over commpress: {count} ran" in said
