"""`ksgen emit`: where it writes, and the texts of one family."""

import json
from pathlib import Path

from tests.support.program import ksgen


def test_emit_goes_to_generated_here_by_default(spec: Path) -> None:
    done = ksgen("emit", spec.name, cwd=spec.parent)
    assert done.stdout == "2 kernels of small in generated/small\n"
    assert (spec.parent / "generated" / "small" / "ks_2x9x5x3_float32_bsf.cu").is_file()
    told = ksgen("emit", spec.name, "--dialect", "opencl", "-o", "elsewhere", "--json", cwd=spec.parent)
    assert json.loads(told.stdout)["folder"] == "elsewhere"
    assert (spec.parent / "elsewhere" / "ks_2x9x5x3_float32_bsf.cl").is_file()


def test_emit_writes_the_texts_of_a_family_asked_for(spec: Path, tmp_path: Path) -> None:
    done = ksgen("emit", str(spec), "--family", "simt", "-o", str(tmp_path / "plain"))
    assert done.returncode == 0, done.stderr
    assert all("simt.cu.j2" in path.read_text() for path in (tmp_path / "plain").glob("*.cu"))
    assert done.stderr == ""
    cores = ksgen("emit", str(spec), "--family", "mma", "-o", str(tmp_path / "cores"), "--json")
    assert cores.stderr == "left out, as mma does not support them: 1 of 2 kernels (ks_2x9x5x3_float32_bsf)\n"
    assert json.loads(cores.stdout)["left_out"] == ["ks_2x9x5x3_float32_bsf"]
    refused = ksgen("emit", str(spec), "--family", "gradient", "-o", str(tmp_path / "none"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "gradient supports none of its kernels (the weights' gradient" in refused.stderr
    assert not (tmp_path / "none").exists()


def test_x_in_eight_bits_by_warpgroups(tmp_path: Path) -> None:
    path, defaults = tmp_path / "bytes.yaml", "defaults: {precision: float16, weights: e4m3, inputs: e4m3}\n"
    path.write_text(
        defaults + 'kernels: ["2,24,48,1", {pattern: "2,24,48,1", weights: int8, inputs: int8}, "2,24,48,2"]\n'
    )
    done = ksgen("emit", str(path), "--family", "wgmma_shared", "-o", str(tmp_path / "texts"))
    left_out = "ks_2x24x48x1_float16_int8_inputs_bsf, ks_2x24x48x2_float16_e4m3_inputs_bsf"
    assert done.stderr == f"left out, as wgmma_shared does not support them: 2 of 3 kernels ({left_out})\n"
    (text,) = (tmp_path / "texts").glob("*.cu")
    assert "m64n32k32.f32.e4m3.e4m3" in text.read_text()
    path.write_text(defaults + 'kernels: ["2,24,48,2"]\n')
    refused = ksgen("emit", str(path), "--family", "wgmma_shared", "-o", str(tmp_path / "none"))
    assert (
        "wgmma_shared supports none of its kernels (wgmma of sm_90a with X from shared memory: 16-bit types in bsl"
        in refused.stderr
    )
