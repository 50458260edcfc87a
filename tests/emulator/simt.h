// What an emitted CUDA text sees when it is compiled for the CPU: put in front of it, never inside it.
// The text needs no standard header, and gets none: its own names must not meet those of the C library.
#pragma once

// clang-format off: each of these needs the ones above it
#include "runtime/interface.h"
#include "runtime/half.h"
#include "kernel/language.h"
#include "kernel/vectors.h"
#include "kernel/arithmetic.h"
#include "kernel/cached.h"
#include "kernel/atomics.h"
#include "kernel/warp.h"
#include "kernel/float16.h"
#include "kernel/sixteen_bit.h"
#include "kernel/ptx.h"
#include "kernel/entry.h"
