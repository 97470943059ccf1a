// Embedding, the norms before mixer and MLP, residual adds, and the projection that all stages use.
#include <string.h>

#include "state.h"

namespace ksl {

namespace {

struct ProjectTask {
  Backend *b;
  const Projection *projections;
  int n;
  const float *x;
  size_t x_stride;
  int columns;
};

int panels_of(const Matrix *w) {
  return (w->rows + kPanel - 1) / kPanel;
}

bool takes_int8(const Backend *b, const Matrix *w) {
  return b->quantized && has_small_integers(w);
}
bool takes_bf16(const Backend *b, const Matrix *w) {
  return b->bf16 && has_bf16_products(w);
}

// Items are panels, counted through all matrices.
void project_task(void *context, int, int begin, int end) {
  const ProjectTask *t = static_cast<const ProjectTask *>(context);
  int base = 0;
  for (int i = 0; i < t->n && base < end; i++) {
    const Projection *p = &t->projections[i];
    const int panels = panels_of(p->w);
    const int from = begin > base ? begin - base : 0;
    const int to = end < base + panels ? end - base : panels;
    if (from < to) {
      const int last = to * kPanel < p->w->rows ? to * kPanel : p->w->rows;
      const Kernels *kernels = t->b->kernels;
      if (takes_bf16(t->b, p->w)) {
        t->b->bf16->gemm(p->w, t->b->rounded, t->columns, t->columns, from * kPanel, last, p->y,
                         p->stride);
      } else if (takes_int8(t->b, p->w)) {
        kernels->gemm_int(p->w, t->b->quantized, t->columns, t->columns, from * kPanel, last, p->y,
                          p->stride);
      } else {
        kernels->gemm(p->w, t->x, t->x_stride, t->columns, from * kPanel, last, p->y, p->stride);
      }
    }
    base += panels;
  }
}

struct QuantizeTask {
  Backend *b;
  const float *x;
  size_t stride;
  int n;  // of a column
  int columns;
};

void quantize_task(void *context, int, int begin, int end) {
  const QuantizeTask *t = static_cast<const QuantizeTask *>(context);
  for (int c = begin; c < end; c++) {
    t->b->kernels->quantize(t->x + c * t->stride, t->n, t->b->quantized + c, t->columns);
  }
}

void round_task(void *context, int, int begin, int end) {
  const QuantizeTask *t = static_cast<const QuantizeTask *>(context);
  for (int c = begin; c < end; c++) {
    t->b->bf16->round(t->x + c * t->stride, t->n, t->b->rounded + c, t->columns);
  }
}

struct NormTask {
  const Backend *b;
  const float *x, *gain;
  float *out;
};

void norm_task(void *context, int, int begin, int end) {
  const NormTask *t = static_cast<const NormTask *>(context);
  const Backend *b = t->b;
  for (int c = begin; c < end; c++) {
    b->kernels->rmsnorm(t->x + c * b->hidden_stride, t->gain, b->spec->hidden, b->spec->norm_eps,
                        t->out + c * b->hidden_stride);
  }
}

void embed_task(void *context, int, int begin, int end) {
  const Backend *b = static_cast<const Backend *>(context);
  for (int c = begin; c < end; c++) {
    matrix_row(&b->embedding, b->batch->token[c], b->x + c * b->hidden_stride);
  }
}

void add_task(void *context, int, int begin, int end) {
  const Backend *b = static_cast<const Backend *>(context);
  for (int c = begin; c < end; c++) {
    b->kernels->add(b->x + c * b->hidden_stride, b->mixed + c * b->hidden_stride, b->spec->hidden);
  }
}

void add_columns(Backend *b) {
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->hidden / 4, add_task, b);
}

}  // namespace

void project(Backend *b, const Projection *projections, int n_projections, const float *x,
             size_t x_stride, int columns) {
  ProjectTask task = {b, projections, n_projections, x, x_stride, columns};
  int panels = 0;
  bool quantized = false, rounded = false;
  for (int i = 0; i < n_projections; i++) {
    panels += panels_of(projections[i].w);
    quantized |= takes_int8(b, projections[i].w);
    rounded |= takes_bf16(b, projections[i].w);
  }
  QuantizeTask quantize = {b, x, x_stride, projections[0].w->cols, columns};
  const int64_t quantize_cost = static_cast<int64_t>(columns) * quantize.n * kQuantizeCost;
  if (quantized) parallel(b, columns, quantize_cost, quantize_task, &quantize);
  if (rounded) parallel(b, columns, quantize_cost, round_task, &quantize);
  const int64_t cost =
      static_cast<int64_t>(panels) * kPanel * projections[0].w->cols * (columns + 1) / 2;
  parallel(b, panels, cost, project_task, &task);
}

void norm_columns(Backend *b, const float *x, const float *gain, float *out, int columns) {
  NormTask task = {b, x, gain, out};
  parallel(b, columns, static_cast<int64_t>(columns) * b->spec->hidden, norm_task, &task);
}

void stage_embed(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->hidden, embed_task, b);
}

void stage_in_norm(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  norm_columns(b, b->x, b->layers[layer].in_norm, b->normed, b->batch->n);
}

void stage_post_norm(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  norm_columns(b, b->x, b->layers[layer].post_norm, b->normed, b->batch->n);
}

void stage_mixer_add(void *context, int) {
  add_columns(static_cast<Backend *>(context));
}

void stage_mlp_add(void *context, int) {
  add_columns(static_cast<Backend *>(context));
}

}  // namespace ksl
