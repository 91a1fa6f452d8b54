// The lines of a template, in the form that C++ compares with operators. Created once for each template.
//
// Python (offload/recomputation/template.py) encodes each expected argument as a tuple whose first item is its kind.
// Callers hold the GIL; a function that fails sets a Python error.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor_interface.h"

namespace offload {

// An argument of the template's operator.
struct Expected {
  enum class Kind : long { any, read, several, plain };

  Kind kind = Kind::any;
  int64_t label = 0;           // read: the label of the value
  bool is_made = false;        // read: an operator of the window makes the value
  Owned view;                  // read: (dtype, shape, stride, offset, whether conjugated, whether negated)
  std::vector<Expected> each;  // several: the items
  Owned object;                // plain: the argument itself
};

struct Named {
  Owned name;
  Expected expected;
};

// A result or a written argument that a recipe reads.
struct Made {
  int64_t place;  // number of the result or argument
  int64_t label;  // label of its value
};

// One operator of a template.
struct ScriptLine {
  Owned func;
  Owned line;          // the Python object of this line; None: no recipe needs the operator
  Owned writes;        // tuple: places of arguments that it changes and that the template does not follow
  Owned settings;      // tuple: the settings of torch with which the operator ran
  bool is_quick = false;  // C++ may run the operator
  bool saves_factors = false;  // autograd saves arguments that are not in `added`, if another one has a history
  std::vector<Py_ssize_t> added;  // positions of arguments that are only added
  bool saves_weights = false;  // autograd saved them in the recorded step
  std::vector<Expected> args;
  std::vector<Named> kwargs;
  std::vector<Made> made;
  std::vector<Made> written;  // arguments that the operator reads and changes, and that recipes read afterwards

  bool is_needed() const { return line.get() != Py_None; }
};

struct Script {
  std::vector<ScriptLine> lines;
  Owned readers;  // tuple: functions that read torch's settings, in the order of `settings`
};

// Decodes the lines that Python has encoded. Returns false if there is a Python error.
bool read_script(PyObject* lines, PyObject* readers, Script* script);
// Returns whether an argument that is not a tensor has the type and value of the template's.
bool is_same_plain(PyObject* expected, PyObject* given);

}  // namespace offload
