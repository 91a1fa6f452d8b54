#include "engine_core.h"

#include <new>

#include "gauge_type.h"
#include "mutants.h"
#include "python_errors.h"
#include "saved_identity.h"
#include "swapped_storage.h"

namespace offload {
namespace {

struct EngineCore {
  PyObject_HEAD
  std::shared_ptr<Books> books;
};

PyTypeObject* engine_type = nullptr;

EngineCore* as_engine(PyObject* object) { return reinterpret_cast<EngineCore*>(object); }

// Returns the records of an engine. Null: a Python error (__init__ has not run).
Books* books_of(PyObject* self) {
  Books* const books = as_engine(self)->books.get();
  if (books == nullptr) PyErr_SetString(PyExc_RuntimeError, "EngineCore.__init__ was not called");
  return books;
}

// -- look -------------------------------------------------------------------------------------------------------------

// Returns the bytes from the first to the last element of a tensor; −1: a Python error.
int64_t span_of(PyObject* tensor, int64_t itemsize) {
  const Owned shape(get(tensors.shape, tensor));
  const Owned stride(shape ? PyObject_CallOneArg(tensors.stride, tensor) : nullptr);
  if (!stride) return -1;
  int64_t elements = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.get()); ++i)
    elements += (PyLong_AsLongLong(PyTuple_GET_ITEM(shape.get(), i)) - 1) *
                PyLong_AsLongLong(PyTuple_GET_ITEM(stride.get(), i));
  return PyErr_Occurred() ? -1 : elements * itemsize;
}

// If a view covers less than half of its storage, limits the key to the bytes from its first to its last element.
bool narrow(PyObject* tensor, SavedKey* key) {
  const int64_t itemsize = to_int(get(tensors.itemsize, tensor));
  const int64_t span_nbytes = itemsize < 0 ? -1 : span_of(tensor, itemsize);
  if (span_nbytes < 0) return false;
  if (2 * span_nbytes >= key->nbytes) return true;
  const int64_t offset = to_int(PyObject_CallOneArg(tensors.storage_offset, tensor));
  key->begin = offset * itemsize;
  key->nbytes = span_nbytes;
  return offset >= 0;
}

// Returns the SwappedStorage with this key: borrowed, or null. A key contains the address of the tensor that owns the
// version counter. If this tensor was freed, another one may have the address, so the weak reference is compared, too.
PyObject* find_live(const Books& books, const SavedIdentity& identity) {
  const auto [first, end] = books.live.equal_range(identity.key);
  for (auto each = first; each != end; ++each) {
    const Owned owner = referent(swapped(each->second).owner.get());
    const bool is_same = owner && owner.get() == identity.owner.get();
    if (is_same || OFFLOAD_BROKEN("an owner that was freed matches nothing")) return each->second;
  }
  return nullptr;
}

PyObject* look(Books& books, PyObject* tensor, int64_t nbytes) {
  SavedIdentity identity;
  PyObject* known = nullptr;
  const int found = find_saved(books, tensor, nbytes, &identity, &known);
  if (found < 0) return nullptr;
  if (found == 0) return PyTuple_Pack(2, Py_None, Py_None);
  const Owned saved = shared(known != nullptr ? known : Py_None);
  const Owned tuple(to_tuple(identity.key));
  return tuple ? PyTuple_Pack(2, tuple.get(), saved.get()) : nullptr;
}

PyObject* engine_look(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Books* const books = books_of(self);
  if (books == nullptr) return nullptr;
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "look takes a tensor and its size in bytes");
    return nullptr;
  }
  const int64_t nbytes = PyLong_AsLongLong(args[1]);
  return PyErr_Occurred() ? nullptr : look(*books, args[0], nbytes);
}

// -- swap_out ---------------------------------------------------------------------------------------------------------

bool read_key(PyObject* tuple, SavedKey* key) {
  int64_t* const parts[] = {&key->owner, &key->version, &key->begin, &key->nbytes, &key->storage};
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 5) {
    PyErr_SetString(PyExc_TypeError, "swap_out takes a key that look returned");
    return false;
  }
  for (Py_ssize_t i = 0; i < 5; ++i) *parts[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
  return !PyErr_Occurred();
}

