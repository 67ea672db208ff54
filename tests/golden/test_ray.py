"""Two trials at a time: with Ray, its dashboard behind a token on loopback, in one flat space."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE, start, wait_for
from tests.golden.outputs import interrupted_once, of, resumed, tiny

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def answered(url: str, token: str | None) -> tuple[int, str]:
    """Returns the code and the text that a dashboard answers with."""
    request = urllib.request.Request(url)  # noqa: S310  (our own dashboard on loopback)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def listening(process: psutil.Process) -> set[str]:
    """Returns the addresses a process listens at; none where it has ended meanwhile."""
    try:
        return {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    except psutil.NoSuchProcess:
        return set()


@pytest.mark.fault
def test_killed_search_with_a_dashboard_resumes(
    tmp_path: Path,
) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "__init__.py").write_text("raise RuntimeError('took their tuning')")
    (tmp_path / "argparse.py").write_text("raise RuntimeError('took their argparse')")
    (tmp_path / "mine.py").write_text(MINE.read_text())
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "cardtune"
    script.write_text("import sys\nfrom tuning.__main__ import main\nsys.exit(main())\n")  # as pip writes it
    slow = ["search.trials=8", "budget.train_epochs=8", "budget.confirm.seeds=1", "budget.confirm.top=1"]
    asked = tiny("workload=mine.py", "concurrency=2", "dashboard=true", *slow)
    process = start(str(script), ["run", *asked], tmp_path)
    err = tmp_path / "err"
    assert wait_for(lambda: "log in with the token" in err.read_text(), process), err.read_text()[-2000:]
    told = re.search(r"(http://\S+) +log in with the token: cat (\S+)", " ".join(err.read_text().split()))
    assert told
    url, token = told[1], Path(told[2])
    assert re.match(r"http://(127\.0\.0\.1|localhost):\d+$", url)
    assert token.stat().st_mode & 0o777 == 0o600
    assert [answered(f"{url}/api/jobs/", t)[0] for t in (None, token.read_text())] == [401, 200]
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    addresses = {address.removeprefix("::ffff:") for p in family for address in listening(p)}
    assert addresses
    assert addresses <= {"127.0.0.1", "::1"}

    listed = f"{url}/api/v0/tasks?limit=1000"

    def tasks() -> list[tuple[str, str]]:
        found = json.loads(answered(listed, token.read_text())[1])
        return [(task["name"], task["state"]) for task in found["data"]["result"]["result"]]

    assert wait_for(lambda: any(name.startswith("trial  t000") for name, _ in tasks()), process), "trials are listed"
    named = tasks()
    (shown,) = {name for name, _ in named if name.startswith("trial  t000")}
    told = r"trial  t000  accuracy 0\.\d{3}  [\d,.]+ samples/s(?: \(estimated from probes\))?  "
    assert re.match(told, shown), "with quality and configuration"
    assert {state for name, state in named if name.startswith("t000 runs  ")} == {"FINISHED"}
    assert "stage search" in dict(named)

    finished = interrupted_once(process, tmp_path, more=0)  # at once: the dashboard may have taken seconds to answer
    assert 0 < len(finished) < 8, "the search had ended before it was killed"
    records = resumed(tmp_path, finished, 8, str(script), "run", "dashboard=false")
    assert of(records, "study")[0]["concurrency"] == 2
    _, left = psutil.wait_procs(family, timeout=10)
    left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]  # whose parent has not asked yet
    assert not left
