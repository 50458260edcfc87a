"""`ksgen show`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen.commands import common
from ksgen.commands.layers import Layer, Wanted, takes_layers, takes_wanted
from ksgen.errors import PatternError, SpecError
from ksgen.families import Limits, cuda_limits, family_for, family_named, faster_family
from ksgen.families.gpus import TYPICAL
from ksgen.files import check_is_no_input, write
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec, load
from ksgen.spec.kernel import pattern_as_list
from ksgen.spec.storage import SAME

if TYPE_CHECKING:
    from ksgen.launch.choice import Choice


# limits of an unnamed processor
_CORES = Limits(2**18, registers=0, is_cpu=True, async_copies=False, vector_bytes=32, multiprocessors=16)
_CORES_NAME = f"a processor of {_CORES.multiprocessors} cores"
_USUAL = "sm_80"  # target whose kernel is shown without a device


@click.command("show")
@common.takes_patterns
@takes_layers
@click.option("--spec", type=common.PATH, help="Describe all patterns and layers of this spec.")
@common.number_option("--batch", help_text="Batch size, to choose kernels and count bytes and operations.", usual=25088)
@takes_wanted(has_job=False)
@click.option(
    "--device",
    type=common.WORD,
    help="Show the kernel that launchers choose on this device, from its wisdom if there is any. Values are those of "
    "KSGEN_DEVICE, such as cuda.",
)
@common.file_option("--png", help_text="Draw the pattern (only one) to this file", metavar="PATH")
@common.json_option
def command(
    patterns: tuple[Pattern, ...], layer: Layer, spec: Path | None, batch: int, wanted: Wanted, device: str | None,
    png: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Describe a pattern: its size, the kernel that launchers use on each device, its costs, and a picture.

    Several patterns are a chain, in the order in which they multiply X. With --group-with, this chain and others on the
    same X form a group. For chains, groups and layers of a spec, the output says whether each is one launch, and
    describes its patterns briefly.

    \b
    Examples:
      ksgen show 2,3,4,5 --png pattern.png
      ksgen show 2,48,192,1 1,192,48,2 --precision float16
      ksgen show 6,64,64,1 --group-with 6,64,64,1 --group-with 6,64,64,1
      ksgen show --spec specs/vit.yaml
      ksgen show 1,192,48,2 --device cuda
    """
    if bool(patterns) == bool(spec):
        raise PatternError("give patterns such as 1,192,48,2, or --spec FILE: one of the two")
    if spec:
        if layer.is_asked_for:
            raise SpecError(
                f"{', '.join(layer.options)} with --spec; accepted: the spec's own layers, or patterns without --spec"
            )
        kernels, layers = _of_spec(spec, wanted)
    else:
        kernels, layers = _of_patterns(patterns, layer, wanted)
    patterns = tuple(each.pattern for each in kernels)
    is_alone = len(kernels) == 1 and not layers and not spec
    described = [_describe(each, batch, device) | (_faster(each, batch) if is_alone else {}) for each in kernels]
    of_layers = {name: _describe_layer(each, batch, device) for name, each in layers.items()}
    if png:
        check_is_no_input(png, spec)
        _draw(patterns, png)
    if as_json:
        common.print_json({"patterns": described, "layers": of_layers})
        return
    for name, each in layers.items():
        _print_layer(name, each, of_layers[name])
    for pattern, facts in zip(patterns, described, strict=True):
        _print(pattern, facts, is_alone)
    if not device:
        common.console().print(
            f"Kernels are those for {_USUAL}. For a device of this machine, give --device, such as native or cuda."
        )


