// The engine: a submit ring, one thread that runs waves in order, a completion ring and a
// descriptor. Backend-neutral; abi.cc exports it with the CPU backend.
//
// Threads. The caller's thread owns the submit side and the head of the completion ring; the engine
// thread owns its tail. Counters are atomics that any thread may read.
#pragma once
#include "abi.h"
#include "backend.h"

namespace ksl {

int engine_open(const BackendOps *ops, const ksl_config *config, const ksl_tensor *tensors, int n,
                ksl_engine **out, ksl_error *error);
int engine_info(ksl_engine *engine, ksl_info *info);
int engine_event_fd(ksl_engine *engine);
int engine_submit(ksl_engine *engine, const ksl_wave *wave, ksl_error *error);
int engine_poll(ksl_engine *engine, ksl_done *out, int cap);
int engine_progress(ksl_engine *engine, ksl_progress *progress);
int engine_last_error(ksl_engine *engine, ksl_error *error);
int engine_close(ksl_engine *engine, int deadline_ms);

}  // namespace ksl
