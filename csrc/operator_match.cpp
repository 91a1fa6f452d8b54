#include "operator_match.h"

#include <algorithm>

#include "mutants.h"
#include "operator_values.h"
#include "saved_identity.h"

namespace offload {

PyObject* leaf_of_name = nullptr;

namespace {

PyObject* call(PyObject* function, PyObject* argument) {
  return PyObject_CallFunctionObjArgs(function, argument, nullptr);
}

Match match_if(bool same) { return same ? Match::same : PyErr_Occurred() ? Match::failed : Match::differs; }

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensors.tensor_type));
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

// Returns the value that a tensor has; null without an error if the tensor's version is not that value's.
Owned value_of(Follower* self, PyObject* tensor) {
  const Owned key = key_of(tensor);
  if (!key) return Owned();
  Owned value = shared(PyDict_GetItemWithError(self->values, key.get()));
  if (!value) {
    if (PyErr_Occurred()) return Owned();
    return Owned(PyObject_CallMethodObjArgs(object(self), leaf_of_name, tensor, key.get(), nullptr));
  }
  const Value* const known = as_value(value.get());
  const bool is_latest = known != nullptr && to_int(get(tensors.version, tensor)) == known->version;
  return is_latest || OFFLOAD_BROKEN("a followed operator reads the version that was bound") ? std::move(value) : Owned();
}

Match match_read(Follower* self, const Expected& expected, PyObject* given) {
  if (!is_plain_tensor(given)) return Match::differs;
  Owned value = value_of(self, given);
  if (!value || value.get() == Py_None) return match_if(false);
  if (!is_seen_so(expected.view.get(), given)) return match_if(false);
  PyObject* const bound = self->bound;
  if (expected.label < 0 || expected.label >= PyList_GET_SIZE(bound)) return Match::differs;
  PyObject* const before = PyList_GET_ITEM(bound, expected.label);
  if (before == value.get()) return Match::same;
  if (before != Py_None || expected.is_made)
    return OFFLOAD_BROKEN("a followed operator reads the same values") ? Match::same : Match::differs;
  return match_if(PyList_SetItem(bound, expected.label, value.release()) == 0);
}

Match match(Follower* self, const Expected& expected, PyObject* given) {
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

Match match_arguments(Follower* self, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
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

// Returns `differs` if the operator writes to a storage that a recipe may read and the template does not follow that
// write.
Match match_writes(Follower* self, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
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
    const int is_value = PyDict_Contains(self->values, key.get());
    const int is_known = is_value != 0 ? is_value : PyDict_Contains(self->saved, key.get());
    if (is_known != 0) return match_if(false);
  }
  return Match::same;
}

// Compares whether autograd saves the factors of a matrix product or convolution with the recorded step. Grad mode is
// compared with the settings.
Match match_history(const ScriptLine& line, PyObject* args) {
  if (OFFLOAD_BROKEN("a followed product saves its factors as before")) return Match::same;
  bool has_history = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && !has_history; ++i) {
    PyObject* const given = PyTuple_GET_ITEM(args, i);
    const bool is_added = std::find(line.added.begin(), line.added.end(), i) != line.added.end();
    if (is_added || !is_tensor(given)) continue;
    const int requires_grad = is_true(get(tensors.requires_grad, given));
    if (requires_grad < 0) return Match::failed;
    if (requires_grad == 0) continue;
    const Owned owner(version_owner(given));
    if (!owner) return Match::failed;
    has_history = reinterpret_cast<PyObject*>(Py_TYPE(owner.get())) != tensors.parameter_type;
  }
  return match_if(has_history == line.saves_weights);
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

}  // namespace

bool is_plain_tensor(PyObject* object) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == tensors.tensor_type || type == tensors.parameter_type;
}

Owned key_of(PyObject* tensor) {
  const Owned storage(call(tensors.untyped_storage, tensor));
  if (storage) return Owned(get(tensors.storage_identity, storage.get()));
  if (PyErr_ExceptionMatches(PyExc_NotImplementedError)) PyErr_Clear();
  return Owned();
}

Match match_line(Follower* self, const Script& script, const ScriptLine& line, PyObject* args, PyObject* kwargs) {
  if (!line.is_quick) return Match::differs;
  Match found = match_writes(self, line, args, kwargs);
  if (found != Match::same || !line.is_needed()) return found;
  if (line.saves_factors) found = match_history(line, args);
  if (found == Match::same) found = match_arguments(self, line, args, kwargs);
  return found == Match::same ? match_settings(line, script.readers.get()) : found;
}

}  // namespace offload
