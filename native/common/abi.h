// The public ABI as C++ sees it.
#pragma once
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include "../include/ksl.h"  // the header has no guard of its own
}
