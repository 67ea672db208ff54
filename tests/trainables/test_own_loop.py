"""A loop of one's own: it learns what the plain script learns, is counted and ended like ours, and errs by name."""

from __future__ import annotations

import difflib
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data import plain_script
from tests.fakes import heard
from trainables import checkpoint, own_count, own_loop, training
from trainables.evaluation import Evaluation
from trainables.knobs import Knobs
from trainables.own_count import OwnState
from trainables.own_run import Run
from trainables.plan import Plan
from trainables.reports import READY, Event
from trainables.state import Diverged
from trainables.stopwatch import Window
from trainables.workload import Config, OwnLoop, WorkloadError, table_of
from trainables.workload_files import epochs_of, load, load_own_loop

DATA = Path(__file__).parents[1] / "data"
SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1))
SPACE = {"learning_rate": [0.1, 0.01], "batch_size": [8, 16]}
OBJECTIVES = {"error": "min"}
SEEN = []

def made(run):
    return run.prepare(net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=run["learning_rate"]))

def loss_of(net, batch):
    return (net(batch[0]).squeeze(1) - batch[1]).square().mean()
"""
BACKWARD, NET = "run.backward(loss_of(net, batch), optimizer)", "net, optimizer = made(run)"
WHOLE = 'DataLoader(DATA, batch_size=run["batch_size"])'


def loop(
    lines: str, first: str = "", *, net: str = NET, data: str = "DataLoader(DATA, **run.loader())", head: str = ""
) -> str:
    """A custom loop: `head` of the module, `net` and `first` of the function, and `lines` for each batch."""
    return f"""{head}
def train(run):
    {net}
    {first}
    for batch in run.batches({data}):
        {lines}
        if run.evaluate_now:
            run.report(error=1.0)
"""


PLAIN = """
def train(run):
    loader = DataLoader(DATA, shuffle=True, **run.loader())
    net, optimizer = made(run)
    try:
        for batch in run.batches(loader):
            loss = loss_of(net, batch)
            run.backward(loss, optimizer)
            if run.evaluate_now:
                run.report(error=loss.item())
    finally:
        SEEN.append("left")
"""


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    def write(body: str, head: str = HEAD) -> OwnLoop:
        path = tmp_path / f"script_{abs(hash((body, request.node.name)))}.py"
        path.write_text(head + body)
        found = load(str(path))
        assert isinstance(found, OwnLoop)
        return found

    return write


def prepared(workload: OwnLoop, plan: Plan, **knobs: Any) -> OwnState:
    own = {"batch_size": 16, "micro_batch_size": 8, "learning_rate": 0.1, **knobs}
    config = Config(Knobs.of(own, table_of(workload)), dict(workload.options))
    return own_loop.prepare(own_loop.OwnResident(workload), config, plan)


def events(workload: OwnLoop, plan: Plan, **knobs: Any) -> list[Window | Evaluation]:
    return heard(prepared(workload, plan, **knobs))


def test_it_learns_what_the_plain_script_learns(capsys: pytest.CaptureFixture[str]) -> None:
    workload = load(str(DATA / "plain_loop.py"))
    assert isinstance(workload, OwnLoop)
    own_loop.seed_everything(0)
    plain_script.train()
    expected = [float(line) for line in capsys.readouterr().out.split()]
    plan = Plan(3 * 1024, (1024, 2048, 3072))
    knobs = {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 32, "micro_batch_size": 32}
    found = [e.values["accuracy"] for e in events(workload, plan, **knobs) if isinstance(e, Evaluation)]
    assert found == expected


def new_lines(plain: str, own: str) -> list[str]:
    """The lines of `own` above SPACE that the plain script has nowhere, docstrings left out."""
    ours, theirs = own.split("\nSPACE")[0].splitlines(), plain.split('\nif __name__ == "__main__"')[0].splitlines()
    known = {"", *(line.strip() for line in theirs)}
    added = [line[2:].strip() for line in difflib.ndiff(theirs, ours) if line.startswith("+ ")]
    return [line for line in added if line not in known and not line.startswith('"""')]


