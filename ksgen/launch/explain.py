"""Describes a launcher: the options that it states, its docstring, and which kernels a call uses and why.

Never launches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ksgen.devices import find_device
from ksgen.devices.base import Device
from ksgen.errors import LaunchError
from ksgen.families import family_named
from ksgen.launch.checks import BETWEEN_DIFFERS, Multiplier, check_layouts
from ksgen.launch.choice import described, limits_of
from ksgen.launch.fused import Verdict, verdict, versus_dense
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Chain
from ksgen.spec import (
    ACTIVATIONS,
    LAYOUTS,
    ByteStorage,
    Epilogue,
    Job,
    KernelSpec,
    Layout,
    PrecisionName,
    WeightStorage,
)
from ksgen.spec.kernel import (
    FUSES,
    LayerOptions,
    StatedOptions,
    check_word,
    checked_count,
    is_layer,
    is_transposed,
    is_word,
)
from ksgen.spec.storage import SAME, Same
from ksgen.values import excerpt


def checked(chain: Chain, stated: StatedOptions) -> StatedOptions:
    """Validate stated options; `SpecError` if one is unknown, or two exclude each other."""
    precision = "float32" if stated.precision is None else stated.precision
    KernelSpec(chain[-1], precision, stated.layout, stated.epilogue, weights=stated.weights, inputs=stated.inputs)
    return stated


class LaunchOptions(NamedTuple):
    """Options of a call that decide its kernel, with the stated option in place of each None."""

    precision: PrecisionName
    layout: Layout
    epilogue: Epilogue
    weights: WeightStorage | Same = SAME
    inputs: ByteStorage | Same = SAME


def bytes_saved(kernel: KernelSpec, batch: int) -> str:
    """Remark on memory traffic with X in eight bits and in its dtype; empty if X is not in eight bits."""
    if not kernel.has_bytes_in:
        return ""
    return (
        f"; moves {kernel.bytes(batch):,} bytes; with x in {kernel.dtype}, it would move "
        f"{replace(kernel, inputs=SAME).bytes(batch):,}"
    )


def docstring(chains: Sequence[Chain], stated: StatedOptions, of_layer: LayerOptions, is_sum: bool = False) -> str:
    """Docstring of a launcher: operands of its calls, and their options."""
    weights = "; ".join(", ".join(str(pattern.shape) for pattern in chain) for chain in chains)
    stored = "" if stated.weights == SAME else f", stored in {stated.weights} as ksgen.quantize gives them"
    operands = [f"x{'' if stated.inputs == SAME else f' in {stated.inputs}'}", f"weights {weights}{stored}"]
    operands += [f"{name} (or {name}=False)" for name in ("bias", "residual") if getattr(stated, name)]
    layer = dict(of_layer.non_defaults)
    words: dict[str, Any] = {
        "layout": stated.layout,
        "activation": stated.activation,
        "precision": stated.precision or "that of the arrays",
    }
    words |= {"residual_first": True} if stated.residual_first else {}
    words |= {name: layer.pop(name) for name in ("out_layout",) if name in layer}
    outputs = chains[:1] if is_sum else chains
    features = f"{chains[0].in_features} to {', '.join(str(each.out_features) for each in outputs)} features"
    lines = [
        f"Multiply x by {(' plus ' if is_sum else '; ').join(map(str, chains))} ({features}).",
        "",
        f"A call takes {', '.join(operands)}.",
        f"Unless it names others, its options are: {_listed(words)}.",
    ]
    return "\n".join(lines + ([f"The layer's own options are: {_listed(layer)}."] if layer else []))


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def layer_options(chain: Chain, between: Any, fuse: Any, out_layout: Any) -> LayerOptions:
    """Validate a layer's options; `LaunchError` on unknown words."""
    if not is_word(between, ACTIVATIONS) or (between != "none" and len(chain) < 2):
        accepted = ", ".join(ACTIVATIONS) if len(chain) > 1 else "none, with one factor"
        raise LaunchError(f"{chain}: between={excerpt(between)}; accepted: {accepted}")
    check_word(f"{chain}: fuse", fuse, FUSES, LaunchError)
    if out_layout is not None:
        check_word(f"{chain}: out_layout", out_layout, LAYOUTS, LaunchError)
    return LayerOptions(between, out_layout, fuse)


