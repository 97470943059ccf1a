// Unit tests of native/common: a plain program that prints what failed and exits with 1. Linked
// with common/*.cc and the fake backend below; tests/native/test_common_cc.py builds and runs it.
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "../common/alloc.h"
#include "../common/backend.h"
#include "../common/budget.h"
#include "../common/codec.h"
#include "../common/engine.h"
#include "../common/error.h"
#include "../common/hash.h"
#include "../common/pool.h"
#include "../common/sample.h"
#include "../common/wave.h"

namespace {

int failures = 0;

#define CHECK(condition)                                     \
  do {                                                       \
    if (!(condition)) {                                      \
      printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      failures++;                                            \
    }                                                        \
  } while (0)

struct Random {
  uint64_t key, n;
  uint64_t next() { return ksl::hash_at(key, n++); }
  int below(int limit) { return static_cast<int>(next() % static_cast<uint64_t>(limit)); }
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
};

void nap() {
  timespec t = {0, 200000};
  nanosleep(&t, nullptr);
}

// ---------------------------------------------------------------- fake backend

// What the tests tell the fake backend and hear from it.
struct Script {
  std::atomic<bool> hold;       // run waits while set
  std::atomic<uint64_t> fatal;  // the wave id that fails
  std::atomic<int> open;        // backends alive
  std::atomic<uint64_t> seen;   // hash of everything the waves said
  std::atomic<bool> entered;
  std::atomic<int> later;  // pieces of work that wait for idle times
};
Script script;

}  // namespace

namespace ksl {

struct Backend {
  Alloc *alloc;
  float *pool;
  Pool *workers;
};

namespace {

int fake_open(const ModelSpec *spec, const ksl_config *config, const TensorTable *tensors,
              Alloc *alloc, Backend **out, ksl_error *error) {
  if (table_find(tensors, "model.norm.weight", spec->hidden, 1, false, error) == nullptr)
    return KSL_INVALID;
  Backend *b = alloc_many<Backend>(alloc, 1);
  if (b == nullptr) return fail(error, KSL_NOMEM, "fake: out of memory");
  b->alloc = alloc;
  b->pool = alloc_many<float>(alloc, 64);
  b->workers = pool_create(config->threads, config->nice, alloc, error);
  if (b->pool == nullptr || b->workers == nullptr) {
    alloc_free(b->pool);
    pool_destroy(b->workers);
    alloc_free(b);
    return fail(error, KSL_NOMEM, "fake: out of memory");
  }
  script.open++;
  *out = b;
  return KSL_OK;
}

void fake_info(Backend *, ksl_info *info) {
  snprintf(info->isa, sizeof info->isa, "fake");
}

int fake_run(Backend *, const Wave *wave, ksl_done *done, ksl_error *error) {
  script.entered = true;
  while (script.hold) {
    if (wave->abandon->load()) return KSL_CLOSED;
    nap();
  }
  if (wave->id == script.fatal) return fail(error, KSL_FATAL, "fake: wave %d", int(wave->id));
  uint64_t seen = mix64(script.seen + wave->id);
  for (int i = 0; i < wave->n_before; i++) {
    seen = mix64(seen + static_cast<uint64_t>(wave->before[i].kind));
    if (wave->before[i].kind != KSL_OP_CONFIGURE) continue;
    const ksl_sampling *s = static_cast<const ksl_sampling *>(wave->before[i].data);
    for (int k = 0; k < s->n_output; k++)
      seen = mix64(seen + static_cast<uint64_t>(s->output_ids[k]));
  }
  for (int i = 0; i < wave->n_rows; i++) {
    const ksl_row *row = &wave->rows[i];
    done[i].position = row->start + row->n;
    done[i].n_tokens = 1;
    done[i].tokens[0] = wave->tokens[row->tokens];
    seen = mix64(seen + static_cast<uint64_t>(done[i].tokens[0]));
  }
  script.seen = seen;
  return KSL_OK;
}

void fake_graphs(const Backend *, Graphs *graphs) {
  *graphs = {3, 700, script.seen};
}

void fake_close(Backend *b) {
  pool_destroy(b->workers);
  alloc_free(b->pool);
  alloc_free(b);
  script.open--;
}

bool fake_finish(Backend *, bool idle) {
  if (idle) script.later--;
  return script.later > 0;
}

const BackendOps kFake = {"fake",      fake_open,   fake_info, fake_run,
                          fake_finish, fake_graphs, fake_close};

}  // namespace

const BackendOps *default_backend(void) {
  return &kFake;
}
const char *kernels_list(void) {
  return "fake";
}
int kv_code_bytes(int, int, int, int) {
  return 0;
}

}  // namespace ksl

namespace {

using namespace ksl;

constexpr int kVocab = 50, kSlots = 4, kSlabs = 12, kBlocks = 24, kBlockTokens = 16, kTable = 6;
constexpr int kColumns = 40;
const uint8_t kKinds[2] = {KSL_LAYER_LINEAR, KSL_LAYER_FULL};

ksl_config small_config() {
  ksl_config c = ksl_config();
  c.vocab = kVocab;
  c.hidden = 8;
  c.intermediate = 16;
  c.layers = 2;
  c.layer_kinds = kKinds;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 8;
  c.rotary_dims = 4;
  c.lin_key_heads = 1;
  c.lin_value_heads = 2;
  c.lin_key_dim = 4;
  c.lin_value_dim = 4;
  c.conv_taps = 4;
  c.mtp_layers = 1;
  c.token_limit = kVocab;
  c.rope_theta = 1e4;
  c.norm_eps = 1e-6f;
  c.slots = kSlots;
  c.slabs = kSlabs;
  c.blocks = kBlocks;
  c.block_tokens = kBlockTokens;
  c.max_blocks_per_slot = kTable;
  c.wave_columns = kColumns;
  c.ring_depth = 2;
  c.threads = 2;
  c.test_hooks = 1;
  return c;
}

float kNorm[8];

ksl_tensor norm_tensor() {
  ksl_tensor t = ksl_tensor();
  t.name = "model.norm.weight";
  t.rows = 8;
  t.cols = 1;
  t.data = kNorm;
  t.data_bytes = sizeof kNorm;
  return t;
}

ksl_engine *open_small(int ring_depth) {
  ksl_config c = small_config();
  c.ring_depth = ring_depth;
  const ksl_tensor t = norm_tensor();
  ksl_engine *engine = nullptr;
  ksl_error error = ksl_error();
  const int rc = ksl_open(&c, &t, 1, &engine, &error);
  CHECK(rc == KSL_OK);
  if (rc != KSL_OK) {
    printf("%s\n", error.text);
    exit(1);
  }
  return engine;
}

// A wave with room for everything; the tests break one thing at a time.
struct Draft {
  ksl_wave wave;
  ksl_op before[4], after[2];
  ksl_row rows[3];
  int32_t tokens[64];
  ksl_edit edits[3];
  int32_t block_ids[kTable * 3];
  ksl_tap taps[1];
  ksl_sampling sampling;
  int32_t forced[3], stops[2], output[3], biased[1];
  float bias[1];
  uint32_t mask[2];
  ksl_logprob logprobs[17 * 21];
  float tap_data[4];
  uint8_t image[4096];
};

// Two rows: slot 0 a LAST row of 20 tokens with a cut, slot 1 a VERIFY row with two drafts.
void make_valid(Draft *d) {
  memset(static_cast<void *>(d), 0, sizeof *d);
  d->sampling.top_p = d->sampling.repetition = 1;
  d->sampling.presence = 1;
  d->stops[0] = 3;
  d->sampling.stop_ids = d->stops;
  d->sampling.n_stop = 2;
  d->sampling.output_ids = d->output;
  d->sampling.n_output = 3;
  d->sampling.bias_ids = d->biased;
  d->sampling.bias = d->bias;
  d->sampling.n_bias = 1;
  d->before[0] = {KSL_OP_CONFIGURE, 0, 0, 0, &d->sampling};
  d->before[1] = {KSL_OP_ZERO_SLAB, 5, 0, 0, nullptr};
  d->before[2] = {KSL_OP_FORCE, 0, 0, 3, d->forced};
  d->before[3] = {KSL_OP_MASK, 0, 0, 0, d->mask};
  d->after[0] = {KSL_OP_COPY_BLOCK, 1, 2, 0, nullptr};
  d->after[1] = {KSL_OP_SAVE_SLAB, 1, 8, 64, d->image};
  ksl_row *last = &d->rows[0];
  last->kind = KSL_ROW_LAST;
  last->slab = 5;
  last->n = 20;
  last->propose = 2;
  last->n_cuts = 2;
  last->cuts[0] = {4, 6};
  last->cuts[1] = {20, 7};
  last->top_n = 3;
  last->logprobs = d->logprobs;
  ksl_row *verify = &d->rows[1];
  verify->kind = KSL_ROW_VERIFY;
  verify->slot = 1;
  verify->slab = 1;
  verify->draft = KSL_DRAFT_GIVEN;
  verify->start = 14;
  verify->n = 3;
  verify->tokens = 20;
  d->edits[0] = {0, 0, 3, 0};
  d->edits[1] = {1, 0, 2, 3};
  for (int i = 0; i < kTable * 3; i++) d->block_ids[i] = i;
  d->taps[0] = {"embed", d->tap_data, 4, 0};
  ksl_wave *w = &d->wave;
  w->id = 1;
  w->n_before = 4;
  w->n_after = 2;
  w->n_rows = 2;
  w->n_tokens = 64;
  w->n_edits = 2;
  w->n_block_ids = kTable * 3;
  w->n_taps = 1;
  w->before = d->before;
  w->after = d->after;
  w->rows = d->rows;
  w->tokens = d->tokens;
  w->edits = d->edits;
  w->block_ids = d->block_ids;
  w->taps = d->taps;
}

struct Checking {
  Alloc alloc;
  ksl_config config;
  ModelSpec spec;
  Budget budget;
  WaveChecker checker;

