"""NVIDIA's run-time compiler from its wheel, through ctypes: compiling CUDA source needs neither a
GPU nor a driver."""

import ctypes
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")


@cache
def loaded() -> ctypes.CDLL | None:
    """Return the compiler's library, if one of its wheels is installed."""
    for wheel in WHEELS:
        try:
            files = distribution(wheel).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                return ctypes.CDLL(str(Path(str(file.locate()))))
    return None


def architectures() -> list[int]:
    """Return the architectures for which it can compile, such as 90 for sm_90."""
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    values = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", values)
    return list(values)


def compile_source(source: str, options: tuple[str, ...]) -> tuple[str, bytes]:
    """Return PTX and machine code; raise ``RuntimeError`` with the compiler's log after errors or
    warnings."""
    program = ctypes.c_void_p()
    _call(
        "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"commpress.cu", 0, None, None
    )
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = _library().nvrtcCompileProgram(program, len(options), arguments)
        output = _output(program, "ProgramLog").rstrip(b"\0").decode()
        if status or "warning" in output:
            raise RuntimeError(f"NVRTC with {' '.join(options)} reports:\n{output}")
        return _output(program, "PTX").rstrip(b"\0").decode(), _output(program, "CUBIN")
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def _output(program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{name}", program, buffer)
    return buffer.raw


def _library() -> ctypes.CDLL:
    if (library := loaded()) is None:
        raise RuntimeError(
            'there is no NVRTC to compile CUDA kernels: pip install "nvidia-cuda-nvrtc-cu12>=12.8"'
        )
    return library


def _call(name: str, *arguments: object) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name} returned {status}")
