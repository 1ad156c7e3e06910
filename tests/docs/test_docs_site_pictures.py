"""The moving pictures of the site, as a reader uses them: `make test-docs-site` builds the site and runs this."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.site, pytest.mark.timeout(900)]

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
WIDTHS = (390, 1280)

Open = Callable[..., Any]


@pytest.fixture(params=WIDTHS, ids=lambda width: f"{width}px")
def open_page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Open]:
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(name: str, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": request.param, "height": 850}, color_scheme="light", **settings)
        contexts.append(context)
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((SITE / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def player_of(page: Any, name: str) -> Any:
    """Scroll to a player, whose data then load."""
    player = page.locator(f"figure[data-player={name}]")
    player.locator(".player-stage").evaluate("stage => stage.scrollIntoView({block: 'center'})")
    player.locator(".player-stage svg").wait_for()
    return player


def words(player: Any) -> str:
    return str(player.locator(".player-words").inner_text())


def wait_for_words(player: Any, expected: str) -> None:
    player.locator(".player-words", has_text=re.compile(expected)).wait_for()


def button(player: Any, name: str) -> Any:
    return player.get_by_role("button", name=name, exact=True)


def chooser(where: Any, name: str) -> Any:
    return where.get_by_role("combobox", name=name, exact=True)


def slider(where: Any, name: str) -> Any:
    return where.get_by_role("slider", name=name, exact=True)


def result_of(player: Any, rank: int) -> list[str]:
    """What the cells of a rank's result hold, as their titles say."""
    titles = player.locator("title").evaluate_all("all => all.map((each) => each.textContent)")
    return [title.partition(": ")[2] for title in titles if title.startswith(f"rank {rank}, result")]


STILL = {"reduced_motion": "reduce"}
MOVING = {"reduced_motion": "no-preference"}


def test_with_reduced_motion_a_player_waits_and_steps_at_once(open_page: Open) -> None:
    page = open_page("reference/algorithms", **STILL)
    player = player_of(page, "ring_all_reduce")
    page.wait_for_timeout(1500)
    assert words(player).startswith("Start")
    button(player, "Step forward").click()
    assert words(player).startswith("Step 1 of 6. Reduced on arrival: a from 0 to 1,")
    button(player, "Step forward").click()
    assert words(player).startswith("Step 2 of 6.")
    button(player, "Step back").click()
    assert words(player).startswith("Step 1 of 6.")


def test_a_player_in_view_plays_once_and_stops_at_a_click(open_page: Open) -> None:
    page = open_page("reference/algorithms", **MOVING)
    player = player_of(page, "ring_all_reduce")
    wait_for_words(player, "^Step 1 of 6")
    button(player, "Pause").click()
    paused = words(player)
    page.wait_for_timeout(2500)
    assert words(player) == paused
    button(player, "Play").click()
    wait_for_words(player, "Done")
    button(player, "Play").wait_for()
    assert result_of(player, 2) == [f"{name} of rank 0 + 1 + 2 + 3" for name in "abcd"]


def test_a_player_out_of_view_does_not_start(open_page: Open) -> None:
    page = open_page("reference/algorithms", **MOVING)
    stage = page.locator("figure[data-player=ring_all_reduce] .player-stage")
    stage.evaluate("stage => scrollTo(0, stage.getBoundingClientRect().top + scrollY - innerHeight - 200)")
    stage.locator("svg").wait_for()  # near enough to load
    page.wait_for_timeout(2500)
    assert page.locator("figure.player button[title=Pause]").count() == 0
    player = player_of(page, "ring_all_reduce")
    button(player, "Pause").wait_for()
    page.evaluate("scrollTo(0, 0)")
    button(player, "Play").wait_for()
    stopped = words(player)
    assert "Done" not in stopped
    page.wait_for_timeout(2000)
    assert words(player) == stopped


def test_the_slider_goes_to_any_step_by_keys(open_page: Open) -> None:
    page = open_page("reference/algorithms", **STILL)
    player = player_of(page, "rabenseifner_all_reduce")
    step = slider(player, "Step")
    step.focus()
    page.keyboard.press("End")
    assert words(player).endswith("Done.")
    assert step.get_attribute("aria-valuetext") == "4 of 4"
    page.keyboard.press("ArrowLeft")
    assert words(player).startswith("Step 3 of 4.")


