#include "swapped_view.h"

#include <structmember.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "dlpack_api.h"
#include "mutants.h"
#include "python_errors.h"
#include "swapped_storage.h"

namespace offload {
namespace {

struct SwappedView {
  PyObject_VAR_HEAD
  PyObject* saved;    // a SwappedStorage, or a DroppedHandle (recomputed_storage.py)
  PyObject* counter;  // shares the tensor's version counter; null with a SwappedStorage, which has its own
  PyObject* dtype;
  Py_ssize_t index;   // pack index
  int64_t version;
  int64_t offset;     // elements from the first byte that was copied
  dlpack::DataType element;  // bits = 0: unknown
  int itemsize;
  bool is_conj, is_neg;
  int64_t sizes[1];  // followed by the strides
};

PyTypeObject* view_type = nullptr;

SwappedView* as_view(PyObject* object) { return reinterpret_cast<SwappedView*>(object); }
int64_t dimensions(const SwappedView* view) { return Py_SIZE(view) / 2; }
int64_t* strides(SwappedView* view) { return view->sizes + dimensions(view); }

// Returns the number of bytes from the first element to the last one, both included.
int64_t span_bytes(SwappedView* view) {
  int64_t elements = 1;
  for (int64_t i = 0; i < dimensions(view); ++i) elements += (view->sizes[i] - 1) * strides(view)[i];
  return elements * view->itemsize;
}

// -- pack: from a tensor to a view ------------------------------------------------------------------------------------

SwappedView* allocate_view(int64_t dimension_count) {
  return reinterpret_cast<SwappedView*>(view_type->tp_alloc(view_type, 2 * static_cast<Py_ssize_t>(dimension_count)));
}

bool read_integers(PyObject* sequence, int64_t* into) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); ++i) {
    into[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sequence, i));
    if (into[i] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

// Reads sizes, strides and offset through Python.
PyObject* view_through_python(PyObject* tensor, int64_t begin) {
  const Owned shape(get(tensors.shape, tensor));
  const Owned stride(shape ? PyObject_CallOneArg(tensors.stride, tensor) : nullptr);
  if (!stride) return nullptr;
  const int64_t offset = to_int(PyObject_CallOneArg(tensors.storage_offset, tensor));
  const int64_t itemsize = offset < 0 ? -1 : to_int(get(tensors.itemsize, tensor));
  if (itemsize < 0) return nullptr;
  Owned made(reinterpret_cast<PyObject*>(allocate_view(PyTuple_GET_SIZE(shape.get()))));
  if (!made) return nullptr;
  SwappedView* const view = as_view(made.get());
  if (!read_integers(shape.get(), view->sizes) || !read_integers(stride.get(), strides(view))) return nullptr;
  view->itemsize = static_cast<int>(itemsize);
  view->offset = offset - begin / itemsize;
  return made.release();
}

bool describes(PyObject* tensor, dlpack::Tensor* found) {
  if (dlpack::api == nullptr || dlpack::api->describe == nullptr) return false;
  if (dlpack::api->describe(tensor, found) == 0) return true;
  PyErr_Clear();  // a dtype that DLPack does not support
  return false;
}

// Reads sizes and strides without a Python call. Does not set the offset: `place` does. Returns null without an error
// if an element is not a whole number of bytes.
PyObject* view_through_dlpack(const dlpack::Tensor& found) {
  if (found.dtype.bits == 0 || found.dtype.bits % 8 != 0) return nullptr;
  Owned made(reinterpret_cast<PyObject*>(allocate_view(found.ndim)));
  if (!made) return nullptr;
  SwappedView* const view = as_view(made.get());
  std::copy_n(found.shape, found.ndim, view->sizes);
  std::copy_n(found.strides, found.ndim, strides(view));
  view->element = found.dtype;
  view->itemsize = found.dtype.bits * found.dtype.lanes / 8;
  return made.release();
}

// Sets the offset of a view whose first element is at `address`.
void place(SwappedView* view, const SwappedState& state, uintptr_t address) {
  view->offset = static_cast<int64_t>(address - state.source_address) / view->itemsize;
}

bool read_flags(SwappedView* view, PyObject* tensor) {
  view->dtype = get(tensors.dtype, tensor);
  if (view->dtype == nullptr) return false;
  // Only complex tensors can be conjugated lazily.
  const bool may_be_conj = view->element.bits == 0 || view->element.code == dlpack::kComplex;
  const int conj = may_be_conj ? is_true(PyObject_CallOneArg(tensors.is_conj, tensor)) : 0;
  const int neg = conj < 0 ? -1 : is_true(PyObject_CallOneArg(tensors.is_neg, tensor));
  view->is_conj = conj > 0;
  view->is_neg = neg > 0;
  return neg >= 0;
}

bool read_version(SwappedView* view, PyObject* tensor) {
  view->version = to_int(get(tensors.version, tensor));
  return view->version >= 0;
}

void attach(SwappedView* view, PyObject* saved) {
  SwappedState& state = swapped(saved);
  if (OFFLOAD_BROKEN("a view keeps its offset")) view->offset = 0;
  if (OFFLOAD_BROKEN("a duplicate keeps its stride") && state.views > 0) {
    int64_t step = 1;
    for (int64_t i = dimensions(view); i-- > 0; step *= view->sizes[i]) strides(view)[i] = step;
  }
  ++state.views;
  ++state.views_left;
  view->saved = saved;
  Py_INCREF(saved);
}

PyObject* view_of_storage(PyObject* tensor, PyObject* saved) {
  const SwappedState& state = swapped(saved);
  dlpack::Tensor found{};
  Owned made(describes(tensor, &found) ? view_through_dlpack(found) : nullptr);
  if (made)
    place(as_view(made.get()), state, reinterpret_cast<uintptr_t>(found.data) + found.byte_offset);
  else if (!PyErr_Occurred())
    made = Owned(view_through_python(tensor, state.key.begin));
  if (!made) return nullptr;
  SwappedView* const view = as_view(made.get());
  if (!read_flags(view, tensor) || !read_version(view, tensor)) return nullptr;
  // Creates the empty tensor of this dtype now: it is needed when the copy has ended, and nothing may fail then.
  if (empty_of(*state.books, view->dtype) == nullptr) return nullptr;
  attach(view, saved);
  return made.release();
}

PyObject* empty_by_python(PyObject* saved, PyObject* dtype) { return PyObject_CallMethod(saved, "empty", "O", dtype); }

// A view of an object of Python's in the place of a SwappedStorage.
PyObject* view_of_object(PyObject* tensor, PyObject* saved) {
  const Owned key(PyObject_GetAttrString(saved, "key"));
  const Owned first(key ? PySequence_GetItem(key.get(), 2) : nullptr);
  const int64_t begin = first ? PyLong_AsLongLong(first.get()) : -1;
  if (begin < 0) return nullptr;
  Owned made(view_through_python(tensor, begin));
  if (!made) return nullptr;
  SwappedView* const view = as_view(made.get());
  if (!read_flags(view, tensor) || !read_version(view, tensor)) return nullptr;
  const Owned empty(empty_by_python(saved, view->dtype));
  view->counter = empty ? PyObject_CallOneArg(tensors.detach, tensor) : nullptr;
  if (view->counter == nullptr) return nullptr;
  if (Py_TYPE(tensors.data)->tp_descr_set(tensors.data, view->counter, empty.get()) < 0) return nullptr;
  if (!Owned(PyObject_CallMethod(saved, "add_view", nullptr))) return nullptr;
  view->saved = saved;
  Py_INCREF(saved);
  return made.release();
}

// view_of(tensor, saved, index)
PyObject* view_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "view_of takes a tensor, the object that has its bytes, and its pack index");
    return nullptr;
  }
  const Py_ssize_t index = PyLong_AsSsize_t(args[2]);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  PyObject* made = nullptr;
  if (!without_exceptions([&] {
        made = is_swapped_storage(args[1]) ? view_of_storage(args[0], args[1]) : view_of_object(args[0], args[1]);
      }))
    return nullptr;
  if (made != nullptr) as_view(made)->index = index;
  return made;
}

