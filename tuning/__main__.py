"""python -m tuning: everything beside the main job."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tuning import __version__
from tuning.config.errors import TuningError, reader_has_gone, require_platform

COMMANDS = """\
Finds the fastest training that keeps its accuracy and fits its card.

  python -m tuning.run workload=nli     find it (also: python -m tuning run);
                                        settings: python -m tuning.run --help
  python -m tuning probe -- python train.py
                                        your script as it is: what would be
                                        faster, and where to write it
  python -m tuning init FOLDER          write an example of a training of yours
  python -m tuning train last           train with what was found
  python -m tuning profile last         what its steps spend their time on
  python -m tuning estimate workload=nli card=rtx4060
                                        what fits a card, without the card
  python -m tuning list                 runs, newest last
  python -m tuning show last            summary and trials of a run, by its id
  python -m tuning compare ID ID        runs side by side: knobs, speed, quality
  python -m tuning stop ID              end a run, and write its best so far
  python -m tuning ablate ID            what each knob of the pick contributes
  python -m tuning report ID            write best.yaml and report.html anew
  python -m tuning export ID --to transformers
                                        what was found, for a framework
  python -m tuning log ID --to optuna   its trials in Optuna's storage,
                                        TensorBoard, MLflow or W&B
  python -m tuning doctor workload=nli  check this machine; for a bug report
  python -m tuning schema show          what --json prints, for programs
  python -m tuning --version

exit codes
  0 done   1 no usable trial, or the workload failed   2 wrong command line
  3 this machine cannot run it   4 stopped early, can be resumed
  130 interrupted   143 terminated
"""
_VERBS = {
    "run": ("tuning.run", "main"),
    "init": ("tuning.cli.init", "main"),
    "probe": ("tuning.cli.probe", "main"),
    "train": ("tuning.cli.train", "main"),
    "profile": ("tuning.cli.train", "profile"),
    "ablate": ("tuning.cli.ablate", "main"),
    "estimate": ("tuning.cli.estimate", "main"),
    "list": ("tuning.cli.runs", "list_runs"),
    "show": ("tuning.cli.runs", "show_run"),
    "report": ("tuning.cli.runs", "write_again"),
    "export": ("tuning.cli.runs", "export_best"),
    "compare": ("tuning.cli.runs", "compare_runs"),
    "stop": ("tuning.cli.stop", "main"),
    "log": ("tuning.cli.log", "main"),
    "doctor": ("tuning.cli.runs", "check_machine"),
    "schema": ("tuning.cli.replies", "main"),
}
"""Module and function of each command, loaded when it is asked for: `--help` must not take a second."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command."""
    try:
        code = _answered(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, and not when the interpreter ends: its reader may have gone
    except BrokenPipeError:
        return reader_has_gone()
    return code


def _answered(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(COMMANDS, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"cardtune {__version__}")
        return 0
    if str(Path.cwd()) not in sys.path:  # `cardtune` finds modules of the working folder too, behind everything else
        sys.path.append(str(Path.cwd()))
    name, rest = arguments[0], list(arguments[1:])
    if name not in _VERBS:
        near = difflib.get_close_matches(name, _VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no command {name!r}{hint}\n\n{COMMANDS}", end="", file=sys.stderr)
        return 2
    module, function = _VERBS[name]
    try:
        require_platform()
        if name in ("train", "profile", "ablate"):
            importlib.import_module("tuning.workers")  # sets what torch reads when it is loaded
        return int(getattr(importlib.import_module(module), function)(rest))
    except TuningError as error:
        importlib.import_module("tuning.cli.terminal").Terminal().error(error)
        if "--json" in rest:
            replies = importlib.import_module("tuning.cli.replies")
            print(replies.as_line(replies.of_error(error)))
        return error.exit_code
    except SystemExit as ended:  # argparse's, after its help or its error
        return ended.code if isinstance(ended.code, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
