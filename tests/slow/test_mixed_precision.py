"""What recipes/README.md says of 16-bit numbers on a CPU in OneFlow 0.9.0."""

import warnings

import pytest

from harness.pool import PoolError

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
FAILS = ("matmul", "relu", "softmax", "layer_norm", "sgd", "adamw")


def tried(dtype):
    """On a rank: {what is done with a tensor of this dtype: the error, or None if it works}."""
    import oneflow as flow

    dtype = getattr(flow, dtype)
    x = flow.ones(4, 4).to(dtype)

    def step(optimizer):
        w = flow.nn.Parameter(flow.ones(4, 4).to(dtype))
        optimizer = optimizer([w], lr=0.1)
        w.to(flow.float32).sum().backward()
        optimizer.step()

    attempts = {
        "cast": lambda: x.to(flow.float32).numpy(),
        "matmul": lambda: flow.matmul(x, x),
        "relu": lambda: flow.relu(x),
        "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: flow.nn.LayerNorm(4).to(dtype)(x),
        "sgd": lambda: step(flow.optim.SGD),
        "adamw": lambda: step(flow.optim.AdamW),
    }
    errors = dict.fromkeys(attempts)
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            errors[name] = str(error)
    return errors


@DTYPES
def test_computing_in_16_bit_fails(pools, dtype):
    [errors] = pools(1).call(f"{__file__}:tried", dtype=dtype)
    assert errors.pop("cast") is None and set(errors) == set(FAILS)
    for name, error in errors.items():
        wanted = "check_failed_error" if (name, dtype) == ("layer_norm", "bfloat16") else "op_kernel_not_found_error"
        assert error and wanted in error, (name, error)


def gathered(dtype):
    """On a rank: a split tensor of this dtype, gathered."""
    import oneflow as flow

    ranks, S, B = flow.placement.all("cpu"), flow.sbp.split(0), flow.sbp.broadcast
    x = flow.arange(8, placement=ranks, sbp=B).float().to_global(sbp=S).to(getattr(flow, dtype))
    return x.to_global(sbp=B).to_local().to(flow.float32).numpy().tolist()


def added_up(dtype):
    """On a rank: the sum of a P of this dtype."""
    import oneflow as flow

    ranks, S, B = flow.placement.all("cpu"), flow.sbp.split(0), flow.sbp.broadcast
    x = flow.ones(4, placement=ranks, sbp=S).to_global(sbp=flow.sbp.partial_sum).to(getattr(flow, dtype))
    return x.to_global(sbp=B).to_local().to(flow.float32).numpy().tolist()


@DTYPES
def test_16_bit_is_gathered_but_not_added_up(pools, dtype):
    assert pools(2).call(f"{__file__}:gathered", dtype=dtype) == [list(range(8))] * 2
    with pytest.raises(PoolError, match="map::at"):
        pools(2).call(f"{__file__}:added_up", dtype=dtype)


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
