"""A Ray of one run alone: loopback only, token on, its folder and its processes gone with the run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray

from tuning import search_path
from tuning.config.errors import PreflightError

_TOKEN = secrets.token_hex(32)
"""Shared by every cluster of this process: Ray reads a token once a process, and would refuse another cluster's."""


class RayCluster:
    """A Ray of this run alone: started with `with`, ended with it. Loopback only, token on, dashboard if asked.

    Its folder, mode 0700, holds the token; Ray opens its own folder, which lies in it, to everybody.
    """

    def __init__(self, *, cores: int, gpus: int, dashboard: bool) -> None:
        self._cores, self._gpus, self._dashboard = cores, gpus, dashboard
        self._folder = Path(tempfile.mkdtemp(prefix=f"ct-{os.getpid()}-"))
        self._processes: list[psutil.Process] = []
        self.dashboard_url = ""
        self.token_path = self._folder / "token"

    def __enter__(self) -> RayCluster:
        sweep(Path(tempfile.gettempdir()))
        self.token_path.touch(mode=0o600)
        self.token_path.write_text(_TOKEN, encoding="utf-8")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self.token_path)
        os.environ.pop("RAY_ADDRESS", None)  # a foreign cluster is joined only on request
        terminated = signal.getsignal(signal.SIGTERM)
        before = set(psutil.Process().children())
        try:
            with _elsewhere(self._folder):
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
        except (OSError, RuntimeError, TimeoutError, ValueError) as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            first = str(error).strip().splitlines()[0]
            raise PreflightError(
                f"Ray did not start: {first}",
                remedy="free 1 GB of memory, or begin in a process that had no other Ray; -v shows all of it",
            ) from error
        except BaseException:  # a Ctrl-C meanwhile
            self._processes = [p for p in psutil.Process().children() if p not in before]
            self.__exit__(None, None, None)
            raise
        self._processes = [p for p in psutil.Process().children() if p not in before]
        keep_terminated(terminated)
        url = context.dashboard_url or ""
        self.dashboard_url = f"http://{url}" if url and "://" not in url else url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = [*self._processes, *(p for own in self._processes for p in _children(own))]
        ray.shutdown()
        for process in family:  # Ray's agents live on for a minute after a raylet that was killed
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def keep_terminated(handler: Any) -> None:
    """Puts the handler of SIGTERM back that was there before ray.init, whose own exits with code 15.

    In another thread than the first, which may set none, ray.init sets none either.
    """
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _elsewhere(folder: Path) -> Iterator[None]:
    """Starts Ray's processes in a folder of ours, with this process's modules.

    Ray puts the working folder before all others that its processes import from: a folder called `tuning` there, or a
    file called argparse.py, would end each of them. Workers run in the study's folder (`WorkerConfig.folder`).
    """
    modules, before = search_path(), os.environ.get("PYTHONPATH")
    with contextlib.chdir(folder):
        os.environ["PYTHONPATH"] = modules
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


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


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
