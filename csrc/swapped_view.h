// One saved tensor whose bytes are out: its size, stride, offset and version. What the graph node holds in its place.
//
// On the data path: made at pack, asked for its tensor at unpack. Beside a SwappedStorage it serves any Python object
// that offers `record` with `add_view()`, `key`, `empty(dtype)` and `swap_in()`.
//
// Callers hold the GIL; an entry that fails leaves a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Makes the type SwappedView and the function view_of(tensor, saved, index). Returns false and leaves a Python error
// where it cannot.
bool add_swapped_view_type(PyObject* module);

}  // namespace offload
