"""The CUDA source without a GPU: it compiles for real ones, is shipped and loaded, and its launches
are those that CuPy would run. ``test_row_codecs`` runs them on the CPU, thread by thread."""

import inspect
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cuda_shim
import kernel_twin as twin
from commpress.errors import InvalidArgument, MissingPackage
from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.cuda import machine_code, modules, nvrtc
from commpress.kernels.cuda import row_codec as cuda
from commpress.kernels.pieces import Piece, cut
from variants import seldom

# ---------------------------------------------------------------- compiled for GPUs


# codes, headers of blocks and of rows, passes of optimizers: nothing in the source asks for the
# architecture
ONE_OF_EACH = [reference.SIGN_RMS, reference.BITS, modules.ADAM, modules.HEADERS]


@pytest.mark.parametrize(
    ("architecture", "families"),
    [(80, ONE_OF_EACH), *(seldom(n, twin.FAMILIES) for n in (80, 90, 100))],
)
def test_source_compiles_for_every_family(architecture, families):
    """With the options that CuPy adds to ours, of which the first would flush denormals if the
    source let it."""
    if nvrtc.loaded() is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    added = ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")

    def compiled(family):
        return nvrtc.compile_source(modules.source(family), modules.options(family) + added)

    with ThreadPoolExecutor(2) as pool:
        for family, (ptx, binary) in zip(families, pool.map(compiled, families), strict=True):
            assert binary.startswith(b"\x7fELF")
            assert set(re.findall(r"\.entry (\w+)", ptx)) == set(cuda_shim.kernel_names(family))
            inexact = re.findall(r"\b\S*(?:\.ftz|\.approx|fma\.|mad\.rn)\S*", ptx)
            assert not inexact, (
                f"family {family}: {set(inexact)} round twice, approximately or drop denormals"
            )


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder for machine code that a package ships."""
    monkeypatch.setattr(modules, "FOLDER", tmp_path / "cubins")
    monkeypatch.setenv("COMMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    return modules.FOLDER


def test_shipped_code_is_that_of_the_source_and_of_the_major_version(shipped, monkeypatch):
    if nvrtc.loaded() is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(modules, "FAMILIES", (reference.FP16,))
    (path,) = machine_code.build(shipped, (80,))
    assert path.read_bytes().startswith(b"\x7fELF")
    assert [modules.shipped(reference.FP16, card) for card in (75, 80, 86, 89, 90)] == [
        None,
        path,
        path,
        path,
        None,
    ]
    assert modules.shipped(reference.BF16, 80) is None
    monkeypatch.setattr(modules, "digest", lambda family: "of another source")
    assert modules.shipped(reference.FP16, 80) is None


class DriverError(Exception):
    pass


def cupy_that(refuses=False):
    """CuPy as ``modules`` sees it on an A10; what it is asked to make is in ``made``."""
    made, inside = [], []

    class RawModule:
        def __init__(self, path=None, code=None, options=None):
            self.path = path

        def compile(self):
            inside.append(self)
            made.append("load" if self.path else f"compile, {len(inside)} at once")
            sleep(0.05)
            inside.remove(self)
            if self.path and refuses:
                raise DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    driver = SimpleNamespace(CUDADriverError=DriverError)
    device = SimpleNamespace(compute_capability="86")
    return SimpleNamespace(
        RawModule=RawModule, cuda=SimpleNamespace(Device=lambda: device, driver=driver), made=made
    )


@pytest.mark.parametrize("refuses", [False, True])
def test_shipped_code_is_loaded_and_compiled_where_the_driver_refuses_it(shipped, refuses, caplog):
    cupy, path = cupy_that(refuses), modules.cubin(reference.FP16, 80)
    path.parent.mkdir(parents=True)
    path.touch()
    modules.load(cupy, reference.FP16)
    assert cupy.made == (["load", "compile, 1 at once"] if refuses else ["load"])
    assert ("the driver does not load" in caplog.text) == refuses


def test_one_process_compiles_while_others_wait(shipped):
    """A lock of files keeps out threads as it does processes: each opens the file itself."""
    cupy = cupy_that()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: modules.load(cupy, reference.FP16), range(4)))
    assert cupy.made == ["compile, 1 at once"] * 4


# ---------------------------------------------------------------- before any launch


@pytest.mark.parametrize("name", ["encode", "serve", "decode", "decode_mean", "settle"])
def test_arguments_are_those_of_the_cpu_path(name):
    ours, theirs = (
        inspect.signature(getattr(path, name)).parameters.values() for path in (cuda, cpu)
    )
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


def test_importing_imports_no_cupy():
    code = "import sys, commpress.kernels.cuda.row_codec; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_cupy_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingPackage, match=r"commpress\[cuda12\].*commpress\[cuda13\]"):
        cuda._cupy()


@pytest.mark.parametrize("version", [14, 13])
def test_launches_go_to_cupy_on_the_current_stream(monkeypatch, version):
    """CuPy is asked in the words of version 14 and in those before."""
    device, asked = torch.device("cuda", 3), []

    @contextmanager
    def context(*words):
        asked.append(words)
        yield

    def get_function(name):
        return lambda grid, threads, args: asked.append((name, grid, threads, args))

    cupy = SimpleNamespace(
        RawModule=lambda code, options: SimpleNamespace(
            get_function=get_function, compile=lambda: None
        ),
        cuda=SimpleNamespace(
            Device=lambda *index: (
                context("device", *index) if index else SimpleNamespace(compute_capability="75")
            ),
            Stream=SimpleNamespace(),
            ExternalStream=lambda pointer, index: context("external", pointer, index),
        ),
    )
    if version == 14:  # which reads the stream's own answer
        cupy.cuda.Stream.from_external = lambda stream: context(
            "from_external", *stream.__cuda_stream__()
        )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "current_stream_address", lambda index: 77)
    monkeypatch.setattr(cuda, "_stream", cuda._stream.__wrapped__)
    monkeypatch.setattr(cuda, "_kernel", cuda._kernel.__wrapped__)
    monkeypatch.setattr(cuda, "_module", cuda._module.__wrapped__)
    cuda.execute(cuda.Launch("settle", 0, 5, 256, (np.int32(1),), device))
    on = ("from_external", 0, 77) if version == 14 else ("external", 77, 3)
    assert asked == [("device", 3), on, ("settle", (5,), (256,), (1,))]


def test_wrong_tensors_are_refused():
    pieces, flag = cut([Piece(0, 64, reference.INT8, 64)], 2), torch.zeros(1, dtype=torch.uint8)
    x, message = torch.zeros(64), torch.zeros(2, pieces.row_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match=r"commpress\.kernels\.cpu"):
        cuda.encode(x, message, flag, pieces)
    with pytest.raises(InvalidArgument, match=r"x is torch\.float64"):
        cuda.encode(x.double(), message, flag, pieces)
    with pytest.raises(InvalidArgument, match=r"residual .* expected 64"):
        cuda.encode(x, message, flag, pieces, residual=x[:8])
    with pytest.raises(InvalidArgument, match=r"flag is torch\.float32"):
        cuda.encode(x, message, flag.float(), pieces)
    with pytest.raises(InvalidArgument, match="consecutive"):
        cuda.decode(message, torch.zeros(64, 2)[:, 0], pieces)
    with pytest.raises(InvalidArgument, match=r"pieces\.row_bytes"):
        cuda.decode(message[:, :-8], x, pieces)
