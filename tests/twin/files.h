// File I/O on the machine's pinned memory, for the order checker: each transfer is an actor of its own, from its start
// until it has been waited for.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// A transfer of these bytes begins: to or from `file`, at `offset`. What streams did to them must be known to have ended;
// what streams do to them until sim_io_end is in no order with it. Counts as a call of "file write" or "file read".
void* sim_io_begin(const void* memory, size_t bytes, int is_to_file, int file, uint64_t offset);
void sim_io_end(void* transfer);
}
#pragma GCC visibility pop
