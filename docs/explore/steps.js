// A training step of a stack of equal layers, relu(x) @ w: blocks of time, bytes and memory, by formula, not measured.
// tests/slow/test_explore.py compares it with steps that ranks make, the schedules of a recipe and `plan`.

const Steps = (() => {
  // The sizes can be divided by 1 to 8 ranks, so that all ranks have equal shares.
  const MODEL = { layers: 8, hidden: 1680, item: 4 };
  const ROWS = [840, 1680, 3360, 6720]; // of the batch
  const LINKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]; // GB/s
  // Of a rank. Two CPUs that we measured reach somewhat more on each core.
  const RATES = { flops: 100e9, secondsPerParameter: 1e-9 };
  // Adam in float32, bytes of a parameter: PRECISIONS["fp32"] of harness/oneflow_cookbook/plan/formulas.py.
  const BYTES = { weights: 4, gradients: 4, optimizer: 8 };
  const MAX_MICRO_BATCHES = 16;
  const KINDS = ["forward", "backward", "backward_input", "backward_weights", "move", "update", "idle"]; // of blocks

  const STRATEGIES = {
    data: { ranks: [1, 2, 3, 4, 5, 6, 7, 8], mesh: (n) => [n, 1, 1] },
    tensor: { ranks: [1, 2, 3, 4, 5, 6, 7, 8], mesh: (n) => [1, n, 1] },
    pipeline: { ranks: [1, 2, 4, 8], mesh: (n) => [1, 1, n] }, // numbers that divide the layers: stages are equal
    data_tensor: { ranks: [4, 6, 8], mesh: (n) => [n / 2, 2, 1] },
    sharded: { ranks: [1, 2, 3, 4, 5, 6, 7, 8], mesh: (n) => [n, 1, 1] },
    zero: { ranks: [1, 2, 3, 4, 5, 6, 7, 8], mesh: (n) => [n, 1, 1] },
  };
  const FIRST = { strategy: "data", ranks: 4, schedule: "gpipe", micro: 4, rows: 1680, link: 1 };

  // A rank's calls in order, [[kind, micro-batch]]. GPipe (arXiv:1811.06965): all forwards, then all backwards.
  function gpipe(rank, ranks, micro) {
    const all = [...Array(micro).keys()];
    return [...all.map((j) => ["forward", j]), ...all.map((j) => ["backward", j])];
  }

  // 1F1B (arXiv:2006.09503): forwards until the first micro-batch comes back, then forward and backward in turn.
  function oneForwardOneBackward(rank, ranks, micro) {
    const ahead = ranks - 1 - rank;
    const calls = [];
    for (let j = 0; j < micro + ahead; j += 1) {
      if (j < micro) calls.push(["forward", j]);
      if (j >= ahead) calls.push(["backward", j - ahead]);
    }
    return calls;
  }

  // ZB-H1 (arXiv:2401.10241): 1F1B with each backward cut in two; rank k puts the second off by k micro-batches.
  function zeroBubble(rank, ranks, micro) {
    const calls = oneForwardOneBackward(rank, ranks, micro).flatMap(([kind, j]) => {
      if (kind === "forward") return [[kind, j]];
      return [["backward_input", j], ...(j >= rank ? [["backward_weights", j - rank]] : [])];
    });
    for (let j = Math.max(micro - rank, 0); j < micro; j += 1) calls.push(["backward_weights", j]);
    return calls;
  }

  const gpipeIdle = (n, m) => ({ form: "(p - 1) / (m + p - 1)", above: n - 1, below: m + n - 1 });

  // With fewer micro-batches than stages it is more than the paper's p - 1.
  function zeroBubbleIdle(n, m) {
    if (m >= n) return { form: "(p - 1) / (3m + p - 1)", above: n - 1, below: 3 * m + n - 1 };
    return { form: "(2p - m - 1) / (2p + 2m - 1)", above: 2 * n - m - 1, below: 2 * n + 2 * m - 1 };
  }

  // Of rank k of n, with m micro-batches. inputs: of how many its layers keep their inputs, at most; pending: of how
  // many they keep the gradients of their outputs, from the backward of the input to that of the weights. idle: the
  // part of forward and backward for which a rank is idle, where sends take no time.
  const SCHEDULES = {
    gpipe: {
      calls: gpipe,
      inputs: (k, n, m) => m,
      pending: () => 0,
      idle: gpipeIdle,
    },
    "1f1b": {
      calls: oneForwardOneBackward,
      inputs: (k, n, m) => Math.min(m, n - k),
      pending: () => 0,
      idle: gpipeIdle,
    },
    zero_bubble: {
      calls: zeroBubble,
      inputs: (k, n, m) => Math.min(m, n),
      pending: (k, n, m) => Math.min(m, k + 1),
      idle: zeroBubbleIdle,
    },
  };

  // The numbers of micro-batches into which the rows can be split evenly.
  const microBatches = (rows) =>
    Array.from({ length: MAX_MICRO_BATCHES }, (_, i) => i + 1).filter((number) => rows % number === 0);

  function nearest(values, wanted) {
    const number = Number(wanted);
    if (!Number.isFinite(number)) return null;
    return values.reduce((best, value) => (Math.abs(value - number) < Math.abs(best - number) ? value : best));
  }

  // A state that can be shown: `wanted` may be of an address that somebody typed, or of a strategy with other ranks.
  function settle(wanted = {}) {
    const isOf = (choices, name) => Object.prototype.hasOwnProperty.call(choices, name);
    const strategy = isOf(STRATEGIES, wanted.strategy) ? wanted.strategy : FIRST.strategy;
    const rows = nearest(ROWS, wanted.rows ?? FIRST.rows) ?? FIRST.rows;
    return {
      strategy,
      ranks: nearest(STRATEGIES[strategy].ranks, wanted.ranks ?? FIRST.ranks) ?? FIRST.ranks,
      schedule: isOf(SCHEDULES, wanted.schedule) ? wanted.schedule : FIRST.schedule,
      micro: nearest(microBatches(rows), wanted.micro ?? FIRST.micro) ?? FIRST.micro,
      rows,
      link: nearest(LINKS, wanted.link ?? FIRST.link) ?? FIRST.link,
    };
  }

  function mesh({ strategy, ranks }) {
    const [data, tensor, pipeline] = STRATEGIES[strategy].mesh(ranks);
    return { data, tensor, pipeline };
  }

  // Bytes of all weights, of those of a layer, and of what a layer returns for the whole batch.
  function sizes({ rows }) {
    const layer = MODEL.item * MODEL.hidden * MODEL.hidden;
    return { weights: MODEL.layers * layer, layer, activation: MODEL.item * rows * MODEL.hidden };
  }

  // The part of its bytes K that a rank sends in a collective among n ranks: harness/oneflow_cookbook/measure/theory.py.
  const FACTORS = {
    "all-reduce": (n) => (2 * (n - 1)) / n,
    "all-gather": (n) => (n - 1) / n,
    "reduce-scatter": (n) => (n - 1) / n,
    send: () => 1,
  };

  // The collectives of a step: [{when, name, of, whole, among, axis, every}].
  // when: before or after "forward", or after "backward", of a layer; whole: bytes of the tensor among the `among` ranks
  // of an axis of the mesh; every: 2 where only one layer of each pair, of a column-parallel and a row-parallel layer,
  // has it.
  function movesOf(state) {
    const { strategy } = state;
    const { data, tensor } = mesh(state);
    const { layer, activation } = sizes(state);
    const gather = { name: "all-gather", of: "weights", whole: layer, among: data, axis: null, every: 1 };
    const reduce = { name: "all-reduce", whole: activation / data, among: tensor, axis: null, every: 2 };
    // a gathered weight stays until backward: recipes/memory/fully_sharded.py
    const sharded = [
      { ...gather, when: "before forward" },
      { ...gather, when: "after backward", name: "reduce-scatter", of: "gradients" },
    ];
    const moves = {
      data: [{ ...reduce, when: "after backward", of: "gradients", whole: layer, among: data, every: 1 }],
      tensor: [
        { ...reduce, when: "after forward", of: "activations" },
        { ...reduce, when: "after backward", of: "activation gradients" },
      ],
      sharded,
      zero: sharded,
    };
    moves.data_tensor = [
      ...moves.tensor.map((move) => ({ ...move, axis: 1 })), // first what the layer before waits for
      { ...moves.data[0], whole: layer / tensor, axis: 0 },
    ];
    const withBytes = moves[strategy].map((move) => ({ ...move, bytes: FACTORS[move.name](move.among) * move.whole }));
    return withBytes.filter((move) => move.bytes > 0);
  }

  // Whether layer k, from 0, has a move of `every` second layer: in forward it follows the row-parallel layer, the
  // second of a pair; in backward the column-parallel one, the first.
  const belongs = (move, k) => move.every === 1 || k % 2 === (move.when.endsWith("forward") ? 1 : 0);

  // [{name, of, when, axis, among, whole, times, bytes}] of a step: `times` is how often it runs, and `bytes` what each
  // rank sends in all of them. In a pipeline only ranks that have a neighbour on that side do.
  function collectives(state) {
    if (state.strategy !== "pipeline") {
      return movesOf(state).map(({ every, bytes, ...move }) => {
        const times = MODEL.layers / every;
        return { ...move, times, bytes: times * bytes };
      });
    }
    if (state.ranks === 1) return [];
    const bytes = sizes(state).activation;
    const send = { name: "send", axis: null, among: state.ranks, whole: bytes / state.micro, times: state.micro };
    return [
      { ...send, of: "activations", when: "after forward", bytes },
      { ...send, of: "activation gradients", when: "after backward", bytes },
    ];
  }

  // [bytes that each rank sends in a step]
  function sent(state) {
    const all = collectives(state);
    if (state.strategy !== "pipeline") {
      return Array(state.ranks).fill(all.reduce((sum, collective) => sum + collective.bytes, 0));
    }
    const last = state.ranks - 1;
    return Array.from({ length: state.ranks }, (_, k) => {
      const [forward, backward] = all.map((collective) => collective.bytes);
      return (k < last ? forward : 0) + (k > 0 ? backward : 0);
    });
  }

  // [the most bytes that each part takes during a step on each rank]
  // Weights, gradients and Adam's moments: arXiv:1910.02054; zero is its stage 1, sharded its stage 3.
  // Each layer keeps its input for backward; of a pair of a column-parallel and a row-parallel layer the second has its
  // input split (arXiv:1909.08053).
  function memory(state) {
    const { strategy, ranks, micro } = state;
    const { data, tensor, pipeline } = mesh(state);
    const { weights, layer, activation } = sizes(state);
    const parameters = weights / MODEL.item;
    const split = strategy === "data" || strategy === "zero" ? 1 : strategy === "data_tensor" ? tensor : ranks;
    const inputs = (activation + activation / tensor) / 2; // the mean of both layers of a pair
    const parts = {
      weights: (BYTES.weights * parameters) / split,
      gradients: (BYTES.gradients * parameters) / split,
      optimizer: (BYTES.optimizer * parameters) / (strategy === "zero" ? ranks : split),
      activations: (MODEL.layers * inputs) / (data * pipeline),
      pending: 0,
      // when backward begins: the whole weights of all layers, and the whole gradient of one
      gathered: strategy === "sharded" && ranks > 1 ? weights + layer : 0,
    };
    if (strategy !== "pipeline") return Array(ranks).fill(parts);
    const schedule = SCHEDULES[state.schedule];
    const ofMicroBatch = parts.activations / micro; // an output is as large as an input
    return Array.from({ length: ranks }, (_, k) => ({
      ...parts,
      activations: ofMicroBatch * schedule.inputs(k, ranks, micro),
      pending: ofMicroBatch * schedule.pending(k, ranks, micro),
    }));
  }

  const total = (parts) => Object.values(parts).reduce((sum, bytes) => sum + bytes, 0);

  // Seconds of forward of a layer on a rank; backward takes twice as long: the gradients of x and of w.
  function forwardSeconds(state) {
    const { data, tensor } = mesh(state);
    return (2 * state.rows * MODEL.hidden * MODEL.hidden) / (data * tensor) / RATES.flops;
  }

  function updateSeconds(state) {
    return (memory(state)[0].optimizer / BYTES.optimizer) * RATES.secondsPerParameter;
  }

  const moveSeconds = (state, bytes) => bytes / (state.link * 1e9);

  // A lane under construction: blocks that follow each other, with "idle" in the gaps.
  class Lane {
    constructor() {
      this.blocks = [];
      this.end = 0;
    }
    add(kind, seconds, more = {}, ready = 0) {
      this.waitUntil(ready);
      if (seconds > 0) this.blocks.push({ kind, start: this.end, end: this.end + seconds, ...more });
      this.end += seconds;
      return this.end;
    }
    waitUntil(time) {
      if (time <= this.end) return;
      this.blocks.push({ kind: "idle", start: this.end, end: time });
      this.end = time;
    }
  }

  // All ranks do the same at the same time: each collective is for all of them.
  function lanesInStep(state) {
    const lane = new Lane();
    const moves = movesOf(state);
    const seconds = forwardSeconds(state);
    const move = (when, k) => {
      for (const collective of moves) {
        if (collective.when !== when || !belongs(collective, k)) continue;
        const { name, of, axis, bytes } = collective;
        lane.add("move", moveSeconds(state, bytes), { name, of, axis, bytes, layer: k + 1 });
      }
    };
    for (let k = 0; k < MODEL.layers; k += 1) {
      move("before forward", k);
      lane.add("forward", seconds, { layer: k + 1 });
      move("after forward", k);
    }
    for (let k = MODEL.layers - 1; k >= 0; k -= 1) {
      lane.add("backward", 2 * seconds, { layer: k + 1 });
      move("after backward", k);
    }
    lane.add("update", updateSeconds(state));
    return Array.from({ length: state.ranks }, () => lane.blocks);
  }

  // Each rank makes the calls of its schedule in order, and waits where another has not sent yet what a call needs. A
  // send takes time of the sender only.
  function lanesOfPipeline(state) {
    const { ranks, micro } = state;
    const lanes = Array.from({ length: ranks }, () => new Lane());
    const calls = lanes.map((_, k) => SCHEDULES[state.schedule].calls(k, ranks, micro));
    const forward = ((MODEL.layers / ranks) * forwardSeconds(state)) / micro;
    const seconds = { forward, backward: 2 * forward, backward_input: forward, backward_weights: forward };
    const bytes = sizes(state).activation / micro;
    // when a rank has the input of a micro-batch, and the gradient of its output
    const arrived = { activations: lanes.map(() => []), "activation gradients": lanes.map(() => []) };
    const ready = (k, [kind, j]) => {
      if (kind === "forward") return k === 0 ? 0 : arrived.activations[k][j];
      return kind === "backward_weights" || k === ranks - 1 ? 0 : arrived["activation gradients"][k][j];
    };
    const run = (k, [kind, j]) => {
      lanes[k].add(kind, seconds[kind], { micro: j + 1 }, ready(k, [kind, j]));
      const to = { forward: k + 1, backward: k - 1, backward_input: k - 1 }[kind] ?? -1;
      if (to < 0 || to >= ranks) return;
      const of = kind === "forward" ? "activations" : "activation gradients";
      const send = { name: "send", of, bytes, to, micro: j + 1 };
      arrived[of][to][j] = lanes[k].add("move", moveSeconds(state, bytes), send);
    };
    while (calls.some((left) => left.length)) {
      calls.forEach((left, k) => {
        while (left.length && ready(k, left[0]) !== undefined) run(k, left.shift());
      });
    }
    for (const lane of lanes) lane.add("update", updateSeconds(state));
    const end = Math.max(...lanes.map((lane) => lane.end));
    for (const lane of lanes) lane.waitUntil(end);
    return lanes.map((lane) => lane.blocks);
  }

  // [[{kind, start, end, ...}] of each rank]: without gaps, in seconds. kind: one of KINDS.
  const lanes = (state) => (state.strategy === "pipeline" ? lanesOfPipeline(state) : lanesInStep(state));

  const length = (rows) => Math.max(...rows.map((blocks) => blocks[blocks.length - 1].end));

  // {kind: the part of the time of all ranks together}
  function shares(rows) {
    const byKind = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    const all = rows.length * length(rows);
    for (const blocks of rows) for (const block of blocks) byKind[block.kind] += (block.end - block.start) / all;
    return byKind;
  }

  const alone = (state) => ({ ...state, strategy: "data", ranks: 1 });

  // All that the page says of a state in numbers.
  function step(state) {
    const rows = lanes(state);
    const memories = memory(state);
    const totals = memories.map(total);
    return {
      lanes: rows,
      seconds: length(rows),
      secondsAlone: length(lanes(alone(state))),
      shares: shares(rows),
      idleFormula: SCHEDULES[state.schedule].idle(mesh(state).pipeline, state.micro),
      memory: memories,
      fullest: totals.indexOf(Math.max(...totals)), // the first rank that holds the most
      memoryAlone: memory(alone(state))[0],
      collectives: collectives(state),
      sent: sent(state),
    };
  }

  // Each strategy with the sliders as they are, or null where it does not run on so many ranks.
  function compare(state) {
    return Object.keys(STRATEGIES).map((strategy) => {
      if (!STRATEGIES[strategy].ranks.includes(state.ranks)) return { strategy, step: null };
      return { strategy, step: step({ ...state, strategy }) };
    });
  }

  return {
    MODEL, ROWS, LINKS, RATES, KINDS, STRATEGIES, SCHEDULES, microBatches, settle, mesh, total, step, compare,
  };
})();
