"""`launch.sh docs`: make docs/sbp-atlas.md from fresh runs."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from oneflow_cookbook.pool import Pool
from oneflow_cookbook.report import atlas, runs, tables
from oneflow_cookbook.start.recipe import ROOT, path_of

ATLAS = ROOT / "docs" / "sbp-atlas.md"


def calls():
    """{key: (number of ranks, function of a pool)}: the measurements for the page."""
    measurements = {("atlas", n): (n, atlas.measured_on) for n in atlas.SAME}
    for mode in atlas.MODES:
        measurements["run", "two_d_sbp", 4, mode] = (4, partial(runs.recipe_run, path=path_of("two_d_sbp"), mode=mode))
    return measurements


def measured(measurements):
    """Run the measurements of `calls`, with a thread and a pool for each number of ranks; returns {key: result}."""

    def on(n):
        with Pool(n, timeout=600, repeat=True) as pool:
            return {key: function(pool) for key, (ranks, function) in measurements.items() if ranks == n}

    with ThreadPoolExecutor() as threads:
        return {key: result for part in threads.map(on, atlas.SAME) for key, result in part.items()}


def page(results):
    """The page with new figures; results: of `calls`."""
    atlas_tables = {key: table for n in atlas.SAME for key, table in results["atlas", n].items()}
    parts = {
        "example": tables.same_ranks(atlas_tables, [("S(0)", "B")]),
        "same": tables.same_ranks(atlas_tables),
        "same_deviations": tables.deviations("same"),
        "formulas": tables.formulas_of_other_ranks(),
        "disjoint": sections(atlas_tables, atlas.DISJOINT.values()),
        "disjoint_deviations": tables.deviations("disjoint"),
        "legal": tables.legal_signatures(atlas_tables),
        "signatures": tables.signatures(atlas_tables),
        "mesh": tables.mesh(results["run", "two_d_sbp", 4, "eager"]),
        "mesh_graph": tables.graph_to_formula(results["run", "two_d_sbp", 4, "graph"]),
    }
    return tables.fill(ATLAS.read_text("utf-8"), parts)


def sections(atlas_tables, pairs):
    """A section for each pair of placements, with the conversions between them."""
    return "\n".join(f"### {a} → {b}\n\n{tables.other_ranks(atlas_tables, a, b)}" for a, b in pairs)


def differs(old, new):
    """The first line in which two texts differ, numbers with two decimals by more than 2 %, in words; or None."""
    for number, (old_line, new_line) in enumerate(zip(old.splitlines() + [""], new.splitlines() + [""]), 1):
        if not tables.near(old_line, new_line):
            return f"line {number}: {old_line!r} is now {new_line!r}"
    return None if old.count("\n") == new.count("\n") else "the number of lines"


def main():
    """Regenerate the page; returns the exit code."""
    print("measuring every conversion and matmul signature: 3 minutes", flush=True)
    text = page(measured(calls()))
    changed = differs(ATLAS.read_text("utf-8"), text)
    if changed:
        ATLAS.write_text(text, "utf-8")
    print(f"{ATLAS.relative_to(ROOT)}: {'updated' if changed else 'unchanged'}")
    return 0
