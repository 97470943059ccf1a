// Head columns, sampling and acceptance, and the MTP drafts that follow.
#include <string.h>

#include "../common/rows.h"
#include "../common/thread.h"
#include "embed/embed.cuh"
#include "head/gather.cuh"
#include "mtp/input.cuh"
#include "state.cuh"

namespace ksl {

namespace {

int32_t next_token(const Backend *b, const RowPlan *row, int offset) {
  return b->wave->tokens[row->row->tokens + offset + 1];
}

bool grow_entries(Backend *b, int n) {
  if (n <= b->entries_capacity) return true;
  synchronize(b, "sampling");
  cudaFree(b->d_entries);
  alloc_free(b->entries);
  b->entries_capacity = 0;
  b->entries = alloc_many<ksl_logprob>(b->alloc, n);
  if (!b->entries || !keep_error(&b->device, cudaMalloc(&b->d_entries, n * sizeof(ksl_logprob)),
                                 "allocating log-probabilities")) {
    keep_error(&b->device, cudaErrorMemoryAllocation, "allocating log-probabilities");
    return false;
  }
  b->entries_capacity = n;
  return true;
}

// Counts one committed id, as common/sample.cc does; true if it ends the sequence.
bool commit_id(Backend *b, int index, Slot *slot, int32_t id) {
  if (slot->use_counts) mark_output(&b->device, b->slot_arrays, index, id);
  slot->last_token = id;
  for (int i = 0; i < slot->n_stop; i++)
    if (slot->stop_ids[i] == id) slot->latched = true;
  return slot->latched;
}

// What row `r` makes of the id sampled after its column `offset`.
void take(Backend *b, RowPlan *row, int offset, int32_t sampled) {
  Slot *slot = row->slot;
  const int32_t id = slot->forced_at < slot->forced_n ? slot->forced[slot->forced_at++] : sampled;
  row_take(row, offset, id, b->columns + kToken * b->column_capacity + row->column,
           [=](int32_t taken) { return commit_id(b, row->row->slot, slot, taken); });
}

}  // namespace

Split head_split_of(const Backend *b, int n) {
  Split split = b->head_split;
  if (b->head.n_packed == 0) split.data = nullptr;
  split.rows = quads_take(b->major, n);
  return split;
}

void plan_head(Backend *b) {
  int n = 0, n_logprobs = 0, entries = 0;
  for (int r = 0; r < b->n_rows; r++) {
    const RowPlan *row = &b->rows[r];
    const ksl_row *asked = row->row;
    const bool scores = asked->kind == KSL_ROW_SCORE;
    const int first = first_wanted(row);
    for (int j = first; j < row->n; j++) {
      SampleJob *job = &b->sample_jobs[n];
      *job = SampleJob{};
      job->slot = asked->slot;
      job->position = static_cast<int64_t>(asked->start) + j + 1;
      if (asked->kind == KSL_ROW_VERIFY) {
        job->n_drafts = j;
        memcpy(job->drafts, b->columns + kToken * b->column_capacity + row->column + 1,
               j * sizeof(int32_t));
      }
      if (asked->logprobs) {
        // A forced id replaces the sampled one.
        const Slot *slot = row->slot;
        const int forced_at = slot->forced_at + j - first;
        const bool forced = !scores && forced_at < slot->forced_n;
        LogprobJob *logprob = &b->logprob_jobs[n_logprobs++];
        logprob->row = n % kHeadBatch;
        logprob->sampled = scores || forced ? -1 : n;
        logprob->id = scores ? next_token(b, row, j) : (forced ? slot->forced[forced_at] : -1);
        logprob->top_n = asked->top_n;
        logprob->out = entries;
        entries += 1 + asked->top_n;
      }
      b->job_columns[n] = row->column + j;
      b->jobs[n++] = {r, j};
    }
  }
  b->n_jobs = b->head_jobs = n;
  b->head_direct = !b->taps && n == b->batch.n && n <= kHeadBatch;
  for (int i = 0; i < n && b->head_direct; i++) b->head_direct = b->job_columns[i] == i;
  b->n_logprob_jobs = n_logprobs;
  b->logprob_entries = entries;
}

void upload_head(Backend *b) {
  if (b->n_jobs == 0 || !grow_entries(b, b->logprob_entries)) return;
  if (b->shaped) return;
  upload(b, b->d_head_columns, b->job_columns, b->n_jobs * sizeof(int32_t));
  upload(b, b->d_sample_jobs, b->sample_jobs, b->n_jobs * sizeof(SampleJob));
  upload(b, b->d_logprob_jobs, b->logprob_jobs, b->n_logprob_jobs * sizeof(LogprobJob));
}

void tap_logits(Backend *b, const float *from, Tap tap) {
  const ModelSpec *s = b->spec;
  for (int first = 0; first < b->batch.n; first += kHeadBatch) {
    const int n = b->batch.n - first < kHeadBatch ? b->batch.n - first : kHeadBatch;
    // Not what is pinned: a copy from there may still be read when the next is planned.
    int32_t columns[kHeadBatch];
    for (int i = 0; i < n; i++) columns[i] = first + i;
    upload(b, b->d_job_columns, columns, n * sizeof(int32_t));
    gather_columns(&b->device, from, b->hidden_stride, s->hidden, b->d_job_columns, b->head_in,
                   head_split_of(b, n), n);
    head_logits(b, b->head_in, n, s->vocab);
    tap_append(b, tap, 0, {b->logits, b->vocab_stride, n, 1, s->vocab, 0});
  }
}

void run_head(Backend *b) {
  const ModelSpec *s = b->spec;
  if (b->taps && wants_tap(b->wave, "logits", false)) tap_logits(b, b->final, kTapLogits);
  int logprob = 0;
  for (int first = 0; first < b->head_jobs; first += kHeadBatch) {
    const int n = b->head_jobs - first < kHeadBatch ? b->head_jobs - first : kHeadBatch;
    if (!b->head_direct)
      gather_columns(&b->device, b->final, b->hidden_stride, s->hidden, b->d_head_columns + first,
                     b->head_in, head_split_of(b, n), n);
    head_logits(b, b->head_direct ? b->final : b->head_in, n, s->vocab);
    // Jobs of SCORE rows are sampled too where they lie among others; nobody reads those.
    bool any = false;
    int with_logprobs = 0;
    for (int i = first; i < first + n && i < b->n_jobs; i++) {
      const ksl_row *row = b->rows[b->jobs[i].row].row;
      any |= row->kind != KSL_ROW_SCORE;
      with_logprobs += row->logprobs != nullptr;
    }
    if (any)
      sample_columns(&b->device, b->slot_arrays, b->d_sample_jobs + first, n, b->logits,
                     b->sampling, b->vocab_stride, b->ids + first);
    if (with_logprobs)
      logprobs(&b->device, b->d_logprob_jobs + logprob, with_logprobs, b->logits, b->vocab_stride,
               s->vocab, b->ids, b->d_entries);
    logprob += with_logprobs;
  }
}

namespace {

// What no kernel writes as a sample.
constexpr int32_t kNotSampled = INT32_MIN;

}  // namespace

void expect_samples(Backend *b, bool awaited, int n) {
  b->awaited = awaited && n > 0;
  for (int i = 0; i < n && b->awaited; i++) b->ids[i] = kNotSampled;
}

// They are in the host's memory before the device tells that all is done, which is asked for now
// and then, since it may have failed.
bool await_samples(Backend *b, int n, const char *what) {
  if (!b->awaited) return synchronize(b, what);
  constexpr int kAsk = 1 << 14;
  const volatile int32_t *ids = b->ids;
  for (int i = 0, looks = 1; i < n; looks++) {
    if (ids[i] != kNotSampled) {
      i++;
    } else if (looks % kAsk == 0 && cudaStreamQuery(b->device.stream) != cudaErrorNotReady) {
      return synchronize(b, what);
    } else {
      thread_relax();
    }
  }
  return true;
}

// Waits for the samples and applies them.
void finish_head(Backend *b) {
  if (b->n_jobs == 0) return;
  const auto fetch = [b](void *to, const void *from, size_t bytes) {
    if (bytes)
      keep_error(&b->device,
                 cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, b->device.stream),
                 "copying samples");
  };
  fetch(b->entries, b->d_entries, b->logprob_entries * sizeof(ksl_logprob));
  if (!await_samples(b, b->head_jobs, "running a wave")) return;
  int logprob = 0;
  for (int i = 0; i < b->n_jobs; i++) {
    RowPlan *row = &b->rows[b->jobs[i].row];
    const ksl_row *asked = row->row;
    const ksl_logprob *entries = nullptr;
    if (asked->logprobs) entries = b->entries + b->logprob_jobs[logprob++].out;
    if (row->ended) continue;
    const bool scores = asked->kind == KSL_ROW_SCORE;
    const int offset = b->jobs[i].offset;
    const int at = asked->kind == KSL_ROW_LAST ? 0 : offset;
    if (!scores) {
      take(b, row, offset, b->ids[i]);
      if (row->done->flags & KSL_DONE_BAD_LOGITS) continue;
    }
    if (entries)
      memcpy(asked->logprobs + static_cast<size_t>(at) * (1 + asked->top_n), entries,
             (1 + asked->top_n) * sizeof(ksl_logprob));
  }
}

