// Says what a run does: in a sentence, in bytes, in what eager mode and a graph do differently, and as a program.

// ---- words about a run

function collectiveInWords(from, to, ranks) {
  const steps = Matmul.collectives(from, to);
  if (!steps.length) return t("nothing");
  const names = steps.map(({ axis, name }) =>
    ranks === "2x2" ? t("along_axis", { collective: t(name), axis }) : t(name),
  );
  return names.join(t("then"));
}

const moveInWords = ({ tensor, from, to }) => `${tensor} ${present(from)} → ${present(to)}`;

function summaryOf(run) {
  const { ranks, x, w } = state;
  const place =
    ranks === "2x2" ? t("sum_place_mesh") : ranks === "1" ? t("sum_place_one") : t("sum_place", { n: ranks });
  const parts = { place, x: sbpMark(x), w: sbpMark(w), out: sbpMark(run.outSbp) };
  const texts = [...sentence("sum_start", parts), space()];
  for (const { tensor, from, to } of run.moves) {
    const collective = element("span", { class: "moved" }, collectiveInWords(from, to, ranks));
    texts.push(...sentence("sum_first", { tensor, from: sbpMark(from), to: sbpMark(to), collective }), space());
  }
  if (!run.moves.length && ranks !== "1") texts.push(t("sum_direct"), space());
  if (run.change) {
    const { from, to } = run.change;
    const collective = element("span", { class: "moved" }, collectiveInWords(from, to, ranks));
    if (from === to) texts.push(...sentence("sum_no_change", { to: sbpMark(to) }));
    else texts.push(...sentence("sum_change", { to: sbpMark(to), collective }));
  }
  return texts;
}

function whyOf(run) {
  if (state.ranks === "1") return t("why_1");
  const [x, w] = run.inputs.map(Matmul.axes);
  const reasons = x.map((sbp, axis) => t(`why_${short(sbp)}_${short(w[axis])}`));
  if (reasons.length === 1 || reasons[0] === reasons[1]) return reasons[0];
  const inside = (why) => why[0].toLowerCase() + why.slice(1);
  return reasons.map((why, axis) => t("why_axis", { axis, why: inside(why) })).join(space());
}

function bytes(count) {
  if (count === null) return t("no_formula");
  if (count < 1000) return `${Math.round(count * 10) / 10} B`;
  if (count < 1e6) return `${(count / 1e3).toFixed(count < 1e5 ? 1 : 0)} kB`;
  return `${(count / 1e6).toFixed(2)} MB`;
}

const ranksInWords = (ranks) =>
  t(ranks.length > 1 ? "ranks_short" : "rank_short", { rank: ranks[0], ranks: ranks.join(", ") });

// ---- bytes, modes, the program

function drawLegend() {
  const ranks = Matmul.members(state.ranks);
  const swatch = ({ part, style }) => element("span", { class: part ? "swatch part" : "swatch", style });
  const entry = (key, ...swatches) => element("li", {}, ...swatches, element("span", {}, t(key)));
  const terms = ranks.length > 1 ? ranks : [0, 0];
  find("legend").replaceChildren(
    entry("legend_S", ...ranks.map((rank) => swatch(look([rank], [])))),
    entry("legend_B", swatch(look(ranks, []))),
    entry("legend_P", swatch(look(ranks, terms))),
    ...(state.ranks === "2x2" ? [entry("axis_help")] : []),
  );
}

// What a run sends, before the matmul and after it: {title, sent, of: its moves, large: those where it is measured}.
function movesOf(run) {
  const sends = [];
  if (run.moves.length || run.large) {
    const title = run.moves.map(moveInWords).join("; ");
    sends.push({ title, sent: run.sent, of: run.moves, large: run.large ? run.large.moves : run.moves });
  }
  if (run.change && run.change.from !== run.change.to) {
    const { from, to, sent } = run.change;
    const of = [{ tensor: "out", from, to }];
    sends.push({ title: moveInWords(run.change), sent, of, large: of });
  }
  return sends;
}

// By formula, for matrices of these shapes: {total, byRank} in bytes, null where there is none.
function formulaFor(moves, shapes) {
  const parts = moves.map(({ tensor, from, to }) => Matmul.formula(shapes[tensor], from, to, state.ranks));
  if (parts.includes(null)) return null;
  const total = parts.reduce((sum, formula) => sum + formula.total, 0) * Matmul.ITEM;
  const split = parts.every((formula) => formula.byRank);
  const byRank = split
    ? Matmul.members(state.ranks).map((rank) => Matmul.ITEM * parts.reduce((sum, { byRank }) => sum + byRank[rank], 0))
    : null;
  return { total, byRank };
}

