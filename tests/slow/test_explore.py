"""docs/explore.html in a real browser: it shows what was recorded, in every view."""

import itertools
import json
import re

import numpy as np
import pytest

from harness.explore import page, records
from tests.browser import Browser
from tests.recorded import RECORDS, VALUES, in_mode

RANKS = list(RECORDS["runs"])
MODES = ("eager", "graph")
PRESETS = ("data", "column", "row", "megatron", "pipeline", "mesh", "sharded")
SUMMARY = "On 2 ranks, x S(1) @ w S(0) gives out P. Nothing moves before the multiplication. Out to B: all-reduce."
VIEWS = [  # on each kind of placement: what moves first, what moves then, partial sums, and what a preset chooses
    "#ranks=1&x=B&w=P",
    "#ranks=2&x=S1&w=S0&to=B&preset=row",
    "#ranks=3&x=S0&w=S1&to=P&mode=graph",
    "#ranks=4&x=P&w=S0&to=S1",
    "#ranks=2x2&x=S0,P&w=P,S1",
    "#ranks=2x2&x=S0,S1&w=S1,S0&mode=graph",
    "#ranks=2&x=S1&w=S0&to=B&preset=pipeline",
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.fixture
def opened(browser):
    """A function that opens the page at a view. At the end the console is empty, and no host was asked for anything."""

    def open_at(view="", path=page.PAGE, **shown):
        browser.show(**shown)
        browser.open(path, view)
        return browser

    yield open_at
    assert browser.errors() == []
    assert {url.partition(":")[0] for url in browser.requests()} <= {"file", "data", "about"}


def chosen(browser):
    """What the controls say: {name: value}."""
    script = "return [...document.querySelectorAll('#controls input:checked')].map((one) => [one.name, one.value])"
    return dict(browser.run(script))


def label_of(name, value):
    return f"#controls input[name='{name}'][value='{value}']"


def test_first_view(opened):
    browser = opened()
    assert browser.text("#summary") == SUMMARY
    assert chosen(browser) == {"ranks": "2", "x": "S(1)", "w": "S(0)", "to": "B", "mode": "eager"}
    assert "out[0, 0] = 29 = 7 + 22" in browser.text("#readout")
    assert len(browser.all("[data-stage=change] .arrows .tip")) == 4  # two ranks, in two phases
    assert "./launch.sh -n 2 mine.py" in browser.text("#program")


@pytest.mark.parametrize("preset", PRESETS)
def test_preset(opened, preset):
    browser = opened("#ranks=4&x=P&w=S0&mode=graph")
    browser.one(f"[data-preset={preset}]").click()
    assert f"preset={preset}" in browser.view()
    pressed = [one.get_attribute("data-preset") for one in browser.all("[data-preset][aria-pressed=true]")]
    assert pressed == [preset]
    about = browser.text("#about")
    assert about.count(". ") >= 1 and "Use it " in about and ".py" in about
    assert browser.text("#summary") and browser.text("#code").startswith("import oneflow as flow")
    strategy = {"megatron": "tensor", "mesh": "data_tensor"}.get(preset, preset)
    if strategy not in ("column", "row"):
        assert browser.run("return document.querySelector('#steps input:checked').value") == strategy


def test_megatron_has_two_steps(opened):
    browser = opened()
    browser.one("[data-preset=megatron]").click()
    first = chosen(browser)
    browser.run("document.querySelector(`[data-step='1']`).focus()")
    browser.press("ENTER")
    assert browser.run("return document.activeElement.dataset.step") == "1"
    second = chosen(browser)
    assert (first["x"], first["w"], first["to"]) == ("B", "S(1)", "")
    assert (second["x"], second["w"], second["to"]) == ("S(1)", "S(0)", "B")
    assert "preset=megatron" in browser.view()


def test_button_goes_to_the_training_step(opened):
    browser = opened("#ranks=2&x=B&w=S1&preset=megatron")
    browser.one("#about .as-link").click()
    assert browser.run("return document.activeElement.id") == "steps-title" and "preset=megatron" in browser.view()
    assert abs(browser.run("return document.activeElement.getBoundingClientRect().top")) < 100


@pytest.mark.parametrize("ranks", RANKS)
def test_each_choice_by_clicking(opened, ranks):
    browser = opened("#ranks=2&x=S0&w=B" if ranks != "2" else "#ranks=3&x=S0&w=B")
    browser.one(label_of("ranks", ranks)).click()
    names = ("x0", "x1", "w0", "w1") if ranks == "2x2" else ("x", "w", "to")
    for name, sbp in itertools.product(names, ("B", "S(0)", "S(1)", "P")):
        browser.one(label_of(name, sbp)).click()
        now = chosen(browser)
        assert now[name] == sbp and now["ranks"] == ranks
        x, w = (now[one] if ranks != "2x2" else f"{now[f'{one}0']}, {now[f'{one}1']}" for one in "xw")
        assert f"x {x} @ w {w}" in browser.text("#summary").replace("\n", " ")
        assert f"x={x},".replace(" ", "").replace("(", "").replace(")", "")[:-1] in browser.view()
    browser.one(label_of("mode", "graph")).click()
    assert "mode=graph" in browser.view() and "flow.nn.Graph" in browser.text("#code")


SHOWN = """
const [ranks, pairs] = arguments;
const number = (one) => [one.dataset.of, +one.dataset.row, +one.dataset.column, +one.textContent];
const read = (stage) => [...stage.querySelectorAll(".matrix")].map((matrix) => [
  matrix.dataset.rank ?? "whole",
  [...matrix.querySelectorAll(".cell")].map(number),
]);
return pairs.map(([x, w, to, mode]) => {
  readAddress(`#ranks=${ranks}&x=${short(x)}&w=${short(w)}&to=${short(to)}&mode=${mode}`);
  draw();
  const stages = [...document.querySelectorAll("#stages > [data-stage]")];
  return [stages.map((stage) => [stage.dataset.stage, read(stage)]), document.querySelector("#summary").textContent];
});
"""


def blocks_of(matrices):
    """{(tensor, rank or "whole"): {(row, column): number}} of a stage; after its move a tensor is called "moved x"."""
    found = {}
    for rank, cells in matrices:
        tensor = cells[0][0] if cells else ""
        name = f"moved {tensor}" if (tensor, rank) in found else tensor
        found[name, rank] = {(row, column): number for _, row, column, number in cells}
    return found


def product(x, w):
    """The product of two blocks in their places, {(row, column): number} all three."""
    found = {}
    for (row, k), (j, column) in itertools.product(x, w):
        if k == j:
            found[row, column] = found.get((row, column), 0) + x[row, k] * w[k, column]
    return found


def held_by(rank, which, sbp, name, block):
    """{(row, column): number} of what was recorded of one rank, in its place in the whole."""
    layout = records.Layout(sbp.replace(",", ", "), records.RANKS[which])
    [(top, _), (left, _)] = layout.block(VALUES[name].shape, rank)
    return {(top + i, left + j): number for i, row in enumerate(block) for j, number in enumerate(row)}


def states(which):
    """(x, w, to, mode): every pair, and every SBP that out may be given."""
    for pair, run in RECORDS["runs"][which].items():
        for to, mode in itertools.product(["", *run.get("to", {})], MODES):
            yield (*pair.split(" @ "), to, mode)


@pytest.mark.parametrize("which", RANKS)
def test_numbers_are_those_of_the_runs(opened, which):
    browser, wanted = opened(), list(states(which))
    assert len(wanted) >= (512 if which == "2x2" else 160)
    for (x, w, to, mode), (stages, summary) in zip(wanted, browser.run(SHOWN, which, wanted)):
        pair = RECORDS["runs"][which][f"{x} @ {w}"]
        run = in_mode(pair, mode)
        seen, where = {name: blocks_of(matrices) for name, matrices in stages}, (which, x, w, to, mode)
        if "error" in run:
            assert list(seen) == ["refused"] and run["error"] in summary, where
            continue
        for name, given, used in (("x", x, run["inputs"][0]), ("w", w, run["inputs"][1])):
            first = seen["multiply"] if given == used else seen[f"move-{name}"]
            assert (f"move-{name}" in seen) == (given != used), where
            for rank, block in enumerate(pair[name]):
                assert first[name, str(rank)] == held_by(rank, which, given, name, block), where
        for rank, block in enumerate(run["out"]):
            x_block, w_block, out_block = (seen["multiply"].get((name, str(rank))) for name in ("x", "w", "out"))
            assert out_block == held_by(rank, which, run["out_sbp"], "out", block), where
            assert out_block == product(x_block, w_block) if x_block and w_block else mode == "graph", where
        whole = {place: number for place, number in np.ndenumerate(VALUES["out"])}
        assert seen["multiply"]["out", "whole"] == whole, where
        if to and to != run["out_sbp"]:
            change = in_mode(pair["to"][to], mode)
            assert seen["change"]["out-to", "whole"] == whole, where
            for rank, block in enumerate(change["out"]):
                assert seen["change"]["out-to", str(rank)] == held_by(rank, which, to, "out", block), where


@pytest.mark.parametrize("view", VIEWS)
def test_link_that_is_opened_again_shows_the_same(opened, view):
    browser = opened(view)
    browser.one("#language").click()  # also the language, once it was chosen
    link, text = browser.view(), browser.text("main")
    opened(link)
    assert (browser.view(), browser.text("main")) == (link, text)
    browser.one("#language").click()
    assert browser.text("main") != text


def test_second_part_is_in_the_address(opened):
    browser = opened()
    browser.one("#steps input[value=pipeline]").find_element("xpath", "..").click()
    assert "step-strategy=pipeline" in browser.view()
    link, text = browser.view(), browser.text("#steps")
    opened(link)
    assert browser.text("#steps") == text and "preset=row" in browser.view()


def test_address_that_is_changed_by_hand(opened):
    browser = opened()
    browser.run("location.hash = '#ranks=3&x=S0&w=B'")
    browser.wait_for(lambda: "On 3 ranks" in browser.text("#summary"), "the new view")
    assert chosen(browser)["x"] == "S(0)"


@pytest.mark.parametrize(
    "view",
    ["#nonsense", "#ranks=9&x=B&w=B", "#ranks=2&x=S7&w=B", "#ranks=2x2&x=B&w=B", "#ranks=2&x=B&w=B&to=%zz&mode=fast"]
    + ["#ranks=2&x=B&w=B&preset=toString", "#ranks=2x2&x=B,B&w=B,B&to=B", "#step-strategy=&step-ranks=-1&lang=xx"],
)
def test_bad_address_shows_the_first_view(opened, view):
    browser = opened(view)
    assert browser.text("#summary") == SUMMARY
    assert (
        browser.one("#steps svg").is_displayed() if len(browser.all("#steps svg")) == 1 else browser.all("#steps svg")
    )


def test_keyboard(opened):
    browser = opened()
    browser.press("TAB", "TAB")  # the button of the language, then the first preset
    assert browser.run("return document.activeElement.dataset.preset") == "data"
    browser.press("ENTER")
    assert browser.run("return document.activeElement.dataset.preset") == "data" and "preset=data" in browser.view()
    browser.run("document.querySelector('#controls [name=ranks]:checked').focus()")
    for ranks in ("3", "4", "2x2"):  # the focus stays, although a mesh has other controls
        browser.press("ARROW_RIGHT")
        assert browser.run("return [document.activeElement.name, document.activeElement.value]") == ["ranks", ranks]
        assert f"ranks={ranks}&" in browser.view()
    browser.press("ARROW_LEFT", "TAB", "ARROW_RIGHT")
    assert chosen(browser)["x"] == "S(1)"
    outline = "return getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert browser.run(outline) == "solid"


def test_keyboard_in_out(opened):
    browser = opened()
    browser.run("document.querySelector('[data-stage=multiply] [role=grid] [tabindex=\"0\"]').focus()")
    browser.press("ARROW_DOWN", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT")  # not beyond the last
    assert "out[1, 3] = 70 = 27 + 43" in browser.text("#readout")
    assert browser.run("return document.activeElement.getAttribute('aria-label')") == "row 1, column 3: 70 = 27 + 43"
    products = browser.text("#readout").splitlines()[2:]
    assert products == ["rank 0: 5·3 + 6·2 = 27", "rank 1: 7·5 + 8·1 = 43"]


def test_pointing_at_a_number(opened):
    browser = opened()
    browser.one("[data-stage=multiply] [data-rank='1'] [data-of=out][data-row='2'][data-column='1']").click()
    assert "out[2, 1] = 67 = 39 + 28" in browser.text("#readout")
    assert len(browser.all(".cell.seen")) == 3 + 3  # of out P and out B: the whole, and both ranks
    browser.one(label_of("w", "B")).click()
    assert "out[0, 0] = 29\n" in browser.text("#readout") and "Point at any number" in browser.text("#readout")


def test_copy(opened):
    browser = opened("#ranks=2&x=B&w=S1")
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.one("#copy").click()
    browser.wait_for(lambda: browser.text("#copy") == "Copied", "the copy")
    read = "navigator.clipboard.readText().then(arguments[0], (error) => arguments[0](String(error)))"
    assert browser.driver.execute_async_script(read) == browser.text("#code")


def test_language_of_the_user():
    with Browser(language="zh-CN") as browser:
        browser.open(page.PAGE)
        assert browser.run("return navigator.language") == "zh-CN"
        assert browser.run("return document.documentElement.lang") == "zh-CN"
        assert "部分和（逐元素相加" in browser.text("#legend") or "逐元素相加" in browser.text("#legend")
        assert "在 2 个 rank 上" in browser.text("#summary") and "lang=" not in browser.view()
        browser.one("#language").click()
        assert browser.text("#summary") == SUMMARY and browser.view().endswith("lang=en") or "lang=en" in browser.view()
        assert browser.errors() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 700, 1280])
