#include "wave.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "sample.h"

namespace ksl {
namespace {

enum : uint8_t { kSampled = 1, kMasked = 2 };

// Sanity bounds of list lengths; beyond them a count is taken for garbage.
constexpr int kMaxList = 1 << 24;
constexpr int kMaxOps = 1 << 16;
constexpr int kMaxTaps = 1 << 12;

// Where in the wave a rule was broken: "row 3" or "before op 0".
struct Place {
  const char *list;
  int index;
};

int out_of_range(ksl_error *error, Place at, const char *field, int64_t value, int64_t low,
                 int64_t high) {
  return fail(error, KSL_INVALID, "%s %d: %s is %lld, must be %lld to %lld", at.list, at.index,
              field, static_cast<long long>(value), static_cast<long long>(low),
              static_cast<long long>(high));
}

int in_range(ksl_error *error, Place at, const char *field, int64_t value, int64_t low,
             int64_t high) {
  if (value >= low && value <= high) return KSL_OK;
  return out_of_range(error, at, field, value, low, high);
}

int check_list(ksl_error *error, const char *field, int n, const void *list, int most) {
  if (n < 0 || n > most)
    return fail(error, KSL_INVALID, "wave: n_%s is %d, must be 0 to %d", field, n, most);
  if (n > 0 && list == nullptr)
    return fail(error, KSL_INVALID, "wave: %s is null with n_%s %d", field, field, n);
  return KSL_OK;
}

int check_lists(const WaveLimits *l, const ksl_wave *w, ksl_error *error) {
  int rc = check_list(error, "before", w->n_before, w->before, kMaxOps);
  if (rc == KSL_OK) rc = check_list(error, "after", w->n_after, w->after, kMaxOps);
  if (rc == KSL_OK) rc = check_list(error, "rows", w->n_rows, w->rows, l->slots);
  if (rc == KSL_OK) rc = check_list(error, "tokens", w->n_tokens, w->tokens, kMaxList);
  if (rc == KSL_OK) rc = check_list(error, "edits", w->n_edits, w->edits, kMaxOps);
  if (rc == KSL_OK) rc = check_list(error, "block_ids", w->n_block_ids, w->block_ids, kMaxList);
  if (rc == KSL_OK) rc = check_list(error, "taps", w->n_taps, w->taps, kMaxTaps);
  if (rc != KSL_OK) return rc;
  for (int i = 0; i < w->n_taps; i++) {
    if (w->taps[i].name == nullptr) return fail(error, KSL_INVALID, "tap %d: name is null", i);
    if (w->taps[i].data == nullptr && w->taps[i].capacity > 0)
      return fail(error, KSL_INVALID, "tap %d: data is null with capacity %llu", i,
                  static_cast<unsigned long long>(w->taps[i].capacity));
  }
  return KSL_OK;
}

// ---------------------------------------------------------------- edits

int check_edit(const WaveLimits *l, const ksl_wave *w, int index, ksl_error *error) {
  const ksl_edit *e = &w->edits[index];
  const Place at = {"edit", index};
  int rc = in_range(error, at, "slot", e->slot, 0, l->slots - 1);
  if (rc == KSL_OK) rc = in_range(error, at, "n", e->n, 1, l->table_blocks);
  if (rc == KSL_OK) rc = in_range(error, at, "start", e->start, 0, l->table_blocks - e->n);
  if (rc == KSL_OK && e->n > w->n_block_ids) rc = in_range(error, at, "n", e->n, 1, w->n_block_ids);
  if (rc == KSL_OK) rc = in_range(error, at, "offset", e->offset, 0, w->n_block_ids - e->n);
  for (int i = 0; rc == KSL_OK && i < e->n; i++)
    rc = in_range(error, at, "block id", w->block_ids[e->offset + i], 0, l->blocks - 1);
  return rc;
}

int reserve_undo(WaveChecker *c, int64_t n, ksl_error *error) {
  if (n <= c->undo_capacity) return KSL_OK;
  void *grown = realloc(c->undo, static_cast<size_t>(n) * sizeof(WaveUndo));
  if (grown == nullptr)
    return fail(error, KSL_NOMEM, "out of memory for %lld table edits", static_cast<long long>(n));
  c->undo = static_cast<WaveUndo *>(grown);
  c->undo_capacity = n;
  return KSL_OK;
}

void set_entry(WaveChecker *c, int slot, int index, int block) {
  int32_t *entry = &c->tables[static_cast<size_t>(slot) * c->limits.table_blocks + index];
  if (*entry >= 0) c->refs[*entry]--;
  if (block >= 0) c->refs[block]++;
  *entry = block;
}

void apply_edit(WaveChecker *c, const ksl_wave *w, const ksl_edit *e) {
  const int length = c->limits.table_blocks;
  const int32_t *table = &c->tables[static_cast<size_t>(e->slot) * length];
  for (int i = 0; i < e->n; i++) {
    const int index = e->start + i;
    c->undo[c->undo_n++] = {e->slot, index, table[index], c->filled[e->slot]};
    set_entry(c, e->slot, index, w->block_ids[e->offset + i]);
  }
  int filled = c->filled[e->slot];
  while (filled < length && table[filled] >= 0) filled++;
  c->filled[e->slot] = filled;
}

int check_edits(WaveChecker *c, const ksl_wave *w, ksl_error *error) {
  int64_t total = 0;
  for (int i = 0; i < w->n_edits; i++) {
    const int rc = check_edit(&c->limits, w, i, error);
    if (rc != KSL_OK) return rc;
    total += w->edits[i].n;
  }
  const int rc = reserve_undo(c, total, error);
  if (rc != KSL_OK) return rc;
  for (int i = 0; i < w->n_edits; i++) apply_edit(c, w, &w->edits[i]);
  return KSL_OK;
}

// ---------------------------------------------------------------- ops

int check_configure(const WaveLimits *l, const ksl_op *op, Place at, ksl_error *error) {
  if (op->data == nullptr)
    return fail(error, KSL_INVALID, "%s %d: CONFIGURE data is null", at.list, at.index);
  const ksl_sampling *s = static_cast<const ksl_sampling *>(op->data);
  ksl_error inner;
  const int rc = sampling_check(s, l->vocab, &inner);
  if (rc == KSL_OK) return rc;
  return fail(error, rc, "%s %d: %.400s", at.list, at.index, inner.text);
}

int check_force(const WaveLimits *l, const ksl_op *op, Place at, ksl_error *error) {
  if (!l->test_hooks)
    return fail(error, KSL_INVALID, "%s %d: FORCE needs an engine opened with test_hooks", at.list,
                at.index);
  const int rc = in_range(error, at, "n", op->n, 0, l->forced_capacity);
  if (rc != KSL_OK) return rc;
  if (op->n > 0 && op->data == nullptr)
    return fail(error, KSL_INVALID, "%s %d: FORCE data is null with n %d", at.list, at.index,
                op->n);
  const int32_t *ids = static_cast<const int32_t *>(op->data);
  for (int i = 0; i < op->n; i++)
    if (ids[i] < 0 || ids[i] >= l->vocab)
      return fail(error, KSL_INVALID, "%s %d: forced id %d is %d, must be 0 to %d", at.list,
                  at.index, i, ids[i], l->vocab - 1);
  return KSL_OK;
}

int check_op(WaveChecker *c, const ksl_op *op, Place at, ksl_error *error) {
  const WaveLimits *l = &c->limits;
  const int slab = l->slabs - 1;
  const int block = l->blocks - 1;
  int rc = KSL_OK;
  switch (op->kind) {
    case KSL_OP_ZERO_SLAB:
      return in_range(error, at, "a (slab)", op->a, 0, slab);
    case KSL_OP_COPY_SLAB:
    case KSL_OP_COPY_BLOCK: {
      const bool slabs = op->kind == KSL_OP_COPY_SLAB;
      rc = in_range(error, at, slabs ? "a (slab)" : "a (block)", op->a, 0, slabs ? slab : block);
      if (rc == KSL_OK)
        rc = in_range(error, at, slabs ? "b (slab)" : "b (block)", op->b, 0, slabs ? slab : block);
      if (rc == KSL_OK && op->a == op->b)
        rc = fail(error, KSL_INVALID, "%s %d: a and b are both %d", at.list, at.index, op->a);
      return rc;
    }
    case KSL_OP_SAVE_SLAB:
    case KSL_OP_LOAD_SLAB:
    case KSL_OP_SAVE_BLOCK:
    case KSL_OP_LOAD_BLOCK: {
      const bool slabs = op->kind == KSL_OP_SAVE_SLAB || op->kind == KSL_OP_LOAD_SLAB;
      rc = in_range(error, at, slabs ? "a (slab)" : "a (block)", op->a, 0, slabs ? slab : block);
      if (rc == KSL_OK && op->data == nullptr)
        rc = fail(error, KSL_INVALID, "%s %d: data is null", at.list, at.index);
      const int64_t bytes = slabs ? l->slab_bytes : l->block_bytes;
      if (rc == KSL_OK) rc = in_range(error, at, "b (offset)", op->b, 0, bytes - 1);
      return rc == KSL_OK ? in_range(error, at, "n (bytes)", op->n, 1, bytes - op->b) : rc;
    }
    case KSL_OP_DROP_SLABS:
    case KSL_OP_DROP_BLOCKS:
    case KSL_OP_TOUCH_SLABS:
    case KSL_OP_TOUCH_BLOCKS: {
      const bool slabs = op->kind == KSL_OP_DROP_SLABS || op->kind == KSL_OP_TOUCH_SLABS;
      const int most = slabs ? l->slabs : l->blocks;
      rc = in_range(error, at, "n", op->n, 1, most);
      return rc == KSL_OK ? in_range(error, at, "a", op->a, 0, most - op->n) : rc;
    }
    case KSL_OP_CONFIGURE:
      rc = in_range(error, at, "a (slot)", op->a, 0, l->slots - 1);
      if (rc == KSL_OK) rc = check_configure(l, op, at, error);
      if (rc == KSL_OK) c->staged[op->a] = 0;
      return rc;
    case KSL_OP_MASK:
      rc = in_range(error, at, "a (slot)", op->a, 0, l->slots - 1);
      if (rc != KSL_OK) return rc;
      if (op->data != nullptr)
        c->staged[op->a] |= kMasked;
      else
        c->staged[op->a] &= static_cast<uint8_t>(~kMasked);
      return KSL_OK;
    case KSL_OP_FORCE:
      rc = in_range(error, at, "a (slot)", op->a, 0, l->slots - 1);
      return rc == KSL_OK ? check_force(l, op, at, error) : rc;
    case KSL_OP_FAULT:
      if (l->test_hooks) return KSL_OK;
      return fail(error, KSL_INVALID, "%s %d: FAULT needs an engine opened with test_hooks",
                  at.list, at.index);
    default:
      return out_of_range(error, at, "kind", op->kind, KSL_OP_ZERO_SLAB, KSL_OP_FAULT);
  }
}

int check_ops(WaveChecker *c, const ksl_op *ops, int n, const char *list, ksl_error *error) {
  for (int i = 0; i < n; i++) {
    const int rc = check_op(c, &ops[i], Place{list, i}, error);
    if (rc != KSL_OK) return rc;
  }
  return KSL_OK;
}

// ---------------------------------------------------------------- rows

bool samples(const ksl_row *r) {
  return r->kind == KSL_ROW_LAST || r->kind == KSL_ROW_VERIFY;
}

// The number of ids that a row names in the wave's tokens.
int64_t ids_of(const ksl_row *r) {
  if (r->kind == KSL_ROW_SCORE) return static_cast<int64_t>(r->n) + 1;
  return r->kind == KSL_ROW_VERIFY && r->draft == KSL_DRAFT_OWN ? 1 : r->n;
}

int check_tokens(const WaveChecker *c, const ksl_wave *w, const ksl_row *r, Place at,
                 ksl_error *error) {
  const int64_t n = ids_of(r);
  if (n > w->n_tokens)
    return fail(error, KSL_INVALID, "%s %d: needs %lld tokens, the wave has %d", at.list, at.index,
                static_cast<long long>(n), w->n_tokens);
  int rc = in_range(error, at, "tokens", r->tokens, 0, w->n_tokens - n);
  if (rc != KSL_OK) return rc;
  const int32_t *ids = w->tokens + r->tokens;
  for (int64_t i = 0; i < n; i++) {
    const bool unknown = r->kind == KSL_ROW_SCORE && i == n - 1;
    const int low = i == 0 || unknown ? -1 : 0;
    if (ids[i] < low || ids[i] >= c->limits.vocab)
      return fail(error, KSL_INVALID, "%s %d: token %lld is %d, must be %d to %d", at.list,
                  at.index, static_cast<long long>(i), ids[i], low, c->limits.vocab - 1);
  }
  if (ids[0] == -1 && !(c->staged[r->slot] & kSampled))
    return fail(error, KSL_INVALID,
                "%s %d: token 0 is -1 but slot %d has sampled nothing since it was configured",
                at.list, at.index, r->slot);
  return KSL_OK;
}

int check_kind(const WaveChecker *c, const ksl_row *r, Place at, ksl_error *error) {
  const WaveLimits *l = &c->limits;
  int rc = in_range(error, at, "draft", r->draft, KSL_DRAFT_NONE,
                    r->kind == KSL_ROW_VERIFY ? KSL_DRAFT_OWN : KSL_DRAFT_NONE);
  if (rc == KSL_OK && r->kind == KSL_ROW_VERIFY) {
    const bool single = r->draft == KSL_DRAFT_NONE || (c->staged[r->slot] & kMasked);
    rc = in_range(error, at, single ? "n (no drafts, or a mask)" : "n", r->n, 1,
                  single ? 1 : KSL_MAX_DRAFT + 1);
  }
  if (rc == KSL_OK) rc = in_range(error, at, "top_n", r->top_n, 0, KSL_MAX_TOP);
  if (rc != KSL_OK) return rc;
  if (r->kind == KSL_ROW_SCORE && r->logprobs == nullptr)
    return fail(error, KSL_INVALID, "%s %d: logprobs is null in a SCORE row", at.list, at.index);
  if (r->propose == 0) return KSL_OK;
  rc = in_range(error, at, "propose", r->propose, 0, KSL_MAX_DRAFT);
  if (rc != KSL_OK) return rc;
  if (!l->has_mtp)
    return fail(error, KSL_INVALID, "%s %d: propose is %d but the model has no MTP layer", at.list,
                at.index, r->propose);
  if (!samples(r))
    return fail(error, KSL_INVALID, "%s %d: propose is %d in a row that samples nothing", at.list,
                at.index, r->propose);
  return KSL_OK;
}

int check_span(const WaveChecker *c, const ksl_row *r, Place at, ksl_error *error) {
  const WaveLimits *l = &c->limits;
  const int64_t span = static_cast<int64_t>(l->table_blocks) * l->block_tokens;
  int rc = in_range(error, at, "start", r->start, 0, span - 1);
  const int64_t end = static_cast<int64_t>(r->start) + r->n + r->propose;
  if (rc == KSL_OK) rc = in_range(error, at, "start + n + propose", end, 1, span);
  if (rc != KSL_OK) return rc;
  const int64_t covered = static_cast<int64_t>(c->filled[r->slot]) * l->block_tokens;
  if (end > covered)
    return fail(error, KSL_INVALID,
                "%s %d: start + n + propose is %lld but the table of slot %d covers %lld tokens",
                at.list, at.index, static_cast<long long>(end), r->slot,
                static_cast<long long>(covered));
  return KSL_OK;
}

int check_row(WaveChecker *c, const ksl_wave *w, int index, ksl_error *error) {
  const WaveLimits *l = &c->limits;
  const ksl_row *r = &w->rows[index];
  const Place at = {"row", index};
  int rc = in_range(error, at, "kind", r->kind, KSL_ROW_PREFILL, KSL_ROW_SCORE);
  if (rc == KSL_OK) rc = in_range(error, at, "slot", r->slot, 0, l->slots - 1);
  if (rc == KSL_OK) rc = in_range(error, at, "slab", r->slab, 0, l->slabs - 1);
  if (rc == KSL_OK) rc = in_range(error, at, "n", r->n, 1, l->wave_columns);
  if (rc != KSL_OK) return rc;
  if (c->slot_used[r->slot] == c->serial)
    return fail(error, KSL_INVALID, "row %d: slot %d has another row in this wave", index, r->slot);
  if (c->slab_used[r->slab] == c->serial)
    return fail(error, KSL_INVALID, "row %d: slab %d has another row in this wave", index, r->slab);
  c->slot_used[r->slot] = c->serial;
  c->slab_used[r->slab] = c->serial;
  rc = check_kind(c, r, at, error);
  if (rc == KSL_OK) rc = check_span(c, r, at, error);
  if (rc == KSL_OK) rc = check_tokens(c, w, r, at, error);
  return rc;
}

// After every row has taken its slab.
int check_cuts(WaveChecker *c, const ksl_row *r, int index, ksl_error *error) {
  const Place at = {"row", index};
  int rc =
      in_range(error, at, "n_cuts", r->n_cuts, 0, r->kind == KSL_ROW_VERIFY ? 0 : KSL_MAX_CUTS);
  int64_t low = 1;
  for (int i = 0; rc == KSL_OK && i < r->n_cuts; i++) {
    const ksl_cut *cut = &r->cuts[i];
    rc = in_range(error, at, "cut offset", cut->offset, low, r->n);
    if (rc == KSL_OK) rc = in_range(error, at, "cut slab", cut->slab, 0, c->limits.slabs - 1);
    if (rc != KSL_OK) return rc;
    if (c->slab_used[cut->slab] == c->serial)
      return fail(error, KSL_INVALID, "row %d: slab %d of cut %d is used by a row or another cut",
                  index, cut->slab, i);
    c->slab_used[cut->slab] = c->serial;
    low = static_cast<int64_t>(cut->offset) + 1;
  }
  return rc;
}

// Marks the blocks that a row writes; `shared` is set if one of them is in more than one table
// entry.
int check_writes(WaveChecker *c, const ksl_row *r, int index, bool *shared, ksl_error *error) {
  const int tokens = c->limits.block_tokens;
  const int32_t *table = &c->tables[static_cast<size_t>(r->slot) * c->limits.table_blocks];
  const int last = (r->start + r->n + r->propose - 1) / tokens;
  for (int i = r->start / tokens; i <= last; i++) {
    const int32_t block = table[i];
    if (c->writer[block] == c->serial)
      return fail(error, KSL_INVALID, "row %d: block %d is also written by row %d", index, block,
                  c->writer_row[block]);
    c->writer[block] = c->serial;
    c->writer_row[block] = index;
    if (c->refs[block] > 1) *shared = true;
  }
  return KSL_OK;
}

int check_reads(const WaveChecker *c, const ksl_row *r, int index, ksl_error *error) {
  const int32_t *table = &c->tables[static_cast<size_t>(r->slot) * c->limits.table_blocks];
  const int first_written = r->start / c->limits.block_tokens;
  for (int i = 0; i < first_written; i++)
    if (c->writer[table[i]] == c->serial)
      return fail(error, KSL_INVALID, "row %d: reads block %d, which row %d writes", index,
                  table[i], c->writer_row[table[i]]);
  return KSL_OK;
}

int check_rows(WaveChecker *c, const ksl_wave *w, ksl_error *error) {
  int64_t columns = 0;
  for (int i = 0; i < w->n_rows; i++) {
    const int rc = check_row(c, w, i, error);
    if (rc != KSL_OK) return rc;
    columns += w->rows[i].n;
  }
  if (columns > c->limits.wave_columns)
    return fail(error, KSL_INVALID, "wave: its rows have %lld columns, at most %d",
                static_cast<long long>(columns), c->limits.wave_columns);
  bool shared = false;
  for (int i = 0; i < w->n_rows; i++) {
    int rc = check_cuts(c, &w->rows[i], i, error);
    if (rc == KSL_OK) rc = check_writes(c, &w->rows[i], i, &shared, error);
    if (rc != KSL_OK) return rc;
  }
  for (int i = 0; shared && i < w->n_rows; i++) {
    const int rc = check_reads(c, &w->rows[i], i, error);
    if (rc != KSL_OK) return rc;
  }
  for (int i = 0; i < w->n_rows; i++)
    if (samples(&w->rows[i])) c->staged[w->rows[i].slot] |= kSampled;
  return KSL_OK;
}

int check_all(WaveChecker *c, const ksl_wave *w, ksl_error *error) {
  int rc = check_lists(&c->limits, w, error);
  if (rc == KSL_OK) rc = check_edits(c, w, error);
  if (rc == KSL_OK) rc = check_ops(c, w->before, w->n_before, "before op", error);
  if (rc == KSL_OK) rc = check_rows(c, w, error);
  if (rc == KSL_OK) rc = check_ops(c, w->after, w->n_after, "after op", error);
  return rc;
}

// ---------------------------------------------------------------- copy-in

// Walks the pieces of a wave twice: first with no base to measure, then to copy.
struct Packer {
  uint8_t *base;
  size_t used;

