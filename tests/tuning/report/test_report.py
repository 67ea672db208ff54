"""report.html: one file, nothing outside it, nothing in it that runs."""

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from tests.tuning import hostile
from tuning.journal.run import History
from tuning.report import plots, report, sentences, summary, tables

VOID = {"meta", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Tags, ids and the tags left open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.attributes, self.open, self.crossed = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            self.crossed.append(tag)


@pytest.fixture(scope="module")
def page(found):
    return report.render(found)


def bare(found, **changes):
    """Returns the summary without what figures are drawn of, which take all the time."""
    return dataclasses.replace(found, trials=(), probes=(), refused=(), curves={}, **changes)


def test_it_is_one_small_file_that_needs_nothing(page):
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", outside)
    assert len(page.encode()) < 1_000_000
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page


def test_its_markup_is_whole(page):
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.crossed == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {t for t in parsed.tags if t.startswith("h") and t[1:].isdigit()} == {"h1", "h2"}
    assert parsed.tags.count("title") == 1
    assert {t for t in parsed.tags if t in ("script", "iframe", "object", "link", "form")} == set()
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]


def test_every_reference_inside_a_figure_has_its_target(page):
    parsed = Page(page)
    used = {value.removeprefix("#") for name, value in parsed.attributes if name == "xlink:href"}
    used |= set(re.findall(r"url\(#([^)]*)\)", page))
    assert used <= set(parsed.ids)


def test_every_figure_says_what_it_shows(page):
    figures = re.findall(r"<svg [^>]*>", page)
    assert len(figures) == 4
    assert all('role="img"' in f and re.search(r'aria-label="[^"]{20,}"', f) for f in figures)


def test_figures_take_their_colours_from_the_page(page):
    drawn = "".join(re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", drawn)) <= {
        "none",
        *(f"var(--{name})" for name in ("ink", "muted", "rule", "accent", "soft", "paper")),
    }


def test_it_says_what_was_measured_on_what(page):
    text = re.sub(r"\s+", " ", page.replace("\u00a0", " "))
    assert "Throughput is that of Example CPU, 2 cores, not of card rtx3090, which was emulated" in text
    assert "1.85 times as fast as before (1.83 to 1.86)" in text


def test_hostile_text_stays_text_and_an_objective_of_any_name_has_its_figures(records):
    fields = json.dumps([r.fields for r in hostile.run(records)]).replace('"accuracy"', json.dumps(r"top\d \1 $x^$"))
    own = [dataclasses.replace(r, fields=one) for r, one in zip(records, json.loads(fields), strict=True)]
    text = report.render(summary.of_run(History(own)))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text
    shown = Page(text)
    assert any(r"op\d \1 $x^$" in (value or "") for name, value in shown.attributes if name == "aria-label")
    assert shown.crossed == []


