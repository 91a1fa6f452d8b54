// Preloaded into a process: a file system without O_TMPFILE, and, where PLANT names a file, somebody who is quick
// enough to plant a link to it in the private folder between its creation and that of the spill file.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <string>

namespace {

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int open_checked(const char* path, int flags, mode_t mode) {
  if ((flags & O_TMPFILE) == O_TMPFILE) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return next<int(const char*, int, ...)>("open")(path, flags, mode);
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_checked(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_checked(path, flags, mode);
}

char* mkdtemp(char* folder) {
  char* made = next<char*(char*)>("mkdtemp")(folder);
  const char* victim = std::getenv("PLANT");
  if (made != nullptr && victim != nullptr && symlink(victim, (std::string(made) + "/spill").c_str()) != 0)
    return nullptr;
  return made;
}
}
