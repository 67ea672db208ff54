"""The pages of docs/ for users: their commands run, their code runs, the errors that they quote are those printed."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.commands import ROOT, run, share_library, start, wait_for
from tests.golden.outputs import TINY, tiny
from tests.own_files import Here
from tests.trainables.data.test_faces import box_of_points, write_mat
from trainables import workload_files
from trainables.data import bars, npy_sequences
from trainables.workload import Config, OwnWorkload, Workload
from tuning import __main__ as tuning
from tuning import run as study
from tuning.config.errors import TuningError
from tuning.config.load import load
from tuning.study import setup
from tuning.workers import nvml, user_code
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

DOCS = ROOT / "docs"
EXAMPLES = ROOT / "tuning" / "examples"
SMALL = {"count": 64}
SHORT = {key: value for key, value in TINY.items() if key != "name"} | {
    "search.trials": "2",
    "budget.confirm.seeds": "1",
}
"""What a study on a page is given: it is to come to its end, whatever it finds."""
KNOBS = {"batch_size": 16, "micro_batch_size": 8, "length_bucketing": True, "activation_checkpointing": True}
IMPORTS = "import torch\nfrom torch import nn\nfrom my_workload import Waves, waves\nfrom trainables import Knob\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own with the examples in it; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    yield tmp_path
    workload_files.forget_files()
    sys.modules.pop("my_workload", None)


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a page in one language, "" for those of commands."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [code for own, code in found if own == language]


def commands(page: str) -> list[str]:
    """Returns the command lines of a page."""
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.startswith("python ")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        *(pytest.param(page, marks=pytest.mark.workload) for page in ("workload", "own_loop")),
        *(pytest.param(page, marks=pytest.mark.slow) for page in ("tutorial", "faq", "training")),  # 82 s, 15 commands
    ],
)
def test_every_command_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study is given a small budget where the page names none; where one is to be stopped, one is started before.

    What starts no process and trains nothing runs in this one, which has loaded torch.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    share_library(tmp_path)
    assert commands(page)
    for command in ["python -m tuning init first"] * (page == "faq") + commands(page):
        _, *words = shlex.split(command)
        script = words[0].removesuffix(".py").replace("/", ".")
        module, arguments = (words[1], words[2:]) if words[0] == "-m" else (script, words[1:])
        goes_on = any(word == "--validate" or word.startswith("resume=") for word in arguments)
        if module == "tuning.run" and not goes_on:
            named = {word.split("=")[0] for word in arguments}
            arguments += [f"{key}={value}" for key, value in SHORT.items() if key not in named]
        if here := study.main if "--validate" in arguments else tuning.main if arguments[:1] == ["init"] else None:
            assert here(arguments) == 0, command
            continue
        with started(tmp_path) if arguments[:1] == ["stop"] else contextlib.nullcontext():
            assert run(module, arguments, tmp_path) == 0, command + (tmp_path / "err").read_text()[-2000:]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[None]:
    """Inside the block a study goes on that has begun its first trial; it has ended behind it."""
    settings = tiny("workload=first/my_workload.py", "name=stopped", "budget.train_epochs=12", "concurrency=1")
    process = start("tuning.run", settings, folder)
    journal = folder / "runs" / "my_workload" / "stopped" / "trials.jsonl"
    assert wait_for(lambda: journal.is_file() and b'"trial_start"' in journal.read_bytes(), process)
    yield
    assert process.wait(60) == 130


def test_the_studies_of_an_answer_have_settings_that_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.workers.own_workload.UserFile", Here)
    pages = [*commands("faq"), *commands("data")]
    asked = [shlex.split(command)[3:] for command in pages if "tuning.run workload=" in command]
    assert len(asked) >= 7
    for arguments in asked:
        assert study.main([argument.replace("first/", "") for argument in arguments] + ["--validate"]) == 0, arguments


def test_the_page_of_settings_is_what_help_prints() -> None:
    """But for the names of workloads, cards and pruning rules, so that a new one has a place less."""
    lines = [line for line in study.TEMPLATE.rstrip().splitlines() if line.strip() not in study.LISTED]
    assert blocks("settings", "text") == ["\n".join(lines) + "\n"]


def test_the_tutorial_is_of_the_files_that_init_writes() -> None:
    script, space = blocks("tutorial", "python")
    (diff,) = blocks("tutorial", "diff")
    loop = (EXAMPLES / "my_loop.py").read_text(encoding="utf-8")
    lines = diff.splitlines(keepends=True)
    assert "".join(line[1:] for line in lines if line[0] in "- ") == script
    changed = "".join(line[1:] for line in lines if line[0] in "+ ")
    assert f"\n{changed}\n" in loop
    assert f"\n{space}\n" in loop
    new = [line for line in lines if line[0] == "+" and '"""' not in line]
    assert f"{len(new)} lines of code" in " ".join((DOCS / "tutorial.md").read_text(encoding="utf-8").split())


