// The page: the language, the address, presets, controls, and the drawing of the matmul.
"use strict";

const records = Matmul.unpack(JSON.parse(document.getElementById("records").textContent));
const RANKS = ["1", "2", "3", "4", "2x2"];
const FIRST = { ranks: "2", x: "S(1)", w: "S(0)", to: "B", mode: "eager", preset: "row" };
const PRESETS = {
  data: { state: { ranks: "2", x: "S(0)", w: "B", to: "" }, recipes: ["data_parallel.py"], step: { strategy: "data" } },
  column: { state: { ranks: "2", x: "B", w: "S(1)", to: "" }, recipes: ["model_parallel.py"] },
  row: { state: { ranks: "2", x: "S(1)", w: "S(0)", to: "B" }, recipes: ["row_parallel.py"] },
  megatron: {
    state: { ranks: "2", x: "B", w: "S(1)", to: "" },
    second: { ranks: "2", x: "S(1)", w: "S(0)", to: "B" },
    recipes: ["training/train_model_parallel.py"],
    step: { strategy: "tensor" },
  },
  pipeline: {
    state: {},
    recipes: ["pipeline_parallel.py", "training/train_pipeline.py"],
    step: { strategy: "pipeline" },
  },
  mesh: {
    state: { ranks: "2x2", x: "S(0),B", w: "B,S(1)", to: "" },
    recipes: ["layouts/two_d_sbp.py", "training/train_data_tensor.py"],
    step: { strategy: "data_tensor" },
  },
  sharded: {
    state: { ranks: "2", x: "S(0)", w: "S(0)", to: "" },
    recipes: ["memory/fully_sharded.py"],
    step: { strategy: "sharded" },
  },
};
const STEP = "step-"; // before the names of the second part's state in the address
const MESSAGES = 15000; // bytes of OneFlow's own messages that a rank sends at most: less counts as nothing
const narrow = window.matchMedia("(max-width: 640px)");

let state = { ...FIRST };
let stepState = {};
let lang = "en";
let langChosen = false;
let seen = null; // the [row, column] of out that is pointed at

const find = (id) => document.getElementById(id);
const present = (sbp) => sbp.replace(",", ", ");
const shown = (shape) => shape.join("\u00a0×\u00a0");

function t(key, values = {}) {
  const text = Words[lang][key];
  if (text === undefined) throw new Error(`no word for ${key}`);
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "style") made.style.cssText = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A sentence whose {names} are filled in by elements or texts.
function sentence(key, parts) {
  return t(key)
    .split(/(\{\w+\})/)
    .map((piece) => (/^\{\w+\}$/.test(piece) ? parts[piece.slice(1, -1)] : piece));
}

const space = () => (lang === "zh" ? "" : " "); // between two sentences

const sbpMark = (sbp) => element("span", { class: "sbp" }, present(sbp));

// ---- the address

const short = (sbp) => sbp.replace(/[()]/g, "");
const long = (text) => text.replace(/S(\d)/g, "S($1)");

function address() {
  const parts = [
    ["ranks", state.ranks],
    ["x", short(state.x)],
    ["w", short(state.w)],
  ];
  if (state.to) parts.push(["to", short(state.to)]);
  if (state.mode !== "eager") parts.push(["mode", state.mode]);
  if (state.preset) parts.push(["preset", state.preset]);
  if (langChosen) parts.push(["lang", lang]);
  for (const [name, value] of Object.entries(stepState)) parts.push([`${STEP}${name}`, encodeURIComponent(value)]);
  return `#${parts.map(([name, value]) => `${name}=${value}`).join("&")}`;
}

function isState(wanted) {
  const axes = wanted.ranks === "2x2" ? 2 : 1;
  const good = (sbp) => Matmul.axes(sbp).length === axes && Matmul.axes(sbp).every((one) => Matmul.SBPS.includes(one));
  return (
    RANKS.includes(wanted.ranks) &&
    good(wanted.x) &&
    good(wanted.w) &&
    (wanted.to === "" || (axes === 1 && good(wanted.to))) &&
    ["eager", "graph"].includes(wanted.mode) &&
    (wanted.preset === "" || Object.hasOwn(PRESETS, wanted.preset))
  );
}

