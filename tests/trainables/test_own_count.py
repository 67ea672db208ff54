"""How a loop of one's own is counted: samples of a batch and a pass, steps of a run, several optimisers, its end."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import heard
from tests.trainables import test_own_loop
from tests.trainables.test_own_loop import BACKWARD, HEAD, WHOLE, loop, prepared
from trainables import own_loop
from trainables.evaluation import Evaluation
from trainables.knobs import OF_THE_LOOP, Knobs
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.stopwatch import Window
from trainables.workload import Config, LoopError, WorkloadError, table_of

KNOBS = {"batch_size": 16, "micro_batch_size": 8, "learning_rate": 0.1}
script = test_own_loop.script


# -- several optimisers ---------------------------------------------------------------------------

BOTH = """maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.SGD(net.parameters(), run["learning_rate"]) for net in (maker, judge))
    run.prepare(nn.ModuleList([maker, judge]), of_maker, of_judge)"""
GAN = f"""
def train(run):
    {BOTH}
    SEEN.append((judge, maker))
    for number, (x, _) in enumerate(run.batches(DataLoader(DATA, **run.loader()))):
        made = maker(x)
        judged = judge(made.detach()).square().mean() + (judge(x) - 1).square().mean()
        scale = LARGE if number * len(x) < run["batch_size"] else 1.0
        stepped = run.backward(judged * scale, of_judge, max_norm=0.0)
        assert run.backward((judge(made) - 1).square().mean(), of_maker, max_norm=0.0) == stepped
        if run.evaluate_now:
            run.report(error=1.0)
"""


def plain_gan(x: torch.Tensor, micro: int, cuts: int, *, skips: bool) -> list[torch.Tensor]:
    """Returns the weights that the script above is to reach: each loss moves the weights of its own net alone."""
    own_loop.seed_everything(0)
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    sums = {net: [torch.zeros_like(p) for p in net.parameters()] for net in (judge, maker)}
    for number, part in enumerate(x.split(micro), 1):
        made = maker(part)
        for net in (judge, maker):
            if net is judge:
                loss = judge(made.detach()).square().mean() + (judge(part) - 1).square().mean()
            else:
                loss = (judge(made) - 1).square().mean()
            found = torch.autograd.grad(loss / cuts, list(net.parameters()))
            sums[net] = [s + g for s, g in zip(sums[net], found, strict=True)]
            if number % cuts:
                continue
            with torch.no_grad():
                for p, s in zip(net.parameters(), sums[net], strict=True):
                    p -= 0.0 if skips and net is judge and number == cuts else 0.1 * s
            sums[net] = [torch.zeros_like(p) for p in net.parameters()]
    return [*judge.parameters(), *maker.parameters()]


@pytest.mark.parametrize(
    ("micro", "amp_dtype", "large"),
    [(16, "fp32", 1.0), (4, "fp32", 1.0), (8, "fp16", 1e36)],  # the loss scale overflows at first
)
def test_each_of_two_optimisers_steps_by_its_own_loss(script: Any, micro: int, amp_dtype: str, large: float) -> None:
    workload = script(GAN.replace("LARGE", str(large)))
    state = prepared(workload, Plan(128, (128,)), micro_batch_size=micro, amp_dtype=amp_dtype)
    own_loop.train(state)
    module = workload.train.__globals__
    assert (state.samples, state.steps) == (128, 8)
    expected = plain_gan(module["X"].repeat(2, 1), micro, 16 // micro, skips=large > 1)
    found = [p for net in module["SEEN"][-1] for p in net.parameters()]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_whose_loss_comes_first_leaves_nothing_in_the_weights_of_the_other(script: Any) -> None:
    lines = """made = judge(maker(batch[0]))
        run.backward(made.square().mean() + 100.0 * made.mean(), of_maker)
        run.backward((judge.bias - judge.bias.detach()).sum() * 0.0, of_judge)
        SEEN.append(judge.bias.item() - before)"""
    workload = script(loop(lines, "before = judge.bias.item()", net=BOTH))
    own_loop.train(prepared(workload, Plan(32, (32,)), micro_batch_size=16))
    assert set(workload.train.__globals__["SEEN"]) == {0.0}


def test_the_passes_of_the_second_optimiser_are_no_part_of_its_step(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves with each pass through a net alone, by a second."""
    body = GAN.replace("LARGE", "1.0").replace("maker(x)", "passed(maker)(x)").replace("judge(", "passed(judge)(")
    body = "def passed(net):\n    SECONDS.append(1.0)\n    return net\n\nSECONDS = []\n" + body
    workload = script(body)
    seconds = workload.train.__globals__["SECONDS"]
    state = prepared(workload, Plan(64, (64,), window_s=3.0, each_step=True), micro_batch_size=16)
    monkeypatch.setattr("time.perf_counter", lambda: float(len(seconds)))
    windows = [e for e in heard(state) if isinstance(e, Window)]
    monkeypatch.undo()
    assert sum(w.steps for w in windows) == 4
    assert sum(w.optimizer_s for w in windows[:-1]) == 0.0
    assert all(len(w.micro_steps_s) == w.micro_steps for w in windows)


