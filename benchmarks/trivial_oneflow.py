"""A minimal parallel job: an all-reduce of a single number."""

import oneflow as flow

ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
total = flow.ones(1, placement=ranks, sbp=flow.sbp.partial_sum).numpy()
if flow.env.get_rank() == 0:
    print(total)