def test_a_run_cut_off_anywhere_has_a_report(records):
    for end in (0, 5, 45):
        text = report.render(summary.of_run(History(records[:end])))
        known = any(r.event == "probe" for r in records[:end])
        assert ("unconfirmed" if known else "No configuration was picked") in text
        assert Page(text).open == []


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_chromium_shows_it_without_a_complaint(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
        "--window-size=500,900",
    ]
    profile, shot = f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'shot.png'}"
    done = subprocess.run(
        ["chromium", *flags, profile, shot, path.as_uri()],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (tmp_path / "shot.png").stat().st_size > 10_000
    assert "CONSOLE" not in done.stderr


def test_it_says_what_was_active_and_what_was_not_as_asked(found, page):
    active = {"batch_size": 12, "micro_batch_size": 12, "workers": 0, "samples_in_ram": False}
    seen = dataclasses.replace(found.best, config={"num_workers": 4, "ram_cache": False}, active=active)
    text = report.render(bare(found, named={**found.named, "best": seen}))
    assert "knobs of the best, as its first step was seen to run them" in text
    assert re.search(r"<th scope=.row.>num_workers</th>\s*<td>4</td>\s*<td>with 0 live workers</td>\s*<td>not as", text)
    assert re.search(r"<td>samples read anew</td>\s*<td>as asked</td>", text)
    assert "as its first step was seen" not in page


def test_what_was_trained_again_stands_beside_the_best(found, page):
    assert ">t003</th>" not in page.split("<h2>Trials")[0]
    best = found.named["best"]
    again = tuple(dataclasses.replace(best, name=name, trial="") for name in ("t007", "t003"))
    page = report.render(bare(found, confirmed=again))
    assert ">t003</th>" in page
    assert Page(page).open == []


def test_a_figure_has_a_faint_line_for_each_seed_of_the_reference_and_the_answers(found, answers):
    figure = plots.to_quality(answers)
    assert figure is not None
    faint = re.findall(r'<path d="[^"]*"[^>]*opacity: 0\.3', figure.svg)
    assert len(faint) == 3 * (1 + len(answers.answers))
    assert {"before", "best", "best at today's speed"} <= set(re.findall(r">([^<>]+)</text>", figure.svg))
    assert plots.to_quality(found) is None, "earlier versions recorded no curves"


@pytest.mark.parametrize(("value", "drawn"), [(0.85, True), (0.3, False), (3.0, True)])
def test_a_baseline_is_in_the_figure_where_it_is_near_or_not_beaten(found, value, drawn):
    own = dataclasses.replace(found, baselines={"copying": {"accuracy": value}})
    figure = plots.front(own)
    assert figure is not None
    assert ("copying" in figure.svg, "line is a baseline" in figure.caption) == (drawn, drawn)


def test_names_of_configurations_that_are_as_fast_stand_on_rows_of_their_own(found):
    before = dataclasses.replace(found.named["before"], quality={})
    alike = {"before": before, "after": dataclasses.replace(before, name="after")}
    figure = plots.front(dataclasses.replace(found, named={**found.named, **alike}))
    assert figure is not None
    places = re.findall(r' y="([\d.]+)"[^>]*>(before|after)<', figure.svg)
    assert len({height for height, _ in places}) == len(places) == 2


def test_the_answer_comes_first_with_what_to_set_and_the_command(found, page):
    text = re.sub(r"<[^>]*>", "", page[page.index("<h1>") :])
    order = (
        "times as fast as before",
        "\nlearning_rate=6.1e-4",
        f"train --from runs/nli/{found.id}/best.yaml",
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert places[-1] < text.index("What there is to choose from")


def test_rates_that_three_digits_do_not_tell_apart_are_no_rate_that_all_have(found):
    rates = {name: 0.0012341 if name == "best" else 0.0012288 for name in found.named}
    named = {
        n: dataclasses.replace(one, config={**one.config, "learning_rate": rates[n]}) for n, one in found.named.items()
    }
    grid, same = tables.knobs(dataclasses.replace(found, named=named))
    assert ["learning_rate", "1.2288e-3", "1.2288e-3", "1.2341e-3"] in grid.rows
    assert not [one for one in same if one.startswith("learning_rate")]


def test_throughput_has_a_panel_for_each_knob_that_probes_varied_and_memory_a_line_for_the_cap(found, page):
    drawn = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    (speeds,), (peaks,) = ([one for one in drawn if f'aria-label="{name}' in one] for name in ("Throughput", "Peak"))
    titles = set(re.findall(r">(micro_batch_size|amp_dtype|num_workers|learning_rate|batch_size)<", speeds))
    assert titles == {"micro_batch_size", "amp_dtype", "num_workers"}
    assert "cap 23.2 GiB" in peaks
    assert "were refused ahead" in peaks
    assert plots.throughput(dataclasses.replace(found, probes=found.probes[:2])) is None


def test_trials_stand_at_the_speeds_of_the_search_and_the_best_at_that_of_its_windows(found, page):
    best = found.best
    searched = next(t.samples_per_s for t in found.trials if t.trial == best.trial)
    shown = re.findall(r'class="best">\s*<th scope="row">[^<]*</th>\s*<td>([\d.]+)', page)
    trial = re.search(rf'<th scope="row">{best.trial}</th>\s*<td>ok</td>\s*<td>[\d.]+</td>\s*<td>([\d.]+)', page)
    assert trial is not None
    assert set(shown) == {f"{best.samples_per_s:.1f}"}
    assert trial[1] == f"{searched:.1f}"
    assert sentences.SEARCHED in html.unescape(page)
