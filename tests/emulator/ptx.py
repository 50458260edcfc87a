"""Turns the inline PTX of a CUDA text into calls of C++ functions, which kernel/ptx.h has for the emulator. It compiles
nothing.

Each `asm` statement becomes a C++ expression with the same effect. Its operands are evaluated once; each instruction
calls one function of namespace `ptx`, with the instruction's operands in their order: vectors in braces, results as
references, or in a vector as pointers. Predicates, registers, scopes, labels and branches become those of C++.

An instruction that `INSTRUCTIONS` does not list, operands that it does not take, a constraint of another width and a
missing `volatile` or "memory" are refused, each by name.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.emulator.errors import SimtError

# Constraints of asm operands, and the C++ types of what they stand for.
_TYPES = {"r": "unsigned", "l": "unsigned long long", "h": "unsigned short", "f": "float"}
_CONSTANT, _PREDICATE = "n", "p"
# Registers that a statement declares.
_DECLARED = {
    "pred": (_PREDICATE, "bool"),
    "b16": ("h", _TYPES["h"]),
    "b32": ("r", _TYPES["r"]),
    "b64": ("l", _TYPES["l"]),
}


@dataclass(frozen=True)
class Instruction:
    """What one instruction takes, and the function that it calls.

    Of `operands`, a letter is a constraint, after "=" a result, after "*" a register that is read later on. Other words
    stand for themselves.
    """

    operands: str
    function: str
    touches_memory: bool = False  # or orders accesses to it: the statement has to say "memory"
    is_volatile: bool = False  # it does more than give results


def _instructions() -> Iterator[tuple[str, Instruction]]:
    def pure(opcode: str, operands: str, function: str) -> tuple[str, Instruction]:
        return opcode, Instruction(operands, function)

    def effect(opcode: str, operands: str, function: str) -> tuple[str, Instruction]:
        return opcode, Instruction(operands, function, is_volatile=True)

    def memory(opcode: str, operands: str, function: str) -> tuple[str, Instruction]:
        return opcode, Instruction(operands, function, touches_memory=True, is_volatile=True)

    yield pure("cvt.f32.f16", "=f,h", "widen_f16")
    yield pure("cvt.rn.f16.f32", "=h,f", "narrow_f16")
    yield pure("cvt.rn.bf16.f32", "=h,f", "narrow_bf16")
    yield pure("cvt.rn.f16x2.f32", "=r,f,f", "narrow_f16x2")
    yield pure("cvt.rn.bf16x2.f32", "=r,f,f", "narrow_bf16x2")
    yield pure("cvt.rn.f16x2.e4m3x2", "=r,h", "widen_e4m3x2")
    yield pure("cvt.rna.tf32.f32", "=r,f", "narrow_tf32<false>")
    yield pure("cvt.rn.tf32.f32", "=r,f", "narrow_tf32<true>")
    yield pure("lop3.b32", "=r,r,r,r,n", "logical_of_three")
    yield pure("ex2.approx.ftz.f32", "=f,f", "exp2_approximated")
    yield pure("fma.rn.f32x2", "=l,l,l,l", "multiply_add_f32x2")
    yield pure("setp.ne.b32", "=p,r,r", "set_if_not_equal")
    yield pure("mov.u32", "=r,%laneid", "lane")
    yield effect("mov.u32", "=r,%cluster_ctarank", "cluster_rank")
    yield effect("setmaxnreg.inc.sync.aligned.u32", "n", "registers_increase")
    yield effect("setmaxnreg.dec.sync.aligned.u32", "n", "registers_decrease")

    for address in ("r", "l"):  # a shared one has 32 bits, and may be given in 64
        yield memory("ld.shared.f32", f"=f,[{address}]", "load_shared")
        yield memory("st.shared.f32", f"[{address}],f", "store_shared")
    for registers, letter in (("2", "r,r"), ("4", "r,r,r,r")):
        yield effect(f"st.global.v{registers}.u32", f"[l],{{{letter}}}", "store_words")
    for hint in ("", ".L2::64B", ".L2::128B", ".L2::256B"):  # bytes that the cache may fetch, which changes no result
        for cache, function in (("ca", "copy_async<false>"), ("cg", "copy_async<true>")):
            for given in ("", ",r"):
                yield memory(f"cp.async.{cache}.shared.global{hint}", f"[r],[l],n{given}", function)
    yield memory("cp.async.commit_group", "", "copy_async_commit")
    yield memory("cp.async.wait_group", "n", "copy_async_wait")
    yield memory("cp.async.wait_all", "", "copy_async_wait_all")
    yield memory("cp.async.mbarrier.arrive.noinc.shared.b64", "[r]", "copy_async_arrive<false>")
    yield memory("cp.async.mbarrier.arrive.shared.b64", "[r]", "copy_async_arrive<true>")

    for word in ("", ".trans"):
        transposed = "true" if word else "false"
        for count in (1, 2, 4):
            results = ",".join(["=r"] * count)
            for shape in (f"m8n8.x{count}", f"x{count}.m8n8"):  # ptxas takes either order
                # without a space: a generic address
                for space, address in ((".shared", "r"), (".shared", "l"), ("", "l")):
                    function = f"matrices<{count}, {transposed}, {'false' if space else 'true'}>"
                    yield memory(
                        f"ldmatrix.sync.aligned.{shape}{word}{space}.b16",
                        f"{{{results}}},[{address}]",
                        f"load_{function}",
                    )
                    words = results.replace("=", "")
                    yield memory(
                        f"stmatrix.sync.aligned.{shape}{word}{space}.b16",
                        f"[{address}],{{{words}}}",
                        f"store_{function}",
                    )
    for kind, k in (("f16", 16), ("bf16", 16), ("tf32", 8), ("e4m3", 32), ("e5m2", 32)):
        operand = f"simt::Operand::{kind.upper()}"
        sums, own = "{=f,=f,=f,=f},{r,r,r,r},{r,r},{f,f,f,f}", f"m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
        yield effect(f"mma.sync.aligned.{own}", sums, f"multiply_fragments<{operand}>")
        for columns in range(8, 257, 8):
            opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{kind}.{kind}"
            sums = f"{{{','.join(['=f'] * (columns // 2))}}}"
            flags = ",n" if k == 16 else ""  # operands of 16 bits alone may lie along their rows or columns
            for adds in ("p", "n"):
                yield effect(opcode, f"{sums},{{*r,*r,*r,*r}},l,{adds},n,n{flags}", f"multiply_registers<{operand}>")
                yield effect(opcode, f"{sums},l,l,{adds},n,n{flags}{flags}", f"multiply_shared<{operand}>")
    halves = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
    yield effect(halves, "{=r,=r},{r,r,r,r},{r,r},{r,r}", "multiply_to_halves")
    for word in ("fence", "commit_group"):
        yield memory(f"wgmma.{word}.sync.aligned", "", f"wgmma_{word}")
    yield memory("wgmma.wait_group.sync.aligned", "n", "wgmma_wait")

    yield memory("mbarrier.init.shared.b64", "[r],r", "mbarrier_init")
    yield memory("mbarrier.arrive.shared.b64", "_,[r]", "mbarrier_arrive")
    yield memory("mbarrier.arrive.shared.b64", "=l,[r]", "mbarrier_arrive_for")
    yield memory("mbarrier.arrive.expect_tx.shared.b64", "_,[r],r", "mbarrier_arrive")
    yield memory("mbarrier.arrive.shared::cluster.b64", "_,[r]", "mbarrier_arrive_cluster")
    yield memory("mbarrier.try_wait.parity.shared.b64", "=p,[r],r,r", "mbarrier_try_wait")
    yield memory("mbarrier.try_wait.shared.b64", "=p,[r],l", "mbarrier_try_wait_for")
    yield memory("bar.sync", "r,r", "barrier_sync")
    yield memory("bar.arrive", "r,r", "barrier_arrive")
    yield memory("barrier.cluster.arrive.relaxed.aligned", "", "cluster_arrive<false>")
    yield memory("barrier.cluster.arrive.aligned", "", "cluster_arrive<true>")
    yield memory("barrier.cluster.wait.acquire.aligned", "", "cluster_wait")
    yield memory("barrier.cluster.wait.aligned", "", "cluster_wait")
    yield effect("mapa.shared::cluster.u32", "=r,r,r", "cluster_address")
    yield memory("fence.mbarrier_init.release.cluster", "", "fence_mbarrier_init")
    yield memory("fence.proxy.async.shared", "", "fence_proxy_async")
    yield memory("griddepcontrol.wait", "", "wait_for_previous_grid")
    yield memory("griddepcontrol.launch_dependents", "", "allow_next_grid")

    to_shared = "shared::cluster.global{tile}.mbarrier::complete_tx::bytes"
    for word, blocks in (("", ""), (".multicast::cluster", ",h")):
        yield memory(f"cp.async.bulk.{to_shared.format(tile='')}{word}", f"[r],[l],r,[r]{blocks}", "copy_bulk")
        for dimensions, tile in itertools.product(range(1, 6), ("", ".tile")):
            box, corner = f"cp.async.bulk.tensor.{dimensions}d", f"{{{','.join('r' * dimensions)}}}"
            for hint, policy in (("", ""), (".L2::cache_hint", ",l")):  # a hint changes no result
                opcode = f"{box}.{to_shared.format(tile=tile)}{word}{hint}"
                yield memory(opcode, f"[r],[l,{corner}],[r]{blocks}{policy}", "load_box")
            if not word:
                yield memory(f"{box}.global.shared{tile}.bulk_group", f"[l,{corner}],[r]", "store_box")
    yield memory("cp.async.bulk.commit_group", "", "bulk_commit")
    yield memory("cp.async.bulk.wait_group", "n", "bulk_wait<false>")
    yield memory("cp.async.bulk.wait_group.read", "n", "bulk_wait<true>")
    yield memory("prefetch.tensormap", "[l]", "prefetch_map")

    yield pure("mov.b64", "=l,{f,f}", "pair")
    yield pure("mov.b64", "{=f,=f},l", "split")


def _by_opcode(pairs: Iterator[tuple[str, Instruction]]) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    for opcode, instruction in pairs:
        found.setdefault(opcode, []).append(instruction)
    return found


INSTRUCTIONS: Mapping[str, Sequence[Instruction]] = _by_opcode(_instructions())


@dataclass
class _Register:
    """An operand of an instruction: its constraint, and the C++ expression for it."""

    kind: str
    expression: str
    is_readable: bool = True
    is_writable: bool = False


@dataclass
class Statement:
    """An `asm` statement: what it says, and the registers that its operands and its declarations stand for."""

    ptx: str
    is_volatile: bool
    clobbers: set[str]
    bindings: list[str] = field(default_factory=list)  # C++ declarations of the operands
    registers: dict[str, _Register] = field(default_factory=dict)

    @property
    def opcodes(self) -> set[str]:
        return {found["opcode"] for found in _STEP.finditer(self.ptx) if found["opcode"]}


class _RefusedError(Exception):
    """Why a statement cannot be carried out."""


_ASM = re.compile(r"\b(?:asm|__asm__)\s*(volatile\b|__volatile__\b)?\s*\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},:]')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'"([=+]?)(\w)"\s*\((.*)\)\Z', re.DOTALL)
# One step of PTX: a scope's begin or end, a declaration, a label, or an instruction with its predicate.
_STEP = re.compile(
    r"\s*(?:(?P<brace>[{}])"
    r"|\.reg\s+\.(?P<type>\w+)\s+(?P<names>\w+(?:\s*,\s*\w+)*)\s*;"
    r"|(?P<label>\w+):(?!:)"
    r"|(?:@(?P<negated>!?)(?P<guard>\w+)\s+)?(?P<opcode>[a-z]\w*(?:(?:\.|::)\w+)*)(?P<operands>[^;]*);)"
)
_ATOM = re.compile(r"[=*]?-?[%\w]+")
_MANY = re.compile(r"=f,(=f,?){7,}")
_MARKER = re.compile(r'^# (\d+) "([^"]*)".*\n', re.MULTILINE)


def translate(text: str, file: str = "", only: Callable[[set[str]], bool] = lambda _: True) -> str:
    """A preprocessed text without its `asm` statements, or without those for whose opcodes `only` is true. Lines stay
    where they are. `file` is its name in the preprocessor's marks, for the line of what is refused."""
    pieces, position = [], 0
    while found := _ASM.search(text, position):
        sections, end = _sections(text, found.end())
        try:
            statement = _read(sections, is_volatile=found[1] is not None)
            if only(statement.opcodes):
                newlines = "\n" * text.count("\n", found.start(), end)
                pieces += [text[position : found.start()], _call(statement), newlines]
            else:
                pieces.append(text[position:end])
        except _RefusedError as refused:
            raise SimtError("ptx", str(refused), _line_of(text, found.start(), file)) from None
        position = end
    return "".join([*pieces, text[position:]])