  explicit Checking(int mtp = 1, int hooks = 1) : alloc() {
    config = small_config();
    config.mtp_layers = mtp;
    config.test_hooks = hooks;
    CHECK(spec_init(&spec, &config, &alloc, nullptr) == KSL_OK);
    CHECK(budget_init(&budget, &spec, &config, nullptr) == KSL_OK);
    CHECK(checker_init(&checker, &spec, &config, &budget, &alloc, nullptr) == KSL_OK);
  }
  ~Checking() {
    checker_free(&checker);
    spec_free(&spec);
  }
};

std::vector<int32_t> mirror_of(const WaveChecker &c) {
  std::vector<int32_t> all(c.tables, c.tables + kSlots * kTable);
  all.insert(all.end(), c.filled, c.filled + kSlots);
  all.insert(all.end(), c.refs, c.refs + kBlocks);
  for (int i = 0; i < kSlots; i++) all.push_back(c.flags[i]);
  return all;
}

// ---------------------------------------------------------------- wave

typedef void (*Break)(Draft *d);
struct Fault {
  const char *text;  // must be part of the error
  Break apply;
};

const Fault kFaults[] = {
    {"n_rows is -1", [](Draft *d) { d->wave.n_rows = -1; }},
    {"n_rows is 5, must be 0 to 4", [](Draft *d) { d->wave.n_rows = 5; }},
    {"rows is null", [](Draft *d) { d->wave.rows = nullptr; }},
    {"tokens is null", [](Draft *d) { d->wave.tokens = nullptr; }},
    {"n_before is -7", [](Draft *d) { d->wave.n_before = -7; }},
    {"edits is null", [](Draft *d) { d->wave.edits = nullptr; }},
    {"block_ids is null", [](Draft *d) { d->wave.block_ids = nullptr; }},
    {"tap 0: name is null", [](Draft *d) { d->taps[0].name = nullptr; }},
    {"tap 0: data is null", [](Draft *d) { d->taps[0].data = nullptr; }},
    {"edit 1: slot is 4, must be 0 to 3", [](Draft *d) { d->edits[1].slot = 4; }},
    {"edit 0: n is 0", [](Draft *d) { d->edits[0].n = 0; }},
    {"edit 0: n is 7, must be 1 to 6", [](Draft *d) { d->edits[0].n = 7; }},
    {"edit 0: start is 4, must be 0 to 3", [](Draft *d) { d->edits[0].start = 4; }},
    {"edit 0: offset is 16, must be 0 to 15", [](Draft *d) { d->edits[0].offset = 16; }},
    {"edit 0: offset is -1", [](Draft *d) { d->edits[0].offset = -1; }},
    {"edit 1: block id is 24, must be 0 to 23", [](Draft *d) { d->block_ids[4] = kBlocks; }},
    {"edit 0: block id is -1", [](Draft *d) { d->block_ids[0] = -1; }},
    {"before op 1: kind is 15, must be 0 to 14", [](Draft *d) { d->before[1].kind = 15; }},
    {"before op 1: n is 0, must be 1 to 12",
     [](Draft *d) { d->before[1].kind = KSL_OP_DROP_SLABS; }},
    {"before op 1: a is 23, must be 0 to 22",
     [](Draft *d) {
       d->before[1] = {KSL_OP_DROP_BLOCKS, 23, 0, 2, nullptr};
     }},
    {"before op 1: n is 13, must be 1 to 12",
     [](Draft *d) {
       d->before[1] = {KSL_OP_TOUCH_SLABS, 0, 0, 13, nullptr};
     }},
    {"before op 1: a is 22, must be 0 to 21",
     [](Draft *d) {
       d->before[1] = {KSL_OP_TOUCH_BLOCKS, 22, 0, 3, nullptr};
     }},
    {"before op 1: a (slab) is 12, must be 0 to 11", [](Draft *d) { d->before[1].a = kSlabs; }},
    {"after op 0: b (block) is 24, must be 0 to 23", [](Draft *d) { d->after[0].b = kBlocks; }},
    {"after op 0: a and b are both 1", [](Draft *d) { d->after[0].b = 1; }},
    {"after op 1: data is null", [](Draft *d) { d->after[1].data = nullptr; }},
    {"after op 1: b (offset) is -1", [](Draft *d) { d->after[1].b = -1; }},
    {"after op 1: n (bytes) is 0, must be 1 to", [](Draft *d) { d->after[1].n = 0; }},
    {"after op 1: n (bytes) is 2147483647", [](Draft *d) { d->after[1].n = INT32_MAX; }},
    {"before op 0: a (slot) is -1", [](Draft *d) { d->before[0].a = -1; }},
    {"before op 0: CONFIGURE data is null", [](Draft *d) { d->before[0].data = nullptr; }},
    {"before op 0: sampling: top_p is 0", [](Draft *d) { d->sampling.top_p = 0; }},
    {"temperature is nan", [](Draft *d) { d->sampling.temperature = NAN; }},
    {"min_p is 2", [](Draft *d) { d->sampling.min_p = 2; }},
    {"repetition is 0", [](Draft *d) { d->sampling.repetition = 0; }},
    {"presence is inf", [](Draft *d) { d->sampling.presence = HUGE_VALF; }},
    {"top_k is -1", [](Draft *d) { d->sampling.top_k = -1; }},
    {"n_stop_ids is 33, must be 0 to 32", [](Draft *d) { d->sampling.n_stop = 33; }},
    {"stop_ids is null", [](Draft *d) { d->sampling.stop_ids = nullptr; }},
    {"stop_ids[1] is 50, must be 0 to 49", [](Draft *d) { d->stops[1] = kVocab; }},
    {"n_bias_ids is 1025", [](Draft *d) { d->sampling.n_bias = 1025; }},
    {"bias[0] is nan", [](Draft *d) { d->bias[0] = NAN; }},
    {"bias is null", [](Draft *d) { d->sampling.bias = nullptr; }},
    {"output_ids[2] is -4", [](Draft *d) { d->output[2] = -4; }},
    {"n_prompt_ids is -1", [](Draft *d) { d->sampling.n_prompt = -1; }},
    {"before op 2: n is 97, must be 0 to 96", [](Draft *d) { d->before[2].n = 97; }},
    {"before op 2: FORCE data is null", [](Draft *d) { d->before[2].data = nullptr; }},
    {"before op 2: forced id 1 is 50", [](Draft *d) { d->forced[1] = kVocab; }},
    {"row 0: kind is 4", [](Draft *d) { d->rows[0].kind = 4; }},
    {"row 0: slot is 4", [](Draft *d) { d->rows[0].slot = kSlots; }},
    {"row 1: slot 0 has another row", [](Draft *d) { d->rows[1].slot = 0; }},
    {"row 1: slab is 12", [](Draft *d) { d->rows[1].slab = kSlabs; }},
    {"row 1: slab 5 has another row", [](Draft *d) { d->rows[1].slab = 5; }},
    {"row 0: n is 0, must be 1 to 40", [](Draft *d) { d->rows[0].n = 0; }},
    {"row 0: n is 41, must be 1 to 40", [](Draft *d) { d->rows[0].n = 41; }},
    {"its rows have 41 columns, at most 40",
     [](Draft *d) {
       d->rows[0].n = 38;
       d->rows[0].n_cuts = 0;
     }},
    {"row 1: n is 18, must be 1 to 17", [](Draft *d) { d->rows[1].n = 18; }},
    {"row 1: n (no drafts, or a mask) is 3, must be 1 to 1",
     [](Draft *d) { d->rows[1].draft = KSL_DRAFT_NONE; }},
    {"row 1: n (no drafts, or a mask) is 3", [](Draft *d) { d->before[3].a = 1; }},
    {"row 1: draft is 3", [](Draft *d) { d->rows[1].draft = 3; }},
    {"row 0: draft is 1, must be 0 to 0", [](Draft *d) { d->rows[0].draft = KSL_DRAFT_GIVEN; }},
    {"row 0: start is -1, must be 0 to 95", [](Draft *d) { d->rows[0].start = -1; }},
    {"row 0: start + n + propose is 117, must be 1 to 96", [](Draft *d) { d->rows[0].start = 95; }},
    {"start + n + propose is 49 but the table of slot 0 covers 48 tokens",
     [](Draft *d) { d->rows[0].start = 27; }},
    {"row 1: start + n + propose is 17 but the table of slot 1 covers 16 tokens",
     [](Draft *d) { d->edits[1].n = 1; }},
    {"the table of slot 1 covers 0 tokens", [](Draft *d) { d->edits[1].start = 1; }},
    {"row 1: tokens is 62, must be 0 to 61", [](Draft *d) { d->rows[1].tokens = 62; }},
    {"row 0: tokens is -1", [](Draft *d) { d->rows[0].tokens = -1; }},
    {"row 0: needs 20 tokens, the wave has 19", [](Draft *d) { d->wave.n_tokens = 19; }},
    {"row 0: token 19 is 50, must be 0 to 49", [](Draft *d) { d->tokens[19] = kVocab; }},
    {"row 1: token 1 is -1, must be 0 to 49", [](Draft *d) { d->tokens[21] = -1; }},
    {"row 0: token 0 is -2, must be -1 to 49", [](Draft *d) { d->tokens[0] = -2; }},
    {"row 0: token 0 is -1 but slot 0 has sampled nothing", [](Draft *d) { d->tokens[0] = -1; }},
    {"row 0: top_n is 21", [](Draft *d) { d->rows[0].top_n = 21; }},
    {"row 0: propose is 17, must be 0 to 16", [](Draft *d) { d->rows[0].propose = 17; }},
    {"row 0: propose is 2 in a row that samples nothing",
     [](Draft *d) { d->rows[0].kind = KSL_ROW_PREFILL; }},
    {"row 0: logprobs is null in a SCORE row",
     [](Draft *d) {
       d->rows[0].kind = KSL_ROW_SCORE;
       d->rows[0].logprobs = nullptr;
     }},
    {"row 0: n_cuts is 5, must be 0 to 4", [](Draft *d) { d->rows[0].n_cuts = 5; }},
    {"row 1: n_cuts is 1, must be 0 to 0", [](Draft *d) { d->rows[1].n_cuts = 1; }},
    {"row 0: cut offset is 0, must be 1 to 20", [](Draft *d) { d->rows[0].cuts[0].offset = 0; }},
    {"row 0: cut offset is 21, must be 5 to 20", [](Draft *d) { d->rows[0].cuts[1].offset = 21; }},
    {"row 0: cut offset is 4, must be 5 to 20", [](Draft *d) { d->rows[0].cuts[1].offset = 4; }},
    {"row 0: cut slab is -1", [](Draft *d) { d->rows[0].cuts[0].slab = -1; }},
    {"row 0: slab 1 of cut 0 is used", [](Draft *d) { d->rows[0].cuts[0].slab = 1; }},
    {"row 0: slab 6 of cut 1 is used", [](Draft *d) { d->rows[0].cuts[1].slab = 6; }},
    {"row 1: block 1 is also written by row 0", [](Draft *d) { d->block_ids[4] = 1; }},
    {"row 1: reads block 0, which row 0 writes",
     [](Draft *d) {
       d->block_ids[3] = 0;
       d->rows[1].start = 16;
     }},
};

void test_wave_faults() {
  Checking k;
  Draft d;
  ksl_error error;
  const std::vector<int32_t> before = mirror_of(k.checker);
  for (const Fault &f : kFaults) {
    make_valid(&d);
    f.apply(&d);
    error = ksl_error();
    CHECK(wave_check(&k.checker, &d.wave, &error) == KSL_INVALID);
    if (strstr(error.text, f.text) == nullptr) {
      printf("expected '%s', found '%s'\n", f.text, error.text);
      failures++;
    }
    CHECK(error.code == KSL_INVALID);
    CHECK(mirror_of(k.checker) == before);
  }
  CHECK(wave_check(&k.checker, nullptr, &error) == KSL_INVALID);
  make_valid(&d);
  CHECK(wave_check(&k.checker, &d.wave, &error) == KSL_OK);
  CHECK(wave_check(&k.checker, &d.wave, nullptr) == KSL_OK);  // the text is optional
}

void test_wave_needs() {
  Draft d;
  ksl_error error;
  Checking plain(0, 1);
  make_valid(&d);
  CHECK(wave_check(&plain.checker, &d.wave, &error) == KSL_INVALID);
  CHECK(strstr(error.text, "no MTP layer") != nullptr);
  Checking hookless(1, 0);
  CHECK(wave_check(&hookless.checker, &d.wave, &error) == KSL_INVALID);
  CHECK(strstr(error.text, "test_hooks") != nullptr);
}

// -1 is good after a sampling row, and no longer after CONFIGURE; tables stay from wave to wave.
void test_wave_mirror() {
  Checking k;
  Draft d;
  make_valid(&d);
  CHECK(wave_check(&k.checker, &d.wave, nullptr) == KSL_OK);
  wave_accept(&k.checker);
  CHECK(k.checker.filled[0] == 3);
  CHECK(k.checker.filled[1] == 2);
  d.wave.n_edits = 0;
  d.wave.n_before = 0;
  d.tokens[0] = -1;
  d.rows[0].n = 1;
  d.rows[0].n_cuts = 0;
  d.rows[0].start = 20;
  CHECK(wave_check(&k.checker, &d.wave, nullptr) == KSL_OK);
  wave_revert(&k.checker);
  d.wave.n_before = 1;
  CHECK(wave_check(&k.checker, &d.wave, nullptr) == KSL_INVALID);
  d.wave.n_before = 0;
  // A table may lose nothing, but an entry may change: then the old block has one user less.
  d.wave.n_edits = 1;
  d.edits[0] = {0, 1, 1, 9};
  CHECK(wave_check(&k.checker, &d.wave, nullptr) == KSL_OK);
  CHECK(k.checker.refs[1] == 0);
  CHECK(k.checker.refs[9] == 1);
  wave_revert(&k.checker);
  CHECK(k.checker.refs[1] == 1);
  CHECK(k.checker.tables[1] == 1);
}

// A copied wave owns all it points to: the original may be destroyed.
void test_wave_copy() {
  Checking k;
  static Draft d;
  make_valid(&d);
  d.output[2] = 7;
  d.forced[1] = 9;
  d.mask[1] = 5;
  WaveArena arena = {nullptr, 0};
  Wave w;
  CHECK(wave_check(&k.checker, &d.wave, nullptr) == KSL_OK);
  CHECK(wave_copy(&arena, &d.wave, kVocab, &w, nullptr) == KSL_OK);
  const ksl_op before2 = d.before[2];
  memset(static_cast<void *>(&d), 0x5a, sizeof d);
  CHECK(w.n_rows == 2 && w.rows[1].start == 14 && w.tokens[0] == 0);
  CHECK(w.before[2].kind == KSL_OP_FORCE && w.before[2].data != before2.data);
  CHECK(static_cast<const int32_t *>(w.before[2].data)[1] == 9);
  CHECK(static_cast<const uint32_t *>(w.before[3].data)[1] == 5);
  const ksl_sampling *s = static_cast<const ksl_sampling *>(w.before[0].data);
  CHECK(s->stop_ids[0] == 3 && s->output_ids[2] == 7 && s->n_bias == 1);
  CHECK(w.edits[1].n == 2 && w.block_ids[4] == 4);
  CHECK(w.after[1].data == d.image);  // caller buffers stay where they are
  arena_free(&arena);
}

// Independent restatement of the rules that keep a backend inside its pools.
bool safe(const Draft &d, const WaveChecker &c) {
  bool slot[kSlots] = {}, slab[kSlabs] = {};
  int writer[kBlocks];
  std::fill(writer, writer + kBlocks, -1);
  int columns = 0;
  for (int i = 0; i < d.wave.n_rows; i++) {
    const ksl_row &r = d.wave.rows[i];
    if (slot[r.slot] || slab[r.slab]) return false;
    slot[r.slot] = slab[r.slab] = true;
    columns += r.n;
    for (int t = 0; t < r.start + r.n + r.propose; t++) {
      const int block = c.tables[r.slot * kTable + t / kBlockTokens];
      if (block < 0 || block >= kBlocks) return false;
      if (t < r.start) continue;
      if (writer[block] >= 0 && writer[block] != i) return false;
      writer[block] = i;
    }
  }
  for (int i = 0; i < d.wave.n_rows; i++) {
    const ksl_row &r = d.wave.rows[i];
    for (int k = 0; k < r.n_cuts; k++) {
      if (slab[r.cuts[k].slab]) return false;
      slab[r.cuts[k].slab] = true;
    }
    for (int b = 0; b < r.start / kBlockTokens; b++)
      if (writer[c.tables[r.slot * kTable + b]] >= 0) return false;
  }
  return columns <= kColumns;
}

int32_t odd(Random *r, int limit) {
  switch (r->below(12)) {
    case 0:
      return -1;
    case 1:
      return limit;
    case 2:
      return static_cast<int32_t>(r->next());
    default:
      return r->below(limit);
  }
}

void scramble(Random *r, Draft *d) {
  for (int i = 0; i < 3; i++) {
    ksl_row *row = &d->rows[i];
    if (r->below(2)) row->kind = odd(r, 4);
    if (r->below(2)) row->slot = odd(r, kSlots);
    if (r->below(2)) row->slab = odd(r, kSlabs);
    if (r->below(4) == 0) row->start = odd(r, kTable * kBlockTokens);
    if (r->below(3) == 0) row->n = odd(r, kColumns + 1);
    if (r->below(3) == 0) row->tokens = odd(r, 64);
    if (r->below(3) == 0) row->draft = odd(r, 3);
    row->propose = r->below(3) ? 0 : odd(r, 17);
    row->n_cuts = r->below(3) ? 0 : odd(r, 5);
    for (ksl_cut &cut : row->cuts)
      cut = {odd(r, row->n > 0 && row->n < 100 ? row->n + 1 : 9), odd(r, kSlabs)};
    row->top_n = r->below(3) ? 0 : odd(r, 21);
    row->logprobs = d->logprobs;
  }
  for (ksl_edit &e : d->edits)
    if (r->below(3) == 0)
      e = {odd(r, kSlots), odd(r, kTable), odd(r, kTable + 1), odd(r, kTable * 3)};
  for (int32_t &id : d->block_ids)
    if (r->below(60) == 0) id = odd(r, kBlocks);
  for (int32_t &id : d->tokens)
    if (r->below(200) == 0) id = odd(r, kVocab);
  for (ksl_op *op :
       {&d->before[0], &d->before[1], &d->before[2], &d->before[3], &d->after[0], &d->after[1]}) {
    if (r->below(3)) continue;
    op->a = odd(r, kSlabs);
    op->b = odd(r, kSlabs);
    if (r->below(2)) *op = {odd(r, 5), op->a, op->b, 0, d->image};  // kinds whose data is bytes
  }
  d->wave.n_rows = r->below(8) ? r->below(4) : odd(r, 3);
  if (d->wave.n_rows > 3) d->wave.n_rows = 3;
  d->wave.n_edits = r->below(4);
  d->wave.n_before = r->below(5);
  d->wave.n_after = r->below(3);
}

void test_wave_fuzz() {
  Checking k;
  static Draft d;
  WaveArena arena = {nullptr, 0};
  Wave w;
  Random random = {mix64(7), 0};
  int accepted = 0;
  for (int i = 0; i < 30000; i++) {
    make_valid(&d);
    scramble(&random, &d);
    const std::vector<int32_t> before = mirror_of(k.checker);
    ksl_error error = ksl_error();
    const int rc = wave_check(&k.checker, &d.wave, &error);
    if (rc == KSL_OK) {
      CHECK(safe(d, k.checker));
      CHECK(wave_copy(&arena, &d.wave, kVocab, &w, nullptr) == KSL_OK);
      if (random.below(2)) {
        wave_accept(&k.checker);
        accepted++;
        continue;
      }
      wave_revert(&k.checker);
    } else {
      CHECK(rc == KSL_INVALID && error.text[0] != 0);
    }
    CHECK(mirror_of(k.checker) == before);
  }
  CHECK(accepted > 100);
  arena_free(&arena);
}

// ---------------------------------------------------------------- engine

bool readable(ksl_engine *e) {
  pollfd p = {ksl_event_fd(e), POLLIN, 0};
  return ::poll(&p, 1, 0) == 1;
}

bool ended(const std::vector<ksl_done> &all, uint64_t id) {
  for (const ksl_done &r : all)
    if (r.wave == id && (r.flags & KSL_DONE_WAVE_END)) return true;
  return false;
}

// Polls until `all`, to which the records are appended, has the end record of `id`.
void drain(ksl_engine *e, uint64_t id, int cap, std::vector<ksl_done> *all) {
  std::vector<ksl_done> buffer(static_cast<size_t>(cap));
  for (int turns = 0; turns < 50000 && !ended(*all, id); turns++) {
    const int n = ksl_poll(e, buffer.data(), cap);
    all->insert(all->end(), buffer.begin(), buffer.begin() + n);
    if (n == 0) nap();
  }
  CHECK(ended(*all, id));
}

void test_engine_order() {
  script.fatal = 0;
  ksl_engine *e = open_small(3);
  static Draft d;
  ksl_error error;
  std::vector<ksl_done> all;
  uint64_t sent = 0;
  for (uint64_t id = 1; id <= 60; id++) {
    make_valid(&d);
    d.wave.id = id;
    d.tokens[0] = static_cast<int32_t>(id % kVocab);
    while (ksl_submit(e, &d.wave, &error) == KSL_AGAIN) drain(e, ++sent, 1 + int(id % 7), &all);
    memset(static_cast<void *>(&d), 0x5a, sizeof d);
  }
  while (sent < 60) drain(e, ++sent, 4, &all);
  CHECK(all.size() == 180);
  for (size_t i = 0; i < all.size(); i++) {
    const ksl_done &r = all[i];
    CHECK(r.wave == i / 3 + 1);
    CHECK(r.status == KSL_OK);
    if (i % 3 == 2) {
      CHECK(r.row == -1 && r.flags == KSL_DONE_WAVE_END);
      CHECK(r.queued_ns <= r.started_ns && r.started_ns <= r.ended_ns);
    } else {
      CHECK(r.row == int(i % 3) && r.slot == int(i % 3) && r.n_tokens == 1);
      if (i % 3 == 0) CHECK(r.tokens[0] == int(r.wave % kVocab));
    }
  }
  ksl_progress p;
  CHECK(ksl_get_progress(e, &p) == KSL_OK);
  CHECK(p.submitted == 60 && p.started == 60 && p.completed == 60 && p.phase == 0);
  CHECK(p.graphs == 3 && p.graph_kernels == 700 && p.graphs_made == script.seen);
  ksl_info info;
  CHECK(ksl_get_info(e, &info) == KSL_OK);
  CHECK(info.slots == kSlots && info.has_mtp == 1 &&
        info.block_bytes == 2 * 2 * 8 * 4 * kBlockTokens);
  CHECK(info.slab_bytes == 4 * (2 * 4 * 4 + 3 * 16 + 8));
  CHECK(strcmp(info.numerics, "digest/fake/fake/kv-f32/act-float") == 0);
  CHECK(ksl_close(e, 1000) == KSL_OK);
  CHECK(script.open == 0);
}

void test_engine_ring_and_descriptor() {
  ksl_engine *e = open_small(2);
  static Draft d;
  ksl_error error;
  ksl_done out[8];
  CHECK(!readable(e));
  script.hold = true;
  make_valid(&d);
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_OK);
  d.wave.id = 2;
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_OK);
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_AGAIN);
  CHECK(ksl_poll(e, out, 8) == 0);
  script.hold = false;
  ksl_progress p = ksl_progress();
  while (p.completed < 2) {
    CHECK(ksl_get_progress(e, &p) == KSL_OK);
    nap();
  }
  while (!readable(e)) nap();
  // Done but not polled: still in flight.
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_AGAIN);
  CHECK(ksl_poll(e, out, 1) == 1);
  CHECK(readable(e));  // records are left
  CHECK(ksl_poll(e, out, 2) == 2 && out[1].flags == KSL_DONE_WAVE_END);
  d.wave.id = 3;
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_OK);  // one wave was delivered
  std::vector<ksl_done> all;
  drain(e, 3, 8, &all);
  CHECK(ksl_poll(e, out, 8) == 0);
  CHECK(!readable(e));
  CHECK(ksl_poll(e, out, 0) == 0);
  // An invalid wave leaves no trace.
  make_valid(&d);
  d.rows[0].n = 0;
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_INVALID);
  CHECK(ksl_submit(e, nullptr, &error) == KSL_INVALID);
  CHECK(ksl_get_progress(e, &p) == KSL_OK && p.submitted == 3);
  CHECK(ksl_close(e, 1000) == KSL_OK);
}