void mtp_follow(Backend *b) {
  const int layer = b->spec->layers;
  walk(b, kListMtpInput, 0);
  if (b->taps && wants_tap(b->wave, "mtp", true)) {
    walk(b, kListFull, layer);
    walk(b, kListMtpOutput, 0);
    return;
  }
  b->kv_only = true;
  const StageTable *table = stage_table(kListFull);
  for (int i = 0; i < 3; i++) table->spans[i].run(b, layer);  // in_norm, project, heads and store
  b->kv_only = false;
}

namespace {

// One draft of every column, up to its ids; only launches. fetches: what was planned, too.
void draft_columns(Backend *b, bool fetches) {
  const ModelSpec *s = b->spec;
  const int n = b->batch.n, cap = b->config->draft_vocab;
  const int vocab = cap > 0 && cap < s->vocab ? cap : s->vocab;
  if (fetches) {
    const int words = n * static_cast<int>(sizeof(SampleJob) / sizeof(int32_t));
    const PlanArgs plan = {{{b->columns, b->d_columns, n, kColumnArrays, b->column_capacity},
                            {b->job_columns, b->d_job_columns, n, 1, 0},
                            {b->sample_jobs, b->d_sample_jobs, words, 1, 0}},
                           3};
    fetch_plan(&b->device, plan);
  }
  rotary(&b->device, b->batch, rotary_of(b));
  walk(b, kListMtpInput, 0);
  walk(b, kListFull, s->layers);
  for (int first = 0; first < n; first += kHeadBatch) {
    const int part = n - first < kHeadBatch ? n - first : kHeadBatch;
    if (!b->head_direct)
      gather_columns(&b->device, b->chain, b->hidden_stride, s->hidden, b->d_job_columns + first,
                     b->head_in, head_split_of(b, part), part);
    head_logits(b, b->head_direct ? b->chain : b->head_in, part, vocab);
    sample_drafts(&b->device, b->slot_arrays, b->d_sample_jobs + first, part, vocab,
                  b->config->draft_margin, b->logits, b->sampling, b->vocab_stride, b->ids + first);
  }
}

// Plans the columns of draft `step` of `rows`; returns how many.
int plan_drafts(Backend *b, HeadJob *jobs, int rows, int step) {
  const int capacity = b->column_capacity;
  int32_t *token = b->columns + kToken * capacity, *position = b->columns + kPosition * capacity;
  int32_t *slot_of = b->columns + kSlotOf * capacity, *source = b->columns + kSource * capacity;
  int n = 0;
  b->most_position = 0;
  for (int i = 0; i < rows; i++) {
    const RowPlan *row = &b->rows[jobs[i].row];
    const Slot *slot = row->slot;
    if (row->ended || step >= row->row->propose) continue;
    token[n] = step ? slot->drafts[step - 1] : slot->last_token;
    position[n] = row->row->start + row->committed + step;
    if (position[n] > b->most_position) b->most_position = position[n];
    slot_of[n] = row->row->slot;
    source[n] = step ? i : row->row->slab;
    SampleJob *job = &b->sample_jobs[n];
    *job = SampleJob{};
    job->slot = row->row->slot;
    job->position = static_cast<int64_t>(position[n]) + 1;
    job->n_drafts = slot->n_drafts;
    memcpy(job->drafts, slot->drafts, slot->n_drafts * sizeof(int32_t));
    b->job_columns[n] = n;
    jobs[n++] = {jobs[i].row, step};
  }
  return n;
}

}  // namespace

