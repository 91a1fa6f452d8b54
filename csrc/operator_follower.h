// Follows the operators of a recorded window: the quick way through the dispatch mode that records operators.
//
// OperatorFollower is the base class of offload.recomputation.following.FollowingRecorder, and torch calls its
// `__torch_dispatch__`. An operator that is in every respect the template's runs at once. All others go to the method
// `_follow_or_record` in Python, which decides alone; C++ has bound no more then than Python binds again.
// Callers hold the GIL.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Adds OperatorScript and OperatorFollower to the module. False: a Python error.
bool add_follower_types(PyObject* module);

}  // namespace offload
