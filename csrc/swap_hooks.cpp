#include "swap_hooks.h"

#include "engine_core.h"
#include "mutants.h"
#include "python_errors.h"
#include "swapped_storage.h"
#include "swapped_view.h"

namespace offload {
namespace {

struct {
  PyObject *storages, *not_held, *pack_failed, *unpack_failed;
} names;

// -- whether a tensor swaps -------------------------------------------------------------------------------------------

// Returns whether `device`, on which the tensor's memory is, is the engine's; −1: a Python error.
int is_movable(Books& books, PyObject* tensor, const dlpack::Device& device) {
  if (!books.is_device_known) {
    const Owned dtype(get(tensors.dtype, tensor));
    PyObject* const empty = dtype ? empty_of(books, dtype.get()) : nullptr;
    dlpack::Tensor there{};
    if (empty == nullptr || dlpack::api->describe(empty, &there) != 0) return -1;
    books.dlpack_device = there.device;
    books.is_device_known = true;
  }
  return device.type == books.dlpack_device.type && device.ordinal == books.dlpack_device.ordinal;
}

int contains(PyObject* object, PyObject* name, PyObject* storage) {
  const Owned set(PyObject_GetAttr(object, name));
  return set ? PySet_Contains(set.get(), storage) : -1;
}

// Returns whether neither the model holds a storage, nor the tensor is a leaf, which the program holds; −1: a Python
// error.
int is_free(const SwapHooks& hooks, PyObject* tensor, int64_t storage) {
  const Owned identity(PyLong_FromLongLong(storage));
  const int is_state = identity ? contains(hooks.held.get(), names.storages, identity.get()) : -1;
  if (is_state != 0) return is_state < 0 ? -1 : OFFLOAD_BROKEN("what the model holds stays");
  const int needs_gradient = is_true(get(tensors.requires_grad, tensor));
  if (needs_gradient < 0) return -1;
  if (!needs_gradient) return contains(hooks.held.get(), names.not_held, identity.get());
  const int is_leaf = is_true(get(tensors.is_leaf, tensor));
  return is_leaf < 0 ? -1 : !is_leaf;
}

// -- pack -------------------------------------------------------------------------------------------------------------

// Ends a pack: advances the schedule, executes the copies that are due, and measures.
bool end_pack(StepCopies& copies, const PackRow& row, bool acted) {
  ScheduleCursor& cursor = *copies.cursor;
  if (row.node_after >= 0 && cursor.arrive(row.node_after)) {
    acted = true;
    if (!copies.act(row.node_after)) return false;
  }
  if (acted && cursor.clock() != nullptr) cursor.clock()->end(-1);
  if (cursor.meter() != nullptr) cursor.meter()->weigh(row.weighed, 0);
  return true;
}

// Clears the Python error that is set, and calls a function with it.
template <typename Call>
PyObject* with_error(Call&& call) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  const Owned kind(type), error(value), frames(traceback);
  return call(error.get());
}

PyObject* pack_failed(const SwapHooks& hooks, PyObject* tensor, int64_t pack_index, int64_t nbytes) {
  return with_error([&](PyObject* error) {
    const Owned number(PyLong_FromLongLong(pack_index)), size(PyLong_FromLongLong(nbytes));
    if (!number || !size) return static_cast<PyObject*>(nullptr);
    return PyObject_CallMethodObjArgs(hooks.core, names.pack_failed, error, tensor, number.get(), size.get(), nullptr);
  });
}

PyObject* swap(SwapHooks& hooks, PyObject* tensor, const SavedIdentity& identity, Owned view, uintptr_t address,
               const PackRow row, int64_t pack_index, int64_t nbytes) {
  StepCopies& copies = *hooks.copies;
  PyObject* begun = nullptr;
  without_exceptions([&] { begun = swap_out(hooks.books, tensor, identity, row.need); });
  const Owned storage(begun);
  if (!storage) return pack_failed(hooks, tensor, pack_index, nbytes);
  if (!copies.add(pack_index, storage.get(), identity.storage.get())) return nullptr;
  if (copies.caps_in_flight && hooks.books->in_flight_bytes > hooks.books->in_flight_bytes_max &&
      !limit_in_flight(*hooks.books))
    return nullptr;
  ++hooks.swapped->tensors;
  hooks.swapped->nbytes += identity.key.nbytes;
  attach_view(view.get(), storage.get(), identity.version, address);
  return end_pack(copies, row, true) ? view.release() : nullptr;
}

PyObject* pack(SwapHooks& hooks, PyObject* tensor, Owned owner, const dlpack::Tensor& described, int64_t pack_index,
               int64_t nbytes) {
  ScheduleCursor& cursor = *hooks.copies->cursor;
  const PackRow* const row = nbytes > 0 ? cursor.find(pack_index) : nullptr;
  if (row == nullptr || !row->is_swapped) return nullptr;
  if (row->is_recorded && !OFFLOAD_BROKEN("packs between recorded operators are reported")) return nullptr;
  if (cursor.clock() != nullptr) cursor.clock()->begin();
  if (is_movable(*hooks.books, tensor, described.device) <= 0) return nullptr;
  const uintptr_t address = reinterpret_cast<uintptr_t>(described.data) + described.byte_offset;
  // Created now: nothing may fail after the copy-out has begun, and Python code below may change the tensor's shape.
  Owned view(make_view(tensor, described, static_cast<Py_ssize_t>(pack_index)));
  if (!view || empty_of(*hooks.books, dtype_of(view.get())) == nullptr) return nullptr;
  SavedIdentity identity;
  identity.owner = std::move(owner);
  PyObject* known = nullptr;
  if (find_saved(*hooks.books, tensor, nbytes, &identity, &known) <= 0) return nullptr;
  if (known != nullptr) {
    const Owned storage = shared(known);
    ++hooks.duplicates->tensors;
    hooks.duplicates->nbytes += nbytes;
    attach_view(view.get(), known, identity.version, address);
    return end_pack(*hooks.copies, *row, row->swapped_bytes >= 0) ? view.release() : nullptr;
  }
  if (identity.key.nbytes != row->swapped_bytes && !OFFLOAD_BROKEN("a swapped storage has the recorded size"))
    return nullptr;
  if (is_free(hooks, tensor, identity.key.storage) <= 0) return nullptr;
  // If the tensor spans all bytes that are copied, they begin with its first element.
  if (span_of(view.get()) == nbytes && identity.key.nbytes == nbytes) identity.address = address;
  identity.dtype = dtype_of(view.get());
  return swap(hooks, tensor, identity, std::move(view), address, *row, pack_index, nbytes);
}

// -- unpack -----------------------------------------------------------------------------------------------------------

// In a measured step: notes a tensor whose copy-in has not begun when backward needs it, and measures activations.
void note_missed(StepCopies& copies, const PackRow& row, int64_t pack_index, PyObject* storage) {
  if (copies.cursor->meter() == nullptr) return;
  const bool is_missing = is_swapped_out(swapped(storage));
  if (is_missing) copies.missed.insert(row.first >= 0 ? row.first : pack_index);
  copies.cursor->meter()->weigh(copies.cursor->node, is_missing ? swapped(storage).key.nbytes : 0);
}

PyObject* unpack(SwapHooks& hooks, PyObject* view, int64_t pack_index, PyObject* storage) {
  StepCopies& copies = *hooks.copies;
  ScheduleCursor& cursor = *copies.cursor;
  if (!collect(*hooks.books)) return nullptr;  // frees memory of ended copies: the swap-in may need it
  const PackRow* const found = cursor.find(pack_index);
  if (found == nullptr || !found->is_swapped || found->watched < cursor.node) return nullptr;
  if (cursor.clock() != nullptr && !cursor.clock()->is_listening) return nullptr;
  const PackRow row = *found;
  if (cursor.clock() != nullptr) cursor.clock()->begin();
  if (cursor.ask(pack_index) == ScheduleCursor::Ask::due && !copies.act(cursor.node)) return nullptr;
  note_missed(copies, row, pack_index, storage);
  Owned tensor(restore_view(view));
  if (!tensor)
    return with_error([&](PyObject* error) {
      return PyObject_CallMethodObjArgs(hooks.core, names.unpack_failed, error, nullptr);
    });
  if (cursor.clock() != nullptr) cursor.clock()->end(pack_index);
  return tensor.release();
}

}  // namespace

bool prepare_swap_hooks() {
  const std::pair<PyObject**, const char*> all[] = {{&names.storages, "storages"},
                                                    {&names.not_held, "not_held"},
                                                    {&names.pack_failed, "pack_failed"},
                                                    {&names.unpack_failed, "unpack_failed"}};
  for (const auto& [name, text] : all)
    if ((*name = PyUnicode_InternFromString(text)) == nullptr) return false;
  return true;
}

PyObject* pack_swapped(SwapHooks& hooks, PyObject* tensor, Owned owner, const dlpack::Tensor& described,
                       int64_t pack_index, int64_t nbytes) {
  PyObject* result = nullptr;
  const bool done =
      without_exceptions([&] { result = pack(hooks, tensor, std::move(owner), described, pack_index, nbytes); });
  return done ? result : nullptr;
}

PyObject* unpack_swapped(SwapHooks& hooks, PyObject* view) {
  PyObject* const storage = saved_of(view);
  if (storage == nullptr || !is_swapped_storage(storage)) return nullptr;
  PyObject* result = nullptr;
  const bool done =
      without_exceptions([&] { result = unpack(hooks, view, static_cast<int64_t>(index_of(view)), storage); });
  return done ? result : nullptr;
}

}  // namespace offload
