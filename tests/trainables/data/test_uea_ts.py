"""Files in the layout of the UEA archive, and the lines that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.data.errors import DataError
from trainables.data.uea_ts import Case, read

HEADER = """# Kudo, Toyama and Shimbo
%another comment
@problemName JapaneseVowels
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false

@classLabel true 1 two
"""
CASES = "1.5,-2,3e-1:4,5,6:1\n 7 , 8:9,0:two\n"


def written(path: Path, text: str) -> Path:
    """Returns the path of a .ts file with the text."""
    path.write_text(text, encoding="utf-8")
    return path


def plain(cases: list[Case]) -> list[tuple[list[list[float]], str]]:
    return [(case.values.tolist(), case.label) for case in cases]


@pytest.mark.parametrize(
    "change", [("\n", "\r\n"), ("@dimensions 2\n", ""), ("@classLabel", "@CLASSLABEL"), ("# K", "\ufeff# K")]
)
def test_cases_are_time_by_channel(tmp_path: Path, change: tuple[str, str]) -> None:
    text = (HEADER + "@data\n" + CASES).replace(*change)
    (tmp_path / "x.ts").write_bytes(text.encode())
    first, second = read(tmp_path / "x.ts")
    np.testing.assert_array_equal(first.values, np.array([[1.5, 4], [-2, 5], [0.3, 6]], np.float32))
    assert plain([second]) == [([[7.0, 9.0], [8.0, 0.0]], "two")]
    assert first.values.dtype == np.float32


def test_missing_values_lie_between_their_neighbours(tmp_path: Path) -> None:
    (case,) = read(written(tmp_path / "x.ts", HEADER + "@data\n?,1,?,NaN,4,?:5,?,5,5,5,5:1\n"))
    assert case.values[:, 0].tolist() == [1, 1, 2, 3, 4, 4]
    assert case.values[:, 1].tolist() == [5] * 6


def test_a_univariate_file(tmp_path: Path) -> None:
    text = "@univariate true\n@classLabel true a b\n@data\n1,2:a\n3:b\n"
    assert plain(read(written(tmp_path / "x.ts", text))) == [([[1], [2]], "a"), ([[3]], "b")]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 6).flatmap(
                lambda steps: st.lists(
                    st.lists(st.floats(-1e6, 1e6, width=32), min_size=steps, max_size=steps), min_size=2, max_size=2
                )
            ),
            st.sampled_from(["1", "two"]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_another_writer_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[list[list[float]], str]]
) -> None:
    lines = [":".join([*(",".join(map(repr, channel)) for channel in channels), label]) for channels, label in cases]
    found = read(written(tmp_path_factory.mktemp("ts") / "x.ts", HEADER + "@data\n" + "\n".join(lines)))
    assert [case.label for case in found] == [label for _, label in cases]
    for case, (channels, _) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(case.values, np.array(channels, np.float32).T)


REFUSED = {
    "time stamps": (HEADER.replace("Stamps false", "Stamps true"), r"x\.ts:4: found @timeStamps true; allowed: false"),
    "regression": (HEADER + "@targetLabel true\n", r"x\.ts:11: found @targetLabel true, numbers to predict"),
    "no classes": (HEADER.replace("true 1 two", "false"), r"x\.ts:10: found @classLabel false; allowed: true and two"),
    "dimensions": (HEADER.replace("ons 2", "ons two"), r"x\.ts:7: found @dimensions two; allowed: a whole number >= 1"),
    "no @data": (HEADER + CASES, r"x\.ts:11: found '1\.5,.*'; allowed: @data before the first case"),
    "no label tag": ("@data\n1:a\n", r"x\.ts:2: class: found 'a'; allowed: none is in the header"),
    "no case": (HEADER + "@data\n", r"x\.ts: found no case after @data; allowed: a header with"),
    "nothing": ("", r"x\.ts: found no @classLabel"),
    "class": (HEADER + "@data\n" + CASES + "1:2:3\n", r"x\.ts:14: class: found '3'; allowed: 1, two"),
    "one dimension": (HEADER + "@data\n1:two\n", r"x\.ts:12: found 1 dimensions and a class; allowed: 2"),
    "unequal": (HEADER + "@data\n1,2:3:1\n", r"x\.ts:12: dimension 2: found 1 values; allowed: 2, as the first has"),
    "word": (HEADER + "@data\n1,x:3,4:1\n", r"x\.ts:12: dimension 1: found 'x'; allowed: a number or \?"),
    "infinite": (HEADER + "@data\n1,2:3,inf:1\n", r"x\.ts:12: dimension 2: found 'inf'; allowed: a number or \?"),
    "gap": (HEADER + "@data\n1,2:3,:1\n", r"x\.ts:12: dimension 2: found ''; allowed"),
    "all missing": (HEADER + "@data\n1,2:?,?:1\n", r"x\.ts:12: dimension 2: found no value but \?"),
    "later": (
        HEADER.replace("@dimensions 2\n", "") + "@data\n1:2:1\n1:2:3:1\n",
        r"x\.ts:12: found 3 dimensions and a class; allowed: 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_line(tmp_path: Path, case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        read(written(tmp_path / "x.ts", text))


def test_refuses_what_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.ts: found .*No such file.*; allowed: a \.ts file in UTF-8"):
        read(tmp_path / "none.ts")
    (tmp_path / "x.ts").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"x\.ts: found .*codec can't decode.*; allowed"):
        read(tmp_path / "x.ts")
