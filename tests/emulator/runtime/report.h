// Reports of what was caught: one JSON object per line of the result file. A run that fails writes one and leaves with
// exit code 3; nothing is unwound.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "scheduler.h"

namespace simt {

constexpr int EXIT_CAUGHT = 3;
inline const char* result_path;

using Code = std::vector<const void*>;  // addresses of instructions, innermost call first

inline std::string place_of(const Code& code) {
  std::string text;
  for (const void* address : code) {
    if (address != nullptr) text += place(address);
  }
  return text;
}

inline void write_report(FILE* file, const char* kind, const Code& code, long block, int thread,
                         const std::string& message) {
  fprintf(file, "{\"kind\": \"%s\", \"block\": %ld, \"thread\": %d, \"place\": \"%s\", ", kind, block, thread,
          place_of(code).c_str());
  fputs("\"message\": \"", file);
  for (const char c : message) fprintf(file, c == '"' || c == '\\' ? "\\%c" : "%c", c);
  fputs("\"}\n", file);
}

inline void write_suspect(FILE* file, const Suspect& suspect) {
  write_report(file, suspect.kind, {suspect.code}, suspect.block, suspect.thread,
               std::string(suspect.what) + " reached while other threads wait at " + place(suspect.other_code));
}

// With no checks of the sanitizers' on the way out.
[[noreturn]] inline void leave(int code) {
  syscall(SYS_exit_group, code);
  __builtin_unreachable();
}

[[noreturn]] inline void report(const char* kind, const Code& code, const std::string& message) {
  FILE* file = fopen(result_path, "w");
  if (file == nullptr) leave(EXIT_CAUGHT + 1);
  const Thread* thread = scheduler.current();
  write_report(file, kind, code,
               thread ? thread->block->number : scheduler.blocks().empty() ? -1 : scheduler.blocks()[0].number,
               thread ? thread->number : -1, message);
  fclose(file);
  fflush(stdout);
  leave(EXIT_CAUGHT);
}

void fail(const char* kind, const char* format, ...) {
  char message[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  report(kind, {scheduler.current() ? scheduler.current()->code : nullptr}, message);
}

}  // namespace simt
