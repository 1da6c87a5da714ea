// Draws the matmul: whole matrices, what each rank holds, the arrows of a move, and how a number of out is made.

// ---- matrices

// The look of numbers that these ranks hold: one colour, stripes for copies, bars below for terms of a sum.
function look(holders, terms) {
  const colours = holders.map((rank) => `var(--tint${rank})`);
  if (terms.length > 1) {
    const width = 100 / terms.length;
    const bars = terms.map((rank, index) => `var(--rank${rank}) ${index * width}% ${(index + 1) * width}%`);
    return { part: true, style: `--bars: linear-gradient(to right, ${bars.join(", ")})` };
  }
  if (colours.length < 2) return { style: `--fill: ${colours[0] || "transparent"}` };
  const stripes = colours.map((colour, index) => `${colour} ${index * 6}px ${(index + 1) * 6}px`);
  return { style: `--fill: repeating-linear-gradient(135deg, ${stripes.join(", ")})` };
}

function frame(shape, attributes, ...cells) {
  const style = `--rows: ${shape[0]}; --columns: ${shape[1]}`;
  return element("div", { ...attributes, style }, ...cells);
}

const inText = (rows) => rows.map((row) => row.join(" ")).join("; ");

// One number. `of`: which tensor; out's numbers can be pointed at.
function cell(of, row, column, value, extra) {
  const { part, style, ...attributes } = extra;
  const looks = [part && "part", attributes.class, value === 0 && "zero", String(value).length > 2 && "long"];
  const classes = ["cell", ...looks].filter(Boolean).join(" ");
  const place = `grid-area: ${row + 1} / ${column + 1}; ${style}`;
  return element(
    "span",
    { ...attributes, class: classes, style: place, "data-of": of, "data-row": row, "data-column": column },
    String(value),
  );
}

function wholeMatrix(name, of, sbp, ranks, blocks, shape) {
  const value = blocks ? Matmul.whole(shape, sbp, ranks, blocks) : RUNS.value[name];
  const label = t("whole_label", { tensor: name, shape: shown(shape), sbp: present(sbp), values: inText(value) });
  const pointable = of.startsWith("out");
  const rows = value.map((numbers, row) => {
    const cells = numbers.map((number, column) => {
      const holders = Matmul.holders(shape, sbp, ranks, row, column);
      const terms = sbp.includes("P") ? Matmul.terms(shape, sbp, ranks, row, column) : [];
      return cell(of, row, column, number, {
        ...look(holders, terms),
        ...(pointable
          ? {
              role: "gridcell",
              tabindex: row + column === 0 ? "0" : "-1",
              "aria-label": cellLabel(sbp, ranks, blocks, shape, row, column, number),
            }
          : { "aria-hidden": "true" }),
      });
    });
    return pointable ? element("div", { role: "row", style: "display: contents" }, ...cells) : cells;
  });
  return frame(shape, { class: "matrix whole", role: pointable ? "grid" : "img", "aria-label": label }, ...rows.flat());
}

function termsOf(sbp, ranks, blocks, shape, row, column) {
  return Matmul.terms(shape, sbp, ranks, row, column).map((rank) => {
    const [[top], [left]] = Matmul.block(shape, sbp, ranks, rank);
    return { rank, value: blocks[rank][row - top][column - left] };
  });
}

function cellLabel(sbp, ranks, blocks, shape, row, column, value) {
  const terms = termsOf(sbp, ranks, blocks, shape, row, column).map((term) => term.value);
  const sum = terms.length > 1 ? t("cell_sum", { value, terms: terms.join(" + ") }) : value;
  return t("cell_label", { row, column, value: sum });
}

function blockInWords(shape, [[top, bottom], [left, right]]) {
  const spans = [];
  if (bottom - top < shape[0])
    spans.push(bottom - top > 1 ? t("rows", { from: top, to: bottom - 1 }) : t("row", { from: top }));
  if (right - left < shape[1])
    spans.push(right - left > 1 ? t("columns", { from: left, to: right - 1 }) : t("column", { from: left }));
  return spans.join(", ") || t("all_of");
}

