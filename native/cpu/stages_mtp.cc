// The MTP head: its keys and values follow every committed position, so that drafting can start
// anywhere; its whole layer runs for drafts only. The row of position p is made from
// (token p, trunk hidden p - 1); there is no row 0.
#include <string.h>

#include "../common/thread.h"
#include "state.h"

namespace ksl {

namespace {

void input_task(void *context, int, int begin, int end) {
  const Backend *b = static_cast<const Backend *>(context);
  const int h = b->spec->hidden;
  for (int c = begin; c < end; c++) {
    float *embedding = b->x + c * b->hidden_stride;
    float *out = b->mtp_in + c * b->mtp_stride;
    matrix_row(&b->embedding, b->batch->token[c], embedding);
    b->kernels->rmsnorm(embedding, b->mtp_norm_embedding, h, b->spec->norm_eps, out);
    b->kernels->rmsnorm(b->batch->hidden[c], b->mtp_norm_hidden, h, b->spec->norm_eps, out + h);
  }
}

// Hidden states and embeddings, normed: what the layer's input is made of.
void read_columns(Backend *b) {
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->hidden * 3, input_task, b);
}

void project_input(Backend *b) {
  const Projection projection = {&b->mtp_fc, b->x, b->hidden_stride};
  project(b, &projection, 1, b->mtp_in, b->mtp_stride, b->batch->n);
}

// Keys and values of the columns that were read.
void follow_columns(Backend *b) {
  const int layer = b->spec->layers;
  project_input(b);
  b->kv_only = true;
  stage_in_norm(b, layer);
  stage_attn_project(b, layer);
  stage_attn_heads(b, layer);
  stage_attn_store(b, layer);
  b->kv_only = false;
}

bool may_draft(const RowPlan *row) {
  return row->n && row->row->propose > 0 && row->done->n_tokens > 0 && !row->slot->latched &&
         !row->slot->has_mask;
}

// What is done with each committed column of the wave.
using ColumnUse = void (*)(Backend *b, int column);

void each_committed(Backend *b, ColumnUse use) {
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    for (int j = 0; row->n && j < row->committed; j++) use(b, row->column + j);
  }
}

void wait_column(Backend *b, int column) {
  backlog_add(b, b->batch, column);
}

// Its keys and values are made now.
void made_column(Backend *b, int column) {
  const int position = b->batch->position[column];
  const int block = block_of(b, b->batch->slot[column], position);
  backlog_forget(b, block, position % b->config->block_tokens);
}

// What waits of the rows that read it in this wave.
void settle_rows(Backend *b, bool (*reads)(const RowPlan *row)) {
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    if (reads(row)) backlog_gather(b, row->row->slot, row->row->start + row->committed);
  }
  backlog_settle(b);
}

bool has_columns(const RowPlan *row) {
  return row->n > 0;
}

struct DraftTask {
  Backend *b;
  const HeadJob *jobs;  // row, step
};

// Draws the next draft of each row from the logits of its column.
void draft_task(void *context, int worker, int begin, int end) {
  const DraftTask *t = static_cast<const DraftTask *>(context);
  Backend *b = t->b;
  for (int i = begin; i < end; i++) {
    RowPlan *row = &b->rows[t->jobs[i].row];
    SlotState *slot = row->slot;
    const int64_t position =
        static_cast<int64_t>(row->row->start) + row->committed + 1 + t->jobs[i].offset;
    int32_t id = -1;
    if (!sample_draft(slot, b->logits + i * b->vocab_stride, b->draft_vocab, b->draft_limit,
                      position, b->config->draft_margin, &b->workers[worker].sample, &id)) {
      row->done->flags |= KSL_DONE_BAD_DRAFT;
      row->ended = true;
      continue;
    }
    if (id < 0) {
      row->ended = true;
      continue;
    }
    slot->drafts[slot->n_drafts++] = id;
    for (int k = 0; k < slot->n_stop; k++) {
      if (slot->stop_ids[k] == id) row->ended = true;  // nothing after it can be accepted
    }
  }
}

// The rows that draft step `step`, as one column each.
int gather_drafts(Backend *b, HeadJob *jobs, int n_before, int step) {
  Batch *batch = &b->drafts;
  int n = 0;
  for (int i = 0; i < n_before; i++) {
    const RowPlan *row = &b->rows[jobs[i].row];
    const SlotState *slot = row->slot;
    if (row->ended || step >= row->row->propose) continue;
    batch->token[n] = step ? slot->drafts[step - 1] : slot->last_token;
    batch->position[n] = row->row->start + row->committed + step;
    batch->slot[n] = row->row->slot;
    batch->hidden[n] = step ? b->chain + i * b->hidden_stride : slab_hidden(b, row->slab);
    jobs[n] = {jobs[i].row, step};
    n++;
  }
  batch->n = n;
  return n;
}

}  // namespace

