"""Calls whose kernels are missing: PyTorch's products serve, the background compiles, and later calls use the
kernels.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.build import background, children  # noqa: E402
from ksgen.build.background import PendingError  # noqa: E402
from ksgen.errors import ToolchainError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators import choice, meanwhile, prepared, replay, trained  # noqa: E402
from tests.support.gated import run_gated  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes of POSIX")


def passes(folder: Path, program: str, **options: Any) -> None:
    """The program ends well, and says nothing."""
    ended = run_gated(folder, program, **options)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_products_of_pytorch_serve_until_kernels_are_compiled(tmp_path: Path) -> None:
    """A layer of two factors: values, then both gradients, then the frozen layer."""
    passes(
        tmp_path,
        """
        layer, x = KSLinear(["1,6,4,2", "2,3,6,1"]), torch.randn(5, 8)
        copy = KSLinear.from_weights(list(layer.weights), layer.bias, backend="strided")

        from ksgen.torch.operators import frozen as state, prepared, trained

        def is_prepared(call):
            # whether the calls of a kind have found their fastest way
            kept = {values: prepared._calls, step: trained._steps}
            own = kept[call] if call in kept else state._frozen[id(layer)].calls
            found = [each for key, each in own.items() if "strided" not in str(key)]  # without those of the copy
            return found and not any(isinstance(each, prepared.Unprepared) for each in found)

        def values():
            with torch.no_grad():
                return [layer(x)]

        def step():
            return [layer(x), *torch.autograd.grad(layer(x).sum(), list(layer.parameters()))]

        def frozen():
            return values()

        for call in (values, step, frozen):
            if call is frozen:
                layer.eval().freeze()
            with torch.no_grad():
                wanted = [copy(x)]
            if call is step:
                wanted += torch.autograd.grad(copy(x).sum(), list(copy.parameters()))
            (folder / "gate").unlink(missing_ok=True)
            for _ in range(4):
                assert all(map(torch.allclose, call(), wanted))
            if call is values:
                until(lambda: call() and started())
                assert not launched and choice._measured == {}
            open_gate()

            def is_settled():
                assert all(map(torch.allclose, call(), wanted))
                return is_prepared(call) and not background.unfinished()

            until(is_settled)
            call()
            assert not background.unfinished()
        assert {"__call__", "gradient"} <= set(launched)
        """,
    )


def test_threads_and_layers_share_one_compilation(tmp_path: Path) -> None:
    passes(
        tmp_path,
        """
        layers, x = [KSLinear("2,3,4,1", bias=False) for _ in range(2)], torch.randn(4, 8)

        def call(layer):
            with torch.no_grad():
                return layer(x)

        def settle(layer):
            until(lambda: call(layer) is not None and choice._measured)

        threads = [threading.Thread(target=call, args=(layer,)) for layer in layers * 2]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        open_gate()
        threads = [threading.Thread(target=settle, args=(layer,)) for layer in layers]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert started() == 2, started()  # the kernel, and the function that shares work out
        """,
    )


def test_a_compiler_that_fails_is_warned_of_once(tmp_path: Path) -> None:
    ended = run_gated(
        tmp_path,
        """
        layer, x = KSLinear(["1,6,4,2", "2,3,6,1"], bias=False), torch.randn(5, 8)
        wanted = KSLinear.from_weights(list(layer.weights), backend="strided")(x)
        open_gate()

        asked = [-1] * 5

        def is_settled():
            assert torch.allclose(layer(x), wanted)
            with torch.no_grad():
                assert torch.allclose(layer(x), wanted)
            asked.append(started())
            return choice._measured and not background.unfinished() and asked[-1] == asked[-5]

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            until(is_settled)
            for _ in range(20):
                is_settled()
        assert not launched
        assert asked[-1] == asked[-20] <= 10, asked  # no kernel is requested again
        words = [str(each.message).splitlines()[0] for each in told if "no kernel is available" in str(each.message)]
        assert len(words) == len(set(words)) and all("refused it" in each for each in words), words
        print(len(words))
        """,
        action="echo 'error: no such machine'; exit 1",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) >= 1


def test_a_build_ends_though_the_compiler_fails(tmp_path: Path) -> None:
    ended = run_gated(
        tmp_path,
        """
        from ksgen.torch import build

        layer, x = KSLinear(["2,6,4,1", "1,4,6,2"], bias=False), torch.randn(7, 8)
        open_gate()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            build(layer, x)
            asked = started()
            with torch.no_grad():
                layer(x)
        assert not launched and asked == started() <= 10
        assert any("no kernel is available" in str(each.message) for each in told)
        """,
        action="echo 'error: no such machine'; exit 1",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_process_ends_while_compilers_run(tmp_path: Path) -> None:
    """At once, without a word, and its compilers end with it."""
    passes(
        tmp_path,
        """
        layer, x = KSLinear("2,3,4,1"), torch.randn(4, 8)
        until(lambda: layer(x) is not None and started())
        """,
    )
    for process in (tmp_path / "started").read_text().split():
        assert not Path("/proc", process).exists()


def test_a_forked_child_compiles_by_itself(tmp_path: Path) -> None:
    """It has none of its parent's threads, and leaves its parent's compilers alone."""
    passes(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
        torch.set_num_threads(1)
        layer, x = KSLinear("2,3,4,1", bias=False), torch.randn(4, 8)
        wanted = KSLinear.from_weights(list(layer.weights), backend="strided")(x)

        def call():
            with torch.no_grad():
                return torch.allclose(layer(x), wanted)

        until(lambda: call() and started())
        child = os.fork()
        if not child:
            assert call() and not launched
            until(lambda: call() and background.unfinished())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        open_gate()
        until(lambda: call() and choice._measured)
        assert launched
        """,
    )