// What one rank holds, in its place in the whole.
function rankMatrix(name, of, sbp, ranks, blocks, shape, rank) {
  if (!blocks) return frame(shape, { class: "matrix" }, element("span", { class: "empty-block" }, t("not_recorded")));
  const block = Matmul.block(shape, sbp, ranks, rank);
  const [[top], [left]] = block;
  const term = sbp.includes("P");
  const cells = blocks[rank].flatMap((numbers, row) =>
    numbers.map((number, column) =>
      cell(of, top + row, left + column, number, {
        part: term,
        style: `--fill: var(--tint${rank}); --bars: var(--rank${rank})`,
      }),
    ),
  );
  const words = {
    rank: t("rank", { rank }),
    block: blockInWords(shape, block),
    tensor: name,
    values: inText(blocks[rank]),
  };
  cells.forEach((node) => node.setAttribute("aria-hidden", "true"));
  return frame(
    shape,
    { class: "matrix", role: "img", "aria-label": t("each_holds", words), "data-rank": rank },
    ...cells,
  );
}

// ---- stages

const cellSize = () => (narrow.matches ? 20 : 26);

// A stage: columns are tensors {name, of, sbp, blocks, shape} and operators "@", "=", or {arrows}.
function stageGrid(columns, ranks) {
  const members = Matmul.members(ranks);
  const children = [element("span", { class: "head" })];
  const isTensor = (column) => column.sbp !== undefined;
  const isArrows = (column) => column.arrows !== undefined;
  for (const column of columns) {
    if (isTensor(column))
      children.push(element("div", { class: "head" }, element("b", {}, column.name), " ", sbpMark(column.sbp)));
    else children.push(isArrows(column) ? element("span", { class: "head" }) : element("span", {}));
  }
  children.push(element("span", { class: "name" }, t("whole")));
  for (const column of columns) {
    if (isTensor(column))
      children.push(wholeMatrix(column.name, column.of, column.sbp, ranks, column.blocks, column.shape));
    else
      children.push(
        isArrows(column) ? arrowHead(column.arrows) : element("span", { class: "op", "aria-hidden": "true" }, column),
      );
  }
  children.push(...gapRow(columns, "whole-gap", "="));
  members.forEach((rank, index) => {
    children.push(element("span", { class: "name rank", style: `color: var(--rank${rank})` }, t("rank", { rank })));
    for (const column of columns) {
      if (isTensor(column))
        children.push(rankMatrix(column.name, column.of, column.sbp, ranks, column.blocks, column.shape, rank));
      else if (!isArrows(column)) children.push(element("span", { class: "op", "aria-hidden": "true" }, column));
      else if (index === 0) children.push(arrowsBeside(column.arrows, members.length, columns));
    }
    if (index < members.length - 1) children.push(...gapRow(columns, "row-gap", "+"));
  });
  const template = columns.map((column) => (isArrows(column) ? `${arrowWidth()}px` : "max-content")).join(" ");
  return element("div", { class: "grid", style: `grid-template-columns: max-content ${template}` }, ...children);
}

const arrowWidth = () => (narrow.matches ? 96 : 100);

// The space between two rows: of a partial sum it says that the ranks' numbers add up.
function gapRow(columns, kind, sign) {
  const height = kind === "row-gap" ? 12 : 20;
  const cells = columns
    .filter((column) => column.arrows === undefined || kind !== "row-gap")
    .map((column) => {
      const adds = column.sbp !== undefined && column.blocks && column.blocks.length > 1 && column.sbp === "P";
      return element(
        "span",
        { class: adds ? "plus" : "", style: `height: ${height}px; line-height: ${height}px`, "aria-hidden": "true" },
        adds ? sign : "",
      );
    });
  return [element("span", { style: `height: ${height}px` }), ...cells];
}

function arrowHead({ steps, quiet, size }) {
  const names = steps.flatMap(({ name, axis }) => [
    element("b", {}, t(name)),
    axis === undefined ? "" : element("span", {}, t("along", { axis })),
  ]);
  return element("div", { class: quiet ? "arrow-head quiet" : "arrow-head" }, ...names, element("span", {}, size));
}