// Every publish between two drains is either taken or announced by the descriptor.
void test_engine_wakeups() {
  ksl_engine *e = open_small(2);
  static Draft d;
  ksl_done out[8];
  uint64_t sent = 0, ended = 0;
  while (ended < 3000) {
    make_valid(&d);
    d.wave.id = sent + 1;
    if (sent < 3000 && ksl_submit(e, &d.wave, nullptr) == KSL_OK) sent++;
    pollfd p = {ksl_event_fd(e), POLLIN, 0};
    if (sent - ended == 2 || sent == 3000) CHECK(::poll(&p, 1, 10000) == 1);
    const int n = ksl_poll(e, out, 8);
    for (int i = 0; i < n; i++) ended += (out[i].flags & KSL_DONE_WAVE_END) != 0;
  }
  CHECK(ksl_close(e, 1000) == KSL_OK);
}

void test_engine_poison() {
  ksl_engine *e = open_small(3);
  static Draft d;
  ksl_error error;
  script.fatal = 2;
  script.hold = true;
  for (uint64_t id = 1; id <= 3; id++) {
    make_valid(&d);
    d.wave.id = id;
    CHECK(ksl_submit(e, &d.wave, &error) == KSL_OK);
  }
  CHECK(ksl_last_error(e, &error) == KSL_OK && error.code == KSL_OK);
  script.hold = false;
  std::vector<ksl_done> all;
  drain(e, 3, 4, &all);
  CHECK(all.size() == 5);
  CHECK(all[2].status == KSL_OK);
  CHECK(all[3].wave == 2 && all[3].row == -1 && all[3].status == KSL_FATAL);
  CHECK(all[4].wave == 3 && all[4].status == KSL_FATAL);
  CHECK(ksl_submit(e, &d.wave, &error) == KSL_FATAL);
  CHECK(strcmp(error.text, "fake: wave 2") == 0);
  CHECK(ksl_last_error(e, &error) == KSL_OK && error.code == KSL_FATAL);
  ksl_progress p;
  CHECK(ksl_get_progress(e, &p) == KSL_OK);
  CHECK(p.phase == 3 && p.last_error == KSL_FATAL && p.completed == 3);
  CHECK(ksl_close(e, 1000) == KSL_OK);
  script.fatal = 0;
}