class Explainable(Multiplier):
    """Base of all launchers: the stated options, and explanations of calls."""

    stated: StatedOptions
    options: LayerOptions
    out_layout: Layout | None
    parts = "factor"  # part of a call that each of several launches computes: "factor" or "layer"
    takes_lists = True  # whether weights are a list with one array per factor

    def explain(
        self,
        batch: int,
        *,
        precision: PrecisionName | None = None,
        layout: Layout | None = None,
        epilogue: Epilogue | None = None,
        device: str | None = None,
        job: Job = "multiply",
        out_layout: Layout | None = None,
        weights: WeightStorage | Same | None = None,
        inputs: ByteStorage | Same | None = None,
    ) -> str:
        """Describe which kernel family and constants a call uses on a device, whether it is one launch, and why.

        None means the stated option; if there is none, float32, "bsf" and unquantized arrays.

        Args:
            batch: Batch size of the call.
            precision: Arithmetic, such as "float16".
            layout: Layout of x: "bsf" or "bsl".
            epilogue: `ksgen.spec.Epilogue` with bias, activation and residual, for the last factor of each chain.
            device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            job: "multiply" for calls, or "gradient" for calls of `Launcher.gradient`.
            out_layout: Layout of y. None: that of the launcher, else that of x.
            weights: Storage of the weights: "same", "int8", "e4m3", "e5m2" or "bfloat16".
            inputs: Storage of x: "same", "int8", "e4m3" or "e5m2". Intermediates and y then have the given precision.

        Returns:
            One line for one launch: kernel, batch size, device, family, constants and reason. Otherwise a line with the
            reason for several launches, and the explanation of each factor or layer. For several factors on a GPU, the
            last line compares expected times with that of the dense product of the same size.

        Raises:
            SpecError: An option is unknown, or two options exclude each other.
            DeviceError: The device does not exist.

        Examples:
            >>> import ksgen
            >>> print(ksgen.Launcher(1, 3, 2, 2).explain(batch=4))
            ks_1x3x2x2_float32_bsf at batch 4 on ...: vector ...
            >>> print(ksgen.ChainLauncher("1,2,2,2", "2,2,2,1", fuse="no").explain(batch=4))
            1,2,2,2 then 2,2,2,1: one launch per factor; fuse='no'
            ks_1x2x2x2_float32_bsf at batch 4 on ...
            ks_2x2x2x1_float32_bsf at batch 4 on ...
        """
        batch = checked_count("batch", batch)
        options, out_layout = self._asked(job, precision, layout, epilogue, weights, inputs, out_layout)
        return "\n".join(self._explained(batch, options, device, job, out_layout, compares=True))

    def _explained(
        self, batch: int, options: LaunchOptions, device: str | None = None, job: Job = "multiply",
        out_layout: Layout | None = None, compares: bool = False,
    ) -> list[str]:  # fmt: skip
        """Lines about the kernels of a call. `compares` adds the line of `_versus_dense`."""
        if self._is_factor(options, job, out_layout):
            # invalid combinations are refused before a device opens
            kernel = self._kernel_of_factor(batch, options, job)
            where = find_device(device)
            choice = PLANNER.choice(where, kernel, batch)
            family = f"{choice.family} ({family_named(choice.family).why})"
            why = f"{described(choice, kernel, batch, limits_of(where), device)}{bytes_saved(kernel, batch)}"
            return [f"{kernel.name} at batch {batch} on {where.name}: {family}, {choice.constants}; {why}"]
        where = find_device(device)
        found = self._verdict(where, options, batch, out_layout)
        compared = self._versus_dense(where, options, batch, found.is_one, out_layout) if compares else []
        if found.is_one:
            kernel = self._kernel(where, options, out_layout)
            choice = PLANNER.choice(where, kernel, batch)
            known = f"; {described(choice, kernel, batch, limits_of(where), device)}"
            why = f"one launch, by {choice.family}, {choice.constants}; {found.why}{known}{bytes_saved(kernel, batch)}"
            return [f"{self._describe(options.layout, out_layout)} at batch {batch} on {where.name}: {why}", *compared]
        lines = [f"{self._describe_parts(options.layout, out_layout)}; {found.why}"]
        for part, part_options in self._parts_of(options, out_layout):
            lines += part._explained(batch, part_options, device, out_layout=part_options.layout)
        return [*lines, *compared]

    def _versus_dense(
        self, device: Device, options: LaunchOptions, batch: int, is_one: bool, out_layout: Layout | None = None
    ) -> list[str]:
        """Line that compares expected times of all factors with that of the dense product; none if they are unknown."""
        if len(self.factors) == 1:
            return []
        compared = versus_dense(self._kernel(device, options, out_layout), limits_of(device), batch, is_one)
        return [compared] if compared else []

    def _asked(
        self, job: Any, precision: Any, layout: Any, epilogue: Any, weights: Any, inputs: Any, out_layout: Any
    ) -> tuple[LaunchOptions, Layout | None]:  # fmt: skip
        """Options of a call and the layout of y, with stated options for those that are None."""
        stated = (
            self.stated if is_word(job, ("multiply",)) else StatedOptions(self.stated.layout, self.stated.precision)
        )
        defaults = stated.precision or "float32", stated.layout, stated.epilogue, stated.weights, stated.inputs
        asked: Any = zip((precision, layout, epilogue, weights, inputs), defaults, strict=True)
        options = LaunchOptions(*(default if each is None else each for each, default in asked))
        out_layout = self.out_layout if out_layout is None else out_layout
        check_layouts(self, self.chains, options.layout, out_layout)
        return options, out_layout

    def _is_factor(self, options: LaunchOptions, job: Any, out_layout: Layout | None) -> bool:
        """Whether a call is the launch of the only factor."""
        is_product = is_word(job, ("multiply",))
        return not is_product or not (self.takes_lists or is_layer(self.chains, options.layout, out_layout))

    def _kernel_of_factor(self, batch: int, options: LaunchOptions, job: Any) -> KernelSpec:
        own_batch = batch if batch in self.batches else None
        return KernelSpec(self.chains, **options._asdict(), batch=own_batch, job=job)

    def _parts_of(self, options: LaunchOptions, out_layout: Layout | None) -> list[tuple[Any, LaunchOptions]]:
        """Launchers of the factors, each with the options of its own launch, whose x and y have one layout."""
        (chain,), transposes, parts = self.chains, is_transposed(options.layout, out_layout), []
        for number, factor in enumerate(self.factors):
            epilogue = options.epilogue if number + 1 == len(chain) else Epilogue(activation=self.between or "none")
            layout: Any = out_layout if transposes and number >= chain.transposing_factor else options.layout
            part_options = options._replace(layout=layout, epilogue=epilogue, inputs=SAME if number else options.inputs)
            parts.append((factor, part_options))
        return parts

    def _describe_parts(self, layout: Layout, out_layout: Layout | None) -> str:
        """Describe the launches of a call that takes several."""
        number = self.chains[0].transposing_factor + 1
        copied = f", and the input of factor {number} is transposed by a copy"
        once = copied if is_transposed(layout, out_layout) else ""
        return f"{self._describe(layout, out_layout)}: one launch per factor{once}"

    @property
    def _title(self) -> str:
        return ", and ".join(map(str, self.chains))

    def _describe(self, layout: Layout, out_layout: Layout | None) -> str:
        """Chains, the activation between their factors, and the layouts of x and y if they differ."""
        description = (
            self._title if self.options.between == "none" else f"{self._title} with {self.between} between factors"
        )
        return f"{description} from {layout} to {out_layout}" if is_transposed(layout, out_layout) else description

    def _verdict(self, device: Device, options: LaunchOptions, batch: int, out_layout: Layout | None = None) -> Verdict:
        """Whether a call of several factors is one launch on a device, and why."""
        if not is_layer(self.chains, options.layout, out_layout):
            return Verdict(False, "there is one factor")
        if self.fuse == "no":
            return Verdict(False, "fuse='no'")
        if self.between is None:
            return Verdict(False, BETWEEN_DIFFERS)
        return verdict(device, self._kernel(device, options, out_layout), batch, self.fuse)

    def _kernel(self, device: Device, options: LaunchOptions, out_layout: Layout | None) -> KernelSpec:
        """Kernel of one launch of several factors. Outputs of a group are slices of one array."""
        stride = "any" if len(self.chains) > 1 and (device.shares_host or options.layout == "bsf") else "dense"
        return KernelSpec(
            self.chains, **options._asdict(), stride=stride, between=self.between or "none", out_layout=out_layout
        )