def test_one_loss_for_two_optimisers_has_gradients_for_both(script: Any) -> None:
    net = """net = nn.Linear(4, 1)
    first, other = (torch.optim.SGD([p], run["learning_rate"]) for p in (net.weight, net.bias))
    run.prepare(net, first, other)"""
    lines = """run.backward(loss_of(net, batch), first) and (other.step(), other.zero_grad())
        SEEN.append(net.bias.item() - bias)"""
    workload = script(loop(lines, "bias = net.bias.item()", net=net))
    own_loop.train(prepared(workload, Plan(64, (64,))))
    assert workload.train.__globals__["SEEN"][-1] != 0.0


# -- samples ---------------------------------------------------------------------------

OVER = """
class Bare:
    def __init__(self, **more):
        self.__dict__.update(more)
    def __len__(self):
        return 8
    def __iter__(self):
        return iter(DataLoader(DATA, batch_size=8))

class Endless(IterableDataset):
    def __iter__(self):
        return iter(DATA)
""" + loop(BACKWARD, data="LOADER")


@pytest.mark.parametrize("loader", ["tqdm(DataLoader(DATA, batch_size=8), disable=True)", "Bare(batch_size=8)"])
def test_a_pass_has_the_samples_of_what_is_wrapped(script: Any, loader: str) -> None:
    pytest.importorskip("tqdm")
    state = prepared(script("from tqdm import tqdm\n" + OVER.replace("LOADER", loader)), Plan(96, (96,)))
    own_loop.train(state)
    assert (state.pass_samples, state.samples, state.epoch) == (64, 96, 1)


def test_each_call_of_run_asks_for_the_knobs_whose_rows_name_it(script: Any) -> None:
    lines = """with run.autocast():
            loss = loss_of(net, batch)
        run.backward(loss, optimizer)"""
    state = prepared(script(loop(lines)), Plan(64, (64,)))
    own_loop.train(state)
    assert state.asked == {"learning_rate", *(name for name, row in OF_THE_LOOP.items() if row.asked_by != "name")}


@pytest.mark.parametrize(
    "loader", ["Bare()", "list(DataLoader(DATA, batch_size=8))", "DataLoader(Endless(), batch_size=8)"]
)
def test_a_loader_that_tells_no_samples_is_asked_for_them(script: Any, loader: str) -> None:
    with pytest.raises(WorkloadError, match=r"run.batches\(loader, samples=N\) says it"):
        own_loop.train(prepared(script(OVER.replace("LOADER", loader)), Plan(96, (96,))))
    state = prepared(script(OVER.replace("LOADER", f"{loader}, samples=64")), Plan(96, (96,)))
    own_loop.train(state)
    assert (state.pass_samples, state.samples) == (64, 96)