def test_eight_lines_of_the_script_are_new() -> None:
    plain, own = ((SCRIPTS / f"unet_{name}.py").read_text() for name in ("script", "loop"))
    assert len(new_lines(plain, own)) == 8


def scheduled(name: str, more: str = "") -> str:
    first = f"scheduler = torch.optim.lr_scheduler.{name}; run.prepare(net, optimizer, scheduler)"
    net = "net = nn.Linear(4, 1)\n    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)"
    return loop(f"SEEN.append(optimizer.param_groups[0]['lr'])\n        {BACKWARD}{more}", first, net=net)


HALVING = "StepLR(optimizer, 1, gamma=0.5)"


def test_a_scheduler_that_is_shown_steps_behind_each_step_of_its_optimiser(script: Any) -> None:
    workload = script(scheduled(HALVING))
    events(workload, Plan(48, (48,)))
    assert workload.train.__globals__["SEEN"] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25], "two micro-batches a step"


def test_a_scheduler_that_their_own_lines_step_too_is_an_error(script: Any) -> None:
    said = r"shown the StepLR, so that run\.backward steps it, and so do lines of your"
    with pytest.raises(WorkloadError, match=said):
        events(script(scheduled(HALVING, "; scheduler.step()")), Plan(96, (96,)), micro_batch_size=16)


def test_a_scheduler_that_waits_for_a_metric_is_refused(script: Any) -> None:
    with pytest.raises(WorkloadError, match=r"ReduceLROnPlateau.*step it yourself"):
        events(script(scheduled("ReduceLROnPlateau(optimizer)")), Plan(48, (48,)))


def test_windows_hold_every_sample_and_the_first_is_one_step(script: Any) -> None:
    found = events(script(PLAIN), Plan(256, (64, 256), window_s=0.0, each_step=True))
    windows = [e for e in found if isinstance(e, Window)]
    assert sum(w.samples for w in windows) == 256
    assert (windows[0].steps, windows[0].micro_steps, windows[0].samples) == (1, 2, 16)
    assert all(len(w.micro_steps_s) == w.micro_steps and len(w.optimizer_steps_s) == w.steps for w in windows)
    assert [e.samples for e in found if isinstance(e, Evaluation)] == [64, 256]
    parts = (sum((w.data_wait_s, w.transfer_s, w.forward_backward_s, w.optimizer_s)) for w in windows)
    assert all(0 < part <= w.wall_s * 1.001 for part, w in zip(parts, windows, strict=True))


BROAD = """
def train(run):
    net, optimizer = made(run)
    while not SEEN or SEEN[-1] != "left":
        try:
            for batch in run.batches(DataLoader(DATA, **run.loader())):
                run.backward(loss_of(net, batch), optimizer)
                if run.evaluate_now:
                    torch.set_grad_enabled(False)
                    run.report(error=0.0)
                    torch.set_grad_enabled(True)
        except BaseException as error:
            SEEN.append(type(error).__name__)
            if len(SEEN) == 3:
                SEEN.append("left")
    raise ValueError("it ends in another way")
"""


@pytest.mark.parametrize(("body", "seen"), [(PLAIN, ["left"]), (BROAD, ["Ended", *["RuntimeError"] * 2, "left"])])
def test_ending_it_leaves_their_function(script: Any, body: str, seen: list[str]) -> None:
    workload = script(body)
    state = prepared(workload, Plan(10**9, (32,), window_s=0.0))
    *_, last = heard(state, lambda event: isinstance(event, Evaluation))
    assert isinstance(last, Evaluation)
    assert workload.train.__globals__["SEEN"] == seen
    assert torch.is_grad_enabled(), "whatever they had turned off"


def test_what_hearing_it_raises_is_raised_once_their_function_is_left(script: Any) -> None:
    def fails(event: Event) -> None:
        if isinstance(event, Evaluation):
            raise KeyError("a fault of ours")

    workload = script(
        PLAIN.replace("    finally:", "    except Exception:\n        SEEN.append('caught')\n    finally:")
    )
    with pytest.raises(KeyError, match="a fault of ours"):
        own_loop.train(prepared(workload, Plan(10**9, (32,))), fails)
    assert workload.train.__globals__["SEEN"] == ["left"]


COMPILED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, values):
        return self.linear(values).squeeze(1)

