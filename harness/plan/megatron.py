"""What Megatron-LM chose and reached, beside what a plan says of it: arXiv:2104.04473, table 1."""

from collections import namedtuple

from harness.plan import cost, devices, formulas, report
from harness.plan.case import Case
from harness.plan.model import Model


class Row(namedtuple("Row", "billions num_heads hidden_size num_layers tensor pipeline ranks batch_size tflops")):
    """A model of so many parameters on so many A100 of 80 GB, 8 in a host; tflops: of a device, measured."""

    @property
    def mesh(self):
        return self.ranks // self.tensor // self.pipeline, self.tensor, self.pipeline

    @property
    def seconds(self):
        """Of a step, by their count of what is computed, which includes the recomputation."""
        model = case_of_row(self).model
        return formulas.flops(model, self.batch_size, "full") / (self.ranks * self.tflops * devices.TERA)


ROWS = [
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def case_of_row(row):
    """As they ran it: with full recomputation. Its last stage has a copy of the table of its own."""
    model = Model(
        row.num_layers, row.hidden_size, row.num_heads, 2048, 51200, biases=True, dropout=True, tied=row.pipeline == 1
    )
    cluster = devices.Cluster(row.ranks // 8, 8, devices.DEVICES["a100-80"], "amp", devices.EFFICIENCY)
    return Case(model, row.batch_size, cluster, ("full",), True)


def costs(row):
    """Those of the layouts that fit and that Megatron-LM had then.

    They have equal stages, no sequence parallelism and no sharded weights.
    """
    case = case_of_row(row)
    found = []
    for layout in cost.layouts(case.model, case.batch_size, case.cluster.ranks, case.recompute):
        unequal = row.num_layers % layout.pipeline
        if not (layout.sequence_parallel or layout.shard_weights or unequal):
            found.append(cost.cost(case.model, layout, case.batch_size, case.cluster))
    return sorted((one for one in found if one.bytes <= case.cluster.memory), key=lambda one: one.seconds)


def first_layouts(row):
    """The Cost of the fastest layout of each mesh, fastest first."""
    return report.best_of_each_mesh(costs(row))


def modelled(row):
    """The Cost of the mesh that they chose."""
    return next(one for one in first_layouts(row) if one.layout.mesh == row.mesh)


def rows_of_table():
    """Lines of Markdown: their mesh, the time of a step as they measured it and by the plan, its place in the plan."""
    for row in ROWS:
        best = first_layouts(row)
        place = [one.layout.mesh for one in best].index(row.mesh)
        planned = best[place].seconds
        difference = 100 * (planned / row.seconds - 1)
        mesh = " x ".join(map(str, row.mesh))
        times = f"{row.seconds:.1f} s | {planned:.1f} s ({difference:+.0f}\N{NO-BREAK SPACE}%)"  # for a narrow column
        yield f"| {row.billions} B, {mesh} | {times} | {place + 1} |"
