// Tensor maps: checked as the manual says that the driver does, in the form that the emulator reads.
#include <cstring>

#include "../../emulator/runtime/tensor_map.h"
#include "call.h"
#include "devices.h"

namespace driver {

namespace {

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: throw CUDA_ERROR_NOT_SUPPORTED;  // what the emulator does not read
  }
}

simt::TensorMap::Swizzle swizzle_of(CUtensorMapSwizzle swizzle) {
  need(swizzle >= CU_TENSOR_MAP_SWIZZLE_NONE && swizzle <= CU_TENSOR_MAP_SWIZZLE_128B, CUDA_ERROR_NOT_SUPPORTED);
  return simt::TensorMap::Swizzle(swizzle);  // the same numbers
}

}  // namespace

}  // namespace driver

using namespace driver;

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  return call("cuTensorMapEncodeTiled", IN_CONTEXT, [&] {
    need(gpu_of(current()->device).has_clusters(), CUDA_ERROR_NOT_SUPPORTED);
    need(map != nullptr && reinterpret_cast<uintptr_t>(map) % 64 == 0);
    need(dimensions >= 1 && dimensions <= simt::TensorMap::MOST_DIMENSIONS);
    need(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
         CUDA_ERROR_NOT_SUPPORTED);
    simt::TensorMap made = {};
    made.magic = simt::TensorMap::MAGIC;
    made.base = static_cast<unsigned char*>(address);
    made.dimensions = dimensions;
    made.element_bytes = bytes_of(type);
    made.swizzle = swizzle_of(swizzle);
    for (unsigned i = 0; i < dimensions; ++i) {
      made.size[i] = sizes[i];
      made.box[i] = box[i];
      if (i + 1 < dimensions) made.stride[i] = strides[i];
      need(element_strides[i] >= 1 && element_strides[i] <= 8);
      need(element_strides[i] == 1, CUDA_ERROR_NOT_SUPPORTED);
    }
    need(made.complaint().empty());
    memset(map, 0, sizeof(*map));
    memcpy(map, &made, sizeof(made));
  });
}