def noted(name):
    def backend(graph, inputs):
        SEEN.append(name)
        return graph.forward
    return backend

@torch.compile(backend=noted("loss"))
def error_of(predicted, target):
    return (predicted - target).square().mean()

@torch.compile(backend=noted("evaluation"))
def judged(predicted, target):
    return (predicted - target).abs().mean()

def train(run):
    net = torch.compile(Net(), backend=noted("model"))
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=run["learning_rate"]))
    for batch in run.batches(DataLoader(DATA, **run.loader())):
        run.backward(error_of(net(batch[0]), batch[1]), optimizer)
        if run.evaluate_now:
            with torch.no_grad():
                run.report(error=judged(net(X), X.sum(1)).item())
"""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_what_they_compile_themselves_runs_compiled_once_nothing_is_counted(script: Any) -> None:
    workload = script(COMPILED)
    events(workload, Plan(160, (16, 160), cap_bytes=1 << 40))
    assert set(workload.train.__globals__["SEEN"]) == {"loss", "evaluation", "model"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_what_they_compile_themselves_is_compiled_in_every_training(script: Any) -> None:
    workload, made = script(COMPILED), []
    with torch._dynamo.config.patch(recompile_limit=2):  # torch gives up after eight
        for _ in range(3):
            workload.train.__globals__["SEEN"].clear()
            events(workload, Plan(48, (48,)))
            made.append(sorted(workload.train.__globals__["SEEN"]))
    assert made[0] == made[-1]
    assert set(made[-1]) == {"loss", "evaluation", "model"}


LAID_OUT = """
def train(run):
    net = nn.Conv2d(4, 4, 3, padding=1)
    if run.options["last"]:
        net = net.to(memory_format=torch.channels_last)
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    SEEN.append(net.weight.is_contiguous(memory_format=torch.channels_last))
    for x, _ in run.batches(DataLoader(DATA, batch_size=8)):
        run.backward(net(x.view(-1, 4, 1, 1)).sum(), optimizer)
        if run.evaluate_now:
            run.report(error=1.0)
"""


@pytest.mark.parametrize(("theirs", "knob"), [(True, False), (True, True), (False, True), (False, False)])
def test_a_layout_of_their_own_holds_where_the_knob_is_off(script: Any, theirs: bool, knob: bool) -> None:
    workload = script(LAID_OUT, HEAD + f"OPTIONS = {{'last': {theirs}}}\n")
    assert events(workload, Plan(8, (8,)), channels_last=knob)
    assert workload.train.__globals__["SEEN"] == [theirs or knob]


def test_a_model_that_a_script_keeps_is_laid_out_as_it_was_behind_a_training(script: Any) -> None:
    kept = LAID_OUT.replace("    net = nn.Conv2d", "    net = KEPT.setdefault(0, nn.Conv2d").replace(
        "padding=1)", "padding=1))"
    )
    workload = script(kept, HEAD + "KEPT = {}\nOPTIONS = {'last': False}\n")
    for knob in (False, True, False):
        assert events(workload, Plan(8, (8,)), channels_last=knob)
    assert workload.train.__globals__["SEEN"] == [False, True, False]


def test_frozen_weights_that_a_loop_writes_are_among_what_was_trained(script: Any) -> None:
    frozen = "[net.register_module(n, nn.Linear(4, 1).requires_grad_(False)) for n in ('teacher', 'still')]"
    body = loop(f"{BACKWARD}; net.teacher.weight.data.lerp_(net.weight.data, 0.1)", frozen)
    state = prepared(script(body), Plan(64, (64,)))
    own_loop.train(state)
    assert state.model is not None
    assert set(checkpoint.trained_tensors(state.model, state.marks)) == {"weight", "bias", "teacher.weight"}


PASSES = """
def train(run):
    loader = DataLoader(DATA, **run.loader())
    net, optimizer = made(run)
    for epoch in run.epochs():
        for batch in run.batches(loader):
            run.backward(loss_of(net, batch), optimizer)
        SEEN.append(epoch)
        run.report(error=1.0)
