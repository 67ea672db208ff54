"""What is tried of an unedited program, and what is said to be faster."""

import dataclasses
from collections.abc import Mapping

import pytest

from tuning.config.errors import ConfigError
from tuning.outside import compare as comparing
from tuning.outside.compare import UNCHANGED, Compared, compare, growth_bytes, options
from tuning.outside.runs import Look, SeenLoader, SeenModel, SeenOptimizer, Setting

LOADER = SeenLoader(
    file="train.py",
    line=4,
    is_stream=False,
    is_batched=True,
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    pin_memory=False,
    asked={},
)
ADAM = SeenOptimizer(name="Adam", file="train.py", line=5, fused=None, able=True)
STEP_S = 0.01


def seen(step_s: float = STEP_S, waits: float = 0.5, loader: SeenLoader | None = LOADER, **more: object) -> Look:
    """Returns what a run with such steps shows."""
    loaders = [] if loader is None else [loader]
    fields = {"loaders": loaders, "optimizers": [ADAM], "training": [0] * len(loaders), "threads": 1, "wall_s": 1.0}
    fields |= {
        "counted": 100,
        "samples": 800,
        "measured_s": 100 * step_s,
        "split_s": 1.0,
        "parts": {"waiting": waits, "optimizer": 0.1},
    }
    return Look.model_validate({**fields, **more})


@dataclasses.dataclass
class Formula:
    """A program whose step takes a given share of today's with each setting; a run takes a second of a clock."""

    shares: Mapping[str, float]
    today: Look = dataclasses.field(default_factory=seen)
    now: float = 0.0
    fails: str = ""
    asked: list[Setting] = dataclasses.field(default_factory=list)

    def look(self, setting: Setting, loader: int | None, window_s: float, limit_s: float) -> Look:
        """Returns a run."""
        self.now += 1.0
        self.asked.append(dict(setting))
        if self.fails and self.fails in setting:
            raise ConfigError("it failed", remedy="mend it")
        share = 1.0
        for name, value in setting.items():
            share *= self.shares.get(f"{name}={value}", self.shares.get(name, 1.0))
        return self.today.model_copy(update={"measured_s": self.today.measured_s * share})


def answered(program: Formula, monkeypatch: pytest.MonkeyPatch, max_time_s: float = 30.0) -> Compared:
    """Returns the answer for a program."""
    monkeypatch.setattr(comparing.time, "monotonic", lambda: program.now)
    return compare(program, max_time_s, 4, lambda name, look, why: None)  # type: ignore[arg-type]


def test_what_is_faster_alone_is_set_together(monkeypatch):
    program = Formula({"num_workers=2": 0.5, "fused": 0.8, "batch_size": 0.4})
    found = answered(program, monkeypatch)
    assert found.pick.setting == {"num_workers": 2, "persistent_workers": True, "fused": True}
    assert found.gain.ratio == pytest.approx(2.5)
    assert found.gain.rounds >= 3
    assert program.now <= 31.0


def test_what_is_slower_together_is_set_alone(monkeypatch):
    class Clashing(Formula):
        def look(self, setting: Setting, *rest: object) -> Look:
            found = super().look(setting, *rest)  # type: ignore[arg-type]
            both = "fused" in setting and "num_workers" in setting
            return found.model_copy(update={"measured_s": 3 * found.measured_s}) if both else found

    found = answered(Clashing({"num_workers=2": 0.5, "fused": 0.8}), monkeypatch)
    assert found.pick.setting == {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize("shares", [{}, {"num_workers": 1.5, "fused": 1.2}, {"batch_size": 0.3}])
def test_without_anything_faster_it_stays_as_it_is(monkeypatch, shares):
    found = answered(Formula(shares), monkeypatch)
    assert found.pick is None
    assert set(found.looks) > {UNCHANGED}


@pytest.mark.parametrize("limit_s", [7.0, 8.0, 10.0, 20.0])
def test_little_time_goes_to_rounds_of_what_was_itself_measured(monkeypatch, limit_s):
    found = answered(Formula({"num_workers=2": 0.5, "fused": 0.8}), monkeypatch, limit_s)
    assert found.pick is not None
    assert found.gain.rounds >= 2


def test_one_run_of_each_is_too_little(monkeypatch):
    found = answered(Formula({"num_workers=2": 0.5}), monkeypatch, 3.0)
    assert found.pick is None
    assert (found.gain.rounds, found.gain.grounds) == (0, "one run of each")


def test_a_setting_that_fails_is_said_and_the_others_are_tried(monkeypatch):
    found = answered(Formula({"fused": 0.5}, fails="num_workers"), monkeypatch)
    assert any(name.startswith("num_workers") for name in found.failed)
    assert found.pick.setting == {"fused": True}


def test_a_program_that_goes_on_from_its_own_checkpoint_is_refused(monkeypatch):
    found = answered(Formula({"fused": 0.5}, seen(reread=["last.pt"])), monkeypatch)
    assert found.pick is None
    assert "last.pt" in found.refused


@pytest.mark.parametrize(
    ("today", "tried", "untried"),
    [
        (seen(), {"num_workers=2", "num_workers=4", "fused=True"}, {"num_workers=8", "num_workers=0"}),
        (seen(waits=0.0), {"fused=True"}, {"num_workers=2"}),
        (seen(loader=LOADER.model_copy(update={"is_stream": True})), {"fused=True"}, {"num_workers=2"}),
        (seen(waits=0.0, loader=LOADER.model_copy(update={"num_workers": 2})), {"num_workers=0"}, {"num_workers=2"}),
        (seen(loader=None), {"fused=True"}, {"num_workers=2", "batch_size=16"}),
        (seen(optimizers=[ADAM.model_copy(update={"fused": True})]), set(), {"fused=True"}),
        (seen(device="H200"), {"pin_memory=True", "cudnn_benchmark"}, {"threads=1"}),
        (seen(threads=2, model=SeenModel(has_images=True)), {"threads=1", "channels_last"}, {"pin_memory=True"}),
    ],
)
def test_what_is_tried(today, tried, untried):
    names = {option.name for option in options(today, 4)}
    assert tried <= names
    assert not untried & names


@pytest.mark.parametrize(
    ("memory", "grows"),
    [
        ([(n, 1000 + 50 * n) for n in range(1, 80, 8)], 50.0),
        ([(n, 1000 + (n % 3)) for n in range(1, 80, 8)], 0.0),
        ([(1, 1000), (9, 2000)], 0.0),
        ([], 0.0),
    ],
)
def test_steady_growth_is_told(memory, grows):
    assert growth_bytes(seen(memory=memory)) == pytest.approx(grows)
