// x @ w = out on ranks: what runs.js has recorded, which block a rank holds, what a move must send, and the program.
// Nothing is drawn here. An SBP is "S(0)", on the mesh "S(0),B"; ranks are "1" to "4" or "2x2".

const Matmul = {
  SBPS: ["B", "S(0)", "S(1)", "P"],
  ITEM: 4, // bytes of a float32

  grid(ranks) {
    return ranks === "2x2" ? [2, 2] : [Number(ranks)];
  },

  count(ranks) {
    return Matmul.grid(ranks).reduce((a, b) => a * b);
  },

  members(ranks) {
    return [...Array(Matmul.count(ranks)).keys()];
  },

  // Where a rank is on each axis of the grid.
  coordinates(ranks, rank) {
    return ranks === "2x2" ? [rank >> 1, rank & 1] : [rank];
  },

  axes(sbp) {
    return sbp.split(",");
  },

  // The [start, stop] of rows and of columns that a rank holds: the first ranks get one more where a split is uneven.
  block(shape, sbp, ranks, rank) {
    const block = shape.map((size) => [0, size]);
    const where = Matmul.coordinates(ranks, rank);
    Matmul.axes(sbp).forEach((sbpOfAxis, axis) => {
      if (sbpOfAxis[0] !== "S") return;
      const dim = Number(sbpOfAxis[2]);
      const n = Matmul.grid(ranks)[axis];
      const [start, stop] = block[dim];
      const size = Math.floor((stop - start) / n);
      const larger = (stop - start) % n;
      const begin = start + where[axis] * size + Math.min(where[axis], larger);
      block[dim] = [begin, begin + size + (where[axis] < larger ? 1 : 0)];
    });
    return block;
  },

  inside(block, row, column) {
    const [[top, bottom], [left, right]] = block;
    return top <= row && row < bottom && left <= column && column < right;
  },

  holders(shape, sbp, ranks, row, column) {
    return Matmul.members(ranks).filter((rank) => Matmul.inside(Matmul.block(shape, sbp, ranks, rank), row, column));
  },

  // Of the holders of a number those whose parts add up to it: of copies only the first.
  terms(shape, sbp, ranks, row, column) {
    const copied = Matmul.axes(sbp).map((sbpOfAxis) => sbpOfAxis === "B");
    return Matmul.holders(shape, sbp, ranks, row, column).filter((rank) =>
      Matmul.coordinates(ranks, rank).every((place, axis) => !copied[axis] || place === 0),
    );
  },

  // The whole matrix from what the ranks hold.
  whole(shape, sbp, ranks, blocks) {
    const sum = Array.from({ length: shape[0] }, () => Array(shape[1]).fill(0));
    for (let row = 0; row < shape[0]; row += 1) {
      for (let column = 0; column < shape[1]; column += 1) {
        for (const rank of Matmul.terms(shape, sbp, ranks, row, column)) {
          const [[top], [left]] = Matmul.block(shape, sbp, ranks, rank);
          sum[row][column] += blocks[rank][row - top][column - left];
        }
      }
    }
    return sum;
  },

  // What each rank holds of a whole matrix. Of a P each number is split into whole numbers as equal as they can be.
  cut(value, sbp, ranks) {
    const shape = [value.length, value[0].length];
    return Matmul.members(ranks).map((rank) => {
      const [[top, bottom], [left, right]] = Matmul.block(shape, sbp, ranks, rank);
      const share = (number) =>
        Matmul.axes(sbp).reduce((part, sbpOfAxis, axis) => {
          const n = Matmul.grid(ranks)[axis];
          return sbpOfAxis === "P" ? Math.floor((part + n - 1 - Matmul.coordinates(ranks, rank)[axis]) / n) : part;
        }, number);
      return value.slice(top, bottom).map((row) => row.slice(left, right).map(share));
    });
  },

  product(x, w) {
    return x.map((row) => w[0].map((_, column) => row.reduce((sum, number, k) => sum + number * w[k][column], 0)));
  },

  COLLECTIVES: {
    SB: "all-gather",
    SS: "all-to-all",
    PB: "all-reduce",
    PS: "reduce-scatter",
    BS: "local slice",
    BP: "local fill",
    SP: "local fill",
  },

  // The steps of a move: [{axis, name}], none where the SBP stays the same.
  collectives(from, to) {
    const after = Matmul.axes(to);
    return Matmul.axes(from).flatMap((before, axis) =>
      before === after[axis] ? [] : [{ axis, name: Matmul.COLLECTIVES[before[0] + after[axis][0]] }],
    );
  },

  common(block, other) {
    return block.reduce((size, [start, stop], dim) => {
      const length = Math.min(stop, other[dim][1]) - Math.max(start, other[dim][0]);
      return size * Math.max(0, length);
    }, 1);
  },

  size(block) {
    return Matmul.common(block, block);
  },

  // The numbers that leave each rank by the formulas of OneFlow's paper: {total, byRank}. byRank is null where several
  // ranks could send the same; null is the answer where there is no formula.
  formula(shape, from, to, ranks) {
    const none = { total: 0, byRank: Matmul.members(ranks).map(() => 0) };
    if (from === to) return none;
    if (!`${from},${to}`.includes("P")) return Matmul.formulaOfCopies(shape, from, to, ranks);
    if (ranks === "2x2") return Matmul.formulaOnLines(shape, from, to);
    return to === "P" ? none : Matmul.formulaOfSums(shape, to, ranks);
  },

  // Without partial sums: each rank gets those numbers of its new block that it does not hold.
  formulaOfCopies(shape, from, to, ranks) {
    const members = Matmul.members(ranks);
    const byRank = members.map(() => 0);
    let total = 0;
    for (const rank of members) {
      const block = Matmul.block(shape, to, ranks, rank);
      total += Matmul.size(block) - Matmul.common(block, Matmul.block(shape, from, ranks, rank));
      for (const sender of members.filter((sender) => sender !== rank)) {
        byRank[sender] += Matmul.common(block, Matmul.block(shape, from, ranks, sender));
      }
    }
    if (total === 0) return { total, byRank: members.map(() => 0) };
    return { total, byRank: Matmul.axes(from).includes("B") && members.length > 1 ? null : byRank };
  },

  // A reduce-scatter, to B followed by an all-gather.
  formulaOfSums(shape, to, ranks) {
    const members = Matmul.members(ranks);
    const whole = shape[0] * shape[1];
    const byRank = members.map(() => 0);
    for (const rank of members) {
      const part = to === "B" ? whole / members.length : Matmul.size(Matmul.block(shape, to, ranks, rank));
      for (const sender of members.filter((sender) => sender !== rank)) byRank[sender] += part;
      byRank[rank] += to === "B" ? whole - part : 0;
    }
    return { total: byRank.reduce((a, b) => a + b), byRank };
  },

  // On the mesh, where one axis changes: a move of its own on each line of ranks along it.
  formulaOnLines(shape, from, to) {
    const changed = Matmul.collectives(from, to);
    if (changed.length !== 1) return null;
    const [{ axis }] = changed;
    const [before, after] = [Matmul.axes(from)[axis], Matmul.axes(to)[axis]];
    const other = Matmul.axes(from)[1 - axis];
    if (other[0] === "S" && (other === before || other === after)) return null; // both axes split one dimension
    const lines = { 0: ["02", "13"], 1: ["01", "23"] }[axis].map((line) => [...line].map(Number));
    const byRank = [0, 0, 0, 0];
    for (const line of lines) {
      const together = axis === 0 ? `B,${other}` : `${other},B`;
      const part = Matmul.block(shape, together, "2x2", line[0]).map(([start, stop]) => stop - start);
      const sent = Matmul.formula(part, before, after, "2");
      line.forEach((rank, place) => (byRank[rank] = sent.byRank[place]));
    }
    return { total: byRank.reduce((a, b) => a + b), byRank };
  },

  // Which of x and w are moved so that they are multiplied in the SBPs `inputs`.
  movesOf(x, w, inputs) {
    const [toX, toW] = inputs;
    const moves = [
      { tensor: "x", from: x, to: toX },
      { tensor: "w", from: w, to: toW },
    ];
    return moves.filter(({ from, to }) => from !== to);
  },

  // The record of a mode: that of a graph is left out where it is the same.
  inMode({ eager, graph }, mode) {
    return mode === "graph" && graph ? graph : eager;
  },

  // The run of a state {ranks, x, w, to, mode}: what was recorded, with the moves before and after the matmul.
  run({ ranks, x, w, to, mode }) {
    const pair = RUNS.runs[ranks][`${x} @ ${w}`];
    const { out_sbp: outSbp, out, inputs, sent, large } = Matmul.inMode(pair, mode);
    const moves = Matmul.movesOf(x, w, inputs);
    const run = { ranks, x: pair.x, w: pair.w, outSbp, out, inputs, sent, moves };
    // What it does at the size at which bytes are measured, where that differs.
    run.large = large && { outSbp: large.out_sbp, moves: Matmul.movesOf(x, w, large.inputs) };
    run.factors = Matmul.factors(run, [x, w]);
    if (to) run.change = { tensor: "out", from: outSbp, to, ...Matmul.inMode(pair.to[to], mode) };
    return run;
  },

  // What each rank multiplies, [of x, of w]. Blocks after a move are not recorded: null if they do not give the out.
  factors({ ranks, inputs, x, w, out }, sbps) {
    const moved = ["x", "w"].map((name, index) => Matmul.cut(RUNS.value[name], inputs[index], ranks));
    const factors = [x, w].map((held, index) => (sbps[index] === inputs[index] ? held : moved[index]));
    const right = out.every((block, rank) => {
      const product = Matmul.product(factors[0][rank], factors[1][rank]);
      return JSON.stringify(product) === JSON.stringify(block);
    });
    return factors.map((held, index) => (right || sbps[index] === inputs[index] ? held : null));
  },

  // How the two modes differ: a list of {what, eager, graph}; what: "inputs", "out", "parts", "sent", ...
  differences(state) {
    const [eager, graph] = ["eager", "graph"].map((mode) => Matmul.run({ ...state, mode }));
    const differences = [];
    const compare = (what, of) => {
      const same = JSON.stringify(of(eager)) === JSON.stringify(of(graph));
      if (!same) differences.push({ what, eager: of(eager), graph: of(graph) });
      return same;
    };
    const compareBytes = (what, of) => {
      const [inEager, inGraph] = [eager, graph].map((run) => of(run).sent.reduce((a, b) => a + b, 0));
      const near = Math.abs(inEager - inGraph) <= 0.02 * Math.max(inEager, inGraph) + 20000;
      if (!near) differences.push({ what, eager: inEager, graph: inGraph });
    };
    const sameWay = compare("inputs", (run) => run.inputs);
    const sameSbp = compare("out", (run) => run.outSbp);
    if (sameSbp) compare("parts", (run) => run.out);
    if (sameWay) compareBytes("sent", (run) => run);
    if (state.to) {
      if (sameSbp) compare("change parts", (run) => run.change.out);
      compareBytes("change sent", (run) => run.change);
    }
    return differences;
  },

  sbpInPython(sbp) {
    const names = {
      B: "flow.sbp.broadcast",
      P: "flow.sbp.partial_sum",
      "S(0)": "flow.sbp.split(0)",
      "S(1)": "flow.sbp.split(1)",
    };
    const all = Matmul.axes(sbp).map((sbpOfAxis) => names[sbpOfAxis]);
    return all.length > 1 ? `(${all.join(", ")})` : all[0];
  },

  matrixInPython(value) {
    return `[${value.map((row) => `[${row.join(", ")}]`).join(", ")}]`;
  },

  tensorInPython(name, value, placement, sbp) {
    const indent = " ".repeat(`${name} = flow.tensor(`.length);
    const sbps = `sbp=${Matmul.sbpInPython(sbp)})`;
    const where = `${indent}dtype=flow.float32, placement=${placement},`;
    const rest = sbp.includes(",") ? [where, `${indent}${sbps}`] : [`${where} ${sbps}`];
    return [`${name} = flow.tensor(${Matmul.matrixInPython(value)},`, ...rest];
  },

  // A partial sum is made of what each rank holds: whole numbers that are as equal as they can be, and add up.
  partsInPython(name, sbp, ranks) {
    const position = ranks === "2x2" ? ["rank // 2", "rank % 2"] : ["rank"];
    const lines = Matmul.axes(sbp).flatMap((sbpOfAxis, axis) => {
      const n = Matmul.grid(ranks)[axis];
      return sbpOfAxis === "P" ? [`part = flow.floor((part + ${n - 1} - ${position[axis]}) / ${n})`] : [];
    });
    lines[0] = lines[0].replace("(part +", `(${name}.to_local() +`);
    const converted = `${name} = part.to_global(placement=ranks,`;
    const sbps = `sbp=${Matmul.sbpInPython(sbp)})`;
    const indent = " ".repeat(converted.indexOf("(") + 1);
    return [...lines, ...(sbp.includes(",") ? [converted, `${indent}${sbps}`] : [`${converted} ${sbps}`])];
  },

  // The program of a state, as its text.
  code({ ranks, x, w, to, mode }) {
    const placement = ranks === "2x2" ? "[[0, 1], [2, 3]]" : `[${Matmul.members(ranks).join(", ")}]`;
    const hasParts = (sbp) => sbp.includes("P") && ranks !== "1";
    const tensor = (name, sbp) => {
      const value = RUNS.value[name];
      if (!hasParts(sbp)) return Matmul.tensorInPython(name, value, "ranks", sbp);
      const copied = Matmul.axes(sbp).map((sbpOfAxis) => (sbpOfAxis === "P" ? "B" : sbpOfAxis));
      return [
        ...Matmul.tensorInPython(name, value, "ranks", copied.join(",")),
        ...Matmul.partsInPython(name, sbp, ranks),
      ];
    };
    const moved = to ? [`out = out.to_global(sbp=${Matmul.sbpInPython(to)})`] : [];
    const product = ["out = flow.matmul(x, w)", ...moved];
    const graph = [
      "class Product(flow.nn.Graph):",
      "    def build(self, x, w):",
      ...[...product, "return out"].map((line) => `        ${line}`),
      "",
      "product = Product()",
      "out = product(x, w)",
    ];
    return [
      "import oneflow as flow",
      "",
      ...(hasParts(x) || hasParts(w) ? ["rank = flow.env.get_rank()"] : []),
      `ranks = flow.placement("cpu", ${placement})`,
      ...tensor("x", x),
      ...tensor("w", w),
      ...(mode === "graph" ? ["", ...graph] : product),
      "print(out.sbp, out.to_local().tolist())",
    ].join("\n");
  },

  // Two layers, each on a rank of its own.
  pipelineCode() {
    const tensor = (name, value, placement) => Matmul.tensorInPython(name, value, placement, "B");
    return [
      "import oneflow as flow",
      "",
      'first, second = flow.placement("cpu", [0]), flow.placement("cpu", [1])',
      ...tensor("x", RUNS.value.x, "first"),
      ...tensor("w0", RUNS.value.w, "first"),
      ...tensor("w1", RUNS.value.w, "second"),
      "h = flow.matmul(x, w0)",
      "h = h.to_global(placement=second, sbp=flow.sbp.broadcast)",
      "out = flow.matmul(h, w1)",
      "print(out.sbp, out.to_local().tolist())",
    ].join("\n");
  },
};
