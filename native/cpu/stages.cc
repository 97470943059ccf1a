// The stage table of the CPU backend and the taps between stages. A span of two stages leaves what
// both make.
#include <string.h>

#include "state.h"

namespace ksl {

namespace {

const StageSpan kInputSpans[] = {{0, 0, stage_embed}};
const StageSpan kLinearSpans[] = {
    {0, 0, stage_in_norm},        {1, 1, stage_gdn_project}, {2, 2, stage_gdn_conv},
    {3, 3, stage_gdn_unit},       {4, 4, stage_gdn_gates},   {5, 5, stage_gdn_scan},
    {6, 6, stage_gdn_gated_norm}, {7, 7, stage_gdn_out},     {8, 9, stage_mixer_join},
    {10, 10, stage_mlp_project},  {11, 11, stage_mlp_act},   {12, 12, stage_mlp_down},
    {13, 13, stage_mlp_add},
};
const StageSpan kFullSpans[] = {
    {0, 0, stage_in_norm},    {1, 1, stage_attn_project}, {2, 2, stage_attn_heads},
    {3, 3, stage_attn_store}, {4, 4, stage_attn_core},    {5, 5, stage_attn_gate},
    {6, 6, stage_attn_out},   {7, 8, stage_mixer_join},   {9, 9, stage_mlp_project},
    {10, 10, stage_mlp_act},  {11, 11, stage_mlp_down},   {12, 12, stage_mlp_add},
};
const StageSpan kOutputSpans[] = {{0, 0, stage_final_norm}, {1, 1, stage_head}};
const StageSpan kMtpInputSpans[] = {{0, 0, stage_mtp_input}};
const StageSpan kMtpOutputSpans[] = {{0, 0, stage_mtp_norm}, {1, 1, stage_mtp_head}};

const StageTable kTables[kListCount] = {{kInputSpans, 1},    {kLinearSpans, 13},
                                        {kFullSpans, 12},    {kOutputSpans, 2},
                                        {kMtpInputSpans, 1}, {kMtpOutputSpans, 2}};

// Copies a tap's columns out of the buffer it lives in right after its span.
void copy_tap(void *context, Tap tap, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const ModelSpec *spec = b->spec;
  const float *data = nullptr;
  int64_t stride = b->hidden_stride, segment_stride = 0;
  int segments = 1, width = tap_width(spec, tap);
  const int key_width = spec->lin_key_heads * spec->lin_key_dim;
  switch (tap) {
    case kTapEmbed:
    case kTapMid:
    case kTapOut:
    case kTapMtpInput:
      data = b->x;
      break;
    case kTapInNorm:
    case kTapPostNorm:
      data = b->normed;
      break;
    case kTapMixerOut:
    case kTapMlpOut:
      data = b->mixed;
      break;
    case kTapGdnQkv:
      data = b->qkv;
      stride = b->conv_stride;
      break;
    case kTapGdnConvSilu:
    case kTapGdnQ:
      data = b->conv;
      stride = b->conv_stride;
      break;
    case kTapGdnK:
      data = b->conv + key_width;
      stride = b->conv_stride;
      break;
    case kTapGdnV:
      data = b->conv + 2 * key_width;
      stride = b->conv_stride;
      break;
    case kTapGdnZ:
      data = b->z;
      stride = b->value_stride;
      break;
    case kTapGdnCore:
      data = b->core;
      stride = b->value_stride;
      break;
    case kTapGdnNormed:
      data = b->gated;
      stride = b->value_stride;
      break;
    case kTapGdnA:
      data = b->gate_a;
      stride = b->head_stride;
      break;
    case kTapGdnB:
      data = b->gate_b;
      stride = b->head_stride;
      break;
    case kTapGdnG:
      data = b->g;
      stride = b->head_stride;
      break;
    case kTapGdnBeta:
      data = b->beta;
      stride = b->head_stride;
      break;
    case kTapAttnQ:
      data = b->q;
      stride = b->query_stride;
      break;
    case kTapAttnGate:
      data = b->query_gate + spec->head_dim;
      stride = b->query_gate_stride;
      segments = spec->heads;
      width = spec->head_dim;
      segment_stride = 2 * static_cast<size_t>(spec->head_dim);
      break;
    case kTapAttnK:
      data = b->k;
      stride = b->kv_stride;
      break;
    case kTapAttnV:
      data = b->v;
      stride = b->kv_stride;
      break;
    case kTapAttnPregate:
    case kTapAttnGated:
      data = b->o;
      stride = b->query_stride;
      break;
    case kTapMlpGate:
    case kTapMlpAct:
      data = b->mlp_gate;
      stride = b->mlp_stride;
      break;
    case kTapMlpUp:
      data = b->mlp_up;
      stride = b->mlp_stride;
      break;
    case kTapFinalNorm:
      data = b->final;
      break;
    case kTapMtpHidden:
      data = b->chain;
      break;
    default:
      return;  // logits are copied by the head, batch by batch
  }
  tap_append(b, tap, layer, {data, stride, b->batch->n, segments, width, segment_stride});
}

}  // namespace

const StageTable *stage_table(StageList list) {
  return &kTables[list];
}

void walk(Backend *b, StageList list, int layer) {
  bool taps = b->wave->n_taps > 0 && b->batch == &b->trunk;
  program_walk(list, &kTables[list], b, layer, taps ? copy_tap : nullptr);
}

void tap_append(Backend *b, Tap tap, int layer, const TapColumns &from) {
  append_to_taps(b->wave, b->spec, tap, layer, from,
                 [](float *to, const float *data, size_t n) { memcpy(to, data, n * sizeof *to); });
}

}  // namespace ksl
