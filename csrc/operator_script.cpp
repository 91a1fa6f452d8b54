#include "operator_script.h"

#include <cstring>

#include "mutants.h"

namespace offload {
namespace {

PyObject* item(PyObject* tuple, Py_ssize_t place) { return PyTuple_GET_ITEM(tuple, place); }

bool is_tuple(PyObject* object, Py_ssize_t size) {
  if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == size) return true;
  PyErr_SetString(PyExc_TypeError, "a script is made of tuples that template.py encodes");
  return false;
}

bool read_expected(PyObject* encoded, Expected* expected) {
  if (!is_tuple(encoded, 4)) return false;
  expected->kind = static_cast<Expected::Kind>(PyLong_AsLong(item(encoded, 0)));
  expected->label = PyLong_AsLongLong(item(encoded, 1));
  expected->is_made = item(encoded, 2) == Py_True;
  if (PyErr_Occurred()) return false;
  PyObject* const content = item(encoded, 3);
  switch (expected->kind) {
    case Expected::Kind::any:
      return true;
    case Expected::Kind::read:
      expected->view = shared(content);
      return is_tuple(content, 6);
    case Expected::Kind::several:
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(content); ++i) {
        expected->each.emplace_back();
        if (!read_expected(item(content, i), &expected->each.back())) return false;
      }
      return true;
    case Expected::Kind::plain:
      expected->object = shared(content);
      return true;
  }
  return false;
}

bool read_made(PyObject* encoded, std::vector<Made>* made) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(encoded); ++i) {
    PyObject* const each = item(encoded, i);
    if (!is_tuple(each, 2)) return false;
    made->push_back({PyLong_AsLongLong(item(each, 0)), PyLong_AsLongLong(item(each, 1))});
  }
  return !PyErr_Occurred();
}

bool read_line(PyObject* encoded, ScriptLine* line) {
  if (!is_tuple(encoded, 12)) return false;
  line->func = shared(item(encoded, 0));
  line->line = shared(item(encoded, 1));
  line->is_quick = item(encoded, 2) == Py_True;
  line->saves_factors = item(encoded, 3) == Py_True;
  PyObject* const added = item(encoded, 4);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(added); ++i) line->added.push_back(PyLong_AsSsize_t(item(added, i)));
  line->saves_weights = item(encoded, 5) == Py_True;
  line->writes = shared(item(encoded, 6));
  line->settings = shared(item(encoded, 7));
  PyObject* const args = item(encoded, 8);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    line->args.emplace_back();
    if (!read_expected(item(args, i), &line->args.back())) return false;
  }
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(item(encoded, 9), &at, &name, &value);) {
    line->kwargs.emplace_back();
    line->kwargs.back().name = shared(name);
    if (!read_expected(value, &line->kwargs.back().expected)) return false;
  }
  return read_made(item(encoded, 10), &line->made) && read_made(item(encoded, 11), &line->written);
}

bool is_same_float(PyObject* expected, PyObject* given) {
  const double numbers[] = {PyFloat_AS_DOUBLE(expected), PyFloat_AS_DOUBLE(given)};
  return std::memcmp(&numbers[0], &numbers[1], sizeof(double)) == 0;  // the bits, because 0.0 == -0.0
}

bool is_same_list(PyObject* expected, PyObject* given) {
  if (PyList_GET_SIZE(expected) != PyList_GET_SIZE(given)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(expected); ++i)
    if (!is_same_plain(PyList_GET_ITEM(expected, i), PyList_GET_ITEM(given, i))) return false;
  return true;
}

}  // namespace

bool read_script(PyObject* lines, PyObject* readers, Script* script) {
  script->readers = shared(readers);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lines); ++i) {
    script->lines.emplace_back();
    if (!read_line(item(lines, i), &script->lines.back())) return false;
  }
  return true;
}

bool is_same_plain(PyObject* expected, PyObject* given) {
  if (expected == given) return true;
  if (Py_TYPE(expected) != Py_TYPE(given)) return false;
  if (OFFLOAD_BROKEN("a followed operator has the same numbers")) return true;
  if (PyFloat_CheckExact(expected)) return is_same_float(expected, given);
  if (PyList_CheckExact(expected)) return is_same_list(expected, given);
  // The comparison of these two types runs no Python code, so it cannot fail.
  if (!PyLong_CheckExact(expected) && !PyUnicode_CheckExact(expected)) return false;
  return PyObject_RichCompareBool(expected, given, Py_EQ) == 1;
}

}  // namespace offload
