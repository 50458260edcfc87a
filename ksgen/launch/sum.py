"""Sum launcher, y = K_1 x + ... + K_n x: each chain adds the sum of the earlier ones, as the residual of its launch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ksgen.errors import LaunchError
from ksgen.launch.base import Given, copied_to
from ksgen.launch.checks import STORED_OTHERWISE, ArgumentChecks, CheckedArguments, per_chain
from ksgen.launch.explain import LaunchOptions
from ksgen.launch.fused import Verdict
from ksgen.launch.group import GroupLauncher
from ksgen.launch.plan import Call, CallSequence
from ksgen.launch.planner import PLANNER
from ksgen.launch.streams import device_and_stream
from ksgen.spec import Epilogue, Layout
from ksgen.spec.kernel import sum_steps

WHY_SEVERAL = "each chain adds the sum of the earlier ones as its residual"


class SumLauncher(GroupLauncher):
    """Multiply x by a sum of chains: y = total(x, weights) computes activation(K_1 x + ... + K_n x + bias + residual).

    The first chain writes y, with the bias and the residual. Each further chain adds y in its own last kernel, so the
    sum takes no pass of its own. The last kernel applies the activation. So an activation with a residual needs
    `residual_first=True`. In 16 bits, each partial sum is rounded. Arguments that any chain would refuse are refused
    before the first launch. A chain with `fuse="yes"` is refused, too, if no kernel runs it in one launch.

    Args:
        *layers: Two or more `ChainLauncher`s, `Launcher`s, chains or patterns, one per argument. All must take and give
            the same numbers of features and state the same options, which are those of the sum. None may have an
            `out_layout`.

    Raises:
        PatternError: A layer is no chain.
        LaunchError: Fewer than two layers are given, layers do not fit each other, or a residual would follow the
            activation.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> total = ksgen.SumLauncher("1,3,2,2", "2,3,2,1")
        >>> weights = [np.ones((1, 3, 2, 2), np.float32), np.ones((2, 3, 2, 1), np.float32)]
        >>> total(np.array([[1, 2, 3, 4]], np.float32), weights, bias=np.ones(6, np.float32))
        array([[ 8., 10.,  8., 14., 12., 14.]], dtype=float32)
        >>> total(np.array([[1, -2, 3, -4]], np.float32), weights, activation="relu")
        array([[3., 0., 3., 0., 3., 0.]], dtype=float32)
    """

    kind = "sum"
    gives_list = False

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        if len(layers) < 2:
            raise LaunchError(f"{self!r}: accepted: two chains or more")
        if len({chain.out_features for chain in self.chains}) > 1:
            given = ", ".join(f"{chain} gives {chain.out_features}" for chain in self.chains)
            raise LaunchError(f"{given} features; accepted: chains of equal out_features")
        self._check_order(self.stated.activation, self.stated.residual, self.stated.residual_first)
        self.fuse = "no"  # of the sum: each chain has a `fuse` of its own
        every = len(self.chains)
        self.names = self.names._replace(bias=("bias",) * every, residual=("residual",) * every, out=("out",) * every)

    def _check_order(self, activation: str, has_residual: bool, residual_first: bool) -> None:
        """Raise `LaunchError` if a residual would follow the activation."""
        if has_residual and activation != "none" and not residual_first:
            raise LaunchError(
                f"{self!r}: a residual after activation={activation!r}; accepted: residual_first=True, because "
                f"{WHY_SEVERAL}"
            )

    def _per_chain(self, name: str, value: Any) -> Any:
        """Entries of an argument, one per chain, which share all operands but the weights."""
        return super()._per_chain(name, value) if name == "weights" else (value,) * len(self.chains)

    def _add_outputs(self, out: Any, layout: str, arrays: dict[str, Any]) -> Any:
        arrays["out"] = out
        return out

    def _prepared(self, given: Given, checks: ArgumentChecks) -> Call | CheckedArguments:
        self._check_order(given.options.activation, "residual" in given.arrays, given.options.residual_first)
        fit: Any = super()._prepared(given, checks)  # a sum is never one launch
        if any(layer.fuse == "yes" for layer in self.layers):
            self._check_fusion(given, fit)
        checked: CheckedArguments = fit
        return checked

    def _check_fusion(self, given: Given, fit: CheckedArguments) -> None:
        """Raise `LaunchError` if a chain requires one launch, but it is unavailable."""
        packed, options = given.packed, given.options
        device = packed[0].device if packed else device_and_stream(self, fit.place, options.stream)[0]
        if (key := (device, PLANNER.generation, True)) in fit.plans:
            return
        epilogue = Epilogue("bias" in given.arrays, options.activation, "residual" in given.arrays, True)
        asked = LaunchOptions(fit.precision, options.layout, epilogue)
        forms = per_chain(self.chains, given.forms)
        for (layer, own), of_layer in zip(self._parts_of(asked, None), forms, strict=True):
            if layer.fuse != "yes" or len(layer.chain) == 1:
                continue
            stored = {each.stored for each in of_layer}
            given_as: Any = {"weights": of_layer[0].stored, "inputs": of_layer[0].inputs}
            own = own._replace(**given_as)
            found = layer._verdict(device, own, fit.batch) if len(stored) == 1 else None
            why = STORED_OTHERWISE if found is None else "" if found.is_one else found.why
            layer._several(fit, copied_to(device) if fit.place == "host" and not device.shares_host else why)
        fit.plans[key] = None  # several launches

    def _one_by_one(self, given: Given, fit: CheckedArguments) -> Any:
        """Launch the chains sequentially."""
        *_, y = self._in_turn(given, fit)
        return y

    def _prepared_in_turn(self, given: Given, fit: CheckedArguments) -> CallSequence | None:
        """Prepared call of all chains; None if the factors of a chain are launched one by one."""
        calls: list[Call] = []
        for call in self._in_turn(given, fit, prepares=True):
            if call is None:
                return None
            calls.append(call)
        for call in calls[:-1]:
            call.keep_output()
        return CallSequence(tuple(calls), [each.check for each in given.packed])

    def _in_turn(self, given: Given, fit: CheckedArguments, prepares: bool = False) -> Iterator[Any]:
        """Call the chains' launchers sequentially, each on the y of the one before, and yield what they return."""
        arrays, factor_weights, _, _, y, options = given
        operands = {"bias": arrays.get("bias"), "residual": arrays.get("residual")}
        last = options._replace(precision=fit.precision, residual_first=True)
        further = [last._replace(activation="none")] * (len(self.layers) - 1)
        weights_of_each = per_chain(self.chains, factor_weights)
        for layer, weights, own in zip(self.layers, weights_of_each, (*further, last), strict=True):
            method = layer.prepare if prepares else layer
            yield (done := method(arrays["x"], weights, out=y, **operands, **own._asdict()))
            y = done.out if prepares else done
            operands = {"residual": y}

    def _parts_of(self, options: LaunchOptions, out_layout: Layout | None) -> list[tuple[Any, LaunchOptions]]:
        given = options.epilogue
        self._check_order(given.activation, given.residual, given.residual_first)
        epilogues = [replace(given, **steps) for steps in sum_steps(len(self.layers))]
        return [(layer, options._replace(epilogue=each)) for layer, each in zip(self.layers, epilogues, strict=True)]

    def _verdict(self, *_: Any) -> Verdict:
        return Verdict(False, WHY_SEVERAL)

    def _versus_dense(self, *_: Any) -> list[str]:
        return []

    @property
    def _title(self) -> str:
        return " plus ".join(map(str, self.chains))
