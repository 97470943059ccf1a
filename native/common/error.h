// Errors are a return code and a text; nothing throws.
#pragma once
#include "abi.h"

namespace ksl {

// Writes a printf-style text (cut to fit) and the code into `error` (may be null); returns `code`.
int fail(ksl_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

}  // namespace ksl
