"""Run torch's own tests of groups that change against the backend "commpress".

    python tests/conformance.py FOLDER            torch's sources, of the release that is installed
    python tests/conformance.py FOLDER -k abort   options of unittest follow

The tests are in no wheel, and are not copied: the folder is a checkout of torch, of which
``test/distributed/test_c10d_fault_tolerance.py`` is read. Its tests run on three processes, with
the name of our backend in place of Gloo's. ``make conformance TORCH_SRC=FOLDER`` runs it.
"""

import importlib.util
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType

TESTS = "test/distributed/test_c10d_fault_tolerance.py"
FOLDER = "COMMPRESS_TORCH_SRC"  # so that the processes of a test find it too


def module_of(folder: str) -> ModuleType:
    """torch's file of tests, whose backends become ours alone."""
    path = Path(folder) / TESTS
    if not path.is_file():
        sys.exit(
            f"TORCH_SRC is {folder!r}, which has no {TESTS}: expected a checkout of torch's "
            "sources (git clone --depth 1 --branch v2.15.0 of its repository)"
        )
    import torch

    from commpress.backend import register
    from commpress.torch_private import RECONFIGURES

    if not RECONFIGURES:
        sys.exit(
            f"this is torch {torch.__version__}, which gives no group other ranks, expected 2.14 "
            "or later: make conformance TORCH=2.15.0 TORCH_SRC=..."
        )
    register()  # for a commpress that is not installed
    spec = importlib.util.spec_from_file_location("torch_fault_tolerance", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: {sys.argv[0]} FOLDER [options of unittest]")
    os.environ[FOLDER] = os.path.abspath(sys.argv.pop(1))
if FOLDER in os.environ:  # the processes of a test find its class here by name
    CommpressFaultToleranceTest = module_of(os.environ[FOLDER])._make_fault_tolerance_test_class(
        "commpress", "cpu"
    )
    CommpressFaultToleranceTest.__module__ = __name__
if __name__ == "__main__":
    result = unittest.main(verbosity=2, exit=False).result
    ran = result.testsRun - len(result.skipped)
    print(f"torch's tests of groups that change, over commpress: {ran} ran")
    sys.exit(not (result.wasSuccessful() and ran))
