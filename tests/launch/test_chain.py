"""Chain launchers: their factors one after another, and what they refuse before the first of them is launched."""

import pytest

from ksgen import reference
from ksgen.errors import LaunchError, PatternError
from ksgen.launcher import ChainLauncher, Launcher
from tests.support.fake_gpu import FakeGpu, FakeTensor
from tests.support.launching import PATTERN, SHAPE, check, draw, inputs, needs_opencl


@needs_opencl
def test_a_chain_is_its_factors_one_after_another() -> None:
    first, then = Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3)
    x, weights = inputs()
    more, bias = draw(1, 4, 18, 3), draw(12)
    y = ChainLauncher(first, then)(x, [weights, more], bias=bias, activation="relu")
    middle = reference.multiply(PATTERN, x, weights, "bsf")
    check(y, middle, more, bias=bias, activation="relu")
    with pytest.raises(LaunchError, match="got 1 weight array; 2 are needed, one a factor"):
        ChainLauncher(first, then)(x, [weights])
    with pytest.raises(PatternError, match="gives 12 features and 2,9,5,3, next in the chain, takes 30"):
        ChainLauncher(then, first)
    with pytest.raises(LaunchError, match=r"factors=\(\); accepted: Launchers, one an argument"):
        ChainLauncher()


def test_a_chain_refuses_before_its_first_factor_is_launched(gpu: FakeGpu) -> None:
    chain = ChainLauncher(Launcher(*SHAPE), Launcher(1, 4, 18, 3))
    x, weights = inputs()
    ready, own, more = FakeTensor(gpu, x), FakeTensor(gpu, weights), FakeTensor(gpu, draw(1, 4, 18, 3))
    with pytest.raises(LaunchError, match=r"got weights of shape \(1, 4, 18, 2\); \(1, 4, 18, 3\) is needed"):
        chain(ready, [own, FakeTensor(gpu, draw(1, 4, 18, 2))])
    with pytest.raises(LaunchError, match=r"got bias of shape \(54,\); \(12,\) is needed"):
        chain(ready, [own, more], bias=FakeTensor(gpu, draw(54)))
    with pytest.raises(LaunchError, match="activation 'tanh' is unknown"):
        chain(ready, [own, more], activation="tanh")
    assert gpu.launches == []
    y = chain(ready, [own, more])
    gpu.synchronize()
    check(y.data.content, reference.multiply(PATTERN, x, weights, "bsf"), more.data.content)


@needs_opencl
def test_one_launcher_may_be_several_factors() -> None:
    square = Launcher(2, 3, 3, 1)
    x, first, then, bias = draw(4, 6), draw(2, 3, 3, 1), draw(2, 3, 3, 1), draw(6)
    y = ChainLauncher(square, square)(x, [first, then], bias=bias)
    check(y, reference.multiply(square.pattern, x, first, "bsf"), then, bias=bias)