function arrowsBeside(arrows, count, columns) {
  const shape = columns.find((column) => column.sbp !== undefined).shape;
  const rowHeight = cellSize() * shape[0] + 2;
  const picture = drawArrows(arrows, count, rowHeight, 12, arrowWidth());
  return element("div", { style: `grid-row: span ${2 * count - 1}; align-self: start` }, picture);
}

// Lines from what ranks hold before, left, to what they hold after, right.
function drawArrows({ phases, words }, count, rowHeight, gap, width) {
  const height = count * rowHeight + (count - 1) * gap;
  const ranks = [...Array(count).keys()];
  const y = (rank) => rowHeight / 2 + rank * (rowHeight + gap);
  const stops = phases.map((_, index) => 8 + ((width - 16) * index) / phases.length).concat(width - 8);
  const parts = phases.flatMap((pairs, phase) => {
    const [left, right] = [stops[phase], stops[phase + 1]];
    const stays = ranks.map((rank) => svgElement("path", { class: "kept", d: `M${left} ${y(rank)}H${right}` }));
    const sends = pairs.flatMap(([from, to]) => arrow(left + 5, y(from), right - 5, y(to)));
    const between = phase ? ranks.map((rank) => svgElement("circle", { cx: left, cy: y(rank), r: 3 })) : [];
    return [...stays, ...sends, ...between];
  });
  return arrowPicture(words, width, height, parts);
}

function arrowPicture(label, width, height, parts) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  return svgElement("svg", { class: "arrows", role: "img", "aria-label": label, ...size }, ...parts);
}

function arrow(x1, y1, x2, y2) {
  const angle = (Math.atan2(y2 - y1, (x2 - x1) * 0.6) * 180) / Math.PI; // steeper than the line: it looks better
  const tip = { class: "tip", d: "M1 0L-7 3.2V-3.2z", transform: `translate(${x2} ${y2}) rotate(${angle.toFixed(1)})` };
  return [svgElement("path", { d: `M${x1} ${y1}L${x2} ${y2}` }), svgElement("path", tip)];
}

// Which rank sends to which, in one phase or, for an all-reduce, in two.
function arrowsOf(from, to, ranks, sent) {
  const steps = Matmul.collectives(from, to);
  const members = Matmul.members(ranks);
  const silent = !sent || Math.max(...sent) <= MESSAGES; // a local fill can send after all: then all its axes count
  const moving = steps.filter(({ name }) => !name.startsWith("local") || !silent);
  const axes = moving.map(({ axis }) => axis);
  const along = (from, to) =>
    Matmul.coordinates(ranks, from).every(
      (place, axis) => axes.includes(axis) || place === Matmul.coordinates(ranks, to)[axis],
    );
  const sends = (rank) => !sent || sent[rank] > MESSAGES;
  const pairs = members.flatMap((from) =>
    members.filter((to) => to !== from && along(from, to) && sends(from)).map((to) => [from, to]),
  );
  const twice = moving.length === 1 && moving[0].name === "all-reduce" && pairs.length;
  const named = steps.map(({ axis, name }) => (ranks === "2x2" ? { name, axis } : { name }));
  const words = collectiveInWords(from, to, ranks);
  return { words, steps: named, quiet: !pairs.length, phases: twice ? [pairs, pairs] : [pairs] };
}

// What a move sends of the matrices that are shown, in a few words.
function sizeInWords(move, sent) {
  const formula = formulaFor([move], withOut(RUNS.shape));
  if (formula === null) return "";
  if (formula.total === 0) return sent && Math.max(...sent) > MESSAGES ? t("unexpected") : t("nothing_sent");
  const { byRank, total } = formula;
  return byRank && byRank.every((sent) => sent === byRank[0])
    ? t("each_sends", { bytes: bytes(byRank[0]) })
    : t("all_send", { bytes: bytes(total) });
}

function tensorColumn(name, sbp, blocks) {
  return { name, of: name, sbp, blocks, shape: RUNS.shape[name] };
}

