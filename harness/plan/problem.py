"""The problem that a plan solves: which layout trains this model on this cluster the fastest?"""

import dataclasses

from harness.plan.devices import Cluster
from harness.plan.model import Model


@dataclasses.dataclass(frozen=True)
class Problem:
    model: Model
    batch_size: int  # sequences of a step, on all ranks together
    cluster: Cluster
    recompute: tuple  # the kinds of recomputation that the plan may choose from, see formulas.RECOMPUTE
    on_gpus: bool
