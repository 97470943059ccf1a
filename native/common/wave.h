// Waves on their way in: every rule of ksl.h is checked here, before anything is copied or changed,
// so that a backend can index its pools without looking.
//
// The checker keeps a mirror of what the accepted waves have done to the block tables and to the
// facts about slots that rules depend on. wave_check applies a wave to the mirror as it goes;
// exactly one of wave_accept and wave_revert must follow a successful check.
#pragma once
#include "abi.h"
#include "alloc.h"
#include "backend.h"
#include "budget.h"
#include "model.h"

namespace ksl {

struct WaveLimits {
  int vocab;
  int slots, slabs, blocks, block_tokens, table_blocks, wave_columns;
  int64_t slab_bytes, block_bytes;
  int forced_capacity;
  bool has_mtp, test_hooks;
};

// What one table entry or one slot's filled count was before the wave.
struct WaveUndo {
  int32_t slot, index, block, filled;
};

struct WaveChecker {
  WaveLimits limits;
  int32_t *tables;      // [slots][table_blocks], -1 where never set
  int32_t *filled;      // [slots] entries set from index 0 without a gap
  int32_t *refs;        // [blocks] table entries that name the block
  uint8_t *flags;       // [slots] of accepted waves: kSampled, kMasked
  uint8_t *staged;      // [slots] with the wave under check applied
  uint64_t *writer;     // [blocks] serial of the wave that last wrote it
  int32_t *writer_row;  // [blocks] and the row that did
  uint64_t *slot_used;  // [slots] serial of the last wave with a row of that slot
  uint64_t *slab_used;  // [slabs] the same for rows and cuts
  uint64_t serial;      // of the wave under check
  WaveUndo *undo;       // grows with the longest list of edits
  int64_t undo_n, undo_capacity;
};

int checker_init(WaveChecker *checker, const ModelSpec *spec, const ksl_config *config,
                 const Budget *budget, Alloc *alloc, ksl_error *error);
void checker_free(WaveChecker *checker);

// KSL_OK, KSL_INVALID with a text that names the row or op, the field, its value and the bound, or
// KSL_NOMEM. Anything but KSL_OK leaves the mirror as it was.
int wave_check(WaveChecker *checker, const ksl_wave *wave, ksl_error *error);
void wave_accept(WaveChecker *checker);
void wave_revert(WaveChecker *checker);

// Memory of one ring entry. Grows at submit, never shrinks.
struct WaveArena {
  uint8_t *data;
  size_t size;
};

// Copies a checked wave into the arena. KSL_OK or KSL_NOMEM.
int wave_copy(WaveArena *arena, const ksl_wave *wave, int vocab, Wave *out, ksl_error *error);
void arena_free(WaveArena *arena);

}  // namespace ksl
