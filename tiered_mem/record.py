"""Small durable files: msgpack between a magic word and a checksum, read with limits, replaced atomically."""

import contextlib
import struct
from typing import Any

import msgpack

from commpress.checksum import checksum_of
from commpress.errors import Damaged
from commpress.tiered_mem.layer import FileLayer, read_fully, write_fully
from commpress.tiered_mem.names import TEMPORARY

HEAD = struct.Struct("<8sQQ")  # magic, length, checksum
LIMIT = 1 << 30  # bytes of a record: a manifest of some ten million chunks


def store_record(layer: FileLayer, folder: int, name: str, magic: bytes, content: Any) -> int:
    """When this returns, the record is on the disk under ``name``; before, whatever was there. Returns bytes written."""
    body = msgpack.packb(content)
    if len(body) > LIMIT:
        raise ValueError(f"{name} would take {len(body)} bytes, at most {LIMIT} are read back")
    temporary = name + TEMPORARY
    with contextlib.suppress(FileNotFoundError):
        layer.unlink(folder, temporary)
    fd = layer.open(folder, temporary, create=True)
    try:
        write_fully(layer, fd, HEAD.pack(magic, len(body), checksum_of(body)) + body)
        layer.sync(fd)
    finally:
        layer.close(fd)
    layer.rename(folder, temporary, name)
    layer.sync_folder(folder)
    return HEAD.size + len(body)


def load_record(layer: FileLayer, folder: int, name: str, magic: bytes, *, limit: int = LIMIT) -> Any:
    """The content, or FileNotFoundError, or Damaged that says what is wrong. No memory is taken for more than ``limit`` bytes,
    nor for more than the file has."""
    fd = layer.open(folder, name, write=False)
    try:
        size, head = layer.size(fd), read_fully(layer, fd, HEAD.size)
        if len(head) < HEAD.size:
            raise Damaged(f"{name} has {len(head)} bytes, expected at least {HEAD.size}", file=name)
        found, length, checksum = HEAD.unpack(head)
        if found != magic:
            raise Damaged(f"{name} begins with {found!r}, expected {magic!r}: another version, or not ours", file=name)
        if length != size - HEAD.size or length > limit:
            raise Damaged(
                f"{name} has {size - HEAD.size} bytes after its head, which promises {length}, at most {limit}", file=name
            )
        body = read_fully(layer, fd, length, HEAD.size)
    finally:
        layer.close(fd)
    if checksum_of(body) != checksum:
        raise Damaged(f"{name} does not match its checksum", file=name)
    limits = {"max_str_len": 1 << 16, "max_bin_len": 1 << 10, "max_ext_len": 0, "max_map_len": 100}
    try:
        return msgpack.unpackb(body, max_array_len=len(body), strict_map_key=True, **limits)
    except (ValueError, TypeError, MemoryError, msgpack.UnpackException) as error:
        raise Damaged(f"{name} cannot be read: {error}", file=name) from error
