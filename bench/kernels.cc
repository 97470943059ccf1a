// Times single kernels of the CPU backend for bench/kernels.py.
//
// usage: kernels ISA THREADS; reads one request a line and prints seconds for each:
//   read BYTES                       every thread reads its part of a buffer
//   int8 | float                     operations per second of the unit that products use (a rate)
//   bf16                             yes or no: whether there are products of bf16
//   gemm FORM ENCODING ROWS COLS N   FORM int8, bf16 or float, N columns; weights rotate through
//                                    memory
//   quantize COLS N
//   scan HEADS KEY VALUE N           N tokens of the delta rule, all heads
// Times are medians over repetitions of about half a second in all.
#include "../native/cpu/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <vector>

#include "../native/common/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace ksl;

namespace {

const Kernels *kernels;
Pool *pool;
int threads;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

template <class F>
double median_seconds(F run) {
  std::vector<double> times;
  run(0);
  const double end = now() + 0.5;
  for (int i = 1; (now() < end || times.size() < 5) && times.size() < 2000; i++) {
    const double start = now();
    run(i);
    times.push_back(now() - start);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

Alloc alloc = {};

uint8_t *bytes(size_t n) {
  uint8_t *p = (uint8_t *)alloc_huge(&alloc, n);
  if (!p) abort();
  memset(p, 0, n);  // pages of their own
  return p;
}

float noise(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(int32_t)*state * 0x1p-31f;
}

float *floats(size_t n) {
  float *p = (float *)bytes(4 * n);
  uint32_t state = 1;
  for (size_t i = 0; i < n; i++) p[i] = noise(&state);
  return p;
}

// ---- limits

volatile uint64_t sink;

struct ReadTask {
  const uint8_t *data;
};

void read_task(void *context, int, int begin, int end) {
  typedef uint64_t Wide __attribute__((vector_size(64)));
  const Wide *p = (const Wide *)((ReadTask *)context)->data;
  Wide a = {}, b = {}, c = {}, d = {};
  for (size_t i = (size_t)begin * 64; i < (size_t)end * 64; i += 4) {
    a ^= p[i];
    b ^= p[i + 1];
    c ^= p[i + 2];
    d ^= p[i + 3];
  }
  a ^= b ^ c ^ d;
  sink = a[0] ^ a[7];
}

double read_seconds(size_t size) {
  ReadTask task = {bytes(size)};
  const double seconds =
      median_seconds([&](int) { pool_run(pool, (int)(size / 4096), 1, read_task, &task); });
  alloc_free((void *)task.data);
  return seconds;
}

const int kPeakSteps = 200000;

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512vnni"))) void int8_avx512() {
  typedef int32_t Lanes __attribute__((vector_size(64)));
  const Lanes x = (Lanes)_mm512_set1_epi8(1);
  Lanes a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, a6 = x, a7 = x, a8 = x, a9 = x, a10 = x;
  Lanes a11 = x;
  for (int i = 0; i < kPeakSteps; i++) {
#define KSL_STEP(a)                                                   \
  a = (Lanes)_mm512_dpbusd_epi32((__m512i)a, (__m512i)x, (__m512i)x); \
  __asm__ volatile("" : "+v"(a))
    KSL_STEP(a0);
    KSL_STEP(a1);
    KSL_STEP(a2);
    KSL_STEP(a3);
    KSL_STEP(a4);
    KSL_STEP(a5);
    KSL_STEP(a6);
    KSL_STEP(a7);
    KSL_STEP(a8);
    KSL_STEP(a9);
    KSL_STEP(a10);
    KSL_STEP(a11);
#undef KSL_STEP
  }
  const Lanes sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
  memcpy((void *)&sink, &sum, sizeof sink);
}
__attribute__((target("avx2"))) void int8_avx2() {
  typedef int32_t Lanes __attribute__((vector_size(32)));
  const Lanes x = (Lanes)_mm256_set1_epi8(1), one = (Lanes)_mm256_set1_epi16(1);
  Lanes a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, a6 = x, a7 = x, a8 = x, a9 = x, a10 = x;
  Lanes a11 = x;
  for (int i = 0; i < kPeakSteps; i++) {
#define KSL_STEP(a)                                                                                \
  a += (Lanes)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(x ^ a), (__m256i)x), (__m256i)one); \
  __asm__ volatile("" : "+v"(a))
    KSL_STEP(a0);
    KSL_STEP(a1);
    KSL_STEP(a2);
    KSL_STEP(a3);
    KSL_STEP(a4);
    KSL_STEP(a5);
    KSL_STEP(a6);
    KSL_STEP(a7);
    KSL_STEP(a8);
    KSL_STEP(a9);
    KSL_STEP(a10);
    KSL_STEP(a11);
#undef KSL_STEP
  }
  const Lanes sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
  memcpy((void *)&sink, &sum, sizeof sink);
}
__attribute__((target("avx512f"))) void float_avx512() {
  typedef float Lanes __attribute__((vector_size(64)));
  const Lanes x = (Lanes)_mm512_set1_ps(0.5f);
  Lanes a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, a6 = x, a7 = x, a8 = x, a9 = x, a10 = x;
  Lanes a11 = x;
  for (int i = 0; i < kPeakSteps; i++) {
#define KSL_STEP(a)                                            \
  a = (Lanes)_mm512_fmadd_ps((__m512)x, (__m512)x, (__m512)a); \
  __asm__ volatile("" : "+v"(a))
    KSL_STEP(a0);
    KSL_STEP(a1);
    KSL_STEP(a2);
    KSL_STEP(a3);
    KSL_STEP(a4);
    KSL_STEP(a5);
    KSL_STEP(a6);
    KSL_STEP(a7);
    KSL_STEP(a8);
    KSL_STEP(a9);
    KSL_STEP(a10);
    KSL_STEP(a11);
#undef KSL_STEP
  }
  const Lanes sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
  memcpy((void *)&sink, &sum, sizeof sink);
}
__attribute__((target("avx2,fma"))) void float_avx2() {
  typedef float Lanes __attribute__((vector_size(32)));
  const Lanes x = (Lanes)_mm256_set1_ps(0.5f);
  Lanes a0 = x, a1 = x, a2 = x, a3 = x, a4 = x, a5 = x, a6 = x, a7 = x, a8 = x, a9 = x, a10 = x;
  Lanes a11 = x;
  for (int i = 0; i < kPeakSteps; i++) {
#define KSL_STEP(a)                                            \
  a = (Lanes)_mm256_fmadd_ps((__m256)x, (__m256)x, (__m256)a); \
  __asm__ volatile("" : "+v"(a))
    KSL_STEP(a0);
    KSL_STEP(a1);
    KSL_STEP(a2);
    KSL_STEP(a3);
    KSL_STEP(a4);
    KSL_STEP(a5);
    KSL_STEP(a6);
    KSL_STEP(a7);
    KSL_STEP(a8);
    KSL_STEP(a9);
    KSL_STEP(a10);
    KSL_STEP(a11);
#undef KSL_STEP
  }
  const Lanes sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;
  memcpy((void *)&sink, &sum, sizeof sink);
}
#endif

