"""Tensor parallelism: split over processes, layers compute what they compute alone, and send what `explain` says."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
parallel = pytest.importorskip("torch.distributed.tensor.parallel", reason="PyTorch has no DTensor here")
if not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch has no gloo here", allow_module_level=True)

from torch import nn  # noqa: E402  (after the skip)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

from ksgen.errors import LaunchError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.parallel import KSBlockwise, KSColwise, KSRowwise  # noqa: E402
from tests.support.processes import Processes  # noqa: E402

BLOCKS, UP, DOWN = [(4, 3, 2, 5), (12, 4, 5, 1)], [(6, 4, 4, 1), (1, 8, 6, 4), (4, 3, 2, 4)], [(4, 3, 2, 2), (1, 5, 8, 3), (3, 4, 5, 1)]
LAST, FIRST = [(3, 4, 2, 2), (1, 8, 6, 4)], [(1, 6, 8, 3), (3, 2, 6, 1)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    found = Processes(4, tmp_path_factory.mktemp("four"))
    yield found
    found.end()


def compare(style: Any, patterns: Any, layout: str, residual: bool, options: dict[str, Any]) -> tuple[str, dict[str, int], dict[str, int]]:
    """Runs a layer split over all processes beside the whole one. What `explain` says, and what was sent forward and backward."""
    torch.manual_seed(0)
    alone = KSLinear(patterns, layout=layout, **options.pop("layer", {}))
    mesh = init_device_mesh("cpu", (4,))
    split = parallel.parallelize_module(deepcopy(alone), mesh, style(**options))
    assert all(isinstance(each, DTensor) for each in split.parameters())
    chain, features = alone.chain, Shard(-1 if layout == "bsf" else 0)
    shape = (8, 3, chain.in_features) if layout == "bsf" else (chain.in_features, 8, 3)
    x = torch.randn(shape)
    y = alone(x)
    added, dy = torch.randn_like(y), torch.randn_like(y)
    given = options.get("input_layouts", Replicate() if style is KSColwise else features)
    asked = options.get("output_layouts", Replicate() if style is KSRowwise else features)

    def part(whole: Any, placement: Any) -> Any:
        return distribute_tensor(whole.detach(), mesh, [placement]).to_local().clone()

    own_x, own_added = part(x, given).requires_grad_(), part(added, asked).requires_grad_()
    x.requires_grad_(), added.requires_grad_()
    alone(x, added if residual else None).backward(dy)
    with CommDebugMode() as forward:
        own_y = split(own_x, own_added if residual else None)
    if not options.get("use_local_output", True):
        assert own_y.placements == (Shard(asked.dim % y.dim()) if asked.is_shard() else asked,)
        own_y = own_y.to_local()
    with CommDebugMode() as backward:
        own_y.backward(part(dy, asked))
    torch.testing.assert_close(own_y, part(alone(x, added if residual else None), asked))
    torch.testing.assert_close(own_x.grad, part(x.grad, given))
    if residual:
        torch.testing.assert_close(own_added.grad, part(added.grad, asked))
    for own, whole in zip(split.parameters(), alone.parameters(), strict=True):
        assert own.grad.placements == own.placements
        torch.testing.assert_close(own.grad.full_tensor(), whole.grad)
    with torch.no_grad():
        torch.testing.assert_close(
            DTensor.from_local(split(own_x), mesh, [asked]).full_tensor()
            if options.get("use_local_output", True)
            else split(own_x).full_tensor(),
            alone(x),
        )
    torch.testing.assert_close(split.to_dense(), alone.to_dense())
    return split.explain(24), *(
        {str(op).split(".")[-1]: count for op, count in each.get_comm_counts().items()} for each in (forward, backward)
    )


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize(
    ("style", "patterns", "options", "forward", "backward"),
    [
        (KSBlockwise, BLOCKS, {}, {}, {}),
        (KSColwise, LAST, {}, {}, {"all_reduce": 2}),
        (KSColwise, UP, {}, {}, {"all_reduce": 2}),
        (KSRowwise, FIRST, {}, {"all_reduce": 1}, {"all_reduce": 1}),
        (KSRowwise, DOWN, {}, {"all_reduce": 1}, {"all_reduce": 1}),
    ],
)
def test_as_in_one_process(four: Processes, style: Any, patterns: Any, options: Any, forward: Any, backward: Any, layout: str) -> None:
    for each in four.run(compare, style, patterns, layout, True, {"layer": {"activation": "gelu"}, **options}):
        print(each)
