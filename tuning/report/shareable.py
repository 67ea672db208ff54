"""What may leave this machine in a file that is passed on: text without secrets and without the home folder."""

from __future__ import annotations

import re
from pathlib import Path

from tuning.config.masking import MASK, is_secret

_ASSIGNED = re.compile(r"(?P<name>[\w.-]+)=(?P<value>\S+)")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def shareable(text: str) -> str:
    """Returns `text` without secrets given as name=value, without users in URLs, and with the home folder as ~."""
    home = home_folder()
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\s|$)", "~", text)
    text = _ASSIGNED.sub(lambda m: f"{m['name']}={MASK}" if is_secret(m["name"]) else m[0], text)
    return _USER_IN_URL.sub(MASK, text)


def home_folder() -> str:
    """Returns the user's home folder, "" where there is none."""
    try:
        return str(Path.home())
    except RuntimeError:  # no HOME, and no entry for the user
        return ""
