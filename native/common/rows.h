// Rows of a wave as the host sees them, the same for every backend: which tokens a row has, which
// of its columns are sampled, and what it makes of an id. Slots and rows are a backend's own
// structs with fields of these names:
//   Slot  latched, has_mask, last_token, drafts, n_drafts
//   Row   row, done, slot, n, committed, ended
#pragma once
#include "backend.h"

namespace ksl {

// first: the id of the first column; rest: those of the others. n is 0 where the sequence has
// ended.
struct RowTokens {
  int n;
  int32_t first;
  const int32_t *rest;
};

template <class Slot>
inline RowTokens row_tokens(const Wave *wave, const ksl_row *row, const Slot *slot) {
  const int32_t *tokens = wave->tokens + row->tokens;
  const int32_t first = tokens[0] < 0 ? slot->last_token : tokens[0];
  if (slot->latched || first < 0) return {0, -1, nullptr};
  RowTokens found = {row->n, first, tokens + 1};
  if (row->kind != KSL_ROW_VERIFY) return found;
  if (row->draft == KSL_DRAFT_OWN) {
    found.rest = slot->drafts;
    if (found.n > 1 + slot->n_drafts) found.n = 1 + slot->n_drafts;
  }
  // A mask holds for one position.
  if (slot->has_mask || row->draft == KSL_DRAFT_NONE) found.n = 1;
  return found;
}

// The first of the columns after which the row wants scores or an id; row->n where it wants none.
template <class Row>
inline int first_wanted(const Row *row) {
  const ksl_row *asked = row->row;
  if (asked->kind == KSL_ROW_PREFILL) return row->n;
  if (asked->kind == KSL_ROW_SCORE) return asked->logprobs ? 0 : row->n;
  return asked->kind == KSL_ROW_LAST && row->n > 0 ? row->n - 1 : 0;
}

// The id after column `offset` of a row, -1 where its scores are no numbers. tokens: ids of the
// row's columns. commit(id): counts it, true if it ends the sequence. Decides whether the next
// column of a row of drafts counts.
template <class Row, class Commit>
inline void row_take(Row *row, int offset, int32_t id, const int32_t *tokens, Commit commit) {
  ksl_done *done = row->done;
  const bool verify = row->row->kind == KSL_ROW_VERIFY;
  if (verify) {
    row->committed = offset + 1;
    done->accepted = offset;
  }
  row->ended = true;
  if (id < 0) {
    row->slot->latched = true;
    done->flags |= KSL_DONE_BAD_LOGITS;
    return;
  }
  done->tokens[done->n_tokens++] = id;
  if (commit(id))
    done->flags |= KSL_DONE_STOP;
  else if (verify && offset + 1 < row->n && tokens[offset + 1] == id)
    row->ended = false;
}

}  // namespace ksl