// What a wave leaves for idle times is done piece by piece when nothing follows, and a wave that
// comes meanwhile runs.
void test_engine_idle_work() {
  static Draft d;
  ksl_engine *e = open_small(2);
  std::vector<ksl_done> all;
  constexpr int kMany = 1000000000;
  for (uint64_t id = 1; id <= 4; id++) {
    if (id <= 3) script.later = id < 3 ? static_cast<int>(id) : kMany;
    make_valid(&d);
    d.wave.id = id;
    CHECK(ksl_submit(e, &d.wave, nullptr) == KSL_OK);
    drain(e, id, 4, &all);
    if (id < 3)
      while (script.later > 0) nap();
    if (id == 3)
      while (script.later > kMany - 2) nap();
  }
  CHECK(all.size() == 12);
  CHECK(ksl_close(e, 1000) == KSL_OK);
  script.later = 0;
}

void test_engine_close() {
  static Draft d;
  make_valid(&d);
  // Within the deadline everything submitted is finished.
  uint64_t seen = script.seen;
  ksl_engine *e = open_small(4);
  for (int i = 0; i < 4; i++) CHECK(ksl_submit(e, &d.wave, nullptr) == KSL_OK);
  CHECK(ksl_close(e, 60000) == KSL_OK);
  for (int i = 0; i < 4; i++) {
    seen = mix64(seen + 1);
    for (int k = 0; k < 4; k++) {
      seen = mix64(seen + static_cast<uint64_t>(d.before[k].kind));
      if (k == 0)
        for (int32_t id : d.output) seen = mix64(seen + static_cast<uint64_t>(id));
    }
    seen = mix64(mix64(seen));
  }
  CHECK(seen == script.seen);
  // Past it, the running wave is told to stop and the queued one never starts.
  e = open_small(4);
  script.hold = true;
  script.entered = false;
  for (int i = 0; i < 2; i++) CHECK(ksl_submit(e, &d.wave, nullptr) == KSL_OK);
  while (!script.entered) nap();
  CHECK(ksl_close(e, 5) == KSL_OK);
  CHECK(script.seen == seen);
  script.hold = false;
  e = open_small(1);
  CHECK(ksl_close(e, 0) == KSL_OK);
  CHECK(ksl_close(nullptr, 0) == KSL_OK);
  CHECK(script.open == 0);
}

