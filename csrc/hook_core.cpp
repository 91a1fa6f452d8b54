#include "hook_core.h"

#include <utility>

#include "dlpack_api.h"
#include "engine_core.h"
#include "python_errors.h"
#include "saved_identity.h"
#include "swap_hooks.h"

namespace offload {
namespace {

struct CachedCount {
  std::shared_ptr<Count> count;  // null until the first tensor
};

struct HookCore {
  PyObject_HEAD
  PyObject* counts;    // reason → Count
  PyObject* engine;    // an EngineCore
  PyObject* observer;  // may be null
  PyObject* reason;    // why the schedule keeps tensors, for the report; null before `follow`, unused without a cursor
  int64_t min_nbytes;
  int64_t packs;
  std::shared_ptr<ScheduleCursor> cursor;
  CachedCount small, parameter, planned;
  std::unique_ptr<SwapHooks> swaps;  // null: Python decides which tensors are swapped
};

PyTypeObject* core_type = nullptr;

struct Names {
  PyObject *small, *parameter, *unsupported, *watches, *pack_due, *pack_candidate, *unpack_watched, *unpack_swapped,
      *refuse;
} names;

HookCore* as_core(PyObject* object) { return reinterpret_cast<HookCore*>(object); }

// Returns the tensor of a KeptTensor. If it was changed in place since it was saved, raises the error that autograd
// raises in this case.
PyObject* checked(PyObject* core, PyObject* packed) {
  auto* kept = reinterpret_cast<KeptTensor*>(packed);
  const Owned found(get(tensors.version, kept->tensor));
  if (!found) return nullptr;
  const int same = PyObject_RichCompareBool(found.get(), kept->version, Py_EQ);
  if (same < 0) return nullptr;
  if (!same) {
    const Owned refused(PyObject_CallMethodObjArgs(core, names.refuse, packed, nullptr));
    if (!refused) return nullptr;
  }
  Py_INCREF(kept->tensor);
  return kept->tensor;
}

// Returns whether __init__ has run and the tensor interface is set. False: a Python error.
bool is_ready(const HookCore* core) {
  if (core->counts != nullptr && tensors.tensor_type != nullptr) return true;
  PyErr_SetString(PyExc_RuntimeError, "HookCore.__init__ or set_tensor_interface was not called");
  return false;
}

// -- keep -------------------------------------------------------------------------------------------------------------

// Returns whether the schedule or the observer must be told when this tensor is unpacked; −1: a Python error.
int is_watched(HookCore* core, int64_t index) {
  if (core->cursor != nullptr) return core->cursor->watches(index);
  if (core->observer == nullptr) return 0;
  const Owned number(PyLong_FromLongLong(index));
  if (!number) return -1;
  return is_true(PyObject_CallMethodObjArgs(core->observer, names.watches, number.get(), nullptr));
}

PyObject* record_of(HookCore* core, PyObject* tensor, int64_t index) {
  const int watched = is_watched(core, index);
  if (watched < 0) return nullptr;
  Owned version(get(tensors.version, tensor));
  if (!version) return nullptr;
  // A leaf is not detached: it has no grad_fn that would be kept alive, and autograd too saves the leaf itself.
  const int is_leaf = is_true(get(tensors.is_leaf, tensor));
  if (is_leaf < 0) return nullptr;
  if (is_leaf) Py_INCREF(tensor);
  Owned held(is_leaf ? tensor : PyObject_CallOneArg(tensors.detach, tensor));
  if (!held) return nullptr;
  return make_kept(held, version, watched ? static_cast<Py_ssize_t>(index) : -1);
}

std::shared_ptr<Count> count_for(HookCore* core, PyObject* reason) {
  const Owned found(PyObject_GetItem(core->counts, reason));
  return found ? count_of(found.get()) : nullptr;
}

PyObject* keep(HookCore* core, PyObject* tensor, int64_t index, CachedCount& cached, PyObject* reason, int64_t nbytes) {
  if (cached.count == nullptr && (cached.count = count_for(core, reason)) == nullptr) return nullptr;
  ++cached.count->tensors;
  cached.count->nbytes += nbytes;
  return record_of(core, tensor, index);
}

// keep(tensor, index, reason, nbytes): count a kept tensor, and return the object that the autograd node holds.
PyObject* core_keep(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (!is_ready(as_core(self))) return nullptr;
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "keep takes a tensor, the index of its pack, a reason and its size in bytes");
    return nullptr;
  }
  const int64_t index = PyLong_AsLongLong(args[1]);
  const int64_t nbytes = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred()) return nullptr;
  CachedCount found;
  return keep(as_core(self), args[0], index, found, args[2], nbytes);
}