def _line_of(text: str, position: int, file: str) -> int | None:
    """The line of the text before it was preprocessed."""
    marks = [mark for mark in _MARKER.finditer(text, 0, position) if mark[2] == file]
    return int(marks[-1][1]) + text.count("\n", marks[-1].end(), position) if marks else None


def _sections(text: str, begin: int) -> tuple[list[list[str]], int]:
    """What an asm statement has between its colons, each split at its commas, and where it ends."""
    sections: list[list[str]] = [[]]
    depth, last = 1, begin
    for token in _TOKEN.finditer(text, begin):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token[0], 0)
        if depth == 0 or (depth == 1 and token[0] in ",:"):
            if item := text[last : token.start()].strip():
                sections[-1].append(item)
            last = token.end()
        if depth == 1 and token[0] == ":":
            sections.append([])
        if depth == 0:
            return sections, token.end()
    raise SimtError("ptx", "an asm statement without its closing parenthesis")


def _read(sections: list[list[str]], is_volatile: bool) -> Statement:
    template, outputs, inputs, clobbers = (*sections, [], [], [])[:4]
    ptx = "".join(_STRING.findall("".join(template))).replace("\\n", "\n").replace("\\t", " ")
    statement = Statement(ptx.strip(), is_volatile or not outputs, {name.strip('"') for name in clobbers})
    if statement.ptx and statement.ptx[-1] not in ";}":
        statement.ptx += ";"
    for number, operand in enumerate([*outputs, *inputs]):
        _bind(statement, number, operand, is_output=number < len(outputs))
    return statement


