"""Training from a best.yaml: what is refused before anything is written, and that a signal loses nothing."""

import fcntl
import gzip
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.commands import ROOT
from trainables import checkpoint
from trainables.source import source_hash
from trainables.workload import Config
from trainables.workload_files import load
from tuning import __main__, load_model
from tuning.cli import live, training_start
from tuning.cli.training_job import TrainingResult
from tuning.config import best_file
from tuning.config.errors import ConfigError
from tuning.workers import nvml

# Sends itself a signal: SIGNAL_AT is "loss 7 2" for signal 2 in the seventh call of loss().
SIGNALLING = """
import os
from collections import Counter
from tests.data.mine import Moons

class Signalling(Moons):
    options = {**Moons.options, "count": 1024}
    calls = Counter()

    def heard(self, name):
        print(f"{name} is called")
        self.calls[name] += 1
        at, call, signum = os.environ.get("SIGNAL_AT", "- 0 0").split()
        if (name, self.calls[name]) == (at, int(call)):
            os.kill(os.getpid(), int(signum))

    def model(self, config):
        self.heard("model")
        return super().model(config)

    def dataset(self, config, split):
        whole = super().dataset(config, split)
        return [whole[i] for i in range(min(len(whole), config.options.get("count", 1024)))]

    def loss(self, model, batch):
        self.heard("loss")
        return super().loss(model, batch)

    def evaluate(self, model, batches):
        self.heard("evaluate")
        return super().evaluate(model, batches)

WORKLOAD = Signalling()
"""
STEPS = 32
WHOLE = Path(__file__).parents[2] / "data" / "mine_best.yaml"


