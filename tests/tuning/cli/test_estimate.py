"""The verb estimate: its table in 80 columns, its JSON, its cache, and what it refuses. The predictor is a formula."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.commands import MINE, ROOT
from tests.fakes import study_of
from tests.own_files import Here
from tests.tuning.memory.logs import MIB, prediction
from tests.tuning.snapshots import check
from trainables import knob_columns
from tuning import __main__ as tuning_main
from tuning.cli import estimate
from tuning.config.choices import available
from tuning.config.complete import with_declared
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.journal.records import Journal
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request
from tuning.report.estimate_request import Question, question
from tuning.study import setup
from tuning.study.limits import Limits
from tuning.workers import doctor, nvml
from tuning.workers.nvml import Gpu
from tuning.workers.own_workload import declared

GIB = 2**30
LOOP = ROOT / "tests" / "data" / "plain_loop.py"


def of(settings: str, gpus: tuple[Gpu, ...] = ()) -> Question:
    config = load(settings.split(), Here().table)
    if config.workload.ref not in available("workload"):
        config = with_declared(config, declared(config.workload.ref))
    return question(config, gpus)


def formula(request: Request, width_mib: int = 16) -> Prediction:
    knobs = request.knobs
    sample = 80 * MIB // (2 if knobs["amp_dtype"] == "bf16" else 1) // (4 if knobs["activation_checkpointing"] else 1)
    return prediction(layers=6, width_bytes=width_mib * MIB, sample_bytes=sample)


def wide(request: Request) -> Prediction:
    return formula(request, 40 if request.knobs["adapter"] == "lora" else 400)


def vast(request: Request) -> Prediction:
    return formula(request, 4000)


def tiny(request: Request) -> Prediction:
    return prediction(layers=1, width_bytes=512, sample_bytes=512)


def told(
    settings: str, capsys: pytest.CaptureFixture[str], predict: Callable[[Request], Prediction] = formula, code: int = 0
) -> str:
    assert estimate.main(settings.split(), lambda requests: [predict(one) for one in requests]) == code
    return capsys.readouterr().out


def answer(
    settings: str, capsys: pytest.CaptureFixture[str], predict: Callable[[Request], Prediction] = formula, code: int = 0
) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(f"{settings} --json", capsys, predict, code))
    return found


# -- what is asked -----------------------------------------------------------------------------------------------------


L4 = (Gpu("NVIDIA L4", 22 * GIB, 20 * GIB),)
ASKED: list[tuple[str, tuple[Gpu, ...]]] = [
    ("workload=nli", ()),
    ("workload=nli", (Gpu("NVIDIA L4", 22 * GIB),)),
    ("workload=nli card=cpu", ()),
    ("workload=nli card=cpu card.memory_gib=32", ()),
    ("workload=nli card=rtx4060", ()),
    ("workload=nli card=rtx4060 knobs.amp_dtype=fp16 knobs.adapter=[lora,none] knobs.micro_batch_size=6", ()),
    ("workload=nli card=rtx4060 knobs.activation_checkpointing=true knobs.micro_batch_size={low:3,high:40}", ()),
    ("workload=nli knobs.micro_batch_size=[1,2,3,4,5,6,7,8,9,10,11,12,13]", ()),
    ("workload=nli card=auto card.memory_gib=32", ()),
    ("workload=nli card=auto card.memory_gib=32", L4),
    ("workload=nli card.memory_gib=32 card.reserve_gib=2", ()),
    ("workload=signals", ()),
    ("workload=pointer card=p100", ()),
]


def test_what_is_asked_has_its_list(monkeypatch: pytest.MonkeyPatch):
    """Pascal has no bf16, signals no adapter; a card given by its memory has a context, which is taken off."""
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx2"}))
    lines = []
    for settings, gpus in ASKED:
        about = of(settings, gpus)
        usable = "all of it" if about.card.cap_bytes is None else f"{about.card.cap_bytes / GIB:.2f} GiB"
        rows = ["/".join(map(str, row.values())) for row in about.couplings]
        lines += [
            f"{settings}{' beside an L4' * bool(gpus)}",
            f"  {about.card.name}: {usable}, {about.kernels} kernels",
        ]
        lines += [f"  micro-batches {about.micro_batches}", f"  {', '.join(rows)}"]
    check("estimate_asked", "\n".join(lines))
    with pytest.raises(ConfigError, match="leaves nothing beside a CUDA context"):
        of("workload=nli card.memory_gib=0.5")


def test_what_a_search_varies_is_taken_at_its_largest_or_first():
    about = of("workload=temporal card=rtx4060")
    assert (about.knobs["architecture"], about.knobs["hidden_size"], about.knobs["dropout"]) == ("lstm", 128, 0.5)
    assert about.searched["architecture"] == ("transformer", "mlp")
    assert about.knobs["num_workers"] == 0  # changes no byte of the step, so asks for no other trace
    assert of("workload=temporal card=rtx4060 knobs.num_workers=2") == about


@pytest.mark.parametrize("settings", ["", "card.memory_gib=8", "card.reserve_gib=2"])
@pytest.mark.parametrize("held", [(0, 0), (5, 16), (30, 0)])
def test_a_card_that_is_here_leaves_what_a_study_would_get(monkeypatch, tmp_path, settings, held):
    gpus = [Gpu("NVIDIA L4", 22 * GIB, gib * GIB, (8, 9)) for gib in held]
    monkeypatch.setattr(nvml, "gpus", lambda: gpus)
    config = setup.prepare_config(load(["workload=nli", f"runs_dir={tmp_path / 'runs'}", *settings.split()]))[1]
    facts = {"device": {"name": "NVIDIA L4", "memory_bytes": 22 * GIB}}
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        of_study = Limits(config, study_of(facts), journal, 0.0, min(map(doctor.free_bytes, gpus)), 2).cap_bytes()
    found = of(f"workload=nli {settings}", gpus=tuple(gpus))
    assert (found.card.cap_bytes, found.kernels, found.card.capability) == (of_study, "cuda", (8, 9))


def test_only_the_cards_that_a_study_would_use_are_looked_at(monkeypatch):
    monkeypatch.setattr(nvml, "_visible_before", [])
    with pytest.raises(ConfigError, match="devices=7: 7 is no card here"):
        estimate.main(["workload=nli", "devices=7"])


def test_a_workload_of_ours_is_asked_without_torch():
    text = "import sys; from tuning.cli import estimate as e; e.question(e.load(['workload=nli']), ()); "
    asked = [sys.executable, "-c", text + "print('torch' in sys.modules)"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "False"


def test_a_workload_of_ones_own_is_what_its_file_says(tmp_path):
    about = of(f"workload={MINE} card=rtx4060 workload.hidden=64")
    assert (about.micro_batches, about.workload.options) == ((8, 16, 64), {"hidden": 64, "noise": 0.15})
    mine = tmp_path / "computed.py"
    mine.write_text(
        MINE.read_text() + "Moons.default_space = dict(Moons.default_space, micro_batch_size=[2**5], n=[1, 2])\n"
        "Moons.knobs = dict(Moons.knobs, n=Knob(1, 'both', low=1, high=8))\n"
        "BEFORE = dict(optimizer='sgd', momentum=0.9)\n"
    )
    computed = of(f"workload={mine} knobs.n=[1,4]")
    assert (computed.micro_batches, computed.knobs["n"], computed.knobs["optimizer"]) == ((32,), 4, "sgd")


# -- what is answered --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "predict"),
    [
        ("rtx4060", "workload=nli card=rtx4060", formula),
        ("h200", "workload=nli card=h200", formula),
        ("temporal", "workload=temporal card=t4", formula),
        ("nothing_fits", "workload=nli card=rtx4060 card.memory_gib=6", wide),
        ("nothing_helps", "workload=nli card=rtx4060", vast),
        ("tiny", "workload=nli card=rtx4060", tiny),
        ("base_dtypes", "workload=nli card=rtx4060 knobs.amp_dtype=bf16 knobs.base_dtype=[fp32,bf16,nf4]", formula),
    ],
)
def test_an_answer_has_its_screen(name, settings, predict, capsys):
    text = told(settings, capsys, predict)
    check(f"estimate_{name}", text)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_rows_say_what_fits_and_the_largest_that_does(capsys):
    found = answer("workload=nli card=rtx4060", capsys)
    for row in found["rows"]:
        assert row["largest"] == row["largest_cell"]["micro_batch"]
        needs = [c["needed_bytes"] for c in row["cells"]]
        assert needs == sorted(needs)
        for c in row["cells"]:
            assert sum(c["peak"]["breakdown"].values()) == c["peak"]["live_bytes"] <= c["needed_bytes"]
            assert c["share_frac"] == pytest.approx(c["needed_bytes"] / found["card"]["usable_bytes"])


def test_options_may_stand_between_settings(capsys):
    assert answer("workload=nli --timeout 300 card=rtx4060", capsys)["card"]["name"] == "rtx4060"


def test_where_nothing_fits_there_are_remedies(capsys):
    found = answer("workload=nli card=rtx4060", capsys, wide)
    assert [(one["knobs"], one["verdict"]) for one in found["remedies"]] == [({"adapter": "lora"}, "fits")]
    asked = told("workload=nli card=rtx4060 knobs.micro_batch_size=64 knobs.amp_dtype=fp32", capsys)
    assert "these fit:\n  knobs.micro_batch_size=12: " in asked


def test_checkpointing_that_recomputes_nothing_has_no_rows(capsys):
    def flat(request: Request) -> Prediction:
        found = formula(replace(request, knobs={**request.knobs, "activation_checkpointing": False}))
        if request.knobs["activation_checkpointing"]:  # what dies at once may do so in any order
            traces = (replace(one, events=(*one.events[:-2], *one.events[:-3:-1])) for one in found.traces)
            found = replace(found, traces=tuple(traces))
        return found

    def partly(request: Request) -> Prediction:
        return formula(request) if request.knobs["amp_dtype"] == "bf16" else flat(request)

    def rows(settings: str, predict: Callable[[Request], Prediction]) -> list[tuple[Any, Any]]:
        found = answer(f"workload=nli card=rtx4060 {settings}", capsys, predict)
        assert len(found["rows"]) == 4 or "has no ModuleList" in found["notes"][-1]
        return [(row["knobs"]["amp_dtype"], row["knobs"]["activation_checkpointing"]) for row in found["rows"]]

    all_rows = [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True)]
    assert rows("", flat) == [("fp32", False), ("bf16", False)]
    assert rows("knobs.activation_checkpointing=[false,true]", flat) == all_rows
    assert rows("", partly) == all_rows
    assert told("workload=nli card=rtx4060", capsys, flat).count("no ModuleList") == 1


def test_what_cannot_be_predicted_is_said(capsys):
    never = Prediction("none", ("aten::nonzero has a shape that depends on data",), ())
    asked = "workload=nli card=auto card.memory_gib=6"
    check("estimate_unknown", told(asked, capsys, lambda _: never, code=1))
    assert answer(asked, capsys, lambda _: never, code=1)["rows"][0]["cells"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("workload=nope", "there is no such workload"),
        (f"workload={LOOP} card=rtx4060", "its memory cannot be predicted"),
        ("workload=nli --timeout nan", "--timeout nan"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, says, capsys):
    assert tuning_main.main(["estimate", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("error:") == 1
    assert not said.out


def test_what_the_workload_refuses_is_a_wrong_command_line():
    said = "DataError: workload.data=/nowhere is not there; allowed: a file"
    with pytest.raises(ConfigError, match="data=/nowhere is not there") as raised:
        estimate.main(
            ["workload=nli", "workload.data=/nowhere"],
            lambda requests: [Prediction("none", (said,), ()) for _ in requests],
        )
    assert raised.value.allowed == "a file"


@pytest.mark.parametrize("text", ["x = (", "a = 1\n", "\x00"])
def test_a_file_that_is_no_workload_is_refused(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "UserFile", Here)
    mine = tmp_path / "own.py"
    mine.write_text(text)
    assert tuning_main.main(["estimate", f"workload={mine}"]) == 2
    assert f"error: workload={mine}" in capsys.readouterr().err
