#include "state_watch.h"

#include <cstddef>
#include <new>
#include <unordered_set>
#include <vector>

#include "mutants.h"
#include "python_errors.h"

namespace offload {
namespace {

struct Entry {
  PyObject* object = nullptr;  // a module or a tensor: borrowed, only compared
  int64_t storage = 0;         // identity of the storage; 0: a module, or a tensor without a storage
  int64_t nbytes = 0;          // bytes of the storage
  Owned kind;                  // a module's class, or the device of a tensor without a storage; null: not compared
  // Addresses of the C++ tensor and of the storage's Python object, only for prefetching them into the cache.
  int64_t fields = 0;
  const void* wrapper = nullptr;
};

constexpr size_t kAhead = 4;  // number of entries by which `fetch_ahead` is ahead
constexpr int kLineBytes = 64;

void fetch(const void* place) {
  __builtin_prefetch(place);
  __builtin_prefetch(static_cast<const char*>(place) + kLineBytes);
}

// The modules and tensors that a walk has found, in order, compared with those of the previous walk.
class Trail {
 public:
  void begin() {
    position_ = 0;
    is_same_ = true;
  }
  // Adds an entry. Returns false if there is a Python error.
  bool meet(Entry entry) {
    fetch_ahead();
    const int same = position_ < entries_.size() ? is_equal(entries_[position_], entry) : 0;
    if (same < 0) return false;
    if (!same) {
      is_same_ = false;
      if (entry.storage != 0) entry.fields = to_int(get(tensors.identity, entry.object));
      entries_.resize(position_);
      entries_.push_back(std::move(entry));
    }
    ++position_;
    return true;
  }
  bool end() {
    if (position_ != entries_.size()) is_same_ = false;
    entries_.resize(position_);
    return is_same_;
  }
  void forget() { entries_.clear(); }

 private:
  // A step's computation has evicted these objects from the processor's caches. So each call of `meet` prefetches the
  // object that will be met kAhead entries later, if this walk finds the same as the previous one. That object may have
  // been freed: a prefetch of an invalid address does nothing.
  void fetch_ahead() const {
    if (position_ + kAhead >= entries_.size()) return;
    const Entry& next = entries_[position_ + kAhead];
    if (next.storage == 0) return;
    fetch(next.object);
    fetch(next.wrapper);
    fetch(reinterpret_cast<const void*>(next.fields));
    fetch(reinterpret_cast<const void*>(next.storage));
  }

  static int is_equal(const Entry& known, const Entry& found) {
    if (known.object != found.object || known.storage != found.storage || known.nbytes != found.nbytes) return 0;
    if (known.kind.get() == found.kind.get()) return 1;
    if (!known.kind || !found.kind) return 0;
    return PyObject_RichCompareBool(known.kind.get(), found.kind.get(), Py_EQ);
  }

  std::vector<Entry> entries_;
  size_t position_ = 0;
  bool is_same_ = true;
};

struct State {
  Trail tensors;    // modules, parameters and buffers
  Trail gradients;
  Trail leaves;
};

struct StateWatch {
  PyObject_HEAD
  State state;
};

struct {
  PyObject *parameters, *buffers, *modules;
} names;

State& state_of(PyObject* self) { return reinterpret_cast<StateWatch*>(self)->state; }

// Reads a plain tensor's storage through Python. Returns false, with the error, if it has none (a sparse tensor).
bool read_storage(PyObject* tensor, Entry* entry) {
  const Owned storage(PyObject_CallOneArg(tensors.untyped_storage, tensor));
  if (!storage) return false;
  entry->wrapper = storage.get();
  entry->storage = to_int(get(tensors.storage_identity, storage.get()));
  entry->nbytes = to_int(PyObject_CallOneArg(tensors.storage_nbytes, storage.get()));
  return !PyErr_Occurred();
}

bool is_plain(PyObject* tensor) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return type == tensors.tensor_type || type == tensors.parameter_type;
}

bool meet_tensor(Trail& trail, PyObject* tensor, bool with_device) {
  Entry entry;
  entry.object = tensor;
  if (is_plain(tensor) && !read_storage(tensor, &entry)) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyErr_Clear();
    entry.storage = entry.nbytes = 0;
  }
  // A storage never changes its device.
  if (with_device && entry.storage == 0 && !(entry.kind = Owned(get(tensors.device, tensor)))) return false;
  return trail.meet(std::move(entry));
}

