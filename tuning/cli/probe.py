"""python -m tuning probe -- COMMAND: what makes an unedited training faster, and where to write it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.text import Text

from tuning.cli.replies import EditReply, ProbeReply, as_line
from tuning.cli.terminal import console, line, show
from tuning.config.errors import ConfigError
from tuning.config.schema import duration_s
from tuning.config.shareable import shareable
from tuning.outside import edit
from tuning.outside.compare import LEAST_GAIN, UNCHANGED, Compared, compare, growth_bytes
from tuning.outside.edit import Edit
from tuning.outside.runs import Command, Look, Setting
from tuning.report.format import duration, labelled, percent, plain, plural, rate, ratio, size, table
from tuning.workers import machine

LINES = {
    "threads": "torch.set_num_threads({})  # at the start",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = True  # at the start",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True  # at the start",
    "channels_last": "model = model.to(memory_format=torch.channels_last)  # once it is made",
}
"""What is written for a setting that is no argument of a loader or an optimiser."""
TAKEN_FRAC = 0.1
"""The share of the cores that others may take; `threads` above all comes out otherwise beside them."""
LEAST_S, MOST_S = 10.0, 86_400.0


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    does = (
        "Runs a training several times, for some seconds each, as it stands and with settings changed from outside "
        "(workers, pinning, fused optimiser and others), and says which make it faster. Edits nothing."
    )
    made = argparse.ArgumentParser(prog="python -m tuning probe", description=does)
    made.add_argument("--max-time", default="60s", metavar="TIME", help="for all runs together, such as 3m  [60s]")
    made.add_argument("--runs-dir", default="runs", metavar="PATH", help="where its files go  [runs]")
    made.add_argument("--json", action="store_true", help="the answer as JSON")
    made.add_argument("command", nargs="*", help="behind --, as you type it: -- python train.py --lr 0.1")
    return made


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; raises ConfigError for a command that cannot be measured."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    asked = parser().parse_args(words[:split])
    command = [*asked.command, *words[split + 1 :]]
    if not command:
        raise ConfigError("there is no command to probe", remedy="python -m tuning probe -- python train.py")
    try:
        limit_s = float(str(duration_s(asked.max_time)))
    except ValueError:
        limit_s = 0.0
    if not LEAST_S <= limit_s <= MOST_S:
        raise ConfigError(f"--max-time {asked.max_time}", allowed="10s to 24h", remedy="--max-time 60s")
    folder = Path(asked.runs_dir) / "probe" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}", remedy="--runs-dir PATH") from None
    messages, result = console(sys.stderr, os.environ), console(sys.stdout, os.environ)
    program, begun = Command(command, folder, os.environ), time.monotonic()
    if program.dropped:
        line(messages, f"left out of its environment: {', '.join(program.dropped)}")

    def told(name: str, found: Look | None, why: str) -> None:
        line(messages, f"{name:24} {f'failed: {plain(why)[:120]}' if found is None else speed(found)}")

    line(messages, f"runs it as it is, then with settings changed from outside, for about {duration(limit_s)}")
    try:
        answer = compare(program, limit_s, machine.cores(), told)
    except ConfigError:
        if not program.output.exists() or not program.output.read_bytes():  # else it is where its error is looked up
            shutil.rmtree(folder, ignore_errors=True)
        raise
    edits = list(_edits(answer))
    diff = edit.patch(edits)
    if diff:
        (folder / "probe.patch").write_text(diff, encoding="utf-8")
    reply = as_line(_reply(answer, command, edits))
    (folder / "probe.json").write_text(reply, encoding="utf-8")
    if asked.json:
        print(reply)
        return 0
    line(result, sentence(answer))
    show(result, labelled([(name, Text(said)) for name, said in _rows(answer, program, time.monotonic() - begun)]))
    show(result, table(["tried", "speed", "vs unchanged"], _tried(answer)))
    if diff:
        result.print()
        result.print(Text(diff.rstrip()), soft_wrap=True)  # so that it can be copied
    line(messages, f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
    return 0


def sentence(answer: Compared) -> str:
    """Returns the answer: what to write where, and how much faster that is."""
    if answer.refused:
        return f"Nothing can be compared: {plain(answer.refused)}."
    if answer.pick is None and answer.gain is not None and answer.gain.ratio >= LEAST_GAIN:
        by = answer.gain.grounds or f"{plural(answer.gain.rounds, 'round')} of alternating runs"
        said = f"{answer.gain.of} was {ratio(answer.gain)} times as fast by {by}, which is too little to go by"
        return f"Not known yet: {said}; a larger --max-time tells more."
    if answer.pick is None or answer.gain is None:
        known = sum(len(looks) for looks in answer.looks.values())
        bound = "it hardly waits for data, and " if answer.today.loader and answer.today.share("waiting") < 0.1 else ""
        return (
            f"Keep it as it is: {bound}no setting that can be changed from outside was faster ({plural(known, 'run')})."
        )
    wanted = " and ".join(_places(answer, answer.pick.setting))
    rounds = f"{plural(answer.gain.rounds, 'round')} of alternating runs"
    times, _, interval = ratio(answer.gain).partition(" ")
    sure = f"95 % interval {interval.strip('()')}, {rounds}" if interval else f"by {rounds}"
    return f"Write {wanted}: it trains {times} times as fast ({sure})."


def speed(found: Look) -> str:
    """Returns a run's speed in words."""
    unit = "samples/s" if found.samples else "steps/s"
    step_ms = 1000 * found.measured_s / max(1, found.counted)
    return f"{rate(found.per_s)} {unit}  {step_ms:.3g} ms a step" if found.counted else "no step was counted"


