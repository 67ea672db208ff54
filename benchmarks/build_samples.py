"""Remakes trainables/data/samples/epistemic_snli_format.jsonl.gz from the BIG-bench task it was taken from.

    pip download bigbench==1.0.0 --no-deps --no-binary :all:      # 358 MB
    tar xzf bigbench-1.0.0.tar.gz bigbench-1.0.0/bigbench/benchmark_tasks/epistemic_reasoning
    python -m benchmarks.build_samples bigbench-1.0.0/bigbench/benchmark_tasks/epistemic_reasoning/task.json

Both ends are checked by sha256: the task that goes in, and the text that comes out (before compression, which differs
from one zlib to another).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path

from trainables.data.nli_pairs import ENTAILMENT_FILE

TASK_SHA256 = "98209623d1bf28ed6b99ec50b772b367f24467d190ceb9d1c0298e91c04548f1"
TEXT_SHA256 = "a5e50387cc3275c1b789d71d35f13d41a2d9d1f2cf5c380fa18599f7dd07bb40"


def snli_lines(task: bytes) -> bytes:
    """Returns the task's examples as JSON lines with SNLI's field names, after a line that keeps its canary."""
    found = json.loads(task)
    header = {"canary": found["canary"], "source": "BIG-bench epistemic_reasoning, bigbench 1.0.0 sdist, Apache-2.0"}
    records: list[dict[str, str]] = [header]
    for index, example in enumerate(found["examples"]):
        premise, hypothesis = example["input"].removeprefix("Premise: ").split(" Hypothesis: ", 1)
        label = max(example["target_scores"], key=example["target_scores"].get)
        records.append(
            {"gold_label": label, "sentence1": premise, "sentence2": hypothesis, "pairID": f"bb-epi-{index}"}
        )
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def checked(what: str, content: bytes, sha256: str) -> bytes:
    """Returns the content; ends the program where its sha256 is another."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SystemExit(f"{what}: sha256 is {found}, expected {sha256}")
    return content


def main() -> None:
    """Writes the sample, or says which sha256 is wrong."""
    parser = argparse.ArgumentParser(description="Remakes the embedded NLI sample from BIG-bench's task.json.")
    parser.add_argument("task", type=Path, help="task.json of epistemic_reasoning in the sdist of bigbench 1.0.0")
    parser.add_argument("--out", type=Path, default=ENTAILMENT_FILE)
    asked = parser.parse_args()
    task = checked(str(asked.task), asked.task.read_bytes(), TASK_SHA256)
    text = checked("the text made of it", snli_lines(task), TEXT_SHA256)
    asked.out.write_bytes(gzip.compress(text, 9, mtime=0))
    print(f"{asked.out}: {len(text)} bytes of text")


if __name__ == "__main__":
    main()
