"""Writes a file whole or not at all, and never through a symbolic link."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from tuning.errors import ConfigError


def write_text(path: Path, text: str, *, overwrite: bool = True) -> Path:
    """Returns `path`, which now holds `text` and was at no moment half written (draft, fsync, rename).

    Raises ConfigError where `path` is a symbolic link or a folder, cannot be written, or exists and is not to be
    overwritten.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symbolic link, which is not written through", remedy="remove it, or name a file"
        )
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", allowed="a file", remedy=f"write to {path / 'best.yaml'}")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists already", remedy="add --force, or name another file")
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            Path(draft).replace(path)
        finally:
            with contextlib.suppress(OSError):  # renamed, as a rule
                Path(draft).unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{path} cannot be written: {reason}", remedy="name a file in a folder you may write"
        ) from None
    return path
