// Functions by name, as cuda-bindings asks for them. Of several versions of one there is the header's own here.
#include <dlfcn.h>

#include <string>

#include "call.h"

CUresult cuGetProcAddress(const char* symbol, void** function, int cuda, cuuint64_t,
                          CUdriverProcAddressQueryResult* status) {
  static void* self = [] {
    Dl_info info = {};
    dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *function = nullptr;
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    if (*function == nullptr) *function = dlsym(self, (std::string(symbol) + version).c_str());
  }
  if (std::string(symbol) == "cuCtxCreate" && cuda < 13000) *function = dlsym(self, "cuCtxCreate_v2");
  if (std::string(symbol) == "cuGraphInstantiate") *function = dlsym(self, "cuGraphInstantiateWithFlags");
  if (status != nullptr)
    *status = *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
