"""Refusals of ``make release``."""

import subprocess
import sys
import tarfile
import zipfile
from types import SimpleNamespace

import pytest

import sources

sys.path.insert(0, str(sources.ROOT / "tests"))
import image
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
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'a'\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(
        release, "git", lambda *words: {"ls-files": "", "tag": "v9.9.9"}.get(words[0], " M a.py")
    )
    found = release.problems("9.9.9")
    assert len(found) == 6
    parts = "has changes", "does not date", "tag v9.9.9 exists", "[project.urls]", ".whl", ".tar.gz"
    for part in parts:
        assert any(part in problem for problem in found), part


def test_the_public_address_stands_in_one_place(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(sources.ROOT / "docs")
    import glossary

    settings = SimpleNamespace(config_file_path=str(tmp_path / "mkdocs.yml"))
    for address in ("", "https://a.org/b"):
        urls = f"[project.urls]\nRepository = {address!r}" if address else ""
        (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'a'\n{urls}")
        assert release.address((tmp_path / "pyproject.toml").read_text()) == address
        assert (glossary.on_config(settings).repo_url or "") == address


@pytest.mark.slow  # installs torch; the instructions themselves are read in the next test
def test_the_steps_of_the_image_run_without_docker(monkeypatch, capfd, tmp_path):
    image.in_a_folder(tmp_path, (sources.ROOT / "Dockerfile").read_text(), {"INDEX": ""})
    assert " 0 bad" in capfd.readouterr().out, "the doctor is the image's command"


def test_an_image_does_what_its_file_says(monkeypatch, capfd, tmp_path):
    text = """# a comment
FROM python:3.11-slim
ARG WORD=default
ARG OTHER=default
WORKDIR /a/b
COPY . .
RUN test -f pyproject.toml \\
  && echo "${WORD} ${OTHER} $(basename $(dirname $(which python)))"
WORKDIR /work
CMD ["pwd"]
"""
    image.in_a_folder(tmp_path, text, {"WORD": "given"})
    said = capfd.readouterr().out.splitlines()
    assert "given default bin" in said
    assert said[-1] == str(tmp_path / "work")
    for wrong, cure in (("USER root", "teach it"), ("FROM python:9.1", "expected that of")):
        with pytest.raises(SystemExit, match=cure):
            image.in_a_folder(tmp_path / wrong[:4], wrong, {})
    with pytest.raises(subprocess.CalledProcessError):
        image.in_a_folder(tmp_path, 'WORKDIR /w\nRUN false; true\nCMD ["true"]', {})