// -- unpack: from a view to a tensor ----------------------------------------------------------------------------------

PyObject* tuple_of(const int64_t* values, int64_t count) {
  Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (int64_t i = 0; tuple && i < count; ++i) {
    PyObject* const value = PyLong_FromLongLong(values[i]);
    if (value == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), value);
  }
  return tuple.release();
}

// Returns an empty tensor of the view's dtype, borrowed or owned by `made`.
PyObject* empty_like(SwappedView* view, Owned& made) {
  if (is_swapped_storage(view->saved)) return empty_of(*swapped(view->saved).books, view->dtype);
  made = Owned(empty_by_python(view->saved, view->dtype));
  return made.get();
}

bool raise_changed(SwappedView* view, const Owned& found) {
  Owned made;
  PyObject* const empty = empty_like(view, made);
  const Owned kind(empty != nullptr ? PyObject_CallOneArg(tensors.type_name, empty) : nullptr);
  const Owned shape(kind ? tuple_of(view->sizes, dimensions(view)) : nullptr);
  const Owned expected(shape ? PyLong_FromLongLong(view->version) : nullptr);
  if (!expected) return false;
  return Owned(PyObject_CallFunctionObjArgs(tensors.raise_changed, kind.get(), shape.get(), found.get(), expected.get(),
                                            nullptr))
             .get() != nullptr;
}