def _bind(statement: Statement, number: int, operand: str, is_output: bool) -> None:
    """Declares what the operand's number stands for."""
    found = _OPERAND.match(operand)
    if (
        found is None
        or (found[1] != "") != is_output
        or found[2] not in (*_TYPES, _CONSTANT)
        or (is_output and found[2] == _CONSTANT)
    ):
        raise _RefusedError(
            f"the operand {operand}; constraints are {', '.join(_TYPES)}, of results with = or +, and {_CONSTANT}"
        )
    _, kind, expression = found.groups()
    name = f"ptx_{number}"
    if is_output:
        statement.bindings.append(f"auto& {name} = ::ptx::result<{_TYPES[kind]}>({expression});")
    elif kind == _CONSTANT:
        statement.bindings.append(f"constexpr unsigned {name} = {expression};")
    else:
        statement.bindings.append(f"auto&& {name} = {expression};")
    statement.registers[f"%{number}"] = _Register(kind, name, is_readable=found[1] != "=", is_writable=is_output)


def _call(statement: Statement) -> str:
    """The C++ expression. A statement without PTX only keeps the compiler from moving accesses across it."""
    if not statement.ptx:
        return "((void)0)"
    labels = {found["label"] for found in _STEP.finditer(statement.ptx) if found["label"]}
    code = [f"__label__ {', '.join(f'{label}_' for label in sorted(labels))};"] if labels else []
    code += statement.bindings
    position = 0
    while found := _STEP.match(statement.ptx, position):
        code.append(_step(statement, found))
        position = found.end()
    if position < len(statement.ptx):
        raise _RefusedError(f"cannot read the PTX {statement.ptx[position:].strip()}")
    return f"({{ {' '.join(code)} (void)0; }})"


