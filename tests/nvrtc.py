"""NVIDIA's run-time compiler from its wheel, through ctypes: compiling CUDA source takes neither a GPU nor a driver."""

import ctypes
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


@cache
def loaded() -> ctypes.CDLL | None:
    for wheel in WHEELS:
        try:
            files = distribution(wheel).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                return ctypes.CDLL(str(Path(file.locate())))
    return None


def architectures() -> list[int]:
    """Architectures that the compiler can compile for, as 90 for sm_90."""
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    values = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", values)
    return list(values)


def compile_source(source: str, options: tuple[str, ...]) -> tuple[str, bytes]:
    """PTX and machine code; an AssertionError with the compiler's log if it does not compile or warns."""
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"commpress.cu", 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = loaded().nvrtcCompileProgram(program, len(options), arguments)
    log = _text(program, "ProgramLog").decode()
    assert status == 0, log
    assert "warning" not in log, log
    ptx, binary = _text(program, "PTX").decode(), _text(program, "CUBIN")
    _call("nvrtcDestroyProgram", ctypes.byref(program))
    return ptx, binary


def _text(program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{name}", program, buffer)
    return buffer.raw.rstrip(b"\0") if name != "CUBIN" else buffer.raw


def _call(name: str, *arguments: object) -> None:
    status = getattr(loaded(), name)(*arguments)
    assert status == 0, f"{name} returned {status}"