@pytest.fixture
def best(tmp_path, monkeypatch):
    """A best.yaml of 32 optimiser steps with its workload's file beside it, in a folder with a space in its name."""
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "signalling.py").write_text(SIGNALLING, encoding="utf-8")
    text = WHOLE.read_text(encoding="utf-8").replace("MINE", str(folder / "signalling.py"))
    (folder / "best.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may have been started with it ignored
    return folder / "best.yaml"


def train(best: Path, *arguments: str) -> int:
    """Returns the exit code of one command that writes a checkpoint at every step."""
    return __main__.main(["train", "--from", str(best), "--checkpoint-every", "0.001", *arguments])


def edit(best: Path, section: str, key: str, value: object) -> None:
    """Changes one value of the best.yaml."""
    body = yaml.safe_load(best.read_text(encoding="utf-8"))
    body[section][key] = value
    best.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")


def result(folder: str) -> dict[str, object]:
    found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    return {name: found[name] for name in ("samples", "values", "model_sha256")}


def test_knobs_at_their_defaults_are_not_said_to_be_dishonoured(best, capsys):
    edit(best, "knobs", "channels_last", True)
    assert train(best) == 0
    notes = [line for line in " ".join(capsys.readouterr().err.split()).split("note: ") if "was set" in line]
    assert [note.split("=")[0] for note in notes] == ["channels_last"]


@pytest.mark.parametrize(("signum", "code", "step"), [(signal.SIGINT, 130, 7), (signal.SIGTERM, 143, STEPS)])
def test_a_signal_saves_a_checkpoint_and_the_printed_command_goes_on(best, signum, code, step, monkeypatch, capsys):
    before = signal.getsignal(signum)
    monkeypatch.setenv("SIGNAL_AT", f"loss {step} {int(signum)}")
    assert train(best, "--out", "my out", "--seed", "3") == code
    assert signal.getsignal(signum) == before
    said, go_on = capsys.readouterr().err.splitlines()[-2:]
    found = re.fullmatch(rf"interrupted by {signum.name}; saved at (\d+) of 2048 samples", said)
    assert found  # at the end of the window, which holds another step where one took under a millisecond
    assert 64 * step <= int(found[1]) <= min(2048, 64 * (step + 3))
    assert not Path("my out", "result.json").exists()

    command = shlex.split(go_on.removeprefix("resume with: "))
    assert command[:4] == ["python", "-m", "tuning", "train"]
    assert __main__.main(command[3:]) == 0
    assert train(best, "--out", "whole", "--seed", "3") == 0
    assert result("my out") == result("whole")
    assert {p.name for p in Path("my out").iterdir()} == {"result.json", "model.safetensors"}


READING = """self.heard("model")
        import argparse
        argparse.ArgumentParser().parse_args()"""


def test_code_that_reads_a_command_line_finds_an_empty_one(best, monkeypatch):
    (best.parent / "signalling.py").write_text(SIGNALLING.replace('self.heard("model")', READING), encoding="utf-8")
    ours = ["tuning", "train", "--from", str(best)]
    monkeypatch.setattr(sys, "argv", ours)
    assert train(best) == 0
    assert sys.argv == ours


def test_a_signal_during_the_last_evaluation_lets_it_end(best, monkeypatch):
    monkeypatch.setenv("SIGNAL_AT", f"evaluate 1 {int(signal.SIGTERM)}")
    assert train(best, "--out", "out") == 0
    assert result("out")["samples"] == 2048


def test_a_signal_before_the_first_step_leaves_no_folder(best, monkeypatch, capsys):
    monkeypatch.setenv("SIGNAL_AT", f"model 1 {int(signal.SIGINT)}")
    assert train(best, "--out", "some/out") == 130
    said, go_on = capsys.readouterr().err.splitlines()[-2:]
    assert said == "interrupted by SIGINT before the first step"
    assert shlex.split(go_on.removeprefix("begin again with: "))[-2:] == ["--out", "some/out"]
    assert not Path("some").exists()


@pytest.mark.parametrize(
    ("arguments", "says", "remedy"),
    [
        (["--seed", "4294967296"], "--seed 4294967296", "--seed 0"),
        (["--seed", "-1"], "--seed -1", "--seed 0"),
        (["--samples", "1" + "0" * 5000], "--samples 1000", "--samples 10000"),
        (["--samples", "٣"], "--samples ٣", "--samples 10000"),
        (["--epochs", "inf"], "--epochs inf", "--epochs 3"),
        (["--epochs", "1e-6"], "--epochs 1e-06 is not one of 1024 samples", "--epochs 1"),
        (["--checkpoint-every", "nan"], "--checkpoint-every nan", "--checkpoint-every 60"),
        (["--device", "cuda"], "there is no CUDA device here", "--device cpu"),
        (["--out", "file"], "--out file is a file", "--out FOLDER"),
        (["--out", "/proc/nowhere/out"], "--out /proc/nowhere/out cannot be written", "--out FOLDER"),
        (["--out", "new/out", "--resume"], "holds no checkpoint", "leave out --resume"),
        (["last"], "last: one configuration is trained", "leave it out"),
        (["--evaluate-every", "0"], "--evaluate-every 0", "--evaluate-every 1"),
        (["--patience", "0.5"], "--patience 0.5", "--patience 3"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_error_with_code_2_and_writes_nothing(best, arguments, says, remedy, monkeypatch, capsys):
    monkeypatch.setattr(nvml, "gpus", list)
    Path("file").write_text("mine", encoding="utf-8")
    before = sorted(Path().rglob("*"))
    assert __main__.main(["train", "--from", str(best), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, "Traceback" in err) == ("", False)
    lines = err[err.index("error: ") :].strip().splitlines()
    assert says in lines[0]
    assert remedy in lines[-1]
    assert lines[-1].startswith("  try: ")
    assert [p for p in sorted(Path().rglob("*")) if "__pycache__" not in p.parts] == before


@pytest.mark.parametrize(
    ("named", "says"),
    [([], "no configuration was named"), (["other"], "other: no run of this id in runs"), (["last"], "runs/mine/one")],
)
def test_run_is_trained_by_its_id(best, named, says, capsys):
    folder = Path("runs/mine/one")
    folder.mkdir(parents=True)
    (folder / "trials.jsonl").touch()
    (folder / "best.yaml").write_text(best.read_text().replace("knobs:", "knob:"), encoding="utf-8")
    assert __main__.main(["train", *named]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ref", "options", "says"),
    [
        ("", {"hiden": 64}, "the workload has no option hiden allowed: count, hidden, noise try: did you mean"),
        ("", {"hidden": "wide"}, "workload.hidden=wide is not allowed allowed: a whole number"),
        ("", {"count": 0}, "best.yaml: the training split of"),
        ("", {"hub_token": "***"}, "workload.options.hub_token is a secret, which was not written down"),
        ("signals", {"data": "/nowhere/waves"}, "best.yaml: workload.data=/nowhere/waves: "),
        ("my.moons", {}, "try: type it where its run was started"),
    ],
)
def test_a_workload_edited_by_hand_is_checked(best, ref, options, says, capsys):
    if ref:
        edit(best, "workload", "ref", ref)
    edit(best, "workload", "options", options)
    assert train(best, "--out", "out") == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()


def test_an_option_of_the_workload_may_be_typed(best, capsys):
    assert train(best, "workload.hiden=8", "--out", "out") == 2
    assert "did you mean workload.hidden?" in capsys.readouterr().err
    assert train(best, "knobs.batch_size=8", "--out", "out") == 2
    assert "train takes options of the workload and its place" in capsys.readouterr().err
    assert not Path("out").exists()
    assert train(best, "--out", "out", "workload.hidden=8", "--samples", "64") == 0
    assert load_file("out/model.safetensors")["0.weight"].shape == (8, 2)


def test_a_folder_has_one_training_at_a_time(best, capsys):
    Path("out").mkdir()
    other = os.open("out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert train(best, "--out", "out") == 2
    assert "--out out is in use by another training" in capsys.readouterr().err
    os.close(other)
    assert train(best, "--out", "out") == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_optimizer_that_no_checkpoint_holds_trains_without(best, interrupted, monkeypatch, capsys):
    def save(*_, **__):
        raise checkpoint.CheckpointError("Keeping keeps a dict, kept, which no checkpoint holds")

    monkeypatch.setattr(checkpoint, "save", save)
    if interrupted:
        monkeypatch.setenv("SIGNAL_AT", f"loss 7 {int(signal.SIGINT)}")
    assert train(best, "--out", "out") == (130 if interrupted else 0)
    err = " ".join(capsys.readouterr().err.split())
    assert "note: trains without checkpoints: Keeping keeps a dict, kept, which no checkpoint holds" in err
    assert ("samples are lost, for Keeping keeps a dict" in err) is interrupted
    assert Path("out/model.safetensors").exists() is not interrupted


OOM = "raise __import__('torch').OutOfMemoryError('CUDA out of memory')"


@pytest.mark.parametrize(
    ("hook", "line", "code", "said"),
    [
        ("loss", "return super().loss(model, batch) / 0.0", 4, "a lower learning_rate in best.yaml, and --force"),
        ("loss", OOM, 4, "out of memory: CUDA out of memory try: halve knobs.micro_batch_size (64)"),
        ("dataset", OOM, 3, "cannot start: CUDA out of memory try: a larger card, or --device"),
        ("evaluate", "return {}['no such key']", 1, "error: signalling.py raised KeyError: 'no such key'"),
        ("model", "return {}['no such key']", 1, "error: signalling.py raised KeyError: 'no such key'"),
    ],
)
def test_what_fails_is_one_error_with_its_remedy(hook, line, code, said, best, capsys):
    file = best.parent / "signalling.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(rf"(    def {hook}\(.*:\n)", rf"\1        {line}\n", text), encoding="utf-8")
    assert train(best, "--out", "out") == code
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert ('signalling.py", line ' in err) == (code == 1)
    assert "Traceback" not in err


def test_a_finished_or_unfinished_folder_is_not_overwritten_unasked(best, monkeypatch, capsys):
    assert train(best, "--out", "out") == 0
    whole = result("out")
    assert train(best, "--out", "out") == 2
    assert "holds a finished run" in capsys.readouterr().err
    monkeypatch.setenv("SIGNAL_AT", f"loss {STEPS + 3} {int(signal.SIGINT)}")
    assert train(best, "--out", "out", "--force") == 130
    monkeypatch.delenv("SIGNAL_AT")
    go_on = capsys.readouterr().err.splitlines()[-1]
    assert "--force" not in go_on
    assert train(best, "--out", "out") == 2
    assert "holds an unfinished run" in capsys.readouterr().err
    assert train(best, "--out", "out", "--resume") == 0
    assert result("out") == whole


def test_what_their_code_prints_is_no_part_of_the_json(best, capsys):
    assert __main__.main(["train", "--from", str(best), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["samples"] > 0
    assert "loss is called" in err


def test_a_workload_that_was_moved_is_named_where_it_is_now_and_what_has_changed_is_said(best, capsys):
    file = best.parent / "signalling.py"
    edit(best, "provenance", "workload_sha256", source_hash(load(str(file))))
    file.rename("moved.py")
    assert train(best, "--samples", "64", "--out", "out") == 2
    assert "workload=FILE.py says where it is now" in " ".join(capsys.readouterr().err.split())
    assert train(best, "workload=lost.py", "--samples", "64", "--out", "out") == 2
    assert "workload=lost.py: the file does not exist" in capsys.readouterr().err
    assert train(best, "workload=moved.py", "workload.hidden=8", "--samples", "64", "--out", "out") == 0
    assert "has changed" not in capsys.readouterr().err
    Path("moved.py").write_text(f"{SIGNALLING}# now", encoding="utf-8")
    assert train(best, "workload=moved.py", "--samples", "64", "--out", "other") == 0
    assert "moved.py, or what it imports, has changed since best.yaml was measured" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["code", "data", "device", "nothing", "code, and an older checkpoint"])
def test_a_checkpoint_of_other_code_data_or_device_is_said(best, change, monkeypatch, capsys):
    path, kept = best.parent / "signalling.py", Path("out", "checkpoint.json")
    text = SIGNALLING.replace('config.options.get("count", 1024)', 'int(os.environ.get("COUNT", "1024"))')
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("SIGNAL_AT", f"loss 7 {int(signal.SIGTERM)}")
    assert train(best, "--out", "out") == 143
    monkeypatch.delenv("SIGNAL_AT")
    written = json.loads(kept.read_text(encoding="utf-8"))
    if change == "data":
        monkeypatch.setenv("COUNT", "1000")
    elif change == "device":
        kept.write_text(json.dumps({**written, "made_of": {**written["made_of"], "device": "H100"}}), encoding="utf-8")
    elif "code" in change:
        path.write_text(f"{text}# now", encoding="utf-8")
    if "older" in change:
        kept.write_text(json.dumps({n: v for n, v in written.items() if n != "made_of"}), encoding="utf-8")
    capsys.readouterr()
    assert train(best, "--out", "out", "--resume") == 0
    said = re.findall("warning: ([^:;]*); what the checkpoint has learned", " ".join(capsys.readouterr().err.split()))
    if change == "device":
        assert said[0].startswith("device was H100 and is ")
    else:
        assert said == {"code": ["the workload's source has changed"], "data": ["data has changed"]}.get(change, [])


OWN = """
import torch
from trainables.own_count import Ended

def train(run):
    net = torch.nn.Linear(2, 1)
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=run["learning_rate"]))
    for (x,) in run.batches(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 2)), 16)):
        run.backward(model(x).mean(), optimizer)
        if run.evaluate_now:
            run.report(error=1.0)
    raise Ended("the run was over before")

SPACE = {"learning_rate": [0.1, 0.01]}
OBJECTIVES = {"error": "min"}
"""


@pytest.fixture
def own(best):
    """A best.yaml of a loop of one's own, whose passes have 64 samples."""
    (best.parent / "own.py").write_text(OWN, encoding="utf-8")
    body = yaml.safe_load(best.read_text(encoding="utf-8"))
    body["workload"] = {"ref": str(best.parent / "own.py"), "options": {}}
    lacking = ("dropout", "adapter", "adapter_rank")
    body["knobs"] = {name: value for name, value in body["knobs"].items() if name not in lacking}
    best.write_text(yaml.safe_dump(body), encoding="utf-8")
    return best


def test_what_is_remarked_upon_in_a_loop_of_ones_own_is_a_note(own, capsys):
    assert train(own, "--samples", "64") == 0
    assert "note: the run was over before" in capsys.readouterr().err


def test_a_loop_of_ones_own_trains_for_passes_or_one_where_nothing_says_how_long(own, capsys):
    assert train(own, "--epochs", "2.5", "--out", "out") == 0
    assert result("out")["samples"] == 160
    assert train(own, "--epochs", "1e-6") == 2
    assert "--epochs 1e-06 is not one of 64 samples" in capsys.readouterr().err
    edit(own, "train", "samples", None)
    assert train(own, "--out", "one") == 0
    assert result("one")["samples"] == 64


@pytest.mark.parametrize(("samples", "after"), [(400, " after 400 samples"), (500, ""), (None, " after 900 samples")])
def test_a_training_is_compared_after_as_many_samples(samples: int | None, after: str) -> None:
    read = best_file.read(ROOT / "benchmarks" / "results" / "best" / "signals.yaml")
    best = replace(read, samples=900, measured=read.measured.model_copy(update={"samples": samples}))
    result = TrainingResult(500, 0, False, 0, {"accuracy": 0.7}, 1000.0, 1.0, 0, 0.1, "cpu", 1, {}, None)
    fast, early, good = training_start.figures(replace(result, weights_at=500, ended_early=True), best)
    assert fast == "1000.0 samples/s  (signals.yaml, another day: 1974.7, -49.4%)"
    assert early == "ended early, after 500 samples"
    today = best.provenance.model_copy(update={"created": datetime.now(UTC).isoformat()})
    assert ", another day" not in next(training_start.figures(result, replace(best, provenance=today)))
    said = f"accuracy 0.7000  (signals.yaml{after}: 0.9822, another is expected within 0.9631 to 1.0000)"
    assert good.startswith(said)


KEPT = ["--keep", "best", "--evaluate-every", "0.25"]


def course(folder: str) -> list[object]:
    """Returns all of a result that must not depend on interruptions."""
    found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    evaluations = [(one["samples"], one["values"]) for one in found["evaluations"]]
    return [result(folder), found["weights_at"], found["ended_early"], evaluations]


@pytest.mark.parametrize("step", [3, 4, 8, 14, 16])  # 4, 8 and 16 are followed by an evaluation; at 16 patience ends it
def test_best_averaged_weights_and_patience_survive_signals(best, step, monkeypatch, capsys):
    edit(best, "knobs", "ema_decay", 0.99)
    asked = [*KEPT, "--patience", "2", "--seed", "2"]
    assert train(best, "--out", "whole", *asked) == 0
    steps = course("whole")[0]["samples"] // 64
    if steps < step:
        pytest.skip("patience has ended it before")
    monkeypatch.setenv("SIGNAL_AT", f"loss {steps + step} {int(signal.SIGTERM)}")
    assert train(best, "--out", "broken", *asked) == 143
    monkeypatch.delenv("SIGNAL_AT")
    assert train(best, "--out", "broken", "--resume", *KEPT, "--seed", "2") == 2
    assert "belongs to another configuration" in capsys.readouterr().err
    assert train(best, "--out", "broken", "--resume", *asked) == 0
    assert course("broken") == course("whole")


def test_patience_ends_a_training_and_the_best_weights_are_written(best, capsys):
    file = best.parent / "signalling.py"
    scripted = 'found = {"accuracy": [0.5, 0.7, 0.6, 0.7][self.calls["evaluate"] - 1]}'
    scripted += '; print("norm", float(model[0].weight.norm())); return found'
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("return super().evaluate(model, batches)", scripted), encoding="utf-8")
    assert train(best, "--out", "out", *KEPT, "--patience", "2") == 0
    out, err = capsys.readouterr()
    assert "ends after 1024 of 2048 samples: 2 evaluations brought nothing better than that after 512" in err
    assert ["best so far" in line for line in err.splitlines() if line.startswith("after ")] == [
        True,
        True,
        False,
        False,
    ]
    assert "ended early, after 1024 samples" in out
    found = json.loads(Path("out/result.json").read_text(encoding="utf-8"))
    assert (found["weights_at"], found["values"]) == (512, {"accuracy": 0.7})
    norms = [float(line.split()[1]) for line in out.splitlines() if line.startswith("norm")]
    assert float(load_file("out/model.safetensors")["0.weight"].norm()) == norms[1] != norms[3]


@pytest.mark.parametrize("asked", [[], KEPT], ids=["last", "best"])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_loaded_model_has_the_values_of_the_result(best, decay, asked):
    edit(best, "knobs", "amp_dtype", "fp32")
    edit(best, "knobs", "ema_decay", decay)
    assert train(best, "--out", "out", "workload.hidden=8", *asked) == 0
    found = json.loads(Path("out/result.json").read_text(encoding="utf-8"))
    (points, label) = map(
        torch.stack, zip(*load(str(best.parent / "signalling.py")).dataset(Config(), "val"), strict=True)
    )
    model = load_model("out")
    assert not model.training
    with torch.no_grad():
        assert float((model(points).argmax(1) == label).double().mean()) == found["values"]["accuracy"]
    best_at = max(found["evaluations"], key=lambda one: one["values"]["accuracy"])["samples"]
    assert found["weights_at"] == (best_at if asked else 2048)
    with pytest.raises(ConfigError, match="holds no trained model"):
        load_model("elsewhere")


def test_a_custom_loop_has_patience_and_best_weights(own, capsys):
    assert train(own, "--epochs", "4", "--out", "out", "--keep", "best", "--patience", "1") == 0
    assert result("out")["samples"] == 128
    assert json.loads(Path("out/result.json").read_text(encoding="utf-8"))["weights_at"] == 64
    with pytest.raises(ConfigError, match="built by its file"):
        load_model("out")
    Path("command.py").write_text(f"{COMMAND}SPACE{OWN.split('SPACE')[1]}", encoding="utf-8")
    assert train(own, "workload=command.py", "--out", "other", "--keep", "best") == 2
    assert "is a command, which writes its own model" in capsys.readouterr().err
    assert __main__.main(["profile", "--from", str(own), "workload=command.py"]) == 2
    assert train(own, "--out", "other", "--merge") == 2
    assert "own.py has no adapters of peft's" in capsys.readouterr().err
    assert not Path("other").exists()


COMMAND = """
from trainables.integrations.program import Program
train = Program("python train.py", metrics={"error": "error=([0-9.]+)"}, epochs=1)
"""


@pytest.mark.parametrize("kind", ["best", "own"])
def test_profile_says_what_the_steps_spend_their_time_on(kind, request, capsys):
    file = request.getfixturevalue(kind)
    assert __main__.main(["profile", "--from", str(file), "--steps", "3", "--out", "new/trace.json.gz"]) == 0
    first, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line and "is called" not in line]
    assert re.match(rf"{3 if kind == 'best' else 15} steps of ", first)  # of its own size in a custom loop
    assert any("addmm" in row and "matrix product" in row and "host" in row for row in rows)
    with gzip.open("new/trace.json.gz", "rt") as trace:
        assert len(json.load(trace)["traceEvents"]) > 10
    assert __main__.main(["profile", "--from", str(file), "--steps", "0"]) == 2
    assert __main__.main(["profile", "--from", str(file), "--out", "new"]) == 2


def test_a_log_has_the_banner_and_lines_of_figures(best, monkeypatch, capsys):
    monkeypatch.setattr(live, "PLAIN_LINE_S", 0.0)
    assert train(best, "--out", "out") == 0
    err = capsys.readouterr().err
    labels = [line.split()[0] for line in err.splitlines() if re.match("(device|model|samples|batch) ", line)]
    assert labels == ["device", "model", "samples", "batch"]
    assert "162 parameters, 162 trained" in err
    assert "2 epochs of 1,024: 2,048" in err
    assert "64 samples as 1 x 64, autocast to bf16" in err
    assert re.search(r"^\d+/2048 samples(, \d+s left)?  [\d.]+ samples/s  loss \d\.\d{3}  cpu \d+%$", err, flags=re.M)


def test_a_training_that_tells_no_loss_has_none_in_its_lines(own, monkeypatch, capsys):
    monkeypatch.setattr(live, "PLAIN_LINE_S", 0.0)
    steps = "(model(x).mean().backward(), optimizer.step(), optimizer.zero_grad(), run.step())"
    Path("silent.py").write_text(OWN.replace("run.backward(model(x).mean(), optimizer)", steps), encoding="utf-8")
    assert train(own, "workload=silent.py", "--out", "out") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "samples/s  " in line]
    assert lines
    assert not [line for line in lines if "loss" in line]