def test_the_script_of_the_tutorial_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "my_loop.py").read_text(encoding="utf-8").split("def train(run)")[0]
    exec(f"{before}{blocks('tutorial', 'python')[0]}\ntrain()", {})  # noqa: S102
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.removeprefix("accuracy ")) > 0.9


def read_hooks() -> set[str]:
    """Returns the names that our code reads from a workload or a data set, where they need not be."""
    found = set()
    for path in (ROOT / "trainables").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "getattr" or len(call.args) < 2:
                continue
            owner, name = ast.unparse(call.args[0]).split(".")[-1], call.args[1]
            if owner in ("workload", "dataset", "_dataset", "whole") and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found - {"is_in_ram"}  # of our own cache, for which a data set is exchanged


def read_module_names() -> set[str]:
    """Returns the names that our code reads from the module of a workload."""
    text = (ROOT / "trainables" / "workload_files.py").read_text(encoding="utf-8")
    return set(re.findall(r'getattr\((?:module|_module\(ref\)), "([A-Z]+)"', text))


def test_the_page_of_the_contract_names_every_hook() -> None:
    page = (DOCS / "workload.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^      `(\w+)", Workload.__doc__ or "", flags=re.M))
    required = {
        name
        for name in (*vars(OwnWorkload), *vars(Workload), *Workload.__annotations__, *OwnWorkload.__annotations__)
        if not name.startswith("_")
    }
    assert {"collate", "schedule", "batch", "in_ram"} <= documented
    assert {"model", "objectives"} <= required
    assert read_hooks() <= documented, "name it in the docstring of Workload"
    assert not {name for name in documented | required if f"`{name}" not in page}


def test_the_pages_name_what_a_module_may_hold() -> None:
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("workload.md", "own_loop.md")]
    assert {"WORKLOAD", "SPACE", "BEFORE"} <= read_module_names()
    assert not {name for name in read_module_names() if not any(name in page for page in pages)}


@pytest.mark.parametrize("number", range(len(blocks("workload", "python"))))
def test_each_example_of_the_contract_keeps_it(number: int, folder: Path) -> None:
    code = blocks("workload", "python")[number]
    name = re.findall(r"^class (\w+)", code, flags=re.M)[-1]
    (folder / "mine.py").write_text(f"{code}\nWORKLOAD = {name}()\n", encoding="utf-8")
    assert said_of(folder / "mine.py") == ""


def example(heading: str) -> str:
    """Returns the code of the page of data behind a heading."""
    section = (DOCS / "data.md").read_text(encoding="utf-8").split(f"### {heading}\n")[1]
    return re.split(r"^```\w*\n", section, flags=re.M)[1].split("```")[0]


def test_the_ladder_of_the_page_of_data_runs_as_typed_on_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    line = example("A ladder of settings").partition("tuning.run ")[2]
    said = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    monkeypatch.setattr(nvml, "gpus", lambda: [nvml.Gpu("NVIDIA GeForce RTX 3090", 24 * 2**30, 0, (8, 6))])
    named = setup.prepare_config(load(said.stdout.split()))[1].named
    assert list(named) == ["before", "initial", "fixes"]
    assert sum(map(len, named.values())) == said.stdout.count("named.") + 1, "before also takes its batch in one pass"


@pytest.mark.parametrize("heading", ["Parquet", "Klines of Binance", "HistData"])
def test_the_page_of_data_writes_bars_that_are_read(heading: str, folder: Path) -> None:
    times = pd.date_range("2024-01-30", periods=72, freq="h", tz="UTC")
    wanted = pd.DataFrame({name: np.arange(1.0, 73.0) for name in ("open", "high", "low", "close")}, index=times)
    wanted["volume"] = 7.0
    if heading == "Parquet":
        wanted.rename(columns=str.title).to_parquet(folder / "EURUSD.parquet")
    elif heading == "HistData":
        eastern = wanted.set_index((times - pd.Timedelta("5h")).strftime("%Y%m%d %H%M%S"))
        eastern.to_csv(folder / "DAT_ASCII_EURUSD_M1_2024.csv", sep=";", header=False)
    else:
        klines = wanted.set_index(times.tz_localize(None).as_unit("ms").astype("int64")).assign(closed=1, trades=2)
        for month, part in (("01", klines[:48]), ("02", klines[48:])):
            part.to_csv(folder / f"BTCUSDT-1h-2024-{month}.zip", header=False)
    exec(example(heading), {})  # noqa: S102
    symbol = "BTCUSDT" if heading == "Klines of Binance" else "EURUSD"
    found = bars.read(folder / f"{symbol}.csv")[symbol]
    assert list(found.index) == list(times)
    assert found.to_numpy().tolist() == wanted.to_numpy().tolist()


