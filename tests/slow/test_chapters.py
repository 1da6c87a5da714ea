"""The chapters: each command, session and answer prints what the page shows, and code is that of the recipe."""

import re
import shlex
import tempfile
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from oneflow_cookbook.measure.theory import MATMUL, Boxing
from oneflow_cookbook.start import options
from oneflow_cookbook.start.recipe import all_paths
from tests.cases import CASES, PROOFS, ROOT
from tests.cases.ladder import MAIN
from tests.cases.mains import is_like
from tests.jobs import LAUNCH, LONG, Run, piped
from tests.markdown import CHAPTERS, COSTS, INDEX, blocks, sections, tables
from tests.pages import PROMPT

RECIPES = {path.stem: path for path in all_paths()}
WHOLE_JOBS = [name for name, proof in PROOFS.items() if proof.whole_job]


@dataclass
class Example:
    """A command of a page, and what the page shows below it."""

    page: Path
    command: str
    shown: str

    @property
    def recipe(self):
        """The words behind ./launch.sh if all that it does is to run the main of a recipe."""
        words = shlex.split(self.command)[1:]
        names = [word for word in words if word in RECIPES]
        is_main = names and words[0] not in ("show", "bytes", "verify", "shell") and names[0] not in WHOLE_JOBS
        return words if is_main and "\n" not in self.command else None

    @property
    def session(self):
        """The arguments of the shell if the page shows what is typed there."""
        return shlex.split(self.command)[2:] if self.command.startswith("./launch.sh shell ") else None


def page_of(folder):
    return ROOT / "recipes" / folder / "README.md"


def examples():
    """The blocks of commands with the output that follows them; one that is followed by none is an "sh" block."""
    found = []
    for page in (*CHAPTERS, COSTS):
        example = None
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            if language in ("bash", "sh"):
                example = Example(page, text.replace("\\\n", "").strip(), "")
                found.append(example)
            elif language == "text":
                example.shown += text
    return [example for example in found if example.shown]


EXAMPLES = {
    f"{example.page.parent.name}: {' '.join(example.command.splitlines()[-1].split())}: {k}": example
    for k, example in enumerate(examples())
}


def background_calls(item):
    """What a test needs: see pools.py."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    example = EXAMPLES.get(name)
    if example is None:
        return {}
    if example.session is not None:
        return {("chapter", name): (0, lambda _: session(example))}
    if example.recipe is None:
        return {("chapter", name): (0, lambda _: job(example))}
    command = options.checked(example.recipe)  # as launch.sh reads it
    path = str(Path(command.script).resolve())  # now, as other tests change the current folder while it runs

    def call(pool):
        return pool.call(MAIN, path=path, arguments=command.arguments)

    return {("chapter", name): (command.nproc_per_node, call)}


def job(example):
    """The ended job of a command, in a folder with the config.json of the page on costs."""
    command = example.command.replace("./launch.sh", str(LAUNCH)).replace(" recipes/", f" {ROOT}/recipes/")
    [config] = blocks(COSTS, "json")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return Run("bash", "-c", f"set -e\n{command}", cwd=folder).wait(LONG)


def session(example):
    """What the shell prints when somebody types what the page shows."""
    return piped("".join(PROMPT.findall(example.shown)), "shell", "--echo", *example.session)


def lines_of(results):
    """What the ranks of a pool printed, as launch.sh marks it."""
    assert [(code, err) for code, _, err in results] == [(0, "")] * len(results)
    prefixes = [f"[{rank}] " for rank in range(len(results))] if len(results) > 1 else [""]
    return [f"{prefix}{line}" for prefix, (_, out, _) in zip(prefixes, results) for line in out.splitlines()]


def by_rank(lines):
    """ "[rank] " -> its lines in order; a job of a single rank, and a command of ours, mark no line."""
    ranks = {}
    for line in lines:
        ranks.setdefault(re.match(r"(\[\d+] )?", line).group(), []).append(line)
    return ranks


def first_not_printed(shown, printed):
    """The first line of a page that a job did not print, or not in this order on its rank; None if there is none."""
    printed = by_rank(printed)
    for rank, lines in by_rank(shown).items():
        rest = iter(printed.get(rank, []))
        for line in lines:
            if not any(is_like(line, candidate) for candidate in rest):
                return line
    return None


@pytest.mark.parametrize("name", EXAMPLES)
def test_command_prints_what_the_page_shows(measured, name):
    example, done = EXAMPLES[name], measured("chapter", name)
    if example.session is not None:
        assert (done.stdout, done.returncode, done.stderr) == (example.shown, 0, "")
        return
    if example.recipe is not None:
        printed = lines_of(done)
    else:
        assert done.code == (1 if " verify " in example.command else 0), done.err
        printed = re.sub(r"(↓ .*)\n {4}(?=[^ ↓])", r"\1 ", done.out).splitlines()  # show breaks long lines
    line = first_not_printed(example.shown.splitlines(), printed)
    assert line is None, f"{example.command} does not print {line!r}, but:\n" + "\n".join(printed)


CODE = [
    (section.recipe, block)
    for page in CHAPTERS
    for section in sections(page)
    for block in re.findall(r"```python\n(.*?)```", section.text, flags=re.DOTALL)
]


@pytest.mark.parametrize("recipe, block", CODE, ids=[recipe for recipe, _ in CODE])
def test_code_is_that_of_the_recipe(recipe, block):
    stripped = [line.strip() for line in RECIPES[recipe].read_text().splitlines()]
    rest = iter(stripped)
    for line in block.splitlines():
        assert line in rest, f"{recipe}.py has no line {line!r}, or not in this order"


EQUATION = re.compile(r"((?:\d[\d.,]*|[×/+ ()-])+) = (\d[\d.,]*)")
NUMBERS = re.compile(r"[GMTk]?B\b|\b(?:billion|bytes?|bits?|parameters?|layers?|tokens|numbers|MB)\b|%")


def equations(page):
    """The equations of a page whose left side is made of numbers: (as it stands, left value, right as text)."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\n", " ")
    for left, right in EQUATION.findall(re.sub(r" +", " ", NUMBERS.sub("", text))):
        python = left.replace("×", "*").replace(",", "").strip(" ")
        if re.match(r"[\d(].*[*/+-]", python) and python.count("(") == python.count(")"):  # no part of a formula
            yield f"{left} = {right}", eval(python), right.rstrip(".,")


