"""What has run on a GPU: a section of docs/reliability.md, written by hand."""

SECTION = """## On a GPU

On 26 November 2026 the tests marked `gpu` ran on an NVIDIA H200 (PyTorch 2.11 with CUDA 13.0, Python 3.12), at commit
`a564d51`. All 114 passed; four more are for the simulated accelerator only. At `62c0369`, 128 of 130 passed. The other
two compare the peaks of two trainings. The first training's peak included memory that earlier tests had left; tests
free it first now. Three files ran again at `f37efbd`. These two tests passed there, and 27 of 29 in all. The output of
the two that failed was lost. Both have been changed since, but have not run on a GPU again. At an earlier commit of
that day, 297 tests that were written for the CPU or the simulated accelerator passed there too: graph lifetimes,
in-place changes, interrupts, kinds of tensors, recomputation, moved state and parameters. Other tests in the same files
need two devices, set a limit below the 64 MiB that cuBLAS takes, or use kernels that add in another order each time.

A GPT was trained on it with and without offload; losses, parameters and optimizer state were equal to the last bit in
each case: the default plan (float32 and bfloat16), `memory_limit` at 40 % of plain's peak and with dropout, moved
optimizer state (AdamW, fused and not; SGD with momentum), updates in backward, frozen parameters, all parameters moved,
all of these together, blocks compiled before and after `enable`, autocast, GradScaler, DDP over NCCL and FSDP2 (one
process each). `tests/test_gpu_training.py` repeats these cases with a smaller network.
"""
