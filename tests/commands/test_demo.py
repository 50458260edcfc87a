"""`ksgen demo` checks every kernel of a spec."""

from pathlib import Path

from tests.support.program import ksgen, needs_device


@needs_device
def test_demo_checks_every_kernel_of_a_spec(spec: Path) -> None:
    done = ksgen("demo", spec.name, "--batch", "33", cwd=spec.parent)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 kernels agree with float64" in done.stdout
    assert (spec.parent / "generated" / "small" / "manifest.json").is_file()
