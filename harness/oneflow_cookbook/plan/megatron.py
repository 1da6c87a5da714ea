"""The layouts and times of Megatron-LM, arXiv:2104.04473, table 1, compared with the plan."""

import functools
from collections import namedtuple

from oneflow_cookbook.plan import cost, devices, formulas, report
from oneflow_cookbook.plan.model import Model


class Row(namedtuple("Row", "billions num_heads hidden_size num_layers tensor pipeline ranks batch_size tflops")):
    """A row of the table: a model on A100 of 80 GB, 8 in a host. tflops: measured, of a device."""

    @property
    def mesh(self):
        return self.ranks // self.tensor // self.pipeline, self.tensor, self.pipeline

    @property
    def seconds(self):
        """Seconds of a step, by the paper's count of operations, which includes the recomputation."""
        model = problem_of_row(self).model
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


def problem_of_row(row):
    """The Problem of a row, as they ran it: with full recomputation, and a copy of the table on the last stage."""
    model = Model(
        row.num_layers, row.hidden_size, row.num_heads, 2048, 51200, biases=True, dropout=True, tied=row.pipeline == 1
    )
    cluster = devices.Cluster(row.ranks // 8, 8, devices.DEVICES["a100-80"], "amp", devices.EFFICIENCY)
    return cost.Problem(model, row.batch_size, cluster, ("full",), True)


def costs(row):
    """The Costs, fastest first, of the layouts that fit and that Megatron-LM had then.

    These have equal stages, no sequence parallelism and no sharded weights.
    """
    problem = problem_of_row(row)
    candidates = []
    for layout in cost.layouts(problem.model, problem.batch_size, problem.cluster.ranks, problem.recompute):
        unequal = row.num_layers % layout.pipeline
        if not (layout.sequence_parallel or layout.shard_weights or unequal):
            candidates.append(cost.cost(problem.model, layout, problem.batch_size, problem.cluster))
    fit = [candidate for candidate in candidates if candidate.bytes <= problem.cluster.memory]
    return sorted(fit, key=lambda candidate: candidate.seconds)


@functools.lru_cache(maxsize=None)
def first_layouts(row):
    """The Cost of the fastest layout of each mesh, fastest first."""
    return report.best_of_each_mesh(costs(row))


def modelled(row):
    """The Cost of the mesh that they chose."""
    return next(candidate for candidate in first_layouts(row) if candidate.layout.mesh == row.mesh)
