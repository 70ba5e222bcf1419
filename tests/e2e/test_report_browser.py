"""A laptop run's report in headless Chromium: it is clicked through, fetches nothing, and shows markup as text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capo_megatron.cli import main
from capo_megatron.evaluation.records import read_records, write_records
from capo_megatron.evaluation.report import write_report
from capo_megatron.types import EvalRecord
from tests.e2e.commands import write_config

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

EVIL = (
    '<script>window.pwned = 1</script><img src="x" onerror="window.pwned = 2">\n'
    "Broken: $\\frac{1}{$ and\n\n\\(\\nonsense{2}\\) and \\[ x^2 \\] and $$\\begin{matrix}1$$.\n\n"
    "Right: \\[\\sqrt{2} \\ge 1\\]"
    "\n\\href{javascript:window.pwned=3}{here} $\\href{javascript:window.pwned=4}{here}$ </script> \u202eturned\x00 end"
)
DEEP = "$" + "{" * 9000 + "}" * 9000 + "$"
LONG = "so " * 50_000 + "the end"


def chromium() -> str | None:
    """A Chromium of the system, or the one that `playwright install` left."""
    found = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
    )
    if found is None:
        with playwright.sync_playwright() as driver:
            found = driver.chromium.executable_path
    return found if found and Path(found).exists() else None


def many() -> list[EvalRecord]:
    """3,000 responses of one model to the questions of two benchmarks, each with a confidence of its own."""
    found = []
    for number in range(3000):
        right = number % 3 > 0
        response = {0: EVIL, 3: DEEP, 6: LONG}.get(number, f"Response {number}: $x_{{{number}}}$")
        found.append(
            EvalRecord(
                question=f"question {number // 8}",
                benchmark=f"bench {number // 8 % 2}",
                sample=number % 8,
                prompt=f"Solve problem {number // 8}",
                response=response,
                extracted=r"\frac{1}{7}" if number == 9 else "<b>7</b>",
                answer="7",
                correct=right,
                verdict="correct" if right else "wrong",
                tokens=10 + number,
                logprob_sum=-(10 + number) * (number + 1) / 3000,
                truncated=number % 100 == 0,
                model="other",
                step=5,
            )
        )
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two steps of the laptop task and their evaluation, beside a file of responses."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", str(write_config(folder))]) == 0
        assert main(["eval", "run", "--problems", "6", "--n", "4"]) == 0
        write_records(folder / "many.jsonl", many())
        return write_report([Path("run"), Path("many.jsonl")], folder / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or python -m playwright install chromium")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = driver.chromium.launch(executable_path=path, args=options)
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any, page: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The opened page. In the end nothing may have been said on the console, or asked for but the page itself."""
    size = getattr(request, "param", (1280, 900))
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme="light")
    opened = context.new_page()
    heard: list[str] = []
    opened.on("console", lambda message: heard.append(f"console: {message.text}"))
    opened.on("pageerror", lambda error: heard.append(f"error: {error}"))
    opened.on("request", lambda asked: heard.append(asked.url) if asked.url != page.as_uri() else None)
    opened.on("dialog", lambda dialog: heard.append(f"dialog: {dialog.message}"))
    opened.goto(page.as_uri())
    opened.wait_for_selector("#detail .response")
    yield opened
    assert heard == []
    assert opened.evaluate("window.pwned") is None
    context.close()


def numbers(tab: Any, column: str) -> list[float]:
    """What the visible rows of the list say in a column."""
    cells = tab.locator(f"#rows .row .{column}").all_inner_texts()
    return [float(cell.replace(",", "")) for cell in cells]


def shown(tab: Any) -> int:
    """How many responses pass the filters, once the page has caught up."""
    tab.wait_for_timeout(250)  # filters wait for the end of typing
    return int(tab.inner_text("#status").split(" of ")[0].replace(",", ""))


def only_many(tab: Any) -> None:
    tab.click("[data-preset=all]")
    label = next(text for text in tab.locator("[name=source] option").all_inner_texts() if text.startswith("many"))
    tab.select_option("[name=source]", label=label)
    assert shown(tab) == 3000


def open_response(tab: Any, number: int) -> None:
    """Show a response of `many` by its number of tokens, which no other has."""
    only_many(tab)
    for name in ("shortest", "longest"):
        tab.fill(f"[name={name}]", str(10 + number))
    assert shown(tab) == 1
    tab.locator("#rows .row").click()
    tab.wait_for_function(
        "text => document.querySelector('#detail .facts').innerText.includes(text)", arg=f"{10 + number:,}"
    )


def test_every_section_is_drawn(tab: Any, page: Path) -> None:
    assert tab.locator("#summary .card h3").count() >= 2
    assert tab.locator("#training svg").count() >= 8
    assert tab.locator("#calibration svg").count() == 5  # coverage, and two of each of two models
    assert tab.locator("#time .bar").count() == 1
    assert tab.locator("#settings details").count() == 1
    total = sum(len(read_records(path)) for path in (page.parent / "run" / "eval").glob("*.jsonl")) + 3000 + 32
    assert f"of {total:,} responses" in tab.inner_text("#status")
    tab.locator("#training .numbers summary").first.click()
    assert tab.locator("#training .numbers table").count() == 1
    tab.locator("#training svg").nth(1).hover()
    assert "step" in tab.locator(".tip:visible").inner_text()


