"""What a report with many responses costs to write and to open.

    python tests/bench/report.py [--samples 100000] [--characters 2000] [--folder FOLDER]

Writes records of that many responses, 16 to a question and each of about that many characters with formulas, then the
report of them in a process of its own. Prints the seconds and the peak of its resident set, with those of reading the
same records alone; then, if Chromium is installed, the seconds until the page can be used, and what sorting takes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import resource, sys, time
from pathlib import Path
from capo_megatron.evaluation.records import read_records
from capo_megatron.evaluation.report import write_report
began = time.perf_counter()
{what}
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
WORDS = [
    *("so", "we", "have", r"$\frac{a+b}{2} \ge \sqrt{ab}$", "and", "therefore", "the", "sum", "of", "all", "roots"),
    *("is", r"\(x_1 + x_2 = -\frac{p}{q}\)", "which", "means", "that", "every", "prime", "divides", "the", "number"),
    *(r"\[n = \prod_i p_i^{k_i}\]", "by", "the", "theorem", "since", "modulo", "seven", "it", "vanishes"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=2000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        records, page = Path(folder) / "records.jsonl", Path(folder) / "report.html"
        write(records, options.samples, options.characters)
        print(f"{options.samples:,} responses, {records.stat().st_size / 1e6:.0f} MB of records")
        for name, what in (
            ("reading", f"found = read_records(Path({str(records)!r}))"),
            ("report", f"write_report([Path({str(records)!r})], Path({str(page)!r}))"),
        ):
            done = subprocess.run([sys.executable, "-c", CODE.format(what=what)], check=True, stdout=subprocess.PIPE)
            seconds, peak = map(float, done.stdout.split())
            print(f"{name:<8} {seconds:6.1f} s  {peak:6.0f} MB at most")
        print(f"page     {page.stat().st_size / 1e6:6.1f} MB")
        open_in_browser(page)


def write(path: Path, samples: int, characters: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for row in range(samples):
            right = draw.random() < 0.6
            tokens = characters // 3
            text = " ".join(draw.choices(WORDS, k=characters // 7))
            record = {
                "question": f"q{row // 16}",
                "benchmark": f"bench{row // 16 % 5}",
                "sample": row % 16,
                "prompt": f"Question {row // 16}: " + " ".join(draw.choices(WORDS, k=30)),
                "response": text,
                "extracted": str(draw.randrange(1000)),
                "answer": str(row // 16),
                "correct": right,
                "verdict": "correct" if right else "wrong",
                "tokens": tokens,
                "logprob_sum": -tokens * draw.expovariate(5 if right else 3),
                "truncated": draw.random() < 0.02,
                "model": "model",
                "step": 100,
            }
            file.write(json.dumps(record) + "\n")


def open_in_browser(page: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("opening: not measured, no chromium found")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(page.as_uri(), wait_until="commit")
        # performance.now() counts from the start of the navigation.
        said = "performance.now() / 1000"
        tab.wait_for_selector(".card h3")
        print(f"summary  {tab.evaluate(said):6.2f} s after the start")
        tab.wait_for_selector("#detail .response", timeout=120_000)
        print(f"browser  {tab.evaluate(said):6.2f} s after the start")
        tab.click("[data-preset=all]")
        for key in ("confidence", "tokens", "answer"):
            took = f"key => {{ const t = performance.now(); {CLICK}; return (performance.now() - t) / 1000; }}"
            print(f"sort by {key:<10} {tab.evaluate(took, key):6.2f} s")
        heap = tab.evaluate("performance.memory.usedJSHeapSize / 1e6")
        print(f"heap     {heap:6.0f} MB of JavaScript")
        browser.close()


CLICK = "document.querySelector(`[data-sort=${key}]`).click()"

if __name__ == "__main__":
    main()
