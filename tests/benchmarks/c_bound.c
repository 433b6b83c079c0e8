/* Lower bounds of the rows: the driver calls of a program without Python, in a loop.

   The functions are looked up at run time, so neither CUDA's headers nor its libraries are needed to build this file.
   Every function returns seconds, or -1.0 if a driver call failed. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                        void **);
typedef int (*record_t)(void *, void *);
typedef int (*query_t)(void *);
typedef int (*wait_t)(void *, void *, unsigned);

static launch_t launch;
static record_t record;
static query_t query, synchronize;
static wait_t wait_event;

int bound_open(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) return 0;
    launch = (launch_t)dlsym(library, "cuLaunchKernel");
    record = (record_t)dlsym(library, "cuEventRecord");
    query = (query_t)dlsym(library, "cuEventQuery");
    synchronize = (query_t)dlsym(library, "cuStreamSynchronize");
    wait_event = (wait_t)dlsym(library, "cuStreamWaitEvent");
    return launch && record && query && synchronize && wait_event;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int start(void *function, void *stream, void **arguments) {
    return launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL);
}

/* `count` launches of an empty kernel, each with an event after it. Nothing waits. */
double bound_launch(void *function, void *stream, void *event, int count) {
    double begin = now();
    for (int number = 0; number < count; number++)
        if (start(function, stream, NULL) || record(event, stream)) return -1.0;
    return now() - begin;
}

/* `count` times: one launch on each of `streams`, `in_flight` deep, each with its event; then query until all are done.
   A stream is asked for its newest event. `events` has streams * in_flight entries. */
double bound_streams(void *function, void **stream, void **event, int streams, int in_flight, int count) {
    double begin = now();
    for (int round = 0; round < count; round++) {
        for (int one = 0; one < streams; one++)
            for (int number = 0; number < in_flight; number++)
                if (start(function, stream[one], NULL) || record(event[one * in_flight + number], stream[one]))
                    return -1.0;
        for (int one = 0; one < streams; one++) {
            int state;
            while ((state = query(event[(one + 1) * in_flight - 1])) == 600) /* CUDA_ERROR_NOT_READY */
                ;
            if (state) return -1.0;
        }
    }
    return now() - begin;
}

/* `count` items of three stages, each a kernel of `nanoseconds` on a stream of its own, with `depth` slots.
   `event` has 3 * depth entries. */
double bound_stages(void *function, void **stream, void **event, int depth, int count, unsigned long long nanoseconds) {
    void *arguments[] = {&nanoseconds};
    double begin = now();
    for (int item = 0; item < count; item++) {
        void **mine = event + 3 * (item % depth);
        if (item >= depth && wait_event(stream[0], mine[2], 0)) return -1.0;
        for (int stage = 0; stage < 3; stage++) {
            if (stage && wait_event(stream[stage], mine[stage - 1], 0)) return -1.0;
            if (start(function, stream[stage], arguments) || record(mine[stage], stream[stage])) return -1.0;
        }
    }
    if (synchronize(stream[2])) return -1.0;
    return now() - begin;
}
