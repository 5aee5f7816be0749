"""Refusals of ``make release``."""

import sys
import tarfile
import zipfile

import sources

sys.path.insert(0, str(sources.ROOT / "tests"))
import release


def test_a_version_is_released_once_the_changelog_dates_it():
    assert release.dated("# Changelog\n\n## [1.2.0] - 2027-01-31\n", "1.2.0")
    assert not release.dated("## [1.2.0] - unreleased\n", "1.2.0")
    assert not release.dated("## [1.2.0] - 2027-01-31\n", "1.2.01")
    assert not release.dated("## [1.220] - 2027-01-31\n", "1.2.0")


def test_archives_hold_what_git_knows(tmp_path):
    tracked = ["commpress/work.py", "collectives/channel.py", "tests/a.py", "docs/a.md"]
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("commpress/work.py", "")
    assert release.missing_in(wheel, tracked) == ["collectives/channel.py"]
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("commpress/collectives/channel.py", "")
    assert release.missing_in(wheel, tracked) == []
    (tmp_path / "own.py").touch()
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "own.py", "commpress-1.0/commpress/work.py")
        archive.add(tmp_path / "own.py", "commpress-1.0/own.py")
    assert release.unknown_in(sdist, tracked) == ["own.py"]


def test_what_is_not_ready_is_told_all_at_once(monkeypatch, tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("## [9.9.9] - unreleased\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(
        release, "git", lambda *words: {"ls-files": "", "tag": "v9.9.9"}.get(words[0], " M a.py")
    )
    found = release.problems("9.9.9")
    assert len(found) == 5
    for part in ("has changes", "does not date", "tag v9.9.9 exists", ".whl", ".tar.gz"):
        assert any(part in problem for problem in found), part
