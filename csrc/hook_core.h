// Autograd's pack and unpack hooks for kept tensors, as builtin callables: no Python code runs for a small tensor, a
// parameter, or a tensor that the schedule keeps. For all other tensors they call methods of the Python class that
// derives from HookCore (runtime/hooks.py).
//
// The type uses Python's C interface directly, so that a call parses no arguments. Callers hold the GIL. A function
// that fails sets a Python error and returns null; only `follow` may throw (std::bad_alloc).
#pragma once

#include <memory>

#include "kept_tensor.h"
#include "schedule_cursor.h"
#include "step_copies.h"

namespace offload {

// Creates the type HookCore. Returns false if there is a Python error.
bool add_hook_types(PyObject* module);
// Begins a step: the next pack gets number 0, and `core` decides with `cursor` which tensors are kept. `observer`
// handles all other tensors. `reason`: why the schedule keeps tensors, for the report. With `copies`, swapped tensors
// too are packed and unpacked in C++, if the step does the same as the recorded one; `held` contains the storages that
// other code holds. Returns false if there is a Python error (`core` is not a HookCore).
bool follow(PyObject* core, PyObject* observer, std::shared_ptr<ScheduleCursor> cursor, PyObject* reason,
            std::shared_ptr<StepCopies> copies, PyObject* held);

// Returns the C++ object of a Python `Count`. Null: a Python error (another type). Defined in hook_bindings.cpp.
std::shared_ptr<Count> count_of(PyObject* object);

}  // namespace offload
