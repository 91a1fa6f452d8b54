// Turns callgrind's counting on and off from Python, through ctypes. Does nothing outside valgrind.
#include <valgrind/callgrind.h>

void count_from_here(void) {
  CALLGRIND_ZERO_STATS;
  CALLGRIND_START_INSTRUMENTATION;
}

void count_until_here(const char* label) {
  CALLGRIND_DUMP_STATS_AT(label);
  CALLGRIND_STOP_INSTRUMENTATION;
}
