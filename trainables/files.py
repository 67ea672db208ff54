"""Atomic writes of files, and the folder for caches."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

PRIVATE = 0o600
SHARED = 0o666  # less the umask


def cache_dir() -> Path:
    """Returns $XDG_CACHE_HOME/cardtune, or ~/.cache/cardtune if the variable is not an absolute path.

    Raises OSError if the user has no home. The folder need not exist.
    """
    setting = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(setting) if Path(setting).is_absolute() else Path.home() / ".cache") / "cardtune"
    except RuntimeError as error:
        raise OSError(f"{error} Set XDG_CACHE_HOME") from None


def write_whole(path: Path, payload: bytes, *, mode: int = PRIVATE) -> Path:
    """Writes the payload durably and returns `path`: writes a draft, fsyncs it, renames it, fsyncs the folder.

    Invariant: a crash at any moment leaves the old file or the new one. The draft of a killed writer (`.NAME.*.draft`)
    stays beside it. Raises OSError; the old file is then unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            left = memoryview(payload)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
            draft.replace(path)
        finally:
            os.close(handle)
    finally:
        draft.unlink(missing_ok=True)  # it exists only if something failed
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Fsyncs a folder, so that the names in it survive a power cut, if the file system supports that."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