def test_products_that_pytorch_lacks_wait_and_report_it(tmp_path: Path) -> None:
    passes(
        tmp_path,
        """
        background.NOTICE_S = 0.1
        layer, x = KSLinear("2,3,4,1", bias=False).quantize("int8"), torch.randn(4, 8)
        told, places = [], []
        def note(message, place):
            told.append(message)
            places.append(place)
            open_gate()
        background.warn = note
        y = layer(x)
        assert torch.allclose(y, x @ layer.to_dense().T, atol=1e-5)
        name, _, rest = told.pop().partition(" has waited 0.1 s for ")
        assert name == "QuantizedKSLinear(2,3,4,1)", name
        assert rest.endswith(" to compile; layer.build(batch=...) compiles beforehand, in parallel"), rest
        assert rest.startswith("ks_2x3x4x1_float32_int8_bsf "), rest
        ((file, _),) = places
        assert file == "<string>", file
        assert not told and not threading.active_count() > 2
        """,
    )


def test_a_compute_mode_that_pytorch_lacks_warns_after_two_seconds(tmp_path: Path) -> None:
    passes(
        tmp_path,
        """
        layer, x = KSLinear("2,3,4,1", bias=False, precision="tf32x3"), torch.randn(4, 8)
        told = []
        def note(message, place):
            told.append((time.monotonic() - begin, message))
            open_gate()
        background.warn = note
        begin = time.monotonic()
        with torch.no_grad():
            assert torch.allclose(layer(x), x @ layer.to_dense().T, atol=1e-5)
        ((seconds, message),) = told
        assert seconds >= 2, seconds
        assert message.startswith("KSLinear(2,3,4,1) has waited 2 s for ks_2x3x4x1_tf32x3_bsf"), message
        assert message.endswith(" to compile; layer.build(batch=...) compiles beforehand, in parallel"), message
        """,
    )


WAITS = """
def opens_once_started():
    until(started)
    open_gate()

threading.Thread(target=opens_once_started, daemon=True).start()
layer, x = KSLinear("2,3,4,1", bias=False, backend="auto").requires_grad_(False), torch.randn(4, 8)
"""