// count(counted, nbytes): count one tensor.
PyObject* core_count(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "count takes a Count and a size in bytes");
    return nullptr;
  }
  const int64_t nbytes = PyLong_AsLongLong(args[1]);
  const std::shared_ptr<Count> counted = PyErr_Occurred() ? nullptr : count_of(args[0]);
  if (counted == nullptr) return nullptr;
  ++counted->tensors;
  counted->nbytes += nbytes;
  Py_RETURN_NONE;
}

// -- pack and unpack --------------------------------------------------------------------------------------------------

// Returns the size in bytes of a strided tensor. One DLPack call is faster than reading three attributes (layout,
// is_nested, nbytes). −1: this torch has no such call, DLPack cannot describe the tensor, or its elements are not whole
// bytes. The tensor may be strided in these cases too, so the caller then calls is_plain. `found` (output): the
// description; its data pointer is null if DLPack cannot describe the tensor.
int64_t described_bytes(PyObject* tensor, dlpack::Tensor* found) {
  if (dlpack::api == nullptr || dlpack::api->describe == nullptr) return -1;
  if (dlpack::api->describe(tensor, found) != 0) {
    PyErr_Clear();
    found->data = nullptr;
    return -1;
  }
  if (found->dtype.bits % 8 != 0) return -1;
  int64_t nbytes = found->dtype.bits * found->dtype.lanes / 8;
  for (int32_t i = 0; i < found->ndim; ++i) nbytes *= found->shape[i];
  return nbytes;
}

// Returns whether a tensor is strided and not nested, as the engine requires; −1: a Python error.
int is_plain(PyObject* tensor) {
  const Owned layout(get(tensors.layout, tensor));
  if (!layout) return -1;
  if (layout.get() != tensors.strided) return 0;
  const int nested = is_true(get(tensors.is_nested, tensor));
  return nested < 0 ? -1 : !nested;
}

// Returns whether a tensor below min_nbytes is not a view; −1: a Python error. (The storage of a small view may be
// large and worth swapping.) A step that follows a schedule does not call is_view if an earlier step packed a tensor of
// the same size at this index that was not a view: then `tensor` is assumed not to be a view either.
int is_small(const HookCore& core, PyObject* tensor, int64_t index, int64_t nbytes) {
  if (core.cursor != nullptr && core.cursor->is_small(index, nbytes)) return 1;
  const int is_view = is_true(PyObject_CallOneArg(tensors.is_view, tensor));
  if (is_view == 0 && core.cursor != nullptr) core.cursor->add_small(index, nbytes);
  return is_view < 0 ? -1 : !is_view;
}

PyObject* ask(PyObject* self, PyObject* method, PyObject* tensor, int64_t index, int64_t nbytes) {
  const Owned number(PyLong_FromLongLong(index));
  const Owned size(PyLong_FromLongLong(nbytes));
  if (!number || !size) return nullptr;
  return PyObject_CallMethodObjArgs(self, method, tensor, number.get(), size.get(), nullptr);
}