def test_the_theme_changes_and_is_remembered(tab: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.click("#theme")  # light
    assert tab.evaluate(paper) == light
    tab.click("#theme")
    assert tab.inner_text("#theme") == "Theme: dark"
    dark = tab.evaluate(paper)
    assert dark != light
    tab.reload()
    tab.wait_for_selector("#detail .response")
    assert tab.evaluate(paper) == dark
    tab.click("#theme")
    assert tab.inner_text("#theme") == "Theme: auto" and tab.evaluate(paper) == light
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(paper) == dark


def test_the_list_is_sorted(tab: Any) -> None:
    only_many(tab)
    extremes = {"confidence": (1.0, 0.368), "tokens": (3009, 10)}
    for column, (largest, least) in extremes.items():
        tab.click(f"[data-sort={column}]")
        falling = numbers(tab, column)
        assert len(falling) > 10 and falling == sorted(falling, reverse=True) and falling[0] == largest
        tab.click(f"[data-sort={column}]")
        rising = numbers(tab, column)
        assert rising == sorted(rising) and rising[0] == least
    tab.click("[data-sort=verdict]")
    assert set(tab.locator("#rows .verdict").all_inner_texts()) <= {"✓ right", "✓ right cut"}


def test_the_list_is_filtered(tab: Any) -> None:
    only_many(tab)
    tab.select_option("[name=verdict]", label="wrong")
    assert shown(tab) == 1000
    tab.check("[name=once]")
    assert shown(tab) == 375
    tab.uncheck("[name=once]")
    tab.select_option("[name=verdict]", label="cut off")
    assert shown(tab) == 30
    tab.select_option("[name=verdict]", label="all")
    tab.select_option("[name=benchmark]", label="bench 1")
    assert shown(tab) == 1496
    tab.select_option("[name=benchmark]", label="all")
    tab.fill("[name=low]", "0.5")
    assert shown(tab) == sum(-(n + 1) / 3000 >= -0.6931471 for n in range(3000))
    tab.fill("[name=low]", "")
    tab.fill("[name=text]", "QUESTION 12")
    assert shown(tab) == 8 * 11  # 12 and 120 to 129
    tab.fill("[name=text]", "nowhere")
    assert shown(tab) == 0
    assert tab.inner_text("#detail") == "No response passes these filters."


def test_only_what_is_visible_exists_and_the_end_can_be_reached(tab: Any) -> None:
    only_many(tab)
    assert tab.locator("#rows .row").count() < 60
    tab.focus("#rows")
    tab.keyboard.press("End")
    assert tab.locator("#rows .row[aria-selected=true]").get_attribute("aria-posinset") == "3000"
    playwright.expect(tab.locator("#detail .response")).to_contain_text("Response 2991: ")
    tab.keyboard.press("ArrowUp")
    playwright.expect(tab.locator("#detail .response")).to_contain_text("Response 2990: ")
    tab.keyboard.press("Home")
    assert tab.locator("#rows .row[aria-selected=true]").get_attribute("aria-posinset") == "1"


def test_markup_and_broken_latex_are_text(tab: Any) -> None:
    scripts = tab.locator("script:not([type])").count()
    open_response(tab, 0)
    tab.wait_for_selector("#detail .response math")
    text = tab.inner_text("#detail .response")
    for part in (
        '<script>window.pwned = 1</script><img src="x" onerror="window.pwned = 2">',
        r"$\frac{1}{$",
        r"\(\nonsense{2}\)",
        r"$$\begin{matrix}1$$",
        r"\href{javascript:window.pwned=3}{here}",
        r"</script> \u202eturned\u0000 end",
    ):
        assert part in text
    assert tab.locator("#detail img, #detail script, #detail a").count() == 0
    assert tab.locator("#detail .response math").count() >= 2  # the formulas that are right
    assert tab.locator("#detail .response msqrt").count() == 1
    assert tab.locator("#detail .facts").inner_text().count("<b>7</b>") == 1
    assert tab.locator("script:not([type])").count() <= scripts + 1  # KaTeX itself
    tab.click("#maths")
    playwright.expect(tab.locator("#detail math")).to_have_count(0)
    assert r"\[\sqrt{2} \ge 1\]" in tab.inner_text("#detail .response")


def test_nesting_without_end_and_a_huge_text(tab: Any) -> None:
    open_response(tab, 3)
    assert tab.inner_text("#detail .response").startswith("${{{")
    open_response(tab, 6)
    assert "the end" not in tab.inner_text("#detail .response")
    tab.click("text=Show all 150,007 characters")
    assert tab.inner_text("#detail .response").endswith("the end")


def test_an_answer_is_a_formula(tab: Any) -> None:
    open_response(tab, 9)
    playwright.expect(tab.locator("#detail .facts mfrac")).to_have_count(1)


def test_siblings_lead_to_each_other(tab: Any) -> None:
    open_response(tab, 8)
    assert tab.locator("#detail .sibling").count() == 8
    assert "AUC of this question" in tab.inner_text("#detail .siblings")
    tab.locator("#detail .sibling").nth(3).click()
    playwright.expect(tab.locator("#detail .response")).to_contain_text("Response 11: ")


@pytest.mark.parametrize("tab", [(360, 740)], indirect=True)
def test_a_phone_shows_all_of_it_without_scrolling_sideways(tab: Any) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    only_many(tab)
    tab.locator("#rows .row").nth(2).click()
    playwright.expect(tab.locator("#detail header")).to_be_in_viewport()
    tab.click("text=Back to the list")
    playwright.expect(tab.locator("#rows")).to_be_in_viewport(ratio=0.5)
