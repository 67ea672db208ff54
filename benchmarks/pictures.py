"""Draws the README's pictures of a run: the summary as a terminal shows it, and the report, each light and dark.

    python -m benchmarks.pictures 20261201-061737-b95e docs/pictures --runs-dir runs

The terminal's are SVG by rich, without a font to download. The report's are PNG by a Chromium on PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

WIDTH, LINES = 100, 17
"""Columns of the terminal, and the lines of the summary that the picture has: the answer and its table."""
SIZE_PX = (1000, 1390)
"""Width and height of the report's picture: its first sentence, the table of answers and the curves."""
THEMES = {"light": (DEFAULT_TERMINAL_THEME, 1), "dark": (MONOKAI, 0)}
"""By name: the colours of the terminal, and what Chromium calls the scheme."""


def shown_in_a_terminal(command: Sequence[str]) -> str:
    """Returns what a command writes to a terminal of `WIDTH` columns, with its colours."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=theirs, env=env):
        os.close(theirs)
        parts = list[bytes]()
        with contextlib.suppress(OSError):  # which is how Linux says that the other end is closed
            while part := os.read(ours, 65_536):
                parts.append(part)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def draw_terminal(text: str, title: str, path: Path, theme: TerminalTheme) -> None:
    """Writes an SVG of a terminal that shows the text, which may have ANSI colours."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    plain = re.sub(r"@font-face \{.*?\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    path.write_text(console.export_svg(title=title, theme=theme, code_format=plain), encoding="utf-8")


def draw_page(page: Path, path: Path, scheme: int) -> None:
    """Writes a PNG of the top of a report, in 64 colours; raises RuntimeError without a Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise RuntimeError("no Chromium is on PATH")
    size = ",".join(map(str, SIZE_PX))
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder) / "top.html"
        text = page.read_text(encoding="utf-8").replace("</head>", "<style>pre {display: none}</style></head>")
        top.write_text(text.partition("<h2>What differs")[0], encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
        options += [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={size}"]
        options += [f"--screenshot={path.resolve()}", top.as_uri()]
        subprocess.run([found, *options], check=True, capture_output=True)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def main(argv: Sequence[str]) -> int:
    """Draws the pictures of a run into a folder."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("run")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--runs-dir", default="runs")
    given = asked.parse_args(argv)
    command = [sys.executable, "-m", "tuning", "show", given.run, "--runs-dir", given.runs_dir]
    text = shown_in_a_terminal(command)
    report = next(Path(given.runs_dir).glob(f"*/{given.run}/report.html"))
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, (theme, scheme) in THEMES.items():
        top = "\n".join(text.splitlines()[:LINES])
        draw_terminal(
            top,
            f"python -m tuning.run workload={report.parent.parent.name}",
            given.folder / f"terminal_{name}.svg",
            theme,
        )
        draw_page(report, given.folder / f"report_{name}.png", scheme)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
