"""What users may mistake is refused at every public call: by an error of ksgen's own, in one line that shows what
was given.
"""

import copy
import pickle
import re
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.build.request import Binary
from ksgen.build.toolchain import find_compiler
from ksgen.devices import Found, find_device, list_devices
from ksgen.emit.render import render
from ksgen.errors import KsgenError, LaunchError, PatternError, SpecError
from ksgen.families import family_named
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.pattern import NAMED_CHAINS, Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec, load
from ksgen.tuning.tuner import SearchOptions, Tuner
from ksgen.wisdom import Wisdom
from tests.support.libraries import library

needs_opencl = pytest.mark.skipif(
    not any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices()), reason="no OpenCL device"
)
SHAPE = (2, 9, 5, 3)
PATTERN = Pattern(*SHAPE)
X, WEIGHTS, Y = np.ones((4, 30), np.float32), np.ones(SHAPE, np.float32), np.ones((4, 54), np.float32)
INNARDS = re.compile(
    r"object (is|has|of|cannot)|has no (attribute|len)|argument must|positional|not (iterable|subscriptable)|unhashable"
)


class Raises:
    """Every look at it is an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError


def shares(**protocol: Any) -> Any:
    """An object with these attributes, callable where the protocol wants it."""
    return SimpleNamespace(**{f"__{name}__": value for name, value in protocol.items()})


def interface(**changes: Any) -> Any:
    return shares(
        cuda_array_interface={"shape": (4, 30), "data": (64, False), "typestr": "<f4", "version": 3} | changes
    )


class Half:
    """It says where it lies and shares nothing."""

    def __init__(self, capsule: Any, place: Any = (1, 0)) -> None:
        self.capsule, self.place = capsule, place

    def __dlpack_device__(self) -> Any:
        return self.place

    def __dlpack__(self, **options: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


STRANGE: dict[str, Any] = {
    "None": None, "0": 0, "-1": -1, "2.5": 2.5, "True": True, "nan": float("nan"), "huge": 10**5000, "''": "",
    "word": "bsx",
    "long": "x" * 5000, "lines": "a\nb\x1b", "bytes": b"bsf", "[]": [],
    "list": [[1.0] * 30] * 4, "list of huge": [10**5000], "dict": {"a": 1},
    "set": {1}, "class": int, "lambda": lambda: None, "slice": slice(1),
    "range": range(4), "numpy float": np.float32(1), "0-d": np.array("x"),
    "int array": np.ones((4, 30), int), "objects": np.ones((4, 30), object), "strides": np.ones((4, 60), np.float32)[:,
        ::2],
    "masked": np.ma.ones((4, 30)), "raises": Raises(), "false dlpack": shares(dlpack=True, dlpack_device=True),
    "no capsule": Half(7), "no place": Half(7, 5), "dlpack raises": Half(KeyError("q")),
    "no interface": shares(cuda_array_interface=7),
    "empty interface": shares(cuda_array_interface={}), "false shape": interface(shape=("x",)),
    "false type": interface(typestr=7),
    "false pointer": interface(data=("p", False)), "false strides": interface(strides=7),
    "stream": shares(cuda_stream="xyz"),
}  # fmt: skip

ks, chain = Launcher(*SHAPE), ChainLauncher(Launcher(*SHAPE))
OPTIONS = {
    "layout": "bsf",
    "activation": "none",
    "precision": None,
    "bias": None,
    "residual": None,
    "out": None,
    "stream": None,
}
CALLS: dict[str, Callable[[Any], object]] = {
    **{f"Pattern {name}": lambda value, name=name: Pattern(**dict(zip("abcd", SHAPE,
        strict=True)) | {name: value}) for name in "abcd"},
    **{f"Launcher {name}": lambda value, name=name: Launcher(**dict(zip("abcd", SHAPE,
        strict=True)) | {name: value}) for name in "abcd"},
    "Launcher batches": lambda value: Launcher(*SHAPE, batches=value),
    "Launcher a batch": lambda value: Launcher(*SHAPE, batches=[value]),
    "Pattern.parse": Pattern.parse,
    "Chain": Chain,
    "ChainLauncher": ChainLauncher,
    "ChainLauncher then": lambda value: ChainLauncher(ks, value),
    **{f"KernelSpec {name}": lambda value, name=name: KernelSpec(**{"chains": PATTERN, name: value})
       for name in ("chains", "precision", "layout", "epilogue", "batch", "job")},
    **{f"Epilogue {name}": lambda value, name=name: Epilogue(**{name: value}) for name in ("bias", "activation",
        "residual")},
    **{f"{name} first": lambda value, family=family, count=family.__code__.co_argcount: family(value,
        *[4] * (count - 1))
       for name, family in NAMED_CHAINS.items()},
    "deformable blocks": lambda value: NAMED_CHAINS["deformable_butterfly"](8, value),
    "deformable block": lambda value: NAMED_CHAINS["deformable_butterfly"](8, [value]),
    "use_bundle": ksgen.use_bundle,
    "load": load,
    "render": lambda value: render(KernelSpec(PATTERN), dialect=value),
    "family": lambda value: family_named(value),
    "strategy": lambda value: Tuner(None, None, SearchOptions(strategy=value)),  # type: ignore[arg-type]
    "compiler": find_compiler,
    "reference layout": lambda value: reference.multiply(PATTERN, X, WEIGHTS, value),
    "reference activation": lambda value: reference.multiply(PATTERN, X, WEIGHTS, "bsf", activation=value),
    "x": lambda value: ks(value, WEIGHTS),
    "weights": lambda value: ks(X, value),
    "prepare x": lambda value: ks.prepare(value, WEIGHTS),
    "prepare weights": lambda value: ks.prepare(X, value),
    "chain x": lambda value: chain(value, [WEIGHTS]),
    "chain weights": lambda value: chain(X, value),
    "chain a weight": lambda value: chain(X, [value]),
    "gradient x": lambda value: ks.gradient(value, Y),
    "gradient y": lambda value: ks.gradient(X, value),
    "pack": ks.pack,
    "pack device": lambda value: ks.pack(WEIGHTS, device=value),
    "pack stream": lambda value: ks.pack(WEIGHTS, stream=value),
    "explain batch": ks.explain,
    **{f"explain {name}": lambda value, name=name: ks.explain(9, **{name: value})
       for name in ("precision", "layout", "epilogue", "device", "job")},
    **{f"{name}": lambda value, name=name: ks(X, WEIGHTS, **{name: value}) for name in OPTIONS},
    **{f"chain {name}": lambda value, name=name: chain(X, [WEIGHTS], **{name: value}) for name in OPTIONS},
    **{f"gradient {name}": lambda value, name=name: ks.gradient(X, Y, **{name: value})
       for name in ("layout", "out", "stream", "precision")},
}  # fmt: skip


def torch_calls() -> Iterator[tuple[str, Callable[[Any], object]]]:
    torch = library("torch")
    from ksgen.bench import models
    from ksgen.torch import KSLinear, convert, factorize, multiply

    x, weights, dense, shapes = torch.ones(4, 30), torch.ones(SHAPE), torch.ones(54, 30), [SHAPE]
    layer = KSLinear(shapes)

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(30, 54))

    yield "KSLinear", KSLinear
    yield "KSLinear a pattern", lambda value: KSLinear([value])
    yield "KSLinear a number", lambda value: KSLinear([(value, 1, 1, 1)])
    for name in ("bias", "layout", "precision", "backend", "activation", "device", "dtype"):
        yield f"KSLinear {name}", lambda value, name=name: KSLinear(shapes, **{name: value})
    yield "from_weights", KSLinear.from_weights
    yield "from_weights one", lambda value: KSLinear.from_weights([value])
    yield "from_weights bias", lambda value: KSLinear.from_weights([weights], value)
    yield "layer x", layer
    yield "layer residual", lambda value: layer(x, value)
    yield "layer explain", layer.explain
    for backend in ("auto", "strided"):
        yield f"multiply {backend} x", lambda value, backend=backend: multiply(value, weights, backend=backend)
        yield f"multiply {backend} weights", lambda value, backend=backend: multiply(x, value, backend=backend)
    for name in ("bias", "residual", "layout", "precision", "activation", "backend"):
        yield f"multiply {name}", lambda value, name=name: multiply(x, weights, **{name: value})
    yield "factorize", lambda value: factorize(value, shapes)
    yield "factorize chain", lambda value: factorize(dense, value)
    for name in ("refine", "progress"):
        yield f"factorize {name}", lambda value, name=name: factorize(dense, shapes, **{name: value})
    yield "convert", lambda value: convert(value, {"0": shapes})
    yield "convert rule", lambda value: convert(model(), value)
    yield "convert chain", lambda value: convert(model(), {"0": value})
    yield "convert name", lambda value: isinstance(value, Hashable) and convert(model(), {value: shapes})
    for name in ("from_weights", "refine", "progress", "backend", "dtype"):
        yield f"convert {name}", lambda value, name=name: convert(model(), {"0": shapes}, **{name: value})
    yield "models.build", models.build
    yield "models.rule", models.rule


def check(call: Callable[[Any], object], named: str, value: Any) -> None:
    """It is taken, or refused as it should be."""
    try:
        call(value)
    except KsgenError as refused:
        words = str(refused)
        assert "\n" not in words, (named, words)
        assert len(words) < 500, (named, words)
        assert not INNARDS.search(words), (named, words)


@needs_opencl
@pytest.mark.parametrize("name", CALLS)
def test_what_is_strange_is_taken_or_refused_in_a_line(name: str) -> None:
    for named, value in STRANGE.items():
        check(CALLS[name], named, value)


@pytest.mark.libraries
def test_what_is_strange_to_the_layer_is_taken_or_refused_in_a_line() -> None:
    torch = library("torch")
    tensors = {
        "sparse": torch.ones(4, 30).to_sparse(), "int8": torch.ones(4, 30, dtype=torch.int8), "meta": torch.ones(4, 30,
            device="meta"),
        "0-d": torch.tensor(1.0), "type": torch.float32, "module": torch.nn.Linear(3, 4),
    }  # fmt: skip
    for _, call in torch_calls():
        for named, value in (STRANGE | tensors).items():
            check(call, named, value)


def test_numbers_of_other_libraries_are_numbers() -> None:
    pattern = Pattern(*np.array(SHAPE))
    assert pattern == PATTERN
    assert {type(count) for count in pattern.shape} == {int}
    assert repr(Launcher(*map(np.int32, SHAPE), batches=np.array([4, 8]))) == "Launcher(2, 9, 5, 3)"
    kernel = KernelSpec(pattern, batch=np.int64(7))  # type: ignore[arg-type]
    assert (type(kernel.batch), kernel.digest) == (int, KernelSpec(PATTERN, batch=7).digest)
    assert NAMED_CHAINS["square_dyadic"](np.int32(8)) == NAMED_CHAINS["square_dyadic"](8)
    with pytest.raises(PatternError, match=r"a=np\.float64\(2\.0\); accepted: a whole number from 1"):
        Launcher(np.float64(2), 9, 5, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ks(X, None), LaunchError, "weights is None; give a NumPy array, "),
        (lambda: ks(X.tolist(), WEIGHTS), LaunchError, r"x is a list; give np\.asarray\(x, np\.float32\), or a NumPy "
                                                       r"array, "),
        (lambda: chain(X, None), LaunchError, r"ChainLauncher\(.*\): weights=None; accepted: a list of arrays"),  # type: ignore[arg-type]
        (lambda: ChainLauncher([ks]), PatternError, r"factors\[0\]=Launcher\(2, 9, 5, 3\); accepted: a Pattern, four "
                                                    r"numbers"),
        (lambda: Launcher(2), PatternError, r"pattern=2; accepted: a Pattern, four numbers \(a, b, c, d\), or text "
                                            r"such as 1,192,48,2"),
        (lambda: Launcher("2,9,5"), PatternError, "'2,9,5' is not a pattern; accepted: whole numbers a,b,c,d such as "
                                                  "1,192,48,2"),
        (lambda: Launcher(2, 9, 5), PatternError, "d=None; accepted: a whole number from 1"),
        (lambda: Launcher(*SHAPE, batches=8), LaunchError, "batches=8; accepted: a list of batches"),  # type: ignore[arg-type]
        (lambda: ks(STRANGE["false dlpack"], WEIGHTS), LaunchError, "x is a types.SimpleNamespace, which has no array"),
        (lambda: ks(X, WEIGHTS, stream=-3), LaunchError, "stream is -3; give a CUDA stream's handle"),
        (lambda: ks(X, WEIGHTS, layout=STRANGE["long"]), LaunchError, r"layout='x{56}\.\.\.; accepted: "
                                                                      r"bsf, bsl"),
        (lambda: ksgen.use_bundle(None), KsgenError, "bundle=None; accepted: the path of a file that ksgen bundle "
                                                     "wrote"),  # type: ignore[arg-type]
        (lambda: ksgen.use_bundle("a\nb"), KsgenError, r"/a\\nb: there is no such bundle"),
        (lambda: ks.explain(9, device=7), KsgenError, "device=7; accepted, also as KSGEN_DEVICE: cuda"),  # type: ignore[arg-type]
        (lambda: ks.explain(9, device="x" * 5000), KsgenError, r"device 'x{56}\.\.\.: none is called that"),
        (lambda: ks.explain(None), SpecError, "batch=None; accepted: a whole number from 1 up$"),  # type: ignore[arg-type]
        (lambda: load(None), SpecError, "spec=None; accepted: the path of a YAML spec"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_give(call: Callable[[], object], kind: type[KsgenError], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


@needs_opencl
def test_what_belongs_to_a_process_is_neither_copied_nor_sent() -> None:
    call = ks.prepare(X, WEIGHTS)
    for thing, remedy in (
        (ks.pack(WEIGHTS), "pack it there"),
        (call, "the launcher and the arrays"),
        (call.plan, "the launcher"),
    ):
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(LaunchError, match=f"belongs to this process, .*: copy or send .*{remedy}"):
                duplicate(thing)


@needs_opencl
def test_a_look_at_a_thing_is_short() -> None:
    call, device = ks.prepare(X, WEIGHTS), find_device()
    what = f"ks_2x9x5x3_float32_bsf at batch 4 by {call.plan.choice.family} on {device.name}"
    assert repr(call) == f"Call(Launcher(2, 9, 5, 3): {what})"
    assert repr(call.plan) == f"Plan({what})"
    assert repr(ks.pack(WEIGHTS)) == f"Weights(2,9,5,3, float32, packed on {device.name})"
    assert repr(device) == f"{type(device).__name__}({device.name})"
    assert repr(Wisdom()) == "Wisdom(0 entries)"
    assert "text" not in repr(call.plan.source)
    assert b"data" not in repr(Binary(b"data", "entry", "target")).encode()
    for thing in (call.plan.source, call.plan.binary, call.plan.choice):
        assert len(repr(thing)) < 600


@pytest.mark.libraries
def test_a_look_at_what_was_found_is_short() -> None:
    torch = library("torch")
    from ksgen.torch import KSLinear, convert, factorize

    model = torch.nn.Sequential(*[torch.nn.Linear(30, 54) for _ in range(20)])
    assert repr(convert(model, {"*": [SHAPE]})).startswith(
        "Report(20 layers replaced, 33,480 parameters before and 6,480 after; "
    )
    assert len(repr(factorize(torch.ones(54, 30), [SHAPE]))) < 400
    assert len(repr(KSLinear([SHAPE]))) < 400
