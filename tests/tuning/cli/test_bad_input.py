"""Every bad command line ends in one short error that names the key, the value and a remedy, and writes nothing."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tuning.config.errors import MAX_LINES, ConfigError
from tuning.config.load import load
from tuning.config.schema import StudyConfig

# The command line, its items joined by AND; what the error must name besides the last item's key; a part of the remedy.
TABLE = [
    ("workload=nope", "nope", "workload=nli"),
    ("card=rtx3009", "rtx3009", "did you mean card=rtx3090?"),
    ("budget=", "no value", "budget=<value>"),
    ("workload=/etc/passwd", "/etc/passwd", "workload=nli"),
    ("workload=nli.py", "does not exist", "did you mean workload=nli?"),
    ("workload=folder.py", "not a regular file", "path of your workload"),
    ("workload=no_such_module.mine", "no_such_module", "folder that holds it"),
    ("workloda=nli", "nli", "did you mean workload=nli?"),
    ("lr=abc", "abc", "knobs.learning_rate"),
    ("batch_size=4", "4", "did you mean knobs.batch_size=4?"),
    ("knobs.lr=1e-3", "0.001", "did you mean knobs.learning_rate?"),
    ("knobs.learning_rate=abc", "abc", "knobs.learning_rate=0.0005"),
    ("knobs.learning_rate=nan", "nan", "knobs.learning_rate=0.0005"),
    ("knobs.learning_rate", "no value", "knobs.learning_rate=<value>"),
    ("knobs.learning_rate=1e-3,1e-4", "1e-3,1e-4", "knobs.learning_rate=[1e-3,1e-4]"),
    ("knobs.learning_rate=0,001", "0,001", "knobs.learning_rate=0.001 with a decimal point"),
    ("search.trials=2,4", "a comma parts several values", "search.trials=<value>"),
    ("knobs.learning_rate=choice(1,2)", "choice(1,2)", "knobs.learning_rate=[<value>,<value>]"),
    ("knobs.num_workers=[1,2", "expected ',' or ']'", "such as [8,64]"),
    ("knobs.amp_dtype='fp32", "unexpected end of stream", "such as [8,64]"),
    ("knobs.num_workers=" + "[" * 500, "nested too deep", "such as [8,64]"),
    ("knobs.num_workers={1: 2}", "a key must be one word of text", "{low: 8"),
    ("knobs.num_workers=１", "U+FF11 (FULLWIDTH DIGIT ONE)", "type it again"),  # noqa: RUF001
    ("search.trials=1_6", "1_6 is not allowed", "search.trials=auto"),
    ("workload.layers=٣", "٣ is not allowed", "workload.layers=2"),
    ("workload.data=a\x1b[2J", "U+001B", "type it again"),
    ("x.y.z=1", "x.y.z", "see --help"),
    ("+knobs.learning_rate=3", "3", "knobs.learning_rate=3"),
    ("mine.py", "no value", "workload=mine.py"),
    ("nli", "no value", "workload=nli"),
    ("knobs", "no value", "knobs.<name>=<value>"),
    ("", "an argument is empty", "leave it out"),
    ("workload=''", "'' has no value", "workload=<value>"),
    ("--multirun", "--multirun", "--help"),
    ("knobs.adapter=!!python/object/apply:os.system [ls]", "os.system is refused", "add quotes"),
    ("knobs.batch_size=[&a 8,*a]", "the alias *a is refused", "add quotes"),
    ("knobs.num_workers=010", "010 is not allowed", "knobs.num_workers=0"),
    ("search.trials=3 AND search.trials=4", "search.trials=3", "keep one"),
    ("knobs.dropout=0.1 AND knobs.dropout.low=0", "knobs.dropout=0.1", "keep one"),
    ("knobs.batch_size={low:9,high:8}", "{low: 9, high: 8}", "low: 16, high: 64"),
    ("knobs.dropout={low:0,high:0.5,log:true}", "low > 0", "low: 0.02"),
    ("knobs.dropout={low:0,high:0.5,step:0}", "step", "low: 0.02"),
    ("knobs.batch_size=[]", "[]", "knobs.batch_size=32"),
    ("knobs.batch_size=[8,8.0]", "8 is listed twice", "knobs.batch_size=[8]"),
    ("knobs.batch_size=null", "null", "knobs.batch_size=32"),
    ("knobs.batch_size.low=2", "[16,32,64]", "knobs.batch_size=<value>"),
    ("knobs={}", "{}", "knobs.learning_rate=<value>"),
    ("search=5", "5", "search.trials=<value>"),
    ("search.trials.x=3", "auto", "search.trials=<value>"),
    ("search.trails=40", "40", "did you mean search.trials=40?"),
    ("search.trials=-1", "-1", "search.trials=auto"),
    ("search.max_time=1 hour", "1 hour", "search.max_time=4m"),
    ("search.sampler=gp", "allowed: known, tpe or random", "search.sampler=known"),
    ("pick.at_least=good", "allowed: a number", "leave out pick.at_least"),
    ("pick.tolerance=-1", "-1 is not allowed\n  allowed: a number >= 0", "pick.tolerance=0"),
    ("pick.tolerance=101%", "a percentage of the reference's", "pick.tolerance=0"),
    ("cluster=ray://head:10001", "HOST:PORT", "leave out cluster"),
    ("target=a b", "a b", "leave out target"),
    ("devices=0,0", "0,0", "devices=all"),
    ("budget.confirm.windows=3", "at least 5", "budget.confirm.windows=5"),
    ("knobs.batch_size=0", "0", "knobs.batch_size=32"),
    ("knobs.batch_size=1" + "0" * 400, "... is not allowed", "knobs.batch_size=32"),
    ("pick.tolerance=1" + "0" * 400, "a number >= 0", "pick.tolerance=0"),
    ("workload=~nobody-of-this-name/x.py", "no user of that name", "the path of your workload's .py file"),
    ("knobs.num_workers=0 AND knobs.prefetch_factor=[2,4]", "no effect", "knobs.num_workers=[0,2,4]"),
    ("knobs.amp_dtype=fp61", "fp61", "knobs.amp_dtype=fp32"),
    ("card=t4 AND card.memory_gib=1", "1", "raise card.memory_gib"),
    ("card.device=gpu", "allowed: auto, cpu or cuda", "card.device=auto"),
    ("card.memory_gib=32GB", "allowed: a number", "card.memory_gib=32"),
    ("card.memory_gib=0", "allowed: more than 0", "leave out card.memory_gib"),
    ("workload.modle=/m", "/m", "did you mean workload.model=/m?"),
    ("workload.layers=three", "three", "workload.layers=2"),
    ("workload.download=1", "1", "workload.download=false"),
    ("workload.model=[a,b]", "[a,b]", "workload.model=<value>"),
    ("named.before.batch_size=[1,2]", "[1,2]", "named.before.batch_size=<value>"),
    ("named.before.lr=1", "lr is not a knob", "learning_rate"),
    ("named.before=3", "3", "named.before.learning_rate"),
    ("name=../x", "../x", "leave out name"),
    ("resume=../../etc", "../../etc", "leave out resume"),
]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The working folder: a directory called folder.py, and nothing else."""
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "named", "remedy"), TABLE, ids=[repr(row[0][:60]) for row in TABLE])
def test_bad_command_line(line, named, remedy, empty_folder):
    argv = line.split(" AND ")
    with pytest.raises(ConfigError) as raised:
        load(argv)
    text = str(raised.value)
    key = argv[-1].partition("=")[0].strip("+~")
    assert key in text
    assert named in text
    assert remedy in raised.value.remedy
    assert text.startswith("error: ")
    assert text.splitlines()[-1].startswith("  try: ")
    assert len(text.splitlines()) <= MAX_LINES
    assert max(map(len, text.splitlines())) < 400
    assert "Traceback" not in text
    assert "http" not in text
    assert raised.value.exit_code == 2
    assert list(empty_folder.iterdir()) == [empty_folder / "folder.py"]


