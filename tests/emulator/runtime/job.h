// The job file: 64-bit numbers, and bytes padded to a multiple of eight. Its layout is that of emulator.py.
#pragma once

#include <cstdio>
#include <vector>

#include "memory.h"
#include "report.h"

namespace simt {

class Job {
 public:
  explicit Job(const char* path) {
    FILE* file = fopen(path, "rb");
    if (file == nullptr) fail("crash", "cannot open the job file");
    fseek(file, 0, SEEK_END);
    content_.resize(ftell(file));
    rewind(file);
    if (fread(content_.data(), 1, content_.size(), file) != content_.size()) fail("crash", "short job file");
    fclose(file);
  }

  long long number() { return *reinterpret_cast<const long long*>(bytes(sizeof(long long))); }

  const unsigned char* bytes(size_t count) {
    const unsigned char* result = content_.data() + position_;
    position_ += round_up(count, sizeof(long long));
    return result;
  }

 private:
  std::vector<unsigned char> content_;
  size_t position_ = 0;
};

}  // namespace simt
