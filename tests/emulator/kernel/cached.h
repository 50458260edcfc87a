// Loads and stores with a cache hint: here the same as any other. Inlined, so that a fault has the text's own line.
#pragma once

template <typename T> __forceinline__ T __ldg(const T* address) { return *address; }
template <typename T> __forceinline__ T __ldca(const T* address) { return *address; }
template <typename T> __forceinline__ T __ldcg(const T* address) { return *address; }
template <typename T> __forceinline__ T __ldcs(const T* address) { return *address; }
template <typename T> __forceinline__ void __stcg(T* address, T value) { *address = value; }
template <typename T> __forceinline__ void __stcs(T* address, T value) { *address = value; }