def test_the_name_of_a_file_that_is_there_is_taken_for_that_file(empty_folder):
    (empty_folder / "fraud.py").touch()
    with pytest.raises(ConfigError, match="there is no such workload") as raised:
        load(["workload=fraud"])
    assert raised.value.remedy == "did you mean workload=fraud.py?"


def test_space_with_nothing_to_search_is_refused():
    searched = load([]).space.parameters
    one_each = [f"knobs.{n}={str(p.values[0]).lower()}" for n, p in searched.items() if hasattr(p, "values")]
    with pytest.raises(ConfigError, match="nothing to search"):
        load([*one_each, "knobs.learning_rate=1e-3", "knobs.warmup_frac=0.1"])


KEYS = st.sampled_from(
    (
        *("knobs.batch_size", "knobs.learning_rate", "knobs.amp_dtype", "search.trials", "search.max_time", "name"),
        *("workload", "workload.data", "card", "concurrency", "named.after.tf32", "budget.probe", "knobs", "x.y"),
    )
)
WORDS = st.sampled_from(["1", "0.5", "nan", "null", "true", "fp16", "low: 1", "high: 4", "log: true", "4m", "a b", "é"])
SIGNS = st.sampled_from(
    ["[", "]", "{", "}", ",", "'", '"', "(", ")", "=", "$", "{", "\\", ":", " ", "~", "\n", "\0", "#"]
)
VALUES = st.one_of(
    WORDS,
    st.lists(WORDS, max_size=4).map(lambda words: "[" + ",".join(words) + "]"),
    st.lists(WORDS, max_size=4).map(lambda words: "{" + ", ".join(words) + "}"),
    st.lists(st.one_of(WORDS, SIGNS), max_size=8).map("".join),
    st.text(max_size=12),
)
ITEMS = st.one_of(st.tuples(KEYS, VALUES).map("=".join), st.text(max_size=20))


