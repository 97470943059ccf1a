// Bytes of every pool for a configuration: what open allocates and what the memory plan prints.
// Also the one place that says how a slab image and a block image are laid out.
#pragma once
#include "abi.h"
#include "kv_row.h"
#include "model.h"

namespace ksl {

// A slab image is float32: delta, then conv, then hidden; behind them the ring of INT8RING_INT4.
//   delta  [linear_layers][lin_value_heads][lin_key_dim][lin_value_dim]
//   conv   [linear_layers][conv_taps - 1][conv_channels], oldest column first
//   hidden [hidden]
//   ring   per trunk KV layer four planes [kv_ring][kv_heads][bytes of an INT8_G64 row], in the
//   order
//          of a block's; position p is at p % kv_ring, zeros where there was none
// A block image is, per KV layer, four planes [block_tokens][kv_heads][bytes of KvRow]: K values, K
// scales, V values, V scales. Backends may hold blocks in another order.
struct Budget {
  uint64_t delta_floats, conv_floats, hidden_floats;
  uint64_t ring_bytes;  // a multiple of 4
  uint64_t slab_bytes;
  uint64_t kv_token_bytes;  // K and V of one token in every KV layer
  uint64_t block_bytes;
  uint64_t table_bytes;     // block tables of all slots, the engine's copy and the validator's
  uint64_t slot_bytes;      // sampling state of one slot
  uint64_t pool_bytes;      // all slabs, blocks, tables and slots
  int32_t slot_tokens;      // tokens that a slot's block table spans
  int32_t forced_capacity;  // ids that a FORCE op may give: slot_tokens with test hooks, else 0
};

// Checks the pool and execution fields of the configuration and fills the budget. `spec` is valid.
int budget_init(Budget *budget, const ModelSpec *spec, const ksl_config *config, ksl_error *error);

}  // namespace ksl
