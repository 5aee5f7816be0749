"""Damaged files and strange directories are named, refused, left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commpress.errors import Damaged, DirectoryRefused, StorageError
from commpress.tiered_mem.options import Options
from small_store import open_store, read


def test_a_flipped_bit_is_found_and_named(tmp_path):
    with open_store(tmp_path) as store:
        store.put("good", torch.ones(100_000))
        store.put("bad", torch.ones(100_000))
        store.put("tiny", torch.ones(3))
        store.commit()
        place = store.places("bad")[1]
    file = Path(place.file)
    content = bytearray(file.read_bytes())
    content[place.offset + 17] ^= 1
    file.write_bytes(content)
    with open_store(tmp_path) as store:
        found = store.verify()
        assert [(e.names, e.file, e.offset) for e in found] == [(("bad",), str(file), place.offset)]
        with pytest.raises(Damaged, match="'bad' cannot be read"), store.borrow("bad"):
            pass
        assert read(store, "good").sum() == 100_000
        assert read(store, "tiny").sum() == 3
        store.put("bad", torch.zeros(5))
        store.commit()
        assert store.verify() == []
    with open_store(tmp_path) as store:
        assert read(store, "bad").sum() == 0


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_lost_file_damages_its_tensors_only(tmp_path, harm):
    with open_store(tmp_path, options=Options(64 << 10, 8 << 10, 32 << 10, 64 << 10)) as store:
        store.put("x", torch.ones(16_000))
        store.commit()
        store.put("y", torch.ones(16_000))
        store.commit()
        file = Path(store.places("y")[0].file)
        assert file != Path(store.places("x")[0].file)
    file.unlink() if harm == "missing" else os.truncate(file, 100)
    with open_store(tmp_path) as store:
        assert [e.names for e in store.verify()] == [("y",)]
        assert read(store, "x").sum() == 16_000
        with pytest.raises(Damaged, match="'y'"), store.borrow("y"):
            pass


@pytest.mark.parametrize("name", ["manifest", "identity"])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "magic", "garbage"])
def test_a_damaged_manifest_is_named_not_believed(tmp_path, name, harm):
    with open_store(tmp_path) as store:
        store.put("x", torch.ones(10))
        store.commit()
    file, content = tmp_path / name, bytearray((tmp_path / name).read_bytes())
    match harm:
        case "flip":
            content[-1] ^= 1
        case "cut":
            content = content[:-1]
        case "empty":
            content = bytearray()
        case "magic":
            content[:8] = b"somebody"
        case "garbage":
            content = bytearray(os.urandom(200))
    file.write_bytes(content)
    with pytest.raises((Damaged, DirectoryRefused), match=name):
        open_store(tmp_path)
    assert file.read_bytes() == content


def test_the_owner_of_a_directory_is_named(tmp_path):
    with open_store(tmp_path), pytest.raises(DirectoryRefused, match=f"in use by process {os.getpid()} on "):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import sys, os, torch\nfrom commpress.tiered_mem.store import TieredStore\n"
        "s = TieredStore.open(sys.argv[1], host='2MiB', engine='threads')\n"
        "s.put('x', torch.ones(4)); s.commit(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(DirectoryRefused, match=f"process {process.pid} "):
        open_store(tmp_path)
    process.kill()
    process.communicate()
    with open_store(tmp_path) as store:
        assert read(store, "x").sum() == 4


def test_foreign_directories_are_refused_and_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("hello")
    with pytest.raises(DirectoryRefused, match=r"letter\.txt"):
        open_store(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "hello"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirectoryRefused, match="symbolic link"):
        open_store(link)
    opened = tmp_path / "open"
    opened.mkdir()
    opened.chmod(0o777)
    with pytest.raises(DirectoryRefused, match="chmod 700"):
        open_store(opened)
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 12345, 12345)
        with pytest.raises(DirectoryRefused, match="belongs to user 12345"):
            open_store(foreign)


def test_links_inside_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with open_store(tmp_path / "s") as store:
        store.put("x", torch.ones(100_000))
        store.commit()
    (tmp_path / "s" / "segment-000001").unlink()
    (tmp_path / "s" / "segment-000001").symlink_to(victim)
    with pytest.raises(StorageError):
        open_store(tmp_path / "s")
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["manifest", "identity", "segment-000001", "lock"])
def test_files_of_others_inside_are_refused(tmp_path, name):
    with open_store(tmp_path) as store:
        store.put("x", torch.ones(100_000))
        store.commit()
    file = tmp_path / name
    before = file.read_bytes()
    os.chown(file, 12345, 12345)
    with pytest.raises(DirectoryRefused, match=f"{name}.* not a file of ours"):
        open_store(tmp_path)
    assert file.read_bytes() == before
    os.chown(file, 0, 0)
    with open_store(tmp_path) as store:
        assert read(store, "x").sum() == 100_000


def test_nothing_is_left_behind_and_nothing_grows(tmp_path):
    with open_store(tmp_path) as store:
        store.put("x", torch.ones(100_000))
        store.commit()
    before = sorted((p.name, p.stat().st_size) for p in tmp_path.iterdir() if p.name != "lock")
    for engine in ("threads", "io_uring", "auto"):
        with open_store(tmp_path, engine=engine) as store:
            store.put("x", torch.zeros(100_000))
            store.evict("x").wait()  # written, not committed
        (tmp_path / "manifest.tmp").write_bytes(b"half")
        (tmp_path / "segment-000099").write_bytes(b"never listed")
    with open_store(tmp_path):
        pass
    assert sorted((p.name, p.stat().st_size) for p in tmp_path.iterdir() if p.name != "lock") == before


def test_a_fork_has_no_part_in_the_store(store):
    pid = os.fork()
    if pid == 0:
        try:
            store.put("x", torch.ones(1))
        except StorageError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