// The n-th allocation fails for every n until open succeeds; each failure is clean.
void test_open_faults() {
  const ksl_tensor t = norm_tensor();
  int n = 1;
  for (;; n++) {
    ksl_config c = small_config();
    c.fail_alloc_at = n;
    ksl_engine *e = nullptr;
    ksl_error error = ksl_error();
    const int rc = ksl_open(&c, &t, 1, &e, &error);
    if (rc == KSL_OK) {
      CHECK(ksl_close(e, 100) == KSL_OK);
      break;
    }
    CHECK(rc == KSL_NOMEM && e == nullptr && error.text[0] != 0 && script.open == 0);
  }
  CHECK(n > 15);
}

struct BadConfig {
  const char *text;
  void (*apply)(ksl_config *c);
};

void test_open_checks() {
  const BadConfig bad[] = {
      {"vocab is 0", [](ksl_config *c) { c->vocab = 0; }},
      {"layers is 0", [](ksl_config *c) { c->layers = 0; }},
      {"layer_kinds is null", [](ksl_config *c) { c->layer_kinds = nullptr; }},
      {"token_limit is 51", [](ksl_config *c) { c->token_limit = kVocab + 1; }},
      {"heads is 3", [](ksl_config *c) { c->heads = 3, c->kv_heads = 2; }},
      {"rotary_dims is 5", [](ksl_config *c) { c->rotary_dims = 5; }},
      {"lin_value_heads is 3", [](ksl_config *c) { c->lin_value_heads = 3, c->lin_key_heads = 2; }},
      {"conv_taps is 3", [](ksl_config *c) { c->conv_taps = 3; }},
      {"norm_eps is", [](ksl_config *c) { c->norm_eps = NAN; }},
      {"rope_theta is", [](ksl_config *c) { c->rope_theta = -1; }},
      {"mtp_layers is 2", [](ksl_config *c) { c->mtp_layers = 2; }},
      {"slots is 0", [](ksl_config *c) { c->slots = 0; }},
      {"block_tokens is 24", [](ksl_config *c) { c->block_tokens = 24; }},
      {"ring_depth is 0", [](ksl_config *c) { c->ring_depth = 0; }},
      {"kv_format is 7", [](ksl_config *c) { c->kv_format = 7; }},
      {"nice is 20", [](ksl_config *c) { c->nice = 20; }},
      {"draft_margin is -1", [](ksl_config *c) { c->draft_margin = -1; }},
      {"draft_vocab is -1", [](ksl_config *c) { c->draft_vocab = -1; }},
      {"fail_alloc_at is 1", [](ksl_config *c) { c->test_hooks = 0, c->fail_alloc_at = 1; }},
  };
  ksl_tensor t = norm_tensor();
  ksl_error error;
  ksl_engine *e = nullptr;
  for (const BadConfig &b : bad) {
    ksl_config c = small_config();
    b.apply(&c);
    const int rc = ksl_open(&c, &t, 1, &e, &error);
    CHECK(rc == KSL_INVALID && e == nullptr);
    if (strstr(error.text, b.text) == nullptr) {
      printf("expected '%s', found '%s'\n", b.text, error.text);
      failures++;
    }
  }
  const ksl_config c = small_config();
  ksl_config huge = c;
  huge.blocks = 1 << 28;
  huge.block_tokens = 4096;
  huge.heads = huge.kv_heads = 1024;
  huge.head_dim = 1024;
  huge.max_blocks_per_slot = 1;
  CHECK(ksl_open(&huge, &t, 1, &e, &error) == KSL_NOMEM);
  const ksl_tensor twice[2] = {t, t};
  CHECK(ksl_open(&c, twice, 2, &e, &error) == KSL_INVALID && strstr(error.text, "twice"));
  CHECK(ksl_open(&c, &t, 0, &e, &error) == KSL_INVALID);
  CHECK(ksl_open(&c, nullptr, 1, &e, &error) == KSL_INVALID);
  CHECK(ksl_open(nullptr, &t, 1, &e, &error) == KSL_INVALID);
  CHECK(ksl_open(&c, &t, 1, nullptr, &error) == KSL_INVALID);
  t.data_bytes = 31;
  CHECK(ksl_open(&c, &t, 1, &e, &error) == KSL_INVALID &&
        strstr(error.text, "31 bytes, must be 32"));
  t = norm_tensor();
  t.data = nullptr;
  CHECK(ksl_open(&c, &t, 1, &e, &error) == KSL_INVALID && strstr(error.text, "no data"));
  t = norm_tensor();
  t.encoding = KSL_ENC_E2M3;
  CHECK(ksl_open(&c, &t, 1, &e, &error) == KSL_INVALID && strstr(error.text, "encoding 3"));
  t = norm_tensor();
  t.rows = 4;
  t.data_bytes = 16;
  CHECK(ksl_open(&c, &t, 1, &e, &error) == KSL_INVALID &&
        strstr(error.text, "shape is [4, 1], must be [8, 1]"));
  t.name = nullptr;
  CHECK(ksl_open(&c, &t, 1, &e, &error) == KSL_INVALID && strstr(error.text, "no name"));
}

