#include "swapped_storage.h"

#include <structmember.h>

#include <algorithm>
#include <new>

#include "error.h"
#include "mutants.h"
#include "python_errors.h"

namespace offload {

PyTypeObject* swapped_storage_type = nullptr;

namespace {

// Locks a mutex. Releases the GIL while it waits, so that other threads can run.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    const GilRelease release;
    mutex_.lock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() { mutex_.unlock(); }

 private:
  std::recursive_mutex& mutex_;
};

void drop_target(SwappedState& state) {
  const Target gone = std::move(state.target);
  state.target = Target{};
  state.is_incoming = false;
  state.books->resident->add(-state.key.nbytes);
}

void count_view(SwappedState& state) {
  if (--state.views_left > 0) return;
  state.views_left = state.views;  // a second backward over a retained graph unpacks all views again
  if (state.target) drop_target(state);
}

// -- copy-out ---------------------------------------------------------------------------------------------------------

// Returns whether only one tensor refers to a storage, so that no other code can write to it; −1: a Python error.
int has_one_holder(int64_t storage) {
  if (tensors.storage_holders == nullptr) return 0;
  const Owned identity(PyLong_FromLongLong(storage));
  if (!identity) return -1;
  const int64_t holders = to_int(PyObject_CallOneArg(tensors.storage_holders, identity.get()));
  return holders < 0 ? -1 : holders == tensors.holders_alone;
}

// Returns whether no code can change the saved tensor any more: its version is that of the pack, only one view was
// saved and is not unpacked yet, and no other tensor refers to its storage; −1: a Python error.
int is_final(const SwappedState& state, PyObject* source) {
  if (state.views != 1 || state.views_left != 1) return 0;
  const int64_t version = to_int(get(tensors.version, source));
  if (version < 0) return -1;
  if (OFFLOAD_BROKEN("a version is checked while others hold the storage")) return 1;
  return version == state.key.version ? has_one_holder(state.key.storage) : 0;
}

// Frees the memory of the source (the tensor that was copied out). If code can still change the saved tensor, the
// source is kept without memory: its version counter then shows such a change at the unpack.
bool keep_counter(SwappedState& state, Owned source) {
  if (OFFLOAD_BROKEN("a source is freed after its copy-out")) return bool(state.counter = std::move(source));
  const int final = is_final(state, source.get());
  if (final > 0) return true;
  PyObject* const empty = final < 0 ? nullptr : empty_of(*state.books, state.dtype);
  const bool done = empty != nullptr && Py_TYPE(tensors.data)->tp_descr_set(tensors.data, source.get(), empty) == 0;
  state.counter = std::move(source);  // after an error it still has its memory
  return done;
}

}  // namespace

bool copied_out(PyObject* self) {
  SwappedState& state = swapped(self);
  const Lock lock(state.mutex);
  // A source that backward has used is kept, as if it had not been swapped: views that were unpacked use its memory, and
  // a kernel may have written to it while it was copied (oneDNN's LSTM writes to its saved workspace in backward).
  if (state.copy_out != nullptr && state.copy_out->is_used &&
      !OFFLOAD_BROKEN("a source that backward has used is kept"))
    return true;
  const CopyOutRef copy_out = std::move(state.copy_out);
  state.copy_out = nullptr;
  if (copy_out == nullptr) return true;
  Owned source = std::move(copy_out->source);
  if (!source) return true;
  state.books->resident->add(-state.key.nbytes);
  return keep_counter(state, std::move(source));
}

PyObject* version_counter(PyObject* self) {
  const SwappedState& state = swapped(self);
  return state.copy_out != nullptr && state.copy_out->source ? state.copy_out->source.share() : state.counter.share();
}

// -- copy-in ----------------------------------------------------------------------------------------------------------