def _step(statement: Statement, found: re.Match[str]) -> str:
    if found["brace"]:
        return ""  # names are a statement's own already
    if found["names"]:
        if found["type"] not in _DECLARED:
            raise _RefusedError(f"the type of .reg .{found['type']} {found['names']}; known are {', '.join(_DECLARED)}")
        kind, type_name = _DECLARED[found["type"]]
        names = re.split(r"\s*,\s*", found["names"])
        statement.registers |= {
            name: _Register(kind, f"{name}_", is_readable=False, is_writable=True) for name in names
        }
        return " ".join(f"{type_name} {name}_;" for name in names)
    if found["label"]:
        return f"{found['label']}_:;"
    action = _branch(found) if found["opcode"] == "bra" else _instruction(statement, found["opcode"], found["operands"])
    if found["guard"] is None:
        return f"{action};"
    return f"if ({found['negated']}{_operand(statement, _PREDICATE, found['guard'], found['opcode'])}) {action};"


def _branch(found: re.Match[str]) -> str:
    label = found["operands"].strip()
    if not re.search(rf"\b{re.escape(label)}:(?!:)", found.string):
        raise _RefusedError(f"bra {label}: the statement has no such label")
    return f"goto {label}_"


def _instruction(statement: Statement, opcode: str, operands: str) -> str:
    forms = INSTRUCTIONS.get(opcode.replace(".shared::cta", ".shared"))
    if forms is None:
        raise _RefusedError(f"{opcode}: no instruction that is known here")
    given = re.sub(r"\s+|%(?=%)", "", operands)
    form = next((each for each in forms if _fits(statement, each, given)), None)
    if form is None:
        shown = " or ".join(
            _MANY.sub(lambda many: f"{many[0].count('f')} times =f", each.operands) or "none" for each in forms
        )
        meant = _ATOM.sub(lambda atom: _kind(statement, atom[0]), given)
        raise _RefusedError(f"{opcode} {operands.strip()}: the operands are {meant or 'none'}; it takes {shown}")
    if form.touches_memory and "memory" not in statement.clobbers:
        raise _RefusedError(f'{opcode}: the statement does not list "memory", so that accesses may be moved across it')
    if form.is_volatile and not statement.is_volatile:
        raise _RefusedError(f"{opcode}: the statement is not volatile, so that it may be moved or left out")
    return f"::ptx::{form.function}({_arguments(statement, form, given, opcode)})"


