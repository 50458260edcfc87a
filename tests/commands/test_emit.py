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


def test_tied_weights_have_sources_of_families_that_read_them_once(tmp_path: Path) -> None:
    """Others read repeated weights, by the source that whole weights have."""
    path, folder = tmp_path / "ties.yaml", tmp_path / "texts"
    path.write_text(
        'defaults: {precision: [float32, float16]}\nkernels: ["8,16,16,2", {pattern: "8,16,16,2", tied: a}]\n'
    )
    for family, tied in ((), ["float32"]), (("--family", "simt"), ["float32", "float16"]), (("--family", "mma"), []):
        done = ksgen("emit", str(path), *family, "-o", str(folder))
        left_out = "ks_8x16x16x2_float32_bsf, ks_8x16x16x2_float32_bsf_tied_a"
        assert done.stderr == (
            "" if "mma" not in family else f"left out, as mma does not support them: 2 of 4 kernels ({left_out})\n"
        )
        manifest = json.loads((folder / "manifest.json").read_text())
        assert len({row["file"] for row in manifest["kernels"]}) == len(manifest["kernels"])
        rows = [row for row in manifest["kernels"] if row.get("tied") == "a"]
        assert [row["precision"] for row in rows] == tied
        assert sorted(each.name for each in folder.glob("*_tied_a*.cu")) == sorted(row["file"] for row in rows)
        assert all("w is (1, B, C, D) of" in (folder / row["file"]).read_text() for row in rows)
        whole = {row["precision"]: row["packed_bytes"] for row in manifest["kernels"] if "tied" not in row}
        assert all(8 * row["packed_bytes"] == whole[row["precision"]] for row in rows)
    refused = ksgen("emit", str(path), "--family", "gradient", "-o", str(tmp_path / "none"))
    assert "gradient supports none of its kernels (the weights' gradient" in refused.stderr


def test_x_in_eight_bits_by_warpgroups(tmp_path: Path) -> None:
    path, defaults = tmp_path / "bytes.yaml", "defaults: {precision: float16, weights: e4m3, inputs: e4m3}\n"
    path.write_text(
        defaults + 'kernels: ["2,24,48,1", {pattern: "2,24,48,1", weights: int8, inputs: int8}, "2,24,48,2"]\n'
    )
    done = ksgen("emit", str(path), "--family", "wgmma_shared", "-o", str(tmp_path / "texts"))
    left_out = "ks_2x24x48x1_float16_int8_inputs_bsf, ks_2x24x48x2_float16_e4m3_inputs_bsf"
    assert done.stderr.splitlines() == [
        f"left out, as wgmma_shared does not support them: 2 of 3 kernels ({left_out})",
    ]
    (text,) = (tmp_path / "texts").glob("*.cu")
    assert "m64n32k32.f32.e4m3.e4m3" in text.read_text()
    path.write_text(defaults + 'kernels: ["2,24,48,2"]\n')
    refused = ksgen("emit", str(path), "--family", "wgmma_shared", "-o", str(tmp_path / "none"))
    assert (
        "wgmma_shared supports none of its kernels (wgmma of sm_90a with X from shared memory: 16-bit types in bsl"
        in refused.stderr
    )