  void *add(const void *data, size_t bytes) {
    used = (used + 15) & ~static_cast<size_t>(15);
    void *at = base != nullptr ? base + used : nullptr;
    if (base != nullptr && bytes > 0) memcpy(at, data, bytes);
    used += bytes;
    return at;
  }

  template <typename T>
  T *list(const T *data, int n) {
    return static_cast<T *>(add(data, static_cast<size_t>(n) * sizeof(T)));
  }
};

void *pack_configure(Packer *p, const void *data) {
  ksl_sampling s = *static_cast<const ksl_sampling *>(data);
  s.stop_ids = p->list(s.stop_ids, s.n_stop);
  s.bias_ids = p->list(s.bias_ids, s.n_bias);
  s.bias = p->list(s.bias, s.n_bias);
  // Long lists that this sampling never looks at are not copied.
  if (s.repetition == 1) s.n_prompt = 0;
  if (s.repetition == 1 && s.presence == 0 && s.frequency == 0) s.n_output = 0;
  s.prompt_ids = p->list(s.prompt_ids, s.n_prompt);
  s.output_ids = p->list(s.output_ids, s.n_output);
  return p->list(&s, 1);
}

const ksl_op *pack_ops(Packer *p, const ksl_op *ops, int n, int vocab) {
  ksl_op *out = p->list(ops, n);
  for (int i = 0; i < n; i++) {
    void *data = ops[i].data;
    if (ops[i].kind == KSL_OP_CONFIGURE)
      data = pack_configure(p, data);
    else if (ops[i].kind == KSL_OP_MASK && data != nullptr)
      data = p->add(data, (static_cast<size_t>(vocab) + 31) / 32 * sizeof(uint32_t));
    else if (ops[i].kind == KSL_OP_FORCE)
      data = p->list(static_cast<const int32_t *>(data), ops[i].n);
    if (out != nullptr) out[i].data = data;
  }
  return out;
}

void pack(Packer *p, const ksl_wave *w, int vocab, Wave *out) {
  out->before = pack_ops(p, w->before, w->n_before, vocab);
  out->after = pack_ops(p, w->after, w->n_after, vocab);
  out->rows = p->list(w->rows, w->n_rows);
  out->tokens = p->list(w->tokens, w->n_tokens);
  out->edits = p->list(w->edits, w->n_edits);
  out->block_ids = p->list(w->block_ids, w->n_block_ids);
}

}  // namespace

int checker_init(WaveChecker *checker, const ModelSpec *spec, const ksl_config *config,
                 const Budget *budget, Alloc *alloc, ksl_error *error) {
  *checker = WaveChecker{};
  WaveChecker *c = checker;
  WaveLimits *l = &c->limits;
  l->vocab = spec->vocab;
  l->slots = config->slots;
  l->slabs = config->slabs;
  l->blocks = config->blocks;
  l->block_tokens = config->block_tokens;
  l->table_blocks = config->max_blocks_per_slot;
  l->wave_columns = config->wave_columns;
  l->slab_bytes = static_cast<int64_t>(budget->slab_bytes);
  l->block_bytes = static_cast<int64_t>(budget->block_bytes);
  l->forced_capacity = budget->forced_capacity;
  l->has_mtp = spec->mtp_layers > 0;
  l->test_hooks = (config->test_hooks & KSL_HOOK_OPS) != 0;
  const size_t slots = static_cast<size_t>(l->slots);
  const size_t blocks = static_cast<size_t>(l->blocks);
  const size_t entries = slots * static_cast<size_t>(l->table_blocks);
  c->tables = alloc_many<int32_t>(alloc, entries);
  c->filled = alloc_many<int32_t>(alloc, slots);
  c->refs = alloc_many<int32_t>(alloc, blocks);
  c->flags = alloc_many<uint8_t>(alloc, slots);
  c->staged = alloc_many<uint8_t>(alloc, slots);
  c->writer = alloc_many<uint64_t>(alloc, blocks);
  c->writer_row = alloc_many<int32_t>(alloc, blocks);
  c->slot_used = alloc_many<uint64_t>(alloc, slots);
  c->slab_used = alloc_many<uint64_t>(alloc, static_cast<size_t>(l->slabs));
  if (!c->tables || !c->filled || !c->refs || !c->flags || !c->staged || !c->writer ||
      !c->writer_row || !c->slot_used || !c->slab_used) {
    checker_free(c);
    return fail(error, KSL_NOMEM, "out of memory for the block tables of %d slots", l->slots);
  }
  memset(c->tables, 0xff, entries * sizeof(int32_t));
  return KSL_OK;
}

void checker_free(WaveChecker *checker) {
  alloc_free(checker->tables);
  alloc_free(checker->filled);
  alloc_free(checker->refs);
  alloc_free(checker->flags);
  alloc_free(checker->staged);
  alloc_free(checker->writer);
  alloc_free(checker->writer_row);
  alloc_free(checker->slot_used);
  alloc_free(checker->slab_used);
  free(checker->undo);
  *checker = WaveChecker{};
}

int wave_check(WaveChecker *checker, const ksl_wave *wave, ksl_error *error) {
  if (wave == nullptr) return fail(error, KSL_INVALID, "wave: is null");
  checker->serial++;
  checker->undo_n = 0;
  memcpy(checker->staged, checker->flags, static_cast<size_t>(checker->limits.slots));
  const int rc = check_all(checker, wave, error);
  if (rc != KSL_OK) wave_revert(checker);
  return rc;
}

void wave_accept(WaveChecker *checker) {
  memcpy(checker->flags, checker->staged, static_cast<size_t>(checker->limits.slots));
  checker->undo_n = 0;
}

void wave_revert(WaveChecker *checker) {
  while (checker->undo_n > 0) {
    const WaveUndo u = checker->undo[--checker->undo_n];
    set_entry(checker, u.slot, u.index, u.block);
    checker->filled[u.slot] = u.filled;
  }
}

int wave_copy(WaveArena *arena, const ksl_wave *wave, int vocab, Wave *out, ksl_error *error) {
  *out = Wave{};
  Packer measure = {nullptr, 0};
  pack(&measure, wave, vocab, out);
  if (measure.used > arena->size) {
    const size_t size = measure.used + measure.used / 2 + 4096;
    uint8_t *grown = static_cast<uint8_t *>(malloc(size));
    if (grown == nullptr)
      return fail(error, KSL_NOMEM, "out of memory for a wave of %llu bytes",
                  static_cast<unsigned long long>(measure.used));
    free(arena->data);
    arena->data = grown;
    arena->size = size;
  }
  Packer copy = {arena->data, 0};
  pack(&copy, wave, vocab, out);
  out->id = wave->id;
  out->n_before = wave->n_before;
  out->n_after = wave->n_after;
  out->n_rows = wave->n_rows;
  out->n_tokens = wave->n_tokens;
  out->n_edits = wave->n_edits;
  out->n_taps = wave->n_taps;
  out->taps = wave->taps;
  return KSL_OK;
}

void arena_free(WaveArena *arena) {
  free(arena->data);
  *arena = WaveArena{};
}

bool wants_tap(const Wave *wave, const char *name, bool prefix) {
  for (int i = 0; i < wave->n_taps; i++) {
    const char *tap = wave->taps[i].name;
    if (prefix ? !strncmp(tap, name, strlen(name)) : !strcmp(tap, name)) return true;
  }
  return false;
}

}  // namespace ksl