@given(st.lists(ITEMS, max_size=3))
@example(["knobs.adapter=\\", "name=\ud800"])
@example(["knobs.batch_size={low: {low: 1}, high: [4]}"])
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_command_line_is_a_configuration_or_one_short_error(argv):
    refused = None
    try:
        assert isinstance(load(argv), StudyConfig)
    except ConfigError as error:
        refused = error
    assert refused is None or refused.remedy
    assert refused is None or len(str(refused).splitlines()) <= MAX_LINES


@pytest.mark.parametrize("typed", ["1e-4..1e-2", "1e-4-1e-2", "0.0001 to 0.01"])
def test_a_range_typed_as_people_write_it_has_the_syntax_in_its_error(typed):
    with pytest.raises(ConfigError) as raised:
        load([f"knobs.learning_rate={typed}"])
    remedy = raised.value.remedy
    assert remedy.startswith("'knobs.learning_rate={low: ")
    assert load([remedy.split("'")[1]]).space.parameters["learning_rate"].low == 1e-4


def test_a_card_that_is_not_listed_has_a_way_on_that_works():
    with pytest.raises(ConfigError, match=r"card=rtx5090: there is no such card") as raised:
        load(["card=rtx5090"])
    assert "card=auto card.memory_gib=32" in raised.value.remedy
    assert load(["card=auto", "card.memory_gib=32"]).card.memory_bytes == 32 * 2**30


def test_few_seconds_without_a_unit_are_said_to_be_seconds():
    said = "search.max_time=4 is 4 seconds; 4 minutes are search.max_time=4m"
    assert load(["search.max_time=4"]).dropped[-1] == said
    assert said not in load(["search.max_time=4s"]).dropped
    assert not any("max_time" in text for text in load(["search.max_time=240"]).dropped)