def _of_spec(spec: Path, wanted: Wanted) -> "tuple[list[KernelSpec], dict[str, _Layer]]":
    """Return the first matching kernel per pattern, and the layers with a matching kernel, with the spec's options.

    The kernels are without their epilogues, batches and strides.
    """
    loaded = load(common.find_spec(spec))
    products = [kernel for kernel in loaded.kernels if kernel.job == "multiply"]
    first = {kernel.pattern: kernel for kernel in reversed(products) if wanted.matches(kernel)}
    chosen = [first[pattern] for pattern in dict.fromkeys(each.pattern for each in products) if pattern in first]
    kernels = [replace(each, epilogue=Epilogue(), batch=None, stride="dense") for each in chosen]
    if not kernels:
        line = " and ".join(f"{name} {value}" for name, value in vars(wanted).items() if value)
        raise SpecError(f"{spec}: no kernel in it has {line}; `ksgen show --spec {spec}` lists them")
    layers = {}
    for name, chains in loaded.chains_of.items():
        if match := next(filter(wanted.matches, loaded.wanted[name]), None):
            options = loaded.options_of(name)
            layer = Layer(chains[0].factors, chains[1:], options.between, options.out_layout)
            whole = layer.launch(match.precision, match.layout, match.epilogue, match.weights, match.inputs)
            layers[name] = _Layer(chains, whole, options.fuse)
    return kernels, layers


def _of_patterns(
    patterns: tuple[Pattern, ...], layer: Layer, wanted: Wanted
) -> "tuple[list[KernelSpec], dict[str, _Layer]]":
    (precision, layout), (weights, inputs) = wanted.precision_and_layout, wanted.stored
    layers = {}
    if len(patterns) > 1 or layer.is_asked_for:
        whole = layer.launch(precision, layout, Epilogue(), weights, inputs)  # raises an error if this is not a layer
        layers = {"group" if layer.others else "chain": _Layer(layer.chains, whole)}
    first_factors = [chain[0] for chain in layer.chains]  # they multiply X; intermediates have Y's storage
    named = dict.fromkeys((*patterns, *(pattern for chain in layer.others for pattern in chain)))
    storages = {pattern: inputs if pattern in first_factors else SAME for pattern in named}
    kernels = [KernelSpec(each, precision, layout, weights=weights, inputs=stored) for each, stored in storages.items()]
    return kernels, layers


def _describe(kernel: KernelSpec, batch: int, device: str | None) -> dict[str, Any]:
    choice, is_processor = _choice(kernel, batch, device)
    pattern, family, constants = kernel.pattern, family_named(choice.family), choice.constants
    geometry, work = family.geometry(kernel, constants, batch), family.work(kernel, constants, batch)
    return {
        **(_on_processors(kernel) if is_processor else {}),
        **common.kernel_figures(kernel, batch),
        "rows": pattern.out_features,
        "columns": pattern.in_features,
        "weights": pattern.weight_count,
        "density": pattern.density,
        "blocks": pattern.a * pattern.d,
        "rewrite_ratio": pattern.rewrite_ratio,
        "predicts": str(pattern.predicts()),
        "gflop": kernel.flops(batch) / 1e9,
        "dense_gflop": kernel.flops(batch) / pattern.density / 1e9,
        "mbyte": kernel.bytes(batch) / 1e6,
        "flop_per_byte": kernel.flops(batch) / kernel.bytes(batch),
        **common.choice_figures(family.name, constants),
        "why": family.why,
        "by_device": {name: family_for(kernel, limits, batch).name for name, limits in _device_limits().items()},
        "chosen_by": choice.why,
        "is_processor": is_processor,
        "blocks_of_threads": geometry.grid,
        "threads": geometry.block,
        "shared_bytes": geometry.shared_bytes,
        "registers": family.registers(kernel, constants),
        "cache_mbyte": work.cache_bytes / 1e6,
        "shared_mbyte": work.shared_bytes / 1e6,
        "multiply_adds_ratio": 2 * kernel.arithmetic.multiply_adds * work.multiply_adds / kernel.flops(batch),
    }


def _on_processors(kernel: KernelSpec) -> dict[str, Any]:
    """Gain over other contenders that benchmarks on processors suggest, if they support a better rule than the paper's.

    The benchmarks measured plain products, so other kernels give no facts.
    """
    from ksgen.measure.gains import gain_on_processors

    if kernel.words or kernel.stored or kernel.is_exchanged:
        return {}
    found = gain_on_processors(kernel.pattern, kernel.precision, kernel.layout)
    return {"on_processors": asdict(found)} if found else {}