def _places(answer: Compared, setting: Setting) -> Iterator[str]:
    """Yields what is to be written where, a phrase for each place."""
    for one in _edits(answer):
        name = Path(one.file)
        shown = shareable(os.path.relpath(name)) if one.file else "your code"
        words = ", ".join(f"{key}={value}" for key, value in one.arguments.items())
        yield f"{words} in {one.call}(...) at {shown}:{one.line}"
    for key, value in setting.items():
        if key in LINES:
            yield LINES[key].format(value).partition("  #")[0]


def _edits(answer: Compared) -> Iterator[Edit]:
    """Yields the calls that are to have other arguments under the pick."""
    if answer.pick is None:
        return
    setting, loader = answer.pick.setting, answer.today.loader
    own = {n: v for n, v in setting.items() if n in ("num_workers", "persistent_workers", "pin_memory", "batch_size")}
    if own and loader is not None:
        yield Edit(loader.file, loader.line, "DataLoader", own)
    if setting.get("fused"):
        seen = set[tuple[str, int]]()
        for one in answer.today.optimizers:
            if one.able and not one.fused and (one.file, one.line) not in seen:
                seen.add((one.file, one.line))
                yield Edit(one.file, one.line, one.name, {"fused": True})


def _rows(answer: Compared, program: Command, took_s: float) -> Iterator[tuple[str, str]]:
    today = answer.today
    parts = {"waiting for data": "waiting", "backward": "backward", "optimiser": "optimizer"}
    shares = [f"{name} {percent(today.share(key))}" for name, key in parts.items() if today.parts.get(key)]
    rest = 1.0 - sum(today.share(key) for key in parts.values())
    if today.split_s:
        shares.append(f"forward and the rest {percent(max(0.0, rest))}")
    yield "unchanged", "; ".join([speed(today), ", ".join(shares)])
    if today.share("waiting") >= 0.2:
        yield "bound by", f"its data: {percent(today.share('waiting'))} of a step waits for the loader"
    for name, why in answer.failed.items():
        yield "failed", f"{name}: {plain(why)[:200]}"
    if today.peak_bytes:
        yield "memory", f"{size(today.peak_bytes)} at its peak, {size(today.reserved_bytes)} reserved on {today.device}"
    if grows := growth_bytes(today):
        yield "memory", f"grows by about {size(grows)} with each step: losses or outputs may be kept with their graphs"
    if answer.today.loader is not None and answer.today.loader.is_stream:
        yield (
            "note",
            "its data is a stream: more workers repeat it unless it is split by get_worker_info(), and were not tried",
        )
    if program.others_frac >= TAKEN_FRAC:
        yield (
            "note",
            f"other programs took {percent(program.others_frac)} of the cores meanwhile: a quiet machine tells more",
        )
    if program.wrote:
        files = ", ".join(map(plain, program.wrote[:3])) + (" and more" if len(program.wrote) > 3 else "")
        yield "note", f"the command wrote in its folder, as it does when you run it: {files}"
    yield "time", f"{duration(took_s)}, {plural(sum(map(len, answer.looks.values())), 'run')} of the command"


def _tried(answer: Compared) -> Iterator[Sequence[object]]:
    for name, looks in answer.looks.items():
        option = answer.options.get(name)
        over = (
            "-" if name == UNCHANGED else f"{looks[0].per_s / answer.today.per_s:.2f}x" if answer.today.per_s else "-"
        )
        if answer.gain is not None and answer.gain.of == name and answer.gain.rounds:
            over = f"{ratio(answer.gain, 'x')} in alternating runs"
        may = "  may change what is learned" * bool(option and option.learns_otherwise)
        yield [name, speed(looks[0]), over + may]


def _reply(answer: Compared, command: Sequence[str], edits: Sequence[Edit]) -> ProbeReply:
    return ProbeReply(
        command=command,
        answer=sentence(answer),
        set=answer.pick.setting if answer.pick is not None else {},
        gain=answer.gain,
        where=[EditReply(file=e.file, line=e.line, call=e.call, arguments=e.arguments) for e in edits],
        today=answer.today.model_copy(update={"step_s": [], "memory": []}),
        runs={name: [look.per_s for look in looks] for name, looks in answer.looks.items()},
        failed=answer.failed,
    )
