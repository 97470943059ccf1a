#include "budget.h"

#include "error.h"
#include "sample.h"

namespace ksl {
namespace {

struct Range {
  const char *field;
  int64_t value, low, high;
};

// a * b + c with saturation, so that one comparison at the end finds any overflow.
uint64_t mul_add(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out) || __builtin_add_overflow(out, c, &out)) return UINT64_MAX;
  return out;
}

uint64_t mul(uint64_t a, uint64_t b) {
  return mul_add(a, b, 0);
}

int check_config(const ksl_config *c, ksl_error *error) {
  const Range ranges[] = {
      {"slots", c->slots, 1, 4096},
      {"slabs", c->slabs, 1, 1 << 20},
      {"blocks", c->blocks, 1, 1 << 28},
      {"block_tokens", c->block_tokens, 16, 4096},
      {"max_blocks_per_slot", c->max_blocks_per_slot, 1, 1 << 20},
      {"wave_columns", c->wave_columns, 1, 1 << 16},
      {"ring_depth", c->ring_depth, 1, 64},
      {"kv_format", c->kv_format, KSL_KV_F32, KSL_KV_INT8RING_INT4},
      {"kv_ring", c->kv_ring, 0, 1 << 20},
      {"activations", c->activations, KSL_ACT_AUTO, KSL_ACT_FLOAT},
      {"isa", c->isa, KSL_ISA_AUTO, KSL_ISA_AVX512},
      {"threads", c->threads, 0, 256},
      {"nice", c->nice, 0, 19},
      {"test_hooks", c->test_hooks, 0, KSL_HOOK_OPS | KSL_HOOK_PORTABLE},
      {"fail_alloc_at", c->fail_alloc_at, 0, c->test_hooks ? INT64_MAX : 0},
      {"draft_vocab", c->draft_vocab, 0, INT32_MAX},
  };
  for (const Range &r : ranges)
    if (r.value < r.low || r.value > r.high)
      return fail(error, KSL_INVALID, "config: %s is %lld, must be %lld to %lld", r.field,
                  static_cast<long long>(r.value), static_cast<long long>(r.low),
                  static_cast<long long>(r.high));
  if (!(c->draft_margin >= 0 && c->draft_margin <= 1e6f))
    return fail(error, KSL_INVALID, "config: draft_margin is %g, must be 0 to 1e6",
                static_cast<double>(c->draft_margin));
  if (c->block_tokens % 16 != 0)
    return fail(error, KSL_INVALID, "config: block_tokens is %d, must be a multiple of 16",
                c->block_tokens);
  if (c->kv_format == KSL_KV_INT8RING_INT4 && (c->kv_ring < 64 || c->kv_ring % 64 != 0))
    return fail(error, KSL_INVALID, "config: kv_ring is %d, must be a multiple of 64", c->kv_ring);
  const int64_t span = static_cast<int64_t>(c->max_blocks_per_slot) * c->block_tokens;
  if (span > 1 << 28)
    return fail(error, KSL_INVALID,
                "config: max_blocks_per_slot %d x block_tokens %d is %lld tokens, at most %d",
                c->max_blocks_per_slot, c->block_tokens, static_cast<long long>(span), 1 << 28);
  return KSL_OK;
}

}  // namespace

int budget_init(Budget *budget, const ModelSpec *spec, const ksl_config *config, ksl_error *error) {
  *budget = Budget{};
  const int rc = check_config(config, error);
  if (rc != KSL_OK) return rc;
  Budget b = Budget{};
  if (spec->linear_layers > 0) {
    const uint64_t layers = static_cast<uint64_t>(spec->linear_layers);
    b.delta_floats = mul(mul(layers, static_cast<uint64_t>(spec->v_width)),
                         static_cast<uint64_t>(spec->lin_key_dim));
    b.conv_floats = layers * static_cast<uint64_t>(spec->conv_taps - 1) *
                    static_cast<uint64_t>(spec->conv_channels);
  }
  b.hidden_floats = static_cast<uint64_t>(spec->hidden);
  const int d = spec->head_dim;
  const char *limit = spec->kv_layers > 0 ? kv_format_limit(config->kv_format, d) : nullptr;
  if (limit)
    return fail(error, KSL_INVALID, "KV format %s takes %s, not %d",
                kv_format_name(config->kv_format), limit, d);
  if (config->kv_format == KSL_KV_INT8RING_INT4) {
    const KvRow recent = kv_row(KSL_KV_INT8_G64, d);
    const uint64_t layers = static_cast<uint64_t>(spec->kv_layers - spec->mtp_layers);
    const uint64_t bytes =
        static_cast<uint64_t>(recent.k + recent.k_scale + recent.v + recent.v_scale);
    b.ring_bytes = mul(mul(layers, static_cast<uint64_t>(config->kv_ring)),
                       static_cast<uint64_t>(spec->kv_heads) * bytes);
  }
  b.slab_bytes = mul_add(b.delta_floats + b.conv_floats + b.hidden_floats, 4, b.ring_bytes);
  const KvRow row = kv_row(config->kv_format, d);
  b.kv_token_bytes = static_cast<uint64_t>(spec->kv_layers) *
                     static_cast<uint64_t>(spec->kv_heads) *
                     static_cast<uint64_t>(row.k + row.k_scale + row.v + row.v_scale);
  b.block_bytes = mul(b.kv_token_bytes, static_cast<uint64_t>(config->block_tokens));
  b.slot_tokens = config->max_blocks_per_slot * config->block_tokens;
  b.forced_capacity = config->test_hooks & KSL_HOOK_OPS ? b.slot_tokens : 0;
  const uint64_t slots = static_cast<uint64_t>(config->slots);
  b.table_bytes = mul(slots, static_cast<uint64_t>(config->max_blocks_per_slot) * 8);
  b.slot_bytes = slot_state_bytes(spec->vocab, b.forced_capacity);
  uint64_t total = b.table_bytes;
  total = mul_add(static_cast<uint64_t>(config->slabs), b.slab_bytes, total);
  total = mul_add(static_cast<uint64_t>(config->blocks), b.block_bytes, total);
  total = mul_add(slots, b.slot_bytes, total);
  b.pool_bytes = total;
  if (total > static_cast<uint64_t>(PTRDIFF_MAX))
    return fail(error, KSL_NOMEM,
                "the pools need more than the address space: %d slabs of %llu bytes, %d blocks of "
                "%llu bytes",
                config->slabs, static_cast<unsigned long long>(b.slab_bytes), config->blocks,
                static_cast<unsigned long long>(b.block_bytes));
  *budget = b;
  return KSL_OK;
}

}  // namespace ksl
