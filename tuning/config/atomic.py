"""Writes a file for a person, with their errors; makes the folder for it, or leaves none."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainables.files import write_whole
from tuning.config.errors import ConfigError, StoppedEarly

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def write_text(path: Path, text: str) -> Path:
    """Returns `path`, which now holds `text` and was at no moment half written.

    Raises ConfigError if `path` is a symbolic link or a folder, or cannot be written; StoppedEarly if the disk is
    full.
    """
    if path.is_symlink():
        what = f"{path} is a symbolic link, which is not written through"
        raise ConfigError(what, remedy="remove it, or name a file")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", allowed="a file", remedy=f"write to {path / 'best.yaml'}")
    try:
        return write_whole(path, text.encode())
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror or error}"
        if error.errno in _FULL:
            remedy = f"make room in {path.parent}, and give the command again"
            raise StoppedEarly(f"{what}; what it held is safe", remedy=remedy) from None
        raise ConfigError(what, remedy="name a file in a folder you may write") from None


def unwritable(folder: Path) -> str:
    """Returns why nothing can be written into a folder, or into the nearest one above it that exists; "" if it can."""
    try:
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not there.is_dir():
            return f"{'it' if there == folder.absolute() else there} is a file"
        with tempfile.TemporaryFile(dir=there):  # permission bits say yes where a file system says no
            return ""
    except OSError as error:
        return error.strerror or str(error)


@contextlib.contextmanager
def folder(path: Path, key: str) -> Iterator[None]:
    """Makes a folder for what is written inside the block; what was made here and stays empty is removed again.

    Raises ConfigError that names `key` if nothing can be written there.
    """
    made = [p for p in (path, *path.parents) if not p.exists()]
    try:
        reason = unwritable(path)
        if not reason:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or str(error)
        if reason:
            what = f"{key} {path} cannot be written: {reason}"
            raise ConfigError(what, allowed="a folder of yours", remedy=f"{key} FOLDER, another one")
        yield
    finally:
        for folder_made in made:
            with contextlib.suppress(OSError):  # it holds something, as it should
                folder_made.rmdir()
