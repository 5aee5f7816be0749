"""Putting a store together: directories, disk, memory, and what the last commit left."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from commpress.errors import Damaged, InvalidArgument
from commpress.tiered_mem import engines
from commpress.tiered_mem.catalog import Catalog
from commpress.tiered_mem.claims import Claims
from commpress.tiered_mem.commit import Commits
from commpress.tiered_mem.files import Disk
from commpress.tiered_mem.folders import Folders
from commpress.tiered_mem.layer import FileLayer
from commpress.tiered_mem.manifest import Extent, Manifest, Row
from commpress.tiered_mem.memory import Arena
from commpress.tiered_mem.names import MANIFEST
from commpress.tiered_mem.options import Options, Paths, paths_of
from commpress.tiered_mem.residency import Residency, damaged
from commpress.tiered_mem.schedule import Schedule
from commpress.tiered_mem.sizes import parse_bytes
from commpress.tiered_mem.snapshots import last_commit, read_snapshots, restore_snapshot, typed, write_manifest
from commpress.tiered_mem.wear import Wear


@dataclass(frozen=True)
class Budgets:
    """Bytes; ``disk`` in each directory, ``writes_per_day`` over all. None: no limit but the disk's."""

    host: int
    device: int
    disk: int | None
    writes_per_day: int | None

    @staticmethod
    def parse(
        host: str | int, device: str | int, disk: str | int | None, writes_per_day: str | int | None
    ) -> "Budgets":
        return Budgets(
            parse_bytes(host),
            parse_bytes(device),
            None if disk is None else parse_bytes(disk),
            None if writes_per_day is None else parse_bytes(writes_per_day),
        )


@dataclass(frozen=True)
class Parts:
    folders: Folders
    catalog: Catalog
    residency: Residency
    claims: Claims
    commits: Commits
    options: Options


def assemble(
    directory: Paths,
    budgets: Budgets,
    *,
    accelerator: str | torch.device,
    reserve: bool,
    engine: str,
    depth: int,
    direct: bool | None,
    pin: bool | None,
    options: Options,
    layer: FileLayer,
) -> Parts:
    """Open everything and load the last commit; if anything fails, close what was opened."""
    if budgets.host < options.pack_bytes:
        raise InvalidArgument(f"host is {budgets.host} bytes, expected at least pack_bytes = {options.pack_bytes}")
    if depth < 1:
        raise InvalidArgument(f"depth is {depth}, expected at least 1")
    with typed():
        folders = Folders(paths_of(directory), layer)
    disk: Disk | None = None
    try:
        with typed():
            # Everything is read and judged before anything is removed.
            last = None if folders.fresh else last_commit(folders)
            snapshots = {} if folders.fresh else read_snapshots(folders)
            disk = _disk(folders, budgets, engine, depth, direct, options)
            wear = Wear(sum(layer.capacity(folder.fd) for folder in folders), budgets.writes_per_day)
            catalog, claims = Catalog(), Claims(disk)
            residency = Residency(
                catalog.changed,
                claims,
                _host(budgets.host, disk, pin),
                Arena(budgets.device, torch.device(accelerator)) if budgets.device else None,
                chunk_bytes=options.chunk_bytes,
                wear=wear,
                schedule=Schedule(budgets.host),
            )
            if last is None:
                last = Manifest(folders.store, 0, (), 0, wear.born)
                write_manifest(folders, MANIFEST, last)
                folders.settle()
            _load(last, snapshots, catalog, claims, wear)
            folders.sweep()
            disk.sweep()
            if reserve:
                disk.reserve()
            return Parts(folders, catalog, residency, claims, Commits(catalog, residency, claims, folders), options)
    except BaseException:
        if disk is not None:
            disk.close()
        folders.close()
        raise


def _disk(folders: Folders, budgets: Budgets, engine: str, depth: int, direct: bool | None, options: Options) -> Disk:
    layer = folders.layer
    possible = all(layer.takes_direct(folder.fd) for folder in folders)
    if direct and not possible:
        raise InvalidArgument(f"direct=True, but {folders.parts[0].path} does not take O_DIRECT: leave direct= out")
    straight = possible if direct is None else direct
    if engine == "auto":
        engine, _ = engines.choose(layer, folders.parts[0].fd, direct=straight, depth=depth)
    return Disk(
        folders,
        engines.start(engine, layer, depth),
        direct=straight,
        capacity=budgets.disk,
        segment_bytes=options.segment_bytes,
    )


def _host(nbytes: int, disk: Disk, pin: bool | None) -> Arena:
    arena = Arena(nbytes)
    arena.touch()
    disk.engine.register(arena.whole())
    if pin or (pin is None and torch.cuda.is_available()):
        arena.pin()
    return arena


def _load(
    manifest: Manifest, snapshots: Mapping[str, Manifest], catalog: Catalog, claims: Claims, wear: Wear
) -> None:
    claims.generation, claims.committed = manifest.generation, manifest.extents
    claims.snapshots = {name: snapshot.extents for name, snapshot in snapshots.items()}
    wear.written, wear.born, wear.days = manifest.written, manifest.born or wear.born, dict(manifest.days)
    bad = claims.disk.adopt(claims.committed.union(*claims.snapshots.values()))
    claims.lost |= bad.keys()
    for row in manifest.rows:
        _load_row(row, catalog, claims.disk, bad)


def _load_row(row: Row, catalog: Catalog, disk: Disk, bad: dict[Extent, str]) -> None:
    block = catalog.new_block()
    block.size, block.chunks = row.size, row.chunks
    block.entries = {entry.name: entry for entry in row.entries}
    catalog.names |= dict.fromkeys(block.entries, block)
    for chunk in row.chunks:
        if (what := bad.get(chunk.extent)) and not block.damage:
            place = disk.place(chunk.extent)
            error = Damaged(f"{place} at {chunk.extent.offset}: {what}", file=place, offset=chunk.extent.offset)
            block.damage = damaged(block, error)


def restore(directory: Paths, snapshot: str, layer: FileLayer) -> None:
    with typed():
        folders = Folders(paths_of(directory), layer)
        try:
            if folders.fresh:
                raise InvalidArgument(f"{folders.parts[0].path} holds no store")
            restore_snapshot(folders, snapshot)
        finally:
            folders.close()
