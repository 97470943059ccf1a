#include "error.h"

#include <stdarg.h>
#include <stdio.h>

namespace ksl {

int fail(ksl_error *error, int code, const char *format, ...) {
  if (error != nullptr) {
    error->code = code;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
  }
  return code;
}

}  // namespace ksl
