"""Sentence pairs with labels, and what a guesser scores on them.

    {"gold_label": "entailment", "sentence1": "A dog runs.", "sentence2": "An animal runs."}      .jsonl
    sentence1 <tab> sentence2 <tab> gold_label                                                    .tsv, its first line

SNLI (Bowman, 1508.05326), MultiNLI (Williams, 1704.05426) and SuperGLUE (Wang, 1905.00537) publish JSON lines, GLUE
(Wang, 1804.07461) tab-separated lines with a header and no quoting. Fields may also be called premise, hypothesis and
label, and others are passed over. A file may be gzipped. Labels are taken by name, for their numbers differ from one
publisher to another.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from trainables.data.errors import OTHER_LAYOUTS, wrong

ENTAILMENT_FILE = Path(__file__).parent / "samples" / "epistemic_snli_format.jsonl.gz"
MAX_LINE_BYTES = 1_000_000
PAIR_SUFFIXES = (".jsonl", ".tsv")
"""In order of preference where a folder holds the same split more than once."""

_LABELS = {
    "entailment": True,
    "neutral": False,
    "contradiction": False,
    "not_entailment": False,
    "non-entailment": False,
    "-": None,  # SNLI: the annotators found no majority
}
_LABEL_FIELDS = ("gold_label", "label")  # MNLI has both label1 and gold_label; the second counts
_PREMISE_FIELDS = ("sentence1", "premise")
_HYPOTHESIS_FIELDS = ("sentence2", "hypothesis")


@dataclass(frozen=True)
class TextPair:
    """A premise, a hypothesis, and whether the first entails the second; neutral and contradiction are both False."""

    premise: str
    hypothesis: str
    entails: bool


def read(path: Path) -> list[TextPair]:
    """Returns the labelled pairs of one file, in its order.

    Records without a label (a header, a test split) and those labelled "-" are left out. Raises DataError.
    """
    name = path.name.removesuffix(".gz")
    if not path.is_file():
        raise wrong(path, "no such file", "a file of sentence pairs")
    if not name.endswith(PAIR_SUFFIXES):
        allowed = f"{' or '.join(PAIR_SUFFIXES)}, each also with .gz"
        raise wrong(path, f"suffix {Path(name).suffix!r}", allowed, remedy=OTHER_LAYOUTS)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise wrong(path, "an empty file", "at least one pair of each class")
    in_json = name.endswith(".jsonl")
    pairs = list(_json_pairs(path, chain([first], lines)) if in_json else _tsv_pairs(path, first, lines))
    if len({pair.entails for pair in pairs}) < 2:
        found = f"{len(pairs)} labelled pairs, all of one class" if pairs else "no labelled pair"
        raise wrong(path, found, "pairs that entail and pairs that do not")
    return pairs


def read_splits(path: Path, val_frac: float, seed: int) -> tuple[list[TextPair], list[TextPair]]:
    """Returns the training and the validation pairs of a file or a folder.

    A folder's train and dev (or val) files are taken as they are, of MultiNLI's two dev files the matched one. A single
    file is split by premise: no premise is in both parts, and `val_frac` (between 0 and 1) of them are in the second.
    The split depends on the file and `seed` alone. Raises DataError.
    """
    source = path
    if path.is_dir():
        train_file = _file_of(path, "train")
        if train_file is None:
            names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
            allowed = f"a file with 'train' in its name, ending in {', '.join(PAIR_SUFFIXES)} or .gz of these"
            raise wrong(path, names, allowed, remedy=OTHER_LAYOUTS)
        source = train_file
        held_out = _file_of(path, "dev", "val", "validation")
        if held_out is not None:
            return read(source), read(held_out)
    if not 0.0 < val_frac < 1.0:
        raise wrong(source, f"val_frac={val_frac}", "> 0 and < 1", field="split")
    pairs = read(source)
    premises = sorted({pair.premise for pair in pairs})
    random.Random(seed).shuffle(premises)
    kept = set(premises[: int((1.0 - val_frac) * len(premises))])
    train, val = [p for p in pairs if p.premise in kept], [p for p in pairs if p.premise not in kept]
    for name, part in (("training", train), ("validation", val)):
        if len({pair.entails for pair in part}) < 2:
            found = f"a {name} part of {len(part)} pairs without both classes (val_frac={val_frac})"
            raise wrong(source, found, "more premises, or another val_frac", field="split")
    return train, val


def balanced(pairs: Sequence[TextPair], rng: random.Random, limit: int | None = None) -> list[TextPair]:
    """Returns as many pairs of one class as of the other, in their order, and at most `limit` in all.

    `rng` draws those that are left out: with both classes equal, always guessing one of them is right half the time.
    """
    classes = [[i for i, pair in enumerate(pairs) if pair.entails is entails] for entails in (True, False)]
    size = min(len(indices) for indices in classes)
    size = size if limit is None else min(size, limit // 2)
    return [pairs[i] for i in sorted(i for indices in classes for i in rng.sample(indices, size))]


def hypothesis_only_accuracy(train: Sequence[TextPair], val: Sequence[TextPair]) -> float:
    """Returns the accuracy, 0 to 1, of a guesser that never sees the premise.

    If it is far above the majority, the hypotheses give the label away and the set does not ask for entailment
    (Poliak et al., 1805.01042). Multinomial naive Bayes with add-one smoothing over the words and word pairs of the
    hypothesis; those not seen in training are passed over.
    """
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for pair in train:
        counts[pair.entails].update(_terms(pair.hypothesis))
    entailing = sum(pair.entails for pair in train)
    prior = math.log(entailing) - math.log(len(train) - entailing)
    known = counts[True].keys() | counts[False].keys()
    offset = math.log(counts[True].total() + len(known)) - math.log(counts[False].total() + len(known))
    weight = {t: math.log(counts[True][t] + 1) - math.log(counts[False][t] + 1) - offset for t in known}
    right = sum(
        (prior + sum(weight[t] for t in _terms(pair.hypothesis) if t in weight) > 0.0) is pair.entails for pair in val
    )
    return right / len(val)


def _terms(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return words + [f"{a} {b}" for a, b in pairwise(words)]


def _file_of(folder: Path, *words: str) -> Path | None:
    """Returns the folder's file with one of the words in its name, or None; raises DataError for two training files."""
    named = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(words)})(?:[^a-z]|$)")
    for suffix in PAIR_SUFFIXES:
        found = sorted(
            file
            for file in folder.iterdir()
            if file.name.removesuffix(".gz").endswith(suffix)
            and named.search(file.name.removesuffix(".gz").lower())
            and not file.name.startswith(".")
        )
        if len(found) > 1 and "train" in words:
            raise wrong(folder, f"training files {', '.join(f.name for f in found)}", "one; give its path instead")
        if found:
            return found[0]
    return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number, from 1, and the text of each line that is not blank; lines end in "\\n" alone."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise wrong(path, "a longer line", f"at most {MAX_LINE_BYTES} bytes", line=number)
                text = raw.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode()
                if text.strip():
                    yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise wrong(path, f"byte 0x{error.object[error.start]:02x}", "UTF-8 text", line=number) from None
    except (OSError, EOFError, zlib.error) as error:
        raise wrong(path, str(error), "a file that can be read to its end", line=number + 1) from None


