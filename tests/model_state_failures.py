"""Failures of optimizer state, gradients and parameters that move: what happens, and the tests that show it.

`reliability.py` writes them to docs/reliability.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass

GUARDS = (
    "optimizer_state/test_state_guards.py",
    "optimizer_state/test_share_guards.py",
    "optimizer_state/test_in_passes_guards.py",
    "optimizer_state/test_gradient_guards.py",
    "parameters/test_frozen_guards.py",
    "parameters/test_trained_guards.py",
)
HEAD = """## Model state: what happens in each failure

Optimizer state, gradients and parameters that leave memory are stored as saved tensors are, and fail in the same ways.
Each row is a failure. The tests are in `tests/`. After the name of a file come the names of its tests, without `test_`
and with spaces instead of underscores. Values are compared with `torch.equal` to those of training without offload.
Ctrl-C and signal handlers are tried at some lines by default, and at many more with `--full`.
"""
FOOT = """
The guards of model state are not in the list of [guards removed on purpose](#guards-removed-on-purpose). These files
leave them out one at a time, and a scenario has to fail without each guard: {files}. They run with the parts on
optimizer state and on parameters.
"""


@dataclass(frozen=True)
class Failure:
    """A row: the failure, what happens, and the tests that show it, by their file in tests/."""

    what: str
    result: str
    tests: dict[str, tuple[str, ...]]


STATE, STATE_LIFE = "optimizer_state/test_state_faults.py", "optimizer_state/test_state_lifetimes.py"
GRADIENTS = "optimizer_state/test_gradient_faults.py"
IN_BACKWARD, SNAPSHOTS = "optimizer_state/test_in_backward_ends.py", "optimizer_state/test_snapshots.py"
IN_PASSES = "optimizer_state/test_in_passes_failures.py"
FROZEN, FROZEN_LIFE = "parameters/test_frozen_faults.py", "parameters/test_frozen_lifetimes.py"
TRAINED, TRAINED_LIFE = "parameters/test_trained_faults.py", "parameters/test_trained_lifetimes.py"
FROZEN_STOPS, TRAINED_STOPS = "parameters/test_frozen_interrupts.py", "parameters/test_trained_interrupts.py"
FAILURES = (
    Failure(
        "A write fails",
        "The tensor stays in memory, and a later step tries again. Values are equal. The report counts such tensors of "
        "optimizer state and parameters.",
        {
            STATE: ("test_a_write_that_fails_keeps_the_state_in_memory",),
            GRADIENTS: ("test_a_write_that_fails_keeps_the_gradient_in_memory",),
            FROZEN: (
                "test_a_write_that_fails_keeps_the_parameter_in_memory",
                "test_a_changed_parameter_that_cannot_be_written_stays_in_memory",
            ),
            TRAINED: ("test_a_write_that_fails_keeps_the_parameter_in_memory",),
        },
    ),
    Failure(
        "The disk or the pinned memory is full",
        "The same.",
        {
            STATE: ("test_a_pool_or_a_disk_that_is_full", "test_a_slab_pool_that_is_too_small"),
            FROZEN: ("test_a_store_that_is_full_keeps_the_parameter_in_memory",),
            TRAINED: ("test_a_store_that_is_full_keeps_the_parameter_in_memory",),
            "processes/test_limits.py": ("test_no_room_for_optimizer_state",),
        },
    ),
    Failure(
        "The disk has no room for the copies that `state_dict()` returns",
        "The copies are in memory.",
        {
            SNAPSHOTS: (
                "test_without_room_copies_are_in_memory",
                "test_on_a_tmpfs_or_a_nearly_full_disk_copies_are_in_memory",
            )
        },
    ),
    Failure(
        "A read fails once, or reads wrong bytes",
        "The read is repeated. Values are equal.",
        {
            STATE: ("test_a_read_that_fails_once_is_repeated",),
            GRADIENTS: ("test_a_read_that_fails_once_is_repeated",),
            FROZEN: ("test_a_read_that_fails_is_repeated",),
            TRAINED: ("test_a_read_that_fails_is_repeated",),
        },
    ),
    Failure(
        "Reads go on failing",
        "`OptimizerStateError`, `GradientError` or `ParameterError` names the parameter, and no wrong value is used. "
        "Training goes on when reads succeed again, or from a checkpoint; a gradient can be computed again.",
        {
            STATE: (
                "test_a_read_that_fails_names_the_parameter",
                "test_state_that_cannot_be_brought_back_is_tried_again",
            ),
            IN_PASSES: ("test_a_read_in_backward_that_fails_is_told_in_the_update",),
            IN_BACKWARD: ("test_state_that_cannot_be_read_in_backward",),
            GRADIENTS: (
                "test_a_read_that_fails_names_the_parameter",
                "test_a_gradient_that_cannot_be_read_in_the_step_can_be_computed_again",
            ),
            FROZEN: ("test_a_read_that_goes_on_failing_names_the_parameter",),
            TRAINED: (
                "test_a_read_that_goes_on_failing_is_told_and_a_checkpoint_goes_on",
                "test_an_update_that_cannot_begin_is_made_later",
            ),
        },
    ),
    Failure(
        "The process is killed",
        "No file is left on the disk.",
        {"processes/test_kills.py": ("test_killed_at_random_points", "test_killed_fresh_process")},
    ),
    Failure(
        "The process forks",
        "A child that uses a tensor that is away gets a `DriverError`. The parent's values are true, and it trains on.",
        {
            STATE_LIFE: ("test_a_process_ends_with_copies_in_flight",),
            FROZEN_LIFE: ("test_a_process_ends_while_parameters_are_away",),
            TRAINED_LIFE: ("test_a_process_ends_while_parameters_are_away",),
        },
    ),
    Failure(
        "The process ends while tensors are away or copies run",
        "It ends with status 0, without an error message.",
        {
            STATE_LIFE: ("test_a_process_ends_with_copies_in_flight",),
            FROZEN_LIFE: ("test_a_process_ends_while_parameters_are_away",),
            TRAINED_LIFE: ("test_a_process_ends_while_parameters_are_away",),
        },
    ),
    Failure(
        "A checkpoint is made while state is being written",
        "`state_dict()` has the true values and brings nothing back. Later steps do not change it.",
        {
            STATE_LIFE: ("test_a_checkpoint_while_states_are_leaving",),
            SNAPSHOTS: ("test_later_steps_do_not_change_a_snapshot_and_it_does_not_change_them",),
        },
    ),
    Failure(
        "An exception in the middle of a step: in forward, in backward, in `optimizer.step()`",
        "What was updated stays updated, as in torch's own loop over the parameters. The rest is as before, and "
        "training goes on with equal values.",
        {
            STATE: (
                "test_an_error_in_the_middle_of_a_step_leaves_what_a_loop_would_have_left",
                "test_an_error_in_a_closure_changes_nothing",
            ),
            IN_BACKWARD: (
                "test_what_was_updated_before_an_error_stays_updated",
                "test_training_goes_on_after_an_error",
            ),
            GRADIENTS: ("test_an_exception_between_backward_and_step",),
            FROZEN_STOPS: ("test_an_error_in_the_middle_of_a_step",),
            TRAINED_STOPS: ("test_an_error_in_the_middle_of_a_step",),
        },
    ),
    Failure(
        "Ctrl-C at any line of offload",
        "Each parameter, its state and its gradient are as before the interrupted call or as after it. No update is "
        "made twice.",
        {
            "optimizer_state/test_interrupts.py": ("test_an_interrupt_at_any_line",),
            IN_PASSES: ("test_an_interrupt_at_any_line",),
            "optimizer_state/test_disabled_after_interrupt.py": ("test_an_interrupt_at_any_line_of_the_first_update",),
            STATE_LIFE: ("test_an_interrupted_state_dict_leaves_true_values",),
            IN_BACKWARD: ("test_an_interrupt_at_any_line", "test_no_update_is_made_twice_after_an_interrupt"),
            GRADIENTS: ("test_an_interrupt_at_any_line",),
            FROZEN_STOPS: ("test_an_interrupt_at_any_line",),
            TRAINED_STOPS: ("test_an_interrupt_at_any_line",),
        },
    ),
    Failure(
        "A signal handler reads weights and state, as to write a checkpoint, at any line of offload",
        "It finds values from before the call or from after it, and changes no result.",
        {
            "parameters/test_signal_handlers.py": (
                "test_lines_that_move_parameters",
                "test_lines_that_end_moving",
                "test_trained_parameters_and_their_state",
                "test_frozen_parameters",
            )
        },
    ),
    Failure(
        "The optimizer or the model is freed while tensors are away",
        "Their memory and their room in the store are freed at once.",
        {
            STATE_LIFE: ("test_an_optimizer_that_goes_takes_its_state_along",),
            IN_BACKWARD: ("test_an_optimizer_that_goes",),
            FROZEN_LIFE: ("test_a_model_that_goes_takes_its_parameters_along",),
            TRAINED_LIFE: ("test_a_model_that_goes_takes_its_parameters_along",),
        },
    ),
)


def section() -> Iterator[str]:
    """Yield the lines of the section."""
    yield from (HEAD, "| failure | what happens | tests |", "|---|---|---|")
    for each in FAILURES:
        shown = "; ".join(f"`{file}`: {', '.join(map(words, tests))}" for file, tests in each.tests.items())
        yield f"| {each.what} | {each.result} | {shown} |"
    yield FOOT.format(files=", ".join(f"`{file}`" for file in GUARDS))


def words(test: str) -> str:
    """Return a test's name as words."""
    return test.removeprefix("test_").replace("_", " ")
