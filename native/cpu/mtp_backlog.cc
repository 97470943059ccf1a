// Committed columns whose MTP keys and values are not made yet: nobody reads them until somebody
// drafts, and many of them together cost less. They lie in a ring, oldest first, with the hidden
// state that they are made from, and are found by the block that they belong to, so that blocks may
// be shared, copied and given to another sequence meanwhile.
#include <string.h>

#include "state.h"

namespace ksl {

namespace {

// In `of_block` and `next`: an entry's place in the ring, and one more; 0 is none. The list of a
// block begins with its last position.

int offset_of(const Backend *b, int entry) {
  return b->backlog.position[entry] % b->config->block_tokens;
}

// The oldest entries that are settled or forgotten already.
void pass_holes(Backlog *log) {
  while (log->n && log->block[log->first] < 0) {
    log->first = (log->first + 1) % log->room;
    log->n--;
  }
}

void make_gathered(Backend *b) {
  if (!b->waiting.n) return;
  mtp_make(b, &b->waiting);
  b->waiting.n = 0;
}

// Has an entry made with those gathered before it; its list forgets it.
void gather(Backend *b, int entry) {
  Backlog *log = &b->backlog;
  Batch *batch = &b->waiting;
  const int c = batch->n++;
  batch->token[c] = log->token[entry];
  batch->position[c] = log->position[entry];
  batch->block[c] = log->block[entry];
  batch->hidden[c] = log->hidden + entry * b->hidden_stride;
  log->block[entry] = -1;
  if (batch->n == b->mtp_room) make_gathered(b);
}

void gather_block(Backend *b, int block) {
  Backlog *log = &b->backlog;
  for (int at = log->of_block[block]; at; at = log->next[at - 1]) gather(b, at - 1);
  log->of_block[block] = 0;
}

// Makes blocks of the oldest entries until no more than `most` are left.
void make_oldest(Backend *b, int most) {
  Backlog *log = &b->backlog;
  while (log->n > 0 && log->n > most) {
    gather_block(b, log->block[log->first]);
    pass_holes(log);
  }
  make_gathered(b);
}

}  // namespace

int backlog_rows(const Backend *b) {
  const size_t fit = kBacklogBytes / (b->hidden_stride * sizeof(float));
  return fit < kBacklogLeast ? kBacklogLeast : fit < kBacklogMost ? int(fit) : kBacklogMost;
}

void backlog_forget(Backend *b, int block, int offset) {
  Backlog *log = &b->backlog;
  if (!log->n) return;
  int *head = &log->of_block[block];
  while (*head && offset_of(b, *head - 1) >= offset) {
    log->block[*head - 1] = -1;
    *head = log->next[*head - 1];
  }
}

void backlog_add(Backend *b, const Batch *batch, int column) {
  Backlog *log = &b->backlog;
  const int entry = (log->first + log->n++) % log->room;
  const int position = batch->position[column];
  const int block = block_of(b, batch->slot[column], position);
  backlog_forget(b, block, position % b->config->block_tokens);
  log->token[entry] = batch->token[column];
  log->position[entry] = position;
  log->block[entry] = block;
  log->next[entry] = log->of_block[block];
  log->of_block[block] = entry + 1;
  memcpy(log->hidden + entry * b->hidden_stride, batch->hidden[column],
         b->spec->hidden * sizeof(float));
}

void backlog_gather(Backend *b, int slot, int positions) {
  if (!b->backlog.n) return;
  for (int at = 0; at < positions; at += b->config->block_tokens)
    gather_block(b, block_of(b, slot, at));
}

void backlog_settle(Backend *b) {
  make_gathered(b);
  pass_holes(&b->backlog);
}

void backlog_settle_block(Backend *b, int block) {
  if (!b->backlog.n) return;
  gather_block(b, block);
  backlog_settle(b);
}

void backlog_make_room(Backend *b) {
  Backlog *log = &b->backlog;
  pass_holes(log);
  if (log->room - log->n < b->mtp_room) make_oldest(b, log->room - b->mtp_room - kMtpBatch);
}

bool backlog_shrink(Backend *b) {
  Backlog *log = &b->backlog;
  pass_holes(log);
  make_oldest(b, log->n - kMtpBatch);
  return log->n > 0;
}

}  // namespace ksl