"""


def test_a_loop_over_passes_reports_after_each(script: Any) -> None:
    workload = script(PASSES)
    found = events(workload, Plan(192, (32, 192)))
    assert [e.samples for e in found if isinstance(e, Evaluation)] == [64, 192], "at the first report that is due"
    assert workload.train.__globals__["SEEN"] == [0, 1, 2]


def test_a_report_in_the_pause_between_passes_loses_nothing(script: Any) -> None:
    body = """
def train(run):
    loader = DataLoader(DATA, **run.loader())
    net, optimizer = made(run)
    for epoch in run.epochs():
        for batch in run.batches(loader):
            loss = loss_of(net, batch)
            run.backward(loss, optimizer)
            SEEN.append((len(batch[0]), loss.item()))
        if run.evaluate_now:
            run.report(error=1.0)
"""
    workload = script(body)
    windows = [e for e in events(workload, Plan(64 * 4, (32, 96, 256))) if isinstance(e, Window)]
    seen = workload.train.__globals__["SEEN"]
    assert sum(w.samples for w in windows) == 64 * 4 == sum(count for count, _ in seen)
    assert sum(w.loss * w.samples for w in windows) == pytest.approx(sum(n * loss for n, loss in seen), rel=1e-5)


def test_windows_span_short_passes_without_what_is_between_them(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, ticks = script(PASSES), itertools.count()
    passes = workload.train.__globals__["SEEN"]
    clock = lambda: 100.0 * len(passes) + 1e-6 * next(ticks)  # noqa: E731
    state = prepared(workload, Plan(64 * 8, (64 * 8,), window_s=250.0, each_step=True))
    monkeypatch.setattr("time.perf_counter", clock)
    windows = [e for e in heard(state) if isinstance(e, Window)]
    monkeypatch.undo()
    assert [w.steps for w in windows] == [1, 4 * 4 - 1, 3 * 4, 4], "three pauses between passes take 300 s"
    assert all(w.wall_s < 1.0 > w.data_wait_s + sum(w.micro_steps_s) for w in windows)
    assert sum(w.samples for w in windows) == 64 * 8


def test_passes_that_are_broken_off_are_counted_and_timed_like_others(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = PASSES.replace("optimizer)\n", "optimizer)\n            if run.ends_batch:\n                break\n")
    workload, ticks = script(body), itertools.count()
    passes = workload.train.__globals__["SEEN"]
    clock = lambda: 100.0 * len(passes) + 1e-6 * next(ticks)  # noqa: E731
    state = prepared(workload, Plan(16 * 8, (16 * 8,), window_s=3e-5))
    monkeypatch.setattr("time.perf_counter", clock)
    windows = [e for e in heard(state) if isinstance(e, Window)]
    monkeypatch.undo()
    assert passes == list(range(8))
    assert len(windows) > 1, "each pass is shorter than a window"
    assert sum(w.samples for w in windows) == 16 * 8
    assert all(w.wall_s < 1.0 for w in windows), "what is between passes is in none"


def test_stopping_early_comes_to_the_last_report_though_a_rung_was_passed_since(script: Any) -> None:
    body = PASSES.replace(
        "run.report(error=1.0)", "if epoch == 2:\n            break\n        run.report(error=9.0 - epoch)"
    )
    *_, last = events(script(body), Plan(64 * 8, (64 * 2 + 32, 64 * 8)))
    assert isinstance(last, Evaluation)
    assert (last.samples, last.values) == (192, {"error": 8.0})


@pytest.mark.parametrize(("faults", "is_kept"), [(10**9, True), (1, False)])
def test_freed_memory_is_kept_where_steps_fault_it_in_anew(
    script: Any, monkeypatch: pytest.MonkeyPatch, faults: int, is_kept: bool
) -> None:
    seen, kept = 0, set[int]()
    monkeypatch.setattr(training, "page_faults", itertools.count(0, faults).__next__)
    monkeypatch.setattr(training, "keep_freed", lambda: kept.add(seen))

    def hear(event: Event) -> None:
        nonlocal seen
        seen += event != READY

    training.train(prepared(script(PLAIN), Plan(64, (64,), window_s=0.0)), hear)
    assert bool(kept) is is_kept
    assert 0 not in kept, "the first step takes memory in any case"


ENDLESS = """
def train(run):
    net, optimizer = made(run)
    while True:
        for batch in run.batches(DataLoader(DATA, batch_size=8)):
            run.backward(loss_of(net, batch), optimizer)
            if run.evaluate_now:
                run.report(error=1.0)
