// SwiGLU.
#include "state.h"

namespace ksl {

namespace {

struct ActTask {
  const Backend *b;
  const Rounding *rounding;
};

void act_task(void *context, int, int begin, int end) {
  const ActTask *t = static_cast<const ActTask *>(context);
  const Backend *b = t->b;
  for (int c = begin; c < end; c++) {
    float *gate = b->mlp_gate + c * b->mlp_stride;
    b->kernels->silu_mul(gate, b->mlp_up + c * b->mlp_stride, b->spec->intermediate, gate);
    round_column(t->rounding, gate, c);
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

void stage_mlp_act(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Matrix *const reader = &b->layers[layer].down;
  const Rounding rounding = begin_rounding(b, b->mlp_gate, b->batch->n, &reader, 1);
  ActTask task = {b, &rounding};
  const int64_t cost = static_cast<int64_t>(b->batch->n) * b->spec->intermediate * kGateCost;
  parallel(b, b->batch->n, cost + rounding_cost(&rounding), act_task, &task);
}

void stage_mlp_down(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const Projection projection = {&b->layers[layer].down, b->mixed, b->hidden_stride};
  project(b, &projection, 1, b->mlp_gate, b->mlp_stride, b->batch->n);
}

}  // namespace ksl
