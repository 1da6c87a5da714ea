// The page: the language, the address, the presets and controls; its state is what the other files draw.
"use strict";

const RANKS = ["1", "2", "3", "4", "2x2"];
const FIRST = { ranks: "2", x: "S(1)", w: "S(0)", to: "B", mode: "eager", preset: "row" };
const PRESETS = {
  data: { state: { ranks: "2", x: "S(0)", w: "B", to: "" }, recipes: ["data_parallel.py"], step: { strategy: "data" } },
  column: {
    state: { ranks: "2", x: "B", w: "S(1)", to: "" },
    recipes: ["model_parallel.py"],
    step: { strategy: "tensor" },
  },
  row: {
    state: { ranks: "2", x: "S(1)", w: "S(0)", to: "B" },
    recipes: ["row_parallel.py"],
    step: { strategy: "tensor" },
  },
  megatron: {
    state: { ranks: "2", x: "B", w: "S(1)", to: "" },
    second: { ranks: "2", x: "S(1)", w: "S(0)", to: "B" },
    recipes: ["training/train_tensor_parallel.py"],
    step: { strategy: "tensor" },
  },
  pipeline: {
    state: {},
    recipes: ["pipeline_parallel.py", "pipelines/train_pipeline.py", "pipelines/pipeline_schedules.py"],
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

const present = (sbp) => sbp.replace(",", ", ");
const shown = (shape) => shape.join("\u00a0×\u00a0");

const t = (key, values) => textOf(Words[lang], key, values);

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

function isState(view) {
  const axes = view.ranks === "2x2" ? 2 : 1;
  const isSbp = (sbp) => Matmul.axes(sbp).length === axes && Matmul.axes(sbp).every((one) => Matmul.SBPS.includes(one));
  return (
    RANKS.includes(view.ranks) &&
    isSbp(view.x) &&
    isSbp(view.w) &&
    (view.to === "" || (axes === 1 && isSbp(view.to))) &&
    ["eager", "graph"].includes(view.mode) &&
    (view.preset === "" || Object.keys(PRESETS).includes(view.preset))
  );
}

// Sets the state from an address; what is not a view becomes the first view.
function readAddress(text) {
  const values = {};
  for (const part of text.replace(/^#/, "").split("&")) {
    const [name, value = ""] = part.split("=");
    try {
      values[name] = decodeURIComponent(value);
    } catch {
      values[name] = "";
    }
  }
  const view = {
    ranks: values.ranks ?? "",
    x: long(values.x ?? ""),
    w: long(values.w ?? ""),
    to: long(values.to ?? ""),
    mode: values.mode ?? "eager",
    preset: values.preset ?? "",
  };
  state = isState(view) ? view : { ...FIRST };
  langChosen = Object.keys(Words).includes(values.lang);
  lang = langChosen ? values.lang : navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
  const steps = Object.entries(values).filter(([name]) => name.startsWith(STEP));
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

// The preset whose SBPs the state has, on as many axes; "" if there is none.
function matching() {
  const isLike = ([name, { state: preset }]) =>
    name !== "megatron" &&
    ["x", "w", "to"].every((key) => state[key] === preset[key]) &&
    (state.ranks === "2x2") === (preset.ranks === "2x2");
  return (Object.entries(PRESETS).find(isLike) ?? [""])[0];
}

function choose(changes, preset = "") {
  state = { ...state, ...changes, preset };
  if (changes.ranks !== undefined && preset === "") {
    for (const name of ["x", "w"]) {
      const [first, second = "B"] = Matmul.axes(state[name]);
      state[name] = state.ranks === "2x2" ? `${first},${second}` : first;
    }
    if (state.ranks === "2x2") state.to = "";
  }
  state.preset = preset || matching();
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
    const other = () => Matmul.axes(state[name])[1 - axis];
    const set = (sbp) => choose({ [name]: (axis ? [other(), sbp] : [sbp, other()]).join(",") });
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
  const ranks = RANKS.map((name) => [name, name === "2x2" ? t("mesh") : name]);
  const sbps = Matmul.SBPS.map((sbp) => [sbp, sbp]);
  const modes = ["eager", "graph"].map((mode) => [mode, mode]);
  const choice = (name, legend, values) =>
    controlOf(name, [legend], radioGroup(name, values, state[name], (value) => choose({ [name]: value })));
  return [
    choice("ranks", t("ranks"), ranks),
    ...(state.ranks === "2x2" ? [meshPicture()] : []),
    sbpControl("x"),
    sbpControl("w"),
    ...(state.ranks === "2x2" ? [] : [choice("to", t("convert"), [["", t("leave")], ...sbps])]),
    choice("mode", t("mode"), modes),
  ];
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
    element("a", { href: `../../recipes/${path}` }, path),
  ]);
  about.replaceChildren(
    element(
      "p",
      {},
      t(`about_${state.preset}`),
      space(),
      ...sentence("recipe", { link: element("span", {}, ...links) }),
      space(),
      ...stepLink(preset),
    ),
    ...(preset.second ? [pairButtons(preset)] : []),
  );
  return about;
}

function stepLink(preset) {
  const show = () => {
    find("steps-section").scrollIntoView();
    find("steps-title").focus({ preventScroll: true });
  };
  return preset.step ? [element("button", { type: "button", class: "as-link", onclick: show }, t("in_time"))] : [];
}

function pairButtons(preset) {
  const buttons = [
    ["first_matmul", preset.state],
    ["second_matmul", preset.second],
  ].map(([key, layout], index) =>
    element(
      "button",
      {
        type: "button",
        "data-step": index,
        "aria-pressed": String(state.x === layout.x),
        onclick: () => {
          choose(layout, state.preset);
          document.querySelector(`[data-step="${index}"]`).focus(); // of the buttons that are drawn now
        },
      },
      t(key),
    ),
  );
  return element("div", { class: "pair" }, ...buttons);
}

// ---- all of it

function drawMatmul() {
  const run = Matmul.run(state);
  find("summary").replaceChildren(...summaryOf(run));
  find("why").textContent = whyOf(run);
  drawStages(run);
  drawReadout(run);
  drawBytes(run);
  drawProgram(Matmul.code(state), Matmul.count(state.ranks));
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
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  find("intro").textContent = t("intro", { version: RUNS.oneflow });
  find("language").textContent = t("other_language");
  find("language").lang = lang === "zh" ? "en" : "zh-CN";
  const values = { version: RUNS.oneflow, shape: shown(RUNS.shape.x), large: shown(RUNS.measured_shape.x) };
  const foot = t("foot", values)
    .split("`")
    .map((part, index) => (index % 2 ? element("code", {}, part) : part));
  const link = (key, href) => element("a", { href }, t(key));
  const recipes = lang === "zh" ? "../../recipes/README.zh-CN.md" : "../../recipes/README.md";
  const links = {
    recipes: link("recipes_link", recipes),
    atlas: link("atlas_link", "../sbp-atlas.md"),
    pages: link("pages_link", "../README.md"),
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
