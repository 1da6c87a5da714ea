// What timeline.js says, in English and in Chinese. {name} stands for a value.

const StepWords = {
  en: {
    model:
      "A stack of {layers} equal layers, relu(x) @ w, inside a larger model: {hidden} features in and out, which " +
      "1 to 8 ranks divide evenly; float32, Adam. Each layer has {layer} of weights.",
    rates:
      "All times are by formula; nothing here is measured. A rank computes at {flops} GFLOP/s and updates a " +
      "parameter in {update} ns, somewhat slower than the CPU cores that we measured. Backward takes twice as long as " +
      "forward. No rank computes while it sends, as in the eager recipes.",
    strategy: "Strategy",
    ranks: "Ranks",
    micro: "Micro-batches",
    rows: "Batch, rows",
    link: "Link, GB/s",
    "rank k": "rank {rank}",
    alone: "a single rank",
    data: "data parallel",
    tensor: "tensor parallel",
    pipeline: "pipeline",
    data_tensor: "data x tensor",
    sharded: "fully sharded",
    zero: "ZeRO",
    "about data":
      "Each rank has all weights and its rows of the batch. During backward, an all-reduce sums each weight's " +
      "gradient.",
    "about tensor":
      "Layers come in pairs: the first has its weight split by columns, the second by rows. Each pair needs an " +
      "all-reduce of its output in forward, and one of its input's gradient in backward.",
    "about pipeline":
      "Each rank has {stage} of the {layers} layers. The batch is cut into micro-batches, so that the ranks can " +
      "work at the same time: GPipe, as in a graph.",
    "about data_tensor":
      "A mesh of {data} x {tensor} ranks: axis 0 splits the batch, axis 1 the weights. All-reduces of " +
      "activations run along axis 1, those of gradients along axis 0.",
    "about sharded":
      "Each rank has 1/n of every weight, gradient and moment. An all-gather brings a layer together before its " +
      "forward, and it stays until its backward, as in FSDP with reshard_after_forward=False; a reduce-scatter " +
      "splits the gradient.",
    "about zero":
      "Data parallel, but each rank has Adam's moments of 1/n of each weight, and updates that part. The new " +
      "weights are gathered before their next forward: stage 1 of ZeRO.",
    summary: "A step takes {seconds}: {times} times as fast as on a single rank. {parts}",
    "summary of one": "A step takes {seconds} on a single rank. {parts}",
    "summary shares":
      "The ranks spend {compute} of the step computing, {move} communicating, {update} updating, and {idle} idle.",
    "summary sizes": "A rank holds {memory} and sends {sent}.",
    time: "The step in time",
    "time of": "Milliseconds by formula, not measured; no rank computes while it sends. Numbers in blocks are layers.",
    "time of micro":
      "Milliseconds by formula, not measured; no rank computes while it sends. Numbers in blocks are " +
      "micro-batches.",
    forward: "forward",
    backward: "backward",
    moves: "communication: {names}",
    update: "update",
    idle: "idle",
    "block forward": "forward of layer {layer}",
    "block backward": "backward of layer {layer}",
    "block forward micro": "forward of micro-batch {micro}",
    "block backward micro": "backward of micro-batch {micro}",
    "block move": "{name} of {of}{axis}, layer {layer}, {bytes} a rank",
    "block send": "send of {of}, micro-batch {micro}, to rank {to}, {bytes}",
    "block update": "update",
    "block idle": "idle",
    "in words": "The blocks in words",
    "all ranks": "every rank",
    weights: "weights",
    gradients: "gradients",
    optimizer: "Adam's moments",
    activations: "activations",
    gathered: "gathered weights",
    "activation gradients": "activations' gradients",
    axis: " along axis {axis}",
    memory: "Memory of each rank",
    "memory of":
      "The most that each part takes in a step. Each layer keeps its input for backward. A rank " +
      "holds {part} of what a single rank would.",
    "memory gathered":
      " Gathered weights: those of all layers when backward begins, and the whole gradient of one layer.",
    sum: "sum",
    part: "part",
    "a rank": "a rank",
    sends: "What a rank sends in a step",
    collective: "collective",
    formula: "formula",
    of: "{name} of {of}{axis}, {way}",
    "way after forward": "after forward",
    "way before forward": "before forward",
    "way after backward": "after backward",
    "sends nothing": "Nothing: there is a single rank.",
    "sends by rank":
      "A rank between two others sends both; the first sends activations only, the last gradients only.",
    "idle of": "Idle",
    "idle formula":
      "With p = {ranks} stages and m = {micro} micro-batches a rank is idle (p - 1) / (m + p - 1) = {stages} / " +
      "{both} = {formula} of forward and backward, if sends took no time. In the picture, with sends and " +
      "update, it is {share} of the step.",
    "idle none": "No rank waits for another: all do equal work and enter each collective together.",
    compare: "All strategies",
    "compare of": "{ranks} ranks, {rows} rows, {link} GB/s; the pipeline with {micro} micro-batches.",
    "a step": "a step",
    "sends at most": "sends",
    "up to": "up to {most}",
    try:
      "What data parallel sends grows with the weights; tensor parallel and the pipeline send " +
      "activations, which grow with the rows. So fewer rows favour tensor parallel, more rows data parallel, and " +
      "a slow link the pipeline.",
    "idle share": "idle",
    holds: "holds",
    "not on": "not on {ranks} ranks",
    fastest: "fastest",
  },
  zh: {
    model: "一个较大模型中的 {layers} 个相同的层 relu(x) @ w：输入和输出各 {hidden} 个特征，可由 1 到 8 个 rank 均分；float32，Adam。每层的权重占 {layer}。",
    rates:
      "所有时长都由公式算出，均非实测。每个 rank 的计算速度为 {flops} GFLOP/s，更新一个参数需要 {update} ns，略慢于我们实测的 CPU " +
      "核。反向的时间是前向的两倍。与 eager 模式下的示例一样，rank 在通信时不计算。",
    strategy: "策略",
    ranks: "rank 数",
    micro: "micro-batch 数",
    rows: "batch 的行数",
    link: "链路，GB/s",
    "rank k": "rank {rank}",
    alone: "单个 rank",
    data: "数据并行",
    tensor: "张量并行",
    pipeline: "流水并行",
    data_tensor: "数据 x 张量并行",
    sharded: "全分片",
    zero: "ZeRO",
    "about data": "每个 rank 持有全部权重和 batch 中自己的行。反向时，每个权重的梯度通过 all-reduce 相加。",
    "about tensor": "层两两成对：第一层的权重按列切分，第二层按行切分。每一对在前向时需要对输出做一次 all-reduce，在反向时需要对输入的梯度做一次。",
    "about pipeline":
      "每个 rank 持有 {layers} 层中的 {stage} 层。batch 分成多个 micro-batch，各个 rank 因此可以同时工作：这是 GPipe，与 graph 中相同。",
    "about data_tensor": "{data} x {tensor} 的设备网格：轴 0 切分 batch，轴 1 切分权重。激活值的 all-reduce 沿轴 1，梯度的沿轴 0。",
    "about sharded":
      "每个 rank 只持有每个权重、梯度、一阶矩和二阶矩的 1/n。每层在前向之前用 all-gather 收集权重，保留到反向用完为止，相当于 FSDP 设置 " +
      "reshard_after_forward=False；reduce-scatter 切分梯度。",
    "about zero": "与数据并行相同，但每个 rank 只持有每个权重的 1/n 所对应的 Adam 一阶矩和二阶矩，并只更新这一部分。新的权重在下一次前向之前收集：这是 ZeRO 的第 1 阶段。",
    summary: "一步需要 {seconds}，速度是单个 rank 的 {times} 倍。{parts}",
    "summary of one": "单个 rank 一步需要 {seconds}。{parts}",
    "summary shares": "各 rank 的时间中，计算占 {compute}，通信占 {move}，更新占 {update}，空闲占 {idle}。",
    "summary sizes": "每个 rank 持有 {memory}，发送量：{sent}。",
    time: "一步的时间",
    "time of": "单位为毫秒，由公式算出，不是实测；通信与计算不重叠。色块中的数字是层的序号。",
    "time of micro": "单位为毫秒，由公式算出，不是实测；通信与计算不重叠。色块中的数字是 micro-batch 的序号。",
    forward: "前向",
    backward: "反向",
    moves: "通信：{names}",
    update: "更新",
    idle: "空闲",
    "block forward": "第 {layer} 层的前向",
    "block backward": "第 {layer} 层的反向",
    "block forward micro": "micro-batch {micro} 的前向",
    "block backward micro": "micro-batch {micro} 的反向",
    "block move": "{of}的 {name}{axis}，第 {layer} 层，每个 rank {bytes}",
    "block send": "把 micro-batch {micro} 的{of}发给 rank {to}，{bytes}",
    "block update": "更新",
    "block idle": "空闲",
    "in words": "用文字列出各个色块",
    "all ranks": "每个 rank",
    weights: "权重",
    gradients: "梯度",
    optimizer: "Adam 的一阶矩和二阶矩",
    activations: "激活值",
    gathered: "收集来的权重",
    "activation gradients": "激活值的梯度",
    axis: "（沿轴 {axis}）",
    memory: "每个 rank 的内存",
    "memory of": "各部分在一步中的最大值。激活值：每层为反向保存自己的输入。每个 rank 持有的是单个 rank 时的 {part}。",
    "memory gathered": "收集来的权重：反向开始时，所有层的完整权重，以及一层的完整梯度。",
    sum: "合计",
    part: "部分",
    "a rank": "每个 rank",
    sends: "一步中每个 rank 发送的数据量",
    collective: "集合通信",
    formula: "公式",
    of: "{of}的 {name}{axis}，{way}",
    "way after forward": "前向之后",
    "way before forward": "前向之前",
    "way after backward": "反向之后",
    "sends nothing": "无：只有一个 rank。",
    "sends by rank": "两侧都有相邻 rank 的 rank 两者都发送；第一个只发送激活值，最后一个只发送梯度。",
    "idle of": "空闲",
    "idle formula":
      "p = {ranks} 个 stage，m = {micro} 个 micro-batch：若收发不占时间，每个 rank 在前向与反向中空闲 (p - 1) / (m + p - 1) = {stages} " +
      "/ {both} = {formula}。图中计入收发和更新，空闲占一步的 {share}。",
    "idle none": "没有 rank 需要等待：各 rank 的计算量相同，每次集合通信由所有 rank 一起完成。",
    compare: "所有策略",
    "compare of": "{ranks} 个 rank，{rows} 行，{link} GB/s；流水并行用 {micro} 个 micro-batch。",
    "a step": "一步",
    "sends at most": "发送",
    "up to": "至多 {most}",
    try: "数据并行发送梯度，与权重一样大；张量并行和流水并行发送激活值，随行数增大。因此行数少时张量并行更有利，行数多时数据并行更有利，链路慢时流水并行更有利。",
    "idle share": "空闲",
    holds: "持有",
    "not on": "不支持 {ranks} 个 rank",
    fastest: "最快",
  },
};
