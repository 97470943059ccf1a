// Final norm and head: logits of the columns that need them, in batches; sampling and scoring.
#include <string.h>

#include "../common/rows.h"
#include "state.h"

namespace ksl {

namespace {

const int kSampleCost = 8;  // per vocabulary entry

// Jobs [0, n) of one head batch; segment s is jobs [segments[s], segments[s + 1]).
struct SampleTask {
  Backend *b;
  const HeadJob *jobs;
  const int *segments;
};

int32_t next_token(const Backend *b, const RowPlan *row, int offset) {
  return b->wave->tokens[row->row->tokens + offset + 1];
}

void score(const Backend *b, const RowPlan *row, int offset, const float *logits) {
  if (!row->row->logprobs) return;
  logprobs_of(logits, b->spec->vocab, next_token(b, row, offset), row->row->top_n,
              row->row->logprobs + static_cast<size_t>(offset) * (1 + row->row->top_n));
}

// Samples after the column `offset` of the row, and decides whether its next column counts.
void sample(const Backend *b, RowPlan *row, int offset, const float *logits,
            SampleScratch *scratch) {
  const ModelSpec *s = b->spec;
  SlotState *slot = row->slot;
  int32_t id = -1;
  if (!sample_token(slot, logits, s->vocab, s->token_limit,
                    static_cast<int64_t>(row->row->start) + offset + 1, nullptr, 0, scratch,
                    nullptr, &id)) {
    id = -1;
  } else if (row->row->logprobs) {
    const int at = row->row->kind == KSL_ROW_VERIFY ? offset : 0;
    logprobs_of(logits, s->vocab, id, row->row->top_n,
                row->row->logprobs + static_cast<size_t>(at) * (1 + row->row->top_n));
  }
  row_take(row, offset, id, b->batch->token + row->column,
           [slot](int32_t taken) { return slot_commit(slot, taken); });
}

void sample_task(void *context, int worker, int begin, int end) {
  const SampleTask *t = static_cast<const SampleTask *>(context);
  Backend *b = t->b;
  for (int i = begin; i < end; i++) {
    for (int j = t->segments[i]; j < t->segments[i + 1]; j++) {
      RowPlan *row = &b->rows[t->jobs[j].row];
      if (row->ended) break;
      const float *logits = b->logits + j * b->vocab_stride;
      if (row->row->kind == KSL_ROW_SCORE) {
        score(b, row, t->jobs[j].offset, logits);
      } else {
        sample(b, row, t->jobs[j].offset, logits, &b->workers[worker].sample);
      }
    }
  }
}

// Jobs in row order: the last column of LAST rows, every column of VERIFY and SCORE rows.
int list_jobs(Backend *b) {
  int n = 0;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    for (int j = first_wanted(row); j < row->n; j++) b->jobs[n++] = {r, j};
  }
  return n;
}

void all_logits(Backend *b) {
  const size_t bytes = b->spec->hidden * sizeof(float);
  for (int first = 0; first < b->batch->n; first += kHeadBatch) {
    const int n = b->batch->n - first < kHeadBatch ? b->batch->n - first : kHeadBatch;
    for (int c = 0; c < n; c++) {
      memcpy(b->head_in + c * b->hidden_stride, b->final + (first + c) * b->hidden_stride, bytes);
    }
    head_logits(b, n);
    tap_append(b, kTapLogits, 0,
               {b->logits, static_cast<int64_t>(b->vocab_stride), n, 1, b->spec->vocab, 0});
  }
}

}  // namespace

void head_logits(Backend *b, int n) {
  const Projection projection = {&b->head, b->logits, b->vocab_stride};
  project(b, &projection, 1, b->head_in, b->hidden_stride, n);
}

void draft_logits(Backend *b, int n) {
  const Projection projection = {&b->draft_head, b->logits, b->vocab_stride};
  project(b, &projection, 1, b->head_in, b->hidden_stride, n);
}

void stage_final_norm(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  norm_columns(b, b->x, b->final_norm, b->final, b->batch->n);
}

void stage_head(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  if (b->wave->n_taps && wants_tap(b->wave, "logits", false)) all_logits(b);
  const int n_jobs = list_jobs(b);
  int segments[kHeadBatch + 1];
  for (int next = 0; next < n_jobs;) {
    // Compacts the jobs of this batch to the front of the list, behind those already done.
    HeadJob *jobs = b->jobs + next;
    int n = 0, n_segments = 0;
    for (; next < n_jobs && n < kHeadBatch; next++) {
      const HeadJob job = b->jobs[next];
      const RowPlan *row = &b->rows[job.row];
      if (row->ended) continue;
      if (!n || jobs[n - 1].row != job.row || row->row->kind == KSL_ROW_SCORE) {
        segments[n_segments++] = n;
      }
      jobs[n] = job;
      memcpy(b->head_in + n * b->hidden_stride,
             b->final + (row->column + job.offset) * b->hidden_stride,
             b->spec->hidden * sizeof(float));
      n++;
    }
    if (!n) continue;
    segments[n_segments] = n;
    head_logits(b, n);
    SampleTask task = {b, jobs, segments};
    parallel(b, n_segments, static_cast<int64_t>(n) * b->spec->vocab * kSampleCost, sample_task,
             &task);
  }
}

}  // namespace ksl
