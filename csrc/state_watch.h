// Detects whether tensors have changed since the last call: a model's parameters and buffers, their gradients, and the
// tensors in an optimizer's state. A change is another tensor object, another storage, or another size of the storage.
//
// profiling/model_state.py calls it at most once per step, outside the data path. Only if something has changed, that
// file computes the set of storages and their total bytes again, in Python, over hundreds of tensors. Each call for a
// model reads every module's dictionaries, and the storage of every tensor and its size. The device is read only of a
// tensor without a storage, because a storage never changes its device.
//
// Callers hold the GIL.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Adds the type StateWatch and the function first_tensor to the module. Returns false if there is a Python error.
bool add_state_watch_type(PyObject* module);

}  // namespace offload
