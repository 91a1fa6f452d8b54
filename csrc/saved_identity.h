// Which bytes a saved tensor shows: the tensor that owns its version counter, the version, and the storage.
//
// On the data path: engine.py asks at every pack that may swap. Callers hold the GIL; an entry that fails leaves a
// Python error.
#pragma once

#include "kept_tensor.h"

namespace offload {

// Adds find_saved(tensor, nbytes, live) and version_owner(tensor) to the module. Returns false and leaves a Python
// error where it cannot.
//
// find_saved returns (key, handle): the key (identity of the owner, version, 0, bytes of the storage, identity of the
// storage), and the handle of the copy that `live` (a dict: key -> weak reference) knows by it, or None. It returns None
// where the tensor's owner is only a part of the storage.
bool add_identity_functions(PyObject* module);

}  // namespace offload
