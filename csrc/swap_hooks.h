// Pack and unpack of tensors that a schedule swaps, without Python code, where the step runs as recorded.
//
// On the data path: hook_core.cpp comes here before it asks Python. Whatever is not plain (another size than recorded,
// a tensor of another kind or device, an error, what a recipe needs) is left undecided, with nothing changed:
// runtime/hooks.py does the same steps for every case. Callers hold the GIL.
#pragma once

#include <memory>

#include "schedule_cursor.h"
#include "step_copies.h"
#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

// What one step's hooks of swapped tensors use.
struct SwapHooks {
  std::shared_ptr<Books> books;
  std::shared_ptr<StepCopies> copies;
  std::shared_ptr<Count> swapped, duplicates;
  PyObject* core;  // the HookCore that holds this
  Owned held;      // which storages somebody holds: `storages`; and `not_held`, looked for in vain
};

// Makes names. Returns false and leaves a Python error where it cannot.
bool prepare_swap_hooks();
// What the graph node shall hold. Null without an error: undecided.
PyObject* pack_swapped(SwapHooks& hooks, PyObject* tensor, int64_t pack_index, int64_t nbytes);
// The tensor. Null without an error: undecided.
PyObject* unpack_swapped(SwapHooks& hooks, PyObject* view);

}  // namespace offload