@pytest.mark.parametrize(("cut", "seen"), [(1, 16), (2, 8)])
def test_a_smaller_batch_that_comes_first_is_not_what_was_seen(script: Any, cut: int, seen: int) -> None:
    parts = f'parts = torch.arange(40).split(run["batch_size"] // {cut})'
    data = "DataLoader(DATA, batch_sampler=[p.tolist() for p in parts[::-1]]), samples=40"
    state = prepared(script(loop(BACKWARD, parts, data=data)), Plan(80, (80,)), micro_batch_size=16)
    own_loop.train(state)
    assert (state.active["batch_size"], state.active["micro_batch_size"]) == (seen, seen)


TIME_FIRST = """
class Chunks:
    def __init__(self, **told):
        vars(self).update(told)

    def __len__(self):
        return 4

    def __iter__(self):
        for _ in range(4):
            x = torch.ones(5, 16, 4)  # 5 steps of 16 texts
            yield x, x.sum(2).view(-1)
""" + loop("x, y = batch; run.backward((net(x).view(-1) - y).square().mean(), optimizer)", data="LOADER")


@pytest.mark.parametrize(
    "loader", ["Chunks(batch_size=16)", "Chunks(batch_size=run['batch_size'])", "Chunks(size=run['batch_size']), 64"]
)
def test_batches_with_time_first_count_their_texts(script: Any, loader: str) -> None:
    state = prepared(script(TIME_FIRST.replace("LOADER", loader)), Plan(128, (128,)))
    own_loop.train(state)
    assert (state.pass_samples, state.samples, state.epoch, state.steps) == (64, 128, 1, 8)
    assert state.active["batch_size"] == 16


def test_a_micro_batch_that_is_asked_for_by_name_cuts_a_batch_evenly(script: Any) -> None:
    body = loop(BACKWARD, data='DataLoader(DATA, batch_size=run["micro_batch_size"])')
    state = prepared(script(body), Plan(64, (64,)), batch_size=16, micro_batch_size=12)
    own_loop.train(state)
    assert (state.active["micro_batch_size"], state.active["batch_size"], state.steps) == (8, 16, 4)


def test_a_training_loader_of_whole_batches_beside_one_of_micro_batches_is_refused(script: Any) -> None:
    """Else a step would be taken once in several of its batches."""
    judged = "judged = DataLoader(DATA, **run.loader())"

    def trained(lines: str, first: str = judged) -> None:
        body = loop(lines, first, data=WHOLE)
        own_loop.train(prepared(script(body), Plan(64, (64,)), batch_size=16, micro_batch_size=4))

    with pytest.raises(LoopError, match=r"whole batches of 16, and run\.loader\(\) made .* 4: run\.loader\(\) is for"):
        trained(BACKWARD)
    trained("loss_of(net, batch).backward(); optimizer.step(); optimizer.zero_grad(); run.step()")
    trained(BACKWARD, f'part = run["micro_batch_size"]; {judged}')


@pytest.mark.parametrize(
    "clips",
    [
        "run.backward(loss, optimizer)",
        "loss.backward(); nn.utils.clip_grad_norm_(net.parameters(), run['max_grad_norm']); optimizer.step(); "
        "optimizer.zero_grad(); run.step()",
    ],
)
def test_clipping_is_seen_in_the_first_step(script: Any, clips: str) -> None:
    loss = "loss = loss_of(net, batch) * torch.linalg.vector_norm(batch[0])  # a norm of no gradient"
    workload = script(loop(f"{loss}\n        {clips}", data=WHOLE))
    for limit, is_seen in ((0.25, True), (0.0, "step()" in clips)):
        state = prepared(workload, Plan(64, (64,)), max_grad_norm=limit)
        own_loop.train(state)
        assert bool(state.active["gradient_norms"]) == is_seen


