"""A Ray of one run alone: loopback only, token on, its folder and its processes gone with the run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray

from tuning import search_path
from tuning.config.errors import PreflightError, StoppedEarly
from tuning.workers import leftovers

_TOKEN = secrets.token_hex(32)
"""Shared by every cluster of this process: Ray reads a token once a process, and would refuse another cluster's."""
NEEDED = ("gcs_server", "raylet")
"""Processes of Ray without which a search would wait: for the first Ray waits a minute, for the second for good."""
_LOOK_S = 0.05
"""How often it is looked whether such a process has been started: 4 ms with 100 processes."""
LEAVES_S = 8.0
"""How long a study may take to leave once one is gone."""


class RayCluster:
    """A Ray of this run alone: started with `with`, ended with it. Loopback only, token on, dashboard if asked.

    Its folder, mode 0700, holds the token; Ray opens its own folder, which lies in it, to everybody.
    """

    def __init__(self, *, cores: int, gpus: int, dashboard: bool) -> None:
        self._cores, self._gpus, self._dashboard = cores, gpus, dashboard
        self._folder = Path(tempfile.mkdtemp(prefix=f"ct-{os.getpid()}-"))
        self._token = secrets.token_hex(8)
        self._reaper: subprocess.Popen[bytes] | None = None
        self._watch: _Watch | None = None
        self.dashboard_url = ""
        self.token_path = self._folder / "token"

    def __enter__(self) -> RayCluster:
        sweep(Path(tempfile.gettempdir()))
        self.token_path.touch(mode=0o600)
        self.token_path.write_text(_TOKEN, encoding="utf-8")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self.token_path)
        os.environ.pop("RAY_ADDRESS", None)  # a foreign cluster is joined only on request
        terminated = signal.getsignal(signal.SIGTERM)
        command = [sys.executable, "-S", "-P", leftovers.__file__, self._token, str(self._folder)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._reaper = subprocess.Popen(command, **pipes, start_new_session=True)
        self._watch = _Watch(self._token)
        try:
            with _elsewhere(self._folder, self._token):
                context = ray.init(
                    address="local",
                    num_cpus=self._cores,
                    num_gpus=self._gpus,
                    include_dashboard=self._dashboard,
                    dashboard_host="127.0.0.1",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                    _temp_dir=str(self._folder / "ray"),
                    object_store_memory=256 * 2**20,
                )
        except Exception as error:  # of a raylet that is gone Ray raises just that
            said = self._watch.end() or str(error).strip().partition("\n")[0]
            self._reap()
            raise PreflightError(
                f"Ray did not start: {said}",
                remedy="free 1 GB of memory, or begin in a process that had no other Ray; -v shows all of it",
            ) from error
        except BaseException as error:  # a Ctrl-C, or a process of Ray was lost
            self.__exit__(type(error), error, error.__traceback__)
            raise
        self._watch.has_started = True
        keep_terminated(terminated)
        self.dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = self._watch.end() if self._watch is not None else ""
        ray.shutdown()
        self._reap()
        if lost:  # whatever came of the interrupt: without its processes Ray may raise another error first
            raise StoppedEarly(f"Ray ended the search: {lost}", remedy="go on with resume=") from error

    def _reap(self) -> None:
        """Ends what is left of Ray's processes, and removes its folder."""
        if self._reaper is not None:
            self._reaper.communicate()


class _Watch:
    """Interrupts this process once one of those that Ray needs is gone; `token` marks the processes of this Ray.

    It begins before Ray does, whose start would wait as long.
    """

    def __init__(self, token: str) -> None:
        self._token, self._main = token, threading.current_thread()
        self._lost, self.has_started = "", False
        self._wakes, self._ends = os.pipe()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def end(self) -> str:
        """Stops watching; returns in words which process was lost, "" for none."""
        os.close(self._ends)
        self._thread.join()
        os.close(self._wakes)
        return self._lost

    def _wait(self) -> None:
        names, ended = dict[int, str](), list[int]()  # by the descriptor of the process
        with contextlib.suppress(OSError):  # a kernel without such descriptors
            while not ended:
                timeout_s = _LOOK_S if len(names) < len(NEEDED) else None
                ended, *_ = select.select([*names, self._wakes], [], [], timeout_s)
                for child in psutil.Process().children() if timeout_s else []:
                    with contextlib.suppress(psutil.Error, ProcessLookupError):
                        name = child.name()
                        if name in NEEDED and name not in names.values() and child.status() != psutil.STATUS_ZOMBIE:
                            names[os.pidfd_open(child.pid)] = name
        if ended and self._wakes not in ended:
            self._lost = f"its process {names[ended[0]]} is gone"
        for descriptor in names:
            os.close(descriptor)
        if self._lost and self.has_started:
            leftovers.end(self._token)  # without them Ray's waits end at once
            if self._main is threading.main_thread():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if select.select([self._wakes], [], [], LEAVES_S)[0]:
                return
        if self._lost:  # some waits of Ray let no signal through; one that starts would end this process with code 1
            shown = "\x1b[?25h" * os.isatty(2)  # the cursor
            said = f"error: Ray ended the search: {self._lost}\n  try: python -m tuning.run resume=last"
            os.write(2, f"{shown}\n{said}\n".encode())
            os._exit(StoppedEarly.exit_code)


def keep_terminated(handler: Any) -> None:
    """Puts the handler of SIGTERM back that was there before ray.init, whose own exits with code 15.

    In another thread than the first, which may set none, ray.init sets none either.
    """
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _elsewhere(folder: Path, token: str) -> Iterator[None]:
    """Starts Ray's processes in a folder of ours, with this process's modules, marked with the token.

    Ray puts the working folder before all others that its processes import from: a folder called `tuning` there, or a
    file called argparse.py, would end each of them. Workers run in the study's folder (`WorkerConfig.folder`).
    """
    own = leftovers.marked(token, {**os.environ, "PYTHONPATH": search_path()})
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", leftovers.MARK)}
    with contextlib.chdir(folder):
        os.environ.update({name: own[name] for name in before})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


def sweep(folder: Path) -> list[Path]:
    """Returns the folders of clusters whose runs were killed, removed: those named after no living process."""
    dead = []
    for path in folder.glob("ct-*-*"):
        pid = path.name.split("-")[1]
        with contextlib.suppress(OSError):
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)
                dead.append(path)
    return dead
