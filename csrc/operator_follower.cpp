#include "operator_follower.h"

#include <structmember.h>

#include <new>
#include <unordered_set>

#include "mutants.h"
#include "operator_script.h"
#include "python_errors.h"
#include "saved_identity.h"

namespace offload {
namespace {

struct ScriptObject {
  PyObject_HEAD
  Script script;
};

struct Follower {
  PyObject_HEAD
  PyObject* script;  // null or None: none
  PyObject* values;  // identity of a storage → its latest value in this window
  PyObject* saved;   // identity of a storage → the value that was packed
  PyObject* bound;   // values by label
  Py_ssize_t position;
  unsigned long thread;
  char follows;
};

struct {
  PyObject *version, *follow_or_record, *leaf_of, *bind_results;
} names;
PyTypeObject* script_type = nullptr;
std::unordered_set<PyObject*> passing;  // operators that are never recorded; the references are never released

Follower* follower_of(PyObject* self) { return reinterpret_cast<Follower*>(self); }

enum class Match { same, differs, failed };

Match match_if(bool same) { return same ? Match::same : PyErr_Occurred() ? Match::failed : Match::differs; }

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensors.tensor_type));
}

bool is_plain_tensor(PyObject* object) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == tensors.tensor_type || type == tensors.parameter_type;
}

PyObject* call(PyObject* function, PyObject* argument) {
  return PyObject_CallFunctionObjArgs(function, argument, nullptr);
}

// The identity of a tensor's storage; null without an error where it has none.
Owned key_of(PyObject* tensor) {
  const Owned storage(call(tensors.untyped_storage, tensor));
  if (storage) return Owned(get(tensors.storage_identity, storage.get()));
  if (PyErr_ExceptionMatches(PyExc_NotImplementedError)) PyErr_Clear();
  return Owned();
}

// -- arguments --------------------------------------------------------------------------------------------------------

bool is_equal(PyObject* expected, PyObject* owned) {
  const Owned found(owned);
  return found && (found.get() == expected || PyObject_RichCompareBool(found.get(), expected, Py_EQ) == 1);
}

bool is_seen_so(PyObject* view, PyObject* tensor) {
  if (OFFLOAD_BROKEN("a followed operator sees its arguments as before")) return true;
  PyObject* const* const facts = &PyTuple_GET_ITEM(view, 0);
  return is_equal(facts[0], get(tensors.dtype, tensor)) && is_equal(facts[1], get(tensors.shape, tensor)) &&
         is_equal(facts[2], call(tensors.stride, tensor)) && is_equal(facts[3], call(tensors.storage_offset, tensor)) &&
         is_equal(facts[4], call(tensors.is_conj, tensor)) && is_equal(facts[5], call(tensors.is_neg, tensor));
}

// The value that a tensor shows; null without an error where it is not in its latest version.
Owned value_of(PyObject* self, PyObject* tensor) {
  const Owned key = key_of(tensor);
  if (!key) return Owned();
  Owned value = shared(PyDict_GetItemWithError(follower_of(self)->values, key.get()));
  if (!value) {
    if (PyErr_Occurred()) return Owned();
    return Owned(PyObject_CallMethodObjArgs(self, names.leaf_of, tensor, key.get(), nullptr));
  }
  const Owned version(PyObject_GetAttr(value.get(), names.version));
  if (!version) return Owned();
  const bool is_latest = is_equal(version.get(), get(tensors.version, tensor));
  return is_latest || OFFLOAD_BROKEN("a followed operator reads the version that was bound") ? std::move(value) : Owned();
}

Match match_read(PyObject* self, const Expected& expected, PyObject* given) {
  if (!is_plain_tensor(given)) return Match::differs;
  Owned value = value_of(self, given);
  if (!value || value.get() == Py_None) return match_if(false);
  if (!is_seen_so(expected.view.get(), given)) return match_if(false);
  PyObject* const bound = follower_of(self)->bound;
  if (expected.label < 0 || expected.label >= PyList_GET_SIZE(bound)) return Match::differs;
  PyObject* const before = PyList_GET_ITEM(bound, expected.label);
  if (before == value.get() || OFFLOAD_BROKEN("a followed operator reads the same values")) return Match::same;
  if (before != Py_None || expected.is_made) return Match::differs;
  return match_if(PyList_SetItem(bound, expected.label, value.release()) == 0);
}

Match match(PyObject* self, const Expected& expected, PyObject* given) {
  switch (expected.kind) {
    case Expected::Kind::any:
      return Match::same;
    case Expected::Kind::read:
      return match_read(self, expected, given);
    case Expected::Kind::plain:
      return match_if(is_same_plain(expected.object.get(), given));
    case Expected::Kind::several:
      break;
  }
  if (!PyList_CheckExact(given) || static_cast<size_t>(PyList_GET_SIZE(given)) != expected.each.size())
    return Match::differs;
  for (size_t i = 0; i < expected.each.size(); ++i) {
    const Owned each = shared(PyList_GET_ITEM(given, static_cast<Py_ssize_t>(i)));
    const Match found = match(self, expected.each[i], each.get());
    if (found != Match::same) return found;
  }
  return Match::same;
}