def test_page_is_as_wide_as_the_window(opened, width, dark):
    for view, language in itertools.product(VIEWS, ("en", "zh")):
        browser = opened(f"{view}&lang={language}", width=width, dark=dark)
        assert browser.run("return document.documentElement.scrollWidth") <= width, (view, language)
        beyond = """
        const scrolls = (one) => one && (getComputedStyle(one).overflowX === "auto" || scrolls(one.parentElement));
        const boxes = [...document.querySelectorAll("main *, header *, footer *")].filter((one) => !scrolls(one));
        const beyond = boxes.filter((one) => one.getBoundingClientRect().right > innerWidth + 1);
        const names = [...document.querySelectorAll(".arrow-head, .head")];
        const cut = names.filter((one) => one.scrollWidth > one.clientWidth + 1);
        return [...beyond, ...cut].map((one) => one.outerHTML.slice(0, 80));
        """
        assert browser.run(beyond) == [], (view, language)


CONTRASTS = """
const colour = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((one) => one / 255);
  probe.remove();
  const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
};
const contrast = (one, other) => {
  const [dark, light] = [colour(one), colour(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};
const on = (names, grounds) =>
  names.flatMap((one) => grounds.map((other) => [`${one} on ${other}`, contrast(one, other)]));
const all = (name) => [0, 1, 2, 3].map((rank) => `--${name}${rank}`);
return [
  ...on(["--text"], ["--ground", "--raised", ...all("tint")]),
  ...on(["--quiet"], ["--ground", "--raised"]),
  ...on([...all("rank"), "--move", "--error"], ["--ground"]),
];
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out(opened, dark):
    browser = opened(dark=dark)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert {pair: ratio for pair, ratio in browser.run(CONTRASTS) if ratio < 4.5} == {}


def test_screen_reader_hears_all(opened):
    browser = opened("#ranks=2x2&x=S0,P&w=P,S1")
    assert {one.get_attribute("aria-live") for one in browser.all("#summary, #readout")} == {"polite"}
    nameless = """
    const all = (selector) => [...document.querySelectorAll(selector)];
    const attribute = (one) => one.getAttribute("aria-label") || one.getAttribute("aria-labelledby");
    const parts = all("svg:not([aria-hidden]), [role=img], [role=grid], [role=group], [role=gridcell], button, a");
    const groups = all("fieldset").filter((one) => !one.querySelector("legend").textContent.trim());
    const nameless = parts.filter((one) => !attribute(one) && !one.textContent.trim());
    return [...nameless, ...groups].map((one) => one.outerHTML.slice(0, 80));
    """
    assert browser.run(nameless) == []
    ids = browser.run("return [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    matrix = browser.one("[data-stage=multiply] [data-rank='2'][aria-label*='of x']").get_attribute("aria-label")
    assert re.fullmatch(r"rank 2 holds .+ of x: [\d ;]+", matrix)


def test_print(opened):
    browser = opened(media="print", dark=True)
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.one("#presets").is_displayed() and browser.all(".stage")[0].is_displayed()
    assert len(browser.driver.print_page()) > 20_000  # characters of a PDF


def test_refused_pair_is_shown(opened, tmp_path):
    changed = json.loads(json.dumps(RECORDS))
    pair = changed["runs"]["2"]["P @ P"]
    pair["graph"] = {"error": "Check failed: no such thing"}
    changed["runs"]["3"]["P @ P"] = {"eager": {"error": "it aborts"}}
    path = tmp_path / "explore.html"
    path.write_text(page.page(json.dumps(changed)))
    browser = opened("#ranks=2&x=P&w=P&mode=graph", path=path)
    assert "OneFlow 0.9.0 refuses this: Check failed: no such thing" in browser.text("#stages .refused")
    assert "graph: Check failed: no such thing" in browser.text("#bytes")
    opened("#ranks=2&x=P&w=P&to=B", path=path)
    assert browser.all("[data-stage=multiply]") and "graph: Check failed: no such thing" in browser.text("#bytes")
    opened("#ranks=3&x=P&w=P", path=path)
    assert "it aborts" in browser.text("#summary")