def test_batches_count_what_was_drawn_whatever_collate_makes_of_them(script: Any) -> None:
    tuples = "DataLoader(DATA, collate_fn=lambda b: tuple(zip(*b)), **run.loader())"
    body = loop("run.backward(loss_of(net, [*map(torch.stack, batch)]), optimizer)", data=tuples)
    state = prepared(script(body), Plan(128, (128,)))
    own_loop.train(state)
    assert (state.samples, state.steps, state.active["batch_size"]) == (128, 8, 16)


# -- steps ---------------------------------------------------------------------------

CYCLE = loop(
    f"{BACKWARD} and schedule.step()",
    "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.steps); SEEN.append(run.steps)",
    data="DataLoader(FEW, MORE**run.loader())",
    head="FEW = TensorDataset(X[:60], X[:60].sum(1))",
)


@pytest.mark.parametrize(
    ("more", "micro", "horizon"),
    [("", 16, 300), ("", 8, 270), ("", 8, 16), ("drop_last=True, ", 8, 300), ("drop_last=True, ", 16, 60)],
)
def test_the_steps_of_a_run_are_those_that_it_takes(script: Any, more: str, micro: int, horizon: int) -> None:
    workload = script(CYCLE.replace("MORE", more))
    resident = own_loop.OwnResident(workload)
    config = Config(Knobs.of({**KNOBS, "micro_batch_size": micro}, table_of(workload)), dict(workload.options))
    for _ in range(2):
        state = own_loop.prepare(resident, config, Plan(horizon, (horizon,)))
        own_loop.train(state)
        assert state.steps == workload.train.__globals__["SEEN"][-1]
    assert len(workload.train.__globals__["SEEN"]) <= 3, "begun again once in a process, at most"


def test_the_steps_of_a_run_follow_a_loader_of_its_own_size(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = script(CYCLE.replace("**run.loader()", "batch_size=16").replace("MORE", ""))
    config = Config(Knobs.of({"batch_size": 32, "micro_batch_size": 32, "learning_rate": 0.1}, table_of(workload)), {})
    resident, seen = own_loop.OwnResident(workload), workload.train.__globals__["SEEN"]
    for _ in range(2):
        state = own_loop.prepare(resident, config, Plan(120, (120,)))
        own_loop.train(state)
        assert state.steps == seen[-1] == 8
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[workload.train.__module__])
    run = own_loop.alone(120, pass_samples=60, device="cpu")
    with pytest.raises(ValueError, match="total steps"):
        workload.train(run)
    assert "alone(..., pass_samples=60, batch_size=16)" in capsys.readouterr().out
    run.let_go()
    run = own_loop.alone(120, pass_samples=60, batch_size=16, device="cpu")
    workload.train(run)
    run.let_go()
    assert seen[-1] == run._state.steps


def test_a_probe_is_never_begun_again(script: Any) -> None:
    workload = script(CYCLE.replace("MORE", ""))
    heard(prepared(workload, Plan(10**9)), lambda event: True)
    assert len(workload.train.__globals__["SEEN"]) == 1


@pytest.mark.parametrize(("given", "says"), [(60, False), (0, True)])
def test_a_script_on_its_own_says_what_a_pass_has(
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: int,
    says: bool,
) -> None:
    workload = script(
        CYCLE.replace("MORE", "")
        .replace("OneCycleLR(optimizer, 0.1, total_steps", "StepLR(optimizer, step_size")
        .replace("    net, opt", "    run.loader()\n    net, opt")
    )
    module = sys.modules[workload.train.__module__]
    monkeypatch.setitem(sys.modules, "__main__", module)
    run = own_loop.alone(300, pass_samples=given, device="cpu", **KNOBS)
    workload.train(run)
    run.let_go()
    assert (workload.train.__globals__["SEEN"][-1] == run._state.steps) is not says
    assert ("alone(..., pass_samples=60)" in capsys.readouterr().out) is says