"""


def test_a_loop_that_goes_on_for_ever_is_ended(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_count, "NO_END_AFTER", 100)
    assert [e.samples for e in events(script(ENDLESS), Plan(64, (64,))) if isinstance(e, Evaluation)] == [64]
    with pytest.raises(WorkloadError, match="after the end of the run, while a report is due"):
        events(script(ENDLESS.replace("run.report(error=1.0)", "pass")), Plan(64, (64,)))


def steps_of(workload: OwnLoop, *changes: dict[str, Any]) -> list[int]:
    """Returns the steps of trainings one after the other, each with these knobs changed."""
    resident, steps = own_loop.OwnResident(workload), []
    for change in changes:
        own = {"batch_size": 16, "micro_batch_size": 8, "learning_rate": 0.1, **change}
        state = own_loop.prepare(resident, Config(Knobs.of(own, table_of(workload)), {}), Plan(64, (64,)))
        assert heard(state)
        steps.append(state.steps)
    return steps


def test_what_one_training_asks_for_changes_no_step_of_the_next(script: Any) -> None:
    body = loop(BACKWARD, data=f'{WHOLE} if run["whole"] else DataLoader(DATA, **run.loader())')
    workload = script(body, HEAD.replace("[8, 16]}", '[8, 16], "whole": [False, True]}'))
    assert steps_of(workload, *({"whole": whole} for whole in (True, False, True))) == [4, 4, 4]


def test_a_loader_that_an_earlier_training_made_still_has_micro_batches(script: Any) -> None:
    kept = "LOADERS or LOADERS.append(DataLoader(DATA, **run.loader()))"
    assert steps_of(script(loop(BACKWARD, kept, data="LOADERS[0]", head="LOADERS = []\n")), {}, {}) == [4, 4]


STEPLESS = "    for batch in run.batches(DataLoader(DATA, batch_size=8)):\n        pass\n"
BATCHES = "    net, optimizer = made(run)\n    for batch in run.batches(DataLoader(DATA, batch_size=8)):\n"
BACK = BATCHES + "        run.backward(loss_of(net, batch), optimizer)\n"


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (STEPLESS, WorkloadError, "without an optimiser step: run.backward"),
        (BACK, WorkloadError, r"without a report at its end: if run.evaluate_now: run.report\(error=...\)"),
        (
            BACK + "        break\n",
            WorkloadError,
            r"returned after 8 of 64 samples, without a report: .* run.report\(error=",
        ),
        (BACK + "        run.report(accuracy=1.0)\n", WorkloadError, r"\['accuracy'\], without error of OBJECTIVES"),
        (BACK + "        run.report(error=float('nan'))\n", Diverged, "error is nan after 8 samples"),
        (BATCHES + "        run.backward(loss_of(net, batch) * float('nan'))\n", Diverged, "loss is nan"),
        (BACK + "        raise SystemExit(1)\n", WorkloadError, "SystemExit"),
        ("    pass\n", WorkloadError, r"without asking for run.batches\(loader\)"),
        ("    run['momentun']\n", WorkloadError, r"run\['momentun'\]: there is no such knob"),
        ("    run['lr']\n", WorkloadError, r"there is no such knob: did you mean run\['learning_rate'\]"),
    ],
)
def test_what_a_loop_gets_wrong_is_said(script: Any, body: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        events(script("\ndef train(run):\n" + body), Plan(64, (64,)))


PATIENT = PASSES.replace(
    "        run.report(error=1.0)\n",
    "        run.report(error=9.0 - epoch)\n        if epoch == 2:\n            break\n",
)


def test_an_own_knob_is_a_row_with_the_kind_it_gives() -> None:
    space = {
        "momentum": [0.0, 0.9],
        "width": {"values": [8, 16], "kind": "both"},
        "decay": {"low": 0.1, "high": 0.9},
        "mode": ["a", "b"],
        "flag": [False, True],
        "layers": {"low": 1, "high": 4},
        "fused_optimizer": [False, True],
        "batch_size": 16,
    }
    before = {"momentum": 0.5, "warmup": 0.1, "name": "c"}  # the last two are not searched
    module = {"train": print, "OBJECTIVES": {"error": "min"}, "BEFORE": before, "SPACE": space}
    found = load_own_loop("mine.py", SimpleNamespace(**module, __file__="mine.py"))
    rows = table_of(found)
    assert {n: (rows[n].kind, rows[n].default) for n in found.knobs} == {
        "momentum": ("learning", 0.5),
        "width": ("both", 8),
        "decay": ("learning", 0.5),
        "mode": ("learning", "a"),
        "flag": ("learning", False),
        "layers": ("learning", 2),
        "fused_optimizer": ("system", False),
        "warmup": ("learning", 0.1),
        "name": ("learning", "c"),
    }
    assert (rows["fused_optimizer"].span, rows["fused_optimizer"].memory) == ("optimizer", "minor")
    assert found.default_space["warmup"] == [0.1]
    assert found.default_space["width"] == [8, 16]
    assert found.default_space["micro_batch_size"] == 16


def test_a_train_of_a_plain_script_is_not_taken_for_that_of_a_loop(tmp_path: Path) -> None:
    for given in ("()", "(args, model, epoch)"):
        path = tmp_path / f"plain_{len(given)}.py"
        path.write_text(f"def train{given}:\n    pass\n")
        with pytest.raises(WorkloadError, match=re.escape(f"has a train{given}, and needs a train(run)")):
            load(str(path))


LEAST = "SPACE = {'batch_size': [8]}\nOBJECTIVES = {'error': 'min'}"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("OBJECTIVES = {'error': 'min'}", "no SPACE"),
        ("SPACE = {'batch_size': [8]}", "no OBJECTIVES"),
        ("SPACE = {'batch_size': [8]}\nOBJECTIVES = {'error': 'least'}", "'min' or 'max'"),
        *(
            (f"{LEAST}\nEPOCHS = {bad}", f"EPOCHS must be .* above 0.*got {bad}")
            for bad in ("'6'", "0", "-1.5", "True", "inf")
        ),
        ("SPACE = {'a': {'high': 3}}\nOBJECTIVES = {'error': 'min'}", "give a list of values, or low and high"),
        ("SPACE = {'a': {'values': [1], 'kind': 'odd'}}\nOBJECTIVES = {'error': 'min'}", "kind is 'odd'; allowed"),
        ("SPACE = {'a b': [1, 2]}\nOBJECTIVES = {'error': 'min'}", "give it another name"),
    ],
)
def test_a_file_that_lacks_something_says_what(tmp_path: Path, lines: str, says: str) -> None:
    path = tmp_path / f"lacking_{abs(hash(lines))}.py"
    path.write_text(f"from math import inf\n\ndef train(run):\n    pass\n{lines}\n")
    with pytest.raises(WorkloadError, match=says):
        load(str(path))


@pytest.mark.parametrize("epochs", ["np.int64(3)", "np.float32(3)", "3"])
def test_epochs_may_be_any_number_above_0(tmp_path: Path, epochs: str) -> None:
    path = tmp_path / f"epochs_{len(epochs)}.py"
    path.write_text(f"import numpy as np\n\ndef train(run):\n    pass\n{LEAST}\nEPOCHS = {epochs}\n")
    load(str(path))
    assert epochs_of(str(path)) == 3.0


def test_tensors_are_made_where_the_file_has_said(script: Any) -> None:
    workload = script("def train(run):\n    SEEN.append(torch.arange(3).device.type)\n")
    with torch.device("meta"), pytest.raises(WorkloadError, match="without asking for"):
        events(workload, Plan(64, (64,)))
    assert workload.train.__globals__["SEEN"] == ["meta"]


def test_what_fails_when_a_run_lets_go_is_raised_and_nobody_waits(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run) -> None:
        raise RuntimeError("cannot let go")

    monkeypatch.setattr(Run, "let_go", fails)
    with pytest.raises(RuntimeError, match="cannot let go"):
        events(script(PLAIN), Plan(64, (64,)))
