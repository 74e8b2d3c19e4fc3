"""Everything static stands in pyproject.toml; here is how the compiled kernels are built, where there is a compiler."""

import platform
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

NATIVE = Path("hvdcompress/kernels/native")
INSTRUCTION_SETS = {
    "avx2.cpp": ["-mavx2", "-mbmi", "-mbmi2", "-mpopcnt"],
    "avx512.cpp": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mbmi",
        "-mbmi2",
        "-mpopcnt",
        "-Wno-maybe-uninitialized",
    ],
}
# -ffp-contract=off: a product and a sum are rounded one after the other, as the NumPy kernels do.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]


class BuildKernels(build_ext):
    """Compiles each instruction set's file with its own flags."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_with_flags(obj: str, src: str, ext: str, cc_args: Any, extra: list[str], pp_opts: Any) -> None:
            compile_one(obj, src, ext, cc_args, [*extra, *INSTRUCTION_SETS.get(Path(src).name, [])], pp_opts)

        self.compiler._compile = compile_with_flags
        super().build_extensions()


x86 = platform.machine().lower() in ("x86_64", "amd64")
sources = ["module.cpp", "baseline.cpp", *(INSTRUCTION_SETS if x86 else [])]
kernels = Pybind11Extension(
    "hvdcompress.kernels._native",
    [str(NATIVE / source) for source in sources],
    depends=[str(NATIVE / header) for header in ("kernels.h", "implementation.h")],
    cxx_std=17,
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,  # the NumPy kernels serve without
)

setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels})
