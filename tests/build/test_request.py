"""What makes a request and a key, and what a compiler's log says of one entry."""

from dataclasses import replace

import pytest

from ksgen.build.request import Request, Resources, digest_of, read_notes, read_resources
from tests.support.cache_entries import COMPILER, REQUEST, binary

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'scale_pack' for 'sm_90a'
ptxas info    : Function properties for scale_pack
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.786 ms
ptxas info    : Compiling entry function 'scale' for 'sm_90a'
ptxas info    : Function properties for helper
    512 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for scale
{indent}64 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 49152 bytes smem, 8 bytes cmem[2]
"""


@pytest.mark.parametrize("indent", ["    ", "ptxas         .     "], ids=["nvcc", "nvrtc"])
def test_resources_of_each_entry(indent):
    report = REPORT.format(indent=indent)
    assert read_resources(report, "scale") == Resources(255, 49152, 40, 64)
    assert read_resources(report, "scale_pack") == Resources(8, 0, 0, 0)
    assert read_resources(report, "other") == Resources(None, None, None, None)
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert list(read_notes(report)) == [advice]


@pytest.mark.parametrize("field", ["text", "entry", "target"])
def test_every_field_of_a_request_changes_its_digest_and_key(field):
    other = replace(REQUEST, **{field: getattr(REQUEST, field) + "x"})
    assert other.digest != REQUEST.digest
    assert other.key(COMPILER) != REQUEST.key(COMPILER)


@pytest.mark.parametrize("change", [{"name": "nvrtc"}, {"version": "13.0.89"}, {"flags": ("-O2",)}, {"flags": ()}])
def test_every_field_of_a_compiler_changes_the_key_alone(cache, change):
    other = replace(COMPILER, **change)
    assert REQUEST.key(other) != REQUEST.key(COMPILER)
    cache.put(REQUEST, binary())
    assert cache.get(REQUEST, other) is None


def test_fields_do_not_run_into_each_other():
    assert digest_of("ab", "c") != digest_of("a", "bc") != digest_of("abc") != digest_of("abc", "")
    assert Request("a", "bc", "d").digest != Request("ab", "c", "d").digest
