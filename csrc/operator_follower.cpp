#include "operator_follower.h"

#include <structmember.h>

#include <new>
#include <unordered_set>

#include "operator_match.h"
#include "operator_values.h"
#include "python_errors.h"

namespace offload {
namespace {

struct ScriptObject {
  PyObject_HEAD
  Script script;
};

struct {
  PyObject *follow_or_record, *leave;
} names;
PyTypeObject* script_type = nullptr;
std::unordered_set<PyObject*> passing;  // operators that are never recorded; the references are never released

Follower* follower_of(PyObject* self) { return reinterpret_cast<Follower*>(self); }

// -- results ----------------------------------------------------------------------------------------------------------

// Returns the result at `place`, and the key of its storage. Null without an error: it is not a plain tensor on a new
// storage, so no recipe can read it.
Owned made_at(Follower* self, PyObject* result, int64_t place, Owned* key) {
  const bool is_many = PyTuple_Check(result) || PyList_Check(result);
  if (is_many && place >= PySequence_Fast_GET_SIZE(result)) return Owned();
  Owned made = shared(is_many ? PySequence_Fast_GET_ITEM(result, place) : result);
  if (reinterpret_cast<PyObject*>(Py_TYPE(made.get())) != tensors.tensor_type) return Owned();
  *key = key_of(made.get());
  if (!*key) return Owned();
  // If the storage is known, the operator has returned a view that its schema does not declare.
  const int is_known = PyDict_Contains(self->values, key->get());
  if (is_known != 0 || is_true(PyObject_CallOneArg(tensors.is_inference, made.get())) != 0) return Owned();
  return made;
}

bool bind(Follower* self, int64_t label, PyObject* key, int64_t version, PyObject* watch) {
  if (PyErr_Occurred()) return false;
  Owned value(make_value(version, watch));
  return value && PyDict_SetItem(self->values, key, value.get()) == 0 &&
         PyList_SetItem(self->bound, label, value.release()) == 0;
}

Match bind_result(Follower* self, PyObject* result, const Made& made) {
  Owned key;
  const Owned tensor = made_at(self, result, made.place, &key);
  if (!tensor) return PyErr_Occurred() ? Match::failed : Match::differs;
  const Owned storage(PyObject_CallOneArg(tensors.untyped_storage, tensor.get()));
  const Owned watch(storage ? make_watch(storage.get()) : nullptr);
  if (!watch) return Match::failed;
  const int64_t version = to_int(get(tensors.version, tensor.get()));
  return bind(self, made.label, key.get(), version, watch.get()) ? Match::same : Match::failed;
}

// Binds an argument that the operator has written. The argument was compared before, so its storage has a value.
Match bind_write(Follower* self, PyObject* tensor, int64_t label) {
  const Owned key = key_of(tensor);
  PyObject* const before = key ? PyDict_GetItemWithError(self->values, key.get()) : nullptr;
  const Value* const value = before != nullptr ? as_value(before) : nullptr;
  if (value == nullptr) return PyErr_Occurred() ? Match::failed : Match::differs;
  const Owned watch = shared(value->watch);
  // Autograd's in-place layer increments the version after the mode has returned.
  const int64_t version = to_int(get(tensors.version, tensor)) + 1;
  return bind(self, label, key.get(), version, watch.get()) ? Match::same : Match::failed;
}

Match bind_results(Follower* self, const ScriptLine& line, PyObject* args, PyObject* result) {
  for (const Made& made : line.made) {
    if (made.label >= PyList_GET_SIZE(self->bound)) return Match::differs;
    const Match found = bind_result(self, result, made);
    if (found != Match::same) return found;
  }
  for (const Made& written : line.written) {
    if (written.label >= PyList_GET_SIZE(self->bound)) return Match::differs;
    const Match found = bind_write(self, PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(written.place)), written.label);
    if (found != Match::same) return found;
  }
  return Match::same;
}

// Runs an operator that equals the template's.
PyObject* run(PyObject* self, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
  Owned result(PyObject_Call(line.func.get(), args, kwargs));
  if (!result || !line.is_needed()) return result.release();
  const Match found = bind_results(follower_of(self), line, args, result.get());
  if (found == Match::same) return result.release();
  const Owned left(found == Match::failed ? nullptr : PyObject_CallMethodNoArgs(self, names.leave));
  return left ? result.release() : nullptr;
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
  if (follower->follows && follower->thread == PyThread_get_thread_ident() && follower->script != nullptr &&
      Py_TYPE(follower->script) == script_type) {
    const Owned held = shared(follower->script);  // Python code may replace it
    const Script& script = reinterpret_cast<ScriptObject*>(held.get())->script;
    const auto position = static_cast<size_t>(follower->position);
    if (position < script.lines.size() && script.lines[position].func.get() == func) {
      const ScriptLine& line = script.lines[position];
      const Match found = match_line(follower, script, line, args, kwargs);
      if (found == Match::failed) return nullptr;
      if (found == Match::same) {
        ++follower->position;
        return run(self, line, args, kwargs);
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
  leaf_of_name = PyUnicode_InternFromString("_leaf_of");
  names.follow_or_record = PyUnicode_InternFromString("_follow_or_record");
  names.leave = PyUnicode_InternFromString("_leave");
  return leaf_of_name != nullptr && names.follow_or_record != nullptr && names.leave != nullptr;
}

bool add_script_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("The operators of a template, encoded for C++.")},
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
