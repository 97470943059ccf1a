// What the engine asks of a backend. One struct of functions; the engine thread is the only caller
// after open.
#pragma once
#include <atomic>

#include "abi.h"
#include "alloc.h"
#include "model.h"

namespace ksl {

// A validated wave, copied in: all pointers are owned by the ring entry, except caller buffers of
// SAVE/LOAD ops, logprobs and taps.
struct Wave {
  uint64_t id;
  int n_before, n_after, n_rows, n_tokens, n_edits, n_taps;
  const ksl_op *before, *after;  // data of CONFIGURE, MASK, FORCE points into the entry
  const ksl_row *rows;
  const int32_t *tokens;
  const ksl_edit *edits;
  const int32_t *block_ids;
  ksl_tap *taps;  // the caller's array: `written` is set by the backend
  // Set when the engine was closed and its deadline has passed: the backend may then stop between
  // two layers and return KSL_CLOSED; nobody will read what it computed.
  const std::atomic<bool> *abandon;
  uint64_t *drafts_ns;  // of the end record: how long the MTP drafts took, set by the backend
};

// Whether the wave asks for a tap of that name or (prefix) one that starts so. (wave.cc)
bool wants_tap(const Wave *wave, const char *name, bool prefix);

struct Graphs {
  uint64_t kept, kernels, made;  // kernels: of those that are kept
};

struct Backend;

struct BackendOps {
  const char *name;
  // Repacks weights and allocates every pool. `spec`, `config` outlive the backend; tensor data
  // does not. Every allocation goes through `alloc` (alloc.h), which outlives the backend. On
  // failure frees what it made and returns the code.
  int (*open)(const ModelSpec *spec, const ksl_config *config, const TensorTable *tensors,
              Alloc *alloc, Backend **out, ksl_error *error);
  // Overwrites the fields of info that the backend knows: weight_bytes, token_bytes, scratch_bytes,
  // threads, isa. The rest comes from the budget; `numerics` is made of isa unless it is set.
  void (*info)(Backend *backend, ksl_info *info);
  // Runs one wave: edits, before ops, rows, after ops. done: [n_rows], zeroed, row/slot/wave set by
  // the engine; the backend fills flags, position, accepted, proposed, n_tokens, tokens, drafts.
  // KSL_OK, or KSL_FATAL with a text: the engine is then poisoned.
  int (*run)(Backend *backend, const Wave *wave, ksl_done *done, ksl_error *error);
  // Null, or does what the wave that ran last left for later since nobody waits for it: its records
  // are out, the wave is not there any more, and the next one has not begun. True if there is more,
  // for which there is time while the engine has nothing to do: then it is called again, `idle`
  // set, and does a piece of it that takes less than a wave.
  bool (*finish)(Backend *backend, bool idle);
  // Null, or which graphs the backend keeps and how many it has made.
  void (*graphs)(const Backend *backend, Graphs *graphs);
  void (*close)(Backend *backend);
};

// The backend that this library was linked with.
const BackendOps *default_backend(void);
// Names of the ISA paths of that backend that run here, separated by spaces.
const char *kernels_list(void);
// ksl_kv_code_bytes of that backend.
int kv_code_bytes(int kv_format, int activations, int isa, int head_dim);

}  // namespace ksl
