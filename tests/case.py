"""What one recipe must do, as data."""

from dataclasses import dataclass, field


@dataclass
class Case:
    """What one recipe must do on one world size with given arguments."""

    layout: dict  # name -> (SBP, ranks), in the order in which the recipe returns the tensors
    values: dict  # name -> Value
    matmuls: list = field(default_factory=list)  # (x, w, out) by name, in the order of execution
    parts: dict = field(default_factory=dict)  # what each rank of a P, or of a local tensor, has, or of a B that is
    # not the same on all ranks; by name, or by (name, whether in a graph) where the modes differ; of a P without parts,
    # the sum is checked
    moves: list = field(default_factory=list)  # (SBP, ranks) before and after each to_global in order, and its grad_sbp
    stages: list = field(default_factory=list)  # (number, ranks) that the graph sets
    moved: dict = field(default_factory=dict)  # name -> name of the tensor that it is, moved
    claims: dict = field(default_factory=dict)  # words -> whether they hold, a function of each rank's tensors by name:
    # what must be true of values that OneFlow draws at random
    added: tuple = ()  # outputs that an all-reduce adds up, in an order that eager and graph mode do not share
    drawn: tuple = ()  # the tensors that the docstring draws, if not all
    in_graph: dict = field(default_factory=dict)  # name -> (SBP, ranks) where a graph's is another one, None if missing
    steps: int = 0  # of training; matmuls and moves are those of one step, and in a graph of all, as it is built once
    matmuls_again: list = field(default_factory=list)  # those that backward makes anew behind them in each step, in
    # eager mode; in a graph it is OneFlow's compiler that adds them
    passes: int = 1  # forward passes of a step in eager mode: its micro-batches
    moves_in_graph: list = None  # the moves of a graph, where they are others
    moves_each_step: list = field(default_factory=list)  # moves behind the passes of each step, in either mode
    moves_before: list = field(default_factory=list)  # moves before the first step, in either mode
    moves_after: list = field(default_factory=list)  # moves behind the last step, in either mode
    dtypes: dict = field(default_factory=dict)  # name -> dtype of a tensor that is not float32
    models: int = 1  # trained one after the other, each for all steps; each is a graph of its own; where there are more
    # than one, `matmuls` has a list for each
    all_moves: tuple = (
        None  # in eager and in graph mode, all in order, where not all steps move the same; no other then
    )
    sends: list = None  # elements that each rank sends in one step of training, by the formula; None if not measured
    sends_in_graph: list = None  # the same in a graph, where it is something else

    def layout_in(self, graph):
        """The layout in one of the modes."""
        layout = {**self.layout, **(self.in_graph if graph else {})}
        return {name: where for name, where in layout.items() if where}