// Returns false, with a Python error, if the tensor was changed in place after it was saved, or if the check fails.
bool check_version(SwappedView* view, PyObject* counter) {
  const Owned found(get(tensors.version, counter));
  if (!found) return false;
  const int64_t version = PyLong_AsLongLong(found.get());
  return version == view->version || OFFLOAD_BROKEN("version of a swapped tensor is checked") ||
         raise_changed(view, found);
}

struct OnBlock {
  dlpack::Managed managed;
  std::shared_ptr<HostBlock> block;
  std::vector<int64_t> sizes;
};

void let_go(dlpack::Managed* managed) { delete static_cast<OnBlock*>(managed->context); }

// Creates a tensor that owns the whole block.
PyObject* on_block(SwappedView* view, const std::shared_ptr<HostBlock>& block) {
  const int64_t count = dimensions(view);
  auto owner = std::make_unique<OnBlock>();
  owner->block = block;
  owner->sizes.assign(view->sizes, view->sizes + 2 * count);
  dlpack::Managed& managed = owner->managed;
  managed = {{dlpack::kMajorVersion, 0}, owner.get(), let_go, 0, {}};
  managed.tensor = {block->data(), {dlpack::kCpu, 0},    static_cast<int32_t>(count), view->element,
                    owner->sizes.data(), owner->sizes.data() + count, 0};
  void* made = nullptr;
  if (dlpack::api->to_object(&owner.release()->managed, &made) != 0) return nullptr;
  return static_cast<PyObject*>(made);
}

bool covers_block(SwappedView* view, const HostBlock& block) {
  return view->offset == 0 && view->element.bits != 0 && static_cast<size_t>(span_bytes(view)) == block.bytes();
}

// Creates a tensor on the target's storage; the bytes start at `begin`.
PyObject* on_storage(SwappedView* view, Target& target, int64_t begin) {
  Owned made;
  PyObject* const empty = empty_like(view, made);
  const Owned storage(empty != nullptr ? storage_of_target(target) : nullptr);
  const Owned offset(storage ? PyLong_FromLongLong(view->offset + begin / view->itemsize) : nullptr);
  const Owned shape(offset ? tuple_of(view->sizes, dimensions(view)) : nullptr);
  const Owned stride(shape ? tuple_of(strides(view), dimensions(view)) : nullptr);
  // The new tensor has a new version counter. No tensor here requires a gradient, so autograd records nothing.
  Owned tensor(stride ? get(tensors.data, empty) : nullptr);
  if (!tensor) return nullptr;
  const Owned done(PyObject_CallFunctionObjArgs(tensors.set_storage, tensor.get(), storage.get(), offset.get(),
                                                shape.get(), stride.get(), nullptr));
  return done ? tensor.release() : nullptr;
}

bool swap_in_bytes(SwappedView* view, Target* target, int64_t* begin) {
  if (is_swapped_storage(view->saved)) return swap_in(view->saved, target, begin);
  const Owned found(PyObject_CallMethod(view->saved, "swap_in", nullptr));
  PyObject* storage = nullptr;
  long long first = 0;
  if (!found || !PyArg_ParseTuple(found.get(), "OL", &storage, &first)) return false;
  target->storage = shared(storage);
  *begin = first;
  return true;
}

