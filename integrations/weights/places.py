"""Places of published versions: a folder, or an object store by its URL. Files are written once,
but for the head."""

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from pathlib import Path
from time import monotonic, sleep

from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.weights import weight_records as records

HTTP = ("http://", "https://")  # URLs of servers
PART = ".part"  # ends the names of files that are not whole yet
AT_ONCE = 8  # parts of files that are read in the background at the same time
MOST = 8 << 20  # bytes that are asked for at once
LOOK = 0.05  # seconds between two looks for a newer version


class ReadablePlace:
    """Files by name. FileNotFoundError for one that is not there."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(AT_ONCE, "commpress-read")
        self._looking = threading.Lock()  # of the one that looks for those that wait
        self._seen, self._newest, self._when = b"", 0, 0.0

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        """(bytes from ``first`` on, ``most`` of them or fewer; size of the whole file)."""
        raise NotImplementedError

    def read(self, name: str, first: int, most: int) -> bytes:
        """Bytes from ``first`` on, ``most`` of them or as many as there are."""
        parts, part = list[bytes](), b"."
        while most > 0 and part:
            part, total = self.range(name, first, min(most, MOST))
            parts.append(part)
            first, most = first + len(part), min(most - len(part), total - first - len(part))
        return b"".join(parts)

    def begin(self, name: str, first: int, most: int) -> "Future[bytes]":
        """Read in the background, ``AT_ONCE`` parts at a time."""
        return self._readers.submit(self.read, name, first, most)

    def look(self, after: int, seconds: float) -> bytes:
        """The file ``head``. A server may wait until it has a version later than ``after``."""
        return self.read(records.HEAD_NAME, 0, records.LONGEST_HEAD)

    def head(self, after: int, seconds: float) -> bytes:
        """The file ``head``, as soon as it has a version later than ``after``; after ``seconds`` as
        it is. Of those that wait one looks, and the others learn it from that one."""
        if not isinstance(seconds, int | float) or not 0 <= seconds < inf:
            raise InvalidArgument(f"wait is {seconds!r}, expected seconds of at least 0")
        if seconds <= 0 or self._newest > after:
            return self.look(after, 0.0)
        began = monotonic()
        ends = began + seconds
        if self._looking.acquire(timeout=seconds):
            try:
                while self._when < began or self._newest <= after:
                    left = max(ends - monotonic(), 0.0)
                    try:
                        self.saw(self.look(after, left))
                    except FileNotFoundError:
                        if not left:
                            raise
                    if not left:
                        break
                    if self._newest <= after:
                        sleep(min(LOOK, left))
            finally:
                self._looking.release()
        if not self._seen:
            raise FileNotFoundError(records.HEAD_NAME)
        return self._seen

    def saw(self, head: bytes) -> None:
        """Keep a head for those that wait."""
        if head != self._seen:
            self._newest = records.unpack(records.HeadRecord, head).newest
        self._seen, self._when = head, monotonic()


class FolderPlace(ReadablePlace):
    """A folder, which all ranks of a publisher see."""

    def __init__(self, path: str | os.PathLike[str], *, make: bool = False) -> None:
        super().__init__()
        self._path = Path(path)
        if make:
            with contextlib.suppress(FileExistsError):  # perhaps as a file
                self._path.mkdir(parents=True)
        if not self._path.is_dir():
            raise InvalidArgument(
                f"{str(path)!r} is no folder, expected one that a publisher writes to"
            )

    def __str__(self) -> str:
        return str(self._path)

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # not to wait at a pipe
        file = os.open(self._path / name, flags)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(name)
            return os.pread(file, most, first), found.st_size
        finally:
            os.close(file)

    def write(self, name: str, chunks: Iterable[bytes], *, anew: bool = False) -> None:
        """Write a file whole or not at all; it is on the disk when this returns. It takes the place
        of another, or with ``anew`` raises FileExistsError if there is one."""
        draft = self._path / f"{name}.{secrets.token_hex(4)}{PART}"
        try:
            with open(draft, "xb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            (os.link if anew else os.rename)(draft, self._path / name)
        finally:
            draft.unlink(missing_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def names(self) -> list[str]:
        return os.listdir(self._path)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class ObjectPlace(ReadablePlace):
    """An object store that fsspec knows, such as ``s3://bucket/run``. Its files appear whole or not
    at all.

    Two publishers that begin at the same moment are not told apart here: fsspec has no exclusive
    write for all stores.
    """

    def __init__(self, url: str, *, make: bool = False) -> None:
        super().__init__()
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingPackage(
                f"{url} needs fsspec: pip install fsspec, and what it needs for such URLs"
            ) from error
        try:
            self._files, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(
                f"{url!r} cannot be opened ({error}), expected a folder, http:// or a URL of fsspec"
            ) from error
        self._url, self._path = url, path.rstrip("/")
        if make:
            self._files.makedirs(self._path, exist_ok=True)

    def __str__(self) -> str:
        return self._url

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        path = f"{self._path}/{name}"
        self._files.invalidate_cache(path)  # another process writes the head
        size = int(self._files.info(path)["size"])
        end = min(first + most, size)
        return self._files.cat_file(path, start=first, end=end) if first < size else b"", size

    def write(self, name: str, chunks: Iterable[bytes], *, anew: bool = False) -> None:
        if anew and name in self.names():
            raise FileExistsError(name)
        with self._files.open(f"{self._path}/{name}", "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        found = self._files.ls(self._path, detail=False) if self._files.exists(self._path) else []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


WeightPlace = FolderPlace | ObjectPlace


def url_of(where: str | os.PathLike[str]) -> str:
    """A folder or URL as text."""
    if not where or not isinstance(where, str | os.PathLike):
        raise InvalidArgument(f"{where!r} is no place, expected a folder, http:// or another URL")
    return os.fspath(where)


def stored_place(where: str | os.PathLike[str], *, make: bool = False) -> WeightPlace:
    """A folder or an object store, by its URL; ``make``: for a publisher."""
    text = url_of(where)
    if text.startswith(HTTP):
        raise InvalidArgument(
            f"to is {text!r}, expected a folder or an object store: serve it with commpress "
            "weights serve"
        )
    return ObjectPlace(text, make=make) if "://" in text else FolderPlace(where, make=make)
