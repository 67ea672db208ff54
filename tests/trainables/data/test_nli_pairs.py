"""JSON lines and tables give the same pairs; whatever else a file holds is refused by file, line and field."""

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.data.errors import DataError
from trainables.data.nli_pairs import MAX_LINE_BYTES, TextPair, balanced, hypothesis_only_accuracy, read, read_splits

YES, NO = TextPair('A "dog runs.', "An animal runs.", True), TextPair("Two men sleep.", "They dance.", False)
SNLI = (
    '{"gold_label": "entailment", "sentence1": "A \\"dog runs.", "sentence2": "An animal runs.", "captionID": "1#0"}\n'
    '{"gold_label": "-", "sentence1": "x", "sentence2": "y"}\n'
    '{"gold_label": "contradiction", "sentence1": "Two men sleep.", "sentence2": "They dance."}\n'
)
SUPERGLUE = (
    '{"premise": "A \\"dog runs.", "hypothesis": "An animal runs.", "label": "entailment", "idx": 0}\n'
    '{"premise": "Two men sleep.", "hypothesis": "They dance.", "label": "not_entailment", "idx": 1}\n'
)
LAYOUTS = {
    "snli_1.0_train.jsonl": SNLI,
    "canary.jsonl": '{"canary": "GUID"}\n' + SNLI,
    "bom.jsonl": "\ufeff" + SNLI,
    "crlf.jsonl": SNLI.replace("\n", "\r\n"),
    "superglue.jsonl": SUPERGLUE,
    "rte.tsv": "index\tsentence1\tsentence2\tlabel\n"
    '0\tA "dog runs.\tAn animal runs.\tentailment\n1\tTwo men sleep.\tThey dance.\tnot_entailment',
    "mnli.tsv": "index\tsentence1\tsentence2\tlabel1\tgold_label\n"
    '0\tA "dog runs.\tAn animal runs.\tneutral\tentailment\n1\tTwo men sleep.\tThey dance.\tentailment\tneutral\n',
}


def written(path: Path, content: str | bytes) -> Path:
    """Returns the path, holding the content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def snli(pairs: list[TextPair]) -> str:
    """Returns the pairs as SNLI's JSON lines."""
    label = {True: "entailment", False: "neutral"}
    rows = [{"gold_label": label[p.entails], "sentence1": p.premise, "sentence2": p.hypothesis} for p in pairs]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_pairs_also_zipped(tmp_path, name):
    content = LAYOUTS[name].encode()
    assert read(written(tmp_path / name, content)) == [YES, NO]
    assert read(written(tmp_path / f"{name}.gz", gzip.compress(content))) == [YES, NO]


