// Embedding, residual adds, and the norms before mixer and MLP.
#include "state.h"

namespace ksl {

namespace {

// A norm of b->x or another input, behind the add of b->mixed to it or not, and rounded for the
// products that read it or not.
struct NormTask {
  Backend *b;
  float *x;
  bool add;
  const float *gain;
  float *out;
  const Rounding *rounding;
};

void norm_task(void *context, int, int begin, int end) {
  const NormTask *t = static_cast<const NormTask *>(context);
  const Backend *b = t->b;
  const int width = b->spec->hidden;
  for (int c = begin; c < end; c++) {
    const size_t at = c * b->hidden_stride;
    if (t->add) b->kernels->add(t->x + at, b->mixed + at, width);
    b->kernels->rmsnorm(t->x + at, t->gain, width, b->spec->norm_eps, t->out + at);
    if (t->rounding) round_column(t->rounding, t->out + at, c);
  }
}

// b->normed for the products of some matrices.
void norm_for(Backend *b, bool add, const float *gain, const Matrix *const *readers,
              int n_readers) {
  const int n = b->batch->n;
  const Rounding rounding = begin_rounding(b, b->normed, n, readers, n_readers);
  NormTask task = {b, b->x, add, gain, b->normed, &rounding};
  parallel(b, n, static_cast<int64_t>(n) * b->spec->hidden * 5 / 4 + rounding_cost(&rounding),
           norm_task, &task);
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

}  // namespace

void norm_columns(Backend *b, float *x, const float *gain, float *out, int columns) {
  NormTask task = {b, x, false, gain, out, nullptr};
  parallel(b, columns, static_cast<int64_t>(columns) * b->spec->hidden, norm_task, &task);
}

void stage_embed(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->hidden, embed_task, b);
}

void stage_in_norm(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights *w = &b->layers[layer];
  const Matrix *const linear[] = {&w->linear.qkv, &w->linear.z};
  const Matrix *const full[] = {&w->full.q, &w->full.k, &w->full.v};
  if (w->kind == KSL_LAYER_FULL)
    norm_for(b, false, w->in_norm, full, 3);
  else
    norm_for(b, false, w->in_norm, linear, 2);
}

void stage_mixer_join(void *context, int layer) {
  Backend *b = static_cast<Backend *>(context);
  const LayerWeights *w = &b->layers[layer];
  const Matrix *const readers[] = {&w->gate, &w->up};
  norm_for(b, true, w->post_norm, readers, 2);
}

void stage_mlp_add(void *context, int) {
  Backend *b = static_cast<Backend *>(context);
  parallel(b, b->batch->n, static_cast<int64_t>(b->batch->n) * b->spec->hidden / 4, add_task, b);
}

}  // namespace ksl
