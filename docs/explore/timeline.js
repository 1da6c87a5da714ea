// Draws a training step: controls, a lane for each rank, memory, bytes, and all strategies beside each other.

const Timeline = (() => {
  const PARTS = ["weights", "gradients", "optimizer", "activations", "pending", "gathered"];
  const LANE = { height: 26, gap: 8, label: 46, axis: 22 };
  const LETTER = 6.6; // about how wide a letter of a block is
  const SHORT = { "all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", send: "→" };

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
    if (part > 0 && part < 0.005) return "< 1%";
    return `${Math.round(part * 100)}%`;
  }

  const speaker = (lang) => (key, values) => textOf(StepWords[lang], key, values);

  // Where the ticks of an axis are: at most `most`, at round numbers.
  function ticks(end, most) {
    const rough = end / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((factor) => factor >= rough);
    return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => i * step);
  }

  // What a block is, in words.
  function blockText(say, block) {
    const micro = block.micro ? " micro" : "";
    const values = { ...block };
    if (block.kind !== "move") {
      return say(`block ${block.kind}${micro}`, values);
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
    const labels = texts || [String(block.micro || block.layer)];
    const text = labels.find((label) => Math.max(label.length, letters) * LETTER + 2 <= width);
    if (text) return { text, up: false };
    return block.kind === "move" && width >= 10 ? { text: SHORT[block.name], up: true } : null;
  }

  function hatching() {
    const line = svgElement("path", { d: "M0 6L6 0", class: "steps-hatch" });
    const size = { id: "steps-hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse" };
    return svgElement("defs", {}, svgElement("pattern", size, line));
  }

  function drawBlock(say, block, rank, count, { x, y, width }) {
    const drawn = Math.max(width, 0.5);
    const edge = drawn > 3 ? 0.5 : 0;
    const shape = { x: x + edge, y, width: drawn - 2 * edge, height: LANE.height, class: `steps-${block.kind}` };
    if (block.kind === "idle") shape.fill = "url(#steps-hatching)";
    const title = svgElement("title", {});
    title.textContent = `${say("rank k", { rank })}: ${blockText(say, block)}, ${secondsText(block.end - block.start)}`;
    const group = svgElement("g", { "data-kind": block.kind, "data-rank": rank }, title, svgElement("rect", shape));
    const label = blockLabel(say, block, width, count);
    if (label) {
      const at = `translate(${x + width / 2} ${y + LANE.height / 2})${label.up ? " rotate(-90)" : ""}`;
      group.append(svgElement("text", { transform: at, y: 4, class: "steps-letter" }, label.text));
    }
    return group;
  }

  function drawLanes(say, step, width, summary) {
    const scale = (width - LANE.label - 8) / step.seconds;
    const down = (rank) => rank * (LANE.height + LANE.gap);
    const bottom = down(step.lanes.length);
    const height = bottom + LANE.axis;
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    const seen = { role: "img", "aria-label": summary, class: "steps-lanes" };
    const picture = svgElement("svg", { ...size, ...seen }, hatching());
    for (const time of ticks(step.seconds * 1e3, width < 600 ? 4 : 8)) {
      const x = LANE.label + (time / 1e3) * scale;
      picture.append(svgElement("line", { x1: x, x2: x, y1: 0, y2: bottom, class: "steps-tick" }));
      picture.append(svgElement("text", { x, y: bottom + 14, class: "steps-axis" }, figures(time)));
    }
    const count = Math.max(...step.lanes[0].map((block) => block.micro || block.layer || 0));
    step.lanes.forEach((blocks, rank) => {
      const y = down(rank);
      const at = { x: 0, y: y + LANE.height / 2 + 4, class: "steps-rank" };
      picture.append(svgElement("text", at, say("rank k", { rank })));
      for (const block of blocks) {
        const x = LANE.label + block.start * scale;
        picture.append(drawBlock(say, block, rank, count, { x, y, width: (block.end - block.start) * scale }));
      }
    });
    return picture;
  }

  function drawMemoryBar(say, parts, name, largest, width, y) {
    const room = width - LANE.label * 2 - 70;
    const bar = svgElement("g", {});
    let x = LANE.label * 2;
    const title = svgElement("title", {});
    const named = PARTS.filter((part) => parts[part]).map((part) => `${say(part)} ${bytesText(parts[part])}`);
    title.textContent = `${name}: ${named.join(", ")}`;
    bar.append(title, svgElement("text", { x: 0, y: y + 13, class: "steps-rank" }, name));
    for (const part of PARTS.filter((name) => parts[name])) {
      const length = (parts[part] / largest) * room;
      bar.append(svgElement("rect", { x, y, width: Math.max(length - 0.5, 0.5), height: 18, class: `steps-${part}` }));
      x += length;
    }
    bar.append(svgElement("text", { x: x + 6, y: y + 13, class: "steps-rank" }, bytesText(Steps.total(parts))));
    return bar;
  }

  function drawMemory(say, step, width, summary) {
    const bars = step.memory.map((parts, rank) => [parts, say("rank k", { rank })]);
    bars.push([step.memoryAlone, say("alone")]);
    const largest = Math.max(...bars.map(([parts]) => Steps.total(parts)));
    const height = bars.length * 24 + 8;
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    const picture = svgElement("svg", { ...size, role: "img", "aria-label": summary, class: "steps-memory" });
    bars.forEach(([parts, name], index) => {
      const apart = index === step.lanes.length ? 8 : 0; // the last is another machine
      picture.append(drawMemoryBar(say, parts, name, largest, width, index * 24 + apart));
    });
    return picture;
  }

  function legend(entries) {
    const swatch = (name) => element("span", { class: `steps-swatch steps-${name}` });
    const items = entries.map(([name, text]) => element("li", {}, swatch(name), text));
    return element("ul", { class: "steps-legend" }, ...items);
  }

  // Such as "communication: all-gather (AG), reduce-scatter (RS)".
  function legendOfLanes(say, step) {
    const collectives = new Set(step.collectives.map(({ name }) => name));
    const names = [...collectives].map((name) => `${name} (${SHORT[name]})`);
    const kinds = Steps.KINDS.filter((kind) => step.shares[kind] > 0);
    const text = (kind) => (kind === "move" ? say("moves", { names: names.join(", ") }) : say(kind));
    return legend(kinds.map((kind) => [kind, text(kind)]));
  }

  function table(heads, rows, name) {
    const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
    const body = rows.map(({ cells, chosen }) => {
      const [first, ...others] = cells;
      const row = [element("th", { scope: "row" }, first), ...others.map((cell) => element("td", {}, cell))];
      return element("tr", { class: chosen ? "steps-chosen" : null, "aria-current": chosen ? "true" : null }, ...row);
    });
    const inner = element("table", { "aria-label": name }, element("thead", {}, head), element("tbody", {}, ...body));
    return element("div", { class: "steps-scroll", role: "region", "aria-label": name, tabindex: "0" }, inner);
  }

  const isUneven = (step) => new Set(step.memory.map(Steps.total)).size > 1;

  function memoryTable(say, step) {
    const fullest = step.memory[step.fullest];
    const parts = PARTS.filter((part) => fullest[part]);
    const rows = parts.map((part) => ({
      cells: [say(part), bytesText(fullest[part]), bytesText(step.memoryAlone[part])],
    }));
    const sums = [fullest, step.memoryAlone].map((memory) => bytesText(Steps.total(memory)));
    rows.push({ cells: [say("sum"), ...sums] });
    const name = isUneven(step) ? say("rank k", { rank: step.fullest }) : say("a rank");
    return table([say("part"), name, say("alone")], rows, say("memory"));
  }

  // Such as "2 (n-1)/n x 8 x 11.3 MB, n = 4".
  function formulaText(collective) {
    const n = collective.axis === null ? "n" : "dt"[collective.axis];
    const factor = { "all-reduce": `2 (${n}-1)/${n} × `, send: "" }[collective.name] ?? `(${n}-1)/${n} × `;
    const end = collective.name === "send" ? "" : `, ${n} = ${collective.among}`;
    return `${factor}${collective.times} × ${bytesText(collective.whole)}${end}`;
  }

  function sentTable(say, step) {
    const rows = step.collectives.map((collective) => {
      const { name, of, axis, when } = collective;
      const values = { name, of: say(of), axis: axisText(say, axis), way: say(`way ${when}`) };
      const formula = element("span", { class: "steps-wrap" }, formulaText(collective));
      return { cells: [say("of", values), formula, bytesText(collective.bytes)] };
    });
    rows.push({ cells: [say("sum"), "", bytesText(Math.max(...step.sent))] });
    return table([say("collective"), say("formula"), say("a rank")], rows, say("sends"));
  }

  function compareTable(say, state) {
    const all = Steps.compare(state);
    const times = all.filter((entry) => entry.step).map((entry) => entry.step.seconds);
    const [fastest, slowest] = [Math.min(...times), Math.max(...times)];
    const rows = all.map(({ strategy, step }) => {
      const chosen = strategy === state.strategy;
      if (!step) return { cells: [say(strategy), say("not on", { ranks: state.ranks }), "", "", ""], chosen };
      const bar = element("span", { class: "steps-bar", style: `width: ${(step.seconds / slowest) * 100}%` });
      const best = state.ranks > 1 && step.seconds <= fastest * 1.0001;
      const text = `${secondsText(step.seconds)}${best ? ` · ${say("fastest")}` : ""}`;
      const time = element("span", { class: "steps-time" }, element("span", {}, text), bar);
      const sizes = [Math.max(...step.sent), Steps.total(step.memory[step.fullest])].map(bytesText);
      return { cells: [say(strategy), time, ...sizes, percent(step.shares.idle)], chosen };
    });
    const heads = [say("strategy"), say("a step"), say("sends at most"), say("holds"), say("idle share")];
    return table(heads, rows, say("compare"));
  }

  const gap = (say) => (say("sum") === "sum" ? " " : ""); // Chinese sentences have none between them

  function summaryText(say, state, step) {
    const { move, update, idle, ...compute } = step.shares;
    const shares = { compute: Steps.total(compute), move, update, idle };
    for (const [name, share] of Object.entries(shares)) shares[name] = percent(share);
    const most = bytesText(Math.max(...step.sent));
    const sent = new Set(step.sent).size > 1 ? say("up to", { most }) : most;
    const held = bytesText(Steps.total(step.memory[step.fullest]));
    const sizes = { memory: isUneven(step) ? say("up to", { most: held }) : held, sent };
    const parts = `${say("summary shares", shares)}${gap(say)}${say("summary sizes", sizes)}`;
    const seconds = secondsText(step.seconds);
    if (state.ranks === 1) return say("summary of one", { seconds, parts });
    return say("summary", { seconds, times: figures(step.secondsAlone / step.seconds), parts });
  }

  function aboutText(say, state) {
    const { data, tensor } = Steps.mesh(state);
    const stage = Steps.MODEL.layers / state.ranks;
    const about = say(`about ${state.strategy}`, { data, tensor, stage, layers: Steps.MODEL.layers });
    return state.strategy === "pipeline" ? `${about}${gap(say)}${say(`about ${state.schedule}`)}` : about;
  }

  function idleText(say, state, step) {
    if (state.strategy !== "pipeline" || state.ranks === 1) return say("idle none");
    const { ranks, micro } = state;
    const { form, above, below } = step.idleFormula;
    const shares = { formula: percent(above / below), share: percent(step.shares.idle) };
    return say("idle formula", { ranks, micro, form, above, below, ...shares });
  }

  function blockList(say, step, pipeline) {
    const lanes = pipeline ? step.lanes : step.lanes.slice(0, 1); // elsewhere all ranks do the same
    return lanes.map((blocks, rank) => {
      const name = pipeline ? say("rank k", { rank }) : say("all ranks");
      const texts = blocks.map((block) => `${blockText(say, block)}: ${secondsText(block.end - block.start)}`);
      const entries = texts.map((text) => element("li", {}, text));
      return element("section", {}, element("h4", {}, name), element("ol", {}, ...entries));
    });
  }

  // One section on the page. The inputs stay while all else is drawn again, so that none loses the focus.
  class View {
    constructor(place, { lang, state, onChange }) {
      this.place = place;
      this.state = Steps.settle(state);
      this.onChange = onChange;
      this.width = 0;
      this.speak(lang);
      new ResizeObserver(() => this.resized()).observe(place);
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

    resized() {
      if (Math.abs(this.place.clientWidth - this.width) >= 1) this.draw();
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
      this.output = element("div", {});
      this.sliders = {};
      this.choices = {};
      const sliders = ["ranks", "micro", "rows", "link"].map((name) => this.slider(name));
      this.place.classList.add("steps");
      this.place.replaceChildren(
        element("p", {}, model),
        this.choice("strategy", Object.keys(Steps.STRATEGIES)),
        this.choice("schedule", Object.keys(Steps.SCHEDULES)),
        element("div", { class: "steps-sliders" }, ...sliders),
        this.output,
        element("p", { class: "steps-note" }, this.say("rates", rates)),
      );
    }

    choice(name, values) {
      const options = values.map((value) => {
        const input = element("input", { type: "radio", name: `steps-${name}`, value });
        input.addEventListener("change", () => this.set({ [name]: value }));
        return element("label", {}, input, element("span", {}, this.say(value)));
      });
      const legend = element("legend", {}, this.say(name));
      const box = element("fieldset", { class: "steps-choice" }, legend, ...options);
      this.choices[name] = { inputs: options.map((label) => label.firstChild), box };
      return box;
    }

    // A slider over the values that are possible in this state.
    slider(name) {
      const id = `steps-${name}`;
      const input = element("input", { type: "range", id, min: 0, step: 1 });
      const output = element("output", { for: id });
      input.addEventListener("input", () => this.set({ [name]: this.values(name)[Number(input.value)] }));
      const box = element("div", {}, element("label", { for: id }, this.say(name)), input, output);
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
      for (const [name, { inputs, box }] of Object.entries(this.choices)) {
        for (const input of inputs) input.checked = input.value === this.state[name];
        box.hidden = name === "schedule" && this.state.strategy !== "pipeline";
      }
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
      this.width = this.place.clientWidth;
      const width = Math.max(280, Math.floor(this.output.clientWidth || this.width || 640));
      const step = Steps.step(state);
      const pipeline = state.strategy === "pipeline";
      const summary = summaryText(say, state, step);
      this.drawInputs();
      const opened = this.output.querySelector("details[open]") !== null;
      this.output.replaceChildren(
        element("p", { class: "steps-about" }, aboutText(say, state)),
        pipeline ? element("p", { class: "steps-note" }, say("about schedules")) : "",
        this.spoken(summary),
        element("h3", {}, say("time")),
        element("p", { class: "steps-note" }, say(pipeline ? "time of micro" : "time of")),
        legendOfLanes(say, step),
        drawLanes(say, step, width, summary),
        this.words(step, pipeline, opened),
        element("h3", {}, say("idle of")),
        element("p", {}, idleText(say, state, step)),
        ...this.memory(step, width, pipeline),
        element("div", { class: "steps-columns" }, this.sent(step, pipeline), this.comparison()),
      );
    }

    // The summary is announced when it changes, so that its element must stay in the page.
    spoken(summary) {
      this.live = this.live || element("p", { class: "steps-summary", role: "status" });
      if (this.live.textContent !== summary) this.live.textContent = summary;
      return this.live;
    }

    words(step, pipeline, opened) {
      const lists = element("div", { class: "steps-words" }, ...blockList(this.say, step, pipeline));
      return element("details", { open: opened }, element("summary", {}, this.say("in words")), lists);
    }

    memory(step, width, pipeline) {
      const { say, state } = this;
      const fullest = step.memory[step.fullest];
      const part = percent(Steps.total(fullest) / Steps.total(step.memoryAlone));
      const sentences = [say("memory of")];
      if (pipeline) sentences.push(say(`memory ${state.schedule}`));
      if (fullest.gathered) sentences.push(say("memory gathered"));
      sentences.push(say(isUneven(step) ? "memory fullest" : "memory part", { part, rank: step.fullest }));
      const note = sentences.join(gap(say));
      const parts = PARTS.filter((part) => fullest[part]);
      const picture = drawMemory(say, step, width, note);
      return [
      element("h3", {}, say("memory")),
      element("p", { class: "steps-note" }, note),
      legend(parts.map((part) => [part, say(part)])),
      picture,
      memoryTable(say, step),
    ];
    }

    sent(step, pipeline) {
      const { say } = this;
      const title = element("h3", {}, say("sends"));
      if (!step.collectives.length) return element("section", {}, title, element("p", {}, say("sends nothing")));
      const note = pipeline ? [element("p", { class: "steps-note" }, say("sends by rank"))] : [];
      return element("section", {}, title, sentTable(say, step), ...note);
    }

    comparison() {
      const { say, state } = this;
      return element(
        "section",
        {},
        element("h3", {}, say("compare")),
        element("p", { class: "steps-note" }, say("compare of", { ...state, schedule: say(state.schedule) })),
        compareTable(say, state),
        element("p", {}, say("try")),
      );
    }
  }

  // state: see Steps.settle. onChange(state) is called after each change by the user. Returns {update({lang, state})}.
  const mount = (place, options) => new View(place, options);

  return { mount };
})();
