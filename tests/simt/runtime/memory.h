// The memory a kernel may touch, and nothing around it: global buffers, shared memory and thread stacks.
//
// A buffer ends, to within 15 bytes, where a page without access begins, so that an access past it faults at once.
// The bytes between (the slack) hold a known pattern which is checked after each block, and which reads as NaN.
#pragma once

#include <sys/mman.h>

#include <string>
#include <vector>

#include "sanitizers.h"

extern "C" unsigned char __start_simt_shared[] __attribute__((weak));
extern "C" unsigned char __stop_simt_shared[] __attribute__((weak));

namespace simt {

constexpr unsigned char NAN_BYTE = 0xff;  // four of them are a float NaN, two a half or bfloat16 NaN
constexpr size_t PAGE = 4096, FENCE = 1 << 20;
constexpr size_t SHARED_LIMIT = 227 << 10, SHARED_BEFORE = PAGE;

inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Loops, since memset and memcpy are the sanitizers' own functions.
inline void fill_nan(unsigned char* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) begin[i] = NAN_BYTE;
}

inline bool is_untouched(const unsigned char* begin, size_t bytes) {
  bool same = true;
  for (size_t i = 0; i < bytes; ++i) same &= begin[i] == NAN_BYTE;
  return same;
}

inline unsigned char* map(size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("crash", "mmap of %zu bytes failed", bytes);
  return static_cast<unsigned char*>(memory);
}

// One kernel argument's exact-size array. Its address modulo 16 is the caller's; it is aligned to no more than that.
class Buffer {
 public:
  Buffer(int argument, const unsigned char* content, size_t bytes, size_t address, bool writable)
      : argument_(argument), bytes_(bytes) {
    const size_t pages = round_up(bytes + 15, PAGE);
    mapped_ = map(pages + 2 * FENCE, PROT_NONE) + FENCE;
    mprotect(mapped_, pages, PROT_READ | PROT_WRITE);
    after_ = (PAGE - bytes - address) % 16;
    before_ = pages - bytes - after_;
    data_ = mapped_ + before_;
    fill_nan(mapped_, before_);
    for (size_t i = 0; i < bytes; ++i) data_[i] = content[i];
    fill_nan(data_ + bytes, after_);
    forbid(mapped_, before_);
    forbid(data_ + bytes, after_);
    if (!writable) mprotect(mapped_, pages, PROT_READ);
  }

  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int argument() const { return argument_; }
  bool holds(const void* address, size_t bytes) const {
    const size_t offset = static_cast<const unsigned char*>(address) - data_;
    return offset <= bytes_ && bytes <= bytes_ - offset;
  }
  bool is_near(const void* address) const {
    const size_t offset = static_cast<const unsigned char*>(address) - (mapped_ - FENCE);
    return offset < before_ + bytes_ + after_ + 2 * FENCE;
  }
  bool slack_is_untouched() const {
    return is_untouched(mapped_, before_) && is_untouched(data_ + bytes_, after_);
  }

 private:
  int argument_;
  size_t bytes_, before_ = 0, after_ = 0;
  unsigned char *mapped_, *data_;
};

// The dynamic shared memory: a symbol of the executable, as the emitted text declares it `extern`.
extern "C" {
alignas(PAGE) unsigned char simt_shared_zone[SHARED_BEFORE + (256 << 10)];
}

class SharedMemory {
 public:
  void set_size(size_t bytes) {
    bytes_ = bytes;
    slack_ = round_up(bytes, PAGE) - bytes;
    unsigned char* fence = data() + bytes_ + slack_;
    fill_nan(simt_shared_zone, SHARED_BEFORE);
    forbid(simt_shared_zone, SHARED_BEFORE);
    forbid(data() + bytes_, slack_);
    mprotect(fence, simt_shared_zone + sizeof(simt_shared_zone) - fence, PROT_NONE);
  }

  void fill() {
    fill_nan(data(), bytes_ + slack_);
    fill_nan(__start_simt_shared, static_bytes());
  }

  unsigned char* data() const { return simt_shared_zone + SHARED_BEFORE; }
  size_t bytes() const { return bytes_; }
  size_t static_bytes() const { return __stop_simt_shared - __start_simt_shared; }
  bool holds(const void* address, size_t bytes) const {
    return lies_in(address, bytes, data(), bytes_) || lies_in(address, bytes, __start_simt_shared, static_bytes());
  }
  bool is_near(const void* address) const { return lies_in(address, 1, simt_shared_zone, sizeof(simt_shared_zone)); }
  bool slack_is_untouched() const {
    return is_untouched(simt_shared_zone, SHARED_BEFORE) && is_untouched(data() + bytes_, slack_);
  }

 private:
  static bool lies_in(const void* address, size_t bytes, const unsigned char* begin, size_t size) {
    const size_t offset = static_cast<const unsigned char*>(address) - begin;
    return offset <= size && bytes <= size - offset;
  }
  size_t bytes_ = 0, slack_ = 0;
};

inline std::vector<Buffer> buffers;
inline SharedMemory shared;

inline bool is_in_a_buffer(const void* address, int bytes) {
  for (const Buffer& buffer : buffers) {
    if (buffer.holds(address, bytes)) return true;
  }
  return false;
}

// In the reader's words: which buffer, how far in.
inline std::string describe(const void* address) {
  const auto offset_from = [address](const unsigned char* begin) {
    return std::to_string(static_cast<const unsigned char*>(address) - begin);
  };
  for (const Buffer& buffer : buffers) {
    if (!buffer.is_near(address)) continue;
    return "byte " + offset_from(buffer.data()) + " of argument " + std::to_string(buffer.argument()) + ", which has " +
           std::to_string(buffer.bytes()) + " bytes";
  }
  if (shared.is_near(address)) {
    return "byte " + offset_from(shared.data()) + " of the dynamic shared memory, which has " +
           std::to_string(shared.bytes()) + " bytes";
  }
  if (shared.holds(address, 1)) return "byte " + offset_from(__start_simt_shared) + " of the static shared memory";
  char text[64];
  snprintf(text, sizeof(text), "address %p, outside every buffer", address);
  return text;
}

}  // namespace simt
