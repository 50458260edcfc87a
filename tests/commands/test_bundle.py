"""`ksgen bundle` writes one file."""

from pathlib import Path

from tests.support.program import ksgen, needs_compiler


@needs_compiler
def test_bundle_is_one_file(spec: Path) -> None:
    done = ksgen("bundle", spec.name, "--arch", "sm_90a", cwd=spec.parent)
    assert done.stdout.startswith("2 binaries of small for sm_90a in small.ksb ("), done.stderr
    assert (spec.parent / "small.ksb").stat().st_size > 1000
