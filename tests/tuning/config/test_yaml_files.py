"""The YAML reader: plain data, once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.config import yaml_files
from tuning.config.errors import ConfigError


def test_words_and_numbers_are_those_of_today():
    read = yaml_files.read("a: [off, yes, 010, 1:30, 2026-01-01, 1_6]\nb: [true, null, 1e3, 0]\n", "x.yaml")
    assert read == {"a": ["off", "yes", "010", "1:30", "2026-01-01", "1_6"], "b": [True, None, 1000, 0]}
    assert yaml_files.read("a: [1e-4, 2E3, -1.5e-2, 1e]\n", "x.yaml") == {"a": [1e-4, 2000, -1.5e-2, "1e"]}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(st.characters(codec="ascii"), max_size=8)
        | st.from_regex(r"[-+]?[0-9]{1,3}[.:_e][-+]?[0-9]{1,2}", fullmatch=True),
        st.lists,
        max_leaves=5,
    )
)
def test_what_is_dumped_is_read_back(tree):
    assert yaml_files.read(yaml_files.dump({"a": tree}), "x.yaml") == {"a": tree}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1,\n c: 2}\n", "line 3: c was given in line 2 already"),
        ("a: &x [1]\nb: *x\n", r"line 2: the alias \*x is refused"),
        ("a: [1, 2\nb: 3", "line 2:"),
        ("a: \x00", "special characters"),
        ("1: 2", "a key must be one word of text"),
        ("? [a]\n: 1", "a key must be one word"),
        ("- a\n- b", "expected a mapping at the top, got list"),
        ("", "expected a mapping at the top, got NoneType"),
        ("a: " + "x" * 70_000, "70003 bytes"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_file(text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        yaml_files.read(text, "mine.yaml")
    assert str(raised.value).startswith("error: mine.yaml")
    assert raised.value.remedy == "edit mine.yaml"
