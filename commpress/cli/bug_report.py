"""Report of a machine to paste into a bug report: versions, builds, devices, interfaces; nothing
tells whose it is."""

import getpass
import os
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from commpress import __version__
from commpress.cli.doctor import SYS, Finding, is_up, read
from commpress.collectives.transports.run_key import VARIABLE
from commpress.kernels.cpu import object_cache
from commpress.tiered_mem import FileLayer, engines, show_bytes

PACKAGES = (
    "torch",
    "numpy",
    "msgpack",
    "llvmlite",
    "numba",
    "xxhash",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "mpi4py",
    "libaio",
    "aiofiles",
    "transformers",
    "accelerate",
    "lightning",
    "deepspeed",
    "rich",
    "matplotlib",
)
BUILD = (
    "GCC",
    "C++ Version",
    "oneDNN",
    "OpenMP",
    "LAPACK",
    "CPU capability",
    "CUDA Runtime",
    "CuDNN",
)
VARIABLES = ("COMMPRESS_", "GLOO_", "NCCL_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "TORCH_")


def report(found: dict[str, list[Finding]]) -> str:
    """Markdown; ``found`` are the doctor's findings by section."""
    processors = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    lines = [
        f"commpress {__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()}, {platform.machine()}, {processors} processors",
        "packages: "
        + ", ".join(f"{name} {number}" for name in PACKAGES if (number := _installed(name))),
        "torch: " + "; ".join(_build()),
        *_gpus(),
        "engines: "
        + ", ".join(
            f"{name} {'(missing)' if missing else ''}".strip() for name, missing in _engines()
        ),
        _cache(),
        *(f"interface {text}" for text in _interfaces()),
        *(
            f"set: {name}={_told(name, value)}"
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES)
        ),
        "",
    ]
    for section, findings in found.items():
        lines += [
            f"{finding.state:<4}  {section}: {finding.what}"
            for finding in findings
            if finding.state != "ok"
        ]
    return "```\n" + scrubbed("\n".join(lines)).rstrip() + "\n```"


def _told(name: str, value: str) -> str:
    """The value of a variable; no secret of a run, by which somebody could join it."""
    return "<key>" if name == VARIABLE else re.sub(r"#[0-9a-f]{32}\b", "#<token>", value)


def scrubbed(text: str) -> str:
    """Without addresses, the names of host and user, and the home directory."""
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "<address>", text.replace("127.0.0.1", "localhost"))
    text = re.sub(
        r"\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b|(?<=enx)[0-9a-f]{12}\b", "<address>", text, flags=re.I
    )
    text = re.sub(
        r"\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}\b|\b[0-9a-f]{1,4}(?::[0-9a-f]{1,4})*::[0-9a-f:]*",
        "<address>",
        text,
    )
    text = text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text
    for name, shown in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if name and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return ""


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _build() -> list[str]:
    """Of torch.__config__.show(), what kernels and collectives depend on."""
    shown = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    return [
        line[:100]
        for line in shown
        if any(word in line for word in BUILD) and not line.startswith("Build settings")
    ]


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return [
            f"GPU: none (torch for CUDA {torch.version.cuda})"
            if torch.version.cuda
            else "GPU: none, torch without CUDA"
        ]
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else "none"
    )
    driver = (read(Path("/proc/driver/nvidia/version")) or "unknown").splitlines()[0]
    return [
        *(
            f"GPU {i}: {d.name}, {show_bytes(d.total_memory)}, sm_{d.major}{d.minor}"
            for i, d in enumerate(devices)
        ),
        f"CUDA {torch.version.cuda}, NCCL {nccl}, driver {driver}",
    ]


def _engines() -> list[tuple[str, str | None]]:
    return list(engines.available(FileLayer()).items())


def _cache() -> str:
    folder = object_cache.writable()
    if folder is None:
        return "kernels: not kept, no folder can be written"
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return (
        f"kernels: {len(files)} compiled files, "
        f"{show_bytes(sum(path.stat().st_size for path in files))}, in {folder}"
    )


def _interfaces(root: Path = SYS) -> list[str]:
    """Names, without addresses."""
    found = []
    for path in sorted((root / "class/net").iterdir()) if (root / "class/net").is_dir() else []:
        speed = int(read(path / "speed") or -1)
        state = "up" if is_up(path) else "down"
        found.append(
            f"{path.name}: {state}, MTU {read(path / 'mtu')}"
            + (f", {speed / 1000:g} Gbit/s" if speed > 0 else "")
        )
    return found