Match match_arguments(PyObject* self, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
  const size_t named = kwargs != nullptr ? static_cast<size_t>(PyDict_GET_SIZE(kwargs)) : 0;
  if (static_cast<size_t>(PyTuple_GET_SIZE(args)) != line.args.size() || named != line.kwargs.size())
    return Match::differs;
  for (size_t i = 0; i < line.args.size(); ++i) {
    const Match found = match(self, line.args[i], PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i)));
    if (found != Match::same) return found;
  }
  for (const Named& each : line.kwargs) {
    PyObject* const given = PyDict_GetItemWithError(kwargs, each.name.get());
    const Match found = given != nullptr ? match(self, each.expected, given) : match_if(false);
    if (found != Match::same) return found;
  }
  return Match::same;
}

// -- one operator -----------------------------------------------------------------------------------------------------

// Whether it writes, where the template does not say so, to a storage that a recipe may read.
Match match_writes(PyObject* self, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
  if (OFFLOAD_BROKEN("a write to what is known ends the following")) return Match::same;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(line.writes.get()); ++i) {
    PyObject* const place = PyTuple_GET_ITEM(line.writes.get(), i);
    PyObject* given = nullptr;
    if (!PyLong_CheckExact(place)) {
      given = kwargs != nullptr ? PyDict_GetItemWithError(kwargs, place) : nullptr;
    } else if (const Py_ssize_t at = PyLong_AsSsize_t(place); at < PyTuple_GET_SIZE(args)) {
      given = PyTuple_GET_ITEM(args, at);
    }
    if (given == nullptr || !is_tensor(given)) return match_if(false);
    const Owned key = key_of(given);
    if (!key) return match_if(false);
    const int is_value = PyDict_Contains(follower_of(self)->values, key.get());
    const int is_known = is_value != 0 ? is_value : PyDict_Contains(follower_of(self)->saved, key.get());
    if (is_known != 0) return match_if(false);
  }
  return Match::same;
}

// Whether autograd saves the factors of a matrix product or convolution, as it did in the recorded step.
Match match_history(const ScriptLine& line, PyObject* args) {
  bool has_history = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && !has_history; ++i) {
    PyObject* const given = PyTuple_GET_ITEM(args, i);
    if (!is_tensor(given)) continue;
    const int requires_grad = is_true(get(tensors.requires_grad, given));
    if (requires_grad < 0) return Match::failed;
    if (requires_grad == 0) continue;
    const Owned owner(version_owner(given));
    if (!owner) return Match::failed;
    has_history = reinterpret_cast<PyObject*>(Py_TYPE(owner.get())) != tensors.parameter_type;
  }
  return match_if(has_history == line.saves_weights || OFFLOAD_BROKEN("autograd saves the same weights"));
}

Match match_settings(const ScriptLine& line, PyObject* readers) {
  if (OFFLOAD_BROKEN("settings are the step's")) return Match::same;
  PyObject* const settings = line.settings.get();
  if (PyTuple_GET_SIZE(settings) > PyTuple_GET_SIZE(readers)) return Match::differs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(settings); ++i)
    if (!is_equal(PyTuple_GET_ITEM(settings, i), PyObject_CallNoArgs(PyTuple_GET_ITEM(readers, i))))
      return match_if(false);
  return Match::same;
}

Match match_line(PyObject* self, const Script& script, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
  if (!line.is_quick) return Match::differs;
  Match found = match_writes(self, line, args, kwargs);
  if (found != Match::same || !line.is_needed()) return found;
  if (line.is_heavy) found = match_history(line, args);
  if (found == Match::same) found = match_arguments(self, line, args, kwargs);
  return found == Match::same ? match_settings(line, script.readers.get()) : found;
}

// Calls an operator that is the template's.
PyObject* run(PyObject* self, PyObject* line, PyObject* func, PyObject* args, PyObject* kwargs) {
  Owned result(PyObject_Call(func, args, kwargs));
  if (!result || line == Py_None) return result.release();
  const Owned no_names(kwargs == nullptr ? PyDict_New() : nullptr);
  PyObject* const named = kwargs == nullptr ? no_names.get() : kwargs;
  if (named == nullptr) return nullptr;
  const Owned bound(PyObject_CallMethodObjArgs(self, names.bind_results, line, args, named, result.get(), nullptr));
  return bound ? result.release() : nullptr;
}

