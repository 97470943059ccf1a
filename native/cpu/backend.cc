// The run of one wave.
#include <math.h>
#include <string.h>

#include "../common/error.h"
#include "../common/rows.h"
#include "state.h"

namespace ksl {

void parallel(Backend *b, int n, int64_t cost, PoolTask task, void *context, int grain) {
  if (n <= 0) return;
  if (b->threads == 1 || cost < b->inline_cost) {
    task(context, 0, 0, n);
  } else {
    pool_run(b->pool, n, grain, task, context);
  }
}

void batch_rotary(Backend *b, Batch *batch) {
  const int half = b->spec->kv_layers ? b->spec->rotary_dims / 2 : 0;
  for (int c = 0; c < batch->n; c++) {
    for (int j = 0; j < half; j++) {
      double angle = batch->position[c] * b->frequency[j];
      batch->cos[static_cast<size_t>(c) * half + j] = static_cast<float>(cos(angle));
      batch->sin[static_cast<size_t>(c) * half + j] = static_cast<float>(sin(angle));
    }
  }
}

namespace {

// Where the image, or the part of it, of a SAVE or LOAD op begins.
uint8_t *slab_part(const Backend *b, const ksl_op *op) {
  return reinterpret_cast<uint8_t *>(slab_at(b, op->a)) + op->b;
}

// Slabs that lie side by side in one piece, for the pages that two of them share.
void drop_slabs(Backend *b, int first, int n) {
  for (int i = first, next; i < first + n; i = next) {
    next = i + 1;
    while (next < first + n && slab_at(b, next) == slab_at(b, next - 1) + b->slab_floats) next++;
    alloc_discard(slab_at(b, i), (next - i) * b->slab_floats * sizeof(float));
  }
}

void run_op(Backend *b, const ksl_op *op) {
  const size_t slab_bytes = b->image_floats * sizeof(float);
  switch (op->kind) {
    case KSL_OP_ZERO_SLAB:
      memset(slab_at(b, op->a), 0, slab_bytes);
      break;
    case KSL_OP_COPY_SLAB:
      memmove(slab_at(b, op->b), slab_at(b, op->a), slab_bytes);
      break;
    case KSL_OP_COPY_BLOCK:
      backlog_settle_block(b, op->a);
      backlog_forget(b, op->b, 0);
      memmove(b->blocks + op->b * b->block_bytes, b->blocks + op->a * b->block_bytes,
              b->block_bytes);
      codes_copy(b, op->a, op->b);
      break;
    case KSL_OP_SAVE_SLAB:
      memcpy(op->data, slab_part(b, op), op->n);
      break;
    case KSL_OP_LOAD_SLAB:
      memcpy(slab_part(b, op), op->data, op->n);
      break;
    case KSL_OP_SAVE_BLOCK:
      backlog_settle_block(b, op->a);
      block_save(b, op->a, op->b, op->n, op->data);
      break;
    case KSL_OP_LOAD_BLOCK:
      backlog_forget(b, op->a, 0);
      block_load(b, op->a, op->b, op->n, op->data);
      codes_mark(b, op->a);
      break;
    case KSL_OP_CONFIGURE:
      slot_configure(&b->slots[op->a], b->spec->vocab, static_cast<const ksl_sampling *>(op->data));
      break;
    case KSL_OP_MASK: {
      SlotState *slot = &b->slots[op->a];
      slot->has_mask = op->data != nullptr;
      if (op->data) {
        memcpy(slot->mask, op->data, (b->spec->vocab + 31) / 32 * sizeof(uint32_t));
      }
      break;
    }
    case KSL_OP_FORCE: {
      SlotState *slot = &b->slots[op->a];
      int n = op->n < slot->forced_capacity ? op->n : slot->forced_capacity;
      if (n > 0) memcpy(slot->forced, op->data, n * sizeof(int32_t));
      slot->forced_n = n > 0 ? n : 0;
      slot->forced_at = 0;
      break;
    }
    case KSL_OP_DROP_SLABS:
      drop_slabs(b, op->a, op->n);
      break;
    case KSL_OP_DROP_BLOCKS:
      for (int i = op->a; i < op->a + op->n; i++) backlog_forget(b, i, 0);
      alloc_discard(b->blocks + op->a * b->block_bytes, op->n * b->block_bytes);
      codes_drop(b, op->a, op->n);
      break;
    case KSL_OP_TOUCH_SLABS:
      for (int i = op->a; i < op->a + op->n; i++) alloc_touch(slab_at(b, i), slab_bytes);
      break;
    case KSL_OP_TOUCH_BLOCKS:
      alloc_touch(b->blocks + op->a * b->block_bytes, op->n * b->block_bytes);
      codes_touch(b, op->a, op->n);
      break;
    case KSL_OP_FAULT:
      b->fault = true;
      break;
  }
}

int plan_rows(Backend *b, const Wave *wave, ksl_done *done, ksl_error *error) {
  Batch *batch = &b->trunk;
  int columns = 0, kept = 0, spares = 0;
  b->n_rows = wave->n_rows;
  for (int i = 0; i < wave->n_rows; i++) {
    const ksl_row *row = &wave->rows[i];
    RowPlan *plan = &b->rows[i];
    *plan = RowPlan{};
    plan->row = row;
    plan->done = &done[i];
    plan->slot = &b->slots[row->slot];
    plan->slab = slab_at(b, row->slab);
    plan->column = columns;
    plan->keep = plan->spare = -1;
    plan->done->position = row->start;
    SlotState *slot = plan->slot;
    const RowTokens tokens = row_tokens(wave, row, slot);
    const int n = tokens.n;
    if (n == 0) {
      plan->done->flags = KSL_DONE_LATCHED;
      plan->ended = true;
      continue;
    }
    if (row->kind == KSL_ROW_VERIFY && n > 1) {
      plan->keep = kept;
      kept += n;
      if (spares < b->n_spares) plan->spare = spares++;
    }
    if (columns + n > b->config->wave_columns || kept > b->keep_columns) {
      return fail(error, KSL_FATAL, "Wave %llu has more columns than the engine was opened with.",
                  static_cast<unsigned long long>(wave->id));
    }
    for (int j = 0; j < n; j++) {
      batch->token[columns + j] = j ? tokens.rest[j - 1] : tokens.first;
      batch->position[columns + j] = row->start + j;
      batch->slot[columns + j] = row->slot;
      batch->row[columns + j] = i;
    }
    slot->n_drafts = 0;
    plan->n = plan->committed = n;
    plan->n_cuts = row->n_cuts;
    for (int j = 0; j < row->n_cuts; j++) {
      plan->cut_offset[j] = row->cuts[j].offset;
      plan->cut_slab[j] = slab_at(b, row->cuts[j].slab);
    }
    columns += n;
  }
  batch->n = columns;
  return KSL_OK;
}

// The trunk hidden after the committed columns, and at the cuts.
void commit_hidden(Backend *b) {
  const size_t bytes = b->spec->hidden * sizeof(float);
  for (int i = 0; i < b->n_rows; i++) {
    RowPlan *plan = &b->rows[i];
    if (!plan->n) continue;
    const float *first = b->final + plan->column * b->hidden_stride;
    for (int j = 0; j < plan->n_cuts; j++) {
      memcpy(slab_hidden(b, plan->cut_slab[j]),
             first + (plan->cut_offset[j] - 1) * b->hidden_stride, bytes);
    }
    memcpy(slab_hidden(b, plan->slab), first + (plan->committed - 1) * b->hidden_stride, bytes);
  }
}

int cpu_run(Backend *b, const Wave *wave, ksl_done *done, ksl_error *error) {
  b->wave = wave;
  for (int i = 0; i < wave->n_taps; i++) wave->taps[i].written = 0;
  for (int i = 0; i < wave->n_edits; i++) {
    const ksl_edit *edit = &wave->edits[i];
    memcpy(
        b->tables + static_cast<size_t>(edit->slot) * b->config->max_blocks_per_slot + edit->start,
        wave->block_ids + edit->offset, edit->n * sizeof(int32_t));
  }
  for (int i = 0; i < wave->n_before; i++) run_op(b, &wave->before[i]);
  if (b->fault) return fail(error, KSL_FATAL, "A fault was asked for.");

  int code = plan_rows(b, wave, done, error);
  if (code) return code;
  if (b->trunk.n > 0) {
    b->batch = &b->trunk;
    batch_rotary(b, b->batch);
    codes_refresh(b);
    walk(b, kListInput, 0);
    for (int layer = 0; layer < b->spec->layers; layer++) {
      walk(b, b->layers[layer].kind == KSL_LAYER_FULL ? kListFull : kListLinear, layer);
    }
    walk(b, kListOutput, 0);
    gdn_commit_kept(b);
    ring_commit_kept(b);
    if (b->spec->mtp_layers) mtp_follow(b);
    commit_hidden(b);
    if (b->spec->mtp_layers) mtp_propose(b);
  }
  for (int i = 0; i < b->n_rows; i++) {
    RowPlan *plan = &b->rows[i];
    if (plan->n) plan->done->position = plan->row->start + plan->committed;
    plan->done->proposed = plan->slot->n_drafts;
    memcpy(plan->done->drafts, plan->slot->drafts, plan->slot->n_drafts * sizeof(int32_t));
  }
  for (int i = 0; i < wave->n_after; i++) run_op(b, &wave->after[i]);
  b->wave = nullptr;
  return KSL_OK;
}

const BackendOps kCpuOps = {"cpu", cpu_open, cpu_info, cpu_run, mtp_finish, nullptr, cpu_close};

}  // namespace

const BackendOps *default_backend(void) {
  return &kCpuOps;
}

}  // namespace ksl
