// Pack and unpack of tensors that a schedule swaps, without Python code, if the step does the same as the recorded one.
//
// On the data path: hook_core.cpp calls these functions before it calls Python. In all other cases (another size than
// recorded, another kind of tensor or device, a pack while operators are recorded) they change nothing and return null,
// and runtime/hooks.py, which handles every case, does the same work. An error of a copy is passed to Python. Callers
// hold the GIL.
#pragma once

#include <memory>

#include "dlpack_api.h"
#include "schedule_cursor.h"
#include "step_copies.h"
#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

// The data of one step that the hooks of swapped tensors use.
struct SwapHooks {
  std::shared_ptr<Books> books;
  std::shared_ptr<StepCopies> copies;
  std::shared_ptr<Count> swapped, duplicates;
  PyObject* core;  // the HookCore that holds this
  Owned held;      // identities of storages: `storages` are of parameters and buffers, `not_held` are known not to be
};

// Creates the names of Python attributes. Returns false if there is a Python error.
bool prepare_swap_hooks();
// Returns the object that the autograd node holds. Null without an error: Python has to decide. `owner`: the tensor
// whose version counter `tensor` shares. `described`: the tensor, which has memory.
PyObject* pack_swapped(SwapHooks& hooks, PyObject* tensor, Owned owner, const dlpack::Tensor& described,
                       int64_t pack_index, int64_t nbytes);
// Returns the tensor. Null without an error: Python has to decide.
PyObject* unpack_swapped(SwapHooks& hooks, PyObject* view);

}  // namespace offload
