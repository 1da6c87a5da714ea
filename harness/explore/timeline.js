// Draws a training step: controls, a lane for each rank, memory, bytes, and all strategies beside each other.

const Timeline = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const KINDS = ["forward", "backward", "move", "update", "idle"];
  const PARTS = ["weights", "gradients", "optimizer", "activations", "gathered"];
  const LANE = { height: 26, gap: 8, label: 46, axis: 22 };
  const LETTER = 6.6; // about how wide a letter of a block is
  const SHORT = { "all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", send: "→" };

  function put(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }
  const html = (tag, attributes = {}, ...children) => put(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => put(document.createElementNS(SVG, tag), attributes, children);

  // Three figures: 0.123, 1.23, 12.3, 123.
  function figures(value) {
    if (value === 0) return "0";
    return String(value >= 100 ? Math.round(value) : Number(value.toPrecision(3)));
  }
  function bytesText(bytes) {
    if (bytes === 0) return "0";
    return bytes >= 999.5e6 ? `${figures(bytes / 1e9)} GB` : `${figures(bytes / 1e6)} MB`;
  }
  const secondsText = (s) => (s >= 0.9995 ? `${figures(s)} s` : `${figures(s * 1e3)} ms`);
  function percent(part) {
    if (part > 0 && part < 0.005) return "< 1 %";
    return `${Math.round(part * 100)} %`;
  }

  function speaker(lang) {
    const words = StepWords[lang] || StepWords.en;
    return (key, values = {}) => {
      const text = words[key];
      if (text === undefined) throw new Error(`no words for "${key}"`);
      return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
    };
  }

  // Where the ticks of an axis are: at most `most`, at round numbers.
  function ticks(end, most) {
    const rough = end / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => i * step);
  }

  // What a block is, in words.
  function blockText(say, block) {
    const micro = block.micro ? " micro" : "";
    const values = { ...block };
    if (block.kind !== "move") {
      const named = block.kind === "forward" || block.kind === "backward";
      return say(`block ${block.kind}${named ? micro : ""}`, values);
    }
    values.of = say(block.of);
    values.bytes = bytesText(block.bytes);
    values.axis = axisText(say, block.axis);
    return say(block.name === "send" ? "block send" : "block move", values);
  }

  const axisText = (say, axis) => (axis === null || axis === undefined ? "" : say("axis", { axis }));

  // What stands in a block, from the left or from below: its name or a short one, or its number, if it has room for it.
  function blockLabel(say, block, width, count) {
    if (block.kind === "idle") return null;
    const texts = { move: [block.name, SHORT[block.name]], update: [say("update"), "U"] }[block.kind];
    const letters = texts ? 0 : String(count).length; // all numbers or none
    const found = texts || [String(block.micro || block.layer)];
    const text = found.find((one) => Math.max(one.length, letters) * LETTER + 2 <= width);
    if (text) return { text, up: false };
    return block.kind === "move" && width >= 10 ? { text: SHORT[block.name], up: true } : null;
  }

  function hatching() {
    const line = svg("path", { d: "M0 6L6 0", class: "steps-hatch" });
    const size = { id: "steps-hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse" };
    return svg("defs", {}, svg("pattern", size, line));
  }

  function drawBlock(say, block, rank, count, { x, y, width }) {
    const drawn = Math.max(width, 0.5);
    const edge = drawn > 3 ? 0.5 : 0;
    const shape = { x: x + edge, y, width: drawn - 2 * edge, height: LANE.height, class: `steps-${block.kind}` };
    if (block.kind === "idle") shape.fill = "url(#steps-hatching)";
    const title = svg("title", {});
    title.textContent = `${say("rank k", { rank })}: ${blockText(say, block)}, ${secondsText(block.end - block.start)}`;
    const group = svg("g", { "data-kind": block.kind, "data-rank": rank }, title, svg("rect", shape));
    const label = blockLabel(say, block, width, count);
    if (label) {
      const at = `translate(${x + width / 2} ${y + LANE.height / 2})${label.up ? " rotate(-90)" : ""}`;
      group.append(svg("text", { transform: at, y: 4, class: "steps-letter" }, label.text));
    }
    return group;
  }

  function drawLanes(say, step, width, summary) {
    const scale = (width - LANE.label - 8) / step.seconds;
    const down = (rank) => rank * (LANE.height + LANE.gap);
    const bottom = down(step.lanes.length);
    const height = bottom + LANE.axis;
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    const picture = svg("svg", { ...size, role: "img", "aria-label": summary, class: "steps-lanes" }, hatching());
    for (const time of ticks(step.seconds * 1e3, width < 600 ? 4 : 8)) {
      const x = LANE.label + (time / 1e3) * scale;
      picture.append(svg("line", { x1: x, x2: x, y1: 0, y2: bottom, class: "steps-tick" }));
      picture.append(svg("text", { x, y: bottom + 14, class: "steps-axis" }, figures(time)));
    }
    const count = Math.max(...step.lanes[0].map((block) => block.micro || block.layer || 0));
    step.lanes.forEach((blocks, rank) => {
      const y = down(rank);
      picture.append(svg("text", { x: 0, y: y + LANE.height / 2 + 4, class: "steps-rank" }, say("rank k", { rank })));
      for (const block of blocks) {
        const x = LANE.label + block.start * scale;
        picture.append(drawBlock(say, block, rank, count, { x, y, width: (block.end - block.start) * scale }));
      }
    });
    return picture;
  }

  function drawMemoryBar(say, parts, name, largest, width, y) {
    const room = width - LANE.label * 2 - 70;
    const bar = svg("g", {});
    let x = LANE.label * 2;
    const title = svg("title", {});
    const named = PARTS.filter((part) => parts[part]).map((part) => `${say(part)} ${bytesText(parts[part])}`);
    title.textContent = `${name}: ${named.join(", ")}`;
    bar.append(title, svg("text", { x: 0, y: y + 13, class: "steps-rank" }, name));
    for (const part of PARTS.filter((one) => parts[one])) {
      const length = (parts[part] / largest) * room;
      bar.append(svg("rect", { x, y, width: Math.max(length - 0.5, 0.5), height: 18, class: `steps-${part}` }));
      x += length;
    }
    bar.append(svg("text", { x: x + 6, y: y + 13, class: "steps-rank" }, bytesText(Steps.total(parts))));
    return bar;
  }

  function drawMemory(say, step, width, summary) {
    const bars = step.lanes.map((_, rank) => [step.memory, say("rank k", { rank })]);
    bars.push([step.memoryAlone, say("alone")]);
    const largest = Math.max(...bars.map(([parts]) => Steps.total(parts)));
    const height = bars.length * 24 + 8;
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    const picture = svg("svg", { ...size, role: "img", "aria-label": summary, class: "steps-memory" });
    bars.forEach(([parts, name], index) => {
      const apart = index === step.lanes.length ? 8 : 0; // the last is another machine
      picture.append(drawMemoryBar(say, parts, name, largest, width, index * 24 + apart));
    });
    return picture;
  }

  function legend(entries) {
    const swatch = (name) => html("span", { class: `steps-swatch steps-${name}` });
    const items = entries.map(([name, text]) => html("li", {}, swatch(name), text));
    return html("ul", { class: "steps-legend" }, ...items);
  }

  // Such as "communication: all-gather (AG), reduce-scatter (RS)".
  function legendOfLanes(say, step) {
    const names = [...new Set(step.collectives.map((one) => one.name))].map((name) => `${name} (${SHORT[name]})`);
    const kinds = KINDS.filter((kind) => step.shares[kind] > 0);
    const text = (kind) => (kind === "move" ? say("moves", { names: names.join(", ") }) : say(kind));
    return legend(kinds.map((kind) => [kind, text(kind)]));
  }

  function table(heads, rows, name) {
    const head = html("tr", {}, ...heads.map((text) => html("th", { scope: "col" }, text)));
    const body = rows.map(({ cells, chosen }) => {
      const [first, ...others] = cells;
      const row = [html("th", { scope: "row" }, first), ...others.map((cell) => html("td", {}, cell))];
      return html("tr", { class: chosen ? "steps-chosen" : null, "aria-current": chosen ? "true" : null }, ...row);
    });
    const inner = html("table", { "aria-label": name }, html("thead", {}, head), html("tbody", {}, ...body));
    return html("div", { class: "steps-scroll", role: "region", "aria-label": name, tabindex: "0" }, inner);
  }

  function memoryTable(say, step) {
    const parts = PARTS.filter((part) => step.memory[part]);
    const rows = parts.map((part) => ({
      cells: [say(part), bytesText(step.memory[part]), bytesText(step.memoryAlone[part])],
    }));
    const sums = [step.memory, step.memoryAlone].map((one) => bytesText(Steps.total(one)));
    rows.push({ cells: [say("sum"), ...sums] });
    return table([say("part"), say("a rank"), say("alone")], rows, say("memory"));
  }

  // Such as "2 (n-1)/n x 8 x 11.3 MB, n = 4".
  function formulaText(one) {
    const n = one.axis === null ? "n" : "dt"[one.axis];
    const factor = { "all-reduce": `2 (${n}-1)/${n} × `, send: "" }[one.name] ?? `(${n}-1)/${n} × `;
    const end = one.name === "send" ? "" : `, ${n} = ${one.among}`;
    return `${factor}${one.times} × ${bytesText(one.whole)}${end}`;
  }

  function sentTable(say, step) {
    const rows = step.collectives.map((one) => {
      const values = { name: one.name, of: say(one.of), axis: axisText(say, one.axis), way: say(`way ${one.when}`) };
      const formula = html("span", { class: "steps-wrap" }, formulaText(one));
      return { cells: [say("of", values), formula, bytesText(one.bytes)] };
    });
    rows.push({ cells: [say("sum"), "", bytesText(Math.max(...step.sent))] });
    return table([say("collective"), say("formula"), say("a rank")], rows, say("sends"));
  }

  function compareTable(say, state) {
    const all = Steps.compare(state);
    const times = all.filter((one) => one.step).map((one) => one.step.seconds);
    const [fastest, slowest] = [Math.min(...times), Math.max(...times)];
    const rows = all.map(({ strategy, step }) => {
      const chosen = strategy === state.strategy;
      if (!step) return { cells: [say(strategy), say("not on", { ranks: state.ranks }), "", "", ""], chosen };
      const bar = html("span", { class: "steps-bar", style: `width: ${(step.seconds / slowest) * 100}%` });
      const best = state.ranks > 1 && step.seconds <= fastest * 1.0001;
      const text = `${secondsText(step.seconds)}${best ? ` · ${say("fastest")}` : ""}`;
      const time = html("span", { class: "steps-time" }, html("span", {}, text), bar);
      const sizes = [Math.max(...step.sent), Steps.total(step.memory)].map(bytesText);
      return { cells: [say(strategy), time, ...sizes, percent(step.shares.idle)], chosen };
    });
    const heads = [say("strategy"), say("a step"), say("sends at most"), say("holds"), say("idle share")];
    return table(heads, rows, say("compare"));
  }

  function summaryText(say, state, step) {
    const { forward, backward, move, update, idle } = step.shares;
    const shares = { compute: forward + backward, move, update, idle };
    for (const [name, share] of Object.entries(shares)) shares[name] = percent(share);
    const most = bytesText(Math.max(...step.sent));
    const sent = new Set(step.sent).size > 1 ? say("up to", { most }) : most;
    const sizes = { memory: bytesText(Steps.total(step.memory)), sent };
    const gap = say("sum") === "sum" ? " " : ""; // Chinese sentences have none between them
    const parts = `${say("summary shares", shares)}${gap}${say("summary sizes", sizes)}`;
    const seconds = secondsText(step.seconds);
    if (state.ranks === 1) return say("summary of one", { seconds, parts });
    return say("summary", { seconds, times: figures(step.secondsAlone / step.seconds), parts });
  }

  function aboutText(say, state) {
    const { data, tensor } = Steps.mesh(state);
    const stage = Steps.MODEL.layers / state.ranks;
    return say(`about ${state.strategy}`, { data, tensor, stage, layers: Steps.MODEL.layers });
  }

  function idleText(say, state, step) {
    if (state.strategy !== "pipeline" || state.ranks === 1) return say("idle none");
    const { ranks, micro } = state;
    const formula = percent(step.idleFormula);
    const values = { ranks, micro, stages: ranks - 1, both: micro + ranks - 1, formula };
    return say("idle formula", { ...values, share: percent(step.shares.idle) });
  }

  function blockList(say, step, pipeline) {
    const lanes = pipeline ? step.lanes : step.lanes.slice(0, 1); // elsewhere all ranks do the same
    return lanes.map((blocks, rank) => {
      const name = pipeline ? say("rank k", { rank }) : say("all ranks");
      const texts = blocks.map((one) => `${blockText(say, one)}: ${secondsText(one.end - one.start)}`);
      const entries = texts.map((text) => html("li", {}, text));
      return html("section", {}, html("h4", {}, name), html("ol", {}, ...entries));
    });
  }

  // One section on the page. The inputs stay while all else is drawn again, so that none loses the focus.
  class View {
    constructor(element, { lang, state, onChange }) {
      this.element = element;
      this.state = Steps.settle(state);
      this.onChange = onChange || (() => {});
      this.width = 0;
      this.speak(lang);
      if (typeof ResizeObserver !== "undefined") {
        this.observer = new ResizeObserver(() => this.resized());
        this.observer.observe(element);
      }
    }

    speak(lang) {
      this.lang = lang;
      this.say = speaker(lang);
      this.build();
      this.draw();
    }

    update({ lang = this.lang, state = this.state } = {}) {
      this.state = Steps.settle(state);
      if (lang !== this.lang) this.speak(lang);
      else this.draw();
    }

    destroy() {
      if (this.observer) this.observer.disconnect();
      this.element.replaceChildren();
    }

    resized() {
      if (Math.abs(this.element.clientWidth - this.width) >= 1) this.draw();
    }

    set(change) {
      this.state = Steps.settle({ ...this.state, ...change });
      this.draw();
      this.onChange(this.state);
    }

    build() {
      const { layers, hidden, item } = Steps.MODEL;
      const model = this.say("model", { layers, hidden, layer: bytesText(item * hidden * hidden) });
      const rates = { flops: Steps.RATES.flops / 1e9, update: Steps.RATES.secondsPerParameter * 1e9 };
      this.output = html("div", {});
      this.sliders = {};
      const sliders = ["ranks", "micro", "rows", "link"].map((name) => this.slider(name));
      this.element.classList.add("steps");
      this.element.replaceChildren(
        html("p", {}, model),
        this.choice(),
        html("div", { class: "steps-sliders" }, ...sliders),
        this.output,
        html("p", { class: "steps-note" }, this.say("rates", rates)),
      );
    }

    choice() {
      const options = Object.keys(Steps.STRATEGIES).map((strategy) => {
        const input = html("input", { type: "radio", name: "steps-strategy", value: strategy });
        input.addEventListener("change", () => this.set({ strategy }));
        return html("label", {}, input, html("span", {}, this.say(strategy)));
      });
      this.options = options.map((label) => label.firstChild);
      return html("fieldset", { class: "steps-strategies" }, html("legend", {}, this.say("strategy")), ...options);
    }

    // A slider over the values that are possible in this state.
    slider(name) {
      const id = `steps-${name}`;
      const input = html("input", { type: "range", id, min: 0, step: 1 });
      const output = html("output", { for: id });
      input.addEventListener("input", () => this.set({ [name]: this.values(name)[Number(input.value)] }));
      const box = html("div", {}, html("label", { for: id }, this.say(name)), input, output);
      this.sliders[name] = { input, output, box };
      return box;
    }

    values(name) {
      const { strategy, rows } = this.state;
      return {
        ranks: Steps.STRATEGIES[strategy].ranks,
        micro: Steps.microBatches(rows),
        rows: Steps.ROWS,
        link: Steps.LINKS,
      }[name];
    }

    drawInputs() {
      for (const option of this.options) option.checked = option.value === this.state.strategy;
      for (const [name, { input, output, box }] of Object.entries(this.sliders)) {
        const values = this.values(name);
        const value = this.state[name];
        input.max = values.length - 1;
        input.value = values.indexOf(value);
        input.setAttribute("aria-valuetext", value);
        output.textContent = value;
        box.hidden = name === "micro" && this.state.strategy !== "pipeline";
      }
    }

    draw() {
      const { say, state } = this;
      this.width = this.element.clientWidth;
      const width = Math.max(280, Math.floor(this.output.clientWidth || this.width || 640));
      const step = Steps.step(state);
      const pipeline = state.strategy === "pipeline";
      const summary = summaryText(say, state, step);
      this.drawInputs();
      const opened = this.output.querySelector("details[open]") !== null;
      this.output.replaceChildren(
        html("p", { class: "steps-about" }, aboutText(say, state)),
        this.spoken(summary),
        html("h3", {}, say("time")),
        html("p", { class: "steps-note" }, say(pipeline ? "time of micro" : "time of")),
        legendOfLanes(say, step),
        drawLanes(say, step, width, summary),
        this.words(step, pipeline, opened),
        html("h3", {}, say("idle of")),
        html("p", {}, idleText(say, state, step)),
        ...this.memory(step, width),
        html("div", { class: "steps-columns" }, this.sent(step, pipeline), this.comparison()),
      );
    }

    // The summary is announced when it changes, so that its element must stay in the page.
    spoken(summary) {
      this.live = this.live || html("p", { class: "steps-summary", role: "status" });
      if (this.live.textContent !== summary) this.live.textContent = summary;
      return this.live;
    }

    words(step, pipeline, opened) {
      const lists = html("div", { class: "steps-words" }, ...blockList(this.say, step, pipeline));
      return html("details", { open: opened }, html("summary", {}, this.say("in words")), lists);
    }

    memory(step, width) {
      const { say } = this;
      const part = percent(Steps.total(step.memory) / Steps.total(step.memoryAlone));
      const note = `${say("memory of", { part })}${step.memory.gathered ? say("memory gathered") : ""}`;
      const parts = PARTS.filter((one) => step.memory[one]);
      const picture = drawMemory(say, step, width, note);
      return [
      html("h3", {}, say("memory")),
      html("p", { class: "steps-note" }, note),
      legend(parts.map((one) => [one, say(one)])),
      picture,
      memoryTable(say, step),
    ];
    }

    sent(step, pipeline) {
      const { say } = this;
      const title = html("h3", {}, say("sends"));
      if (!step.collectives.length) return html("section", {}, title, html("p", {}, say("sends nothing")));
      const note = pipeline ? [html("p", { class: "steps-note" }, say("sends by rank"))] : [];
      return html("section", {}, title, sentTable(say, step), ...note);
    }

    comparison() {
      const { say, state } = this;
      return html(
        "section",
        {},
        html("h3", {}, say("compare")),
        html("p", { class: "steps-note" }, say("compare of", state)),
        compareTable(say, state),
        html("p", {}, say("try")),
      );
    }
  }

  // state: see Steps.settle. onChange(state) after each change by the user. Returns {update({lang, state}), destroy()}.
  const mount = (element, options) => new View(element, options);

  return { mount };
})();