PyObject* core_pack(PyObject* self, PyObject* tensor) {
  HookCore* const core = as_core(self);
  if (!is_ready(core)) return nullptr;
  const int64_t index = core->packs++;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  const bool may_move = type == tensors.tensor_type || type == tensors.parameter_type;
  dlpack::Tensor described{};
  int64_t nbytes = may_move ? described_bytes(tensor, &described) : -1;
  if (nbytes < 0) {
    const int plain = may_move ? is_plain(tensor) : 0;
    if (plain < 0) return nullptr;
    if (!plain) {
      CachedCount found;
      return keep(core, tensor, index, found, names.unsupported, 0);
    }
    nbytes = to_int(get(tensors.nbytes, tensor));
    if (nbytes < 0) return nullptr;
  }
  if (nbytes < core->min_nbytes) {
    const int small = is_small(*core, tensor, index, nbytes);
    if (small < 0) return nullptr;
    if (small) return keep(core, tensor, index, core->small, names.small, nbytes);
  }
  if (core->cursor != nullptr) {
    const ScheduleCursor::Verdict verdict = core->cursor->pack(index, nbytes);
    const int64_t counted = core->cursor->keeps_again(index) ? 0 : nbytes;
    if (verdict == ScheduleCursor::Verdict::kept)
      return keep(core, tensor, index, core->planned, core->reason, counted);
    if (verdict == ScheduleCursor::Verdict::due) return ask(self, names.pack_due, tensor, index, counted);
  }
  Owned owner(version_owner(tensor));
  if (!owner) return nullptr;
  if (type == tensors.parameter_type || reinterpret_cast<PyObject*>(Py_TYPE(owner.get())) == tensors.parameter_type)
    return keep(core, tensor, index, core->parameter, names.parameter, nbytes);
  if (core->swaps != nullptr && described.data != nullptr) {
    PyObject* const packed = pack_swapped(*core->swaps, tensor, std::move(owner), described, index, nbytes);
    if (packed != nullptr || PyErr_Occurred()) return packed;
  }
  return ask(self, names.pack_candidate, tensor, index, nbytes);
}

PyObject* core_unpack(PyObject* self, PyObject* packed) {
  HookCore* const core = as_core(self);
  if (!is_ready(core)) return nullptr;
  if (Py_TYPE(packed) != kept_type) {
    PyObject* const tensor = core->swaps != nullptr ? unpack_swapped(*core->swaps, packed) : nullptr;
    if (tensor != nullptr || PyErr_Occurred()) return tensor;
    return PyObject_CallMethodObjArgs(self, names.unpack_swapped, packed, nullptr);
  }
  const Py_ssize_t index = reinterpret_cast<KeptTensor*>(packed)->index;
  if (index >= 0) {
    const int quiet = core->cursor != nullptr ? is_quiet(core->engine) : 0;
    if (quiet < 0) return nullptr;
    if (!quiet || !core->cursor->unpack(index))
      return PyObject_CallMethodObjArgs(self, names.unpack_watched, packed, nullptr);
  }
  return checked(self, packed);
}

PyObject* core_checked(PyObject* self, PyObject* packed) {
  if (Py_TYPE(packed) == kept_type) return checked(self, packed);
  PyErr_SetString(PyExc_TypeError, "checked takes a KeptTensor");
  return nullptr;
}

template <PyObject* (*entry)(PyObject*, PyObject*)>
PyObject* guarded(PyObject* self, PyObject* argument) {
  PyObject* result = nullptr;
  return without_exceptions([&] { result = entry(self, argument); }) ? result : nullptr;
}

PyMethodDef core_methods[] = {
    {"pack", guarded<core_pack>, METH_O, "pack(tensor): return the object that the autograd node holds instead of it."},
    {"unpack", guarded<core_unpack>, METH_O, "unpack(packed): return the tensor that was packed."},
    {"checked", core_checked, METH_O, "checked(kept): return its tensor; an error if it was changed in place."},
    {"count", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(core_count)), METH_FASTCALL,
     "count(counted, nbytes): count one tensor."},
    {"keep", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(core_keep)), METH_FASTCALL,
     "keep(tensor, index, reason, nbytes): count a kept tensor; return the object that the autograd node holds."},
    {nullptr, nullptr, 0, nullptr}};

// -- HookCore ---------------------------------------------------------------------------------------------------------

PyObject* core_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  HookCore* const core = as_core(self);
  new (&core->cursor) std::shared_ptr<ScheduleCursor>();
  new (&core->small) CachedCount();
  new (&core->parameter) CachedCount();
  new (&core->planned) CachedCount();
  new (&core->swaps) std::unique_ptr<SwapHooks>();
  return self;
}

int core_init(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"min_nbytes", "counts", "engine", nullptr};
  long long min_nbytes = 0;
  PyObject *counts = nullptr, *engine = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LOO:HookCore", const_cast<char**>(keywords), &min_nbytes, &counts,
                                   &engine))
    return -1;
  HookCore* const core = as_core(self);
  core->min_nbytes = min_nbytes;
  Py_INCREF(counts);
  Py_XSETREF(core->counts, counts);
  Py_INCREF(engine);
  Py_XSETREF(core->engine, engine);
  return 0;
}