void mtp_propose(Backend *b) {
  HeadJob *jobs = b->jobs;
  int n = 0;
  for (int r = 0; r < b->n_rows; r++) {
    RowPlan *row = &b->rows[r];
    if (!row->n || row->row->propose <= 0 || row->done->n_tokens == 0 || row->slot->latched ||
        row->slot->has_mask)
      continue;
    row->ended = false;
    jobs[n++] = {r, 0};
  }
  if (!n) return;
  const uint64_t begun = now_ns();
  const Columns trunk = b->batch;
  b->trunk = false;
  for (int step = 0;; step++) {
    n = plan_drafts(b, jobs, n, step);
    if (n == 0) break;
    int columns = shape_columns(n);
    const bool shaped = !b->taps && columns <= kWideTokens && columns <= b->column_capacity;
    if (!shaped) columns = n;
    for (int i = n; i < columns; i++) {
      blank_column(b, i);
      b->sample_jobs[i] = SampleJob{};
      b->job_columns[i] = i;
    }
    b->batch.n = columns;
    form_splits(b);
    b->hidden_of = step > 0 ? kOfChain : kOfSlabs;
    b->head_direct = !b->taps && columns <= kHeadBatch;
    expect_samples(b, shaped, columns);
    if (shaped) {
      run_shaped(b, {kDraftPart, columns, 0, 0, step > 0, 0, b->head_direct, 0},
                 [](Backend *of) { draft_columns(of, true); });
    } else {
      upload_columns(b, columns);
      upload(b, b->d_job_columns, b->job_columns, columns * sizeof(int32_t));
      upload(b, b->d_sample_jobs, b->sample_jobs, columns * sizeof(SampleJob));
      draft_columns(b, false);
    }
    if (!await_samples(b, columns, "drafting")) break;
    for (int i = 0; i < n; i++) {
      RowPlan *row = &b->rows[jobs[i].row];
      Slot *slot = row->slot;
      const int32_t id = b->ids[i];
      if (id < 0) {
        if (id == -1) row->done->flags |= KSL_DONE_BAD_DRAFT;
        row->ended = true;
        continue;
      }
      slot->drafts[slot->n_drafts++] = id;
      for (int k = 0; k < slot->n_stop; k++)
        if (slot->stop_ids[k] == id) row->ended = true;  // nothing after it can be accepted
    }
  }
  b->trunk = true;
  b->batch = trunk;
  *b->wave->drafts_ns += now_ns() - begun;
}

}  // namespace ksl
