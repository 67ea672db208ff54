"""python -m tuning.run: the main job. Reads the command line, then, once it is known to be right, runs the study."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tuning.config.choices import PRUNERS, available
from tuning.config.errors import ConfigError, TuningError, reader_has_gone, require_platform
from tuning.config.shareable import masked_items

TEMPLATE = """\
Finds the fastest training that keeps its accuracy and fits its card.

  python -m tuning.run workload=nli
  python -m tuning.run workload=nli card=rtx3090 search.trials=40
  python -m tuning.run workload=nli 'knobs.num_workers=[0,2,4]'
  python -m tuning.run workload=mine.py \\
      'knobs.learning_rate={low: 1e-4, high: 1e-2, log: true}'
  python -m tuning.run resume=20261121-103412-3f2a

settings (key=value, in any order; defaults in [brackets])
  workload=NAME|FILE.py   one of ours, or a file or module (my.moons) of yours
                          with a WORKLOAD or a train(run); python -m tuning init
                          FOLDER writes two that run [nli]
  workload='COMMAND'      a command as it is, its knobs in {braces}; it needs
                          metric='val_acc=([0-9.]+)' mode=max epochs=N and
                          space=FILE.yaml (docs/script.md)
WORKLOADS
  workload.OPTION=VALUE   settings of the workload, such as workload.data=PATH
  card=NAME               the card to train on. If it has less memory than
                          yours, or there is no GPU, its memory is emulated;
                          speeds are those of this machine [auto]
