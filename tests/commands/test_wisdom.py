"""`ksgen wisdom`: what it lists, what two files make together, and what is never lost. `ksgen show` says who chose."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ksgen import wisdom
from ksgen.cli import cli
from ksgen.devices import find_device
from ksgen.emit.render import template_digest
from ksgen.errors import DeviceError, KsgenError
from ksgen.families.simt.shape import SimtConstants
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import Entry, Wisdom, better, dump, dump_export, load_wisdom, merge, parse_export

KERNEL = KernelSpec(Pattern(1, 64, 48, 2))
OTHER = KernelSpec(Pattern(6, 64, 64, 1), layout="bsl")
CONSTANTS = SimtConstants(64, 32, 8, 1, 8, 8, 3, 1, "async")
PRESENT, PAST = template_digest("simt"), "0a0b0c0d"


def entry(
    time: float | None, batch: int = 64, kernel: KernelSpec = KERNEL, template: str = PRESENT, date: str = "2026-11-20"
) -> Entry:
    times = {} if time is None else {"median_us": time, "floor_us": time / 2}
    return Entry(kernel, batch, "simt", CONSTANTS, {**times, "template": template, "date": date, "ksgen": "0.1.0"})


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The shipped and the user's folder: the first has one entry of an H200, the second another one, stale."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder, found in ((shipped, entry(5.0)), (own, entry(7.0, 1000, template=PAST))):
        folder.mkdir()
        (folder / "nvidia-h200.json").write_text(dump("NVIDIA H200", Wisdom([found])))
    monkeypatch.setattr(wisdom, "resource", lambda _: shipped)
    monkeypatch.setattr(wisdom, "wisdom_dir", lambda: own)
    return shipped, own


def file_of(folder: Path, name: str, *entries: Entry, device: str = "NVIDIA H200") -> str:
    path = folder / name
    path.write_text(dump(device, Wisdom(entries)))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["wisdom", *arguments])


def said(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def mistake(*arguments: str) -> str:
    caught = run(*arguments).exception
    assert isinstance(caught, KsgenError)
    assert len(str(caught).splitlines()) == 1
    return str(caught)


def test_show_lists_what_launchers_go_by(folders: tuple[Path, Path]) -> None:
    assert said("show").splitlines() == [
        "NVIDIA H200, by ksgen 0.1.0: 2 entries, 1 stale: tune again",
        f"  {KERNEL.name} batch 64              5.0 us,  50% of the floor",
        f"    simt: {CONSTANTS}",
        f"  {KERNEL.name} batch 1000            7.0 us,  50% of the floor  stale",
        f"    simt: {CONSTANTS}",
    ]
    rows = json.loads(said("show", "--device", "h200", "--json"))
    assert [(row["device"], row["batch"], row["stale"], row["median_us"]) for row in rows] == [
        ("NVIDIA H200", 64, False, 5.0),
        ("NVIDIA H200", 1000, True, 7.0),
    ]
    assert json.loads(said("show", "--pattern", "9,9,9,9", "--json")) == []


def test_show_groups_by_the_version_that_measured(folders: tuple[Path, Path]) -> None:
    later = entry(None, 1)
    newer = replace(later, measured={**later.measured, "ksgen": "0.2.0"})
    file_of(folders[1], "nvidia-h200.json", newer, replace(entry(2.0, 2), measured={"template": PRESENT}))
    lines = said("show").splitlines()
    assert [line for line in lines if line.startswith("NVIDIA")] == [
        "NVIDIA H200, by ksgen 0.1.0: 1 entry, none stale",
        "NVIDIA H200, by ksgen 0.2.0: 1 entry, none stale",
        "NVIDIA H200, by ksgen of unknown version: 1 entry, none stale",
    ]
    assert f"  {KERNEL.name} batch 1         of unknown time" in lines


def test_show_of_nothing_says_where_it_looked(folders: tuple[Path, Path]) -> None:
    assert said("show", "--pattern", "9,9,9,9") == f"no wisdom of 9,9,9,9 yet in {folders[0]} or {folders[1]}\n"
    for folder in folders:
        (folder / "nvidia-h200.json").unlink()
    assert said("show") == f"no wisdom yet in {folders[0]} or {folders[1]}\n"
    assert mistake("export") == "nothing to export: this machine has no wisdom yet; `ksgen tune` makes some"


@pytest.mark.parametrize(
    ("first", "second", "which"),
    [
        (entry(2.0), entry(1.0), "second"),
        (entry(1.0), entry(2.0), "first"),
        (entry(1.0), entry(1.0, date="2026-11-21"), "first"),
        (entry(None), entry(9.0), "second"),
        (entry(1.0, template=PAST), entry(2.0), "second"),
        (entry(2.0), entry(1.0, template=PAST), "first"),
        (entry(2.0, template=PAST), entry(1.0, template=PAST), "second"),
        (entry(1.0, template=PAST), entry(2.0, template="00000000", date="2026-11-21"), "second"),
        (entry(2.0, template=PAST), entry(1.0, template="00000000"), "first"),
    ],
)
def test_the_better_entry(first: Entry, second: Entry, which: str) -> None:
    assert better(first, second) is {"first": first, "second": second}[which]


def test_merge_keeps_every_job(tmp_path: Path) -> None:
    first = file_of(tmp_path, "a.json", entry(2.0), entry(3.0, 128))
    second = file_of(tmp_path, "b.json", entry(1.0), entry(4.0, kernel=OTHER))
    merged = Wisdom([entry(1.0), entry(3.0, 128), entry(4.0, kernel=OTHER)])
    assert said("merge", first, second) == dump("NVIDIA H200", merged)
    assert said("merge", first, second, "-o", first) == f"3 entries of NVIDIA H200 in {first}\n"
    assert Path(first).read_text() == dump("NVIDIA H200", merged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert len(merge(merged.entries(), merged.entries())) == 3


def test_merge_of_two_devices_is_an_export(tmp_path: Path) -> None:
    first = file_of(tmp_path, "a.json", entry(2.0))
    second = file_of(tmp_path, "b.json", entry(1.0), device="AMD EPYC")
    text = said("merge", first, second)
    assert text == dump_export({"NVIDIA H200": Wisdom([entry(2.0)]), "AMD EPYC": Wisdom([entry(1.0)])})
    assert parse_export(text, "both") == {"AMD EPYC": [entry(1.0)], "NVIDIA H200": [entry(2.0)]}
    assert len(text.splitlines()) == 8


def test_diff_says_what_differs_and_by_how_much(tmp_path: Path) -> None:
    changed = replace(entry(1.0, 128), constants=replace(CONSTANTS, stages=4))
    first = file_of(tmp_path, "a.json", entry(2.0), entry(2.0, 128), entry(2.0, 256), entry(None, 512))
    second = file_of(
        tmp_path, "b.json", entry(2.0), changed, entry(3.0, 256), entry(2.0, 512), entry(4.0, kernel=OTHER)
    )
    assert said("diff", first, second).splitlines() == [
        f"NVIDIA H200, {KERNEL.name} batch 128: different constants, 2.0 us and 1.0 us, 0.500 times",
        f"  first: simt: {CONSTANTS}",
        f"  second: simt: {changed.constants}",
        f"NVIDIA H200, {KERNEL.name} batch 256: same constants, 2.0 us and 3.0 us, 1.500 times",
        f"NVIDIA H200, {KERNEL.name} batch 512: same constants, unknown and 2.0 us",
        f"NVIDIA H200, {OTHER.name} batch 64: only in the second, 4.0 us",
        f"  second: simt: {CONSTANTS}",
        "the same: 1 entry; different: 4",
    ]
    rows = json.loads(said("diff", first, second, "--json"))
    assert [(row["kernel"], row["batch"], row["what"], row["ratio"]) for row in rows] == [
        (KERNEL.name, 128, "constants", 0.5),
        (KERNEL.name, 256, "measured", 1.5),
        (KERNEL.name, 512, "measured", None),
        (OTHER.name, 64, "only in the second", None),
    ]
    assert rows[3]["first"] is None
    assert rows[0]["second"]["constants"]["stages"] == 4
    assert said("diff", first, first) == "the same: 4 entries; different: 0\n"


def test_processors_of_one_name_are_listed_apart(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def on(target: str, time: float) -> Entry:
        found = entry(time)
        return replace(found, measured={**found.measured, "target": target})

    first = file_of(tmp_path, "a.json", on("one", 1.0), on("two", 2.0), device="EPYC")
    second = file_of(tmp_path, "b.json", on("one", 3.0), on("two", 3.0), device="EPYC")
    assert said("diff", first, second).splitlines() == [
        f"EPYC, {KERNEL.name} batch 64 on one: same constants, 1.0 us and 3.0 us, 3.000 times",
        f"EPYC, {KERNEL.name} batch 64 on two: same constants, 2.0 us and 3.0 us, 1.500 times",
        "the same: 0 entries; different: 2",
    ]
    file_of(folders[1], "epyc.json", on("one", 1.0), on("two", 2.0), device="EPYC")
    lines = said("show", "--device", "EPYC").splitlines()
    assert [line.rpartition("floor ")[2] for line in lines if " batch " in line] == ["on one", "on two"]


def test_what_is_exported_can_be_imported_elsewhere(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, own = folders
    (own / "amd-epyc.json").write_text(dump("AMD EPYC", Wisdom([entry(9.0)])))
    packed = tmp_path / "all.json"
    assert said("export", "-o", str(packed)) == f"3 entries of AMD EPYC, NVIDIA H200 in {packed}\n"
    assert said("export") == packed.read_text()
    assert said("export", "--device", "epyc") == (own / "amd-epyc.json").read_text()
    for path in own.iterdir():
        path.unlink()
    assert said("import", str(packed)).splitlines() == [
        "AMD EPYC: 1 new, 0 better, 0 not better than what is known here",
        "NVIDIA H200: 1 new, 0 better, 1 not better than what is known here",
    ]
    assert load_wisdom("AMD EPYC").entries() == [entry(9.0)]
    assert load_wisdom("NVIDIA H200").entries() == [entry(5.0), entry(7.0, 1000, template=PAST)]


def test_import_takes_what_is_better_and_keeps_the_rest(folders: tuple[Path, Path], tmp_path: Path) -> None:
    offered = file_of(tmp_path, "theirs.json", entry(4.0), entry(8.0, 1000), entry(1.0, kernel=OTHER))
    assert said("import", offered) == "NVIDIA H200: 1 new, 2 better, 0 not better than what is known here\n"
    assert load_wisdom("NVIDIA H200").entries() == [entry(4.0), entry(8.0, 1000), entry(1.0, kernel=OTHER)]
    worse = file_of(tmp_path, "worse.json", entry(6.0), entry(1.0, 1000, template=PAST))
    before = (folders[1] / "nvidia-h200.json").read_bytes()
    assert said("import", worse) == "NVIDIA H200: 0 new, 0 better, 2 not better than what is known here\n"
    assert (folders[1] / "nvidia-h200.json").read_bytes() == before
    assert mistake("import", worse, "--device", "B200") == f"--device 'B200': {worse} has NVIDIA H200"


Damage = Callable[[str], str]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:60], "not a wisdom file (Expecting"),
        (lambda text: text.replace('"float32"', '"float8"'), "entry 1 of AMD EPYC: precision='float8'"),
        (
            lambda text: text.replace('"batch": 1000', '"batch": -1'),
            "entry 2 of NVIDIA H200: batch=-1 is not a whole number",
        ),
        (lambda text: text.replace('"AMD EPYC"', '""'), "not a wisdom file (device is '', not a name)"),
        (lambda text: text.replace('"AMD EPYC"', '"a\\u001bb"'), "not a wisdom file (device is 'a\\x1bb', not a name)"),
        (lambda text: text.replace('"device": "AMD EPYC", ', ""), "not a wisdom file (device is None, not a name)"),
        (lambda text: '{"devices": 5}', "not a wisdom file (devices is 5, not a list)"),
        (lambda text: '{"devices": [5]}', "not a wisdom file ("),
        (
            lambda text: text.replace('"floor_us": 2.5', '"floor_us": NaN'),
            "entry 1 of NVIDIA H200: floor_us=nan is not a time",
        ),
    ],
)
def test_damaged_input_is_refused_whole(
    folders: tuple[Path, Path], tmp_path: Path, damage: Damage, message: str
) -> None:
    whole = dump_export({"AMD EPYC": Wisdom([entry(9.0)]), "NVIDIA H200": Wisdom([entry(5.0), entry(1.0, 1000)])})
    path = tmp_path / "damaged.json"
    path.write_text(damage(whole))
    good = file_of(tmp_path, "good.json", entry(1.0))
    for arguments in (["import", str(path)], ["merge", good, str(path), "-o", good], ["diff", good, str(path)]):
        assert mistake(*arguments).startswith(f"{path}: {message}")
    assert Path(good).read_text() == dump("NVIDIA H200", Wisdom([entry(1.0)]))
    assert [each.name for each in folders[1].iterdir()] == ["nvidia-h200.json"]


def test_what_is_damaged_here_is_refused_and_stays(folders: tuple[Path, Path], tmp_path: Path) -> None:
    own = folders[1] / "nvidia-h200.json"
    own.write_text(own.read_text().replace('"simt"', '"magic"'))
    before = own.read_bytes()
    offered = file_of(tmp_path, "theirs.json", entry(4.0))
    for arguments in (["show"], ["export"], ["import", offered]):
        assert mistake(*arguments).startswith(f"{own}: entry 1: unknown kernel family 'magic'; known: ")
    assert own.read_bytes() == before


def test_mistakes_name_the_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    good = file_of(tmp_path, "good.json", entry(1.0))
    assert mistake("import", "/no/such") == "/no/such: cannot be read (No such file or directory)"
    assert mistake("diff", good, str(tmp_path)) == f"{tmp_path}: cannot be read (Is a directory)"
    (tmp_path / "binary").write_bytes(b"\xe8\x00")
    assert mistake("import", str(tmp_path / "binary")) == f"{tmp_path}/binary: cannot be read (it is not text in UTF-8)"
    assert mistake("merge", good, good, "-o", "/no/such") == "/no/such: cannot be written (No such file or directory)"
    assert mistake("show", "--device", "[b]") == "--device '[b]': this machine's wisdom has NVIDIA H200"
    stray = folders[1] / "mine.json"
    stray.write_text(Path(good).read_text())
    assert mistake("show") == f"{stray} is for NVIDIA H200, which launchers read from nvidia-h200.json; rename it"


def test_show_says_that_wisdom_is_a_first_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        device = find_device("opencl")
    except DeviceError as absent:
        pytest.skip(str(absent))
    guess = replace(entry(1.0, template=PAST), constants=SimtConstants(32, 8, 8, 1, 4, 2, 2, 1, "registers"))
    (tmp_path / wisdom.file_name(device.name)).write_text(dump(device.name, Wisdom([guess])))
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    monkeypatch.setattr(PLANNER, "_wisdom", {})
    arguments = ["show", "1,64,48,2", "--batch", "64", "--json"]
    (known,) = json.loads(CliRunner().invoke(cli, [*arguments, "--device", "opencl"]).stdout)["patterns"]
    assert known["constants"] == asdict(guess.constants)
    assert known["chosen_by"] == "wisdom of another template version, a first guess: tune again; measured at batch 64"
    (portable,) = json.loads(CliRunner().invoke(cli, arguments).stdout)["patterns"]
    assert portable["chosen_by"] == "the family's default for sm_80"


def test_an_unreliable_time_is_marked_with_its_reason(folders: tuple[Path, Path], tmp_path: Path) -> None:
    sound = entry(8.0, 2000)
    unreliable = replace(sound, measured={**sound.measured, "note": "clocks moved"})
    first, second = file_of(tmp_path, "first.json", sound), file_of(tmp_path, "second.json", unreliable)
    run("import", second)
    lines = said("show", "--device", "H200").splitlines()
    at = next(number for number, line in enumerate(lines) if "batch 2000" in line)
    assert lines[at].endswith("      8.0 us?")
    assert lines[at + 1] == "    ? its time is unreliable: clocks moved"
    assert [row["doubt"] for row in json.loads(said("show", "--json")) if row["batch"] == 2000] == ["clocks moved"]
    assert said("diff", first, second).splitlines()[0].endswith(": same constants, 8.0 us and 8.0 us?")
    assert said("import", first) == "NVIDIA H200: 0 new, 1 better, 0 not better than what is known here\n"
