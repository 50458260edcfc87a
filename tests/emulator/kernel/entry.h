// Calls a kernel with the launch's arguments, each of the type that the kernel declares.
#pragma once

namespace simt {

template <typename T>
struct Argument {
  static T value(int index) {  // whose bytes lie anywhere
    T result;
    __builtin_memcpy(&result, argument(index, sizeof(T), false), sizeof(T));
    return result;
  }
};

template <typename T>
struct Argument<T*> {
  static T* value(int index) { return *static_cast<T* const*>(argument(index, sizeof(T*), true)); }
};

template <int... INDEX>
struct Indices {};

template <typename... Parameters, int... INDEX>
void call(void (*kernel)(Parameters...), Indices<INDEX...>) {
  kernel(Argument<Parameters>::value(INDEX)...);
}

template <typename... Parameters>
void call(void (*kernel)(Parameters...)) {
  call(kernel, Indices<__integer_pack(int(sizeof...(Parameters)))...>());
}

template <typename... Parameters>
constexpr int count_parameters(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

}  // namespace simt
