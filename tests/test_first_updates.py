"""The first update of a process has plain's bits too, though it is torch's first use of MKL's vector math."""

import pytest
from fresh_python import run_fresh_python

TYPE_OF_PROCESSOR = """
    import ctypes, os, torch
    from torch import nn

    import offload

    def chosen():
        # The function reads the type of the processor first, from a variable that is -1 until the first call.
        if code[:2] != bytes.fromhex("8b05"):
            return None
        return ctypes.c_int.from_address(address + 6 + int.from_bytes(code[2:], "little", signed=True)).value

    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    detect = getattr(library, "mkl_vml_serv_cpu_detect", None)
    address = ctypes.cast(detect, ctypes.c_void_p).value if detect is not None else 0
    code = ctypes.string_at(address, 6) if address else b""
    before = chosen()
    model = nn.Linear(4, 4)
    torch.set_default_device("meta")  # tensors of these kinds would use no MKL
    torch.set_default_dtype(torch.bfloat16)
    offload.enable(model)
    print(before, chosen())
"""

UPDATES = """
    import hashlib, sys
    import torch
    from torch import nn

    from offload.torch_compat.vector_math import choose_kernels

    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)))
    if sys.argv[1] == "plain":
        choose_kernels()  # plain torch can compute this update wrongly too
    else:
        import offload

        offload.enable(model, min_tensor_bytes="64KiB", **({"n_tensors": -1} if sys.argv[1] == "all" else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(512, 256)
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = [loss.detach(), *(each.detach() for each in model.parameters())]
        kept += [value for state in optimizer.state.values() for value in state.values()]
        print(hashlib.sha256(b"".join(each.numpy().tobytes() for each in kept)).hexdigest())
"""


def test_mkl_has_chosen_its_kernels_when_training_begins():
    before, after = run_fresh_python(TYPE_OF_PROCESSOR).split()
    if before == "None":
        pytest.skip("this torch has no MKL, or another one")
    assert int(before) == -1
    assert int(after) >= 0


@pytest.mark.parametrize("how", ["all", "planned"])
def test_parameters_and_state_are_plains_after_each_update(how):
    """Two threads make MKL's first call here; without `choose_kernels` that went wrong in one of ten runs or fewer."""
    with_offload, plain = (run_fresh_python(UPDATES, each, OMP_NUM_THREADS="2") for each in (how, "plain"))
    assert len(set(plain.split())) == 4
    assert with_offload == plain
