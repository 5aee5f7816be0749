"""The mutants of ``make mutants`` still apply: each names a line that its file holds once, and
tests that exist."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from mutants import MUTANTS  # noqa: E402


def test_each_applies_and_names_its_tests():
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    wrong = [m.fault for m in MUTANTS if texts[m.file].count(m.line) != 1 or m.line == m.becomes]
    assert not wrong
    named = {(m.fault, word) for m in MUTANTS for word in m.tests.split() if "/" in word}
    assert not [each for each in named if not (ROOT / each[1].partition("::")[0]).exists()]
