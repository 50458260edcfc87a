// The memory a kernel may touch, and nothing around it: global buffers, shared memory and thread stacks.
//
// A buffer ends, to within 15 bytes, where a page without access begins, so that an access past it faults at once.
// The bytes between (the slack) hold a known pattern which is checked after each block, and which reads as NaN.
#pragma once

#include <sys/mman.h>

#include <deque>
#include <string>
#include <vector>

#include "sanitizers.h"

extern "C" unsigned char __start_simt_shared[] __attribute__((weak));
extern "C" unsigned char __stop_simt_shared[] __attribute__((weak));
// The alignments with which the text declares its dynamic shared memory.
extern "C" const unsigned __start_simt_alignment[] __attribute__((weak));
extern "C" const unsigned __stop_simt_alignment[] __attribute__((weak));

namespace simt {

constexpr unsigned char NAN_BYTE = 0xff;  // four of them are a float NaN, two a half or bfloat16 NaN
constexpr size_t PAGE = 4096, FENCE = 1 << 20;

inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Loops, since memset, memcpy and memcmp are the sanitizers' own functions.
inline void fill_nan(unsigned char* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) begin[i] = NAN_BYTE;
}

inline void copy_bytes(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(to)[i] = static_cast<const unsigned char*>(from)[i];
}

inline bool are_equal(const void* one, const void* other, size_t bytes) {
  bool same = true;
  for (size_t i = 0; i < bytes; ++i) {
    same &= static_cast<const unsigned char*>(one)[i] == static_cast<const unsigned char*>(other)[i];
  }
  return same;
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
      : argument_(argument), address_(address), bytes_(bytes) {
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
    pages_ = pages;
    protection_ = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    show(true);
  }

  void show(bool is_shown) const { mprotect(mapped_, pages_, is_shown ? protection_ : PROT_NONE); }

  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int argument() const { return argument_; }
  // What lies at an address of the caller's, its end included; null outside.
  unsigned char* at(size_t address) const {
    return address - address_ <= bytes_ ? data_ + (address - address_) : nullptr;
  }
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
  size_t address_, bytes_, before_ = 0, after_ = 0, pages_;
  int protection_;
  unsigned char *mapped_, *data_;
};

inline size_t static_shared_bytes() { return __stop_simt_shared - __start_simt_shared; }

inline bool lies_in(const void* address, size_t bytes, const unsigned char* begin, size_t size) {
  const size_t offset = static_cast<const unsigned char*>(address) - begin;
  return offset <= size && bytes <= size - offset;
}

inline bool is_static_shared(const void* address, size_t bytes) {
  return lies_in(address, bytes, __start_simt_shared, static_shared_bytes());
}

// Shared memory's addresses, as PTX has them: static arrays, then the dynamic part where its declaration lets it begin.
// The window starts above zero, so that a null address is no shared memory.
constexpr unsigned SHARED_WINDOW = 1024;

inline unsigned dynamic_window() {
  unsigned alignment = 1;
  const unsigned* end = __stop_simt_alignment;
  asm("" : "+r"(end));  // no offsets from it: where no text declares any, it is null
  for (const unsigned* each = __start_simt_alignment; each < end; ++each) {
    if (*each > alignment) alignment = *each;
  }
  return SHARED_WINDOW + round_up(static_shared_bytes(), alignment);
}

