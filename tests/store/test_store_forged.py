"""Forged records: manifests, snapshots and identities whose checksum fits and whose content does
not. Whatever they say, the error is one of ours, it comes before anything on the disk is changed,
and no memory is taken for sizes only claimed."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import small_store
from commpress.checksum import checksum_of
from commpress.errors import CommpressError, Damaged
from commpress.tiered_mem import Options, TieredStore
from commpress.tiered_mem.folders import HEAD
from commpress.tiered_mem.folders import MAGIC as IDENTITY_MAGIC
from commpress.tiered_mem.manifest import MAGIC
from test_store_damage import files

TINY = Options(chunk_bytes=8 << 10, pack_below=2 << 10, pack_bytes=4 << 10, segment_bytes=16 << 10)
NUMBERS = (
    None,
    True,
    -1,
    0,
    1,
    2,
    4095,
    4097,
    1 << 31,
    1 << 40,
    (1 << 62) - 4096,
    1 << 63,
    (1 << 64) - 1,
)
OTHERS = (
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "..",
    "../../victim",
    "a\0b",
    "float32",
    "int8",
    b"",
    b"x" * 16,
    [],
    {},
)
DEEPER = ([[]], [1], [0, 0, 0], {"x": 1}, [[1, [], []]], [["x", 0, 4, "float32", [1]]], "x" * 3000)


def open_tiny(path: Path) -> TieredStore:
    return TieredStore.open(
        path, host=64 << 10, engine="threads", depth=1, direct=False, options=TINY
    )


@pytest.fixture
def folder(tmp_path):
    """Two tensors, of several chunks and in a pack; one of them only in a snapshot. And what a
    killed run has left."""
    with open_tiny(tmp_path / "store") as store:
        store.put("x", torch.arange(5_000.0))
        store.put("tiny", torch.ones(3))
        store.put("empty", torch.ones(0, 2))
        store.snapshot("before")
        store.delete("x")
        store.put("y", torch.arange(3_000))
        store.commit()
    (tmp_path / "store" / "segment-000777").write_bytes(b"left behind")
    (tmp_path / "store" / "manifest.tmp").write_bytes(b"left behind")
    return tmp_path / "store"


def content_of(file: Path) -> Any:
    return msgpack.unpackb(file.read_bytes()[HEAD.size :], strict_map_key=True)


def forge(file: Path, content: Any, magic: bytes = MAGIC) -> None:
    body = msgpack.packb(content)
    file.write_bytes(HEAD.pack(magic, len(body), checksum_of(body)) + body)


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside."""
    if isinstance(content, (list, dict)):
        for key in range(len(content)) if isinstance(content, list) else list(content):
            yield (key,)
            yield from ((key, *rest) for rest in places(content[key]))


def changed(content: Any) -> Iterator[tuple[str, Any]]:
    """One value replaced, left out, or said twice."""
    for place in places(content):

        def made(what, change, place=place):
            forged = copy.deepcopy(content)
            inside = forged
            for key in place[:-1]:
                inside = inside[key]
            change(inside, place[-1])
            return f"{place}: {what!r:.50}", forged

        for value in (*NUMBERS, *OTHERS, *DEEPER):
            yield made(value, lambda inside, key, value=value: inside.__setitem__(key, value))
        yield made("gone", lambda inside, key: inside.pop(key))
        yield made(
            "twice",
            lambda inside, key: isinstance(inside, list) and inside.insert(key, inside[key]),
        )


def look(path: Path) -> str:
    """Open it and read everything; what came of it."""
    try:
        store = open_tiny(path)
    except CommpressError as error:
        return type(error).__name__
    with store:
        for name in store:
            try:
                with store.borrow(name, write=False) as tensor:
                    tensor.clone()
            except CommpressError:
                pass
        store.verify()
        store.put("new", torch.ones(2_000))
        store.commit()
    return "opened"


@pytest.mark.parametrize(
    ("name", "first", "stride"),
    [("manifest", 0, 7), ("snapshot-before", 3, 7)]
    + [
        pytest.param(name, 0, 1, marks=pytest.mark.slow) for name in ("manifest", "snapshot-before")
    ],
)
def test_forged_manifests(folder, name, first, stride):
    before, outcomes = files(folder), {}
    file = folder / name
    for what, content in islice(changed(content_of(file)), first, None, stride):
        forge(file, content)
        forged = files(folder)
        outcome = look(folder)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome != "opened":
            assert files(folder) == forged, f"{what}: {outcome}, but something was changed"
        restored(folder, before)
    assert set(outcomes) <= {"opened", "Damaged"}
    assert outcomes["Damaged"] > 5 * outcomes["opened"]


def restored(folder: Path, before: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        if str(path) not in before and path.name != "lock":
            path.unlink()
    for path, data in before.items():
        Path(path).write_bytes(data)


def test_forged_identities(folder):
    before = files(folder)
    for what, content in islice(changed(content_of(folder / "identity")), 0, None, 2):
        forge(folder / "identity", content, IDENTITY_MAGIC)
        forged = files(folder)
        outcome = look(folder)
        assert outcome in ("DirectoryRefused", "Damaged") or content == content_of(
            folder / "identity"
        ), what
        if outcome != "opened":
            assert files(folder) == forged, what
        restored(folder, before)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # lists, maps, texts and bytes that claim to be long
        b"\xdd\x03\xff\xff\xff" * 900,
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 100_000,
        b"\x96\xc4\x10" + b"x" * 16 + b"\x00\xdd\x3f\xff\xff\xff",
        b"\xc1",
        b"\x81\x01\x01",
        b"\xa2\xff\xfe",
        b"",
    ],
)
def test_a_record_of_any_bytes_is_damaged(folder, body):
    (folder / "manifest").write_bytes(HEAD.pack(MAGIC, len(body), checksum_of(body)) + body)
    before = files(folder)
    with pytest.raises(Damaged, match="manifest"):
        open_tiny(folder)
    assert files(folder) == before


MEASURED = """
import resource, sys
from pathlib import Path
from commpress.errors import CommpressError
from test_store_forged import claimed, open_tiny

folder, peak = Path(sys.argv[1]), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
open_tiny(folder).close()
for _ in claimed(folder):
    before = peak()
    try:
        open_tiny(folder)
    except CommpressError as error:
        print(peak() - before, "after its head" in str(error))
"""


def claimed(folder: Path) -> Iterator[None]:
    """A length of an exabyte, a file of holes, and an identity of a gigabyte."""
    sound = (folder / "manifest").read_bytes()
    for file, magic, length, size in (
        ("manifest", MAGIC, 1 << 60, 1 << 34),
        ("manifest", MAGIC, 1 << 34, 1 << 34),
        ("identity", IDENTITY_MAGIC, 1 << 30, 1 << 30),
    ):
        (folder / "manifest").write_bytes(sound)
        with open(folder / file, "r+b") as forged:
            forged.write(HEAD.pack(magic, length - HEAD.size, 0))
            forged.truncate(size)
        yield


def test_claimed_sizes_take_no_memory(folder):
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(small_store.__file__).parent)},
    )
    kilobytes = [int(line.split()[0]) for line in ran.stdout.splitlines() if line.endswith("True")]
    assert len(kilobytes) == 3, ran.stdout + ran.stderr
    assert max(kilobytes) < 100_000