def test_exported_programs_wait_for_their_kernels(tmp_path: Path) -> None:
    """Under the default of KSGEN_COMPILE."""
    passes(
        tmp_path,
        f"""{WAITS}
program = torch.export.export(layer, (x,)).module()
assert not started()
ys = [program(x) for _ in range(5)]
assert launched
assert all(torch.equal(each, ys[0]) for each in ys)
assert torch.allclose(ys[0], x @ layer.to_dense().T, atol=1e-5)
        """,
        KSGEN_COMPILE="background",
    )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch has no torch.distributed here")
def test_processes_of_a_group_wait_for_their_kernels(tmp_path: Path) -> None:
    """The first call of each one has run kernels. Alone, a process of a group does not wait."""
    program = f"""{WAITS}
from torch import distributed
rank, count = int(sys.argv[1][-1]), int(os.environ["COUNT"])
distributed.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=count)
first = [None] * count
layer(x)
distributed.all_gather_object(first, len(launched))
distributed.destroy_process_group()
assert all(first) == (count > 1), first
"""

    def run(count: int, rank: int) -> None:
        folder = tmp_path / f"{count}{rank}"
        folder.mkdir()
        passes(folder, program, KSGEN_COMPILE="background", COUNT=str(count), MEET=f"file://{tmp_path}/meet{count}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, (2, 2, 1), (0, 1, 0)))


@pytest.mark.parametrize("training", [False, True])
def test_deterministic_algorithms_give_the_same_bits_from_the_first_call_on(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another method is fastest in the usual path."""
    monkeypatch.setattr(choice, "faster", lambda job, methods: "strided")
    for module in (prepared, trained):
        monkeypatch.setattr(module, "faster", lambda job, methods: "ksgen")
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setattr(trained, "_steps", {})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    torch.manual_seed(0)
    layer, x = KSLinear("1,64,96,1"), torch.randn(16, 96)
    with torch.set_grad_enabled(training):
        ys = [layer(x).detach() for _ in range(4)]
    assert all(torch.equal(each, ys[0]) for each in ys)
    (call,) = (trained._steps if training else prepared._calls).values()
    assert call.is_by_kernels


@pytest.mark.parametrize("why", ["deterministic", "environment", "processes", "operator"])
def test_when_calls_wait(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_COMPILE", "background")
    assert meanwhile.may_defer()
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif why == "environment":
        monkeypatch.setenv("KSGEN_COMPILE", "wait")
        token = meanwhile.building.set(True)
        assert meanwhile.may_change()  # no caller sees results of `build`
        meanwhile.building.reset(token)
    elif why == "processes":
        for name, found in (("is_available", True), ("is_initialized", True), ("get_world_size", 2)):
            monkeypatch.setattr(torch.distributed, name, lambda found=found: found)
    else:
        seen: list[bool] = []
        monkeypatch.setattr(
            choice, "run_chosen", lambda own, x, *_, **__: seen.append(meanwhile.may_defer()) or x.new_empty(1, 6)
        )
        torch.ops.ksgen.multiply(
            torch.ones(1, 4), torch.ones(1, 3, 2, 2), None, None, "bsf", None, "none", False, "auto"
        )
        assert seen == [False]
        return
    assert not meanwhile.may_defer()


def test_the_environment_is_read_with_care(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_COMPILE", "never")
    with pytest.raises(ToolchainError, match=r"^KSGEN_COMPILE='never'; accepted: background \(the default\) or wait$"):
        meanwhile.may_defer()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a test moves it, and a full ration of timing."""
    now = [0.0]
    monkeypatch.setattr(meanwhile, "perf_counter", lambda: now[0])
    monkeypatch.setattr(meanwhile, "monotonic", lambda: now[0])
    monkeypatch.setattr(meanwhile, "is_busy", lambda: False)
    monkeypatch.setattr(meanwhile, "_ration", meanwhile._Ration())
    return now


def timed(at: list[float], seconds: float, runs: list[str], name: str, pending: list[bool] | None = None) -> Any:
    def run() -> Any:
        if pending and pending[0]:
            raise PendingError(name)
        at[0] += seconds
        runs.append(name)
        return name

    return run


def test_timing_adds_no_more_than_its_ration_to_a_call(at: list[float]) -> None:
    runs: list[str] = []
    ways = {"ksgen": timed(at, 0.004, runs, "ksgen"), "strided": timed(at, 0.005, runs, "strided")}
    trial, calls = meanwhile.MethodTrial(ways), 0
    while not trial.is_settled(meanwhile.MOST_ADDED_S):
        start, calls = at[0], calls + 1
        assert trial.compute(ways, "strided") == "strided"  # results change once: when the trial is settled
        assert at[0] - start <= 0.005 + 0.036
    assert 1 < calls < 10
    assert min(map(runs.count, ways)) >= meanwhile.ROUNDS
    assert trial.seconds == pytest.approx({"ksgen": 0.004, "strided": 0.005})


def test_preparing_counts_as_added_time_and_needs_a_full_ration(
    at: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's layers would otherwise prepare in vain in each call, if no time is left for timing."""
    monkeypatch.setenv("KSGEN_COMPILE", "background")
    layer, x, tries = KSLinear([(1, 8, 8, 1)]), torch.ones(1, 8), list[str]()
    states: dict[Any, Any] = {}

    def prepare() -> prepared.Unprepared:
        tries.append("tried")
        with meanwhile.preparing():  # what contains another expense counts once
            at[0] += 0.02
        return prepared.Unprepared()

    for wait, count in [(0.0, 0), (0.0, 1), (0.0, 1), (0.07, 1), (0.02, 2), (0.0, 2)]:
        at[0] += wait
        prepared.state_of(states, "shape", 9, layer, x, prepare)
        assert len(tries) == count, wait
    monkeypatch.setenv("KSGEN_COMPILE", "wait")
    prepared.state_of(states, "shape", 9, layer, x, prepare)
    assert len(tries) == 3


def test_a_short_run_is_timed_after_another_of_the_same_method(at: list[float]) -> None:
    """Right after another method's run, its data are in no cache, and threads of that method still spin."""
    runs: list[str] = []
    after_another = {"ksgen": 0.0009, "strided": 0.0001, "long": 0.0}

    def method(name: str, seconds: float) -> Any:
        def run() -> str:
            at[0] += seconds + after_another[name] * (runs[-1:] != [name])
            runs.append(name)
            return name

        return run

    ways = {"ksgen": method("ksgen", 0.001), "strided": method("strided", 0.0015), "long": method("long", 0.003)}
    trial = meanwhile.MethodTrial(ways)
    trial.run_all(ways)
    assert trial.seconds == pytest.approx({"ksgen": 0.001, "strided": 0.0015, "long": 0.003})
    assert runs[3:8] == ["ksgen", "ksgen", "strided", "strided", "long"]


def test_a_call_runs_its_method_once(at: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only runs that are timed apart from calls follow another one of the same method."""
    runs: list[str] = []
    ways = {"ksgen": timed(at, 0.0001, runs, "ksgen", [True]), "strided": timed(at, 0.0001, runs, "strided")}
    for busy in (True, False):
        monkeypatch.setattr(meanwhile, "is_busy", lambda busy=busy: busy)
        trial = meanwhile.MethodTrial(ways)
        for _ in range(3):
            trial._ran = "another"
            trial.compute(ways, "strided")
    assert runs == ["strided"] * 6


def test_a_pending_method_is_tried_again_after_each_finished_job(
    at: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's calls would otherwise plan each missing kernel again, which takes longer than its products."""
    tries, since = list[str](), [object()]

    def missing() -> Any:
        tries.append("ksgen")
        raise PendingError("ksgen")

    monkeypatch.setattr(meanwhile, "is_busy", lambda: True)
    for module in (meanwhile, prepared):
        monkeypatch.setattr(module, "progress", lambda: since[0])
        monkeypatch.setattr(module, "is_pending", lambda before: before is since[0])
    ways = {"ksgen": missing, "strided": timed(at, 0.001, [], "strided")}
    trial, seen = meanwhile.MethodTrial(ways), prepared.Unprepared()
    assert seen.is_due, "nothing was tried before"
    for count in (1, 2):
        seen = prepared.Unprepared(since[0])
        for _ in range(3):
            trial.compute(ways, "strided")
            assert len(tries) == count
            assert not seen.is_due
        since[0] = object()
        assert seen.is_due


def test_a_run_that_was_disturbed_is_repeated(at: list[float]) -> None:
    runs: list[str] = []
    ways = {"ksgen": timed(at, 0.004, runs, "ksgen"), "strided": timed(at, 0.005, runs, "strided")}
    trial = meanwhile.MethodTrial(ways)
    trial._last["ksgen"] = 0.2
    for _ in range(100):
        trial.compute(ways, "strided")
        at[0] += 1
    assert trial.is_settled()


def test_long_products_are_timed_as_they_serve(at: list[float]) -> None:
    runs: list[str] = []
    pending = [True]
    ways = {"ksgen": timed(at, 0.1, runs, "ksgen", pending), "strided": timed(at, 0.3, runs, "strided")}
    trial = meanwhile.MethodTrial(ways)
    assert [trial.compute(ways, "strided") for _ in range(3)] == ["strided"] * 3
    pending[0] = False
    assert [trial.compute(ways, "strided") for _ in range(2)] == ["ksgen"] * 2
    assert trial.is_settled(meanwhile.MOST_ADDED_S)
    assert runs == ["strided"] * 3 + ["ksgen"] * 2


@pytest.mark.parametrize("seconds", [0.001, 0.1])
def test_a_first_run_that_was_disturbed_decides_nothing(at: list[float], seconds: float) -> None:
    runs: list[str] = []
    first = [0.5]
    ways = {"ksgen": timed(at, seconds, runs, "ksgen"), "strided": timed(at, 2 * seconds, runs, "strided")}

    def disturbed() -> Any:
        at[0] += first.pop() if first else 0
        return ways["ksgen"]()

    trial = meanwhile.MethodTrial(ways)
    while not trial.is_settled(meanwhile.MOST_ADDED_S):
        trial.compute(ways | {"ksgen": disturbed}, "strided")
        at[0] += 1
    assert trial.seconds == pytest.approx({"ksgen": seconds, "strided": 2 * seconds})


def test_nothing_is_timed_while_the_background_is_busy(at: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    ways = {"ksgen": timed(at, 0.001, runs, "ksgen"), "strided": timed(at, 0.001, runs, "strided")}
    trial = meanwhile.MethodTrial(ways)
    monkeypatch.setattr(meanwhile, "is_busy", lambda: True)
    trial.compute(ways, "strided")
    assert trial.taken_us == {"ksgen": [], "strided": []}
    monkeypatch.setattr(meanwhile, "is_busy", lambda: False)
    while not trial.is_settled():
        trial.compute(ways, "strided")


@pytest.mark.parametrize("call", ["unfrozen", "frozen", "group", "step", "timed"])
def test_each_call_suspends_compilers(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared calls, both passes of a training step, and calls of the usual path whose methods are timed."""
    if call == "timed":
        monkeypatch.setattr(prepared, "may_prepare", lambda: False)
    monkeypatch.setattr(replay, "_extension", lambda *_, **__: None)
    layers: Any = [KSLinear([(1, 6, 4, 2), (2, 3, 6, 1)]).eval() for _ in range(2)]
    layer = KSLinear.group([each.freeze() for each in layers]) if call == "group" else layers[0]
    if call == "frozen":
        layer.freeze()
    x = torch.randn(7 if call == "timed" else 5, 8, requires_grad=call == "step")  # equal layers share prepared calls

    def run() -> None:
        with torch.set_grad_enabled(call == "step"):
            y = layer(x)
        if call == "step":
            y.sum().backward()

    for _ in range(4):
        run()
    entered = list[bool]()
    monkeypatch.setattr(children.Children, "are_running", property(lambda _: True))
    monkeypatch.setattr(background, "pause_compilers", lambda: nullcontext(entered.append(True)))
    run()
    assert len(entered) == (2 if call == "step" else 1)