// Operations per second of 12 independent chains; 0 where this path has no such unit.
double peak(bool integers) {
#if defined(__x86_64__)
  void (*run)() = nullptr;
  int lanes = 0;
  if (!strcmp(kernels->name, "avx512")) {
    run = integers ? int8_avx512 : float_avx512;
    lanes = 16;
  } else if (!strcmp(kernels->name, "avx2")) {
    run = integers ? int8_avx2 : float_avx2;
    lanes = 8;
  }
  if (!run) return 0;
  const auto task = [](void *context, int, int, int) { (*(void (**)())context)(); };
  const double seconds = median_seconds([&](int) { pool_run(pool, threads, 1, task, &run); });
  return 12.0 * kPeakSteps * lanes * (integers ? 8 : 2) * threads / seconds;
#else
  return 0;
#endif
}

// ---- kernels

QuantizedBlock *blocks(int cols, int n) {
  return (QuantizedBlock *)bytes(sizeof(QuantizedBlock) * (size_t)quantized_blocks(cols) * n);
}

struct GemmTask {
  const Matrix *w;
  const float *x;
  const QuantizedBlock *quantized;  // of int8 products
  const RoundedBlock *rounded;      // of bf16 ones
  int n;
  float *y;
};

void gemm_task(void *context, int, int begin, int end) {
  const GemmTask *t = (const GemmTask *)context;
  const int r0 = begin * kPanel, r1 = std::min(end * kPanel, t->w->rows);
  if (t->quantized)
    kernels->gemm_int(t->w, t->quantized, (size_t)t->n, t->n, r0, r1, t->y, (size_t)t->w->rows);
  else if (t->rounded)
    bf16_for(kernels)->gemm(t->w, t->rounded, (size_t)t->n, t->n, r0, r1, t->y, (size_t)t->w->rows);
  else
    kernels->gemm(t->w, t->x, (size_t)t->w->cols, t->n, r0, r1, t->y, (size_t)t->w->rows);
}

