// Whether an operator is in every respect the one that a line of a template has.
//
// Used by operator_follower.cpp. Callers hold the GIL; a function that fails leaves a Python error.
#pragma once

#include "operator_script.h"

namespace offload {

// The part of a FollowingRecorder that C++ reads and writes.
struct Follower {
  PyObject_HEAD
  PyObject* script;  // null or None: none
  PyObject* values;  // identity of a storage -> its latest value in this window
  PyObject* saved;   // identity of a storage -> the value that was packed
  PyObject* bound;   // values by label
  Py_ssize_t position;
  unsigned long thread;
  char follows;
};

inline PyObject* object(Follower* self) { return reinterpret_cast<PyObject*>(self); }

extern PyObject* leaf_of_name;  // of a method of FollowingRecorder

enum class Match { same, differs, failed };

// Compares, and binds the values that the operator reads. What was bound stays so where it differs.
Match match_line(Follower* self, const Script& script, const ScriptLine& line, PyObject* args, PyObject* kwargs);

// Whether it is of torch's own class, or a parameter.
bool is_plain_tensor(PyObject* object);
// The identity of a tensor's storage; null without an error where it has none.
Owned key_of(PyObject* tensor);

}  // namespace offload
