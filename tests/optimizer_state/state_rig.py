"""Training with an optimizer's state in a store of any tier, to be compared with plain training bit by bit."""

from __future__ import annotations

import torch
from core.store_rig import make_store

from offload.optimizer_state.mover import StateMover
from offload.runtime.engine import Engine

MIN_BYTES = 2048
O = torch.optim  # noqa: E741
# Two plain runs of torch 2.13 in one process have other momentum buffers.
TORCH_DIFFERS = {("SGD", "fused", torch.bfloat16)}
OPTIMIZERS = {
    "Adam": (O.Adam, {}),
    "Adam amsgrad": (O.Adam, {"amsgrad": True}),
    "AdamW": (O.AdamW, {"weight_decay": 0.1}),
    "AdamW maximize": (O.AdamW, {"maximize": True}),
    "AdamW lr tensor": (O.AdamW, {"lr": torch.tensor(1e-3)}),
    "Adamax": (O.Adamax, {}),
    "NAdam": (O.NAdam, {}),
    "RAdam": (O.RAdam, {}),
    "Adagrad": (O.Adagrad, {}),
    "Adadelta": (O.Adadelta, {}),
    "RMSprop": (O.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (O.Rprop, {}),
    "SGD": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "ASGD": (O.ASGD, {}),
    "Adafactor": (O.Adafactor, {}),
    **({"Muon": (O.Muon, {"lr": 0.01})} if hasattr(O, "Muon") else {}),
}
SHAPES = [(257, 33), (1000,), (64, 64), (3, 5, 7), (1,), (1000, 7)]
MATRICES = [(257, 33), (64, 64), (1000, 7), (5, 5), (128, 31)]  # all that Muon takes


def make_engine(tier, directory):
    return Engine(make_store(tier, directory, host_bytes_max=2 << 20), torch.device("cpu"))


def make_mover(optimizer, tier, directory):
    return StateMover(optimizer, make_engine(tier, directory), MIN_BYTES, lambda parameter: f"p{parameter.numel()}")


def make_params(kind=O.AdamW, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = MATRICES if kind.__name__ == "Muon" else SHAPES
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_optimizer(kind, options, dtype=torch.float32):
    params = make_params(kind, dtype)
    return kind([{"params": params[:3]}, {"params": params[3:], "lr": 0.003}], **options)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_gradients(optimizer, step):
    """Random ones; one parameter has none in every fourth step."""
    generator = torch.Generator().manual_seed(step)
    for n, param in enumerate(params_of(optimizer)):
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if step % 4 == 3 and n == 1 else gradient


def run(optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        set_gradients(optimizer, step)
        optimizer.step()


def everything(optimizer):
    """What two runs are compared in: weights, and the state_dict with its tensors."""
    return [param.detach().clone() for param in params_of(optimizer)], optimizer.state_dict()


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
    else:
        assert one == other
