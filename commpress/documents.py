"""JSON documents of commpress: small files with a format and a version. Any other file is refused,
by the name of what it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from commpress.errors import InvalidArgument


class Document(NamedTuple):
    """A kind of document. Nothing in a file is ever evaluated, and at most ``limit`` bytes of it
    are read."""

    format: str
    version: int
    limit: int
    writer: str  # command that writes one

    def write(self, path: str | Path, content: Mapping[str, Any]) -> None:
        head = {"format": self.format, "version": self.version}
        Path(path).write_text(json.dumps(head | dict(content), indent=1) + "\n")

    def read(self, path: str | Path) -> dict[str, Any]:
        """Return the content; raise ``InvalidArgument`` for anything but this format and
        version."""
        content = read_json(path, self.limit, f"what {self.writer} wrote")
        head = (
            (content.pop("format", None), content.pop("version", None))
            if isinstance(content, dict)
            else (None, None)
        )
        if head != (self.format, self.version):
            raise InvalidArgument(
                f"{path} is {head[0]!r}, version {head[1]!r}, expected {self.format!r}, version "
                f"{self.version}: make it again with {self.writer}"
            )
        return dict(content)


def read_json(path: str | Path, limit: int, expected: str) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InvalidArgument(
            f"{str(path)!r} cannot be read ({error.strerror}), expected {expected}"
        ) from error
    if len(data) > limit:
        raise InvalidArgument(f"{path} has more than {limit} bytes, expected {expected}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no JSON ({error}), expected {expected}") from error
