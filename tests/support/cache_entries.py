"""A request, a compiler that does nothing, and what they make: entries of a cache."""

import json
from dataclasses import dataclass

from ksgen.build.request import Binary, Request, Resources

REQUEST = Request("text of a kernel", "ks_1", "sm_90a")


@dataclass(frozen=True)
class Compiler:
    name: str = "nvcc"
    version: str = "13.0.88"
    flags: tuple[str, ...] = ("-O3",)

    def options(self, target: str) -> tuple[str, ...]:
        return (*self.flags, target)

    def compile(self, text: str, entry: str, target: str) -> Binary:
        raise AssertionError("a cache never compiles")


COMPILER = Compiler()


def binary(request: Request = REQUEST, compiler: Compiler = COMPILER, data: bytes = b"cubin" * 100) -> Binary:
    options = json.dumps(compiler.options(request.target))
    made = {"compiler": compiler.name, "compiler_version": compiler.version, "options": options, "notes": "a\nb"}
    return Binary(data, request.entry, request.target, Resources(32, 1024, 0, None), made)
