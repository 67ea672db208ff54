"""What a user's own code does wrong is said before anything is measured: where, and which hook would help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from trainables.knobs import Scalar
from trainables.ram_cache import CacheTooLarge
from trainables.workload import Config, HookFailed
from trainables.workload_files import load
from tuning.config.errors import TuningError, UserCodeError
from tuning.study import setup
from tuning.workers import user_code
from tuning.workers.session import Session
from tuning.workers.worker import Worker
from tuning.workers.worker_config import Description, WorkerConfig

DATA = Path(__file__).parents[2] / "data"
KNOBS = {"batch_size": 16, "micro_batch_size": 8}
FILE = """
import sys
import torch
from torch.utils.data import TensorDataset
from tests.data.mine import Moons

class Mine(Moons):
    calls = 0
{body}

WORKLOAD = Mine()
"""
ITEM = """
    def dataset(self, config, split):
        class Items:
            def __len__(self):
                return 64
            def __getitem__(self, index):
                raise FileNotFoundError(f"no image {index}")
        return Items()
"""
SIZES = """
    def dataset(self, config, split):
        self.calls += 1
        whole = super().dataset(config, split)
        return TensorDataset(*whole[: 100 + self.calls])
"""
HOOK = """
    def {signature}:
        {line}
"""


def _loss(line: str) -> str:
    return HOOK.format(signature="loss(self, model, batch)", line=line)


def _evaluate(line: str) -> str:
    return HOOK.format(signature="evaluate(self, model, batches)", line=line)


# What else goes wrong is quoted on the page of the contract: tests/test_pages.py.
WRONG = {
    "item": (ITEM, "`dataset(config, 'train')` of mine.py raised FileNotFoundError: no image", "-v shows"),
    "sizes": (SIZES, "returned 101 samples, and then 102", "-v shows"),
    "matrix": (_loss("return model(batch[0].T).mean()"), "raised RuntimeError: mat1 and mat2", "-v shows"),
    "cuda": (_loss("return model(batch[0].cuda()).mean()"), "raised", "leave out .cuda()"),
    "exit": (_loss("sys.exit(2)"), "it calls sys.exit", "-v shows"),
    "list": (_evaluate("return {'accuracy': [0.5, 0.6]}"), "returned accuracy=a list", "-v shows"),
}


def _said(path: Path) -> TuningError:
    """Returns what a person is told of the file, without the time that a process takes."""
    try:
        session = Session(WorkerConfig(str(path)))
        session.warm({})
        session.sanity_check(KNOBS)
    except (Exception, SystemExit) as error:
        return user_code.error_of(user_code.failed(error), str(path))
    raise AssertionError("nothing was found")


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_named_with_what_would_help(name: str, tmp_path: Path) -> None:
    body, what, remedy = WRONG[name]
    (tmp_path / "mine.py").write_text(FILE.format(body=body), encoding="utf-8")
    error = _said(tmp_path / "mine.py")
    said = str(error)
    assert isinstance(error, UserCodeError)
    assert error.exit_code == 1
    assert what in said
    assert remedy in said
    assert len(said.splitlines()) <= 8
    if "raised" in what:
        assert "session.py" not in error.traceback
        assert error.traceback.count("Traceback (most") == 1
    if name in ("item", "matrix"):
        assert 'mine.py", line ' in said
        assert said.splitlines()[2].strip() in FILE.format(body=body)


WAITS = """
    def loss(self, model, batch):
        said = ""
        try:
            breakpoint()
        except RuntimeError as error:
            said = str(error)
        assert "there is no terminal here" in said
        import pdb; pdb.set_trace()
