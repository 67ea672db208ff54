"""Text and options that may be written down: without secrets, and, for others, without the home folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trainables.knobs import Options

MASK = "***"

# "max_tokens" is no secret and "hf_token" is one: the word must end the name or stand before a separator.
_SECRET = re.compile(
    r"tokens?($|[_.-])|secret|passw|passphrase|keys?$|key_id$|credential|bearer|cookie|webhook|connection_string"
    r"|(^|[_.-])(pass|pwd|pw|auth|authorization|dsn|sas|session)$",
    re.IGNORECASE,
)
# Names of columns and fields of a data set.
_OF_DATA = re.compile(
    r"(^|[_.-])(label|text|image|input|target|sort|group|index|id|date|sample|feature)s?[_.-]?key$"
    r"|tokens?[_.-](column|field|ids?|types?|lengths?|counts?)$",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"(?P<name>[\w.-]+)=(?P<value>\S+)")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Returns whether an option of this name holds what must not be passed on."""
    return _SECRET.search(name) is not None and _OF_DATA.search(name) is None


def is_masked(value: object) -> bool:
    """Returns whether an option was written down without its secret, so that it has to be given again."""
    return isinstance(value, str) and (value == MASK or f"://{MASK}@" in value)


def masked(options: Options) -> Options:
    """Returns options without their secrets, users in URLs included; a number is none, null says that none was set."""
    texts = {k: v for k, v in options.items() if isinstance(v, str)}
    return {**options, **{k: MASK if is_secret(k) and v else _USER_IN_URL.sub(MASK, v) for k, v in texts.items()}}


def masked_items(items: Iterable[str]) -> list[str]:
    """Returns a command line, item by item, without the secrets given as key=value, and without users in URLs."""
    return [
        f"{key}={MASK}" if is_secret(key := item.partition("=")[0]) and "=" in item else _USER_IN_URL.sub(MASK, item)
        for item in items
    ]


def shareable(text: str) -> str:
    """Returns `text` without secrets given as name=value, without users in URLs, and with the home folder as ~."""
    home = _home()
    if len(home) > 1:  # not within another path, such as /mnt/ann of /ann; a URL of a file has it whole
        text = re.sub(rf"(?:(?<![\w./~-])|(?<=://)){re.escape(home)}(?=/|\s|$)", "~", text)
    return _without_secrets(text)


def shareable_value(text: str) -> str:
    """Returns a ref or an option as `shareable` does, but of home folders only one at its start, as `at_home` reads."""
    home = _home()
    if len(home) > 1 and (text == home or text.startswith(f"{home}/")):
        text = f"~{text.removeprefix(home)}"
    return _without_secrets(text)


def at_home(value: object) -> object:
    """Returns a text that begins with ~ as a path below the home folder, and anything else as it is."""
    return _home() + value[1:] if isinstance(value, str) and (value == "~" or value.startswith("~/")) else value


def _without_secrets(text: str) -> str:
    text = _ASSIGNED.sub(lambda m: f"{m['name']}={MASK}" if is_secret(m["name"]) else m[0], text)
    return _USER_IN_URL.sub(MASK, text)


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:  # no HOME, and no entry for the user
        return ""
