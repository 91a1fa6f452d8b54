#include "process.h"

#include <pthread.h>

namespace offload {

std::atomic<unsigned> Process::count_{0};
const int Process::registered_ =
    pthread_atfork(nullptr, nullptr, [] { count_.fetch_add(1, std::memory_order_relaxed); });

}  // namespace offload
