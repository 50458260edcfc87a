// Device memory. Its addresses lie where the host may not look; its content is kept elsewhere, poisoned and of exact
// size. An address is never given twice, and the gap between two allocations belongs to none.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"
#include "devices.h"

namespace driver {

namespace {

constexpr size_t RANGE = size_t(1) << 42, ALIGNMENT = 512, GAP = 1 << 20;
constexpr unsigned char POISON = 0xff;  // NaN in every format

// Like all that the API may still be asked for while a process ends, they are never destroyed.
auto& allocations = *new std::map<CUdeviceptr, std::shared_ptr<Allocation>>;
auto& host_allocations = *new std::map<void*, size_t>;

CUdeviceptr new_address(size_t bytes) {
  static CUdeviceptr next = [] {
    void* range = mmap(nullptr, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(range != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    return (CUdeviceptr(range) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }();
  const CUdeviceptr address = next;
  next += (bytes + GAP + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return address;
}

size_t used_bytes(CUdevice device) {
  size_t bytes = 0;
  for (const auto& [begin, allocation] : allocations) {
    if (allocation->context->device == device) bytes += allocation->content.size();
  }
  return bytes;
}

// Where device memory is kept; null for what is not allocated, or no longer: work may come to run after that.
unsigned char* content_at(CUdeviceptr pointer, size_t bytes) {
  const std::shared_ptr<Allocation> found = allocation_at(pointer, bytes);
  return found == nullptr ? nullptr : found->content.data() + (pointer - found->begin);
}

using Run = std::function<CUresult()>;

bool is_there(CUdeviceptr pointer, size_t bytes) { return content_at(pointer, bytes) != nullptr; }

Run copy(CUdeviceptr to, const void* from, size_t bytes) {
  need(is_there(to, bytes));
  return [=] {
    if (!is_there(to, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    memcpy(content_at(to, bytes), from, bytes);
    return CUDA_SUCCESS;
  };
}

Run copy(void* to, CUdeviceptr from, size_t bytes) {
  need(is_there(from, bytes));
  return [=] {
    if (!is_there(from, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    memcpy(to, content_at(from, bytes), bytes);
    return CUDA_SUCCESS;
  };
}

Run copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  need(is_there(from, bytes) && is_there(to, bytes));
  return [=] {
    if (!is_there(from, bytes) || !is_there(to, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove(content_at(to, bytes), content_at(from, bytes), bytes);
    return CUDA_SUCCESS;
  };
}

template <typename Word>
Run fill(CUdeviceptr to, Word word, size_t count) {
  const size_t bytes = count * sizeof(Word);
  need(to % sizeof(Word) == 0 && is_there(to, bytes));
  return [=] {
    if (!is_there(to, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < count; ++i) memcpy(content_at(to, bytes) + i * sizeof(Word), &word, sizeof(Word));
    return CUDA_SUCCESS;
  };
}

// A blocking copy is one in the legacy stream that is waited for.
template <typename To, typename From>
CUresult copy_now(const char* name, To to, From from, size_t bytes) {
  return call(name, IN_CONTEXT, [&] {
    if (bytes == 0) return;
    run_now(*stream_of(CU_STREAM_LEGACY), copy(to, from, bytes));
  });
}

template <typename To, typename From>
CUresult copy_later(const char* name, To to, From from, size_t bytes, CUstream stream) {
  return call(name, IN_CONTEXT, [&] {
    Stream* in = stream_of(stream);
    if (bytes != 0) enqueue(*in, copy(to, from, bytes));
  });
}

template <typename Word>
CUresult fill_later(const char* name, CUdeviceptr to, Word word, size_t count, CUstream stream) {
  return call(name, IN_CONTEXT, [&] {
    Stream* in = stream_of(stream);
    if (count != 0) enqueue(*in, fill(to, word, count));
  });
}

}  // namespace

std::shared_ptr<Allocation> allocation_at(CUdeviceptr pointer, size_t bytes) {
  auto after = allocations.upper_bound(pointer);
  if (after == allocations.begin()) return nullptr;
  const std::shared_ptr<Allocation>& found = (--after)->second;
  const size_t offset = pointer - found->begin, size = found->content.size();
  return offset <= size && bytes <= size - offset ? found : nullptr;
}

void free_memory_of(Context& context) {
  for (auto each = allocations.begin(); each != allocations.end();) {
    each = each->second->context == &context ? allocations.erase(each) : std::next(each);
  }
}

}  // namespace driver

using namespace driver;

CUresult cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  return call("cuMemAlloc", IN_CONTEXT, [&] {
    refuse_in_capture();
    need(bytes != 0);
    const size_t used = used_bytes(current()->device);
    need(bytes <= MOST_MEMORY_BYTES - used, CUDA_ERROR_OUT_OF_MEMORY);
    const CUdeviceptr begin = new_address(bytes);
    allocations[begin] =
        std::make_shared<Allocation>(Allocation{begin, current(), std::vector<unsigned char>(bytes, POISON)});
    *pointer = begin;
  });
}

// Waits for everything that runs on the device, as programs count on.
CUresult cuMemFree(CUdeviceptr pointer) {
  return call("cuMemFree", IN_CONTEXT, [&] {
    if (pointer == 0) return;
    refuse_in_capture();
    const auto found = allocations.find(pointer);
    need(found != allocations.end());
    finish_all(*found->second->context);
    allocations.erase(pointer);
  });
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  return call("cuMemGetInfo", IN_CONTEXT, [&] {
    *free = MOST_MEMORY_BYTES - used_bytes(current()->device);
    *total = gpu_of(current()->device).memory_bytes;
  });
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  return call("cuMemGetAddressRange", IN_CONTEXT, [&] {
    const auto found = allocation_at(pointer, 1);
    need(found != nullptr, CUDA_ERROR_NOT_FOUND);
    if (base != nullptr) *base = found->begin;
    if (bytes != nullptr) *bytes = found->content.size();
  });
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return call("cuPointerGetAttribute", STARTED, [&] {
    const auto found = allocation_at(pointer, 1);
    need(found != nullptr);
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(data) = CUcontext(found->context); return;
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(data) = CU_MEMORYTYPE_DEVICE; return;
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(data) = pointer; return;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned*>(data) = 0; return;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(data) = found->context->device; return;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<CUdeviceptr*>(data) = found->begin; return;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t*>(data) = found->content.size(); return;
      default: throw CUDA_ERROR_NOT_SUPPORTED;
    }
  });
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned int) {
  return call("cuMemHostAlloc", IN_CONTEXT, [&] {
    refuse_in_capture();
    *pointer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    need(*pointer != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
    host_allocations[*pointer] = bytes;
  });
}

CUresult cuMemAllocHost(void** pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

CUresult cuMemFreeHost(void* pointer) {
  return call("cuMemFreeHost", IN_CONTEXT, [&] {
    need(host_allocations.erase(pointer) != 0);
    finish_all(*current());
    free(pointer);
  });
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return copy_now("cuMemcpyHtoD", to, from, bytes);
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { return copy_now("cuMemcpyDtoH", to, from, bytes); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now("cuMemcpyDtoD", to, from, bytes);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy_later("cuMemcpyHtoDAsync", to, from, bytes, stream);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_later("cuMemcpyDtoHAsync", to, from, bytes, stream);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_later("cuMemcpyDtoDAsync", to, from, bytes, stream);
}

// Filling device memory is asynchronous, in the legacy stream where none is named.
CUresult cuMemsetD8(CUdeviceptr to, unsigned char word, size_t count) {
  return fill_later("cuMemsetD8", to, word, count, CU_STREAM_LEGACY);
}
CUresult cuMemsetD16(CUdeviceptr to, unsigned short word, size_t count) {
  return fill_later("cuMemsetD16", to, word, count, CU_STREAM_LEGACY);
}
CUresult cuMemsetD32(CUdeviceptr to, unsigned int word, size_t count) {
  return fill_later("cuMemsetD32", to, word, count, CU_STREAM_LEGACY);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char word, size_t count, CUstream stream) {
  return fill_later("cuMemsetD8Async", to, word, count, stream);
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short word, size_t count, CUstream stream) {
  return fill_later("cuMemsetD16Async", to, word, count, stream);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int word, size_t count, CUstream stream) {
  return fill_later("cuMemsetD32Async", to, word, count, stream);
}