function moveStage(run, { tensor, from, to }) {
  const factor = run.factors[tensor === "x" ? 0 : 1];
  const sent = run.moves.length > 1 || run.large ? null : run.sent; // else it is of other moves too
  const arrows = { ...arrowsOf(from, to, state.ranks, sent), size: sizeInWords({ tensor, from, to }, sent) };
  const after = tensorColumn(tensor, to, factor);
  const words = { tensor, from: present(from), to: present(to) };
  return element(
    "div",
    { class: "stage", "data-stage": `move-${tensor}` },
    element("h3", {}, t("stage_move", words)),
    stageGrid([tensorColumn(tensor, from, run[tensor]), { arrows }, after], state.ranks),
  );
}

function multiplyStage(run) {
  const [x, w] = run.inputs;
  const columns = [tensorColumn("x", x, run.factors[0]), "@", tensorColumn("w", w, run.factors[1]), "="];
  columns.push({ name: "out", of: "out", sbp: run.outSbp, blocks: run.out, shape: outShape() });
  return element(
    "div",
    { class: "stage", "data-stage": "multiply" },
    element("h3", {}, t("stage_multiply")),
    stageGrid(columns, state.ranks),
  );
}

function outShape() {
  return [RUNS.shape.x[0], RUNS.shape.w[1]];
}

function changeStage(run) {
  const { from, to, out, sent } = run.change;
  const arrows = { ...arrowsOf(from, to, state.ranks, sent), size: sizeInWords(run.change, sent) };
  const column = { name: "out", of: "out-to", sbp: to, blocks: out, shape: outShape() };
  return element(
    "div",
    { class: "stage", "data-stage": "change" },
    element("h3", {}, t("stage_change", { from: present(from), to: present(to) })),
    stageGrid([{ arrows }, column], state.ranks),
  );
}

function drawStages(run) {
  const stages = run.moves.map((move) => moveStage(run, move));
  stages.push(multiplyStage(run));
  if (run.change && run.change.from !== run.change.to) stages.push(changeStage(run));
  find("stages").replaceChildren(...stages);
}

// ---- the number that is pointed at

function productsOf(run, rank, row, column) {
  const [x, w] = run.inputs.map((sbp, index) => {
    const name = index ? "w" : "x";
    if (!run.factors[index]) return null;
    const [[top], [left]] = Matmul.block(RUNS.shape[name], sbp, state.ranks, rank);
    return { held: run.factors[index][rank], top, left };
  });
  if (!x || !w) return "";
  const left = x.held[row - x.top];
  return left.map((number, k) => `${number}·${w.held[k][column - w.left]}`).join(" + ");
}

function drawReadout(run) {
  const readout = find("readout");
  const [row, column] = seen || [0, 0];
  const shape = outShape();
  const terms = termsOf(run.outSbp, state.ranks, run.out, shape, row, column);
  const value = terms.reduce((sum, term) => sum + term.value, 0);
  const sum = terms.length > 1 ? ` = ${terms.map((term) => term.value).join(" + ")}` : "";
  const lines = terms.map(({ rank, value: term }) => {
    const swatch = element("span", { class: "swatch", style: `--fill: var(--rank${rank})` });
    const products = productsOf(run, rank, row, column);
    return element("li", {}, swatch, `${t("rank", { rank })}: ${products}${products && " = "}${term}`);
  });
  const copies = Matmul.holders(shape, run.outSbp, state.ranks, row, column).filter(
    (rank) => !terms.some((term) => term.rank === rank),
  );
  const title = element("span", { class: "made" }, `out[${row}, ${column}] = ${value}${sum}`);
  const same = copies.length ? element("li", {}, t("same_on", { ranks: ranksInWords(copies) })) : null;
  const list = element("ol", {}, ...lines, ...(same ? [same] : []));
  const hint = element("span", { class: "hint" }, t("hint"));
  readout.replaceChildren(element("h3", {}, t("readout_title")), title, list, ...(seen ? [] : [hint]));
}

function point(row, column) {
  seen = [row, column];
  for (const node of find("stages").querySelectorAll(".cell")) {
    const isOut = node.dataset.of.startsWith("out");
    const here = [Number(node.dataset.row), Number(node.dataset.column)];
    node.classList.toggle("seen", isOut && here[0] === row && here[1] === column);
    const inMultiply = node.closest("[data-stage]").dataset.stage === "multiply";
    const used = (node.dataset.of === "x" && here[0] === row) || (node.dataset.of === "w" && here[1] === column);
    node.classList.toggle("used", inMultiply && used);
  }
  drawReadout(Matmul.run(state));
}