DROPS = """
def train(run):
    loader = DataLoader(DATA, drop_last=True, **run.loader())
    net, optimizer = made(run)
    SEEN.extend([run.loader()["batch_size"], run.steps])
    for batch in run.batches(loader):
        run.backward(loss_of(net, batch), optimizer)
    SEEN.append(run.steps)
"""


@pytest.mark.parametrize(("given", "says"), [(64, True), (48, False)])
def test_a_script_on_its_own_takes_a_batch_in_one_pass_and_says_what_one_without_its_rest_has(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: int, says: bool
) -> None:
    workload = script(DROPS)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[workload.train.__module__])
    run = own_loop.alone(24 * 40, pass_samples=given, device="cpu", batch_size=24)
    workload.train(run)
    run.let_go()
    size, told, there_are = workload.train.__globals__["SEEN"]
    assert size == 24
    assert (told != there_are) is says
    assert ("alone(..., pass_samples=48)" in capsys.readouterr().out) is says


@pytest.mark.parametrize(("sizes", "size"), [("(8, 16)", 32), ("[16]", 16), ("(16,)", 16), ("16", 16)])
def test_a_script_on_its_own_takes_the_one_value_that_is_given(
    script: Any, monkeypatch: pytest.MonkeyPatch, sizes: str, size: int
) -> None:
    workload = script(DROPS, HEAD.replace("[8, 16]", sizes))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[workload.train.__module__])
    assert own_loop.alone(64, device="cpu").loader()["batch_size"] == size


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "loss.backward(); optimizer.step(); optimizer.zero_grad()",
            r"stepped the optimiser 8 times, and run\.step\(\)",
        ),
        ("run.backward(loss, optimizer); optimizer.step()", r"run\.backward steps the SGD .* so do lines of your own"),
        ("run.backward(loss, other); other.step()", r"run\.backward steps the Adam .* so do lines of your own"),
    ],
)
def test_steps_of_ones_own_that_are_missed_or_too_many_are_told_at_once(script: Any, lines: str, said: str) -> None:
    body = loop(f"loss = loss_of(net, batch)\n        {lines}", "other = torch.optim.Adam(net.parameters())")
    state = prepared(script(body), Plan(10_000, (10_000,)))
    with pytest.raises(LoopError, match=said):
        own_loop.train(state)
    assert state.samples <= 9 * 8


@pytest.mark.parametrize(
    "lines",
    [
        "run.backward(loss, optimizer); center.sum().backward(); other.step(); other.zero_grad()",
        "run.backward(loss, optimizer) and (loss_of(net, batch).backward(), optimizer.step(), optimizer.zero_grad())",
        "run.backward(loss, wrapped)",
        "run.backward(loss, optimizer) and other.step()",
    ],
)
def test_steps_of_ones_own_beside_those_of_backward_are_theirs(script: Any, lines: str) -> None:
    """A second optimiser by hand, a penalty behind a whole batch, a wrapper that is no optimiser by itself."""
    wrapped = """
class Wrapped(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    step = lambda self: self.inner.step()
    zero_grad = lambda self, set_to_none=True: self.inner.zero_grad(set_to_none)
"""
    net = """net, center = nn.Linear(4, 1), nn.Parameter(torch.zeros(3))
    optimizer, other = torch.optim.SGD(net.parameters(), lr=run["learning_rate"]), torch.optim.SGD([center], lr=0.1)
    run.prepare(net, optimizer, other)"""
    lines = f"loss = loss_of(net, batch)\n        {lines}"
    body = loop(lines, "wrapped = Wrapped(optimizer)", net=net, head=wrapped)
    state = prepared(script(body), Plan(128, (128,)), batch_size=64, micro_batch_size=4)
    own_loop.train(state)
    assert (state.samples, state.steps) == (128, 2)


