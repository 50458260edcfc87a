"""What commands share: specs by name, from any folder."""

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ksgen.bench.rows import read_rows
from ksgen.bench.tables import overview
from ksgen.commands.common import check_memory, column_widths, number_option, print_columns
from ksgen.errors import SpecError
from ksgen.families import cuda_limits
from ksgen.measure.verify import footprint
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.program import ksgen

ROOT = Path(__file__).parents[2]


def test_shipped_specs_are_found_from_any_folder(tmp_path: Path) -> None:
    done = ksgen("emit", "specs/gpt2.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["", "-"])
@pytest.mark.parametrize(
    "command",
    [
        ("cache", "ls", "--folder"),
        ("emit",),
        ("emit", "specs/gpt2.yaml", "-o"),
        ("bench", "report", "--with"),
        ("bundle", "specs/gpt2.yaml", "-o"),
        ("wisdom", "export", "-o"),
        ("bench", "share", "-o"),
        ("bench", "model", "-o"),
        ("show", "1,4,6,4", "--png"),
        ("tune", "1,4,6,4", "--report"),
    ],
)
def test_no_file_or_folder_is_called_minus_or_nothing(command: tuple[str, ...], name: str, tmp_path: Path) -> None:
    done = ksgen(*command, name, cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert f": {name!r}; accepted: the name of a file or folder, and ./- for one called - (" in done.stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nan", "NaN is not in any range"),
        ("inf", "inf is not in the range 0.1<=x<=1000000000.0"),
        ("1e300", "1e+300 is not in the range 0.1<=x<=1000000000.0"),
        ("0", "0.0 is not in the range 0.1<=x<=1000000000.0"),
        ("1k", "'1k' is not a valid number."),
    ],
)
def test_numbers_of_options_are_finite(word: str, message: str) -> None:
    @click.command()
    @number_option("--seconds", help_text="Seconds.", usual=2.5, least=0.1)
    def command(seconds: float) -> None:
        click.echo(seconds)

    assert CliRunner().invoke(command, ["--seconds", "1e9"]).output == "1000000000.0\n"
    done = CliRunner().invoke(command, ["--seconds", word])
    assert done.exit_code == 2
    assert message in done.output


def test_a_word_in_place_of_a_whole_number_is_named() -> None:
    done = ksgen("show", "1,4,6,4", "--batch", "1k")
    assert done.stderr == "ksgen: Invalid value for '--batch': '1k' is not a valid integer. (ksgen show --help)\n"


def test_a_check_may_take_all_of_the_memory_and_no_byte_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, limits = KernelSpec(Pattern(2, 9, 5, 3)), cuda_limits("sm_90a")
    counts = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": footprint(kernel, 70, limits).total}
    monkeypatch.setattr(os, "sysconf", counts.__getitem__)
    check_memory(kernel, 70, limits)
    counts["SC_PHYS_PAGES"] -= 1
    with pytest.raises(
        SpecError, match=r"--batch 70: checking ks_2x9x5x3_float32_bsf takes .* GB .*; take a smaller batch"
    ):
        check_memory(kernel, 70, limits)


texts = st.lists(st.text("ab", min_size=1, max_size=9), max_size=4).map(" ".join)


@given(
    st.integers(1, 5).flatmap(lambda count: st.lists(st.tuples(*[texts] * count), min_size=1, max_size=4)),
    st.integers(5, 80),
)
def test_columns_are_as_wide_as_whole_words_where_the_terminal_is(lines: list[tuple[str, ...]], room: int) -> None:
    widths = column_widths(lines, room)
    columns = list(zip(*lines, strict=True))
    longest = [max(len(word) for text in column for word in [*text.split(), " "]) for column in columns]
    whole = [max([1, *map(len, column)]) for column in columns]
    assert sum(widths) <= max(room, len(widths))
    if sum(longest) <= room:
        assert all(width >= least for width, least in zip(widths, longest, strict=True))
    if sum(whole) <= room:
        assert widths == whole


def test_a_table_of_80_columns_has_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = overview(read_rows(ROOT / "benchmarks/results/amd-epyc-2-cores/paper.csv"))
    print_columns(table.columns, table.rows, left=2)
    shown = capsys.readouterr().out
    words = {word for line in [table.columns, *table.rows] for text in line for word in text.split()}
    assert {"precision", "patterns", "bfloat16"} <= words <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