int core_traverse(PyObject* self, visitproc visit, void* arg) {
  HookCore* const core = as_core(self);
  Py_VISIT(core->counts);
  Py_VISIT(core->engine);
  Py_VISIT(core->observer);
  Py_VISIT(core->reason);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int core_clear(PyObject* self) {
  HookCore* const core = as_core(self);
  core->swaps = nullptr;
  Py_CLEAR(core->observer);  // may refer back to this object; pack and unpack still need the other members
  return 0;
}

void core_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  HookCore* const core = as_core(self);
  core_clear(self);
  Py_CLEAR(core->reason);
  Py_CLEAR(core->counts);
  Py_CLEAR(core->engine);
  core->cursor.~shared_ptr();
  core->small.~CachedCount();
  core->parameter.~CachedCount();
  core->planned.~CachedCount();
  core->swaps.~unique_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

// -- the module -------------------------------------------------------------------------------------------------------

bool intern_names() {
  const std::pair<PyObject**, const char*> all[] = {{&names.small, "small"},
                                                    {&names.parameter, "parameter"},
                                                    {&names.unsupported, "unsupported kind"},
                                                    {&names.watches, "watches"},
                                                    {&names.pack_due, "pack_due"},
                                                    {&names.pack_candidate, "pack_candidate"},
                                                    {&names.unpack_watched, "unpack_watched"},
                                                    {&names.unpack_swapped, "unpack_swapped"},
                                                    {&names.refuse, "refuse"}};
  for (const auto& [name, text] : all)
    if ((*name = PyUnicode_InternFromString(text)) == nullptr) return false;
  return true;
}

}  // namespace

bool add_hook_types(PyObject* module) {
  static PyType_Slot core_slots[] = {{Py_tp_doc, const_cast<char*>("Pack and unpack hooks of kept and swapped tensors.")},
                                     {Py_tp_methods, core_methods},
                                     {Py_tp_new, slot(core_new)},
                                     {Py_tp_init, slot(core_init)},
                                     {Py_tp_traverse, slot(core_traverse)},
                                     {Py_tp_clear, slot(core_clear)},
                                     {Py_tp_dealloc, slot(core_dealloc)},
                                     {0, nullptr}};
  static PyType_Spec core_spec = {"offload._core.HookCore", sizeof(HookCore), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, core_slots};
  if (!intern_names() || !prepare_swap_hooks()) return false;
  core_type = add_type(module, "HookCore", core_spec);
  return core_type != nullptr;
}

namespace {

std::unique_ptr<SwapHooks> swap_hooks_of(HookCore* core, std::shared_ptr<StepCopies> copies, PyObject* held) {
  auto hooks = std::make_unique<SwapHooks>();
  const Owned swapped(PyObject_GetAttrString(core->counts, "swapped"));
  const Owned duplicates(swapped ? PyObject_GetAttrString(core->counts, "duplicates") : nullptr);
  if (!duplicates || (hooks->swapped = count_of(swapped.get())) == nullptr ||
      (hooks->duplicates = count_of(duplicates.get())) == nullptr ||
      (hooks->books = books_of_engine(core->engine)) == nullptr)
    return nullptr;
  hooks->copies = std::move(copies);
  hooks->core = reinterpret_cast<PyObject*>(core);
  hooks->held = shared(held);
  return hooks;
}

}  // namespace

bool follow(PyObject* self, PyObject* observer, std::shared_ptr<ScheduleCursor> cursor, PyObject* reason,
            std::shared_ptr<StepCopies> copies, PyObject* held) {
  if (!PyObject_TypeCheck(self, core_type)) {
    PyErr_SetString(PyExc_TypeError, "follow takes a HookCore");
    return false;
  }
  HookCore* const core = as_core(self);
  Py_INCREF(observer);
  Py_XSETREF(core->observer, observer);
  Py_INCREF(reason);
  Py_XSETREF(core->reason, reason);
  core->planned.count = nullptr;
  core->cursor = std::move(cursor);
  core->packs = 0;
  core->swaps = nullptr;
  if (copies == nullptr) return true;
  core->swaps = swap_hooks_of(core, std::move(copies), held);
  return core->swaps != nullptr;
}

}  // namespace offload
