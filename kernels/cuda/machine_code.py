"""Machine code of the CUDA kernels, made by NVRTC without a GPU: when a wheel is built, or by a
developer.

    python -m commpress.kernels.cuda.machine_code FOLDER [ARCHITECTURE ...]    default: 80 90 100

NVRTC comes from a wheel, ``pip install "nvidia-cuda-nvrtc-cu12>=12.8"``; drivers of CUDA 13 load
its output, too.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commpress.kernels.cuda import modules, nvrtc

# A100, H100 and H200, B200; a GPU runs code of its own major version
ARCHITECTURES = (80, 90, 100)


def build(folder: Path, architectures: tuple[int, ...] = ARCHITECTURES) -> list[Path]:
    """Write one file for each family and architecture below ``folder``."""
    wanted = [
        (family, architecture) for architecture in architectures for family in modules.FAMILIES
    ]

    def compiled(each: tuple[int, int]) -> Path:
        family, architecture = each
        # CuPy's options
        added = ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")
        path = folder / modules.cubin(family, architecture).relative_to(modules.FOLDER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            nvrtc.compile_source(modules.source(family), modules.options(family) + added)[1]
        )
        return path

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compiled, wanted))


if __name__ == "__main__":
    if not sys.argv[1:] or not all(word.isdecimal() for word in sys.argv[2:]):
        sys.exit(
            "usage: python -m commpress.kernels.cuda.machine_code FOLDER [ARCHITECTURE ...], as: "
            "build/cubins 80 90"
        )
    made = build(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or ARCHITECTURES)
    sys.stdout.write(
        f"{len(made)} files, {sum(path.stat().st_size for path in made) / 1e6:.1f} MB\n"
    )