namespace {

bool allocate(SwappedState& state, void** address) {
  Books& books = *state.books;
  const auto nbytes = static_cast<size_t>(state.key.nbytes);
  if (!books.new_storage) {
    // At least 64 bytes, like torch's allocations: with a smaller alignment, vendor kernels may round differently.
    const size_t alignment = std::max<size_t>(books.alignment_bytes, 64);
    state.target.block = std::make_shared<HostBlock>(nbytes, alignment, state.source_address % books.alignment_bytes);
    *address = state.target.block->data();
    return true;
  }
  const Owned size(PyLong_FromSize_t(nbytes)), residue(PyLong_FromSize_t(state.source_address % books.alignment_bytes));
  if (!size || !residue) return false;
  Owned storage(PyObject_CallFunctionObjArgs(books.new_storage.get(), size.get(), residue.get(), nullptr));
  const Owned place(
      storage ? PyObject_CallOneArg(tensors.storage_address, storage.get()) : nullptr);
  if (!place) return false;
  *address = PyLong_AsVoidPtr(place.get());
  if (*address == nullptr && PyErr_Occurred()) return false;
  state.target.storage = std::move(storage);
  return true;
}

bool begin_copy_in(SwappedState& state, Stream stream) {
  void* address = nullptr;
  if (!allocate(state, &address)) return false;
  state.begin = 0;
  state.stream = stream;
  state.is_incoming = true;
  state.books->resident->add(state.key.nbytes);
  try {
    call_without_gil(!state.books->store->only_queues(),
                     [&] { state.ticket->prefetch(address, stream, state.target.block); });
  } catch (...) {
    retire(*state.books, state.ticket, state.target);
    drop_target(state);
    throw;
  }
  return true;
}

void await_incoming(SwappedState& state, Stream stream) {
  try {
    const bool is_there = state.ticket->state() == State::ready;
    call_without_gil(!is_there, [&] { state.ticket->swap_in(stream); });
  } catch (...) {
    retire(*state.books, state.ticket, state.target);
    drop_target(state);
    throw;
  }
  state.is_incoming = false;
}

// Releases a target that was prefetched for another stream: its memory was allocated on that stream.
void abandon_incoming(SwappedState& state) {
  if (state.is_incoming) {
    const GilRelease release;
    state.ticket->swap_in(state.stream);
  }
  drop_target(state);
}

// Logs, as a warning, the C++ exception that is being handled. Returns false if there is a Python error.
bool warn_of_read(const Books& books) {
  raise_in_python();
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  const Owned kind(type), error(value), frames(traceback);
  const Owned text(PyObject_Str(error.get()));
  const Owned format(PyUnicode_FromString("a prefetch failed; the tensor is swapped in on demand instead: %s"));
  if (!format || !text) return false;
  return Owned(PyObject_CallFunctionObjArgs(books.warn.get(), format.get(), text.get(), nullptr)).get() != nullptr;
}

bool bring_back(SwappedState& state) {
  Stream stream = nullptr;
  if (!current_stream(*state.books, &stream)) return false;
  if (state.target && state.stream != stream && !OFFLOAD_BROKEN("a prefetch for another stream is not used"))
    abandon_incoming(state);
  if (state.target && state.is_incoming) {
    try {
      await_incoming(state, stream);
    } catch (const SpillError&) {
      if (!warn_of_read(*state.books)) return false;
    }
  }
  if (state.target) return true;
  ++state.books->misses;
  if (!begin_copy_in(state, stream)) return false;
  await_incoming(state, stream);
  return true;
}

}  // namespace

PyObject* storage_of_target(Target& target) {
  if (!target.storage && target.block != nullptr) {
    const Owned block(to_python(target.block));
    if (!block) return nullptr;
    target.storage = Owned(PyObject_CallOneArg(tensors.storage_of_buffer, block.get()));
  }
  return target.storage.share();
}

bool prefetch(PyObject* self, bool* began) {
  SwappedState& state = swapped(self);
  state.books->store->require_same_process();
  const Lock lock(state.mutex);
  *began = false;
  if (!is_swapped_out(state)) return true;
  Stream stream = nullptr;
  if (!current_stream(*state.books, &stream) || !begin_copy_in(state, stream)) return false;
  *began = true;
  return true;
}

bool wait_copied_out(PyObject* self) {
  const SwappedState& state = swapped(self);
  const CopyOutRef copy_out = state.copy_out;
  if (copy_out == nullptr || !copy_out->source) return true;
  bool done = false;
  return without_exceptions([&] { done = finish_copy_out(*state.books, copy_out); }) && done;
}

bool is_swapped_out(const SwappedState& state) {
  return !state.target && (state.copy_out == nullptr || !state.copy_out->source);
}

bool swap_in(PyObject* self, Target* found, int64_t* begin) {
  SwappedState& state = swapped(self);
  const Lock lock(state.mutex);
  if (state.copy_out != nullptr && state.copy_out->source) {
    state.copy_out->is_used = true;  // first: the call below may run other Python code, which drains the engine
    found->storage = Owned(PyObject_CallOneArg(tensors.untyped_storage, state.copy_out->source.get()));
    if (!found->storage) return false;
    *begin = OFFLOAD_BROKEN("a used source keeps the offset of its span") ? 0 : state.key.begin;
    count_view(state);
    return true;
  }
  if (!bring_back(state)) return false;
  if (state.views > 1 && !Owned(storage_of_target(state.target))) return false;  // one storage for all views
  *found = {state.target.block, shared(state.target.storage.get())};
  *begin = state.begin;
  count_view(state);
  return true;
}

// -- the Python type --------------------------------------------------------------------------------------------------

PyObject* to_tuple(const SavedKey& key) {
  return Py_BuildValue("(LLLLL)", static_cast<long long>(key.owner), static_cast<long long>(key.version),
                       static_cast<long long>(key.begin), static_cast<long long>(key.nbytes),
                       static_cast<long long>(key.storage));
}

