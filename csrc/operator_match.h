// Compares an operator with a line of a template.
//
// Used by operator_follower.cpp. Callers hold the GIL; a function that fails sets a Python error.
#pragma once

#include "operator_script.h"

namespace offload {

// The part of a FollowingRecorder that C++ reads and writes.
struct Follower {
  PyObject_HEAD
  PyObject* script;  // the template's operators; null or None if there is no template
  PyObject* values;  // dictionary: identity of a storage -> its latest value in this window
  PyObject* saved;   // dictionary: identity of a storage -> the value that was packed
  PyObject* bound;   // list: for each label, the value that is bound to it, or None
  Py_ssize_t position;
  unsigned long thread;
  char follows;
};

inline PyObject* object(Follower* self) { return reinterpret_cast<PyObject*>(self); }

extern PyObject* leaf_of_name;  // name of the method `_leaf_of` of FollowingRecorder

enum class Match { same, differs, failed };

// Compares the operator with the line, and binds the values that it reads. If it differs, earlier bindings remain.
Match match_line(Follower* self, const Script& script, const ScriptLine& line, PyObject* args, PyObject* kwargs);

// Returns whether the object's class is exactly torch.Tensor or torch.nn.Parameter.
bool is_plain_tensor(PyObject* object);
// Returns the identity of a tensor's storage; null without an error if the tensor has no storage.
Owned key_of(PyObject* tensor);

}  // namespace offload
