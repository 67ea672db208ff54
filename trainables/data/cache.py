"""Files made once and kept below $XDG_CACHE_HOME/cardtune, or ~/.cache/cardtune if that is not set."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainables.data.errors import wrong
from trainables.files import cache_dir, write_whole


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
        raise wrong(root, str(error), "a folder to write to; set XDG_CACHE_HOME to another") from None
    return wanted


def kept(name: str, made_of: Iterable[str], make: Callable[[], Any]) -> Any:
    """Returns what `make()` returns, as JSON has it: from the cache folder where the same `name` and `made_of` made it.

    A result that cannot be written, or was damaged, is made again.
    """
    found = hashlib.sha256()
    for text in made_of:
        found.update(text.encode(errors="surrogatepass") + b"\n")
    path = None
    with contextlib.suppress(OSError, ValueError):
        path = cache_dir() / f"{name}-{found.hexdigest()[:32]}.json"
        return json.loads(path.read_text(encoding="utf-8"))
    made = make()
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(made).encode())
    return made