def test_an_optimiser_of_the_file_is_watched_by_the_training_at_hand_alone(script: Any) -> None:
    head = "NET = nn.Linear(4, 1)\nOPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)"
    net = "net, optimizer = run.prepare(NET, OPTIMIZER)"
    workload = script(loop(BACKWARD, net=net, head=head))
    for _ in range(2):
        state = prepared(workload, Plan(64, (64,)))
        own_loop.train(state)
        assert state.steps == 4
    assert not workload.train.__globals__["OPTIMIZER"]._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("schedule", "steps", "told"),
    [
        ("StepLR(optimizer, 1)", "", True),
        ("StepLR(optimizer, 1)", "schedule.step()", False),
        ("StepLR(optimizer, 1000)", "schedule.step()", True),
        ("StepLR(optimizer, 1000); run.prepare(net, schedule)", "", False),
        ("ReduceLROnPlateau(optimizer)", "schedule.step(1.0)", False),
    ],
)
def test_a_scheduler_that_never_moves_the_rate_is_remarked_upon(
    script: Any, schedule: str, steps: str, told: bool
) -> None:
    body = loop(f"{BACKWARD}\n        {steps}", f"schedule = torch.optim.lr_scheduler.{schedule}", data=WHOLE)
    state = prepared(script(body), Plan(64, (32, 64)))
    own_loop.train(state)
    assert ("SGD has a scheduler that run.prepare was not shown, and its learning" in state.remark) == told


HARD, WIRED = "0.05", 'run["learning_rate"]'
SCHEDULE = "LambdaLR(optimizer, lambda step: {} * min(step, 3) / 3)"


@pytest.mark.parametrize(
    ("rate", "schedule", "other", "rates", "told"),
    [
        (
            HARD,
            "",
            "",
            (0.1, 0.1, 0.2),
            "rate was 0.1 and 0.2 in two trainings, and the rate of the SGD was 0.05 in both",
        ),
        (HARD, SCHEDULE.format(1), "", (0.1, 0.2), "the rate of the SGD was 0.05 in both"),
        (WIRED, "", "", (0.1, 0.2), ""),
        (WIRED, SCHEDULE.format(1), "", (0.1, 0.2), ""),
        ("1.0", SCHEDULE.format(WIRED), "", (0.1, 0.2), ""),
        (HARD, "", WIRED, (0.1, 0.2), ""),
        (HARD, "", "0.07", (0.1, 0.2), "the rate of the SGD was 0.05, 0.07 in both"),
        (f'{WIRED} / run["batch_size"]', "", "", (0.1, 0.2), ""),
    ],
)
def test_a_learning_rate_that_reaches_no_optimiser_is_remarked_upon_once(
    script: Any, rate: str, schedule: str, other: str, rates: tuple[float, ...], told: str
) -> None:
    nets = f"""net, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr={rate})
    second = torch.optim.SGD(head.parameters(), lr={other or rate})
    run.prepare(net, optimizer)"""
    lines = f"""loss = loss_of(nn.Sequential(net, head), batch)
        run.backward(loss_of(nn.Sequential(net, head), batch), optimizer)
        {"run.backward(loss, second)" if other else ""}
        {schedule and "schedule.step()"}"""
    body = loop(lines, schedule and f"schedule = torch.optim.lr_scheduler.{schedule}", net=nets, data=WHOLE)
    resident, remarks = own_loop.OwnResident(script(body)), []
    for at, learning_rate in enumerate(rates):
        knobs = Knobs.of({"learning_rate": learning_rate, "batch_size": 8 * (at + 1) if "/" in rate else 8}, EVERY)
        state = own_loop.prepare(resident, Config(knobs, {}, 0, "cpu"), Plan(32, (16, 32)))
        own_loop.train(state)
        remarks.append(state.remark)
    assert told in remarks[-1]
    assert [bool(remark) for remark in remarks] == [*[False] * (len(rates) - 1), bool(told)]


# -- the end ---------------------------------------------------------------------------

