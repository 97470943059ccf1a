// SwiGLU.
#include "state.h"

namespace ksl {

namespace {

void act_task(void *context, int, int begin, int end) {
  const Backend *b = static_cast<const Backend *>(context);
  for (int c = begin; c < end; c++) {
    float *gate = b->mlp_gate + c * b->mlp_stride;
    b->kernels->silu_mul(gate, b->mlp_up + c * b->mlp_stride, b->spec->intermediate, gate);
  }
}

}  // namespace

void stage_mlp_project(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights *w = &b->layers[layer];
  const Projection projections[] = {{&w->gate, b->mlp_gate, b->mlp_stride},
                                    {&w->up, b->mlp_up, b->mlp_stride}};
  project(b, projections, 2, b->normed, b->hidden_stride, b->batch->n);
}

void stage_mlp_act(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->intermediate * kGateCost,
           act_task, b);
}

void stage_mlp_down(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Projection projection = {&b->layers[layer].down, b->mixed, b->hidden_stride};
  project(b, &projection, 1, b->mlp_gate, b->mlp_stride, b->batch->n);
}

}  // namespace ksl