bool meet_gradient(Trail& trail, PyObject* parameter) {
  if (!is_plain(parameter)) return true;  // gradients of other kinds of tensors are not counted
  if (reinterpret_cast<PyObject*>(Py_TYPE(parameter)) != tensors.parameter_type) {
    // `functional_call` may put the result of an operator here. It has no gradient, and torch warns if that is read.
    const int is_leaf = is_true(get(tensors.is_leaf, parameter));
    if (is_leaf <= 0) return is_leaf == 0;
  }
  const Owned gradient(get(tensors.gradient, parameter));
  if (!gradient) return false;
  return gradient.get() == Py_None ? trail.meet({}) : meet_tensor(trail, gradient.get(), false);
}

// Returns a dictionary that nn.Module stores as an attribute. Null without an error if the attribute is missing or is
// not a dictionary.
Owned dictionary_of(PyObject* attributes, PyObject* name) {
  PyObject* const found = PyDict_GetItemWithError(attributes, name);
  return found != nullptr && PyDict_Check(found) ? shared(found) : Owned();
}

// Calls `meet` for every value except None. `meet` may run Python code.
template <typename Meet>
bool for_values(PyObject* dictionary, Meet&& meet) {
  const Owned held = shared(dictionary);
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dictionary, &at, &key, &value);) {
    const Owned each = shared(value);
    if (value != Py_None && !meet(value)) return false;
  }
  return true;
}

enum class Walk { done, unknown, failed };

Walk walk_module(State& state, PyObject* module, std::vector<Owned>& pending, std::unordered_set<PyObject*>& seen) {
  const Owned attributes(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return Walk::failed;
  // Held: reading a parameter or a buffer may run Python code, which may give the module other dictionaries.
  const Owned parameters = dictionary_of(attributes.get(), names.parameters);
  const Owned buffers = dictionary_of(attributes.get(), names.buffers);
  const Owned modules = dictionary_of(attributes.get(), names.modules);
  if (!parameters || !buffers || !modules) return PyErr_Occurred() ? Walk::failed : Walk::unknown;
  Entry entry;
  entry.object = module;
  entry.kind = shared(reinterpret_cast<PyObject*>(Py_TYPE(module)));
  const auto parameter = [&](PyObject* value) {
    return meet_tensor(state.tensors, value, true) && meet_gradient(state.gradients, value);
  };
  const auto child = [&](PyObject* value) {
    if (seen.insert(value).second) pending.push_back(shared(value));
    return true;
  };
  const bool done = state.tensors.meet(std::move(entry)) && for_values(modules.get(), child) &&
                    for_values(parameters.get(), parameter) &&
                    for_values(buffers.get(), [&](PyObject* value) { return meet_tensor(state.tensors, value, true); });
  return done ? Walk::done : Walk::failed;
}

Walk walk(State& state, PyObject* model) {
  std::vector<Owned> pending;
  std::unordered_set<PyObject*> seen{model};
  pending.push_back(shared(model));
  while (!pending.empty()) {
    const Owned module = std::move(pending.back());
    pending.pop_back();
    const Walk walked = walk_module(state, module.get(), pending, seen);
    if (walked != Walk::done) return walked;
  }
  return Walk::done;
}

// look(model): return whether its tensors, and whether their gradients, are the same as at the last call.
PyObject* look(State& state, PyObject* model) {
  state.tensors.begin();
  state.gradients.begin();
  const Walk walked = walk(state, model);
  bool same_tensors = state.tensors.end(), same_gradients = state.gradients.end();
  if (walked != Walk::done) {
    state.tensors.forget();
    state.gradients.forget();
    same_tensors = same_gradients = false;
  }
  if (walked == Walk::failed) return nullptr;
  same_tensors = same_tensors || OFFLOAD_BROKEN("a changed parameter is noticed");
  return PyTuple_Pack(2, same_tensors ? Py_True : Py_False, same_gradients ? Py_True : Py_False);
}

// Returns a parameter or a buffer of a module or of a submodule. Null without an error: there is none.
Owned find_tensor(PyObject* model) {
  std::vector<Owned> pending;
  std::unordered_set<PyObject*> seen{model};
  pending.push_back(shared(model));
  while (!pending.empty()) {
    const Owned module = std::move(pending.back());
    pending.pop_back();
    const Owned attributes(PyObject_GenericGetDict(module.get(), nullptr));
    if (!attributes) return Owned();
    for (PyObject* const name : {names.parameters, names.buffers, names.modules}) {
      const Owned dictionary = dictionary_of(attributes.get(), name);
      if (!dictionary && PyErr_Occurred()) return Owned();
      Owned found;
      const auto meet = [&](PyObject* value) {
        if (name != names.modules) found = shared(value);
        else if (seen.insert(value).second) pending.push_back(shared(value));
        return !found;
      };
      if (dictionary && !for_values(dictionary.get(), meet)) return found;
    }
  }
  return Owned();
}

PyObject* first_tensor(PyObject*, PyObject* model) {
  Owned found;
  if (!without_exceptions([&] { found = find_tensor(model); })) return nullptr;
  return found || PyErr_Occurred() ? found.release() : shared(Py_None).release();
}

constexpr int kDepthMax = 16;  // nesting of containers in an optimizer's state; a container may contain itself

Walk walk_leaves(Trail& trail, PyObject* value, int depth) {
  if (PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(tensors.tensor_type)))
    return meet_tensor(trail, value, false) ? Walk::done : Walk::failed;
  if (depth == 0) return Walk::unknown;
  if (PyDict_CheckExact(value)) {
    Walk walked = Walk::done;
    const bool done = for_values(value, [&](PyObject* each) {
      walked = walk_leaves(trail, each, depth - 1);
      return walked == Walk::done;
    });
    return done ? Walk::done : walked;
  }
  if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      const Owned each = shared(PySequence_Fast_GET_ITEM(value, i));
      const Walk walked = walk_leaves(trail, each.get(), depth - 1);
      if (walked != Walk::done) return walked;
    }
    return Walk::done;
  }
  const bool is_plain_value = value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value) ||
                              PyUnicode_CheckExact(value);
  return is_plain_value ? Walk::done : Walk::unknown;
}

