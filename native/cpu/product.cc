// Matrix products of a wave's columns, and the rounding of their input.
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

struct RoundTask {
  const Rounding *rounding;
  const float *x;
  size_t stride;
};

void round_task(void *context, int, int begin, int end) {
  const RoundTask *t = static_cast<const RoundTask *>(context);
  for (int c = begin; c < end; c++) round_column(t->rounding, t->x + c * t->stride, c);
}

}  // namespace

Rounding begin_rounding(Backend *b, const float *x, int columns, const Matrix *const *matrices,
                        int n_matrices) {
  Rounding rounding = {b, matrices[0]->cols, columns, false, false};
  for (int i = 0; i < n_matrices; i++) {
    rounding.to_int8 |= takes_int8(b, matrices[i]);
    rounding.to_bf16 |= takes_bf16(b, matrices[i]);
  }
  b->rounded_input = x;
  return rounding;
}

int64_t rounding_cost(const Rounding *r) {
  return static_cast<int64_t>(r->columns) * r->width * kRoundCost * (r->to_int8 + r->to_bf16);
}

void round_column(const Rounding *r, const float *x, int column) {
  const Backend *b = r->b;
  if (r->to_int8) b->kernels->quantize(x, r->width, b->quantized + column, r->columns);
  if (r->to_bf16) b->bf16->round(x, r->width, b->rounded + column, r->columns);
}

void project(Backend *b, const Projection *projections, int n_projections, const float *x,
             size_t x_stride, int columns) {
  const Matrix *matrices[kMaxProjections];
  int panels = 0;
  for (int i = 0; i < n_projections; i++) {
    matrices[i] = projections[i].w;
    panels += panels_of(projections[i].w);
  }
  if (b->rounded_input != x) {
    const Rounding rounding = begin_rounding(b, x, columns, matrices, n_projections);
    RoundTask task = {&rounding, x, x_stride};
    if (rounding.to_int8 || rounding.to_bf16)
      parallel(b, columns, rounding_cost(&rounding), round_task, &task);
  }
  b->rounded_input = nullptr;
  ProjectTask task = {b, projections, n_projections, x, x_stride, columns};
  const int64_t cost =
      static_cast<int64_t>(panels) * kPanel * projections[0].w->cols * (columns + 1) / 2;
  parallel(b, panels, cost, project_task, &task);
}

}  // namespace ksl
