"""What docs/silently-wrong.md says and its examples, which test_pages.py runs, do not show."""

import re

import pytest

from tests.cases import ROOT
from tests.jobs import LAUNCH, Run

ON_RANK = ROOT / "tests" / "on_rank_silently.py"


@pytest.mark.parametrize("function", re.findall(r"^def (\w+)\(\):", ON_RANK.read_text(), flags=re.MULTILINE))
def test_on_two_ranks(pools, function):
    pools(2).call(f"{ON_RANK}:{function}")


STACKS = """
import oneflow as flow

class TrainingGraph(flow.nn.Graph):
    def __init__(self):
        super().__init__()
        ranks, B, S = flow.placement.all("cpu"), flow.sbp.broadcast, flow.sbp.split
        self.layer = flow.nn.Linear(4, 2, bias=False).to_global(ranks, B).to_global(sbp=S(0))
        self.add_optimizer(flow.optim.SGD(self.layer.parameters(), lr=1.0))

    def build(self):
        pairs = flow.stack([self.layer.weight, self.layer.weight], dim=-1)
        loss = (pairs * pairs).sum()
        loss.backward()
        return loss

TrainingGraph()()
"""


def test_graph_with_stack_of_split_tensors_does_not_compile(tmp_path):
    """In a job of its own, as not all ranks raise."""
    (tmp_path / "stacks.py").write_text(STACKS)
    job = Run(LAUNCH, "-n", 2, "--timeout", 60, "stacks.py", cwd=tmp_path).wait()
    assert job.code == 1 and "((2,2) vs (1,4))" in job.err
