// The lines of a template, as C++ compares operators with them. Made once for each template.
//
// Python (offload/recomputation/template.py) encodes each expected argument as a tuple whose first item is its kind.
// Callers hold the GIL; a function that fails leaves a Python error.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor_interface.h"

namespace offload {

// An argument as the template has it.
struct Expected {
  enum class Kind : long { any, read, several, plain };

  Kind kind = Kind::any;
  int64_t label = 0;  // of a value that is read
  bool is_made = false;
  Owned view;  // (dtype, shape, stride, offset, whether conjugated, whether negated)
  std::vector<Expected> each;
  Owned object;
};

struct Named {
  Owned name;
  Expected expected;
};

// A result or a written argument that a recipe reads: its number, and the label of its value.
struct Made {
  int64_t place;
  int64_t label;
};

// One operator, in its place.
struct ScriptLine {
  Owned func;
  Owned line;          // Python's; None: no recipe needs the operator
  Owned writes;        // places of arguments that it changes though the template does not follow them: a tuple
  Owned settings;      // those of torch that the operator ran with: a tuple
  bool is_quick = false;  // C++ may run it
  bool is_heavy = false;
  bool saves_weights = false;
  std::vector<Expected> args;
  std::vector<Named> kwargs;
  std::vector<Made> made;
  std::vector<Made> written;  // arguments that it changes and recipes read afterwards: tensors that it reads, too

  bool is_needed() const { return line.get() != Py_None; }
};

struct Script {
  std::vector<ScriptLine> lines;
  Owned readers;  // functions that read torch's settings, in the order of `settings`: a tuple
};

// Reads what Python has encoded. False: a Python error.
bool read_script(PyObject* lines, PyObject* readers, Script* script);
// Whether an argument that is no tensor is exactly the template's.
bool is_same_plain(PyObject* expected, PyObject* given);

}  // namespace offload