def _choice(kernel: KernelSpec, batch: int, device: str | None) -> "tuple[Choice, bool]":
    """Return the choice by a device's wisdom, and whether the device is a processor; without a device, the default for
    a usual GPU.
    """
    from ksgen.launch.choice import choose, described, expectation, limits_of
    from ksgen.launch.planner import PLANNER
    from ksgen.wisdom import Wisdom

    if device is None:
        limits = cuda_limits(_USUAL)
        choice = choose(kernel, batch, limits, Wisdom())
        return replace(
            choice, why=f"the family's default for {_USUAL}{expectation(choice, kernel, batch, limits)}"
        ), False
    from ksgen.devices import find_device

    where = find_device(device)
    choice = PLANNER.choice(where, kernel, batch)
    return replace(choice, why=described(choice, kernel, batch, limits_of(where), device)), where.limits.is_cpu


def _faster(kernel: KernelSpec, batch: int) -> dict[str, Any]:
    """Per kind of device, the family that the cost model expects to be faster than the default, and the speed-up."""
    found = {
        name: faster_family(family_for(kernel, limits, batch).name, kernel, limits, batch)
        for name, limits in _device_limits().items()
    }
    return {
        "expected_faster": {name: {"family": each[0].name, "factor": each[1]} for name, each in found.items() if each}
    }


def _device_limits() -> dict[str, Any]:
    from ksgen.emit.render import PORTABLE

    return {target: cuda_limits(target) for target in TYPICAL} | {"opencl": PORTABLE["opencl"], "processor": _CORES}


def _describe_chain(chain: Chain) -> dict[str, Any]:
    return {
        "patterns": list(map(pattern_as_list, chain)),
        "in_features": chain.in_features,
        "out_features": chain.out_features,
        "weights": chain.weight_count,
        "share": chain.weight_count / (chain.in_features * chain.out_features),
        "chainable": chain.is_chainable,
    }


@dataclass(frozen=True)
class _Layer:
    chains: tuple[Chain, ...]
    whole: KernelSpec | None  # kernel of the whole layer in one launch; None for a single product
    fuse: str = "auto"


def _describe_layer(layer: _Layer, batch: int, device: str | None) -> dict[str, Any]:
    """Sizes of a layer, or of each chain of a group, and how it is launched."""
    each = [_describe_chain(chain) for chain in layer.chains]
    sizes = each[0] if len(each) == 1 else {"chains": each}
    return (
        sizes if layer.whole is None else sizes | {"launch": _describe_launch(layer.whole, layer.fuse, batch, device)}
    )


def _describe_launch(kernel: KernelSpec, fuse: str, batch: int, device: str | None) -> dict[str, Any]:
    """Describe per kind of device the family that computes the layer in one launch, if that is expected to be faster.

    For a named device, also describe whether the layer is one launch by its wisdom, and why.
    """
    from ksgen.launch.fused import shared_out, verdict, verdict_for

    def is_one(limits: Limits) -> bool:
        if limits.is_cpu and fuse == "auto" and shared_out(kernel, limits.multiprocessors, batch):
            return False
        return verdict_for(kernel, limits, "processor" if limits.is_cpu else "cuda", batch, fuse).is_one

    by_device = {
        name: family_for(kernel, limits, batch).name if is_one(limits) else None
        for name, limits in _device_limits().items()
        if name != "opencl"  # under OpenCL only processors have chains
    }
    facts = {**common.kernel_figures(kernel, batch), "fuse": fuse, "by_device": by_device}
    if device is None:
        return facts
    from ksgen.devices import find_device

    found = verdict(find_device(device), kernel, batch, fuse)
    choice = _choice(kernel, batch, device)[0] if found.is_one else None
    chosen = common.choice_figures(choice.family, choice.constants) | {"chosen_by": choice.why} if choice else {}
    return facts | {"one_launch": found.is_one, "why": found.why, **chosen}


