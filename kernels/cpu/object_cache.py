"""Cache of machine code and bitcode in a folder of this user, shared between processes.

Its files are executed. So a folder is used only if it belongs to this user or to root and no other
user may write to it, and a file only if the same holds for it and its checksum matches. A damaged
file is ignored.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger("commpress")
_CHECK = 32


def folders() -> list[Path]:
    """Return the possible folders in order: the one named by COMMPRESS_CACHE_DIR, or else the
    user's cache and a temporary folder."""
    if given := os.environ.get("COMMPRESS_CACHE_DIR"):
        return [Path(given)]
    found, base = [], os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # there may be no home folder
        found.append((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "commpress")
    with contextlib.suppress(OSError):  # there may be no writable temporary folder
        found.append(Path(tempfile.gettempdir()) / f"commpress-{os.getuid()}")
    return found


def load(name: str) -> bytes | None:
    """Return the content of a file, from the first folder in which it is complete."""
    for folder in folders():
        with contextlib.suppress(OSError), _opened(folder) as place:
            found = _read(name, place)
            if blake2b(found[_CHECK:], digest_size=_CHECK).digest() == found[:_CHECK]:
                return found[_CHECK:]
            log.warning("commpress: %s is damaged: it is ignored and written again", folder / name)
    return None


def store(name: str, content: bytes) -> bool:
    """Write a file to the first folder that accepts it, atomically; return whether there is one."""
    for folder in folders():
        with contextlib.suppress(OSError), _made(folder) as place:
            _write(name, blake2b(content, digest_size=_CHECK).digest() + content, place)
            return True
    _warn_without_cache()
    return False


def writable() -> Path | None:
    """Return the first writable folder, if there is one."""
    for folder in folders():
        with contextlib.suppress(OSError), _made(folder):
            if os.access(folder, os.W_OK):
                return folder
    return None


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Keep other processes out of the context, if there is a folder that they can write to, too."""
    with contextlib.ExitStack() as held:
        for folder in folders():
            with contextlib.suppress(OSError), _made(folder) as place:
                file = os.open(
                    f"{name}.lock",
                    os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                    0o600,
                    dir_fd=place,
                )
                held.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX)
                break
        yield


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _ours(place):
            _warn_of_others(folder)
            raise PermissionError(f"others may write to {folder}")
        yield place
    finally:
        os.close(place)


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[int]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(folder) as place:
        yield place


def _ours(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(name: str, place: int) -> bytes:
    with open(
        os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=place), "rb"
    ) as file:
        if not _ours(file.fileno()):
            raise PermissionError(f"others may write to {name}")
        return file.read()


def _write(name: str, content: bytes, place: int) -> None:
    draft = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600, dir_fd=place), "wb") as file:
            file.write(content)
        os.rename(draft, name, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=place)
        raise


@cache
def _warn_of_others(folder: Path) -> None:
    log.warning(
        "commpress: %s is not used as a cache of compiled kernels, because other users may write "
        "to it",
        folder,
    )


@cache
def _warn_without_cache() -> None:
    log.warning(
        "commpress: no folder for a cache of compiled kernels is writable (%s): every process "
        "compiles its kernels, in some 2 seconds; set COMMPRESS_CACHE_DIR to a writable folder",
        ", ".join(map(str, folders())),
    )