OWN_STEPS = """
def train(run):
    net, optimizer = made(run)
    for i, batch in enumerate(run.batches(DataLoader(DATA, batch_size=8))):
        (loss_of(net, batch) / 3).backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if run.evaluate_now:
                run.report(error=1.0)
"""
OWN_PASSES = OWN_STEPS.replace("    for i,", "    for _ in run.epochs():\n      for i,")


@pytest.mark.parametrize(
    ("body", "horizon", "samples"),
    [
        (OWN_STEPS, 64, 72),  # a step is behind each 24
        (OWN_STEPS, 72, 72),
        (OWN_PASSES, 128, 128 + 24),  # two of 8 micro-batches in a pass are behind its last step
        (OWN_PASSES, 100, 64 + 48),
        (OWN_PASSES + "      run.report(error=1.0)\n", 128, 128),
    ],
)
def test_a_run_ends_behind_a_step_of_theirs(script: Any, body: str, horizon: int, samples: int) -> None:
    state = prepared(script(body), Plan(horizon, (horizon,)))
    found = heard(state)
    assert [e.samples for e in found if isinstance(e, Evaluation)] == [samples]


@pytest.mark.parametrize("body", [OWN_STEPS, OWN_PASSES])
def test_a_loop_that_steps_no_more_ends(script: Any, body: str) -> None:
    once = body.replace("if (i + 1) % 3 == 0:", "if not SEEN and not SEEN.append(i):")
    with pytest.raises(WorkloadError, match=r"without an optimiser step|without a report at its end"):
        own_loop.train(prepared(script(once), Plan(128, (128,))))


def test_what_lies_between_two_passes_is_told(script: Any) -> None:
    body = """
import time

def train(run):
    net, optimizer = made(run)
    for _ in run.epochs():
        for batch in run.batches(DataLoader(DATA, batch_size=run["batch_size"])):
            run.backward(loss_of(net, batch), optimizer)
        began = time.perf_counter()
        while time.perf_counter() < began + 0.05:
            pass
        run.report(error=1.0)
"""
    state = prepared(script(body), Plan(256, (256,)))
    found = [event for event in heard(state) if isinstance(event, Evaluation)]
    assert 3 * 0.05 <= state.rested_s < 3 * 0.05 + 1.0, "the last of four is that of a report that was due"
    assert found[0].wall_s >= 0.05


def test_what_is_set_around_a_script_on_its_own_ends_with_the_next(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = script(OVER.replace("LOADER", "DataLoader(DATA, **run.loader())"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[workload.train.__module__])
    usual = torch.backends.cuda.flash_sdp_enabled()
    own_loop.alone(64, device="cpu", sdpa_backend="math")
    assert not torch.backends.cuda.flash_sdp_enabled()
    own_loop.alone(64, device="cpu").let_go()
    assert torch.backends.cuda.flash_sdp_enabled() == usual


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("pass_samples", [48, 50, 57])
def test_micro_batches_of_any_size_make_the_same_steps(script: Any, pass_samples: int, drops: bool) -> None:
    """Also at an epoch's end, where a batch has fewer samples, in fewer parts of unequal sizes."""
    data = f"DataLoader(TensorDataset(*(x[:{pass_samples}] for x in (X, X.sum(1)))), drop_last={drops}, **run.loader())"
    lines = f"assert {BACKWARD} == run.ends_batch"
    plan, found = Plan(3 * pass_samples, (3 * pass_samples,)), dict[int, tuple[Any, ...]]()
    for micro in (16, 8, 7) if not drops else (16, 16):
        state = prepared(script(loop(lines, "run.steps", data=data)), plan, batch_size=16, micro_batch_size=micro)
        own_loop.train(state)
        assert state.model is not None
        assert not state.is_misled
        found[micro] = state.steps, state.steps_told, *(p.detach() for p in state.model.parameters())
    for steps, told, *weights in found.values():
        assert steps == told == found[16][0]
        torch.testing.assert_close(weights, list(found[16][2:]))
