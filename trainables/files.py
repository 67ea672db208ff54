"""Files that are there whole or not at all, and the folder of what may be made again."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from pathlib import Path

PRIVATE = 0o600
SHARED = 0o666  # less the umask


def cache_dir() -> Path:
    """Returns $XDG_CACHE_HOME/cardtune, or ~/.cache/cardtune where the variable is not an absolute path.

    Raises OSError where the user has no home. The folder need not exist.
    """
    own = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(own) if Path(own).is_absolute() else Path.home() / ".cache") / "cardtune"
    except RuntimeError as error:
        raise OSError(f"{error} Set XDG_CACHE_HOME") from None


def write_whole(path: Path, payload: bytes, *, mode: int = PRIVATE) -> Path:
    """Returns `path`, which holds the payload for certain: draft, fsync, rename, fsync of the folder.

    A crash at any moment leaves the old file or the new one. Drafts of writers that died (`.NAME.*.draft`) are removed
    on the way. Raises OSError; the old file is then unchanged.
    """
    _remove_stale_drafts(path)
    draft, handle = _locked_draft(path, mode)
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
        draft.unlink(missing_ok=True)  # renamed, as a rule
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut, on file systems that can."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _locked_draft(path: Path, mode: int) -> tuple[Path, int]:
    """Returns a new file beside `path` and its descriptor, which holds a lock for as long as the writer lives."""
    while True:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with contextlib.suppress(OSError):  # a file system without locks: a stale draft stays there
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return draft, handle
        os.close(handle)  # another writer took it for stale before the lock was ours


def _remove_stale_drafts(path: Path) -> None:
    """Removes the drafts of `path` whose writers are dead; the lock of a live writer is held."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.draft"):
        with contextlib.suppress(OSError):
            handle = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
            finally:
                os.close(handle)
