"""Cases of a UEA / UCR archive file, NAME_TRAIN.ts or NAME_TEST.ts, as timeseriesclassification.com publishes them.

    # comments
    @problemName JapaneseVowels
    @timeStamps false
    @missing false
    @univariate false
    @dimensions 12
    @equalLength false
    @classLabel true 1 2 3
    @data
    1.86,1.89,1.94:-0.20,?,-0.19:...:1          dimensions between ":", values between ",", the class last

A case's dimensions are as long as each other; cases may differ (Bagnall et al., "The UEA multivariate time series
classification archive", arXiv 1811.00075).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.errors import DataError


@dataclass(frozen=True)
class Case:
    """One series, float32, shape (time, channel), and its class."""

    values: NDArray[np.float32]
    label: str


def read(path: Path) -> list[Case]:
    """Returns the cases in the file's order; raises DataError with the line.

    A missing value ("?" or "NaN") is put on the straight line between its neighbours in time, and equals the nearest
    where it has one only. Files with time stamps, or with numbers to predict in the place of classes, are refused.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: found {error}; allowed: a .ts file in UTF-8") from None
    header: dict[str, list[str]] = {}
    cases: list[Case] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith(("#", "%")):
            continue
        if "data" in header:
            cases.append(_case(f"{path}:{number}", text, header, len(cases[0].values[0]) if cases else None))
            continue
        if not text.startswith("@"):
            raise DataError(f"{path}:{number}: found {text[:60]!r}; allowed: @data before the first case")
        tag, *values = text[1:].split()
        header[tag.lower()] = values
        _check_header(f"{path}:{number}", tag, values)
    if "classlabel" not in header or not cases:
        found = "no case after @data" if "classlabel" in header else "no @classLabel"
        raise DataError(f"{path}: found {found}; allowed: a header with @classLabel true ..., @data, and cases")
    return cases


def _check_header(where: str, tag: str, values: list[str]) -> None:
    """Raises DataError for a tag that says the file is of a kind which is not read."""
    word = values[0].lower() if values else ""
    if tag.lower() == "timestamps" and word == "true":
        raise DataError(f"{where}: found @{tag} true; allowed: false, values at equal distances in time")
    if tag.lower() == "targetlabel" and word == "true":
        raise DataError(f"{where}: found @{tag} true, numbers to predict; allowed: @classLabel true, classes")
    if tag.lower() == "classlabel" and (word != "true" or len(values) < 3):
        raise DataError(f"{where}: found @{tag} {' '.join(values)}; allowed: true and two classes or more")
    if tag.lower() in ("dimensions", "dimension") and not (word.isascii() and word.isdigit() and int(word) > 0):
        raise DataError(f"{where}: found @{tag} {word}; allowed: a whole number >= 1")


def _dimensions(header: dict[str, list[str]]) -> int | None:
    """Returns how many dimensions the header says a case has, or None where it does not say."""
    stated = header.get("dimensions") or header.get("dimension")
    if stated:
        return int(stated[0])
    return 1 if [word.lower() for word in header.get("univariate", [])] == ["true"] else None


def _case(where: str, text: str, header: dict[str, list[str]], before: int | None) -> Case:
    """Returns the case of a line; `before` is how many dimensions the cases before it had."""
    *dimensions, label = (part.strip() for part in text.split(":"))
    wanted = _dimensions(header) or before
    if not dimensions or (wanted is not None and len(dimensions) != wanted):
        raise DataError(f"{where}: found {len(dimensions)} dimensions and a class; allowed: {wanted or 'one or more'}")
    classes = header.get("classlabel", [])[1:]
    if label not in classes:
        raise DataError(
            f"{where}: class: found {label!r:.60}; allowed: {', '.join(classes) or 'none is in the header'}"
        )
    channels = [list(_numbers(where, number, part)) for number, part in enumerate(dimensions, 1)]
    steps = [len(channel) for channel in channels]
    if min(steps) != max(steps):
        odd = next(number for number, count in enumerate(steps, 1) if count != steps[0])
        raise DataError(
            f"{where}: dimension {odd}: found {steps[odd - 1]} values; allowed: {steps[0]}, as the first has"
        )
    filled = [_filled(where, number, np.array(channel)) for number, channel in enumerate(channels, 1)]
    return Case(np.stack(filled, axis=1).astype(np.float32), label)


def _numbers(where: str, dimension: int, text: str) -> Iterator[float]:
    """Yields the values of a dimension; a missing one is NaN."""
    for word in text.split(","):
        try:
            value = math.nan if word.strip() == "?" else float(word)
        except ValueError:
            value = math.inf
        if math.isinf(value):
            raise DataError(
                f"{where}: dimension {dimension}: found {word.strip()!r:.40}; allowed: a number or ?"
            ) from None
        yield value


def _filled(where: str, dimension: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        raise DataError(f"{where}: dimension {dimension}: found no value but ?; allowed: at least one number")
    return values if len(known) == len(values) else np.interp(np.arange(len(values)), known, values[known])
