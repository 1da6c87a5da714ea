"""The picture of a training step in a browser: each strategy in both languages, wide and narrow, by keyboard."""

import json

import pytest

from tests.browser import Browser
from tests.javascript import SCRIPTS

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>{styles}</style>
<body><main><div id="steps"></div></main>
<script>
{scripts}
const changes = [];
const onChange = (state) => changes.push(state);
const view = Timeline.mount(document.getElementById("steps"), {{ lang: "en", onChange }});
</script>
"""
# For each state the number of blocks that are drawn and that there are, the text, and by how much it is too wide.
DRAW = """
const [states, lang] = arguments;
return states.map((state) => {
  view.update({ state, lang });
  document.querySelector("details").open = true;
  view.update({ state, lang });
  const drawn = [...document.querySelectorAll(".steps-lanes [data-kind]")];
  const there = Steps.lanes(Steps.settle(state)).flatMap((blocks, rank) => blocks.map((one) => `${rank} ${one.kind}`));
  const same = drawn.map(({ dataset }) => `${dataset.rank} ${dataset.kind}`).join() === there.join();
  const titles = drawn.map((one) => one.querySelector("title").textContent);
  const inside = drawn.every((one) => {
    const [box, whole] = [one.querySelector("rect"), one.ownerSVGElement].map((shape) => shape.getBoundingClientRect());
    return box.left >= whole.left - 1 && box.right <= whole.right + 1 && box.bottom <= whole.bottom;
  });
  const root = document.documentElement;
  const text = [document.body.innerText, ...titles].join(" ");
  return { same, inside, text, over: root.scrollWidth - root.clientWidth };
});
"""
STATES = """
const others = [[1680, 1, 1], [840, 15, 0.1], [6720, 16, 50]].map(([rows, micro, link]) => ({ rows, micro, link }));
return Object.entries(Steps.STRATEGIES).flatMap(([strategy, { ranks }]) =>
  ranks.flatMap((n) => others.map((other) => ({ strategy, ranks: n, ...other }))));
"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.fixture
def page(browser, tmp_path):
    styles, scripts = (
        "\n".join((SCRIPTS / name).read_text() for name in names)
        for names in (("explore.css", "timeline.css"), ("words_steps.js", "steps.js", "timeline.js"))
    )
    path = tmp_path / "steps.html"
    path.write_text(PAGE.format(styles=styles, scripts=scripts))
    browser.show(1200)
    browser.open(path)
    yield browser
    assert browser.errors() == []


def shown(page):
    return page.run("return JSON.stringify(view.state)")


def changes(page):
    return page.run("return changes")


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_state_is_drawn(page, lang, width):
    page.show(width, dark=lang == "zh")
    states = page.run(STATES)
    assert len(states) > 100
    for state, found in zip(states, page.run(DRAW, states, lang)):
        assert found["same"] and found["inside"], state
        assert found["over"] <= 0, (state, found["over"])
        for wrong in ("undefined", "NaN", "null", "Infinity", "{", "}"):
            assert wrong not in found["text"], (state, wrong)
        assert ("rank 0:" in found["text"]) and (("micro-batch" in found["text"]) >= (state["strategy"] == "pipeline"))
    assert changes(page) == [], "onChange was called, and no user had changed anything"


def test_keys_move_sliders_which_keep_the_focus(page):
    for name, keys, expected in (
        ("ranks", ["ARROW_RIGHT"], 5),
        ("ranks", ["HOME"], 1),
        ("ranks", ["END"], 8),
        ("rows", ["ARROW_LEFT"], 840),
        ("link", ["END"], 50),
    ):
        page.run(f"document.getElementById('steps-{name}').focus()")
        page.press(*keys)
        assert page.run("return view.state")[name] == expected
        assert page.run("return document.activeElement.id") == f"steps-{name}"
        assert page.one(f"#steps-{name}").get_attribute("aria-valuetext") == str(expected)
    assert [one["ranks"] for one in changes(page)] == [5, 1, 8, 8, 8]


def test_arrows_choose_a_strategy_and_only_a_pipeline_has_micro_batches(page):
    page.run("document.querySelector('[value=data]').focus()")
    for strategy in ("tensor", "pipeline", "data_tensor", "sharded", "zero"):
        page.press("ARROW_RIGHT")
        assert page.run("return view.state.strategy") == strategy
        assert page.run("return document.activeElement.value") == strategy
        slider = page.one("#steps-micro")
        assert slider.is_displayed() == (strategy == "pipeline")


def test_strategy_for_other_numbers_of_ranks_takes_the_nearest(page):
    page.run("view.update({ state: { strategy: 'data', ranks: 7 } })")
    page.one("[value=pipeline]").click()
    assert changes(page)[-1]["ranks"] == 8
    page.run("view.update({ state: { strategy: 'data', ranks: 1 } })")
    page.one("[value=data_tensor]").click()
    assert changes(page)[-1]["ranks"] == 4


def test_language_can_change_and_the_state_stays(page):
    page.run("view.update({ state: { strategy: 'pipeline', ranks: 2, micro: 8 } })")
    before = shown(page)
    assert "micro-batches a rank is idle (p - 1) / (m + p - 1) = 1 / 9 = 11 %" in page.text("body")
    page.run("view.update({ lang: 'zh' })")
    assert "流水并行" in page.text("body") and "micro-batches" not in page.text("body")
    assert shown(page) == before


def test_picture_has_a_summary_for_those_who_do_not_see_it(page):
    summary = page.text("[role=status]")
    assert summary.startswith("A step takes 727 ms: 3.16 times as fast as on a single rank.")
    assert page.one(".steps-lanes").get_attribute("aria-label") == summary
    names = json.loads(
        page.run("return JSON.stringify([...document.querySelectorAll('input')].map((one) => one.labels.length))")
    )
    assert names and set(names) == {1}


def test_words_of_blocks_stay_open(page):
    page.one("summary").click()
    assert "all-reduce of gradients, layer 8" in page.text(".steps-words")
    page.one("[value=sharded]").click()
    assert "all-gather of weights, layer 1" in page.text(".steps-words")


def test_picture_fits_when_the_window_changes(page):
    fits = """
    const drawn = document.querySelector(".steps-lanes");
    return drawn.viewBox.baseVal.width === drawn.getBoundingClientRect().width;
    """
    for width in (1200, 500, 360, 900):
        page.show(width)
        page.wait_for(lambda: page.run(fits), f"a picture for {width} pixels")