def test_equations_are_right():
    """Within the digits that are shown; a factor of 1,000 is a different unit."""
    found = [equation for page in (*CHAPTERS, COSTS) for equation in equations(page)]
    assert len(found) > 20, "the pattern reads no equations any more"
    for words, value, right in found:
        shown, digits = float(right.replace(",", "")), len(right.partition(".")[2])
        scale = min((1, 1e-3, 1e-6, 1e-9, 1e3), key=lambda factor: abs(value * factor - shown))
        assert abs(value * scale - shown) <= 0.51 * 10**-digits, words


def rows_below(page, *head):
    """The rows of the table with this head, as lists of cells."""
    rows = tables(page)
    begin = next(k for k, row in enumerate(rows) if row[: len(head)] == list(head)) + 1
    return list(takewhile(lambda row: len(row) == len(rows[begin - 1]), rows[begin:]))


def value_of(formula, n):
    """Of "2 (n-1)/n × the tensor", without what stands behind the last digit, n or parenthesis of the formula."""
    formula = re.match(r"[\dn() /²+-]+", formula).group().strip().replace("²", "**2")
    return eval(re.sub(r"(\d|\)) (?=\()", r"\1*", formula), {"n": n})


def test_products_of_chapter_1_are_those_of_the_formulas():
    rows = rows_below(INDEX, "x", "w", "x @ w")
    assert {(x, w): product for x, w, product, _ in rows[: len(MATMUL)]} == MATMUL
    assert "Six" in page_of("layouts").read_text() and len(MATMUL) == 6


@pytest.mark.parametrize("n", [2, 4])
def test_conversions_of_chapter_1_send_what_the_formulas_say(n):
    for change, collective, formula in rows_below(INDEX, "conversion")[:4]:
        old, new = (sbp if sbp in ("B", "P") or "(" in sbp else f"{sbp}(0)" for sbp in change.split(" → "))
        boxing = Boxing((4 * n, 4 * n), (old, list(range(n))), (new, list(range(n))))
        assert collective.startswith(f"{boxing.collective}:")
        assert list(boxing.by_rank.values()) == pytest.approx([value_of(formula, n) * boxing.size] * n), change


def transposed(sbp):
    return {"S(0)": "S(1)", "S(1)": "S(0)"}.get(sbp, sbp)


def test_gradients_of_chapter_2_follow_from_the_products():
    for _, layouts, of_w, of_x in rows_below(page_of("training"), "layout")[:3]:
        x, w, g = layouts.split(", ")
        assert g == MATMUL[x, w].replace("P", "B")  # an addend has the gradient of the sum
        for factors, words in (((transposed(x), g), of_w), ((g, transposed(w)), of_x)):
            product = MATMUL[factors]
            sent = "all-reduce" if product == "P" else "nothing"
            assert words == f"{factors[0]} times {factors[1]} is {product}: {sent}"


def test_ways_of_context_parallelism_send_what_the_table_says():
    [row] = [row for row in tables(page_of("transformer")) if row[0].startswith("each of n ranks sends in a step")]
    for name, formula in zip(("all_gather_kv", "ulysses", "ring_attention"), row[1:]):
        for n in (2, 4):
            case = CASES[name](n)
            queries = sum(value.exact.size for tensor, value in case.values.items() if re.fullmatch(r"q\d*", tensor))
            assert np.mean(case.sends) == pytest.approx(value_of(formula, n) * queries, rel=1e-6), name


def test_bytes_of_a_parameter_add_up():
    *parts, together = rows_below(page_of("memory"), "")[:5]
    for column in (1, 2):
        numbers = [int(row[column].split()[0]) for row in parts if row[column] != "–"]
        assert sum(numbers) == int(together[column]) == 16