PyObject* restore(SwappedView* view) {
  const Owned counter(is_swapped_storage(view->saved) ? version_counter(view->saved)
                                                      : shared(view->counter).release());
  if (counter && !check_version(view, counter.get())) return nullptr;
  Target target;
  int64_t begin = 0;
  if (!swap_in_bytes(view, &target, &begin)) return nullptr;
  const bool is_whole = dlpack::api != nullptr && target.block != nullptr && !target.storage &&
                        covers_block(view, *target.block);
  Owned tensor(is_whole ? on_block(view, target.block) : on_storage(view, target, begin));
  if (tensor && view->is_conj) tensor = Owned(PyObject_CallOneArg(tensors.conjugated, tensor.get()));
  if (tensor && view->is_neg) tensor = Owned(PyObject_CallOneArg(tensors.negated, tensor.get()));
  // If the result does not own the whole block, other autograd nodes may use the same memory. Such a result shares the
  // original's version counter, so that these nodes detect it if backward writes to the result.
  if (!tensor || !counter || is_whole) return tensor.release();
  Owned restored(PyObject_CallOneArg(tensors.detach, counter.get()));
  if (!restored || Py_TYPE(tensors.data)->tp_descr_set(tensors.data, restored.get(), tensor.get()) < 0) return nullptr;
  return restored.release();
}

PyObject* view_restore(PyObject* self, PyObject*) {
  PyObject* tensor = nullptr;
  if (!without_exceptions([&] { tensor = restore(as_view(self)); })) return nullptr;
  return tensor;
}

// -- the Python type --------------------------------------------------------------------------------------------------

PyObject* view_ticket_id(PyObject* self, void*) {
  PyObject* const saved = as_view(self)->saved;
  if (is_swapped_storage(saved)) return PyLong_FromUnsignedLongLong(swapped(saved).ticket->id());
  return PyLong_FromLong(-1);  // nothing was copied
}

void view_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_CLEAR(as_view(self)->dtype);
  Py_CLEAR(as_view(self)->counter);
  Py_CLEAR(as_view(self)->saved);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef view_methods[] = {
    {"restore", view_restore, METH_NOARGS, "restore(): swap in and return the tensor as it was saved."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef view_attributes[] = {{"ticket_id", view_ticket_id, nullptr, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef view_members[] = {{"index", T_PYSSIZET, offsetof(SwappedView, index), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};
PyMethodDef functions[] = {
    {"view_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(view_of)), METH_FASTCALL,
     "view_of(tensor, saved, index): return the object that the autograd node holds; `saved` has the bytes."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_swapped_view_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("A saved tensor whose bytes are swapped out.")},
                                {Py_tp_methods, view_methods},
                                {Py_tp_getset, view_attributes},
                                {Py_tp_members, view_members},
                                {Py_tp_dealloc, slot(view_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.SwappedView", sizeof(SwappedView), sizeof(int64_t),
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  view_type = add_type(module, "SwappedView", spec);
  return view_type != nullptr && PyModule_AddFunctions(module, functions) == 0;
}

PyObject* make_view(PyObject* tensor, const dlpack::Tensor& described, Py_ssize_t pack_index) {
  Owned made(view_through_dlpack(described));
  if (!made || !read_flags(as_view(made.get()), tensor)) return nullptr;
  as_view(made.get())->index = pack_index;
  return made.release();
}

void attach_view(PyObject* made, PyObject* storage, int64_t version, uintptr_t address) {
  SwappedView* const view = as_view(made);
  view->version = version;
  place(view, swapped(storage), address);
  attach(view, storage);
}

int64_t span_of(PyObject* view) { return span_bytes(as_view(view)); }

PyObject* dtype_of(PyObject* view) { return as_view(view)->dtype; }

PyObject* restore_view(PyObject* view) { return restore(as_view(view)); }

PyObject* saved_of(PyObject* view) { return Py_TYPE(view) == view_type ? as_view(view)->saved : nullptr; }

Py_ssize_t index_of(PyObject* view) { return as_view(view)->index; }

}  // namespace offload