// Sets the state from an address; what is not a view becomes the first view.
function readAddress(text) {
  const found = {};
  for (const part of text.replace(/^#/, "").split("&")) {
    const [name, value = ""] = part.split("=");
    try {
      found[name] = decodeURIComponent(value);
    } catch {
      found[name] = "";
    }
  }
  const wanted = {
    ranks: found.ranks ?? "",
    x: long(found.x ?? ""),
    w: long(found.w ?? ""),
    to: long(found.to ?? ""),
    mode: found.mode ?? "eager",
    preset: found.preset ?? "",
  };
  state = isState(wanted) ? wanted : { ...FIRST };
  langChosen = Object.hasOwn(Words, found.lang ?? "");
  lang = langChosen ? found.lang : navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
  const steps = Object.entries(found).filter(([name]) => name.startsWith(STEP));
  const preset = PRESETS[state.preset];
  stepState = {
    ...(preset && preset.step),
    ...Object.fromEntries(steps.map(([name, value]) => [name.slice(STEP.length), value])),
  };
}

function writeAddress() {
  if (window.location.hash !== address()) window.history.replaceState(null, "", address());
}

// ---- choosing

function choose(changes, preset = "") {
  state = { ...state, ...changes, preset };
  if (changes.ranks !== undefined && preset === "") {
    for (const name of ["x", "w"]) {
      const axes = Matmul.axes(state[name]);
      state[name] = state.ranks !== "2x2" ? axes[0] : axes.length > 1 ? state[name] : `${axes[0]},B`;
    }
    if (state.ranks === "2x2") state.to = "";
  }
  seen = null;
  draw();
  writeAddress();
}

function choosePreset(name) {
  const { state: chosen, step } = PRESETS[name];
  if (step) stepState = { ...stepState, ...step };
  choose({ mode: "eager", ...chosen }, name);
  drawSteps();
}

function radioGroup(name, values, checked, onChoose, labelled) {
  const labels = values.map(([value, text]) => {
    const input = element("input", { type: "radio", name, value, onchange: () => onChoose(value) });
    input.checked = value === checked;
    return element("label", {}, input, element("span", {}, text));
  });
  return element("div", { class: "segments", ...labelled }, ...labels);
}

function controlOf(key, legend, groups) {
  return element("fieldset", { "data-control": key }, element("legend", {}, ...legend), groups);
}

function sbpControl(name) {
  const legend = sentence("sbp_of", { tensor: element("b", {}, name) });
  const values = Matmul.SBPS.map((sbp) => [sbp, sbp]);
  if (state.ranks !== "2x2")
    return controlOf(
      name,
      legend,
      radioGroup(name, values, state[name], (sbp) => choose({ [name]: sbp })),
    );
  const axes = [0, 1].flatMap((axis) => {
    const set = (sbp) => choose({ [name]: Matmul.axes(state[name]).with(axis, sbp).join(",") });
    const label = { role: "group", "aria-label": `${t("sbp_of", { tensor: name })}, ${t("on_axis", { axis })}` };
    const group = radioGroup(`${name}${axis}`, values, Matmul.axes(state[name])[axis], set, label);
    return [element("span", { class: "label" }, t("on_axis", { axis })), group];
  });
  return controlOf(name, legend, element("div", { class: "mesh-axes" }, ...axes));
}

// The controls stay as they are while only their values change, so that the focus stays too.
function drawControls() {
  const form = find("controls");
  form.hidden = state.preset === "pipeline";
  const kind = `${lang} ${state.ranks === "2x2"}`;
  if (form.dataset.kind !== kind) {
    const active = document.activeElement && document.activeElement.name === "ranks" ? state.ranks : null;
    form.dataset.kind = kind;
    form.replaceChildren(...controls());
    if (active) form.querySelector(`[name=ranks][value="${active}"]`).focus();
  }
  const values = { ranks: state.ranks, x: state.x, w: state.w, to: state.to, mode: state.mode };
  for (const name of ["x", "w"]) [values[`${name}0`], values[`${name}1`]] = Matmul.axes(state[name]);
  for (const input of form.querySelectorAll("input")) input.checked = values[input.name] === input.value;
}

function controls() {
  const ranks = RANKS.map((one) => [one, one === "2x2" ? t("mesh") : one]);
  const found = [
    controlOf(
      "ranks",
      [t("ranks")],
      radioGroup("ranks", ranks, state.ranks, (one) => choose({ ranks: one })),
    ),
  ];
  found.push(sbpControl("x"), sbpControl("w"));
  if (state.ranks !== "2x2") {
    const values = [["", t("leave")], ...Matmul.SBPS.map((sbp) => [sbp, sbp])];
    found.push(
      controlOf(
        "to",
        [t("convert")],
        radioGroup("to", values, state.to, (to) => choose({ to })),
      ),
    );
  }
  if (state.ranks === "2x2") found.splice(1, 0, meshPicture());
  const modes = ["eager", "graph"].map((one) => [one, one]);
  found.push(
    controlOf(
      "mode",
      [t("mode")],
      radioGroup("mode", modes, state.mode, (mode) => choose({ mode })),
    ),
  );
  return found;
}

// Which rank is where on the mesh.
function meshPicture() {
  const cells = [0, 1, 2, 3].map((rank) =>
    element("span", { class: "cell", style: `--fill: var(--tint${rank})` }, String(rank)),
  );
  const picture = element("div", { class: "mesh", role: "img", "aria-label": t("axis_help") }, ...cells);
  return element(
    "div",
    { class: "mesh-picture", title: t("axis_help") },
    element("span", { class: "across" }, `${t("on_axis", { axis: 1 })} →`),
    element("span", { class: "down" }, `${t("on_axis", { axis: 0 })} ↓`),
    picture,
  );
}

function drawPresets() {
  const buttons = Object.keys(PRESETS).map((name) =>
    element(
      "button",
      {
        type: "button",
        "data-preset": name,
        "aria-pressed": String(state.preset === name),
        onclick: () => choosePreset(name),
      },
      t(`preset_${name}`),
    ),
  );
  const focused = document.activeElement && document.activeElement.dataset.preset;
  find("presets").replaceChildren(...buttons);
  if (focused) find("presets").querySelector(`[data-preset=${focused}]`).focus();
  const preset = PRESETS[state.preset];
  const about = find("about");
  if (!preset) return about.replaceChildren();
  const links = preset.recipes.flatMap((path, index) => [
    index ? ", " : "",
    element("a", { href: `../recipes/${path}` }, path),
  ]);
  about.replaceChildren(
    element(
      "p",
      {},
      `${t(`about_${state.preset}`)} `,
      ...sentence("recipe", { link: element("span", {}, ...links) }),
      " ",
      ...stepLink(preset),
    ),
    ...(preset.second ? [pairButtons(preset)] : []),
  );
  return about;
}

function stepLink(preset) {
  const show = () => find("steps-section").scrollIntoView();
  return preset.step ? [element("button", { type: "button", class: "as-link", onclick: show }, t("in_time"))] : [];
}

function pairButtons(preset) {
  const buttons = [
    ["first_matmul", preset.state],
    ["second_matmul", preset.second],
  ].map(([key, one], index) =>
    element(
      "button",
      {
        type: "button",
        "data-step": index,
        "aria-pressed": String(state.x === one.x),
        onclick: () => choose(one, state.preset),
      },
      t(key),
    ),
  );
  return element("div", { class: "pair" }, ...buttons);
}

// ---- words about a run

function collectiveInWords(from, to, ranks) {
  const steps = Matmul.collectives(from, to);
  if (!steps.length) return t("nothing");
  const names = steps.map(({ axis, name }) =>
    ranks === "2x2" ? t("along_axis", { collective: t(name), axis }) : t(name),
  );
  return names.join(t("then"));
}

function summaryOf(run) {
  const { ranks, x, w } = state;
  const place =
    ranks === "2x2" ? t("sum_place_mesh") : ranks === "1" ? t("sum_place_one") : t("sum_place", { n: ranks });
  if (run.error !== undefined) {
    const error = element(
      "span",
      { class: "error" },
      ...sentence("sum_error", { version: records.oneflow, error: run.error }),
    );
    return [`${place}: x `, sbpMark(x), " @ w ", sbpMark(w), ". ", error];
  }
  const parts = { place, x: sbpMark(x), w: sbpMark(w), out: sbpMark(run.outSbp) };
  const found = [...sentence("sum_start", parts), space()];
  for (const { tensor, from, to } of run.moves) {
    const collective = element("span", { class: "moved" }, collectiveInWords(from, to, ranks));
    found.push(...sentence("sum_first", { tensor, from: sbpMark(from), to: sbpMark(to), collective }), space());
  }
  if (!run.moves.length && ranks !== "1") found.push(t("sum_direct"), space());
  if (run.change) {
    const { from, to, error } = run.change;
    const collective = element("span", { class: "moved" }, collectiveInWords(from, to, ranks));
    if (error !== undefined)
      found.push(element("span", { class: "error" }, t("sum_error", { version: records.oneflow, error })));
    else if (from === to) found.push(...sentence("sum_no_change", { to: sbpMark(to) }));
    else found.push(...sentence("sum_change", { to: sbpMark(to), collective }));
  }
  return found;
}

function whyOf(run) {
  if (run.error !== undefined) return "";
  if (state.ranks === "1") return t("why_1");
  const [x, w] = run.inputs.map(Matmul.axes);
  const reasons = x.map((one, axis) => t(`why_${short(one)}_${short(w[axis])}`));
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

// ---- drawing matrices

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
  const classes = ["cell", part ? "part" : "", attributes.class || "", value === 0 ? "zero" : ""]
    .filter(Boolean)
    .join(" ");
  const place = `grid-area: ${row + 1} / ${column + 1}; ${style}`;
  return element(
    "span",
    { ...attributes, class: classes, style: place, "data-of": of, "data-row": row, "data-column": column },
    String(value),
  );
}

function wholeMatrix(name, of, sbp, ranks, blocks, shape) {
  const value = blocks ? Matmul.whole(shape, sbp, ranks, blocks) : records.value[name];
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
  const terms = termsOf(sbp, ranks, blocks, shape, row, column).map((one) => one.value);
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
  cells.forEach((one) => one.setAttribute("aria-hidden", "true"));
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
  const made = [element("span", { class: "head" })];
  const isTensor = (column) => column.sbp !== undefined;
  const isArrows = (column) => column.arrows !== undefined;
  for (const column of columns) {
    if (isTensor(column))
      made.push(element("div", { class: "head" }, element("b", {}, column.name), " ", sbpMark(column.sbp)));
    else made.push(isArrows(column) ? element("span", { class: "head" }) : element("span", {}));
  }
  made.push(element("span", { class: "name" }, t("whole")));
  for (const column of columns) {
    if (isTensor(column))
      made.push(wholeMatrix(column.name, column.of, column.sbp, ranks, column.blocks, column.shape));
    else
      made.push(
        isArrows(column) ? arrowHead(column.arrows) : element("span", { class: "op", "aria-hidden": "true" }, column),
      );
  }
  made.push(...gapRow(columns, "whole-gap", "="));
  members.forEach((rank, index) => {
    made.push(element("span", { class: "name rank", style: `color: var(--rank${rank})` }, t("rank", { rank })));
    for (const column of columns) {
      if (isTensor(column))
        made.push(rankMatrix(column.name, column.of, column.sbp, ranks, column.blocks, column.shape, rank));
      else if (!isArrows(column)) made.push(element("span", { class: "op", "aria-hidden": "true" }, column));
      else if (index === 0) made.push(arrowsBeside(column.arrows, members.length, columns));
    }
    if (index < members.length - 1) made.push(...gapRow(columns, "row-gap", "+"));
  });
  const template = columns.map((column) => (isArrows(column) ? `${arrowWidth()}px` : "max-content")).join(" ");
  return element("div", { class: "grid", style: `grid-template-columns: max-content ${template}` }, ...made);
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
  const holder = element("div", { style: `grid-row: span ${2 * count - 1}; align-self: start` });
  holder.innerHTML = arrowsSvg(arrows, count, rowHeight, 12, arrowWidth());
  return holder;
}

// Lines from what ranks hold before, left, to what they hold after, right.
function arrowsSvg({ phases, words }, count, rowHeight, gap, width) {
  const height = count * rowHeight + (count - 1) * gap;
  const y = (rank) => rowHeight / 2 + rank * (rowHeight + gap);
  const stops = phases.map((_, index) => 8 + ((width - 16) * index) / phases.length).concat(width - 8);
  const parts = [];
  phases.forEach((pairs, phase) => {
    const [left, right] = [stops[phase], stops[phase + 1]];
    for (let rank = 0; rank < count; rank += 1) parts.push(`<path class="kept" d="M${left} ${y(rank)}H${right}"/>`);
    for (const [from, to] of pairs) parts.push(arrow(left + 5, y(from), right - 5, y(to)));
    if (phase) for (let rank = 0; rank < count; rank += 1) parts.push(`<circle cx="${left}" cy="${y(rank)}" r="3"/>`);
  });
  const label = words.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  return `<svg class="arrows" role="img" aria-label="${label}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">${parts.join("")}</svg>`;
}

function arrow(x1, y1, x2, y2) {
  const bend = (x2 - x1) / 2;
  const angle = Math.atan2(y2 - y1, bend * 1.2);
  const tip = [
    [0, 0],
    [-7, 3.2],
    [-7, -3.2],
  ].map(
    ([x, y]) =>
      `${(x2 + x * Math.cos(angle) - y * Math.sin(angle)).toFixed(1)} ${(y2 + x * Math.sin(angle) + y * Math.cos(angle)).toFixed(1)}`,
  );
  const [bx, by] = [x2 - 5 * Math.cos(angle), y2 - 5 * Math.sin(angle)];
  return `<path d="M${x1} ${y1}L${bx.toFixed(1)} ${by.toFixed(1)}"/><path class="tip" d="M${tip.join("L")}z"/>`;
}

// Which rank sends to which, in one phase or, for an all-reduce, in two.
function arrowsOf(from, to, ranks, sent) {
  const steps = Matmul.collectives(from, to);
  const members = Matmul.members(ranks);
  const silent = !sent || Math.max(...sent) <= MESSAGES; // a local fill can send after all: then all its axes count
  const moving = steps.filter(({ name }) => !name.startsWith("local") || !silent);
  const axes = moving.map(({ axis }) => axis);
  const along = (one, other) =>
    Matmul.coordinates(ranks, one).every(
      (place, axis) => axes.includes(axis) || place === Matmul.coordinates(ranks, other)[axis],
    );
  const sends = (rank) => !sent || sent[rank] > MESSAGES;
  const pairs = members.flatMap((one) =>
    members.filter((other) => other !== one && along(one, other) && sends(one)).map((other) => [one, other]),
  );
  const twice = moving.length === 1 && moving[0].name === "all-reduce" && pairs.length;
  const named = steps.map(({ axis, name }) => (ranks === "2x2" ? { name, axis } : { name }));
  const words = collectiveInWords(from, to, ranks);
  return { words, steps: named, quiet: !pairs.length, phases: twice ? [pairs, pairs] : [pairs] };
}

// What a move sends of the matrices that are shown, in a few words.
function sizeInWords(move, sent) {
  const found = formulaFor([move], withOut(records.shape));
  if (found === null) return "";
  if (found.total === 0) return sent && Math.max(...sent) > MESSAGES ? t("unexpected") : t("nothing_sent");
  const { byRank, total } = found;
  return byRank && byRank.every((one) => one === byRank[0])
    ? t("each_sends", { bytes: bytes(byRank[0]) })
    : t("all_send", { bytes: bytes(total) });
}

function tensorColumn(name, sbp, blocks) {
  return { name, of: name, sbp, blocks, shape: records.shape[name] };
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
  return [records.shape.x[0], records.shape.w[1]];
}

function changeStage(run) {
  const { from, to, out, sent, error } = run.change;
  const title = element("h3", {}, t("stage_change", { from: present(from), to: present(to) }));
  if (error !== undefined)
    return element("div", { class: "stage", "data-stage": "change" }, title, element("p", { class: "refused" }, error));
  const arrows = { ...arrowsOf(from, to, state.ranks, sent), size: sizeInWords(run.change, sent) };
  const column = { name: "out", of: "out-to", sbp: to, blocks: out, shape: outShape() };
  return element(
    "div",
    { class: "stage", "data-stage": "change" },
    title,
    stageGrid([{ arrows }, column], state.ranks),
  );
}

function drawStages(run) {
  if (run.error !== undefined) {
    const held = stageGrid([tensorColumn("x", state.x, run.x), "@", tensorColumn("w", state.w, run.w)], state.ranks);
    const stage = element("div", { class: "stage", "data-stage": "refused" }, held);
    const box = element("p", { class: "refused" }, t("sum_error", { version: records.oneflow, error: run.error }));
    return find("stages").replaceChildren(stage, box);
  }
  const stages = run.moves.map((move) => moveStage(run, move));
  stages.push(multiplyStage(run));
  if (run.change && run.change.from !== run.change.to) stages.push(changeStage(run));
  return find("stages").replaceChildren(...stages);
}

// ---- the number that is pointed at

function productsOf(run, rank, row, column) {
  const [x, w] = run.inputs.map((sbp, index) => {
    const name = index ? "w" : "x";
    if (!run.factors[index]) return null;
    const [[top], [left]] = Matmul.block(records.shape[name], sbp, state.ranks, rank);
    return { held: run.factors[index][rank], top, left };
  });
  if (!x || !w) return "";
  const left = x.held[row - x.top];
  return left.map((one, k) => `${one}·${w.held[k][column - w.left]}`).join(" + ");
}

function drawReadout(run) {
  const readout = find("readout");
  if (run.error !== undefined) return readout.replaceChildren();
  const [row, column] = seen || [0, 0];
  const shape = outShape();
  const terms = termsOf(run.outSbp, state.ranks, run.out, shape, row, column);
  const value = terms.reduce((sum, one) => sum + one.value, 0);
  const sum = terms.length > 1 ? ` = ${terms.map((one) => one.value).join(" + ")}` : "";
  const lines = terms.map(({ rank, value: term }) => {
    const swatch = element("span", { class: "swatch", style: `--fill: var(--rank${rank})` });
    return element("li", {}, swatch, `${t("rank", { rank })}: ${productsOf(run, rank, row, column)} = ${term}`);
  });
  const copies = Matmul.holders(shape, run.outSbp, state.ranks, row, column).filter(
    (rank) => !terms.some((one) => one.rank === rank),
  );
  const title = element("span", { class: "made" }, `out[${row}, ${column}] = ${value}${sum}`);
  const same = copies.length ? element("li", {}, t("same_on", { ranks: ranksInWords(copies) })) : null;
  const hint = seen ? null : element("span", { class: "hint" }, `  ${t("hint")}`);
  readout.replaceChildren(title, ...(hint ? [" ", hint] : []), element("ol", {}, ...lines, ...(same ? [same] : [])));
  return readout;
}

function point(row, column) {
  seen = [row, column];
  for (const one of find("stages").querySelectorAll(".cell")) {
    const isOut = one.dataset.of.startsWith("out");
    const here = [Number(one.dataset.row), Number(one.dataset.column)];
    one.classList.toggle("seen", isOut && here[0] === row && here[1] === column);
    const inMultiply = one.closest("[data-stage]").dataset.stage === "multiply";
    const used = (one.dataset.of === "x" && here[0] === row) || (one.dataset.of === "w" && here[1] === column);
    one.classList.toggle("used", inMultiply && used);
  }
  drawReadout(Matmul.run(records, state));
}

function listenToStages() {
  const stages = find("stages");
  const pointAt = (event) => {
    const one = event.target.closest(".cell[data-of^=out]");
    if (one && state.preset !== "pipeline") point(Number(one.dataset.row), Number(one.dataset.column));
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

// ---- below: bytes, modes, the program

function drawLegend() {
  const ranks = Matmul.members(state.ranks);
  const items = [
    ["legend_S0", look([0], [])],
    ["legend_B", look(ranks.length > 1 ? ranks : [0], [])],
    ["legend_P", look(ranks, ranks.length > 1 ? ranks : [0, 0])],
  ];
  const splits = [...ranks].map((rank) => element("span", { class: "swatch", style: `--fill: var(--tint${rank})` }));
  find("legend").replaceChildren(
    element("li", {}, ...splits, element("span", {}, `${t("legend_S0")}; ${t("legend_S1")}`)),
    ...items
      .slice(1)
      .map(([key, { part, style }]) =>
        element(
          "li",
          {},
          element("span", { class: part ? "swatch part" : "swatch", style }),
          element("span", {}, t(key)),
        ),
      ),
    ...(state.ranks === "2x2" ? [element("li", {}, element("span", {}, t("axis_help")))] : []),
  );
}

// What a run sends, before the matmul and after it: {title, sent, of: its moves, large: those where it is measured}.
function movesOf(run) {
  const found = [];
  if (run.moves.length || run.large) {
    const title = run.moves.map(({ tensor, from, to }) => `${tensor} ${present(from)} → ${present(to)}`).join(", ");
    found.push({ title, sent: run.sent, of: run.moves, large: run.large ? run.large.moves : run.moves });
  }
  if (run.change && run.change.error === undefined && run.change.from !== run.change.to) {
    const { from, to, sent } = run.change;
    const of = [{ tensor: "out", from, to }];
    found.push({ title: `out ${present(from)} → ${present(to)}`, sent, of, large: of });
  }
  return found;
}

// By formula, for matrices of these shapes: {total, byRank} in bytes, null where there is none.
function formulaFor(moves, shapes) {
  const parts = moves.map(({ tensor, from, to }) => Matmul.formula(shapes[tensor], from, to, state.ranks));
  if (parts.includes(null)) return null;
  const total = parts.reduce((sum, one) => sum + one.total, 0) * Matmul.ITEM;
  const split = parts.every((one) => one.byRank);
  const byRank = split
    ? Matmul.members(state.ranks).map((rank) => parts.reduce((sum, one) => sum + one.byRank[rank], 0) * Matmul.ITEM)
    : null;
  return { total, byRank };
}

function withOut(shapes) {
  return { ...shapes, out: [shapes.x[0], shapes.w[1]] };
}

function bytesTable({ title, sent, of, large: moves }) {
  const large = withOut(records.measured_shape);
  const members = Matmul.members(state.ranks);
  const row = (label, found, ratio) => {
    const numbers = members.map((rank) => element("td", {}, found && found.byRank ? bytes(found.byRank[rank]) : "–"));
    const total = element("td", {}, found ? bytes(found.total) : t("no_formula"), ...(ratio ? [" ", ratio] : []));
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
        row(t("formula_shown", { shape: shown(records.shape.x) }), formulaFor(of, withOut(records.shape))),
        row(t("formula_large", { shape: shown(large.x) }), byFormula),
        row(t("measured", { shape: shown(large.x) }), measured, mark),
      ),
    ),
  );
}

function drawBytes(run) {
  const title = element("h3", {}, t("bytes_title"));
  if (run.error !== undefined) return find("bytes").replaceChildren(title, ...modesNote());
  const moves = movesOf(run);
  const note = element(
    "p",
    { class: "note" },
    t("bytes_note"),
    " ",
    ...sentence("bytes_why", { link: element("a", { href: "sbp-atlas.md" }, t("atlas_link")) }),
  );
  const tables = moves.length ? moves.map(bytesTable) : [element("p", {}, t("bytes_nothing_all"))];
  if (run.large) tables.push(largeNote(run.large));
  return find("bytes").replaceChildren(title, ...tables, ...(moves.length ? [note] : []), ...modesNote());
}

// OneFlow's choice depends on the sizes.
function largeNote({ outSbp, moves }) {
  const shape = shown(records.measured_shape.x);
  const moved =
    moves.map(({ tensor, from, to }) => `${tensor} ${present(from)} → ${present(to)}`).join(", ") || t("nothing_moved");
  return element("p", { class: "note", id: "large" }, t("large", { shape, moved, out: present(outSbp) }));
}

function modesNote() {
  const found = Matmul.differences(records, state);
  if (!found.length) return [element("p", { class: "note", id: "modes" }, t("modes_same"))];
  const said = (value) => (value === undefined ? t("runs") : Array.isArray(value) ? present(value.join(" @ ")) : value);
  const lines = found.map(({ what, eager, graph }) => {
    const words = { to: state.to, out: Matmul.run(records, state).outSbp, shape: shown(records.measured_shape.x) };
    const isBytes = what.endsWith("sent");
    words.eager = isBytes ? bytes(eager) : said(eager);
    words.graph = isBytes ? bytes(graph) : said(graph);
    return element("li", {}, t(`differ_${what.replace(" ", "_")}`, words));
  });
  return [element("p", { class: "note", id: "modes" }, t("modes_differ")), element("ul", { class: "note" }, ...lines)];
}

function drawProgram(text, count) {
  const button = element("button", { type: "button", id: "copy", onclick: () => copy(button, text) }, t("copy"));
  const command = `./launch.sh -n ${count} mine.py`;
  find("program").replaceChildren(
    element("h3", {}, t("code_title"), button),
    element("pre", { tabindex: "0", role: "region", "aria-label": t("code_title"), id: "code" }, text),
    element("p", { class: "note" }, `${t("code_run")} `, element("code", {}, command)),
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

// ---- the pipeline: other placements instead of other SBPs

// A row of matrices, each whole on one rank; value: null where only the shape is shown.
function placedStage(title, rank, columns) {
  const heads = columns.map((one) =>
    one.name
      ? element(
          "div",
          { class: "head" },
          element("b", {}, one.name),
          " ",
          element("span", { class: "sbp" }, `[${rank}]`),
        )
      : element("span", {}),
  );
  const cells = columns.map((one) => {
    if (!one.name) return element("span", { class: "op", "aria-hidden": "true" }, one);
    const style = `--fill: var(--tint${rank})`;
    const numbers = records.value.x.flatMap((row, i) =>
      row.map((_, j) => cell(one.name, i, j, one.value ? one.value[i][j] : "", { style, "aria-hidden": "true" })),
    );
    const values = one.value ? inText(one.value) : shown(records.shape.x);
    const label = t("each_holds", { rank: t("rank", { rank }), block: t("all_of"), tensor: one.name, values });
    return frame(records.shape.x, { class: "matrix", role: "img", "aria-label": label }, ...numbers);
  });
  const name = element("span", { class: "name rank", style: `color: var(--rank${rank})` }, t("rank", { rank }));
  const style = `grid-template-columns: repeat(${columns.length + 1}, max-content)`;
  const grid = element("div", { class: "grid", style }, element("span", { class: "head" }), ...heads, name, ...cells);
  return element("div", { class: "stage", "data-stage": `rank-${rank}` }, element("h3", {}, title), grid);
}

function drawPipeline() {
  const alone = Matmul.run(records, { ranks: "1", x: "B", w: "B", to: "", mode: "eager" });
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
    column("w1", null),
    "=",
    column("out", null),
  ]);
  const arrow = element(
    "div",
    { class: "stage send", "data-stage": "send" },
    arrowHead({ steps: [{ name: "pipeline_send" }], size: bytes(size) }),
  );
  arrow.insertAdjacentHTML("beforeend", sendSvg(t("pipeline_send")));
  find("summary").replaceChildren(t("pipeline_summary", { bytes: bytes(size) }));
  find("why").textContent = t("pipeline_why");
  find("stages").replaceChildren(first, arrow, second);
  find("readout").replaceChildren();
  find("legend").replaceChildren();
  const atlas = element("a", { href: "sbp-atlas.md#0--1" }, t("atlas_link"));
  find("bytes").replaceChildren(
    element("h3", {}, t("bytes_title")),
    element("p", {}, ...sentence("pipeline_bytes", { bytes: bytes(size), link: atlas })),
  );
  drawProgram(Matmul.pipelineCode(records), 2);
}

function sendSvg(label) {
  return `<svg class="arrows" role="img" aria-label="${label}" width="64" height="14" viewBox="0 0 64 14">${arrow(0, 7, 64, 7)}</svg>`;
}

// ---- all of it

function drawMatmul() {
  const run = Matmul.run(records, state);
  find("summary").replaceChildren(...summaryOf(run));
  find("why").textContent = whyOf(run);
  drawStages(run);
  drawReadout(run);
  drawBytes(run);
  drawProgram(Matmul.code(records, state), Matmul.count(state.ranks));
}

let timeline = null;

function drawSteps() {
  if (timeline) {
    timeline.update({ lang, state: stepState });
    return;
  }
  timeline = Timeline.mount(find("steps"), {
    lang,
    state: stepState,
    onChange(changed) {
      stepState = { ...changed };
      writeAddress();
    },
  });
}

function drawWords() {
  document.documentElement.lang = lang === "zh" ? "zh-CN" : "en";
  document.title = t("title");
  for (const one of document.querySelectorAll("[data-t]")) one.textContent = t(one.dataset.t);
  find("intro").textContent = t("intro", { version: records.oneflow });
  find("language").textContent = t("other_language");
  find("language").lang = lang === "zh" ? "en" : "zh-CN";
  const values = { version: records.oneflow, shape: shown(records.shape.x), large: shown(records.measured_shape.x) };
  const foot = t("foot", values)
    .split("`")
    .map((part, index) => (index % 2 ? element("code", {}, part) : part));
  const link = (key, href) => element("a", { href }, t(key));
  const recipes = lang === "zh" ? "../recipes/README.zh-CN.md" : "../recipes/README.md";
  const links = {
    recipes: link("recipes_link", recipes),
    atlas: link("atlas_link", "sbp-atlas.md"),
    pages: link("pages_link", "README.md"),
  };
  find("foot").replaceChildren(element("p", {}, ...foot), element("p", {}, ...sentence("foot_links", links)));
}

function draw() {
  drawPresets();
  drawControls();
  if (state.preset === "pipeline") {
    drawPipeline();
  } else {
    drawLegend();
    drawMatmul();
  }
}

function drawAll() {
  drawWords();
  draw();
  drawSteps();
}

function start() {
  readAddress(window.location.hash);
  listenToStages();
  drawAll();
  find("language").addEventListener("click", () => {
    lang = lang === "zh" ? "en" : "zh";
    langChosen = true;
    drawAll();
    writeAddress();
  });
  window.addEventListener("hashchange", () => {
    readAddress(window.location.hash);
    seen = null;
    drawAll();
  });
  narrow.addEventListener("change", draw);
}

start();