// ---------------------------------------------------------------- pool

struct Cover {
  std::vector<std::atomic<int>> *hits;
  int grain;
};

void cover_task(void *context, int worker, int begin, int end) {
  const Cover *c = static_cast<const Cover *>(context);
  CHECK(worker >= 0 && begin % c->grain == 0);
  for (int i = begin; i < end; i++) (*c->hits)[static_cast<size_t>(i)]++;
}

void test_pool() {
  Alloc alloc = {0, 0, 0};
  std::vector<std::atomic<int>> hits(200);
  for (int threads = 1; threads <= 4; threads++) {
    Pool *pool = pool_create(threads, 1, &alloc, nullptr);
    CHECK(pool != nullptr && pool_threads(pool) == threads);
    for (int run = 0; run < 300; run++) {
      const int n = run % 200;
      Cover cover = {&hits, 1 + run % 17};
      for (auto &h : hits) h = 0;
      pool_run(pool, n, cover.grain, cover_task, &cover);
      for (int i = 0; i < 200; i++) CHECK(hits[static_cast<size_t>(i)] == (i < n));
      if (run % 100 == 0) nap();  // long enough for the workers to sleep
    }
    pool_destroy(pool);
  }
}

// ---------------------------------------------------------------- sampler

struct Sampler {
  Alloc alloc;
  SlotState slot;
  SampleScratch scratch;
  int vocab;