bool read_address(SwappedState& state, PyObject* storage) {
  const Owned place(PyObject_CallOneArg(tensors.storage_address, storage));
  if (!place) return false;
  state.source_address = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(place.get()) +
                                                static_cast<unsigned long long>(state.key.begin));
  return !PyErr_Occurred();
}

// Prepares a copy-out. All that runs Python code or may set a Python error is done here, before the copy starts.
bool prepare(const std::shared_ptr<Books>& books, PyObject* tensor, const SavedIdentity& identity, PyObject* saved) {
  SwappedState& state = swapped(saved);
  state.source_address = identity.address;
  if (state.source_address == 0 && !read_address(state, identity.storage.get())) return false;
  auto copy_out = std::make_shared<CopyOut>();
  if (!current_stream(*books, &copy_out->stream)) return false;
  // Memory that was allocated on another stream must not be reused before the copy has ended: record_stream prevents
  // this. It has no effect on memory that was allocated on the current stream.
  if (books->record_use && !OFFLOAD_BROKEN("record_stream on sources") &&
      !Owned(PyObject_CallFunctionObjArgs(books->record_use.get(), tensor, nullptr)))
    return false;
  copy_out->source = Owned(PyObject_CallOneArg(tensors.detach, tensor));
  if (!copy_out->source) return false;
  state.owner = Owned(PyWeakref_NewRef(identity.owner.get(), nullptr));
  if (!state.owner) return false;
  const Owned dtype(identity.dtype != nullptr ? shared(identity.dtype).release() : get(tensors.dtype, tensor));
  // The empty tensor is created now, because it is needed when the copy has ended, and nothing may fail then.
  if (!dtype || empty_of(*books, dtype.get()) == nullptr) return false;
  state.dtype = dtype.get();
  copy_out->nbytes = state.key.nbytes;
  copy_out->saved = saved;
  state.copy_out = std::move(copy_out);
  return true;
}

void start_copy(const Books& books, PyObject* saved, uint64_t need, Ticket* ticket) {
  const SwappedState& state = swapped(saved);
  try {
    call_without_gil(!books.store->only_queues(), [&] {
      *ticket = books.store->swap_out(reinterpret_cast<const void*>(state.source_address),
                                      static_cast<size_t>(state.key.nbytes), state.copy_out->stream, need);
    });
  } catch (const abi::__forced_unwind&) {
    Py_INCREF(saved);  // leaked on purpose: the interpreter is shutting down, and the copy may still read the source
    throw;
  }
}

// Starts the copy, then creates the entry that keeps its source alive. No Python code runs in between.
void begin_copy_out(Books& books, PyObject* saved, uint64_t need) {
  SwappedState& state = swapped(saved);
  const auto ticket = std::make_shared<Ticket>();
  start_copy(books, saved, need, ticket.get());
  try {
    books.live.emplace(state.key, saved);
    books.copies_out.push_back(state.copy_out);
  } catch (...) {  // no memory for the entry: wait for the copy here, before the source is freed
    const GilRelease release;
    if (!OFFLOAD_BROKEN("a copy that could not be listed is waited for") && !ticket->cancel())
      ticket->wait_out(state.copy_out->stream);
    throw;
  }
  state.ticket = state.copy_out->ticket = ticket;
  state.is_counted = true;
  books.in_flight_bytes += state.key.nbytes;
  books.unswapped->add(state.key.nbytes);
  books.resident->add(state.key.nbytes);
  if (OFFLOAD_BROKEN("source is held until its copy ends")) state.copy_out->source = Owned();
}

PyObject* engine_swap_out(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (books_of(self) == nullptr) return nullptr;
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "swap_out takes a tensor, a key that look returned, and a spill priority");
    return nullptr;
  }
  SavedIdentity identity;
  if (!read_key(args[1], &identity.key)) return nullptr;
  const uint64_t need = PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred() || !identify(args[0], &identity)) return nullptr;
  const std::shared_ptr<Books> books = as_engine(self)->books;
  PyObject* saved = nullptr;
  if (!without_exceptions([&] { saved = swap_out(books, args[0], identity, need); })) return nullptr;
  return saved;
}

// -- methods and attributes that use the engine's records (Books) -----------------------------------------------------

