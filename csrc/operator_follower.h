// Compares operators with a template: the fast path of the dispatch mode that records operators.
//
// OperatorFollower is the C++ base class of offload.recomputation.following.FollowingRecorder; that file explains the
// terms. Torch calls its `__torch_dispatch__` for each operator. If the operator equals the template's in everything
// that is compared, OperatorFollower runs it and binds the labels of its values. For all other operators it calls the
// Python method `_follow_or_record`, which compares and binds again. Only Python decides that a step differs from the
// template.
// Callers hold the GIL.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Adds OperatorScript (the operators of a template, encoded for C++) and OperatorFollower to the module. Returns false
// if a Python error is set.
bool add_follower_types(PyObject* module);

}  // namespace offload
