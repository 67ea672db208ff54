"""Errors that readers of data raise."""

OTHER_LAYOUTS = "docs/data.md shows how data in other layouts are read"
"""The remedy for data in a layout that has no reader here."""


class DataError(ValueError):
    """Data that cannot be used; the message names the file, and the line or field where there is one."""


def wrong(
    where: object, found: str, allowed: str, *, line: int | None = None, field: str = "", remedy: str = ""
) -> DataError:
    """Returns the error for what was found in a file, at a line and in a field of it where they are given."""
    place = where if line is None else f"{where}:{line}"
    advice = f"; try: {remedy}" if remedy else ""
    return DataError(f"{place}: {field + ': ' if field else ''}found {found}; allowed: {allowed}{advice}")
