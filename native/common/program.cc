#include "program.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

namespace ksl {

namespace {

const StageInfo kInput[] = {
    {"embed", {}, {kTapEmbed}, {"model.embed_tokens.weight"}},
};

const StageInfo kLinear[] = {
    {"in_norm", {}, {kTapInNorm}, {"input_layernorm.weight"}},
    {"gdn_project",
     {kTapInNorm},
     {kTapGdnQkv, kTapGdnZ, kTapGdnB, kTapGdnA},
     {"linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight",
      "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"}},
    {"gdn_conv", {kTapGdnQkv}, {kTapGdnConvSilu}, {"linear_attn.conv1d.weight"}},
    {"gdn_unit", {kTapGdnConvSilu}, {kTapGdnQ, kTapGdnK, kTapGdnV}, {}},
    {"gdn_gates",
     {kTapGdnB, kTapGdnA},
     {kTapGdnG, kTapGdnBeta},
     {"linear_attn.A_log", "linear_attn.dt_bias"}},
    {"gdn_scan", {kTapGdnQ, kTapGdnK, kTapGdnV, kTapGdnG}, {kTapGdnCore}, {}},
    {"gdn_gated_norm", {kTapGdnCore, kTapGdnZ}, {kTapGdnNormed}, {"linear_attn.norm.weight"}},
    {"gdn_out", {kTapGdnNormed}, {kTapMixerOut}, {"linear_attn.out_proj.weight"}},
    {"mixer_add", {kTapMixerOut}, {kTapMid}, {}},
    {"post_norm", {kTapMid}, {kTapPostNorm}, {"post_attention_layernorm.weight"}},
    {"mlp_project",
     {kTapPostNorm},
     {kTapMlpGate, kTapMlpUp},
     {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
    {"mlp_act", {kTapMlpGate, kTapMlpUp}, {kTapMlpAct}, {}},
    {"mlp_down", {kTapMlpAct}, {kTapMlpOut}, {"mlp.down_proj.weight"}},
    {"mlp_add", {kTapMlpOut, kTapMid}, {kTapOut}, {}},
};

const StageInfo kFull[] = {
    {"in_norm", {}, {kTapInNorm}, {"input_layernorm.weight"}},
    {"attn_project",
     {kTapInNorm},
     {kTapAttnGate, kTapAttnV},
     {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
    {"attn_heads",
     {},
     {kTapAttnQ, kTapAttnK},
     {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}},
    {"attn_store", {kTapAttnK, kTapAttnV}, {}, {}},
    {"attn_core", {kTapAttnQ}, {kTapAttnPregate}, {}},
    {"attn_gate", {kTapAttnPregate, kTapAttnGate}, {kTapAttnGated}, {}},
    {"attn_out", {kTapAttnGated}, {kTapMixerOut}, {"self_attn.o_proj.weight"}},
    {"mixer_add", {kTapMixerOut}, {kTapMid}, {}},
    {"post_norm", {kTapMid}, {kTapPostNorm}, {"post_attention_layernorm.weight"}},
    {"mlp_project",
     {kTapPostNorm},
     {kTapMlpGate, kTapMlpUp},
     {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
    {"mlp_act", {kTapMlpGate, kTapMlpUp}, {kTapMlpAct}, {}},
    {"mlp_down", {kTapMlpAct}, {kTapMlpOut}, {"mlp.down_proj.weight"}},
    {"mlp_add", {kTapMlpOut, kTapMid}, {kTapOut}, {}},
};

const StageInfo kOutput[] = {
    {"final_norm", {kTapOut}, {kTapFinalNorm}, {"model.norm.weight"}},
    {"head", {kTapFinalNorm}, {kTapLogits}, {"lm_head.weight"}},
};

const StageInfo kMtpInput[] = {
    {"mtp_input",
     {kTapEmbed, kTapFinalNorm},
     {kTapMtpInput},
     {"mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight"}},
};

const StageInfo kMtpOutput[] = {
    {"mtp_norm", {kTapOut}, {kTapMtpHidden}, {"mtp.norm.weight"}},
    {"mtp_head", {kTapMtpHidden}, {kTapMtpLogits}, {"lm_head.weight"}},
};

#define KSL_LIST(list) {list, static_cast<int>(sizeof(list) / sizeof(list[0]))}
const struct {
  const StageInfo *stages;
  int n;
} kLists[kListCount] = {KSL_LIST(kInput),  KSL_LIST(kLinear),   KSL_LIST(kFull),
                        KSL_LIST(kOutput), KSL_LIST(kMtpInput), KSL_LIST(kMtpOutput)};
#undef KSL_LIST

enum Scope { kScopeModel, kScopeMtp, kScopeLinear, kScopeFull, kScopeLayer };

const struct {
  Tap tap;
  Scope scope;
  const char *name;
} kTaps[] = {
    {kTapEmbed, kScopeModel, "embed"},
    {kTapInNorm, kScopeLayer, "in_norm"},
    {kTapGdnQkv, kScopeLinear, "gdn_qkv"},
    {kTapGdnZ, kScopeLinear, "gdn_z"},
    {kTapGdnB, kScopeLinear, "gdn_b"},
    {kTapGdnA, kScopeLinear, "gdn_a"},
    {kTapGdnConvSilu, kScopeLinear, "gdn_conv_silu"},
    {kTapGdnQ, kScopeLinear, "gdn_q"},
    {kTapGdnK, kScopeLinear, "gdn_k"},
    {kTapGdnV, kScopeLinear, "gdn_v"},
    {kTapGdnG, kScopeLinear, "gdn_g"},
    {kTapGdnBeta, kScopeLinear, "gdn_beta"},
    {kTapGdnCore, kScopeLinear, "gdn_core"},
    {kTapGdnNormed, kScopeLinear, "gdn_normed"},
    {kTapAttnQ, kScopeFull, "attn_q"},
    {kTapAttnGate, kScopeFull, "attn_gate"},
    {kTapAttnK, kScopeFull, "attn_k"},
    {kTapAttnV, kScopeFull, "attn_v"},
    {kTapAttnPregate, kScopeFull, "attn_pregate"},
    {kTapAttnGated, kScopeFull, "attn_gated"},
    {kTapMixerOut, kScopeLayer, "mixer_out"},
    {kTapMid, kScopeLayer, "mid"},
    {kTapPostNorm, kScopeLayer, "post_norm"},
    {kTapMlpGate, kScopeLayer, "mlp_gate"},
    {kTapMlpUp, kScopeLayer, "mlp_up"},
    {kTapMlpAct, kScopeLayer, "mlp_act"},
    {kTapMlpOut, kScopeLayer, "mlp_out"},
    {kTapOut, kScopeLayer, "out"},
    {kTapFinalNorm, kScopeModel, "final_norm"},
    {kTapLogits, kScopeModel, "logits"},
    {kTapMtpInput, kScopeMtp, "mtp_input"},
    {kTapMtpHidden, kScopeMtp, "mtp_hidden"},
    {kTapMtpLogits, kScopeMtp, "mtp_logits"},
};

}  // namespace

int stage_count(StageList list) {
  return kLists[list].n;
}

const StageInfo *stage_at(StageList list, int index) {
  return &kLists[list].stages[index];
}

int program_check(StageList list, const StageTable *table, ksl_error *error) {
  int next = 0;
  for (int i = 0; i < table->n; i++) {
    const StageSpan *span = &table->spans[i];
    if (span->first != next || span->last < span->first || span->last >= kLists[list].n ||
        !span->run) {
      return fail(error, KSL_FATAL, "Span %d of stage list %d does not tile it.", i, int(list));
    }
    next = span->last + 1;
  }
  if (next != kLists[list].n) {
    return fail(error, KSL_FATAL, "Stage list %d is covered up to stage %d of %d only.", int(list),
                next, kLists[list].n);
  }
  return KSL_OK;
}

void program_walk(StageList list, const StageTable *table, void *context, int layer, TapDone done) {
  for (int i = 0; i < table->n; i++) {
    const StageSpan *span = &table->spans[i];
    span->run(context, layer);
    for (int s = span->first; done && s <= span->last; s++) {
      const StageInfo *info = stage_at(list, s);
      for (int k = 0; k < kStageOutputs && info->out[k] != kTapNone; k++)
        done(context, info->out[k], layer);
    }
  }
}

int tap_width(const ModelSpec *spec, Tap tap) {
  switch (tap) {
    case kTapGdnQkv:
    case kTapGdnConvSilu:
      return spec->conv_channels;
    case kTapGdnB:
    case kTapGdnA:
    case kTapGdnG:
    case kTapGdnBeta:
      return spec->lin_value_heads;
    case kTapGdnQ:
    case kTapGdnK:
      return spec->lin_key_heads * spec->lin_key_dim;
    case kTapGdnZ:
    case kTapGdnV:
    case kTapGdnCore:
    case kTapGdnNormed:
      return spec->v_width;
    case kTapAttnQ:
    case kTapAttnGate:
    case kTapAttnPregate:
    case kTapAttnGated:
      return spec->q_width;
    case kTapAttnK:
    case kTapAttnV:
      return spec->kv_width;
    case kTapMlpGate:
    case kTapMlpUp:
    case kTapMlpAct:
      return spec->intermediate;
    case kTapLogits:
    case kTapMtpLogits:
      return spec->vocab;
    default:
      return spec->hidden;
  }
}

Tap tap_find(const ModelSpec *spec, const char *name, int *layer) {
  *layer = 0;
  bool in_layer = false;
  if (!strncmp(name, "layers.", 7)) {
    char *end = nullptr;
    long index = strtol(name + 7, &end, 10);
    if (end == name + 7 || *end != '.' || index < 0 || index >= spec->layers) return kTapNone;
    *layer = static_cast<int>(index);
    name = end + 1;
    in_layer = true;
  } else if (!strncmp(name, "mtp.layers.0.", 13)) {
    if (!spec->mtp_layers) return kTapNone;
    *layer = spec->layers;
    name += 13;
    in_layer = true;
  }
  bool full = in_layer && (*layer == spec->layers || spec->layer_kinds[*layer] == KSL_LAYER_FULL);
  for (const auto &entry : kTaps) {
    if (strcmp(entry.name, name)) continue;
    switch (entry.scope) {
      case kScopeModel:
        return in_layer ? kTapNone : entry.tap;
      case kScopeMtp:
        return in_layer || !spec->mtp_layers ? kTapNone : entry.tap;
      case kScopeLinear:
        return in_layer && !full ? entry.tap : kTapNone;
      case kScopeFull:
        return full ? entry.tap : kTapNone;
      case kScopeLayer:
        return in_layer ? entry.tap : kTapNone;
    }
  }
  return kTapNone;
}

}  // namespace ksl
