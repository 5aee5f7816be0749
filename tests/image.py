"""Build the image of ./Dockerfile and run it: with Docker, or without it step by step in a folder.

    python tests/image.py                     with Docker, if its daemon answers, else in a folder
    python tests/image.py INDEX= EXTRA=hf     other build arguments; an empty INDEX is pip's own

Without Docker a virtual environment of this Python stands for the base image, folders below a
temporary one for the image's, and what git knows for the context. ``make image`` runs it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"(\w+)=(\S*)")


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments; comments are left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [
        (verb, rest.strip()) for verb, _, rest in (line.partition(" ") for line in joined) if verb
    ]


def in_a_folder(folder: Path, text: str, given: dict[str, str]) -> None:
    """Do what the instructions say, and the command of the image at last."""
    venv = folder / "venv"
    values = dict(os.environ, PATH=f"{venv / 'bin'}:{os.environ['PATH']}", VIRTUAL_ENV=str(venv))
    values.pop("PYTHONPATH", None)  # an image has none
    here, command = folder, list[str]()
    for verb, rest in instructions(text):
        print(f"{verb} {rest}", flush=True)
        if verb == "FROM":
            asked = re.search(r"python:(\d+)\.(\d+)", rest)
            if asked is None or sys.version_info[:2] < tuple(map(int, asked.groups())):
                sys.exit(
                    f"this is Python {sys.version.split()[0]}, expected that of {rest} or later"
                )
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        elif verb == "ARG":
            name, _, default = rest.partition("=")
            values[name] = given.get(name, default)
        elif verb == "WORKDIR":
            here = folder / rest.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif (verb, rest) == ("COPY", ". ."):
            tracked = subprocess.run(
                ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            for name in filter(None, tracked.stdout.split("\0")):
                (here / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, here / name, follow_symlinks=False)
        elif verb == "RUN":
            subprocess.run(["sh", "-euc", rest], cwd=here, env=values, check=True)
        elif verb == "CMD":
            command = json.loads(rest)
        else:
            sys.exit(f"{verb} {rest} of the Dockerfile is not known here: teach it to {__file__}")
    subprocess.run(command, cwd=here, env=values, check=True)


def main() -> None:
    given = {}
    for word in sys.argv[1:]:
        if not (match := NAMED.fullmatch(word)):
            sys.exit(f"got {word!r}, expected build arguments such as EXTRA=hf")
        given[match[1]] = match[2]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "info"], capture_output=True).returncode == 0:
        arguments = [word for pair in given.items() for word in ("--build-arg", "=".join(pair))]
        subprocess.run([docker, "build", "--tag", "commpress", *arguments, str(ROOT)], check=True)
        subprocess.run([docker, "run", "--rm", "--shm-size", "2g", "commpress"], check=True)
        return
    print("no Docker answers: the steps of the Dockerfile run in a folder", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        in_a_folder(Path(folder), (ROOT / "Dockerfile").read_text(), given)


if __name__ == "__main__":
    main()
