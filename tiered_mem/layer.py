"""All calls of the operating system for files, and their names, in one place, where tests simulate
faulty disks and power cuts.

Files are opened relative to a folder's descriptor, without following symbolic links, and only if
they belong to this user.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import socket
import stat
import time
from pathlib import Path

from commpress.errors import DirectoryRefused

DIRECT = getattr(os, "O_DIRECT", 0)
PAGE = 4096
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Names of the files of a store. Files with other names are foreign: they are never written, moved
# or removed.
IDENTITY, MANIFEST, LOCK = "identity", "manifest", "lock"
TEMPORARY = ".tmp"
SNAPSHOT = re.compile(r"snapshot-(?!.*\.tmp$)([A-Za-z0-9][A-Za-z0-9._-]{0,99})")
PROBE = "direct" + TEMPORARY  # written once, to test the file system
SEGMENTS = 10**9  # limit of a segment's number

_SEGMENT = re.compile(r"segment-([0-9]{6,9})")


class FileLayer:
    """The operating system's calls for files. Descriptors are integers; ``folder`` arguments are
    descriptors of folders."""

    def open_folder(self, path: Path) -> int:
        """Open a directory, and make it with mode 0700 if it does not exist; refuse links,
        directories of other owners, and those that others may write to."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise DirectoryRefused(
                f"cannot open {path}: {error.strerror}; expected a directory that is not a "
                "symbolic link"
            ) from error
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            os.close(folder)
            raise DirectoryRefused(
                f"{path} belongs to user {found.st_uid}, expected user {os.geteuid()}, who runs "
                "this process"
            )
        if found.st_mode & 0o022:
            os.close(folder)
            raise DirectoryRefused(
                f"others may write to {path} (mode {found.st_mode & 0o777:o}): chmod 700 {path}"
            )
        return folder

    def lock(self, folder: int, path: Path) -> int:
        """Lock the folder for this process until the returned descriptor is closed or the process
        ends."""
        held = self.open(folder, LOCK, create=True)
        owner = os.pread(held, 200, 0).decode(errors="replace").strip()
        try:
            if owner and not owner.startswith("process "):
                raise DirectoryRefused(
                    f"{path} contains a foreign file {LOCK!r}: choose another folder"
                )
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            raise DirectoryRefused(
                f"{path} is in use by {owner or 'an unknown process'}: close that store, or choose "
                "another folder"
            ) from error
        except DirectoryRefused:
            os.close(held)
            raise
        os.ftruncate(held, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(
            held, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0
        )
        return held

    def open(
        self,
        folder: int,
        name: str,
        *,
        create: bool = False,
        direct: bool = False,
        write: bool = True,
    ) -> int:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(
                name,
                flags | (os.O_CREAT if create else 0) | (DIRECT if direct else 0),
                0o600,
                dir_fd=folder,
            )
        except OSError as error:
            with contextlib.suppress(OSError):
                if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise DirectoryRefused(
                        f"{name!r} in the store's folder is not a file of ours: remove it"
                    ) from error
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise DirectoryRefused(
                f"{name!r} in the store's folder is not a file of ours: remove it"
            )
        # opening a pipe must not wait for its writer; reads of a file may wait
        os.set_blocking(fd, True)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwritev(fd, [view], offset)

    def reserve(self, fd: int, size: int) -> None:
        """Make the file ``size`` bytes long, with room on the disk for all of it."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        if hasattr(os, "fdatasync"):
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def sync_folder(self, folder: int) -> None:
        os.fsync(folder)

    def rename(self, folder: int, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def room(self, folder: int) -> int:
        """Return the free bytes of the disk."""
        found = os.fstatvfs(folder)
        return found.f_bavail * found.f_frsize

    def capacity(self, folder: int) -> int:
        found = os.fstatvfs(folder)
        return found.f_blocks * found.f_frsize

    def takes_direct(self, folder: int) -> bool:
        """Test whether files of this folder can be read and written past the page cache."""
        if not DIRECT:
            return False
        fd, page = -1, mmap.mmap(-1, PAGE)
        try:
            fd = self.open(folder, PROBE, create=True, direct=True)
            return os.pwritev(fd, [page], 0) == PAGE and os.preadv(fd, [page], 0) == PAGE
        except OSError:
            return False
        finally:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                self.unlink(folder, PROBE)


def write_fully(layer: FileLayer, fd: int, content: bytes) -> None:
    """Write from the beginning of the file, repeating short writes."""
    view, done = memoryview(content), 0
    while done < len(view):
        wrote = layer.write(fd, view[done:], done)
        if wrote == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done += wrote


def read_fully(layer: FileLayer, fd: int, length: int, start: int = 0) -> bytes:
    """Read ``length`` bytes from ``start`` on, or as many as the file has, repeating short
    reads."""
    content = memoryview(bytearray(max(min(length, layer.size(fd) - start), 0)))
    done = 0
    while done < len(content) and (got := layer.read(fd, content[done:], start + done)):
        done += got
    return bytes(content[:done])


def segment_name(number: int) -> str:
    return f"segment-{number:06d}"


def segment_number(name: str) -> int | None:
    """Return the number in a segment's name; None if it is another name."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and name == segment_name(int(match[1])) else None


def snapshot_name(name: str) -> str:
    return f"snapshot-{name}"


def is_temporary(name: str) -> bool:
    """Return whether a file was left by an interrupted run."""
    whole = name.removesuffix(TEMPORARY)
    return name == PROBE or (
        whole != name and (whole in (IDENTITY, MANIFEST) or bool(SNAPSHOT.fullmatch(whole)))
    )


def holds_state(name: str) -> bool:
    """Return whether a file has tensors or a list of them."""
    return name == MANIFEST or segment_number(name) is not None or bool(SNAPSHOT.fullmatch(name))