GOOD = SNLI.splitlines()[0] + "\n"
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "torn.jsonl": (SNLI[:-9], r":3: found .*, column 77\); allowed: one whole JSON object a line"),
    "list.jsonl": (GOOD + "[1]\n", r":2: found '\[1\]'; allowed: one whole JSON object"),
    "deep.jsonl": (GOOD + "[" * 200_000, r":2: found .*(recursion|nest)"),
    "fields.jsonl": ('{"label": "entailment", "passage": "p"}\n', r":1: found fields label, passage; .*premise"),
    "number.jsonl": (SUPERGLUE.replace('"entailment"', "1"), r":1: label: found 1; allowed: text"),
    "label.jsonl": (SNLI.replace('"-"', '"maybe"'), r":2: gold_label: found 'maybe'; allowed: entailment, "),
    "empty.jsonl": ("", r": found an empty file"),
    "class.jsonl": (GOOD * 2, r": found 2 labelled pairs, all of one class"),
    "no_label.jsonl": ('{"premise": "p", "hypothesis": "h"}\n', r": found no labelled pair"),
    "long.jsonl": (GOOD + " " * (MAX_LINE_BYTES + 1), r":2: found a longer line; allowed: at most 1000000 b"),
    "latin.jsonl": (GOOD.encode() + b'{"x": "\xe9"}\n', r":2: found byte 0xe9; allowed: UTF-8 text"),
    "cells.tsv": (LAYOUTS["rte.tsv"].rsplit("\tThey", 1)[0], r":3: found 2 columns; allowed: 4"),
    "header.tsv": ("index\tsentence1\tsentence2\n0\ta\tb\n", r":1: found columns index, .*gold_label or label"),
    "label.tsv": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentail", r":2: label: found 'entail'; allowed"),
    "x.txt": (SNLI, r": found suffix '\.txt'; allowed: \.jsonl or \.tsv, .*; try: docs/data"),
    "plain.jsonl.gz": (SNLI, r":1: found Not a gzipped file"),
    "torn.jsonl.gz": (gzip.compress(SNLI.encode())[:-12], r":\d+: found "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_file_line_and_field(tmp_path, name):
    content, message = REFUSED[name]
    with pytest.raises(DataError, match=name.replace(".", r"\.") + message):
        read(written(tmp_path / name, content))


def test_refuses_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: found no such file"):
        read(tmp_path / "none.jsonl")


def test_folder_gives_its_own_splits(tmp_path):
    for name in ("multinli_1.0_dev_mismatched.jsonl", "._multinli_1.0_train.jsonl", "multinli_1.0_train.tsv"):
        written(tmp_path / name, "not read")
    written(tmp_path / "multinli_1.0_train.jsonl", SNLI)
    written(tmp_path / "multinli_1.0_dev_matched.jsonl", SNLI * 2)
    assert read_splits(tmp_path, 0.5, 0) == ([YES, NO], [YES, NO] * 2)


def test_folder_without_one_training_file_is_refused(tmp_path):
    written(tmp_path / "test.jsonl", SNLI)
    with pytest.raises(DataError, match=r"found test\.jsonl; allowed: a file with 'train' in its name"):
        read_splits(tmp_path, 0.5, 0)
    written(tmp_path / "a_train.jsonl", SNLI)
    written(tmp_path / "b_train.jsonl", SNLI)
    with pytest.raises(DataError, match=r"a_train\.jsonl, b_train\.jsonl; allowed: one"):
        read_splits(tmp_path, 0.5, 0)


def test_split_that_cannot_be_made_is_refused(tmp_path):
    path = written(tmp_path / "x.jsonl", SNLI)
    with pytest.raises(DataError, match=r"split: found val_frac=1\.0; allowed: > 0 and < 1"):
        read_splits(path, 1.0, 0)
    with pytest.raises(DataError, match="split: found a training part of 1 pairs"):
        read_splits(path, 0.5, 0)


@settings(max_examples=20)
@given(st.integers(0, 9), st.floats(0.2, 0.8))
def test_split_parts_every_pair_and_no_premise(tmp_path_factory, seed, frac):
    pairs = [TextPair(f"p{i // 3}", f"h{i}", i % 3 == 0) for i in range(60)]
    path = written(tmp_path_factory.mktemp("split") / "x.jsonl", snli(pairs))
    train, val = read_splits(path, frac, seed)
    assert sorted(train + val, key=pairs.index) == pairs
    assert not {p.premise for p in train} & {p.premise for p in val}
    assert len({p.premise for p in train}) == int((1 - frac) * 20)
    assert (train, val) == read_splits(path, frac, seed)


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=40), st.none() | st.integers(0, 20))
def test_balanced_is_half_and_half_in_order(labels, limit):
    pairs = [TextPair(f"p{i}", "h", entails) for i, entails in enumerate(labels)]
    kept = balanced(pairs, random.Random(0), limit)
    assert sum(p.entails for p in kept) * 2 == len(kept)
    assert kept == sorted(kept, key=pairs.index)
    most = 2 * min(sum(labels), len(labels) - sum(labels))
    assert len(kept) == (most if limit is None else min(most, limit // 2 * 2))


def test_naive_bayes_is_the_formula():
    # Terms a, b, "a b" | b: (2 of 3+3) / (1 of 1+3) against the prior 1/1, for the hypothesis "b" alone.
    train = [TextPair("p", "a b", True), TextPair("p", "b", False)]
    assert hypothesis_only_accuracy(train, [TextPair("q", "b", False)]) == 1.0  # 2/6 < 2/4
    assert hypothesis_only_accuracy(train, [TextPair("q", "a b", True)]) == 1.0  # 8/216 > 2/64
    more = [*train, TextPair("p", "b", True)]
    assert hypothesis_only_accuracy(more, [TextPair("q", "unseen", True)]) == 1.0  # nothing known: the larger class