template <bool (*function)(Books&)>
PyObject* on_books(PyObject* self, PyObject*) {
  if (books_of(self) == nullptr) return nullptr;
  const std::shared_ptr<Books> books = as_engine(self)->books;
  bool done = false;
  if (!without_exceptions([&] { done = function(*books); }) || !done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* engine_live(PyObject* self, PyObject*) {
  const Books* const books = books_of(self);
  Owned list(books != nullptr ? PyList_New(0) : nullptr);
  if (!list) return nullptr;
  for (const auto& [key, saved] : books->live)
    if (PyList_Append(list.get(), saved) < 0) return nullptr;
  return list.release();
}

template <typename Figure>
PyObject* figure(PyObject* self, Figure&& figure_of) {
  const Books* const books = books_of(self);
  return books != nullptr ? PyLong_FromLongLong(static_cast<long long>(figure_of(*books))) : nullptr;
}

template <int64_t Books::*member>
PyObject* engine_figure(PyObject* self, void*) {
  return figure(self, [](const Books& books) { return books.*member; });
}
PyObject* engine_live_records(PyObject* self, void*) {
  return figure(self, [](const Books& books) { return books.live.size(); });
}
PyObject* engine_sources_held(PyObject* self, void*) {
  return figure(self, [](const Books& books) { return books.copies_out.size(); });
}
PyObject* engine_targets_held(PyObject* self, void*) {
  return figure(self, [](const Books& books) { return books.retired.size(); });
}

int engine_set_in_flight_bytes_max(PyObject* self, PyObject* value, void*) {
  Books* const books = books_of(self);
  const int64_t nbytes = books != nullptr && value != nullptr ? PyLong_AsLongLong(value) : -1;
  if (books == nullptr || (nbytes == -1 && PyErr_Occurred())) return -1;
  books->in_flight_bytes_max = nbytes;
  return 0;
}

PyObject* engine_new_storage(PyObject* self, void*) {
  const Books* const books = books_of(self);
  return books != nullptr ? shared(books->new_storage ? books->new_storage.get() : Py_None).release() : nullptr;
}

int engine_set_new_storage(PyObject* self, PyObject* value, void*) {
  Books* const books = books_of(self);
  if (books == nullptr) return -1;
  books->new_storage = shared(value == Py_None ? nullptr : value);
  return 0;
}

PyObject* engine_failure(PyObject* self, void*) {
  const Books* const books = books_of(self);
  if (books == nullptr) return nullptr;
  return PyUnicode_DecodeUTF8(books->failure.data(), static_cast<Py_ssize_t>(books->failure.size()), "replace");
}

// -- the Python type --------------------------------------------------------------------------------------------------

PyObject* engine_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) new (&as_engine(self)->books) std::shared_ptr<Books>();
  return self;
}

Owned none_as_null(PyObject* object) { return shared(object == Py_None ? nullptr : object); }

int engine_init(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"store",      "device",      "resident", "unswapped", "in_flight_bytes_max",
                                   "current_stream", "record_use", "new_storage", "warn",      nullptr};
  PyObject *store, *device, *resident, *unswapped, *current, *record_use, *new_storage, *warn;
  long long in_flight_bytes_max = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOLOOOO:EngineCore", const_cast<char**>(keywords), &store, &device,
                                   &resident, &unswapped, &in_flight_bytes_max, &current, &record_use, &new_storage,
                                   &warn))
    return -1;
  const bool done = without_exceptions([&] {
    auto books = std::make_shared<Books>();
    if ((books->store = store_of(store)) == nullptr || (books->resident = gauge_of(resident)) == nullptr ||
        (books->unswapped = gauge_of(unswapped)) == nullptr)
      return;
    books->alignment_bytes = books->store->alignment_bytes();
    books->in_flight_bytes_max = in_flight_bytes_max;
    books->device = shared(device);
    books->current_stream = none_as_null(current);
    books->record_use = none_as_null(record_use);
    books->new_storage = none_as_null(new_storage);
    books->warn = shared(warn);
    as_engine(self)->books = std::move(books);
  });
  return done && !PyErr_Occurred() ? 0 : -1;
}

int engine_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return 0;
}

