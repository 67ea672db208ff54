"""Where settings are written: the arguments are there, and nothing else has changed."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.outside.edit import Edit, changed, patch

WORKERS = {"num_workers": 2, "persistent_workers": True}
CALLS = {
    "DataLoader(data)": "DataLoader(data, num_workers=2, persistent_workers=True)",
    "DataLoader()": "DataLoader(num_workers=2, persistent_workers=True)",
    "DataLoader(data, num_workers=0)": "DataLoader(data, num_workers=2, persistent_workers=True)",
    "DataLoader(data, 8, True, None, None, 4)": "DataLoader(data, 8, True, None, None, 2, persistent_workers=True)",
    "torch.utils.data.DataLoader(make(1, 2), batch_size=8)": (
        "torch.utils.data.DataLoader(make(1, 2), batch_size=8, num_workers=2, persistent_workers=True)"
    ),
    "DataLoader(\n    data,\n    batch_size=8,  # as in the paper\n)": (
        "DataLoader(\n    data,\n    batch_size=8, num_workers=2, persistent_workers=True,  # as in the paper\n)"
    ),
    "for x in prepare(DataLoader(data, 8)): pass": (
        "for x in prepare(DataLoader(data, 8, num_workers=2, persistent_workers=True)): pass"
    ),
    "DataLoader('ä', 8)": "DataLoader('ä', 8, num_workers=2, persistent_workers=True)",
}


@pytest.mark.parametrize("text", CALLS)
def test_arguments_are_written_into_the_call(text: str) -> None:
    found = changed(f"# ß\n{text}\nlast = 1\n", Edit("x.py", 2, "DataLoader", WORKERS))
    assert found == f"# ß\n{CALLS[text]}\nlast = 1\n"


@pytest.mark.parametrize(
    "text", ["DataLoader(data, **more)", "trainer.train()", "a, b = DataLoader(x), DataLoader(y)", "x = 1"]
)
def test_a_call_that_cannot_be_told_is_left_alone(text: str) -> None:
    with pytest.raises(LookupError):
        changed(text, Edit("x.py", 1, "DataLoader", WORKERS))


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(["data", "f(1, 2)", "[1, 2]", "'a,)'"]), max_size=4),
    st.dictionaries(st.sampled_from(["lr", "fused", "betas"]), st.sampled_from(["1", "(0.9, 0.99)", "x()"])),
    st.booleans(),
)
def test_the_call_has_the_new_arguments_and_keeps_the_others(
    args: list[str], named: dict[str, str], comma: bool
) -> None:
    given_ = [*args, *(f"{name}={value}" for name, value in named.items())]
    text = f"opt = AdamW({', '.join(given_)}{',' if comma and given_ else ''})"
    call = ast.parse(changed(text, Edit("x.py", 1, "AdamW", {"fused": True}))).body[0].value  # type: ignore[attr-defined]
    assert [ast.unparse(one) for one in call.args] == [ast.unparse(ast.parse(one, mode="eval")) for one in args]
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    assert words == {**{n: ast.unparse(ast.parse(v, mode="eval")) for n, v in named.items()}, "fused": "True"}


def test_a_patch_names_files_as_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("a = 1\nloader = DataLoader(data, 8)\nopt = AdamW(p)\n")
    edits = [Edit(str(script), 2, "DataLoader", WORKERS), Edit(str(script), 3, "AdamW", {"fused": True})]
    found = patch([*edits, Edit(str(tmp_path / "gone.py"), 1, "AdamW", {})])
    assert found.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "+opt = AdamW(p, fused=True)\n" in found
    assert "+loader = DataLoader(data, 8, num_workers=2, persistent_workers=True)\n" in found
    assert script.read_text().count("num_workers") == 0, "the file is as it was"
