"""Secrets among a workload's options: they are never written down."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"

# "max_tokens" is no secret and "hf_token" is one: the word must end the name or stand before a separator.
_SECRET = re.compile(r"tokens?($|[_.-])|secret|password|key$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Returns whether an option of this name holds what must not be passed on."""
    return _SECRET.search(name) is not None


def masked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without their secrets; a number is none, and null says that none was set."""
    return {k: MASK if is_secret(k) and isinstance(v, str) and v else v for k, v in options.items()}


def masked_items(items: Iterable[str]) -> list[str]:
    """Returns a command line, item by item, without the secrets given as key=value."""
    return [f"{key}={MASK}" if is_secret(key := item.partition("=")[0]) and "=" in item else item for item in items]