  explicit Sampler(int size) : alloc(), vocab(size) {
    CHECK(slot_init(&slot, vocab, 4, &alloc));
    CHECK(scratch_init(&scratch, vocab, &alloc));
  }
  ~Sampler() {
    slot_free(&slot);
    scratch_free(&scratch);
  }
  int32_t at(const std::vector<float> &logits, int64_t position) {
    int32_t id = -1;
    CHECK(sample_token(&slot, logits.data(), vocab, vocab, position, nullptr, 0, &scratch, nullptr,
                       &id));
    return id;
  }
};

ksl_sampling plain(float temperature) {
  ksl_sampling s = ksl_sampling();
  s.temperature = temperature;
  s.top_p = s.repetition = 1;
  return s;
}

// The filters and the draw in their most literal form.
int32_t literal_choice(const ksl_sampling &s, const std::vector<float> &logits, int64_t position) {
  std::vector<int32_t> ids;
  float most = -HUGE_VALF;
  for (size_t i = 0; i < logits.size(); i++) {
    if (logits[i] > -HUGE_VALF) ids.push_back(static_cast<int32_t>(i));
    most = std::max(most, logits[i]);
  }
  const auto scaled = [&](int32_t i) {
    return (logits[static_cast<size_t>(i)] - most) / s.temperature;
  };
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (s.top_k > 0 && ids.size() > static_cast<size_t>(s.top_k))
    ids.resize(static_cast<size_t>(s.top_k));
  double total = 0, mass = 0;
  for (int32_t i : ids) total += static_cast<double>(exp_f32(scaled(i)));
  size_t kept = 0;
  while (kept < ids.size() && (kept == 0 || mass < static_cast<double>(s.top_p) * total))
    mass += static_cast<double>(exp_f32(scaled(ids[kept++])));
  if (s.top_p < 1) ids.resize(kept);
  int32_t best = -1;
  double score = 0;
  for (int32_t i : ids) {
    if (s.min_p > 0 && exp_f32(scaled(i)) < s.min_p) continue;
    const double value = static_cast<double>(scaled(i)) + gumbel(s.seed, position, i);
    if (best < 0 || value > score || (value == score && i < best)) best = i, score = value;
  }
  return best;
}

void test_sampler_equals_literal() {
  Random random = {mix64(11), 0};
  for (int vocab : {1, 2, 33, 3000}) {
    Sampler k(vocab);
    std::vector<float> logits(static_cast<size_t>(vocab));
    for (int round = 0; round < 120; round++) {
      const float spread = round % 3 == 0 ? 1.0f : 12.0f;
      for (float &v : logits) v = floorf(random.unit() * 64) / 64 * spread;
      if (round % 5 == 0) logits[static_cast<size_t>(random.below(vocab))] = 100.0f;
      if (round % 4 == 0 && vocab > 2) logits[1] = -HUGE_VALF;
      ksl_sampling s = plain(0.2f + random.unit() * 1.5f);
      s.seed = random.next();
      const int ks[] = {0, 1, 7, 2000};
      s.top_k = ks[random.below(4)];
      s.top_p = random.below(2) ? 1.0f : 0.01f + random.unit() * 0.98f;
      s.min_p = random.below(2) ? 0.0f : random.unit() * 0.5f;
      slot_configure(&k.slot, vocab, &s);
      for (int p = 0; p < 4; p++) {
        const int32_t found = k.at(logits, p);
        const int32_t expected = literal_choice(s, logits, p);
        CHECK(found == expected);
      }
    }
  }
}

// The sequence of draws depends on seed, position and id alone, and follows the softmax.
void test_sampler_distribution() {
  Sampler k(4);
  const std::vector<float> logits = {0.0f, 1.0f, 2.0f, -1.0f};
  ksl_sampling s = plain(1);
  int counts[4] = {};
  const int draws = 40000;
  for (int i = 0; i < draws; i++) {
    s.seed = static_cast<uint64_t>(i / 100);
    slot_configure(&k.slot, 4, &s);
    counts[k.at(logits, i % 100)]++;
  }
  double total = 0;
  for (float v : logits) total += exp(static_cast<double>(v));
  for (int i = 0; i < 4; i++) {
    const double p = exp(static_cast<double>(logits[static_cast<size_t>(i)])) / total;
    CHECK(fabs(counts[i] - draws * p) < 5 * sqrt(draws * p * (1 - p)));
  }
}