namespace {

PyObject* storage_prefetch(PyObject* self, PyObject*) {
  bool began = false, done = false;
  if (!without_exceptions([&] { done = prefetch(self, &began); }) || !done) return nullptr;
  return PyBool_FromLong(began);
}

PyObject* storage_swap_in(PyObject* self, PyObject*) {
  Target found;
  int64_t begin = 0;
  bool done = false;
  if (!without_exceptions([&] { done = swap_in(self, &found, &begin); }) || !done) return nullptr;
  const Owned storage(storage_of_target(found));
  return storage ? Py_BuildValue("(OL)", storage.get(), static_cast<long long>(begin)) : nullptr;
}

PyObject* storage_add_view(PyObject* self, PyObject*) {
  ++swapped(self).views, ++swapped(self).views_left;
  Py_RETURN_NONE;
}

PyObject* storage_remove_view(PyObject* self, PyObject*) {
  SwappedState& state = swapped(self);
  const Lock lock(state.mutex);
  --state.views;
  state.views_left = std::min(state.views_left, state.views);
  if (state.views_left == state.views && state.target) {
    if (state.is_incoming) retire(*state.books, state.ticket, state.target);
    drop_target(state);
  }
  Py_RETURN_NONE;
}

PyObject* storage_wait_copied_out(PyObject* self, PyObject*) {
  return wait_copied_out(self) ? shared(Py_None).release() : nullptr;
}

PyObject* storage_ticket(PyObject* self, void*) { return to_python(swapped(self).ticket.get(), self); }
PyObject* storage_key(PyObject* self, void*) { return to_tuple(swapped(self).key); }
PyObject* storage_nbytes(PyObject* self, void*) { return PyLong_FromLongLong(swapped(self).key.nbytes); }
PyObject* storage_views(PyObject* self, void*) { return PyLong_FromLongLong(swapped(self).views); }
PyObject* storage_is_swapped_out(PyObject* self, void*) { return PyBool_FromLong(is_swapped_out(swapped(self))); }

// Frees the ticket and the memory without waiting. If a copy-out still reads the source, `collect` (swap_books.h)
// releases the source later, or `Books::~Books` if this is the last SwappedStorage of a freed engine.
void free_storage(PyObject* self) {
  SwappedState& state = swapped(self);
  Books& books = *state.books;
  const auto [first, end] = books.live.equal_range(state.key);
  const auto known = std::find_if(first, end, [self](const auto& entry) { return entry.second == self; });
  if (known != end) books.live.erase(known);
  if (state.is_counted) books.unswapped->add(-state.key.nbytes);
  if (const CopyOutRef copy_out = std::move(state.copy_out); copy_out != nullptr) {
    copy_out->saved = nullptr;
    if (copy_out->source && state.is_counted) books.resident->add(-state.key.nbytes);
    bool is_read = true;
    const bool is_begun = copy_out->ticket != nullptr;
    if (is_begun && !without_exceptions([&] { is_read = !copy_out->ticket->cancel() && !copy_out->ticket->out_done(); }))
      PyErr_Clear();
    if (!is_read) copy_out->source = Owned();
  }
  if (state.target) {
    if (state.is_incoming) retire(books, state.ticket, state.target);
    drop_target(state);
  }
}

void storage_dealloc(PyObject* self) {
  auto* storage = reinterpret_cast<SwappedStorage*>(self);
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_ClearWeakRefs(self);  // from here on no other code can get a new reference to this object
  if (OFFLOAD_BROKEN("an abandoned graph frees its records")) return;
  PyObject *error, *value, *traceback;
  PyErr_Fetch(&error, &value, &traceback);
  free_storage(self);
  storage->state.~SwappedState();
  PyErr_Restore(error, value, traceback);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef storage_methods[] = {
    {"prefetch", storage_prefetch, METH_NOARGS,
     "prefetch(): start the copy-in; return False if the bytes are on the device or a copy-in is under way."},
    {"swap_in", storage_swap_in, METH_NOARGS,
     "swap_in(): swap in for the current stream; return (storage, offset of the first byte in it)."},
    {"add_view", storage_add_view, METH_NOARGS, "add_view(): count one more view that will be unpacked."},
    {"remove_view", storage_remove_view, METH_NOARGS,
     "remove_view(): count one view fewer; free the bytes on the device if no other view uses them."},
    {"wait_copied_out", storage_wait_copied_out, METH_NOARGS, "wait_copied_out(): wait until the copy-out has ended."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef storage_attributes[] = {{"ticket", storage_ticket, nullptr, nullptr, nullptr},
                                    {"key", storage_key, nullptr, nullptr, nullptr},
                                    {"nbytes", storage_nbytes, nullptr, nullptr, nullptr},
                                    {"views", storage_views, nullptr, nullptr, nullptr},
                                    {"is_swapped_out", storage_is_swapped_out, nullptr, nullptr, nullptr},
                                    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef storage_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(SwappedStorage, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

bool add_swapped_storage_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("A storage whose bytes are swapped out.")},
                                {Py_tp_methods, storage_methods},
                                {Py_tp_getset, storage_attributes},
                                {Py_tp_members, storage_members},
                                {Py_tp_dealloc, slot(storage_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.SwappedStorage", sizeof(SwappedStorage), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  swapped_storage_type = add_type(module, "SwappedStorage", spec);
  return swapped_storage_type != nullptr;
}

PyObject* make_swapped_storage(const std::shared_ptr<Books>& books) {
  PyObject* const self = swapped_storage_type->tp_alloc(swapped_storage_type, 0);
  if (self == nullptr) return nullptr;
  new (&swapped(self)) SwappedState();
  swapped(self).books = books;
  return self;
}

}  // namespace offload
