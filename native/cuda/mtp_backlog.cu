// MTP keys and values that are not made yet: nobody reads them until somebody drafts, and those of
// many columns together take little more than those of one. The columns of plain waves wait with
// the hidden states that they are made from. A row is found by the table of its slot, so all are
// made before a wave in which a slot does not go on behind them, its table changes there, or state
// is moved: until then the blocks are its own, since one that is freed is not written before.
#include "../common/rows.h"
#include "../common/thread.h"
#include "embed/embed.cuh"
#include "mtp/input.cuh"
#include "state.cuh"

namespace ksl {

namespace {

int room(const Backend *b) {
  return b->column_capacity < kMostWaiting ? b->column_capacity : kMostWaiting;
}

bool is_plain(const Backend *b) {
  const Wave *wave = b->wave;
  if (wave->n_taps > 0 || wave->n_rows > room(b)) return false;
  if (moves_state(wave)) return false;
  for (int i = 0; i < wave->n_rows; i++) {
    const ksl_row *row = &wave->rows[i];
    if (row->propose > 0 || row->n_cuts > 0 || row_tokens(wave, row, &b->slots[row->slot]).n > 1)
      return false;
  }
  return true;
}

// Whether the rows of the wave go on behind all that wait, and may wait themselves.
bool goes_on(const Backend *b) {
  const Wave *wave = b->wave;
  if (!b->plain || b->n_waiting + wave->n_rows > room(b)) return false;
  for (int i = 0; i < wave->n_edits; i++) {
    const ksl_edit *edit = &wave->edits[i];
    if (edit->start * b->config->block_tokens < b->slots[edit->slot].waits_until) return false;
  }
  int slots = 0;
  for (int i = 0; i < wave->n_rows; i++) {
    const ksl_row *row = &wave->rows[i];
    const Slot *slot = &b->slots[row->slot];
    if (!slot->waits_until) continue;
    if (row->start != slot->waits_until || row_tokens(wave, row, slot).n == 0) return false;
    slots++;
  }
  return slots == b->slots_waiting;
}

// Only launches. fetches: what was planned, too.
void follow(Backend *b, bool fetches) {
  if (fetches) {
    const PlanArgs plan = {
        {{b->columns, b->d_columns, b->batch.n, kColumnArrays, b->column_capacity}}, 1};
    fetch_plan(&b->device, plan);
  }
  rotary(&b->device, b->batch, rotary_of(b));
  mtp_follow(b);
}

void make_waiting(Backend *b) {
  const int capacity = b->column_capacity, n = b->n_waiting;
  int columns = 1;  // a shape takes little longer than the one before
  while (columns < n) columns *= 2;
  const bool shaped = columns <= capacity;
  if (!shaped) columns = n;
  for (int i = 0; i < columns; i++) {
    blank_column(b, i);
    if (i >= n) continue;
    const WaitingColumn &column = b->waiting[i];
    b->columns[kToken * capacity + i] = column.token;
    b->columns[kPosition * capacity + i] = column.position;
    b->columns[kSlotOf * capacity + i] = column.slot;
    if (column.position > 0) b->columns[kSource * capacity + i] = i;
    b->slots[column.slot].waits_until = 0;
  }
  b->n_waiting = b->slots_waiting = 0;
  b->batch.n = columns;
  b->trunk = false;
  b->hidden_of = kOfWaiting;
  b->most_position = 0;
  form_splits(b);
  if (shaped) {
    run_shaped(b, {kBacklogPart, columns, 0, 0, 0, 0, 0, 0}, [](Backend *of) { follow(of, true); });
  } else {
    upload_columns(b, columns);
    follow(b, false);
  }
  synchronize(b, "making MTP keys");  // their plan is where the wave's will be
}

}  // namespace

void backlog_begin(Backend *b) {
  b->plain = is_plain(b);
  if (b->n_waiting == 0 || goes_on(b)) return;
  bool drafts = false;
  for (int i = 0; i < b->wave->n_rows; i++) drafts |= b->wave->rows[i].propose > 0;
  const uint64_t begun = now_ns();
  make_waiting(b);
  if (drafts) *b->wave->drafts_ns += now_ns() - begun;
}

int backlog_add(Backend *b, const WaitingColumn &column) {
  if (!b->spec->mtp_layers) return kSourceZero;
  Slot *slot = &b->slots[column.slot];
  b->slots_waiting += slot->waits_until == 0;
  slot->waits_until = column.position + 1;
  b->waiting[b->n_waiting] = column;
  return b->n_waiting++;
}

}  // namespace ksl