void test_sampler_slot() {
  Sampler k(8);
  const std::vector<float> logits = {0, 1, 2, 3, 4, 5, 6, 7};
  ksl_sampling s = plain(0);
  s.presence = 1.5f;
  s.frequency = 0.25f;
  s.repetition = 2;
  const int32_t prompt[1] = {0}, output[2] = {7, 7}, stops[2] = {6, 2};
  s.prompt_ids = prompt;
  s.n_prompt = 1;
  s.output_ids = output;
  s.n_output = 2;
  s.stop_ids = stops;
  s.n_stop = 2;
  slot_configure(&k.slot, 8, &s);
  float adjusted[8];
  int32_t id = -1;
  const int32_t drafts[3] = {6, 6, 1};
  CHECK(sample_token(&k.slot, logits.data(), 8, 8, 0, drafts, 3, &k.scratch, adjusted, &id));
  CHECK(id == 5 && adjusted[7] == 3.5f - 2.0f && adjusted[6] == 3.0f - 2.0f &&
        adjusted[1] == 0.5f - 1.75f);
  CHECK(sample_token(&k.slot, logits.data(), 8, 8, 0, nullptr, 0, &k.scratch, adjusted, &id));
  CHECK(id == 6 && adjusted[6] == 6.0f && adjusted[1] == 1.0f);  // drafts left no trace
  CHECK(!slot_commit(&k.slot, 5) && k.slot.last_token == 5 && !k.slot.latched);
  CHECK(k.slot.counts[5] == 1);
  CHECK(slot_commit(&k.slot, 6) && k.slot.latched);
  // Forced ids come first, drafts do not use them.
  k.slot.forced[0] = 3;
  k.slot.forced_n = 1;
  CHECK(sample_draft(&k.slot, logits.data(), 8, 8, 0, 0.0f, &k.scratch, &id) && id == 4);
  CHECK(k.at(logits, 0) == 3);
  CHECK(k.at(logits, 0) == 4);
  // Configuring again forgets everything.
  const ksl_sampling greedy = plain(0);
  slot_configure(&k.slot, 8, &greedy);
  CHECK(!k.slot.latched && k.slot.last_token == -1 && k.slot.counts[5] == 0);
  CHECK(k.at(logits, 0) == 7);
  k.slot.mask[0] = 0x15;
  k.slot.has_mask = true;
  CHECK(k.at(logits, 0) == 4);
  k.slot.mask[0] = 0;
  CHECK(!sample_token(&k.slot, logits.data(), 8, 8, 0, nullptr, 0, &k.scratch, nullptr, &id));
  k.slot.has_mask = false;
  CHECK(sample_token(&k.slot, logits.data(), 8, 5, 0, nullptr, 0, &k.scratch, nullptr, &id) &&
        id == 4);
  for (float bad : {NAN, HUGE_VALF}) {
    std::vector<float> broken = logits;
    broken[3] = bad;
    CHECK(!sample_token(&k.slot, broken.data(), 8, 8, 0, nullptr, 0, &k.scratch, nullptr, &id));
  }
}

void test_logprobs() {
  const float logits[5] = {1, 3, 3, -2, 0};
  ksl_logprob out[6];
  logprobs_of(logits, 5, 4, 3, out);
  double total = 0;
  for (float v : logits) total += exp(static_cast<double>(v));
  CHECK(out[0].id == 4 && fabs(out[0].logprob + log(total)) < 1e-5);
  CHECK(out[1].id == 1 && out[2].id == 2 && out[3].id == 0);
  CHECK(fabs(out[1].logprob - (3 - log(total))) < 1e-5);
  logprobs_of(logits, 5, -1, 0, out);
  CHECK(out[0].id == -1 && out[0].logprob == 0);
  logprobs_of(logits, 3, 0, 5, out);
  CHECK(out[3].id == 0 && out[4].id == -1 && out[5].id == -1);
}

void test_noise() {
  double worst_log = 0, worst_exp = 0;
  for (int i = 1; i < 4000; i++) {
    const double x = ldexp(i * 0.37, i % 90 - 60);
    worst_log = std::max(worst_log, fabs(log_f64(x) - log(x)) / std::max(1.0, fabs(log(x))));
    const float y = -86.9f * static_cast<float>(i) / 4000;
    worst_exp = std::max(worst_exp, fabs(exp_f32(y) / exp(static_cast<double>(y)) - 1));
  }
  CHECK(worst_log < 1e-15);
  CHECK(worst_exp < 5e-7);
  CHECK(log_f64(1.0) == 0.0 && exp_f32(0.0f) == 1.0f && exp_f32(-100.0f) == 0.0f);
  double sum = 0;
  const int n = 20000;
  for (int i = 0; i < n; i++) {
    const double g = gumbel(5, i, i * 3);
    CHECK(isfinite(g) && g > -4 && g < 37);
    sum += g;
  }
  CHECK(fabs(sum / n - 0.5772) < 5 * 1.2825 / sqrt(n));  // mean and deviation of the distribution
  CHECK(gumbel(1, 2, 3) != gumbel(2, 2, 3) && gumbel(1, 2, 3) != gumbel(1, 3, 3));
}

// ---------------------------------------------------------------- codec

void test_codec() {
  for (int code = 0; code < 64; code++)
    CHECK(f32_to_e2m3(e2m3_to_f32(static_cast<uint8_t>(code))) == code);
  for (int code = 0; code < 16; code++)
    CHECK(f32_to_e2m1(e2m1_to_f32(static_cast<uint8_t>(code))) == code);
  for (int code = 0; code < 256; code++) {
    CHECK(f32_to_e4m3(e4m3_to_f32(static_cast<uint8_t>(code))) == code);
    if (code < 255) CHECK(e8m0_to_f32(static_cast<uint8_t>(code)) == ldexpf(1.0f, code - 127));
  }
  for (int code = 1; code < 127; code++)
    CHECK(f32_to_ue4m3(ue4m3_to_f32(static_cast<uint8_t>(code))) == code);
  CHECK(ue4m3_to_f32(0x38) == 1.0f && f32_to_ue4m3(0) == 1 && f32_to_ue4m3(-3) == 1);
  for (uint32_t v = 0; v < 65536; v++) {
    const float value = bf16_to_f32(static_cast<uint16_t>(v));
    if (value == value) CHECK(f32_to_bf16(value) == v);
  }
  const float quiet = bf16_to_f32(f32_to_bf16(NAN));
  CHECK(quiet != quiet);
  CHECK(fill_value(KSL_FILL_CONSTANT, 1, 2.5f, 9) == 2.5f);
  float low = 1, high = -1;
  for (uint64_t i = 0; i < 5000; i++) {
    const float v = fill_value(KSL_FILL_UNIFORM, 3, 1.0f, i);
    low = std::min(low, v);
    high = std::max(high, v);
  }
  CHECK(low < -0.99f && low > -1 && high > 0.99f && high < 1);
}

}  // namespace

int main(int argc, char **argv) {
  struct Test {
    const char *name;
    void (*run)();
  };
#define TEST(name)     \
  {                    \
    #name, test_##name \
  }
  const Test tests[] = {
      TEST(codec),
      TEST(noise),
      TEST(logprobs),
      TEST(sampler_slot),
      TEST(sampler_equals_literal),
      TEST(sampler_distribution),
      TEST(wave_faults),
      TEST(wave_needs),
      TEST(wave_mirror),
      TEST(wave_copy),
      TEST(wave_fuzz),
      TEST(open_checks),
      TEST(open_faults),
      TEST(pool),
      TEST(engine_order),
      TEST(engine_ring_and_descriptor),
      TEST(engine_wakeups),
      TEST(engine_poison),
      TEST(engine_idle_work),
      TEST(engine_close),
  };
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int run = 0;
  for (const Test &t : tests) {
    if (argc > 1 && strstr(t.name, argv[1]) == nullptr) continue;
    const int before = failures;
    t.run();
    run++;
    printf("%s %s\n", failures == before ? "ok  " : "FAIL", t.name);
  }
  printf("%d tests, %d failures\n", run, failures);
  return failures == 0 && run > 0 ? 0 : 1;
}
