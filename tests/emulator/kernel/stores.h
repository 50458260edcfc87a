// Wide stores to global memory.
#pragma once

__forceinline__ void store_words(void* to, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
  *static_cast<uint4*>(to) = make_uint4(w0, w1, w2, w3);
}

__forceinline__ void store_words(void* to, unsigned w0, unsigned w1) { *static_cast<uint2*>(to) = make_uint2(w0, w1); }
