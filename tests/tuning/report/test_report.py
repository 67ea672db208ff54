"""report.html: one file, nothing outside it, nothing in it that runs."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from tests.tuning import hostile
from tuning.journal.run import History
from tuning.report import plots, report, summary

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

    def handle_endtag(self, tag):
        if tag not in VOID and self.open.pop() != tag:
            self.crossed.append(tag)


@pytest.fixture(scope="module")
def page(found):
    return report.render(found)


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
    assert len(figures) == 1
    assert all('role="img"' in f and re.search(r'aria-label="[^"]{20,}"', f) for f in figures)


def test_figures_take_their_colours_from_the_page(page):
    drawn = "".join(re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", drawn)) <= {
        "none",
        *(f"var(--{name})" for name in ("ink", "muted", "rule", "accent", "soft", "paper")),
    }


def test_hostile_text_stays_text_in_page_and_figures(records):
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
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--enable-logging=stderr", "--window-size=500,900"]
    profile, shot = f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'shot.png'}"
    done = subprocess.run(
        ["chromium", *flags, profile, shot, path.as_uri()],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (tmp_path / "shot.png").stat().st_size > 10_000
    assert "CONSOLE" not in done.stderr


def test_a_figure_has_a_faint_line_for_each_seed(found, answers):
    figure = plots.to_quality(answers)
    faint = re.findall(r'<path d="[^"]*"[^>]*opacity: 0\.3', figure.svg)
    assert len(faint) == 3 * (1 + len(answers.answers))
    assert {"your settings", "best", "as fast, better"} <= set(re.findall(r">([^<>]+)</text>", figure.svg))
    assert plots.to_quality(found) is None, "earlier versions recorded no curves"
