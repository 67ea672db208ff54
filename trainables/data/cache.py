"""Folders written once and found again, below $XDG_CACHE_HOME/cardtune, or ~/.cache/cardtune where that is not set."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from trainables.data.errors import DataError
from trainables.files import cache_dir


def written_once(name: str, write: Callable[[Path], None]) -> Path:
    """Returns the folder `name` of the cache, filled by `write(folder)` where it does not exist yet.

    Put into the name what the content depends on, such as a hash. A folder that is there is complete: it is written
    under another name and renamed at the end. Two processes may do so at once: the first to finish gives it its name,
    the other's is dropped. Raises DataError where nothing can be written, and whatever `write` raises.
    """
    root = cache_dir()
    wanted = root / name
    if wanted.is_dir():
        return wanted
    try:
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            write(unfinished)
            unfinished.rename(wanted)  # fails where another process has put a folder that is not empty
        except OSError:
            if not wanted.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{root}: found {error}; allowed: a folder to write to; set XDG_CACHE_HOME to another"
        ) from None
    return wanted
