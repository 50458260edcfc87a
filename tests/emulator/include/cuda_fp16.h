// What it declares, the emulator has in kernel/sixteen_bit.h.
#pragma once
