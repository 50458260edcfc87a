"""python -m tests.counts: kernels of ksgen, and a text of another's."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests import counts
from tests.emulator import is_installed

pytestmark = pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")

PEER = """
extern "C" __global__ void turn(const float* x, const int* rows, float* y, int columns) {
    __shared__ float tile[32][33];
    for (int r = threadIdx.y; r < 32; r += 8) tile[r][threadIdx.x] =
        x[rows[r] * columns + blockIdx.x * 32 + threadIdx.x];
    __syncthreads();
    for (int r = threadIdx.y; r < 32; r += 8) y[(blockIdx.x * 32 + r) * 32 + threadIdx.x] = tile[threadIdx.x][r];
}
"""
LAUNCH = """
text: peer.cu
entry: turn
grid: 2
block: [32, 8]
arguments: [{bytes: 8192}, {npy: rows.npy}, {bytes: 8192}, {int32: 64}]
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(counts.main, [str(argument) for argument in arguments])


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    (tmp_path / "peer.cu").write_text(PEER, encoding="utf-8")
    (tmp_path / "launch.yaml").write_text(LAUNCH, encoding="utf-8")
    np.save(tmp_path / "rows.npy", np.arange(32, dtype=np.int32))
    return tmp_path / "launch.yaml"


# ---- kernels of ksgen


def test_a_kernel_is_listed_next_to_its_model() -> None:
    lines = run("1,192,48,2", "--precision", "float16", "--family", "mma", "--constant", "stages=3").output.splitlines()
    assert lines[0].startswith("mma, batch 256: ")
    assert "stages=3" in lines[0]
    [expected, counted] = next(line for line in lines if line.startswith("  cycles of shared memory")).split()[-2:]
    assert expected == counted
    assert any(line.startswith("  mma m16n8k16 f16: ") for line in lines)


def test_a_family_is_taken_by_name_with_the_launch_after_it() -> None:
    found = json.loads(run("1,48,48,1", "--family", "gradient", "--json").output)
    assert list(found) == ["ks_1x48x48x1_float32_bsf_gradient", "before and after"]
    assert found["ks_1x48x48x1_float32_bsf_gradient"]["global_"]["copy_async"]["bytes"] >= 2 * 256 * 48 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either a pattern or --launch"),
        (("1,4,4,1", "--launch", "x.yaml"), "give either a pattern or --launch"),
        (("1,4,4,1", "--constant", "stages"), "--constant stages: NAME=VALUE is accepted"),
        (("1,48,48,4", "--constant", "stages=1"), "stages=1 must be at least 2"),
        (("1,48,48,4", "--constant", "sides=1"), "constants are "),
        (("1,48,48,4", "--family", "mma"), "mma does not support ks_1x48x48x4_float32_bsf on sm_90a"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code != 0, message in result.output) == (True, True), result.output


# ---- other texts


def test_another_s_text_is_counted_by_its_launch(launch: Path) -> None:
    found = json.loads(run("--launch", launch, "--json").output)["turn"]
    warps = 2 * 32  # a row each
    assert found["global_"] == {
        "load": {"requests": 2 * warps, "sectors": warps * (4 + 1), "bytes": 2 * warps * 128},
        "store": {"requests": warps, "sectors": 4 * warps, "bytes": warps * 128},
    }
    assert found["shared"]["load"] == {
        "requests": warps,
        "bytes": 128 * warps,
        "bank_cycles": warps,
        "return_cycles": warps,
        "cycles": warps,
    }
    assert (found["blocks"], found["barriers"], found["cache_read_bytes"]) == (2, 2, 8192 + 2 * 128)
    assert "L2 cache, once for each block: 8,448 bytes read, 8,192 written" in run("--launch", launch).output


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            ("entry: turn\n", ""),
            "launch.yaml: a launch has text, entry, grid, block, arguments, and may have shared_bytes, cluster, early",
        ),
        (("peer.cu", "none.cu"), "launch.yaml: text: "),
        (("entry: turn", "entry: twist"), "entry='twist'; the text has turn"),
        (("{bytes: 8192}, {npy", "{bytes: many}, {npy"), "launch.yaml: arguments[0]: {'bytes': 'many'}: "),
        (("rows.npy", "none.npy"), "launch.yaml: arguments[1]: {'npy': 'none.npy'}: "),
        (("{int32: 64}", "{integer: 64}"), "launch.yaml: arguments[3]: {'integer': 64}: "),
        (
            ("{int32: 64}", "64"),
            "launch.yaml: arguments[3]: 64; accepted are bytes, npy, a NumPy type with its value, and null",
        ),
        (("bytes: 8192}, {npy", "bytes: 4096}, {npy"), "out-of-bounds"),
        (("{int32: 64}", "{int32: 64"), "launch.yaml: while parsing"),
    ],
)
def test_mistakes_in_a_launch(launch: Path, changed: tuple[str, str], message: str) -> None:
    before, after = changed
    assert before in LAUNCH
    launch.write_text(LAUNCH.replace(before, after), encoding="utf-8")
    result = run("--launch", launch)
    assert (result.exit_code, message in result.output) == (1, True), result.output


def test_a_launch_that_is_not_there(tmp_path: Path) -> None:
    assert "none.yaml: [Errno 2]" in run("--launch", tmp_path / "none.yaml").output