function listenToStages() {
  const stages = find("stages");
  const pointAt = (event) => {
    const target = event.target.closest(".cell[data-of^=out]");
    if (target && state.preset !== "pipeline") point(Number(target.dataset.row), Number(target.dataset.column));
  };
  stages.addEventListener("pointerover", pointAt);
  stages.addEventListener("pointerdown", pointAt);
  stages.addEventListener("focusin", pointAt);
  stages.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const grid = event.target.closest("[role=grid]");
    if (!steps || !grid) return;
    event.preventDefault();
    const [row, column] = [Number(event.target.dataset.row) + steps[0], Number(event.target.dataset.column) + steps[1]];
    const next = grid.querySelector(`[data-row="${row}"][data-column="${column}"]`);
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

// ---- the pipeline: other placements instead of other SBPs

// A row of matrices, each whole on one rank.
function placedStage(title, rank, columns) {
  const heads = columns.map((column) =>
    column.name
      ? element(
          "div",
          { class: "head" },
          element("b", {}, column.name),
          " ",
          element("span", { class: "sbp" }, `[${rank}]`),
        )
      : element("span", {}),
  );
  const cells = columns.map((column) => {
    if (!column.name) return element("span", { class: "op", "aria-hidden": "true" }, column);
    const style = `--fill: var(--tint${rank})`;
    const numbers = column.value.flatMap((row, i) =>
      row.map((number, j) => cell(column.name, i, j, number, { style, "aria-hidden": "true" })),
    );
    const values = inText(column.value);
    const label = t("each_holds", { rank: t("rank", { rank }), block: t("all_of"), tensor: column.name, values });
    return frame(RUNS.shape.x, { class: "matrix", role: "img", "aria-label": label }, ...numbers);
  });
  const name = element("span", { class: "name rank", style: `color: var(--rank${rank})` }, t("rank", { rank }));
  const style = `grid-template-columns: repeat(${columns.length + 1}, max-content)`;
  const grid = element("div", { class: "grid", style }, element("span", { class: "head" }), ...heads, name, ...cells);
  return element("div", { class: "stage", "data-stage": `rank-${rank}` }, element("h3", {}, title), grid);
}

function drawPipeline() {
  const alone = Matmul.run({ ranks: "1", x: "B", w: "B", to: "", mode: "eager" });
  const [h] = alone.out;
  const size = Matmul.ITEM * h.length * h[0].length;
  const column = (name, value) => ({ name, value });
  const first = placedStage(t("pipeline_first"), 0, [
    column("x", alone.x[0]),
    "@",
    column("w0", alone.w[0]),
    "=",
    column("h", h),
  ]);
  const second = placedStage(t("pipeline_second"), 1, [
    column("h", h),
    "@",
    column("w1", RUNS.value.w), // as in its program
    "=",
    column("out", Matmul.product(h, RUNS.value.w)),
  ]);
  const send = element(
    "div",
    { class: "stage send", "data-stage": "send" },
    arrowHead({ steps: [{ name: "pipeline_send" }], size: bytes(size) }),
    // on a narrow page rank 1 is below rank 0
    narrow.matches
      ? arrowPicture(t("pipeline_send"), 14, 34, arrow(7, 0, 7, 32))
      : arrowPicture(t("pipeline_send"), 64, 14, arrow(0, 7, 62, 7)),
  );
  find("summary").replaceChildren(t("pipeline_summary", { bytes: bytes(size) }));
  find("why").textContent = t("pipeline_why");
  find("stages").replaceChildren(first, send, second);
  find("readout").replaceChildren();
  find("legend").replaceChildren();
  const atlas = element("a", { href: "../sbp-atlas.md#0--1" }, t("atlas_link"));
  find("bytes").replaceChildren(
    element("h3", {}, t("bytes_title")),
    element("p", {}, ...sentence("pipeline_bytes", { bytes: bytes(size), link: atlas })),
  );
  drawProgram(Matmul.pipelineCode(), 2);
}
