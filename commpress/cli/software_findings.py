"""What is installed and whether it runs: torch, kernels, backends, MPI, GPU."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from commpress.cli.finding import Finding

OLDEST = (2, 8)
NEEDED, USEFUL = ("numpy", "llvmlite", "msgpack", "xxhash"), ("transformers", "accelerate", "lightning", "matplotlib")
SECONDS = 30  # for a program or a thread to answer


def packages() -> list[Finding]:
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    threads = f"{torch.get_num_threads()} threads"
    if number < OLDEST:
        old = Finding("bad", f"torch {torch.__version__} is older than 2.8", "pip install --upgrade torch")
    else:
        old = Finding("ok", f"Python {platform.python_version()}, torch {torch.__version__}, {threads}")
    missing = [name for name in NEEDED if not installed(name)]
    there = ", ".join(f"{name} {installed(name)}" for name in NEEDED if name not in missing)
    extras = [name for name in USEFUL if not installed(name)]
    found = [old, Finding("ok", there)]
    found += [Finding("bad", f"{name} is missing", f"pip install {name}") for name in missing]
    if extras:
        cure = "only what uses them needs them: pip install 'commpress[hf,lightning,demo]'"
        found.append(Finding("note", f"not installed: {', '.join(extras)}", cure))
    return found


def kernels() -> list[Finding]:
    """Encode, residual and decode of the sign codec against the reference, bit for bit: compiled on the first call."""
    from commpress.cli.bench_codec import check_bytes
    from commpress.codecs import SignCodec

    try:
        check_bytes(SignCodec(), 4099)
    except Exception as error:
        cure = "pip install --upgrade llvmlite; if that does not help, install commpress again"
        return [Finding("bad", f"the CPU kernels do not work: {type(error).__name__}: {str(error)[:200]}", cure)]
    return [Finding("ok", "the CPU kernels compile, and their bytes equal the reference"), kernel_cache(), kernel_threads()]


def kernel_cache() -> Finding:
    """Where compiled kernels are kept from one process to the next."""
    from commpress.kernels.cpu import object_cache

    if (folder := object_cache.writable()) is not None:
        return Finding("ok", f"compiled kernels are kept in {folder}")
    tried = ", ".join(map(str, object_cache.folders()))
    what = f"compiled kernels are not kept: no folder of this user's alone can be written ({tried})"
    cure = "every process compiles for some seconds; set COMMPRESS_CACHE_DIR to a folder that nobody else may write to"
    return Finding("note", what, cure)


def kernel_threads() -> Finding:
    from commpress.kernels.cpu import openmp as cpu_openmp

    if cpu_openmp.entry() is not None:
        return Finding("ok", "the CPU kernels run on the threads of torch")
    what = "this torch lets nobody use its threads: the CPU kernels run on threads of their own"
    return Finding("note", what, "no cure; right after an operation of torch they share its cores with threads that spin")


def backends() -> list[Finding]:
    found = [gloo()]
    try:
        import_module("commpress.backend")
        found.append(Finding("ok", 'backend "commpress" is registered by import commpress.backend'))
    except Exception as error:
        found.append(Finding("bad", f'backend "commpress" cannot be registered: {error}', "import commpress.backend"))
    if not dist.is_nccl_available():
        found.append(Finding("note", "this torch has no NCCL", "needed on GPUs only: a build of torch for CUDA has it"))
    elif not torch.cuda.is_available():
        found.append(Finding("note", "NCCL is there, a GPU is not"))
    else:
        found.append(Finding("ok", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"))
    if not dist.is_mpi_available():
        found.append(Finding("note", "this torch has no MPI backend of its own", "not needed: commpress goes through mpi4py"))
    return [*found, *own_name()]


def gloo() -> Finding:
    """Two ranks of this process exchange one number over real connections."""
    if not dist.is_gloo_available():
        return Finding("bad", "this torch has no Gloo", "install an official build of torch")
    store, failures, sums = dist.HashStore(), [], []

    def rank(number: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=SECONDS))
            one = torch.ones(1)
            group.allreduce([one]).wait()  # type: ignore[attr-defined]
            sums.append(float(one))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if sums == [2.0, 2.0]:
        return Finding("ok", "Gloo connects and sums")
    said = str(failures[0]).strip().splitlines()[0][:200] if failures else f"no answer within {2 * SECONDS} s"
    return Finding("bad", f"Gloo does not connect: {said}", "name an interface that works: GLOO_SOCKET_IFNAME=lo or eth0")


def own_name() -> list[Finding]:
    """Gloo offers others the address of this machine's name, unless an interface is named."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        there = {name for _, name in socket.if_nameindex()}
        missing = [name for name in named.split(",") if name not in there]
        if missing:
            cure = f"unset it or name one of {', '.join(sorted(there))}"
            return [Finding("bad", f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not there", cure)]
        return [Finding("ok", f"Gloo uses {named} (GLOO_SOCKET_IFNAME)")]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return [Finding("note", "this machine's name has no address", "for several machines: GLOO_SOCKET_IFNAME=eth0")]
    if address.startswith("127."):
        cure = "fine on one machine; for several: GLOO_SOCKET_IFNAME=eth0, or mend /etc/hosts"
        return [Finding("note", f"this machine's name is {address}: Gloo offers others an address they cannot reach", cure)]
    return [Finding("ok", f"this machine's name has an address ({address})")]


def mpi() -> list[Finding]:
    cure = "for MpiTransport and mpirun: pip install 'commpress[mpi]', which brings a whole MPI"
    if not installed("mpi4py"):
        return [Finding("note", "mpi4py is missing", cure)]
    said = answer([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])"])
    if said is None:
        cure += "; or name yours: MPI4PY_LIBMPI=.../libmpi.so"
        return [Finding("note", f"mpi4py {installed('mpi4py')} does not start an MPI", cure)]
    found = [Finding("ok", f"mpi4py {installed('mpi4py')} on {said}")]
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return [*found, Finding("note", "mpirun is not on the PATH", cure)]
    return [*found, Finding("ok", f"mpirun: {mpirun}")]


def gpu() -> list[Finding]:
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            cure = "install a build of torch for CUDA that fits the driver"
            return [Finding("bad", f"there is an NVIDIA device, but torch {torch.__version__} cannot use it", cure)]
        return [Finding("note", "no GPU: the CPU kernels work", "with one: torch for CUDA, commpress[cuda12] or [cuda13]")]
    found = []
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        found.append(Finding("ok", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"))
    cupy = installed("cupy-cuda12x") or installed("cupy-cuda13x") or installed("cupy")
    if cupy is None:
        major = (torch.version.cuda or "12").split(".")[0]
        return [*found, Finding("bad", "CuPy is missing: no kernels for the GPU", f"pip install 'commpress[cuda{major}]'")]
    said = answer([sys.executable, "-c", "import cupy; print(int(cupy.arange(3).sum()))"])
    if said != "3":
        return [*found, Finding("bad", f"CuPy {cupy} does not compute on the GPU", "see cupy.show_config()")]
    return [*found, Finding("ok", f"CuPy {cupy}")]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def answer(command: list[str]) -> str | None:
    """The last line that a program prints, None if it fails or does not end."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ran.stdout.strip().splitlines()
    return lines[-1] if ran.returncode == 0 and lines else None
