"""A command in place of a workload's file: `workload='python train.py --lr {learning_rate}'` on the command line.

It is written as the file that a person would write (docs/script.md), and that file is the workload from then on: it is
resumed, trained with and read as any other.
"""

from __future__ import annotations

import hashlib
import pprint
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainables.hook import GIVEN, HOOKED
from tuning.config import atomic, yaml_files
from tuning.config.errors import ConfigError

KEYS = ("metric", "mode", "epochs", "space")
"""What is typed beside a command, as key=value; also `samples`, if it has no DataLoader."""
EXAMPLE = (
    "workload='python train.py --lr {learning_rate}' metric='val_acc=([0-9.]+)' mode=max epochs=5 space=space.yaml"
)
_TEXT = '''"""Made of a command by `python -m tuning.run`; change it as you like, and give it as workload=FILE."""

from trainables.integrations.program import Program

train = Program(
    {command!r},
    metrics={{{name!r}: {metric!r}}},
    epochs={epochs},{samples}
)
SPACE = {space}
OBJECTIVES = {{{name!r}: {mode!r}}}
BEFORE = {before}
'''


def with_file(argv: Sequence[str]) -> list[str]:
    """Returns the command line with a workload's file in the place of a command, and of what is typed beside it.

    Raises ConfigError for what is missing or wrong, before anything is written.
    """
    given = dict(item.split("=", 1) for item in argv if "=" in item)
    command, beside = given.get("workload", ""), {key: given[key] for key in (*KEYS, "samples") if key in given}
    if not re.search(r"\s", command.strip()) or Path(command).is_file():
        if beside:
            key, value = next(iter(beside.items()))
            raise ConfigError(f"{key}={value} belongs to a command", remedy=EXAMPLE)
        return list(argv)
    if lacks := [key for key in KEYS if key not in beside]:
        raise ConfigError(f"a command as the workload needs {', '.join(f'{key}=' for key in lacks)}", remedy=EXAMPLE)
    text = _text(command, **beside)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = Path(given.get("runs_dir", "runs")) / "commands" / digest / f"{_stem(command)}.py"
    with atomic.folder(path.parent, "runs_dir"):
        atomic.write_text(path, text)
    kept = [item for item in argv if item.partition("=")[0] not in (*KEYS, "samples", "workload")]
    return [f"workload={path}", *kept]


def _text(command: str, metric: str, mode: str, epochs: str, space: str, samples: str = "") -> str:
    if mode not in ("min", "max"):
        raise ConfigError(f"mode={mode}", allowed="min, max", remedy="mode=max for an accuracy, mode=min for a loss")
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", epochs) or float(epochs) <= 0:
        raise ConfigError(f"epochs={epochs}", allowed="how many epochs the command trains today", remedy="epochs=5")
    if samples and not re.fullmatch(r"[1-9][0-9]{0,11}", samples):
        raise ConfigError(f"samples={samples}", allowed="the samples of one epoch", remedy="samples=50000")
    try:
        groups = re.compile(metric).groups
    except re.error as error:
        raise ConfigError(f"metric={metric}: {error}", allowed="a regular expression", remedy=EXAMPLE) from None
    if groups != 1:
        what = f"metric={metric} has {groups} groups"
        raise ConfigError(what, allowed="one, around the number", remedy="metric='val_acc=([0-9.]+)'")
    found = re.match(r"[A-Za-z_]\w*", metric)
    name = found[0] if found else "metric"
    try:
        knobs = yaml_files.read(Path(space).read_text("utf-8"), space)
    except (OSError, UnicodeDecodeError) as error:
        what = f"space={space} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(what, allowed="a YAML file with the knobs and their values", remedy=EXAMPLE) from None
    before = knobs.pop("before", {})
    if not isinstance(before, Mapping) or not knobs:
        what = f"space={space} has no knobs" if not knobs else f"space={space}: before is no mapping"
        raise ConfigError(what, remedy="learning_rate: {low: 1e-4, high: 1e-2, log: true}, and before: {...} beside it")
    _check_names(command, {**before, **knobs}, space)
    told = f"\n    samples={samples}," if samples else ""
    shown = {"space": _shown(knobs), "before": _shown(before), "samples": told}
    return _TEXT.format(command=command, name=name, metric=metric, epochs=epochs, mode=mode, **shown)


def _check_names(command: str, knobs: Mapping[str, object], space: str) -> None:
    """Raises ConfigError for a placeholder without values, and for a knob that is no placeholder."""
    try:
        shlex.split(command)
        found = [name for _, name, _, _ in string.Formatter().parse(command) if name is not None]
    except ValueError as error:
        what = f"workload={command}: {error}"
        raise ConfigError(what, remedy="a brace of the command itself is written twice, {{ or }}") from None
    names = [name for name in found if name not in GIVEN]
    if not names:
        raise ConfigError(f"workload={command} has no knob in braces", remedy="--lr {learning_rate}")
    if lacks := [name for name in names if name not in knobs]:
        what = f"{{{lacks[0]}}} of the command has no values in {space}"
        raise ConfigError(what, allowed=", ".join(knobs), remedy=f"{lacks[0]}: [1, 2], or a value in before")
    if idle := [name for name in knobs if name not in names and name not in HOOKED]:
        what = f"{idle[0]} of {space} is not in the command, so it would do nothing"
        raise ConfigError(what, allowed=f"without braces: {', '.join(HOOKED)}", remedy=f"{{{idle[0]}}} in the command")


def _shown(values: Mapping[str, object]) -> str:
    return pprint.pformat(dict(values), width=100, sort_dicts=False)


def _stem(command: str) -> str:
    """Returns what the workload is called: after the script, and its folder."""
    script = next((Path(word) for word in shlex.split(command) if word.endswith(".py")), Path("command.py"))
    folder = script.resolve().parent.name
    return re.sub(r"\W+", "_", f"{folder}_{script.stem}", flags=re.ASCII).strip("_") or "command"
