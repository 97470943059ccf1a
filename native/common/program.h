// The stage list of each layer kind: what the model computes, in which order, and the names and
// widths of everything on the way. A backend fills spans of it with functions; tests compare
// backends at the ends of spans by tap name. Nothing here is inferred or allocated.
//
// Tap names: `embed`, `final_norm`, `logits`, `mtp_hidden`, `mtp_logits`; a layer's taps are
// `layers.N.NAME`, those of the MTP layer `mtp.layers.0.NAME`. A tap is float32 [columns][width].
// MTP taps are teacher-forced: column p is made from (token p, trunk hidden p - 1), and is zero
// for p = 0, which has no row.
#pragma once
#include "model.h"

namespace ksl {

enum Tap {
  kTapNone = 0,
  kTapEmbed,
  kTapInNorm,
  // linear layers
  kTapGdnQkv,
  kTapGdnZ,
  kTapGdnB,
  kTapGdnA,
  kTapGdnConvSilu,
  kTapGdnQ,
  kTapGdnK,
  kTapGdnV,
  kTapGdnG,
  kTapGdnBeta,
  kTapGdnCore,
  kTapGdnNormed,
  // full layers
  kTapAttnQ,
  kTapAttnGate,
  kTapAttnK,
  kTapAttnV,
  kTapAttnPregate,
  kTapAttnGated,
  // every layer
  kTapMixerOut,
  kTapMid,
  kTapPostNorm,
  kTapMlpGate,
  kTapMlpUp,
  kTapMlpAct,
  kTapMlpOut,
  kTapOut,
  // the ends
  kTapFinalNorm,
  kTapLogits,
  kTapMtpInput,
  kTapMtpHidden,
  kTapMtpLogits,
  kTapCount
};

enum StageList {
  kListInput = 0,  // embedding
  kListLinear,     // a linear layer
  kListFull,       // a full-attention layer, the MTP layer included
  kListOutput,     // final norm and head
  kListMtpInput,   // joins embedding and trunk hidden
  kListMtpOutput,  // MTP norm and head
  kListCount
};

enum { kStageInputs = 4, kStageOutputs = 4, kStageWeights = 4 };

// One stage. Unused entries are kTapNone and null. weights: canonical names, in layers without
// their prefix.
struct StageInfo {
  const char *name;
  Tap in[kStageInputs];
  Tap out[kStageOutputs];
  const char *weights[kStageWeights];
};

int stage_count(StageList list);
const StageInfo *stage_at(StageList list, int index);

// A backend function that computes stages [first, last] of a list; `layer` counts trunk layers,
// then the MTP layer.
typedef void (*StageRun)(void *context, int layer);
struct StageSpan {
  int first, last;
  StageRun run;
};
struct StageTable {
  const StageSpan *spans;
  int n;
};
// Called after a span for every output of its stages, in order.
typedef void (*TapDone)(void *context, Tap tap, int layer);

// KSL_OK if the spans tile the list exactly, in order.
int program_check(StageList list, const StageTable *table, ksl_error *error);
// Runs all spans of a list. done: may be null.
void program_walk(StageList list, const StageTable *table, void *context, int layer, TapDone done);

// Floats of a tap in one column.
int tap_width(const ModelSpec *spec, Tap tap);
// The tap of that name and its layer (0 where it has none); kTapNone if this model has none such.
Tap tap_find(const ModelSpec *spec, const char *name, int *layer);

}  // namespace ksl