void stage_mtp_input(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  read_columns(b);
  project_input(b);
}

void stage_mtp_norm(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  norm_columns(b, b->x, b->mtp_norm, b->chain, b->batch->n);
  for (int c = 0; c < b->batch->n; c++) {
    if (b->batch->position[c] == 0) {
      memset(b->chain + c * b->hidden_stride, 0, b->spec->hidden * sizeof(float));
    }
  }
}

void stage_mtp_head(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  if (!wants_tap(b->wave, "mtp_logits", false)) return;
  for (int first = 0; first < b->batch->n; first += kHeadBatch) {
    const int n = b->batch->n - first < kHeadBatch ? b->batch->n - first : kHeadBatch;
    for (int c = 0; c < n; c++) {
      memcpy(b->head_in + c * b->hidden_stride, b->chain + (first + c) * b->hidden_stride,
             b->spec->hidden * sizeof(float));
    }
    head_logits(b, n);
    tap_append(b, kTapMtpLogits, 0,
               {b->logits, static_cast<int64_t>(b->vocab_stride), n, 1, b->spec->vocab, 0});
  }
}

void mtp_follow(Backend *b) {
  const int layer = b->spec->layers;
  Batch *batch = b->batch;
  bool late = b->wave->n_after == 0, drafting = false;
  int committed = 0;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    if (row->row->propose > 0) drafting = true;
    if (row->n) committed += row->committed;
    for (int j = 0; j < row->n; j++) {
      const int c = row->column + j;
      if (j) {
        batch->hidden[c] = b->final + (c - 1) * b->hidden_stride;
      } else {
        batch->hidden[c] = batch->position[c] ? slab_hidden(b, row->slab) : b->zero_hidden;
      }
    }
  }
  const bool tapped = b->wave->n_taps && wants_tap(b->wave, "mtp", true);
  const bool waits = !tapped && committed <= b->mtp_room;
  each_committed(b, waits ? wait_column : made_column);
  if (tapped) {
    settle_rows(b, has_columns);
    walk(b, kListMtpInput, 0);
    walk(b, kListFull, layer);
    walk(b, kListMtpOutput, 0);
  } else if (!waits) {
    read_columns(b);
    if (late && !drafting)
      b->mtp_late = true;
    else
      follow_columns(b);
  }
  if (drafting) {
    const uint64_t begun = now_ns();
    settle_rows(b, may_draft);
    *b->wave->drafts_ns += now_ns() - begun;
  }
}

bool mtp_finish(Backend *b, bool idle) {
  if (idle) return backlog_shrink(b);
  if (b->mtp_late) {
    b->mtp_late = false;
    follow_columns(b);
  }
  backlog_make_room(b);
  return b->backlog.n > 0;
}

void mtp_make(Backend *b, Batch *batch) {
  Batch *before = b->batch;
  b->batch = batch;
  batch_rotary(b, batch);
  read_columns(b);
  follow_columns(b);
  b->batch = before;
}

void mtp_propose(Backend *b) {
  HeadJob *jobs = b->jobs;
  int n = 0;
  for (int r = 0; r < b->n_rows; r++) {
    RowPlan *row = &b->rows[r];
    if (!may_draft(row)) continue;
    row->ended = false;
    jobs[n++] = {r, 0};
  }
  if (!n) return;
  const uint64_t begun = now_ns();
  b->batch = &b->drafts;
  for (int step = 0; (n = gather_drafts(b, jobs, n, step)) > 0; step++) {
    batch_rotary(b, b->batch);
    walk(b, kListMtpInput, 0);
    walk(b, kListFull, b->spec->layers);
    stage_mtp_norm(b, 0);
    for (int first = 0; first < n; first += kHeadBatch) {
      const int part = n - first < kHeadBatch ? n - first : kHeadBatch;
      for (int c = 0; c < part; c++) {
        memcpy(b->head_in + c * b->hidden_stride, b->chain + (first + c) * b->hidden_stride,
               b->spec->hidden * sizeof(float));
      }
      draft_logits(b, part);
      DraftTask task = {b, jobs + first};
      parallel(b, part, static_cast<int64_t>(part) * b->draft_vocab * 8, draft_task, &task);
    }
  }
  b->batch = &b->trunk;
  *b->wave->drafts_ns += now_ns() - begun;
}

}  // namespace ksl