"""


def test_what_waits_for_a_terminal_is_said_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE.format(body=WAITS), encoding="utf-8")
    with Worker(WorkerConfig(str(tmp_path / "mine.py"))) as worker, pytest.raises(UserCodeError) as raised:
        worker.sanity_check(KNOBS)
    assert "a debugger, and there is no terminal here" in str(raised.value)
    assert "leave it out" in raised.value.remedy
    assert "mine.py" in str(raised.value)


def test_a_data_set_that_cannot_be_read_is_their_code_too(tmp_path: Path) -> None:
    body = HOOK.format(signature="dataset(self, config, split)", line="return open('/no/such.csv')")
    (tmp_path / "mine.py").write_text(FILE.format(body=body), encoding="utf-8")
    error = _said(tmp_path / "mine.py")
    assert isinstance(error, UserCodeError)
    assert "mine.py raised FileNotFoundError" in str(error)
    assert "line 11, in dataset" in str(error)
    assert "session.py" not in error.traceback


def test_what_a_loaders_process_raised_is_said_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE.format(body=ITEM), encoding="utf-8")
    items = load(str(tmp_path / "mine.py")).dataset(Config(), "train")  # type: ignore[union-attr]
    with pytest.raises(FileNotFoundError) as raised:
        next(iter(DataLoader(items, num_workers=1)))
    failed = user_code.failed(raised.value)
    assert (failed.kind, failed.text) == ("FileNotFoundError", "no image 0")
    assert "in __getitem__" in failed.last_lines
    assert user_code.in_a_line(raised.value) == "FileNotFoundError: no image 0 (mine.py:15)"
    hook = HookFailed("dataset", f"raised FileNotFoundError: {raised.value}")
    assert user_code.failed(hook).text == "raised FileNotFoundError: no image 0"


HEAD = 'Caught E in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "a.py", line 1\n'


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (f"{HEAD}    x = 1 / 0\nOSError: a\n  b: 3\nc: 4\n", "OSError: a\n  b: 3\nc: 4"),
        (f"{HEAD}    raise\nPIL.UnidentifiedImageError: no image\n", "UnidentifiedImageError: no image"),
        (f"{HEAD}    assert x\nAssertionError\n", "AssertionError"),
        (f"{HEAD}    raise\nKeyError: 1\n\nTraceback (most recent call last):\n  File\nOSError: b", "OSError: b"),
        (f"{HEAD}    raise\nOSError: {HEAD}    raise\nOSError: b", "OSError: b"),
        ("Caught a fish in a net", "ValueError: Caught a fish in a net"),
        (f"{HEAD}    cut off", f"ValueError: {HEAD}    cut off"),
        ("x" * 200_000, "ValueError: " + "x" * 200_000),
    ],
)
def test_what_torch_wraps_is_unwrapped_and_nothing_else(told: str, said: str) -> None:
    assert user_code.in_words(ValueError(told)) == said


class Here(Worker):
    """A worker that answers in this process."""

    def start(self) -> None:
        """Starts none."""

    def describe(self, knobs: Mapping[str, Scalar]) -> Description:
        """Returns what the workload is, or raises what is wrong with it, as from a process of its own."""
        try:
            return Session(self.config).describe(knobs)
        except Exception as error:
            raise user_code.error_of(user_code.failed(error), self.config.workload) from None


LOOPS = {
    "knob": (
        'run["momentum"]',
        'run["momentun"]',
        "run['momentun']: there is no such knob: did you mean run['momentum']?",
    ),
    "other": (
        'run["momentum"]',
        'run["width"]',
        "run['width']: there is no such knob: give it a value or values in SPACE",
    ),
    "report": (
        "run.report(accuracy=",
        "run.report(acuracy=",
        "run.report has ['acuracy'], without accuracy of OBJECTIVES",
    ),
}


def test_samples_of_unequal_length_in_a_loop_of_ones_own_are_told_where_collate_goes(tmp_path: Path) -> None:
    text = (DATA / "plain_loop.py").read_text(encoding="utf-8")
    unequal = "DataLoader([(torch.zeros(2 + i % 3), 0) for i in range(1024)]"
    (tmp_path / "mine.py").write_text(text.replace("DataLoader(TRAIN", unequal), encoding="utf-8")
    with Here(WorkerConfig(str(tmp_path / "mine.py"))) as worker, pytest.raises(UserCodeError) as raised:
        setup.describe_workload(worker, {}, {})
    assert "in a loop of your own, DataLoader(collate_fn=...)" in raised.value.remedy


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_of_ones_own_asks_wrongly_is_said_with_its_line(name: str, tmp_path: Path) -> None:
    right, wrong, says = LOOPS[name]
    text = (DATA / "plain_loop.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace(right, wrong), encoding="utf-8")
    with Here(WorkerConfig(str(tmp_path / "mine.py"))) as worker, pytest.raises(UserCodeError) as raised:
        setup.describe_workload(worker, {}, {})
    said = str(raised.value)
    assert says in said
    line = next(n for n, own in enumerate(text.replace(right, wrong).splitlines(), 1) if wrong in own)
    assert f'mine.py", line {line}, in train' in said
    assert raised.value.exit_code == 1


NEEDS_BOTH = """
    def dataset(self, config, split):
        whole = super().dataset(config, split)
        points, label = whole[:]
        order = label.argsort(stable=True) if split == "val" else torch.arange(len(label))
        return TensorDataset(points[order], label[order])

    def evaluate(self, model, batches):
        labels = torch.cat([label for _, label in batches])
        if len(labels) < 100:
            raise ValueError("only one class is present: the area under the curve is not defined")
        return {"accuracy": 0.5}
"""


def test_a_metric_that_a_few_samples_do_not_define_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE.format(body=NEEDS_BOTH), encoding="utf-8")
    session = Session(WorkerConfig(str(tmp_path / "mine.py")))
    session.warm({})
    assert session.sanity_check(KNOBS).values == {"accuracy": 0.5}


def test_a_ram_cache_that_was_asked_for_and_is_too_large_can_be_left_out() -> None:
    for error, remedy in (
        (CacheTooLarge("about 49 s to prepare, 3 s are allowed"), "knobs.ram_cache=false, or a larger search.max_time"),
        (MemoryError("none is left"), "a smaller model, or more memory"),
    ):
        found = user_code.error_of(user_code.failed(error), "nli")
        assert found.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (ModuleNotFoundError("No module named 'timm'"), True),
        (OSError(28, "No space left on device"), True),
        (MemoryError("none is left"), True),
        (ValueError("a mistake"), False),
    ],
)
def test_what_fails_by_a_package_a_file_or_a_driver_may_load_on_another_machine(
    error: Exception, elsewhere: bool
) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    assert user_code.error_of(user_code.failed(raised.value), "mine.py").elsewhere == elsewhere
    below = RuntimeError("Found no NVIDIA driver on your system")  # not through a line of theirs
    assert user_code.error_of(user_code.failed(below), "mine.py").elsewhere
