"""Damaged files and strange directories are named, refused, left alone."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commpress.errors import Damaged, DirectoryRefused, InvalidArgument, StorageError
from commpress.tiered_mem import FileLayer, Options, TieredStore
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


@pytest.mark.parametrize("name", ["manifest", "identity", "snapshot-before"])
def test_a_record_of_another_version_is_refused_by_its_name(tmp_path, name):
    """Not called damaged, and not replaced by a snapshot: another release reads it."""
    filled(tmp_path)
    content = (tmp_path / name).read_bytes()
    version = content[7:8].decode()
    assert version.isdigit()
    (tmp_path / name).write_bytes(content[:7] + b"9" + content[8:])
    before = files(tmp_path)
    with pytest.raises(DirectoryRefused, match=f"{name} is of version '9', expected '{version}'"):
        open_store(tmp_path)
    if name != "identity":
        with pytest.raises(
            DirectoryRefused, match=f"{name} is of version '9', expected '{version}'"
        ):
            TieredStore.restore(tmp_path, "before")
    assert files(tmp_path) == before
    (tmp_path / name).write_bytes(content)
    with open_store(tmp_path) as store:
        assert store.verify() == []


def test_the_owner_of_a_directory_is_named(tmp_path):
    with (
        open_store(tmp_path),
        pytest.raises(DirectoryRefused, match=f"in use by process {os.getpid()} on "),
    ):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import sys, os, torch\nfrom commpress.tiered_mem import TieredStore\n"
        "s = TieredStore.open(sys.argv[1], host='2MiB', engine='threads')\n"
        "s.put('x', torch.ones(4)); s.commit(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
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
    assert (
        sorted((p.name, p.stat().st_size) for p in tmp_path.iterdir() if p.name != "lock") == before
    )


def test_a_fork_has_no_part_in_the_store(store):
    pid = os.fork()
    if pid == 0:
        try:
            store.put("x", torch.ones(1))
        except StorageError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def filled(path, **options):
    """A store with two tensors, one of them in memory of a snapshot only, and its files as they lie
    on the disk."""
    with open_store(path, **options) as store:
        store.put("x", torch.ones(100_000))
        store.put("old", torch.full((30_000,), 2.0))
        store.snapshot("before")
        store.delete("old")
        store.put("x", torch.zeros(100_000))
        store.commit()


def files(*paths) -> dict[str, bytes]:
    """Everything but what a lock says of its last owner."""
    return {
        str(p): p.read_bytes()
        for path in paths
        for p in path.iterdir()
        if p.is_file() and p.name != "lock"
    }


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "flip", "of another store"])
def test_without_its_manifest_a_store_deletes_nothing_and_names_its_snapshots(tmp_path, harm):
    filled(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest"
    content = manifest.read_bytes()
    match harm:
        case "missing":
            manifest.rename(tmp_path / "s" / "manifest.tmp")
        case "empty":
            manifest.write_bytes(b"")
        case "cut":
            manifest.write_bytes(content[:-20])
        case "flip":
            manifest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "of another store":
            filled(tmp_path / "other")
            manifest.write_bytes((tmp_path / "other" / "manifest").read_bytes())
    (tmp_path / "s" / "snapshot-bad").write_bytes(b"no snapshot")
    before = files(tmp_path / "s")
    with pytest.raises(
        Damaged,
        match=r"restore\(directory, name\) makes one of the snapshots 'before' the last commit",
    ):
        open_store(tmp_path / "s")
    assert files(tmp_path / "s") == before
    (tmp_path / "s" / "snapshot-bad").unlink()
    TieredStore.restore(tmp_path / "s", "before")
    with open_store(tmp_path / "s") as store:
        assert store.verify() == []
        assert (read(store, "x").sum(), read(store, "old").sum()) == (100_000, 60_000)
        store.put("x", torch.full((100_000,), 3.0))
        store.commit()
    with open_store(tmp_path / "s") as store:
        assert read(store, "x").sum() == 300_000


@pytest.mark.parametrize("left", ["identity", "segment-000001", "snapshot-before"])
def test_a_store_of_which_only_some_files_are_left_is_damaged_and_keeps_them(tmp_path, left):
    filled(tmp_path)
    for file in tmp_path.iterdir():
        if file.name not in (left, "lock"):
            file.unlink()
    before = files(tmp_path)
    with pytest.raises(Damaged, match=r"[Nn]othing was changed"):
        open_store(tmp_path)
    assert files(tmp_path) == before


def test_a_damaged_snapshot_is_named_and_nothing_deleted(tmp_path):
    filled(tmp_path)
    (tmp_path / "snapshot-before").write_bytes(b"")
    before = files(tmp_path)
    with pytest.raises(Damaged, match=r"snapshot-before.* move the file away"):
        open_store(tmp_path)
    assert files(tmp_path) == before


def test_one_directory_of_a_striped_store_is_not_a_store_of_its_own(tmp_path):
    """Without the manifest, which lies in the first one, the second looked like one that had never
    been finished."""
    both = [tmp_path / "a", tmp_path / "b"]
    filled(both)
    before = files(*both)
    assert any("/b/segment-" in name for name in before)
    (tmp_path / "new").mkdir()
    for named, says in (
        ([tmp_path / "b"], "part 1 is missing"),
        ([tmp_path / "new", tmp_path / "b"], "no part of a store"),
    ):
        with pytest.raises(DirectoryRefused, match=says):
            open_store(named)
    with pytest.raises(DirectoryRefused, match="part 2 is missing"):
        open_store(tmp_path / "a")
    assert files(*both) == before
    with open_store(both[::-1]) as store:
        assert store.verify() == []


def test_two_copies_of_one_directory_are_not_a_striped_store(tmp_path):
    filled([tmp_path / "a", tmp_path / "b"])
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    with pytest.raises(DirectoryRefused, match="as after a copy"):
        open_store([tmp_path / "a", tmp_path / "b", tmp_path / "c"])


@pytest.mark.parametrize("finished", [0, 1, 2, 3])
def test_a_creation_that_was_interrupted_begins_again(tmp_path, finished):
    """Killed before one of the records that make a store of two directories; then they are named
    the other way round."""
    both, written = [tmp_path / "a", tmp_path / "b"], 0

    class Killed(FileLayer):
        def rename(self, folder, old, new):
            nonlocal written
            if written == finished:
                raise OSError(5, "as told")
            written += 1
            super().rename(folder, old, new)

    if finished < 3:
        with pytest.raises(StorageError):
            open_store(both, layer=Killed())
    filled(both[::-1])
    with open_store(both) as store:
        assert store.verify() == []
        assert store.snapshots() == ["before"]


def test_a_copy_that_was_interrupted_is_no_store(tmp_path):
    class Full(FileLayer):
        def rename(self, folder, old, new):
            if new == "manifest" and "copy" in os.readlink(f"/proc/self/fd/{folder}"):
                raise OSError(28, "as told")
            super().rename(folder, old, new)

    filled(tmp_path / "s")
    with open_store(tmp_path / "s", layer=Full()) as store, pytest.raises(StorageError):
        store.copy_snapshot("before", tmp_path / "copy")
    with pytest.raises(Damaged, match="the manifest is missing"):
        open_store(tmp_path / "copy")


def test_what_is_not_ours_is_left_alone(tmp_path):
    """Files beside a store, also those that end like ours; and a folder that only looks empty gets
    not even a lock."""
    filled(tmp_path / "s")
    strange = [
        "thesis.tmp",
        "segment-000001.bak",
        "segment-0000007",
        "segment-١٢٣٤٥٦",
        "snapshots",
        "snapshot-.tmp",
    ]
    for name in strange:
        (tmp_path / "s" / name).write_text("precious")
    with open_store(tmp_path / "s") as store:
        assert store.snapshots() == ["before"]
        store.commit()
    assert all((tmp_path / "s" / name).read_text() == "precious" for name in strange)
    for name in ("thesis.tmp", "lock"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("precious")
        with pytest.raises(DirectoryRefused, match=name):
            open_store(folder)
        assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(name, "precious")]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "socket"])
@pytest.mark.parametrize(
    "name", ["manifest", "identity", "snapshot-before", "segment-000001", "segment-000099"]
)
def test_what_is_no_file_is_refused_before_anything_is_removed(tmp_path, name, kind):
    filled(tmp_path / "s")
    (tmp_path / "s" / "segment-000098").write_bytes(b"left behind")
    strange = tmp_path / "s" / name
    strange.unlink(missing_ok=True)
    match kind:
        case "link":
            (tmp_path / "victim").write_text("precious")
            strange.symlink_to(tmp_path / "victim")
        case "folder":
            strange.mkdir()
        case "pipe":
            os.mkfifo(strange)
        case "socket":
            folder = os.open(tmp_path / "s", os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{folder}/{name}")  # names of sockets are short
            os.close(folder)
    before = sorted(p.name for p in (tmp_path / "s").iterdir())
    with pytest.raises(
        DirectoryRefused, match=f"'{name}' in the store's folder is not a file of ours"
    ):
        open_store(tmp_path / "s")
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == before


def test_a_snapshot_is_not_named_like_a_temporary_file(store):
    """It would be swept away when the store is opened again."""
    store.put("x", torch.ones(3))
    with pytest.raises(InvalidArgument, match=r"not ending in '\.tmp'"):
        store.snapshot("best.tmp")


def test_the_number_of_a_lost_segment_is_not_given_again(tmp_path):
    """A snapshot goes on listing places in it: tensors of today in the same places would be called
    damaged."""
    filled(tmp_path, options=Options(64 << 10, 8 << 10, 32 << 10, 64 << 10))
    with open_store(tmp_path) as store:
        last = Path(store.places("x")[-1].file)
    for file in tmp_path.glob("segment-*"):
        file.unlink()
    with open_store(tmp_path) as store:
        assert {e.names for e in store.verify()} == {("x",)}
        store.put("x", torch.ones(99_000))
        store.commit()
        assert min(Path(place.file) for place in store.places("x")) > last
    with open_store(tmp_path) as store:
        assert store.verify() == []
        assert read(store, "x").sum() == 99_000