function withOut(shapes) {
  return { ...shapes, out: [shapes.x[0], shapes.w[1]] };
}

function bytesTable({ title, sent, of, large: moves }) {
  const large = withOut(RUNS.measured_shape);
  const members = Matmul.members(state.ranks);
  const row = (label, size, ratio) => {
    const numbers = members.map((rank) => element("td", {}, size && size.byRank ? bytes(size.byRank[rank]) : "–"));
    const total = element("td", {}, size ? bytes(size.total) : t("no_formula"), ...(ratio ? [" ", ratio] : []));
    return element("tr", {}, element("th", { scope: "row" }, label), ...numbers, total);
  };
  const byFormula = formulaFor(moves, large);
  const measured = { total: sent.reduce((a, b) => a + b, 0), byRank: sent };
  const ratio = byFormula && byFormula.total ? measured.total / byFormula.total : null;
  const mark =
    ratio === null
      ? null
      : element("span", { class: Math.abs(ratio - 1) > 0.02 ? "ratio off" : "ratio" }, `${ratio.toFixed(2)} ×`);
  const head = [
    element("th", {}),
    ...members.map((rank) => element("th", { scope: "col" }, t("rank", { rank }))),
    element("th", { scope: "col" }, t("in_all")),
  ];
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
    element(
      "table",
      {},
      element("caption", {}, title),
      element("thead", {}, element("tr", {}, ...head)),
      element(
        "tbody",
        {},
        row(t("formula", { shape: shown(RUNS.shape.x) }), formulaFor(of, withOut(RUNS.shape))),
        row(t("formula", { shape: shown(large.x) }), byFormula),
        row(t("measured", { shape: shown(large.x) }), measured, mark),
      ),
    ),
  );
}

function drawBytes(run) {
  const title = element("h3", {}, t("bytes_title"));
  const moves = movesOf(run);
  const atlas = element("a", { href: "../sbp-atlas.md" }, t("atlas_link"));
  const both = moves.some(({ large }) => large.some(({ from, to }) => Matmul.collectives(from, to).length > 1));
  const mesh = both ? [space(), t("bytes_mesh")] : [];
  const note = element(
    "p",
    { class: "note" },
    t("bytes_note"),
    ...mesh,
    space(),
    ...sentence("bytes_why", { link: atlas }),
  );
  const tables = moves.length ? moves.map(bytesTable) : [element("p", {}, t("bytes_nothing_all"))];
  if (run.large) tables.push(largeNote(run.large));
  find("bytes").replaceChildren(title, ...tables, ...(moves.length ? [note] : []), ...modesNote());
}

// OneFlow's choice depends on the sizes.
function largeNote({ outSbp, moves }) {
  const shape = shown(RUNS.measured_shape.x);
  const moved = moves.map(moveInWords).join("; ") || t("nothing_moved");
  return element("p", { class: "note", id: "large" }, t("large", { shape, moved, out: present(outSbp) }));
}

function modesNote() {
  const differences = Matmul.differences(state);
  if (!differences.length) return [element("p", { class: "note", id: "modes" }, t("modes_same"))];
  const said = (what, value) => {
    if (what.endsWith("sent")) return bytes(value);
    if (what.endsWith("parts")) return ""; // they can be seen
    return [value].flat().map(present).join(" @ ");
  };
  const lines = differences.map(({ what, eager, graph }) => {
    const shape = shown(RUNS.measured_shape.x);
    const words = { to: state.to, out: present(Matmul.run(state).outSbp), shape };
    const both = { eager: said(what, eager), graph: said(what, graph) };
    return element("li", {}, t(`differ_${what.replace(" ", "_")}`, { ...words, ...both }));
  });
  return [element("p", { class: "note", id: "modes" }, t("modes_differ")), element("ul", { class: "note" }, ...lines)];
}

function drawProgram(text, count) {
  const button = element("button", { type: "button", id: "copy", onclick: () => copy(button, text) }, t("copy"));
  const command = `./launch.sh -n ${count} mine.py`;
  find("program").replaceChildren(
    element("h3", {}, t("code_title"), button),
    element("pre", { tabindex: "0", role: "region", "aria-label": t("code_title"), id: "code" }, text),
    element("p", { class: "note" }, t("code_run"), space(), element("code", {}, command)),
  );
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = t("copied");
  } catch {
    const range = document.createRange();
    range.selectNodeContents(find("code"));
    window.getSelection().removeAllRanges();
    window.getSelection().addRange(range);
    button.textContent = document.execCommand("copy") ? t("copied") : t("copy_failed");
  }
}