def _kind(statement: Statement, atom: str) -> str:
    """The constraint of an operand in an instruction."""
    if re.fullmatch(r"0x[\da-fA-F]+U?|-?\d+U?", atom):
        return _CONSTANT
    return statement.registers[atom].kind if atom in statement.registers else atom


def _fits(statement: Statement, form: Instruction, given: str) -> bool:
    """Whether the operands are those of the form, but for whether they are read and written."""
    if _ATOM.sub("", given) != _ATOM.sub("", form.operands):
        return False
    pairs = zip(_ATOM.findall(form.operands), _ATOM.findall(given), strict=True)
    return all(_takes(wanted, _kind(statement, atom) if _is_value(wanted) else atom) for wanted, atom in pairs)


def _is_value(wanted: str) -> bool:
    """Not one that the form spells out: a size, a special register, the sink."""
    return wanted.lstrip("=*") in (*_TYPES, _CONSTANT, _PREDICATE)


def _takes(wanted: str, given: str) -> bool:
    """Registers of the constraint r have no type but a size: they may stand for a float."""
    return (
        given == wanted.lstrip("=*") or (wanted, given) == ("r", _CONSTANT) or (wanted.lstrip("="), given) == ("f", "r")
    )


def _operand(statement: Statement, wanted: str, atom: str, opcode: str) -> str:
    """The C++ expression of an operand that fits."""
    register = statement.registers.get(atom)
    if register is None:
        if _kind(statement, atom) == _CONSTANT:
            return atom
        raise _RefusedError(f"{opcode}: {atom} is no register of the statement")
    is_float_in_r = (wanted.lstrip("="), register.kind) == ("f", "r")
    if wanted.startswith("="):
        if not register.is_writable:
            raise _RefusedError(f"{opcode}: writes {atom}, an input")
        register.is_readable = True
        return f"reinterpret_cast<float&>({register.expression})" if is_float_in_r else register.expression
    if not register.is_readable:
        raise _RefusedError(f"{opcode}: reads {atom}, which nothing has written")
    is_input = atom.startswith("%") and not register.is_writable and register.kind != _CONSTANT
    value = f"::ptx::{register.kind}({register.expression})" if is_input and wanted[0] != "*" else register.expression
    return f"__uint_as_float({value})" if is_float_in_r else value


def _arguments(statement: Statement, form: Instruction, given: str, opcode: str) -> str:
    """The arguments of the C++ call: the operands in their order. Results count as written once all inputs are read."""
    wanted, atoms = _ATOM.findall(form.operands), _ATOM.findall(given)
    expressions = [""] * len(atoms)
    for place in sorted(range(len(atoms)), key=lambda place: wanted[place].startswith("=")):
        if _is_value(wanted[place]):
            expressions[place] = _operand(statement, wanted[place], atoms[place], opcode)
    in_order = iter(zip(wanted, expressions, strict=True))
    arguments = []
    for vector, scalar in re.findall(r"\{([^}]*)\}|([=*]?[%\w]+)", form.operands):
        items = [next(in_order) for _ in (vector or scalar).split(",")]
        if vector:
            arguments.append(f"{{{', '.join('&' * (want[0] in '=*') + expression for want, expression in items)}}}")
        else:
            arguments.append(items[0][1])
    return ", ".join(filter(None, arguments))