double gemm_seconds(const char *form, int encoding, int rows, int cols, int n) {
  const size_t size = matrix_bytes(encoding, rows, cols);
  const size_t rotate = n < 32 ? (size_t)384 << 20 : size;  // far over any cache
  std::vector<Matrix> copies(std::max<size_t>(1, rotate / size));
  uint8_t *storage = bytes(copies.size() * size);  // of all, as an engine has it: on huge pages
  uint32_t state = 1;
  for (size_t i = 0; i < copies.size() * size; i += 4) {
    noise(&state);
    const uint32_t code = state >> 3 & 0x3b3b3b3b;
    memcpy(storage + i, &code, 4);  // finite in every encoding, as code or as scale
  }
  for (size_t i = 0; i < copies.size(); i++)
    matrix_begin(encoding, rows, cols, storage + i * size, &copies[i]);
  float *x = floats((size_t)cols * n), *y = floats((size_t)rows * n);
  QuantizedBlock *quantized = blocks(cols, n);
  for (int c = 0; c < n; c++)
    kernels->quantize(x + (size_t)c * cols, cols, quantized + c, (size_t)n);
  const size_t block_count = (size_t)quantized_blocks(cols) * n;
  RoundedBlock *rounded = (RoundedBlock *)bytes(sizeof(RoundedBlock) * block_count);
  const bool bf16 = !strcmp(form, "bf16");
  for (int c = 0; bf16 && c < n; c++)
    bf16_for(kernels)->round(x + (size_t)c * cols, cols, rounded + c, (size_t)n);
  GemmTask task = {nullptr, x, strcmp(form, "int8") ? nullptr : quantized, bf16 ? rounded : nullptr,
                   n,       y};
  const double seconds = median_seconds([&](int i) {
    task.w = &copies[(size_t)i % copies.size()];
    pool_run(pool, (rows + kPanel - 1) / kPanel, 1, gemm_task, &task);
  });
  alloc_free(storage);
  alloc_free(x);
  alloc_free(y);
  alloc_free(quantized);
  alloc_free(rounded);
  return seconds;
}

double quantize_seconds(int cols, int n) {
  struct Task {
    float *x;
    QuantizedBlock *out;
    int cols, n;
  } task = {floats((size_t)cols * n), blocks(cols, n), cols, n};
  const auto run = [](void *context, int, int begin, int end) {
    const Task *t = (const Task *)context;
    for (int c = begin; c < end; c++)
      kernels->quantize(t->x + (size_t)c * t->cols, t->cols, t->out + c, (size_t)t->n);
  };
  const double seconds = median_seconds([&](int) { pool_run(pool, n, 1, run, &task); });
  alloc_free(task.x);
  alloc_free(task.out);
  return seconds;
}