def test_the_page_of_data_writes_sequences_of_an_archive(folder: Path) -> None:
    head = "#comment\n@problemName JapaneseVowels\n@univariate false\n@classLabel true 1 2\n@data\n"
    (folder / "JapaneseVowels_TRAIN.ts").write_text(f"{head}1,2,3:4,5,6:1\n7,8:9,10:2\n", encoding="utf-8")
    (folder / "JapaneseVowels_TEST.ts").write_text(f"{head}0.5:1.5:2\n", encoding="utf-8")
    exec(example("UCR and UEA archives"), {})  # noqa: S102
    train, test = npy_sequences.read_splits(folder / "vowels", None, 0)
    assert [(one.label, npy_sequences.load(one).tolist()) for one in train + test] == [
        ("1", [[1, 4], [2, 5], [3, 6]]),
        ("2", [[7, 9], [8, 10]]),
        ("2", [[0.5, 1.5]]),
    ]


def test_the_page_of_data_writes_sequences_into_one_file(folder: Path) -> None:
    pytest.importorskip("h5py")
    parts, names = ("train", "val"), ("recordings.h5", "recordings")
    arrays = [(split, label, f"{split}{label}", np.full((3, 2), len(split))) for split in parts for label in "ab"]
    npy_sequences.write(folder / "recordings", arrays)
    exec(example("HDF5"), {})  # noqa: S102
    for inside, outside in zip(*(npy_sequences.read_splits(folder / name, None, 0) for name in names), strict=True):
        assert [(r.label, npy_sequences.load(r).tolist()) for r in inside] == [
            (r.label, npy_sequences.load(r).tolist()) for r in outside
        ]


def test_the_training_by_hand_on_the_page_of_data_is_valid() -> None:
    (command,) = [block for block in blocks("data", "") if "workload=signals" in block and "named.after" in block]
    assert study.main([*shlex.split(command.replace("\\\n", " "))[3:], "--validate"]) == 0


def test_the_page_of_data_gives_a_tuning_by_hand_that_is_valid(folder: Path) -> None:
    command = example("Tuned by hand").replace("\\\n", " ").splitlines()[0]
    assert study.main(shlex.split(command)[3:]) == 0
    config = load([word for word in shlex.split(command)[3:] if "=" in word])
    assert {config.space.whole(named)["network"] for named in config.named.values()} == {"lstm"}


@pytest.mark.workload
def test_the_page_of_data_reads_a_problem_of_tsplib(folder: Path) -> None:
    points = np.random.default_rng(0).permutation(900)[:60].reshape(30, 2)
    rows = "".join(f"{number} {x}.0 {y}.0\n" for number, (x, y) in enumerate(points, 1))
    head = "NAME: berlin52\nTYPE: TSP\nDIMENSION: 30\nEDGE_WEIGHT_TYPE: EUC_2D\n"
    (folder / "berlin52.tsp").write_text(f"{head}NODE_COORD_SECTION\n{rows}EOF\n", encoding="utf-8")
    (folder / "my_tours.py").write_text(example("TSPLIB"), encoding="utf-8")
    workload: Any = workload_files.load("my_tours.py")
    options = {**workload.options, "train_samples": 64, "val_samples": 16}
    assert said_of(folder / "my_tours.py", options) == ""
    seen: list[set[tuple[float, ...]]] = []
    for split, count in (("train", 64), ("val", 16)):
        found = workload.dataset(Config(options=options), split)._instances
        assert [len(one.order) for one in found] == [15] * count
        x, y = (found[0].points[:, None] - found[0].points[None]).transpose(2, 0, 1)
        assert np.array_equal(found[0].distances, np.rint(np.hypot(x, y)))
        seen.append({tuple(point) for one in found for point in one.points})
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == {tuple(point) for point in points}


