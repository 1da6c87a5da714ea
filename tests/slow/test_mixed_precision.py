"""What recipes/README.md says of autocast and enable_amp on a CPU; docs/errors-tensors.md runs float16 itself."""

import warnings


def autocast():
    """On a rank: the dtype of a product under autocast, and the warnings."""
    import oneflow as flow

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with flow.autocast("cpu"):
            product = flow.matmul(flow.ones(2, 2), flow.ones(2, 2))
    return str(product.dtype), [str(warning.message) for warning in caught]


def losses_of_graphs():
    """On a rank: the losses of a graph, without and with enable_amp."""
    import oneflow as flow

    class Training(flow.nn.Graph):
        def __init__(self, amp):
            super().__init__()
            flow.manual_seed(0)
            self.layer = flow.nn.Linear(64, 64)
            self.add_optimizer(flow.optim.SGD(self.layer.parameters(), lr=0.1))
            self.config.enable_amp(amp)

        def build(self, x):
            loss = self.layer(x).square().mean()
            loss.backward()
            return loss

    graphs = [Training(amp) for amp in (False, True)]
    return [[graph(flow.ones(8, 64) * 0.1).item() for _ in range(3)] for graph in graphs]


def test_autocast_and_enable_amp_change_nothing(pools):
    [[dtype, [message]]] = pools(1).call(f"{__file__}:autocast")
    assert dtype == "oneflow.float32" and message == "CPU autocast is not supported currently. Disabling autocast."
    [[without, with_amp]] = pools(1).call(f"{__file__}:losses_of_graphs")
    assert without == with_amp and len(set(without)) == 3