// same_leaves(value): return whether the tensors in dictionaries, lists and tuples are the same as at the last call.
PyObject* same_leaves(State& state, PyObject* value) {
  state.leaves.begin();
  const Walk walked = walk_leaves(state.leaves, value, kDepthMax);
  const bool is_same = state.leaves.end();
  if (walked != Walk::done) state.leaves.forget();
  return walked == Walk::failed ? nullptr : PyBool_FromLong(is_same && walked == Walk::done);
}

template <PyObject* (*entry)(State&, PyObject*)>
PyObject* guarded(PyObject* self, PyObject* argument) {
  if (!has_tensor_interface()) return nullptr;
  PyObject* result = nullptr;
  if (!without_exceptions([&] { result = entry(state_of(self), argument); })) return nullptr;
  return result;
}

PyObject* watch_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) new (&state_of(self)) State();
  return self;
}

void watch_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  state_of(self).~State();
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef watch_methods[] = {
    {"look", guarded<look>, METH_O,
     "look(model): return two bools: whether its parameters and buffers, and whether their gradients, are the same as "
     "at the last call."},
    {"same_leaves", guarded<same_leaves>, METH_O,
     "same_leaves(value): return whether the tensors in dictionaries, lists and tuples are those of the last call."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_state_watch_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("Detects whether a model's tensors have changed.")},
                                {Py_tp_methods, watch_methods},
                                {Py_tp_new, slot(watch_new)},
                                {Py_tp_dealloc, slot(watch_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.StateWatch", sizeof(StateWatch), 0, Py_TPFLAGS_DEFAULT, slots};
  names.parameters = PyUnicode_InternFromString("_parameters");
  names.buffers = PyUnicode_InternFromString("_buffers");
  names.modules = PyUnicode_InternFromString("_modules");
  if (names.parameters == nullptr || names.buffers == nullptr || names.modules == nullptr) return false;
  static PyMethodDef functions[] = {
      {"first_tensor", first_tensor, METH_O,
       "first_tensor(model): return a parameter or a buffer of a module or of a submodule; None if there is none."},
      {nullptr, nullptr, 0, nullptr}};
  return add_type(module, "StateWatch", spec) != nullptr && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace offload