@pytest.mark.workload
def test_the_page_of_data_validates_on_aflw2000(folder: Path) -> None:
    for number, yaw in enumerate((10, 20, 30, 120)):  # the last is turned beyond the limit
        write_mat(folder / "300W_LP" / "LFPW" / f"LFPW_image_train_{number:04d}_0", (yaw, 0, 0))
        solid = np.vstack([box_of_points(100, 120, 300, 320), np.zeros((1, 68))])
        hidden = np.full((2, 21), -1.0)
        write_mat(folder / "AFLW2000" / f"image{number:05d}", (-yaw, 5, 0), pt2d=hidden, pt3d_68=solid)
    (folder / "mine.py").write_text(example("AFLW2000-3D"), encoding="utf-8")
    workload: Any = workload_files.load("mine.py")
    assert said_of(folder / "mine.py", workload.options) == ""
    found = workload.faces(Config(options=workload.options))
    assert len(found["train"]) == 2
    assert [one.image.name for one in found["val"]] == ["image00000.jpg", "image00001.jpg", "image00002.jpg"]
    assert found["val"][1].angles_deg == pytest.approx((-20, 5, 0), abs=1e-4)
    assert {one.box for one in found["val"]} == {(9, -20, 391, 362)}
    assert len(workload.dataset(Config(options=workload.options), "val")) == 3


def said_of(path: Path, options: dict[str, Any] = SMALL) -> str:
    """Returns what a person is told of a file: the error and its special remedy, "" where it is right."""
    try:
        config = setup.prepare_config(load([f"workload={path.name}"]), Here())[1]
        session = Session(WorkerConfig(path.name, options=options))
        session.warm({})
        session.describe({})
        session.sanity_check({**KNOBS, **{n: v for n, v in config.space.fixed.items() if n not in KNOBS}})
    except TuningError as error:
        said = str(error)
    except Exception as error:
        said = str(user_code.error_of(user_code.failed(error), str(path)))
    else:
        return ""
    lines = said.replace(f"{path.parent}/", "").splitlines()
    kept = [line for line in lines if line.startswith(("error", "  try")) and "try: mend it" not in line]
    return "".join(f"{line}\n" for line in kept)


def _method(signature: str, line: str) -> str:
    return f"    def {signature}:\n        {line}\n"


CROSS = 'nn.functional.cross_entropy(model(batch["x"], batch["steps"]), batch["labels"]'
MISTAKES = {
    "loss returns nothing": _method("loss(self, model, batch)", f"{CROSS})"),
    "loss returns a loss for each sample": _method("loss(self, model, batch)", f'return {CROSS}, reduction="none")'),
    "loss is cut from the model": _method("loss(self, model, batch)", f"return {CROSS}).detach()"),
    "loss is nan": _method("loss(self, model, batch)", f'return {CROSS}) * float("nan")'),
    "samples differ in shape without collate": "    collate = staticmethod(torch.utils.data.default_collate)\n",
    "evaluate returns a number": _method("evaluate(self, model, batches)", "return 0.9"),
    "evaluate names it otherwise": _method("evaluate(self, model, batches)", 'return {"acc": 0.9}'),
    "dataset returns other samples each time": _method(
        "dataset(self, config, split)", "return [(torch.randn(20), 0) for _ in range(64)]"
    ),
    "dataset is a stream": _method("dataset(self, config, split)", "return (wave for wave in waves(64, 1))"),
    "model returns nothing": _method("model(self, config)", "pass"),
    "optimizer returns nothing": _method("optimizer(self, model, config)", "pass"),
    "schedule returns nothing": _method("schedule(self, progress, config)", "pass"),
    "parameter_groups returns parameters": _method(
        "parameter_groups(self, model, config)", "return model.parameters()"
    ),
    "length returns no number": _method("length(self, sample)", 'return "long"'),
    "baselines are numbers": _method("baselines(self, config)", 'return {"one class": 0.25}'),
    "shares of phases do not sum to 1": _method("phases(self, config)", 'return {"first": 0.5, "second": 0.6}'),
    "objectives are neither max nor min": '    objectives = {"accuracy": "up"}\n',
    "default_space names what is no knob": '    default_space = {"momentun": [0.0, 0.9]}\n',
    "an own knob has the name of one of the loop's": '    knobs = {"batch_size": Knob(32, "both", values=(16, 32))}\n',
    "a hook is missing": "    evaluate = None\n",
    "a hook is misspelt": _method("shedule(self, progress, config)", "return 1.0"),
    "WORKLOAD is missing": "    pass\n",
}
"""What is wrong with a class that is else that of my_workload.py."""


def test_the_page_quotes_every_mistake_that_is_tried() -> None:
    (quoted,) = blocks("workload", "text")
    assert re.findall(r"^# (.*)$", quoted, flags=re.M) == list(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_as_the_page_quotes_it(mistake: str, folder: Path) -> None:
    body = MISTAKES[mistake]
    last = "" if mistake == "WORKLOAD is missing" else "WORKLOAD = Mine()\n"
    (folder / "mine.py").write_text(f"{IMPORTS}\n\nclass Mine(Waves):\n{body}\n{last}", encoding="utf-8")
    (quoted,) = blocks("workload", "text")
    assert f"# {mistake}\n{said_of(folder / 'mine.py')}" in quoted
