// What the taps of a wave get of a buffer of a backend.
#pragma once
#include "program.h"
#include "wave.h"

namespace ksl {

// Columns of a buffer, `stride` floats apart: of each `segments` pieces of `width` floats,
// `segment_stride` apart.
struct TapColumns {
  const float *data;
  int64_t stride;
  int columns, segments, width;
  int64_t segment_stride;
};

// Appends columns to every tap of the wave with this name. copy(to, from, floats) copies what
// there is room for; what there is none for is counted.
template <class Copy>
void append_to_taps(const Wave *wave, const ModelSpec *spec, Tap tap, int layer,
                    const TapColumns &from, Copy copy) {
  for (int i = 0; i < wave->n_taps; i++) {
    ksl_tap *out = &wave->taps[i];
    int at = 0;
    if (tap_find(spec, out->name, &at) != tap || at != layer) continue;
    const uint64_t width = from.width;
    for (int c = 0; c < from.columns; c++) {
      for (int s = 0; s < from.segments; s++) {
        const uint64_t room = out->written < out->capacity ? out->capacity - out->written : 0;
        if (room > 0)
          copy(out->data + out->written, from.data + c * from.stride + s * from.segment_stride,
               room < width ? room : width);
        out->written += width;
      }
    }
  }
}

}  // namespace ksl
