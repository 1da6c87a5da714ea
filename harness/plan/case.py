"""What a plan is for."""

import dataclasses

from harness.plan.devices import Cluster
from harness.plan.model import Model


@dataclasses.dataclass(frozen=True)
class Case:
    model: Model
    batch_size: int  # sequences of a step, of all ranks
    cluster: Cluster
    recompute: tuple  # which ones it may choose from
    on_gpus: bool
