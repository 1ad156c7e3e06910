"""The site, as a browser shows it from a folder, at the width of a phone and of a laptop: `make test-docs-site` builds it and runs this.

No page asks another host for anything, writes an error to the console, or scrolls sideways.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.site, pytest.mark.timeout(900)]

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
WIDTHS = (390, 1280)
PAGES = (
    "index",
    "start/index",
    "guides/index",
    "guides/groups",
    "guides/training",
    "reference/api",
    "reference/configuration",
    "reference/algorithms",
    "explanation/architecture",
    "explanation/performance",
    "guides/profiling",
    "measured/performance",
)


def address(page: str) -> str:
    return (SITE / f"{page}.html").as_uri()


@pytest.fixture(params=WIDTHS, ids=lambda width: f"{width}px")
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": request.param, "height": 850}, color_scheme="light")
    context.set_default_timeout(120_000)  # a busy computer may take long to load a page
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("console", lambda said: said.type == "error" and wrong.append(f"{opened.url}: {said.text}"))
    opened.on("pageerror", lambda error: wrong.append(f"{opened.url}: {error}"))
    opened.on(
        "request", lambda asked: asked.url.partition(":")[0] in {"http", "https", "ws", "wss"} and wrong.append(asked.url)
    )
    yield opened
    context.close()
    assert wrong == []


def is_narrow(page: Any) -> bool:
    return bool(page.viewport_size["width"] == WIDTHS[0])


def test_each_page_fits_the_width_and_loads_without_errors(page: Any) -> None:
    pages = sorted(path for path in SITE.glob("**/*.html") if "_static" not in path.parts)
    assert len(pages) > 40
    wide = []
    for path in pages:
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > page.viewport_size["width"]:
            wide.append(f"{path.relative_to(SITE)}: {width}")
    assert wide == []


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("slurm", "Slurm and PBS"),
        ("breakpoint", "Debugging a rank"),
        ("checkpoint", "Training in parallel"),
        ("secret_file", "Configuration"),
        ("DeadlineError", "Errors"),
        ("all_reduce_async", "Python API"),
        ("mpi4py", "Coming from another library"),
        ("ONEACCORD_RUN_ID", "Environment variables"),
        ("oneaccord bench", "Command line"),
        ("straggler", "Testing a distributed program"),
    ],
)
def test_search_leads_to_a_page_in_two_clicks(page: Any, words: str, title: str) -> None:
    page.goto(address("guides/groups"))
    page.locator("button.search-button__button:visible, .search-button-field:visible").first.click()
    page.keyboard.type(words)
    # A page or a section of it; a name of the API says behind it which page describes it.
    wanted = re.compile(rf"^{title}|, in {title}\)")
    page.locator("#search-results li").filter(has_text=wanted).first.locator("a").first.click()
    page.wait_for_url(lambda url: "groups.html" not in url)
    assert title in page.title()


@pytest.mark.parametrize(
    ("words", "page_found"),
    [
        ("timeout", "guides/debugging-a-hang"),
        ("rank died", "guides/elastic"),
        ("slurm", "guides/slurm"),
        ("notebook", "guides/launch-from-python"),
        ("gpu", "guides/gpus"),
        ("save checkpoint", "guides/checkpoints"),
        ("write my own backend", "guides/plugins-backend"),
        ("mpi tag", "guides/messages"),
        ("hang", "guides/debugging-a-hang"),
        ("docker", "guides/deploying"),
        # In whole sentences, and in words that no title has.
        ("how do I send a dict", "guides/objects"),
        ("gather arrays of different lengths", "guides/groups"),
        ("which port", "faq"),
        ("kill -9", "guides/debugging"),
        ("mixed precision", "guides/training"),
        ("parameter sweep", "guides/launch-from-python"),
        ("Unknown backend type oneaccord", "guides/torch"),
        # Of the first program.
        ("broadcast numpy array", "guides/groups"),
        ("send numpy array", "guides/groups"),
        ("sum over processes", "start/tutorial"),
        ("average gradients", "guides/training"),
        ("rank number", "start/tutorial"),
        ("how many processes", "start/tutorial"),
    ],
)
def test_a_newcomers_words_lead_to_the_page_in_three_results(browser: Any, words: str, page_found: str) -> None:
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(address("index"))
    page.locator("button.search-button__button:visible, .search-button-field:visible").first.click()
    page.keyboard.type(words)
    page.wait_for_timeout(1000)  # results of the first letters come before those of the whole words
    three = "[...document.querySelectorAll('#search-results li')].slice(0, 3).map(one => one.querySelector('a').href)"
    try:
        page.wait_for_function(
            f"page => {three}.some(href => href.includes(`/${{page}}.html`))", arg=page_found, timeout=60_000
        )
    except Exception:
        pytest.fail(f"{words!r} leads to {page.evaluate(three)}")
    finally:
        page.close()


def test_no_mark_of_the_source_is_left_in_a_page() -> None:
    """A piece of code that is broken over two lines, the second of which begins as an item of a list does, is no code."""
    left = []
    for path in SITE.glob("**/*.html"):
        article = re.search(r"<article.*?</article>", path.read_text(encoding="utf-8"), re.DOTALL)
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", article[0] if article else "", flags=re.DOTALL)
        left += [f"{path.relative_to(SITE)}: {line.strip()}" for line in text.splitlines() if "`" in line]
    assert left == []


def test_a_search_result_shows_the_words_around(page: Any) -> None:
    page.goto(address("index"))
    page.locator("button.search-button__button:visible, .search-button-field:visible").first.click()
    page.keyboard.type("straggler")
    summary = page.locator("#search-results li:has-text('Testing a distributed program') p.context").first
    summary.wait_for()
    assert "straggler" in summary.inner_text().lower()


def test_a_tab_shows_its_own_words_alone(page: Any) -> None:
    page.goto(address("start/index"))
    page.locator("label.sd-tab-label", has_text="Slurm").click()
    assert page.get_by_text("oneaccord run -n 8 --on slurm hello.py").is_visible()
    assert not page.get_by_text("oneaccord run -n 4 --backend tcp hello.py").is_visible()


def test_dark_mode_stays_on_the_next_page(page: Any) -> None:
    page.goto(address("index"))
    switch(page, "dark")
    page.goto(address("guides/groups"))
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in colour.strip("rgb()").split(",")) < 80


def switch(page: Any, theme: str) -> None:
    """Choose a theme as a reader does: on a phone the menu has it."""
    if is_narrow(page):
        page.locator("button.primary-toggle").click()
    page.locator("button.theme-switch-button:visible").click()
    page.locator(f".theme-change-button[data-mode={theme}]:visible").click()


def test_three_links_lead_from_the_first_page_to_a_call(page: Any) -> None:
    page.goto(address("index"))
    page.locator("article .sd-card:has-text('Reference')").first.click()
    page.locator("article a:has-text('Training layers')").first.click()
    page.locator("article a:has-text('Training in parallel')").first.click()
    assert "Training in parallel" in page.title()
    assert page.locator("h1").inner_text().startswith("Training in parallel")


def test_a_copied_command_has_no_prompt(page: Any) -> None:
    page.goto(address("start/index"))
    block = page.locator("div.highlight-console:visible").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "python hello.py"


def test_the_header_has_the_version(page: Any) -> None:
    page.goto(address("guides/groups"))
    version = importlib.import_module("oneaccord").__version__
    assert page.locator("header .navbar-brand:visible").first.inner_text() == f"oneaccord {version}"


@pytest.mark.parametrize("name", PAGES)
def test_text_has_enough_contrast_in_light_and_in_dark(page: Any, name: str) -> None:
    axe = importlib.import_module("axe_playwright_python.sync_playwright").Axe()
    page.goto(address(name))
    # Of the names of the API some are enough: axe would take minutes for all.
    page.evaluate("document.querySelectorAll('dl.py').forEach((one, number) => number < 8 || one.remove())")
    options = {"runOnly": ["wcag2a", "wcag2aa"], "preload": False}  # it would fetch the style sheets, which a file may not
    told = []
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        page.wait_for_timeout(400)  # colours change gradually
        found = axe.run(page, options=options).response["violations"]
        told += [f"{theme}: {each['id']}: {node['html'][:120]}" for each in found for node in each["nodes"]]
    assert told == []