// A block's dynamic shared memory, and what the asynchronous proxy (bulk copies, wgmma) sees of it: threads' own writes
// get there by fence_proxy_async. Its address has the bits that it has in the window, modulo 1024.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes)
      : bytes_(bytes), before_(PAGE + dynamic_window() % 1024),
          slack_(round_up(before_ + bytes, PAGE) - before_ - bytes),
        async_view_(bytes), is_written_async_(bytes) {
    mapped_ = map(before_ + bytes_ + slack_ + FENCE, PROT_NONE);
    mprotect(mapped_, before_ + bytes_ + slack_, PROT_READ | PROT_WRITE);
    fill_nan(mapped_, before_);
    fill();
    forbid(mapped_, before_);
    forbid(data() + bytes_, slack_);
  }

  void fill() {
    fill_nan(data(), bytes_ + slack_);
    fill_nan(async_view_.data(), bytes_);
    is_written_async_.assign(bytes_, 0);
  }

  unsigned char* data() const { return mapped_ + before_; }
  size_t bytes() const { return bytes_; }
  bool holds(const void* address, size_t bytes) const { return lies_in(address, bytes, data(), bytes_); }
  bool is_near(const void* address) const { return lies_in(address, 1, mapped_, before_ + bytes_ + slack_ + FENCE); }
  bool slack_is_untouched() const { return is_untouched(mapped_, before_) && is_untouched(data() + bytes_, slack_); }

  // Every thread that fences does this, and most of the memory is as it was: eight bytes at a time are passed over.
  void publish() {
    const unsigned char* own = data();
    unsigned char* seen = async_view_.data();
    unsigned long long now, before;
    for (size_t i = 0; i < bytes_; ++i) {
      if (i + sizeof(now) <= bytes_) {
        __builtin_memcpy(&now, own + i, sizeof(now));
        __builtin_memcpy(&before, seen + i, sizeof(before));
        if (now == before) {
          i += sizeof(now) - 1;
          continue;
        }
      }
      is_written_async_[i] &= seen[i] == own[i];
      seen[i] = own[i];
    }
  }
  void write_async(unsigned char* to, const unsigned char* from, size_t bytes) {
    const size_t begin = to - data();
    for (size_t i = 0; i < bytes; ++i) {
      async_view_[begin + i] = to[i] = from[i];
      is_written_async_[begin + i] = 1;
    }
  }
  void begin_async_write(unsigned char* to, size_t bytes) {
    fill_nan(to, bytes);
    fill_nan(async_view_.data() + (to - data()), bytes);
  }
  // The first of these bytes that a thread has written and the asynchronous proxy has not seen; null if there is none.
  const unsigned char* find_unpublished(const unsigned char* from, size_t bytes) const {
    const unsigned char* seen = async_view_.data() + (from - data());
    if (are_equal(from, seen, bytes)) return nullptr;
    while (*from == *seen) ++from, ++seen;
    return from;
  }
  // How many of these bytes, from the first on, were written last by the asynchronous proxy, or by threads, as it was.
  size_t count_of_one_writer(const unsigned char* from, size_t bytes) const {
    size_t count = 1;
    while (count < bytes && is_written_async(from + count) == is_written_async(from)) ++count;
    return count;
  }
  bool is_written_async(const unsigned char* byte) const { return is_written_async_[byte - data()] != 0; }

 private:
  size_t bytes_, before_, slack_;
  unsigned char* mapped_;
  std::vector<unsigned char> async_view_, is_written_async_;
};

inline std::vector<Buffer> buffers;
inline std::deque<SharedMemory> shared_memories;  // one for each block of a cluster

inline SharedMemory* shared_memory_of(const void* address, size_t bytes) {
  for (SharedMemory& shared : shared_memories) {
    if (shared.holds(address, bytes)) return &shared;
  }
  return nullptr;
}

inline bool is_shared(const void* address, size_t bytes) {
  return is_static_shared(address, bytes) || shared_memory_of(address, bytes) != nullptr;
}

inline bool is_in_a_buffer(const void* address, size_t bytes) {
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
  for (size_t rank = 0; rank < shared_memories.size(); ++rank) {
    const SharedMemory& shared = shared_memories[rank];
    if (!shared.is_near(address)) continue;
    const std::string of_block = shared_memories.size() > 1 ? " of cluster block " + std::to_string(rank) : "";
    return "byte " + offset_from(shared.data()) + " of the dynamic shared memory" + of_block + ", which has " +
           std::to_string(shared.bytes()) + " bytes";
  }
  if (is_static_shared(address, 1)) return "byte " + offset_from(__start_simt_shared) + " of the static shared memory";
  char text[64];
  snprintf(text, sizeof(text), "address %p, outside every buffer", address);
  return text;
}

}  // namespace simt