def _print_layer(name: str, layer: _Layer, facts: dict[str, Any]) -> None:
    for number, (chain, sizes) in enumerate(zip(layer.chains, facts.get("chains", [facts]), strict=True)):
        of_group = f"[{number}]" if len(layer.chains) > 1 else ""
        line = "{chain}, {in_features} -> {out_features}, {share:.1%} of dense".format(chain=chain, **sizes)
        click.echo(f"{name}{of_group}: {line}")
    if not (launch := facts.get("launch")):
        return
    others = "layer by layer" if len(layer.chains) > 1 else "one launch per factor"
    if "why" in launch:
        chosen = ", ".join(f"{word}={value}" for word, value in launch.get("constants", {}).items())
        line = f"one launch, {launch['family']}: {chosen}; {launch['chosen_by']}" if launch["one_launch"] else others
        click.echo(f"  {launch['kernel']}: {line}; {launch['why']}")
        return
    words = {family: f"one launch, {family}" if family else others for family in launch["by_device"].values()}
    click.echo(f"  {launch['kernel']}, batch {launch['batch']}: {_by_family(launch['by_device'], words)}")


def _by_family(by_device: Mapping[str, str | None], words: Mapping[str | None, str]) -> str:
    """Devices grouped by the family that launchers use there."""
    devices: dict[str | None, list[str]] = {}
    for device, family in by_device.items():
        devices.setdefault(family, []).append(_CORES_NAME if device == "processor" else device)
    return "; ".join(f"{words[family]} on {', '.join(names)}" for family, names in devices.items())


def _print(pattern: Pattern, facts: dict[str, Any], is_alone: bool) -> None:
    """Print a few facts about a pattern, or all facts and a picture if it is the only one."""
    from rich.text import Text

    chosen = ", ".join(f"{name}={value}" for name, value in facts["constants"].items())
    facts = facts | {
        "pattern": pattern,
        "constants": chosen,
        "devices": _by_family(facts["by_device"], {family: family for family in facts["by_device"].values()}),
    }
    rows = {
        "pattern": "{pattern}: {rows} x {columns}, {weights} weights, {density:.2%} of dense, in {blocks} "
        "permuted blocks",
        "batch {batch}": "{gflop:.3g} GFLOP (dense {dense_gflop:.3g}), {mbyte:.3g} MB, "
        "{flop_per_byte:.1f} FLOP per byte",
        "by default": "{devices}",
        "kernel": "{kernel}, {family}: {constants}; {chosen_by}",
    }
    if is_alone:
        for name, each in facts["expected_faster"].items():
            rows[f"on {name}"] = f"{each['family']} expected {each['factor']:.2f} times as fast"
        rows |= {"{family}": "{why}", "(b+c)/(bc)": "{rewrite_ratio:.4f}: {predicts}"}
        if "on_processors" in facts:
            rows["{on_processors[rule]}"] = (
                "{on_processors[value]:.2g}: the fastest other contender took {on_processors[gain]:.1f} times as long "
                "at batch {on_processors[batch]}, on average over such patterns on processors"
            )
        rows["products"] = (
            "{multiply_adds_ratio:.2f} times the least multiply-adds, because of padding and split operands"
        )
        on_processor = {
            "traffic": "{cache_mbyte:.3g} MB that cores read and write",
            "resources": "{blocks_of_threads} parts, which the cores share, and about {registers} vector registers",
        }
        on_gpu = {
            "traffic": "{cache_mbyte:.3g} MB between cache and blocks, {shared_mbyte:.3g} MB through shared memory",
            "resources": "{threads} threads and {shared_bytes} bytes of shared memory per block, about {registers} "
            "registers per thread",
        }
        rows |= on_processor if facts["is_processor"] else on_gpu
    common.print_facts(rows, facts)
    if is_alone:
        from ksgen.figures.picture import can_show
        from ksgen.figures.picture import text as draw

        screen = common.console()
        screen.print()
        screen.print(Text(draw(pattern, screen.width, plain=not can_show(screen.encoding)), style="cyan"))


def _draw(chosen: tuple[Pattern, ...], path: Path) -> None:
    from ksgen.figures.picture import png

    if len(chosen) != 1:
        raise PatternError(f"--png draws one pattern; got {len(chosen)}")
    write(path, png(chosen[0]))