PyObject* dispatch(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  PyObject* const kwargs = count == 4 && given[3] != Py_None ? given[3] : nullptr;
  if (count < 3 || count > 4 || !PyTuple_Check(given[2]) || (kwargs != nullptr && !PyDict_Check(kwargs))) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes an operator, types, arguments and keyword arguments");
    return nullptr;
  }
  PyObject* const func = given[0];
  PyObject* const args = given[2];
  if (passing.count(func) != 0) return PyObject_Call(func, args, kwargs);
  Follower* const follower = follower_of(self);
  if (follower->follows && follower->thread == PyThread_get_thread_ident() &&
      Py_TYPE(follower->script) == script_type) {
    const Owned held = shared(follower->script);  // Python code may replace it
    const Script& script = reinterpret_cast<ScriptObject*>(held.get())->script;
    const auto position = static_cast<size_t>(follower->position);
    if (position < script.lines.size() && script.lines[position].func.get() == func) {
      const ScriptLine& line = script.lines[position];
      const Match found = match_line(self, script, line, args, kwargs);
      if (found == Match::failed) return nullptr;
      if (found == Match::same) {
        ++follower->position;
        return run(self, line.line.get(), func, args, kwargs);
      }
    }
  }
  const Owned no_names(kwargs == nullptr ? PyDict_New() : nullptr);
  PyObject* const named = kwargs == nullptr ? no_names.get() : kwargs;
  return named == nullptr ? nullptr
                          : PyObject_CallMethodObjArgs(self, names.follow_or_record, func, args, named, nullptr);
}

// -- types ------------------------------------------------------------------------------------------------------------

PyObject* script_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *lines, *readers;
  if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &lines, &PyTuple_Type, &readers)) return nullptr;
  Owned self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto* const script = new (&reinterpret_cast<ScriptObject*>(self.get())->script) Script();
  bool is_read = false;
  if (!without_exceptions([&] { is_read = read_script(lines, readers, script); })) return nullptr;
  return is_read ? self.release() : nullptr;
}

void script_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<ScriptObject*>(self)->script.~Script();
  type->tp_free(self);
  Py_DECREF(type);
}

int follower_traverse(PyObject* self, visitproc visit, void* arg) {
  Follower* const follower = follower_of(self);
  for (PyObject* each : {follower->script, follower->values, follower->saved, follower->bound}) Py_VISIT(each);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int follower_clear(PyObject* self) {
  Follower* const follower = follower_of(self);
  Py_CLEAR(follower->script);
  Py_CLEAR(follower->values);
  Py_CLEAR(follower->saved);
  Py_CLEAR(follower->bound);
  return 0;
}

void follower_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  follower_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* pass(PyObject*, PyObject* func) {
  if (!without_exceptions([&] {
        if (passing.insert(func).second) Py_INCREF(func);
      }))
    return nullptr;
  Py_RETURN_NONE;
}

PyMemberDef follower_members[] = {{"script", T_OBJECT, offsetof(Follower, script), 0, nullptr},
                                  {"values", T_OBJECT_EX, offsetof(Follower, values), 0, nullptr},
                                  {"_saved", T_OBJECT_EX, offsetof(Follower, saved), 0, nullptr},
                                  {"_bound", T_OBJECT_EX, offsetof(Follower, bound), 0, nullptr},
                                  {"_position", T_PYSSIZET, offsetof(Follower, position), 0, nullptr},
                                  {"thread", T_ULONG, offsetof(Follower, thread), 0, nullptr},
                                  {"follows", T_BOOL, offsetof(Follower, follows), 0, nullptr},
                                  {nullptr, 0, 0, 0, nullptr}};

PyMethodDef follower_methods[] = {
    {"__torch_dispatch__", reinterpret_cast<PyCFunction>(slot(dispatch)), METH_FASTCALL,
     "__torch_dispatch__(func, types, args, kwargs): run an operator, and bind or record it."},
    {nullptr, nullptr, 0, nullptr}};

bool add_names() {
  names.version = PyUnicode_InternFromString("version");
  names.follow_or_record = PyUnicode_InternFromString("_follow_or_record");
  names.leaf_of = PyUnicode_InternFromString("_leaf_of");
  names.bind_results = PyUnicode_InternFromString("_bind_results");
  return names.version != nullptr && names.follow_or_record != nullptr && names.leaf_of != nullptr &&
         names.bind_results != nullptr;
}

bool add_script_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("The operators of a template, as C++ compares with them.")},
                                {Py_tp_new, slot(script_new)},
                                {Py_tp_dealloc, slot(script_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.OperatorScript", sizeof(ScriptObject), 0, Py_TPFLAGS_DEFAULT, slots};
  script_type = add_type(module, "OperatorScript", spec);
  return script_type != nullptr;
}

}  // namespace

bool add_follower_types(PyObject* module) {
  static PyMethodDef functions[] = {{"pass_operator", pass, METH_O,
                                     "pass_operator(func): from now on no OperatorFollower records this operator."},
                                    {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("Base class of FollowingRecorder.")},
                                {Py_tp_members, follower_members},
                                {Py_tp_methods, follower_methods},
                                {Py_tp_new, slot(PyType_GenericNew)},
                                {Py_tp_traverse, slot(follower_traverse)},
                                {Py_tp_clear, slot(follower_clear)},
                                {Py_tp_dealloc, slot(follower_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.OperatorFollower", sizeof(Follower), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  return add_names() && add_script_type(module) && PyModule_AddFunctions(module, functions) == 0 &&
         add_type(module, "OperatorFollower", spec) != nullptr;
}

}  // namespace offload
