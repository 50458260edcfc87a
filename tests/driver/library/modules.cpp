// Modules and libraries: what is loaded is looked up by its content in the registry (KSGEN_DRIVER_REGISTRY), a folder
// that tests/driver/registry.py writes. What it does not hold is refused, as a driver refuses a damaged binary.
#include <elf.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "call.h"
#include "devices.h"
#include "sha256.h"

namespace driver {

namespace {

struct Module {
  std::shared_ptr<Image> image;
  Context* context;  // null for a library
  std::map<std::string, Function*> functions = {};
};

auto& modules = *new std::set<Module*>;
auto& functions = *new std::set<Function*>;

constexpr size_t MOST_CODE = 64 << 20;

// What can be read of these bytes: what the caller gave may be shorter than it says of itself.
std::vector<unsigned char> read(const void* code, size_t bytes) {
  std::vector<unsigned char> content(bytes);
  const iovec to = {content.data(), bytes}, from = {const_cast<void*>(code), bytes};
  const ssize_t count = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
  content.resize(count < 0 ? 0 : count);
  return content;
}

// A cubin does not come with its length: it ends with the last of what its header tells of.
size_t length_of(const void* code) {
  const std::vector<unsigned char> head = read(code, sizeof(Elf64_Ehdr));
  if (head.size() < sizeof(Elf64_Ehdr) || memcmp(head.data(), ELFMAG, SELFMAG) != 0) return 0;
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(head.data());
  const size_t sections = header.e_shoff + size_t(header.e_shnum) * header.e_shentsize;
  const size_t segments = header.e_phoff + size_t(header.e_phnum) * header.e_phentsize;
  const size_t length = std::max(sections, segments);
  return length <= MOST_CODE ? length : 0;
}

// The registry's lines: the emulator's executable, the target's number, then a kernel each.
std::shared_ptr<Image> read_image(std::istream& file) {
  auto image = std::make_shared<Image>();
  std::getline(file, image->emulator);
  file >> image->target;
  Kernel kernel;
  for (int count; file >> kernel.name >> kernel.number >> kernel.registers >> kernel.shared_bytes >>
                  kernel.most_threads >> kernel.cluster >> count;) {
    kernel.parameters.resize(count);
    for (Parameter& parameter : kernel.parameters) file >> parameter.offset >> parameter.bytes;
    image->kernels.push_back(kernel);
  }
  return image;
}

// sm_90a runs on 9.0 alone, sm_80 on 8.0 and 8.9.
bool runs_on(const Gpu& gpu, int target) { return target / 10 == gpu.major && target % 10 <= gpu.minor; }

// The ABI that a cubin's header names changed with CUDA 13, and drivers know those before their own.
bool is_known(const void* code) {
  const std::vector<unsigned char> head = read(code, EI_NIDENT);
  return head.size() < EI_NIDENT || head[EI_ABIVERSION] < 8 || cuda_version >= 13000 || takes_newer_binaries;
}

Module* load(const void* code, Context* context) {
  refuse_in_capture();
  need(code != nullptr);
  need(is_known(code), CUDA_ERROR_INVALID_IMAGE);
  const std::shared_ptr<Image> image = find_image(code);
  need(image != nullptr, CUDA_ERROR_INVALID_IMAGE);
  need(runs_on(gpu_of(current() != nullptr ? current()->device : 0), image->target), CUDA_ERROR_NO_BINARY_FOR_GPU);
  auto* module = new Module{image, context};
  modules.insert(module);
  return module;
}

Function* get(const void* handle, const char* name) {
  auto* module = static_cast<Module*>(const_cast<void*>(handle));
  need(modules.count(module) != 0, CUDA_ERROR_INVALID_HANDLE);
  for (const Kernel& kernel : module->image->kernels) {
    if (kernel.name != name) continue;
    Function*& function = module->functions[name];
    if (function == nullptr)
      functions.insert(function = new Function{kernel, module->image->emulator, module->context});
    return function;
  }
  throw CUDA_ERROR_NOT_FOUND;
}

void unload(const void* handle) {
  auto* module = static_cast<Module*>(const_cast<void*>(handle));
  need(modules.erase(module) != 0, CUDA_ERROR_INVALID_HANDLE);
  for (auto& [name, function] : module->functions) {
    function->is_loaded = false;
    functions.erase(function);
  }
}

// A log that nothing was written to: a driver always writes the buffer's end and the length, and PyCUDA reads them.
void leave_logs_empty(unsigned int count, const CUjit_option* options, void** values) {
  for (unsigned int i = 0; i < count; ++i) {
    switch (options[i]) {
      case CU_JIT_INFO_LOG_BUFFER:
      case CU_JIT_ERROR_LOG_BUFFER: *static_cast<char*>(values[i]) = '\0'; break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: values[i] = nullptr; break;
      default: break;
    }
  }
}

int most_threads(const Kernel& kernel) {
  const int by_registers = (64 << 10) / std::max(kernel.registers, 1) / 32 * 32;
  const int most = std::min(1024, by_registers);
  return kernel.most_threads != 0 ? std::min(most, kernel.most_threads) : most;
}

int attribute_of(const Function& function, CUfunction_attribute attribute, int target) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return most_threads(function.kernel);
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return function.kernel.shared_bytes;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return function.kernel.registers;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return target;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return function.most_dynamic_bytes;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: return function.kernel.cluster > 1 ? function.kernel.cluster : 0;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: return 0;
    default: throw CUDA_ERROR_INVALID_VALUE;
  }
}