def test_a_player_works_by_the_keyboard_alone(open_page: Open) -> None:
    page = open_page("reference/algorithms", **STILL)
    player = player_of(page, "binomial_broadcast")
    button(player, "Step forward").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    assert words(player).startswith("Step 2 of 2.")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # Play, from the begin
    button(player, "Pause").wait_for()
    assert page.evaluate("document.activeElement.title") == "Pause"


def test_a_world_and_a_root_can_be_chosen(open_page: Open) -> None:
    page = open_page("reference/algorithms", **STILL)
    player = player_of(page, "binomial_gather")
    chooser(player, "Ranks").select_option("7")
    chooser(player, "Root").select_option("5")
    slider(player, "Step").evaluate("each => { each.value = each.max; each.dispatchEvent(new Event('input')) }")
    assert player.locator("svg[role=img]").get_attribute("aria-label") == "binomial gather, 7 ranks, root 5"
    assert result_of(player, 5) == [f"{rank} of rank {rank}" for rank in range(7)]
    assert result_of(player, 0) == []
    chooser(player, "Ranks").select_option("3")
    assert chooser(player, "Root").input_value() == "2"


def test_every_player_loads_and_keeps_its_ranks_apart(open_page: Open) -> None:
    page = open_page("reference/algorithms", **STILL)
    names = page.locator("figure.player").evaluate_all("all => all.map(one => one.dataset.player)")
    assert len(names) > 25
    apart = """player => {
      const box = player.querySelector('.player-stage svg').viewBox.baseVal;
      const nodes = [...player.querySelectorAll('.node')].map((each) => each.getBBox());
      const clash = nodes.some((a, i) => nodes.slice(i + 1).some((b) =>
        a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height));
      return !clash && nodes.every((a) => a.x >= 0 && a.y >= 0 && a.x + a.width <= box.width && a.y + a.height <= box.height);
    }"""
    for name in names:
        player = player_of(page, name)
        for world in chooser(player, "Ranks").locator("option").all_inner_texts():
            chooser(player, "Ranks").select_option(world)
            assert player.evaluate(apart), (name, world)


def test_without_a_script_the_picture_stays(open_page: Open) -> None:
    page = open_page("reference/algorithms", java_script_enabled=False)
    picture = page.locator("figure[data-player=ring_all_reduce] img")
    assert picture.is_visible()
    assert picture.get_attribute("alt").startswith("ring all_reduce: 4 ranks. ")
    page = open_page("explanation/performance", java_script_enabled=False)
    assert page.locator("figure.curves table").is_visible()


def test_the_curves_follow_the_sliders_and_the_collective(open_page: Open) -> None:
    page = open_page("explanation/performance")
    chart = page.locator("figure.curves")
    chart.scroll_into_view_if_needed()
    values = chart.locator(".curves-values")
    assert "hierarchical" in values.inner_text()
    slider(chart, "Ranks").focus()
    page.keyboard.press("Home")
    assert slider(chart, "Ranks").get_attribute("aria-valuetext") == "2 ranks on one host"
    assert "hierarchical" not in values.inner_text()  # it needs two hosts
    chooser(chart, "Collective").select_option("broadcast")
    assert "scatter_doubling" in values.inner_text()
    before = values.inner_text()
    slider(chart, "Bytes of the call").focus()
    page.keyboard.press("End")
    assert values.inner_text() != before
    assert values.inner_text().count("(chosen)") == 1
    chart.get_by_text("The times as a table").click()
    assert "broadcast, 2 ranks on one host" in chart.locator("caption").inner_text()
    shown = dict(re.findall(r"(\w+) ([\d.]+ \w+)", values.inner_text()))
    last = chart.locator("tbody tr").last.locator("td").all_inner_texts()
    assert sorted(cell.removesuffix(" ●") for cell in last) == sorted(shown.values())


def test_the_curves_say_the_values_under_the_pointer(open_page: Open) -> None:
    page = open_page("explanation/performance")
    stage = page.locator(".curves-stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 24, box["y"] + 100)
    assert slider(page, "Bytes of the call").get_attribute("aria-valuetext") == "1 GiB"
    page.mouse.move(box["x"] + 60, box["y"] + 100)
    assert slider(page, "Bytes of the call").get_attribute("aria-valuetext") == "64 B"