void engine_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  as_engine(self)->books.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Function>
PyCFunction fast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef engine_methods[] = {
    {"look", fast(engine_look), METH_FASTCALL,
     "look(tensor, nbytes): the tensor's key, and its SwappedStorage or None; (None, None) if it cannot be swapped."},
    {"swap_out", fast(engine_swap_out), METH_FASTCALL,
     "swap_out(tensor, key, need): start the copy-out; return its SwappedStorage. need: spill priority."},
    {"collect", on_books<collect>, METH_NOARGS,
     "collect(): free the sources and targets that no copy uses any more, without waiting."},
    {"limit_in_flight", on_books<limit_in_flight>, METH_NOARGS,
     "limit_in_flight(): wait until at most in_flight_bytes_max bytes of sources are held."},
    {"drain", on_books<drain>, METH_NOARGS, "drain(): wait for the copies whose memory the engine holds, and free it."},
    {"live_storages", engine_live, METH_NOARGS, "live_storages(): the SwappedStorages that an autograd graph holds."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef engine_attributes[] = {
    {"misses", engine_figure<&Books::misses>, nullptr, nullptr, nullptr},
    {"failed", engine_figure<&Books::failed>, nullptr, nullptr, nullptr},
    {"failed_bytes", engine_figure<&Books::failed_bytes>, nullptr, nullptr, nullptr},
    {"failure", engine_failure, nullptr, nullptr, nullptr},
    {"live_records", engine_live_records, nullptr, nullptr, nullptr},
    {"sources_held", engine_sources_held, nullptr, nullptr, nullptr},
    {"targets_held", engine_targets_held, nullptr, nullptr, nullptr},
    {"in_flight_bytes", engine_figure<&Books::in_flight_bytes>, nullptr, nullptr, nullptr},
    {"in_flight_bytes_max", engine_figure<&Books::in_flight_bytes_max>, engine_set_in_flight_bytes_max, nullptr, nullptr},
    {"new_storage", engine_new_storage, engine_set_new_storage, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

int find_saved(Books& books, PyObject* tensor, int64_t nbytes, SavedIdentity* found, PyObject** known) {
  const int has_key = find_key(tensor, nbytes, found);
  if (has_key <= 0) return has_key;
  *known = find_live(books, *found);
  if (*known == nullptr && 2 * nbytes < found->key.nbytes) {
    if (!narrow(tensor, &found->key)) return -1;
    *known = find_live(books, *found);
  }
  return 1;
}

PyObject* swap_out(const std::shared_ptr<Books>& books, PyObject* tensor, const SavedIdentity& identity,
                   uint64_t need) {
  if (!collect(*books)) return nullptr;
  Owned saved(make_swapped_storage(books));
  if (!saved) return nullptr;
  SwappedState& state = swapped(saved.get());
  state.key = identity.key;
  if (!prepare(books, tensor, identity, saved.get())) return nullptr;
  begin_copy_out(*books, saved.get(), need);
  return saved.release();
}

std::shared_ptr<Books> books_of_engine(PyObject* engine) {
  if (PyObject_TypeCheck(engine, engine_type)) return books_of(engine) != nullptr ? as_engine(engine)->books : nullptr;
  PyErr_SetString(PyExc_TypeError, "expected an EngineCore");
  return nullptr;
}

int is_quiet(PyObject* engine) {
  if (!PyObject_TypeCheck(engine, engine_type)) {
    PyErr_SetString(PyExc_TypeError, "expected an EngineCore");
    return -1;
  }
  const Books* const books = books_of(engine);
  return books == nullptr ? -1 : is_quiet(*books);
}

bool add_engine_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("Base class of Engine: look, swap_out, collect.")},
                                {Py_tp_methods, engine_methods},
                                {Py_tp_getset, engine_attributes},
                                {Py_tp_new, slot(engine_new)},
                                {Py_tp_init, slot(engine_init)},
                                {Py_tp_traverse, slot(engine_traverse)},
                                {Py_tp_dealloc, slot(engine_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.EngineCore", sizeof(EngineCore), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};
  engine_type = add_type(module, "EngineCore", spec);
  return engine_type != nullptr;
}

}  // namespace offload
