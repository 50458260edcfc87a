"""Operand lists of PTX instructions that depend on a size, for `templates/include/snippets/ptx.j2`."""

from dataclasses import dataclass

from ksgen.spec.precision import OPERANDS


@dataclass(frozen=True)
class Box:
    """Part of an array that one copy by a tensor map moves; its corner has one coordinate per dimension."""

    dimensions: int

    @property
    def _names(self) -> list[str]:
        return [f"x{number}" for number in range(self.dimensions)]

    @property
    def parameters(self) -> str:
        return ", ".join(f"int {name}" for name in self._names)

    @property
    def values(self) -> str:
        return ", ".join(f'"r"({name})' for name in self._names)

    def corner(self, first: int) -> str:
        """Operands of a box's corner in the instruction, numbered from `first`."""
        return f"{{ {', '.join(f'%{number}' for number in range(first, first + self.dimensions))}}}"


@dataclass(frozen=True)
class WgmmaInstruction:
    """sums (64 x columns) = A (64 x k) B (k x columns) by a warpgroup, A in registers or in shared memory."""

    operand: str  # its name in PTX: a key of OPERANDS
    columns: int  # a multiple of 8, up to 256
    a_in_registers: bool

    @property
    def name(self) -> str:
        return f"wgmma_{'rs' if self.a_in_registers else 'ss'}_{self.operand}"

    @property
    def k(self) -> int:
        return OPERANDS[self.operand].k_step

    @property
    def sums(self) -> int:
        """Accumulators per thread."""
        return self.columns // 2

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one instruction per thread."""
        return 64 * self.columns * self.k // 128

    @property
    def instruction(self) -> str:
        return f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.k}.f32.{self.operand}.{self.operand}"

    @property
    def transposed(self) -> tuple[str, ...]:
        """Template parameters that say which operands in shared memory are transposed; only 16-bit operands can be."""
        if OPERANDS[self.operand].item_bytes != 2:
            return ()
        return ("TRANSPOSES_B",) if self.a_in_registers else ("TRANSPOSES_A", "TRANSPOSES_B")

    @property
    def along_inputs(self) -> str:
        """Name of the function for operands that are all contiguous along the inputs."""
        return self.name + (f"<{', '.join(['false'] * len(self.transposed))}>" if self.transposed else "")

    @property
    def template(self) -> str:
        return f"template <{', '.join(f'bool {name}' for name in self.transposed)}>\n" if self.transposed else ""

    @property
    def a_parameter(self) -> str:
        return "const unsigned (&a)[4]" if self.a_in_registers else "unsigned long long a"

    @property
    def outputs(self) -> str:
        sums = [f'"+f"(sums[{number}])' for number in range(self.sums)]
        return ",\n          ".join(", ".join(sums[at : at + 6]) for at in range(0, self.sums, 6))

    @property
    def inputs(self) -> str:
        flags = [f'"n"(static_cast<int>({name}))' for name in self.transposed]
        a = [f'"r"(a[{number}])' for number in range(self._a_words)] if self.a_in_registers else ['"l"(a)']
        operands = ", ".join(['"r"(static_cast<int>(adds))', '"l"(b)', *a])
        return ",\n          ".join([operands, *([", ".join(flags)] if flags else [])])

    @property
    def adds_operand(self) -> str:
        return f"%{self.sums}"

    @property
    def operands(self) -> str:
        """Operands of the instruction, in its order. In %n, n counts the asm statement's outputs, then its inputs."""
        numbers = iter(range(self.sums + 2, self.sums + 2 + self._a_words + len(self.transposed)))
        a = [f"%{next(numbers)}" for _ in range(self._a_words)]
        flags = [f"%{number}" for number in numbers]
        sums = ", ".join(f"%{number}" for number in range(self.sums))
        a_words = f"{{{', '.join(a)}}}" if self.a_in_registers else a[0]
        return ", ".join([f"{{{sums}}}", a_words, f"%{self.sums + 1}", "adds", "1", "1", *flags])

    @property
    def _a_words(self) -> int:
        return 4 if self.a_in_registers else 1
