"""`ksgen bench`: what it measures, and that its help needs no PyTorch."""

import subprocess
import sys

from click.testing import CliRunner

from ksgen.commands import bench
from ksgen.install import install_line


def test_every_benchmark_is_listed_with_what_it_measures() -> None:
    assert sorted(bench.command.commands) == ["energy", "layers", "model", "paper", "report", "share", "table"]
    assert all(each.get_short_help_str() for each in bench.command.commands.values())
    assert CliRunner().invoke(bench.command, ["nothing"]).exit_code == 2


def test_help_needs_no_torch_and_the_command_reports_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from ksgen.cli import main; sys.argv = ['ksgen', 'bench', "
        "'model', *sys.argv[1:]]; main()"
    )
    shown = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True)
    assert "ksgen bench model vit-s16" in shown.stdout
    refused = subprocess.run([sys.executable, "-c", program, "vit-s16"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"ksgen: ksgen bench model needs PyTorch; {install_line('torch')}\n",
    )