CARDS
  card.memory_gib=N       the card's memory, to hold it to less; with card=cpu,
                          how much RAM a training may take; with card=auto and
                          no GPU, the size of a card that is not listed [the
                          card's own memory]
  budget=quick|full       how much to spend [quick]
  budget.train_epochs=N   epochs of a training; auto: as many as the time allows
                          [ours: their own; yours: auto with quick, 4 with full]
  budget.probe.max_time_s=N, .probe_time_s=X, budget.rungs.first_frac=X, .eta=N,
  budget.confirm.seeds=N, .windows=N, .window_s=X, .top=N   see docs/settings.md
  knobs.NAME=VALUE        fixes a knob; a list searches its values, {low, high,
                          log} a range
  named.before.KNOB=VALUE your current settings, the reference: trained first,
                          and compared with [BEFORE of your file, else the plain
                          defaults]
  search.trials=auto|N    the most trials; auto: what the time allows, up to 50
                          (12 with search.max_time=null); 0: nothing is
                          trained, the fastest system knobs in a minute
                          [quick: auto, full: 60]
  search.max_time=TIME    limit of the whole run, as 90s, 4m or 2h
                          [quick: 4m, full: none]
  search.hang_time=TIME   a process that idles so long without an answer is
                          ended, and tried once more [60s]
  search.sampler=NAME     what proposes trials: known (only what would be faster
                          and may be as good), tpe (Optuna's) or random [known]
  search.pruner=NAME      which trials are stopped early [reference]
PRUNERS
  search.seed=N           seed of everything [0]
  concurrency=auto|N      how many trials run at once on each node; auto: 1 on
                          a CPU, 1, 2 or 4 on a GPU, by how idle it is; speeds
                          are timed alone [auto]
  cluster=HOST:PORT|auto  the Ray cluster that this machine is a node of: trains
                          on its nodes [here alone]
  target=KIND             which kind of device of a cluster to tune for; nodes
                          of another kind are left out [that of this machine,
                          else the one with most devices]
  devices=all|0,1         cards of this machine that are used, by number as in
                          nvidia-smi (among the visible ones) or UUID [all]
  devices_per_trial=N     cards that train a trial together by DDP: they share
                          each micro-batch; on a CPU: processes [1]
  insecure_cluster=true   join a cluster without a token [false]
  pick.tolerance=X|X%     quality that the pick may give up on purpose, in the
                          objective's own unit or as a share of the reference's
                          [0]
  pick.at_least=X         the quality that the pick needs [that of the
                          reference]
  pick.goal=speed|quality the fastest as good as the reference, or the best
                          that is no slower than the reference [speed]
  dashboard=true          starts the Ray dashboard here and prints how to log in
  resume=ID|last          goes on with an interrupted run, or a finished one
                          that is given a larger search.max_time or .trials,
                          or another pick.tolerance, .at_least or .goal
  force=true              resumes although machine, data or code have changed
  runs_dir=PATH name=ID   where runs are written [runs]; a new name for this one

options
  -q, --quiet     warnings and the result only
  -v, --verbose   every event, tracebacks
  --validate      check the configuration and stop
  --json          the result as JSON on stdout (python -m tuning schema run)
  -h, --help      this text

exit codes
  0 done   1 no usable trial, or the workload failed   2 wrong command line
  3 this machine cannot run it   4 stopped early, can be resumed
  130 interrupted   143 terminated

other commands: python -m tuning --help
"""
LISTED = {
    "WORKLOADS": [f"ours: {', '.join(available('workload'))}"],
    "CARDS": textwrap.wrap(", ".join(available("card")), 54),
    "PRUNERS": [f"{name}: {said}" for name, said in PRUNERS.items()],
}
"""The text in place of a line of the template."""
HELP = "".join(
    line if line.strip() not in LISTED else textwrap.indent("\n".join([*LISTED[line.strip()], ""]), " " * 26)
    for line in TEMPLATE.splitlines(keepends=True)
)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of one study."""
    started = time.monotonic()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or "-h" in arguments or "--help" in arguments:
        try:
            print(HELP, end="", flush=True)
        except BrokenPipeError:
            return reader_has_gone()
        return 0
    flags = [a for a in arguments if a.startswith("-")]
    overrides = [a for a in arguments if not a.startswith("-")]
    if not flags or set(flags) <= {"-v", "--verbose"}:
        _first_line(overrides)
    # Imported late, so that --help and the first line come at once: these bring pydantic, numpy and rich.
    from tuning.cli.terminal import Terminal
    from tuning.config.command_file import with_file
    from tuning.config.load import load
    from tuning.report import sentences
    from tuning.workers.own_workload import UserFile

    verbose = bool({"-v", "--verbose"} & set(flags)) or os.environ.get("TUNING_DEBUG") == "1"
    as_json = "--json" in flags
    verbosity = 1 if verbose else -1 if {"-q", "--quiet"} & set(flags) else 0
    terminal = Terminal(verbosity, out=io.StringIO() if as_json else None)
    heard, file = list[int](), UserFile()
    try:
        require_platform()
        unknown = [f for f in flags if f not in ("-q", "--quiet", "-v", "--verbose", "--validate", "--json")]
        if unknown:
            raise ConfigError(
                f"{unknown[0]} is no option", allowed="-h -q -v --validate --json", remedy="settings are key=value"
            )
        _listen(heard, terminal.interrupted)
        validates = "--validate" in flags
        if not validates:
            terminal.begin(started)
        config = load(with_file(overrides), file.table)
        file.begin(config, started)
        from tuning.study import setup, study  # all that searches and measures, only now

        if validates:
            _, config = setup.prepare_config(config, file)
            left_out = config.dropped if verbose else sentences.left_out(config)
            tried = "; its code is tried when a run begins" * (not config.workload.is_packaged)
            for text in [*left_out, f"the configuration is valid{tried}"]:
                terminal.note(text)
            terminal.space(config)
            return 0
        folder = study.run(config, terminal, started, file)
        if as_json:
            _print_reply(folder)
    except TuningError as error:
        if verbose:
            terminal.traceback(error)
        terminal.error(error)
        if as_json:
            _print_reply(error)
        return error.exit_code
    except KeyboardInterrupt:
        signum = heard[0] if heard else signal.SIGINT
        terminal.interrupted(signum)
        return 128 + signum
    finally:
        file.__exit__()
    return 0


def _print_reply(of: Path | TuningError) -> None:
    """Prints what the run in a folder found, or why there is nothing, as JSON."""
    from tuning.cli import replies, runs

    print(replies.as_line(replies.of_error(of) if isinstance(of, TuningError) else runs.reply_of(of)))


def _first_line(overrides: list[str]) -> None:
    """Says what was asked for: half a second of a core before the terminal is loaded, more on a busy machine."""
    said = "".join(c if c.isprintable() else "?" for c in " ".join(masked_items(overrides)) or "workload=nli")
    width, encoding = shutil.get_terminal_size().columns, sys.stderr.encoding or "ascii"
    lines = textwrap.wrap(f"cardtune  {said}", max(40, width), subsequent_indent=" " * 10)
    print("\n".join(lines).encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr, flush=True)


def _listen(heard: list[int], say: Callable[[int], None]) -> None:
    """The first signal is added to `heard` and ends the run in order; a second ends all its processes at once.

    A shell starts what runs in its background with SIGINT ignored; who sends it one all the same wants it to end. Only
    SIGHUP stays ignored where it was, for nohup.

    Ray's waits let no exception of a signal handler through but KeyboardInterrupt, and of that not the one that was
    raised: now and then they raise a bare one in its place, which is why the signal is kept beside it.
    """

    def first(signum: int, frame: FrameType | None) -> None:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, second)
        heard.append(signum)
        raise KeyboardInterrupt

    def second(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):
            say(signum)
            _end_children()
        os._exit(128 + signum)

    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:
            signal.signal(name, first)


def _end_children() -> None:
    """Kills every process that this one or its children started: Ray's agents would live on for a minute."""
    import psutil  # --help does without

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