void set_attribute(Function& function, CUfunction_attribute attribute, int value, const Gpu& gpu) {
  if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return;
  need(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  need(value >= 0 && value + function.kernel.shared_bytes <= gpu.optin_shared_bytes());
  function.most_dynamic_bytes = value;
}

int target_of_device() {
  const Gpu& gpu = gpu_of(current() != nullptr ? current()->device : 0);
  return gpu.major * 10 + gpu.minor;
}

}  // namespace

std::shared_ptr<Image> find_image(const void* code) {
  const char* registry = getenv("KSGEN_DRIVER_REGISTRY");
  const size_t bytes = length_of(code);
  const std::vector<unsigned char> content = read(code, bytes);
  if (registry == nullptr || bytes == 0 || content.size() != bytes) return nullptr;
  std::ifstream file(std::string(registry) + "/" + digest_of(content));
  return file ? read_image(file) : nullptr;
}

Function* function_of(const void* handle) {
  auto* function = static_cast<Function*>(const_cast<void*>(handle));
  need(functions.count(function) != 0, CUDA_ERROR_INVALID_HANDLE);
  need(function->context == nullptr || function->context == current(), CUDA_ERROR_INVALID_HANDLE);
  return function;
}

}  // namespace driver

using namespace driver;

CUresult cuModuleLoadDataEx(CUmodule* module, const void* code, unsigned int count, CUjit_option* options,
                            void** values) {
  return call("cuModuleLoadData", IN_CONTEXT, [&] {
    leave_logs_empty(count, options, values);
    *module = reinterpret_cast<CUmodule>(load(code, current()));
  });
}

CUresult cuModuleLoadData(CUmodule* module, const void* code) {
  return cuModuleLoadDataEx(module, code, 0, nullptr, nullptr);
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  const std::string content((std::istreambuf_iterator<char>(file)), {});
  return cuModuleLoadData(module, content.data());
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return call("cuModuleGetFunction", IN_CONTEXT, [&] { *function = reinterpret_cast<CUfunction>(get(module, name)); });
}

CUresult cuModuleUnload(CUmodule module) {
  return call("cuModuleUnload", IN_CONTEXT, [&] {
    refuse_in_capture();
    finish_all(*current());
    unload(module);
  });
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned int, CUlibraryOption*,
                           void**, unsigned int) {
  return call("cuLibraryLoadData", STARTED, [&] { *library = reinterpret_cast<CUlibrary>(load(code, nullptr)); });
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return call("cuLibraryGetKernel", STARTED, [&] { *kernel = reinterpret_cast<CUkernel>(get(library, name)); });
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  return call("cuKernelGetFunction", IN_CONTEXT,
              [&] { *function = reinterpret_cast<CUfunction>(function_of(kernel)); });
}

CUresult cuLibraryUnload(CUlibrary library) {
  return call("cuLibraryUnload", STARTED, [&] {
    refuse_in_capture();
    if (current() != nullptr && current()->lost == CUDA_SUCCESS) finish_all(*current());
    unload(library);
  });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  return call("cuFuncGetAttribute", IN_CONTEXT,
              [&] { *value = attribute_of(*function_of(function), attribute, target_of_device()); });
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return call("cuFuncSetAttribute", IN_CONTEXT,
              [&] { set_attribute(*function_of(function), attribute, value, gpu_of(current()->device)); });
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
  return call("cuKernelGetAttribute", STARTED, [&] {
    gpu_of(device);
    *value = attribute_of(*function_of(kernel), attribute, target_of_device());
  });
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
  return call("cuKernelSetAttribute", STARTED,
              [&] { set_attribute(*function_of(kernel), attribute, value, gpu_of(device)); });
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
  return call("cuFuncGetParamInfo", IN_CONTEXT, [&] {
    const std::vector<Parameter>& parameters = function_of(function)->kernel.parameters;
    need(index < parameters.size());
    *offset = parameters[index].offset;
    if (bytes != nullptr) *bytes = parameters[index].bytes;
  });
}

// What PyCUDA does to every function that it prepares; launches give all of it again.
CUresult cuFuncSetBlockShape(CUfunction function, int, int, int) {
  return call("cuFuncSetBlockShape", IN_CONTEXT, [&] { function_of(function); });
}

CUresult cuFuncSetSharedSize(CUfunction function, unsigned int) {
  return call("cuFuncSetSharedSize", IN_CONTEXT, [&] { function_of(function); });
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache) {
  return call("cuFuncSetCacheConfig", IN_CONTEXT, [&] { function_of(function); });
}