double scan_seconds(int heads, int dk, int dv, int n) {
  struct Task {
    float *q, *k, *v, *out, *decay, *beta, *state;
    int heads, dk, dv, n;
  } task = {};
  task.heads = heads;
  task.dk = dk;
  task.dv = dv;
  task.n = n;
  const size_t keys = (size_t)heads * dk, values = (size_t)heads * dv;
  task.q = floats(keys * n);
  task.k = floats(keys * n);
  task.v = floats(values * n);
  task.out = floats(values * n);
  task.decay = floats((size_t)heads * n);
  task.beta = floats((size_t)heads * n);
  task.state = floats(values * dk);
  for (size_t i = 0; i < keys * n; i++) task.k[i] *= 0.05f;
  for (int i = 0; i < heads * n; i++) task.decay[i] = task.beta[i] = 0.9f;
  const int blocks = (dv + kScanColumns - 1) / kScanColumns;
  const auto run = [](void *context, int, int begin, int end) {
    const Task *t = (const Task *)context;
    const int per_head = (t->dv + kScanColumns - 1) / kScanColumns;
    const size_t key = (size_t)t->heads * t->dk, value = (size_t)t->heads * t->dv;
    for (int i = begin, taken; i < end; i += taken) {
      const int head = i / per_head, first = i % per_head, v0 = first * kScanColumns;
      taken = t->n > 1 ? 1 : std::min(end - i, per_head - first);  // as the engine does
      const int width = std::min(taken * kScanColumns, t->dv - v0);
      const float *q = t->q + head * t->dk, *k = t->k + head * t->dk;
      const size_t at = (size_t)head * t->dv + v0;
      float *state = t->state + (size_t)head * t->dk * t->dv + v0;
      if (t->n == 1)
        kernels->delta_step(q, k, t->v + at, t->out + at, t->decay[head], t->beta[head], t->dk,
                            (size_t)t->dv, width, state, nullptr);
      else
        kernels->delta_scan(q, k, key, t->v + at, t->out + at, value, value, t->decay + head,
                            t->beta + head, (size_t)t->heads, t->n, t->dk, (size_t)t->dv, width,
                            state, state, nullptr, 0, 0, nullptr, nullptr);
    }
  };
  const double seconds =
      median_seconds([&](int) { pool_run(pool, heads * blocks, 1, run, &task); });
  for (float *p : {task.q, task.k, task.v, task.out, task.decay, task.beta, task.state})
    alloc_free(p);
  return seconds;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  for (int isa = KSL_ISA_SCALAR; isa <= KSL_ISA_AVX512; isa++) {
    const Kernels *table = kernels_for(isa);
    if (table && (!strcmp(argv[1], "auto") || !strcmp(argv[1], table->name))) kernels = table;
  }
  if (!kernels) {
    fprintf(stderr, "no kernels named %s here\n", argv[1]);
    return 2;
  }
  threads = atoi(argv[2]);
  ksl_error error = {};
  pool = pool_create(threads, 0, &alloc, &error);
  if (!pool) return 1;
  char line[256];
  while (fgets(line, sizeof line, stdin)) {
    char word[32] = "", form[32] = "";
    int a = 0, b = 0, c = 0, d = 0;
    unsigned long long size = 0;
    double result = -1;
    sscanf(line, "%31s", word);
    if (sscanf(line, "read %llu", &size) == 1) {
      result = read_seconds(size);
    } else if (!strcmp(word, "int8") || !strcmp(word, "float")) {
      result = peak(!strcmp(word, "int8"));
    } else if (sscanf(line, "gemm %31s %d %d %d %d", form, &a, &b, &c, &d) == 5) {
      result = gemm_seconds(form, a, b, c, d);
    } else if (sscanf(line, "quantize %d %d", &a, &b) == 2) {
      result = quantize_seconds(a, b);
    } else if (sscanf(line, "scan %d %d %d %d", &a, &b, &c, &d) == 4) {
      result = scan_seconds(a, b, c, d);
    } else if (!strcmp(word, "name") || !strcmp(word, "bf16")) {
      const bool name = !strcmp(word, "name");
      printf("%s\n", name ? kernels->name : bf16_for(kernels) ? "yes" : "no");
      fflush(stdout);
      continue;
    }
    printf("%.9g\n", result);
    fflush(stdout);
  }
  pool_destroy(pool);
  return 0;
}