def _json_pairs(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TextPair]:
    for number, text in lines:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise wrong(path, f"{text[:60]!r} ({why})", "one whole JSON object a line", line=number) from None
        if not isinstance(record, dict):
            raise wrong(path, f"{text[:60]!r}", "one whole JSON object a line", line=number)
        if any(field in record for field in _LABEL_FIELDS):
            yield from _pair(path, number, record)


def _tsv_pairs(path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Iterator[TextPair]:
    """Yields the pairs of a tab-separated file; quotes are text like any other, GLUE's are not balanced."""
    header = first[1].split("\t")
    for fields in (_PREMISE_FIELDS, _HYPOTHESIS_FIELDS, _LABEL_FIELDS):
        if not set(fields) & set(header):
            found, allowed = f"columns {', '.join(header):.200}", f"a header with {' or '.join(fields)}"
            raise wrong(path, found, allowed, line=first[0], remedy=OTHER_LAYOUTS)
    for number, text in lines:
        cells = text.split("\t")
        if len(cells) != len(header):
            raise wrong(path, f"{len(cells)} columns", f"{len(header)}, as the first line has", line=number)
        yield from _pair(path, number, dict(zip(header, cells, strict=True)))


def _pair(path: Path, number: int, record: Mapping[str, object]) -> Iterator[TextPair]:
    """Yields the record's pair, or nothing where its label is "-"."""
    values = []
    for fields in (_PREMISE_FIELDS, _HYPOTHESIS_FIELDS, _LABEL_FIELDS):
        field = next((name for name in fields if name in record), None)
        if field is None:
            raise wrong(path, f"fields {', '.join(record)}", " or ".join(fields), line=number)
        value = record[field]
        if not isinstance(value, str):
            raise wrong(path, f"{value!r:.60}", "text", line=number, field=field)
        values.append(value)
    if values[2] not in _LABELS:
        raise wrong(path, f"{values[2]!r:.60}", ", ".join(_LABELS), line=number, field=str(field))
    entails = _LABELS[values[2]]
    if entails is not None:
        yield TextPair(values[0], values[1], entails)
